"""Backward passes that are deferred, packed, or fail: accepted options have their effect, and failed gradients are not
used."""

import gc
import itertools
from weakref import ref

import numpy as np
import pytest
from loops import looped
from networks import failing, gradients_of, on_grid, spread, weights_of
from samples import to_numpy

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import gathered, optim
from pmm3d.nn.data_parallel import GradientSums

pytestmark = pytest.mark.deadline(240)
four = pytest.mark.parallel(4)
RANDOM = np.random.default_rng(0)
X, G = RANDOM.random((8, 6)), RANDOM.random((8, 4))
FIRST = nn.Overlap(keep_bytes=0)


def leaf(grid, whole):
    return nn.Tensor(spread(grid, whole, batch_layout("y")), requires_grad=True)


def layers(grid, *sizes):
    """Linear layers in sequence, without biases."""
    made = [
        nn.Linear(grid, *size, bias=False, seed=seed, cols="yx"[seed % 2], dtype="float64")
        for seed, size in enumerate(itertools.pairwise(sizes))
    ]
    return nn.Sequential(grid, *made)


# Deferred weight gradients


@four
@on_grid((2, 1, 1), 2)
def test_queues_that_were_not_drained_make_a_step_refused(grid, fails):
    """Until all of them are drained, or the gradients are cleared."""
    net = layers(grid, 6, 4)
    opt, before = optim.SGD(net.parameters(), lr=1.0), net.layers[0].weight.gather()
    for number, drained in enumerate((True, False)):
        queues = []
        for _ in range(2):
            with nn.defer_weights(grid) as queue:
                net(spread(grid, X)).backward(spread(grid, G, Layout()))
            queues.append(queue)
        queues[0].drain()
        fails(Pmm3dError, "queues of defer_weights must be drained", opt.step)
        assert opt.steps == number
        queues[1].drain() if drained else opt.zero_grad()
        opt.step()
        np.testing.assert_allclose(net.layers[0].weight.gather(), before - 2 * X.T @ G)


# Packed arrays


@four
@on_grid((2, 1, 2))
def test_what_was_packed_is_unpacked_as_it_was_packed(grid):
    """The forward pass runs inside the context, the backward pass outside."""
    net = layers(grid, 6, 4)
    with nn.Tape.of(grid).set(pack=lambda name, array: (array * 2,), unpack=lambda kept: kept[0] / 2):
        out = net(spread(grid, X))
    out.backward(spread(grid, G, Layout()))
    np.testing.assert_allclose(gradients_of(net)["0.weight"], X.T @ G)


# Rules that return too few or too many parts


@four
@on_grid((2, 1, 2))
def test_a_rule_that_does_not_return_a_part_for_each_parent(grid, fails):
    for returned in (lambda g: (), lambda g: (g, g), lambda g: g, lambda g: None):
        x = leaf(grid, X)
        out = x.from_op(x.shard, (x,), returned)
        fails(Pmm3dError, "for 1 parents", lambda: out.backward(spread(grid, X, Layout())))


# Passes that fail


@four
@on_grid((1, 1, 2), 2)
def test_a_pass_that_fails_in_its_last_sums_leaves_nothing_to_be_used(grid, fails, monkeypatch):
    """The sum of the vectors over z fails. Gradients that wait for their sum over data are not used."""
    net, y = nn.Linear(grid, 6, 4, dtype="float64"), spread(grid, G, Layout())
    opt, whole = optim.SGD(net.parameters(), lr=1.0), GradientSums._start

    def start(self, axis, bucket, phase, *options):
        if phase == "reduce vectors":
            raise ZeroDivisionError
        return whole(self, axis, bucket, phase, *options)

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(GradientSums, "_start", start)
        net(spread(grid, X)).backward(y)
    fails(Pmm3dError, "ended with an error", lambda: net(spread(grid, X)).backward(y))
    assert net.bias.grad is None
    fails(Pmm3dError, "zero_grad", opt.step)
    opt.zero_grad()
    net(spread(grid, X)).backward(y)
    np.testing.assert_allclose(gradients_of(net)["weight"], X.T @ G)
    np.testing.assert_allclose(gradients_of(net)["bias"], G.sum(0, keepdims=True))


@four
@on_grid("ddp")
def test_a_pass_that_fails_before_its_first_gradient_makes_a_step_refused(grid, fails):
    """Otherwise nothing would be trained, without an error."""
    net = layers(grid, 6, 4)
    opt, out = optim.SGD(net.parameters(), lr=1.0), net(spread(grid, X))
    with pytest.raises(ZeroDivisionError):
        failing(out).backward(spread(grid, G, Layout()))
    fails(Pmm3dError, "zero_grad", opt.step)


@four
@looped("kind", ["backward", "no_grad"])
@on_grid("fsdp")
def test_a_pass_that_failed_leaves_no_weight_that_was_gathered_ahead(grid, kind):
    """A later write to a weight is used."""
    nn.Tape.of(grid).parallel.overlap = FIRST
    net, y = layers(grid, 6, 6, 6, 4), spread(grid, G, Layout())
    for _ in range(2):
        net(leaf(grid, X)).backward(y)
    first, second, third = net.layers
    with pytest.raises(ZeroDivisionError):
        if kind == "no_grad":
            with nn.no_grad(grid):
                first(spread(grid, X))
                raise ZeroDivisionError
        third(failing(second(first(leaf(grid, X))))).backward(y)
    wanted = X
    for layer in net.layers:
        layer.weight.local[...] *= 2
        wanted = wanted @ to_numpy(layer.weight.gather())
    np.testing.assert_allclose(net(spread(grid, X)).gather(), wanted)


# The start of a pass


@four
@on_grid((2, 1, 1), 2)
def test_a_gradient_to_begin_with_that_is_no_matrix_is_refused_with_a_remedy(grid, comm, fails):
    """On all ranks, also if the gradient of one rank is no matrix."""
    net = layers(grid, 6, 4)
    for gradient in (G, 1.0, [[1.0]]):
        out = net(spread(grid, X))
        fails(Pmm3dError, "DistMatrix.from_global", lambda: out.backward(gradient))
        out.backward(spread(grid, G, Layout()))
        np.testing.assert_allclose(gradients_of(net)["0.weight"], X.T @ G)
        net.layers[0].weight.grad = None
    out = net(spread(grid, X))
    with pytest.raises(Pmm3dError):
        out.backward(G if comm.rank == 1 else spread(grid, G, Layout()))


# Weights that change during a pass


def write(weight):
    weight.local[...] *= 2


def write_by_redistribute(weight):
    one = spread(weight.grid, np.eye(4), Layout.B, weight.library.kind)
    (weight.value @ one).redistribute(weight.layout, out=weight._stored)


@pytest.mark.parallel([2])
@looped(
    "writing, library, debug",
    [(write, "torch", False), (write, "numpy", True), (write_by_redistribute, "numpy", False)],
)
@looped("shape", ["ddp", "fsdp"])
def test_a_weight_that_is_written_to_before_the_backward_pass_is_told_of(comm, fails, writing, library, debug, shape):
    """On every rank of every grid, also if only one rank wrote. Writes by numpy are detected only with debug."""
    with Grid(comm, shape, debug=debug) as grid:
        net = nn.Linear(grid, 6, 4, bias=False, dtype="float64", library=library)
        x, y = (spread(grid, whole, Layout(), library) for whole in (X, G))
        out = net(x)
        writing(net.weight)
        fails(Pmm3dError, "a parameter was changed", lambda: out.backward(y))
        assert net.weight.grad is None
        out = net(x)
        out.backward(y)
        np.testing.assert_allclose(gradients_of(net)["weight"], X.T @ G)
        if writing is write:  # the other one is collective
            out = net(x)
            if grid.rank == 1:
                write(net.weight)
            fails(Pmm3dError, "on 1 of 2 ranks.*a parameter was changed", lambda: out.backward(y))


@pytest.mark.parallel([2])
@looped("library, debug", [("torch", False), ("numpy", True)])
@looped("saves", ["input", "recompute", "factor"])
def test_a_saved_array_that_is_overwritten_before_the_backward_pass_is_told_of(comm, fails, library, debug, saves):
    """On every rank, also if one rank wrote: the input of a layer, a factor, and what a Recompute keeps."""
    with Grid(comm, "ddp", library=library, debug=debug) as grid:
        net = nn.Linear(grid, 6, 6, bias=False, dtype="float64")
        again, whole = nn.Recompute(net), lambda: spread(grid, X, batch_layout(), library)
        of = {"input": net, "recompute": again, "factor": lambda x: nn.multiply(net(whole()), x)}
        for writers in ((0, 1), (1,)):
            x, y = whole(), whole()
            out = of[saves](x)
            if grid.rank in writers:
                x.local[...] = 5
            fails(Pmm3dError, "was overwritten", lambda: out.backward(y))
            net.weight.grad = None
        of[saves](y).backward(y)


@pytest.mark.parallel([2])
@looped("recompute", [False, True])
@on_grid("fsdp")
def test_a_frozen_weight_that_is_written_to_before_the_backward_pass_is_told_of(grid, fails, recompute):
    first, net = (nn.Linear(grid, 6, 6, bias=False, dtype="float64") for _ in range(2))
    part = nn.Recompute(net) if recompute else net
    net.requires_grad_(False)
    x = spread(grid, X, Layout())
    out = part(first(x))
    net.weight.assign(net.weight.value * 2)
    fails(Pmm3dError, "a parameter was changed", lambda: out.backward(x))
    part(first(x)).backward(x)
    assert first.weight.grad is not None and net.weight.grad is None


# Freed weights


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_garbage_does_not_decide_which_weight_is_gathered_ahead(grid):
    """On one rank, a replaced head remains in a reference cycle, and is freed after some passes."""
    nn.Tape.of(grid).parallel.overlap = FIRST
    trunk, y = layers(grid, 6, 6), spread(grid, G, Layout())
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            head = nn.Linear(grid, 6, 4, bias=False, seed=seed, cols="x", dtype="float64")
            for _ in range(2):
                out = head(trunk(leaf(grid, X)))
                out.backward(y)
            expected = X @ weights_of(trunk)["0.weight"] @ weights_of(head)["weight"]
            np.testing.assert_allclose(to_numpy(out.gather()), expected)
            gone = ref(head.weight)
            if grid.rank == 0:
                head.cycle = head
            del head, out
    finally:
        gc.enable()
    gc.collect()
    for _ in range(gathered.IDLE_PAUSES):
        with nn.no_grad(grid):
            trunk(spread(grid, X))
    assert gone() is None
