"""Networks on device arrays: the number of calls does not depend on the size of arrays, and the host does not wait."""

from contextlib import nullcontext
from math import prod

import numpy as np
import pytest
import standin
import standin_arrays
import standin_far  # noqa: F401, so that library_named knows it
import standin_streams
from loops import looped
from networks import bits, on_grid, ordinary, weights_of
from samples import LIBRARIES, to_library, to_numpy

from pmm3d import DistMatrix, Grid, GridError, Pmm3dError, nn
from pmm3d.arrays import library_named
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.elementwise import GELU, RELU, SIGMOID, SILU, TANH
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import step_agreement, train_step

pytestmark = pytest.mark.deadline(240)

ROWS, CLASSES = 12, 3
STEPS, FIRST = 8, 5
"""Number of steps, and of those before the first one that is replayed."""
of_one = on_grid("1x1x1")


@pytest.fixture
def calls(monkeypatch):
    """Calls of the stand-in's streams so far."""
    made, add = [], standin_streams.Queue.add
    monkeypatch.setattr(
        standin_streams.Queue,
        "add",
        lambda queue, work, *rest, **more: (made.append(work), add(queue, work, *rest, **more))[1],
    )
    return made


def batch(grid, library, rows=ROWS, features=7):
    """Samples and labels."""
    values = np.random.default_rng(rows).standard_normal((rows, features)).astype("float32")
    labels = np.arange(rows)[:, None] % CLASSES
    return (
        DistMatrix.from_global(grid, to_library(values, library), layout=batch_layout()),
        DistMatrix.from_global(grid, to_library(labels, library), layout=batch_layout(None)),
    )


def network(grid, library, width=9, features=7):
    return nn.MLP(grid, [features, width, width, CLASSES], nn.gelu, norm=True, dropout=0.2, seed=3, library=library)


@pytest.mark.parallel([1])
@of_one
def test_calls_of_a_step_do_not_grow_with_the_arrays(grid, calls):
    """From a few hundred elements to several of the slices that the host would use."""
    found = []
    for rows, width in ((32, 8), (2048, 96)):
        (x, y), net = batch(grid, "standin", rows), network(grid, "standin", width)
        optimizer = optim.AdamW(net.parameters())
        for _ in range(2):
            del calls[:]
            nn.cross_entropy(net(x), y).backward()
            optimizer.gradient_norm()
            optimizer.step()
        found.append(len([work for work in calls if "__del__" not in getattr(work, "__qualname__", "")]))
    assert rows * width > 2 * library_named("numpy").slice_elements and found[0] == found[1]


@pytest.mark.parallel([1])
@of_one
def test_a_loss_brings_nothing_to_the_host(grid):
    (x, labels), net = batch(grid, "standin"), network(grid, "standin")
    optimizer, waits = optim.AdamW(net.parameters()), []
    y = DistMatrix.random(grid, (ROWS, CLASSES), dtype="float32", layout=batch_layout(), library="standin")
    for loss, target in ((nn.cross_entropy, labels), (nn.cross_entropy, labels), (nn.mse, y), (nn.mae, y)):
        before = standin.Stream.waits
        loss(net(x), target).backward()
        waits.append(standin.Stream.waits - before)
        before = standin.Stream.waits
        assert optimizer._local_norm_squared() > 0 and standin.Stream.waits == before + 1
        optimizer.step()
    assert waits == [1, 0, 0, 0]  # new labels are checked once


@pytest.mark.parallel([1])
@of_one
def test_the_losses_of_a_step_of_several_batches_are_read_at_its_end(grid):
    found, waits = [], []
    for library in ("numpy", "standin"):
        (x, y), net = batch(grid, library), network(grid, library)
        y.labels_below, before = CLASSES, standin.Stream.waits

        def agree(loss, square, before=before):
            waits.append(standin.Stream.waits - before)
            return step_agreement(grid, loss, square)

        optimizer = optim.SGD(net.parameters(), lr=0.1)
        found.append(train_step(net, optimizer, nn.cross_entropy, [(x, y)] * 3, agree=agree))
    assert waits == [0, 4]  # three losses and a norm
    assert np.allclose(*found, rtol=1e-5)


def trained(grid, library, steps, rows=ROWS, width=9, each=lambda: None, **options):
    """Losses and norms, bits of the weights, `Replays`. each: function that is called after each step."""
    net, told = network(grid, library, width), []
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, **options)
    for step in range(steps):
        x, y = batch(grid, library, rows)
        x.local[...] *= 1 + step
        told.append(train_step(net, optimizer, nn.cross_entropy, [(x, y)], 1.0))
        each()
    return told, bits(weights_of(net)), Replays.of(net)


@pytest.mark.parallel([2], thorough=[4])
@looped(
    "shape, library, transport, sharded",
    [
        ((1, 1, 2), "standin_far", "staged", False),
        ((2, 1, 1), "standin", "direct", True),
        ((1, 1, 1), "standin", "direct", "gradients"),
    ],
)
def test_replayed_steps_have_the_bits_of_ordinary_steps(comm, shape, library, transport, sharded):
    """Messages are sent from device memory, or through memory of the host. Ranks may hold parts of the optimizer's
    states, and of gradients."""
    found, data = [], comm.size // prod(shape)
    for context in (ordinary(), nullcontext()):
        with context, Grid(comm, shape, data, device_transport=transport) as grid:
            *results, replays = trained(grid, library, STEPS, shard_over_data=sharded)
            found.append(results)
    assert found[0] == found[1] and replays.replayed == STEPS - FIRST, replays.problem


@pytest.mark.parallel([1])
@of_one
def test_a_replayed_step_waits_no_more_often_for_the_device(grid, monkeypatch):
    """It waits for the labels, the loss and the norm. Arrays of the program share memory."""
    counts, asked, allocate = [], [0, 0], standin_arrays.Memory.__init__

    def counted(memory, nbytes):
        asked[0] += nbytes
        allocate(memory, nbytes)

    def note():
        counts.append((standin.Stream.waits - asked[1], asked[0]))
        asked[:] = 0, standin.Stream.waits

    monkeypatch.setattr(standin_arrays.Memory, "__init__", counted)
    note()
    _, _, replays = trained(grid, "standin", STEPS, 512, 64, note)
    (usual_waits, usual_bytes), (waits, _) = counts[2], counts[-1]
    arena = replays._all[0].program.arena
    assert replays.replayed == STEPS - FIRST and usual_waits == waits == 3
    assert 0 < sum(each.nbytes for each in arena.buffers) < 0.3 * usual_bytes


@pytest.mark.parallel([1])
@of_one
def test_steps_on_another_stream_are_recorded_again(grid):
    """Work of two streams has no order, so programs of two streams do not share memory."""
    (x, y), net = batch(grid, "standin", 512), network(grid, "standin", 64)
    optimizer = optim.AdamW(net.parameters())
    standin.get_current_stream().synchronize()
    for number, stream in enumerate([standin.Stream(), standin.Stream()]):
        with stream:
            for _ in range(STEPS):
                train_step(net, optimizer, nn.cross_entropy, [(x, y)])
            stream.synchronize()
        [arena] = {each.program.arena for each in Replays.of(net)._all if each.program}
        assert Replays.of(net).replayed >= (1 + number) * (STEPS - FIRST)
        assert len({memory.key for memory, _ in arena.pools}) == 1 + number


@pytest.mark.parallel([4], thorough=[1, 2])
def test_labels_are_compared_where_the_logits_are(grid, fails):
    """Also if there are more ranks than classes."""
    whole, found = np.random.default_rng(1).standard_normal((ROWS, CLASSES)), []
    for library in ("numpy", "standin"):
        x = DistMatrix.from_global(grid, to_library(whole, library), layout=Layout("z", ("y", "x")))
        x, y = nn.Tensor(x, requires_grad=True), batch(grid, library)[1]
        for labels in (y, y, batch(grid, "numpy")[1]):
            loss = nn.cross_entropy(x, labels)
            loss.backward()
        found.append((loss.item(), to_numpy(x.grad.gather(), library)))
        y.local[:1] = CLASSES
        if library == "numpy":
            fails(Pmm3dError, "has the label 3; the network has 3 outputs", lambda: nn.cross_entropy(x, y))
    assert nn.cross_entropy(x, y).item() == np.inf  # labels on a device are checked once
    below = DistMatrix.from_global(grid, to_library(np.full((ROWS, 1), -1), "standin"), layout=batch_layout(None))
    fails(Pmm3dError, "row 0 of the batch has the label -1", lambda: nn.cross_entropy(x, below))
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1])


@looped("function", [RELU, TANH, SIGMOID, SILU, GELU])
def test_kernels_of_the_libraries_are_the_functions(function):
    values, gradient, found = np.linspace(-4, 4, 101), np.linspace(1, 2, 101), []
    for library in LIBRARIES:
        face, x, g = library_named(library), to_library(values, library), to_library(gradient, library)
        value = function.value.compiled(face, "float64", x)
        assert function.value.compiled(face, "float64", x) is value  # a fused kernel is made once
        out = value(x)
        kept = out if function.of_output else x
        slope = function.slope.compiled(face, "float64", g, kept)(g, kept)
        found.append((to_numpy(out, library), to_numpy(slope, library)))
    for other in found[1:]:
        assert np.allclose(found[0], other, rtol=0, atol=1e-14)


@pytest.mark.parallel([1])
@looped("dtype", ["float16", "float32"])
@of_one
def test_a_loss_is_the_hosts(grid, dtype):
    """Its slope has equal bits."""
    drawn = lambda dtype, seed: DistMatrix.random(grid, (50, 40), dtype=dtype, seed=seed, library="standin")
    x, y = drawn(dtype, 1), drawn("float32", 2)
    host, target = (DistMatrix.from_global(grid, to_numpy(each.local, "standin")) for each in (x, y))
    x, host = (nn.Tensor(each, requires_grad=True) for each in (x, host))
    loss, wanted = nn.mse(x, y), nn.mse(host, target)
    loss.backward()
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-6
    assert np.array_equal(to_numpy(x.grad.local, "standin"), host.grad.local)


@pytest.mark.parallel([2], thorough=[1])
def test_matrices_on_two_devices_are_refused(some_grid, fails):
    made = [DistMatrix.empty(some_grid, (4, 4), layout=Layout(), library="standin") for _ in range(2)]
    with standin.Device(1):
        made[1].local = to_library(np.ones((4, 4)), "standin")
    (one, other), text = map(nn.Tensor, made), "on one device; here they are on the devices 0, 1. Make them on one"
    fails(GridError, text, lambda: one + other)
    fails(GridError, text, lambda: nn.linear(one, other))
    fails(GridError, "an array of device 1 is used while device 0 is current", lambda: made[0] @ made[1])
