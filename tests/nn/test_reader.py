"""Programs of a hostile reader: accepted code gives the right result, and other code is refused on every rank."""

from weakref import ref

import numpy as np
import pytest
from loops import given, looped
from networks import INPUT, assert_replicas_agree, spread

from pmm3d import DistMatrix, DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

pytestmark = [pytest.mark.parallel([4]), pytest.mark.deadline(240)]
two = pytest.mark.parallel([2])
RANDOM = np.random.default_rng(0)
X, W, SQUARE, G = (RANDOM.random(shape) for shape in ((8, 6), (6, 4), (6, 6), (8, 4)))
WEIGHT = Layout(("y", "z"), "x")


@pytest.fixture
def grid(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        yield grid


def rows_of(grid, rows, columns, layout=INPUT):
    return DistMatrix.random(grid, (rows, columns), layout=layout)


def leaf(grid, whole, layout=INPUT, **options):
    return nn.Tensor(spread(grid, whole, layout, **options), requires_grad=True)


def right_or_refused(compute, wanted):
    """Assert that compute() equals numpy's result, or is refused on every rank."""
    try:
        got = compute()
    except (LayoutError, DTypeError):
        return
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@two
@looped("rows", (1, 2, 3))
def test_sharded_activations_of_fewer_rows_than_ranks(comm, rows):
    with Grid(comm, (1, 2, 1), timeout=30) as grid:
        net = nn.MLP(grid, [3, 4, 2], activations="sharded", dtype="float64")
        out = net(nn.Tensor(rows_of(grid, rows, 3), requires_grad=True))
        out.backward(rows_of(grid, rows, 2, Layout()))
        assert out.shape == (rows, 2)


@two
def test_one_rank_alone_looks_at_its_shard_of_a_weight(comm):
    with Grid(comm, (1, 1, 2), timeout=30) as grid:
        net = nn.Linear(grid, 6, 4, dtype="float64")
        x, y = rows_of(grid, 8, 6), rows_of(grid, 8, 4)
        for _ in range(3):
            if grid.rank == 0:
                net.weight.local.std()
            nn.mse(net(x), y).backward()
        assert np.isfinite(net.weight.grad.gather()).all()


@looped("which", ("input", "gradient", "rule", "bias"))
def test_types_that_differ_are_refused_or_right(grid, which):
    """Otherwise the BLAS would read an array as the result's type, beyond its end."""
    type_of = lambda name: "float32" if name == which else "float64"

    def compute():
        weight = nn.Parameter(spread(grid, W, WEIGHT, dtype="float64"))
        bias = nn.Parameter(spread(grid, W[:1], Layout((), "x"), dtype=type_of("bias")))
        x = leaf(grid, X, dtype=type_of("input"))
        y = nn.linear(x, weight, bias)
        if which == "rule":
            y = y.from_op(y.shard, (y,), lambda g: (y.library.astype(g, "float32"),))
        y.backward(spread(grid, G, Layout(), dtype=type_of("gradient")))
        return np.concatenate([y.gather(), weight.grad.gather(), x.grad.gather().reshape(-1, 4), bias.grad.gather()])

    right_or_refused(compute, np.concatenate([X @ W + W[:1], X.T @ G, (G @ W.T).reshape(-1, 4), G.sum(0)[None]]))


def test_a_weight_that_moves_after_it_was_used(grid):
    layer = nn.Linear(grid, 6, 6, bias=False, dtype="float64")
    layer.weight.assign(spread(grid, SQUARE, Layout()))
    x = leaf(grid, X)
    layer(nn.linear(x, layer.weight)).backward(spread(grid, X, Layout()))
    np.testing.assert_allclose(x.grad.gather(), X @ SQUARE.T @ SQUARE.T)


def test_gradients_of_two_tensors_share_no_memory(grid):
    a, b, start = leaf(grid, X), leaf(grid, X), spread(grid, X)
    (a + b).backward(start)
    a.grad.local[...] = 7
    np.testing.assert_array_equal(b.grad.gather(), X)
    np.testing.assert_array_equal(start.gather(), X)


@looped("axis", ("x", "y"))
def test_a_bias_in_another_layout_than_the_output(grid, axis):
    weight = nn.Parameter(spread(grid, W, WEIGHT))
    bias = nn.Parameter(spread(grid, W[:1], Layout((), axis)))
    right_or_refused(lambda: nn.linear(nn.Tensor(spread(grid, X)), weight, bias).gather(), X @ W + W[:1])


@looped("of_gain, of_bias", [(("x", "y"), ("x", "y")), (("x",), ("y",)), ((), ())])
def test_vectors_of_a_layer_norm_in_any_layout(grid, of_gain, of_bias):
    rows, vector = np.random.default_rng(1).random((8, 8)), np.arange(8.0)[None]
    gain, bias = (nn.Parameter(spread(grid, vector, Layout((), axes))) for axes in (of_gain, of_bias))
    normal = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    found = lambda: nn.layer_norm(nn.Tensor(spread(grid, rows)), gain, bias).gather()
    right_or_refused(found, normal * vector + vector)


def test_cross_entropy_of_classes_over_two_axes(grid):
    labels = np.array([[1], [3], [5], [7], [0], [2], [4], [6]])
    logits = np.linspace(0, 3, 64).reshape(8, 8) ** 2 % 1
    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(8), labels[:, 0]])
    out = nn.Tensor(spread(grid, logits, Layout((), ("x", "y"))))
    right_or_refused(lambda: nn.cross_entropy(out, spread(grid, labels, Layout())).item(), wanted)


@looped("layout", [Layout("z", "x", units=(4, 1)), Layout(("data", "z"), "x")])
def test_zero_1_of_parameters_in_units_or_split_over_data(comm, layout):
    whole = np.arange(72.0).reshape(12, 6)
    with Grid(comm, (1, 1, 2), 2) as grid:
        parameter = nn.Parameter(spread(grid, whole, layout))
        opt = optim.SGD([parameter], lr=1.0, momentum=0.5, shard_over_data=True)
        nn.scale(parameter, 1.0).backward(spread(grid, whole, Layout()))
        opt.step()
        assert not parameter.gather().any()


def test_one_optimizer_clips_and_another_steps(comm):
    with Grid(comm, "ddp") as grid:
        parameter = nn.Parameter(spread(grid, SQUARE, Layout("z", "x")))
        shards, steps = optim.SGD([parameter], lr=1.0, shard_over_data=True), optim.SGD([parameter], lr=1.0)
        nn.scale(parameter, 1.0).backward(spread(grid, SQUARE, Layout()))
        shards.clip(0.5)
        steps.step()
        assert_replicas_agree(grid, {"parameter": parameter._stored})


def test_recompute_drops_as_in_the_forward_pass_whatever_is_set_since(grid):
    found = []
    for wrapped in (lambda module: module, nn.Recompute):
        net, x = wrapped(nn.Sequential(grid, nn.Dropout(grid, 0.5, seed=0))), leaf(grid, X)
        out = net(x)
        net.train(False)
        out.backward(spread(grid, X))
        found.append(x.grad.gather())
    np.testing.assert_array_equal(*found)


def test_a_backward_pass_that_failed_leaves_the_random_state(grid):
    fails = []

    def failing(x):
        return 1 / 0 if fails else x

    net = nn.Recompute(nn.Sequential(grid, nn.Dropout(grid, 0.5), failing))
    out = net(leaf(grid, X))
    net(leaf(grid, X))
    fails.append(True)
    with pytest.raises(ZeroDivisionError):
        out.backward(spread(grid, X))
    assert net.random_state() == {"0": 2}


def test_a_target_that_needs_a_gradient_gets_it(grid):
    a, b = leaf(grid, X), leaf(grid, 2 * X)
    nn.mse(a, b).backward()
    np.testing.assert_allclose(b.grad.gather(), 2 * X / X.size)


def test_a_gradient_left_by_no_sync_goes_with_its_network(comm):
    with Grid(comm, (1, 1, 2), 2) as grid:
        net = nn.Linear(grid, 6, 4, dtype="float64")
        with nn.no_sync(grid):
            nn.mse(net(spread(grid, X)), spread(grid, G)).backward()
        net.weight.grad = None
        held = ref(net.weight.grad_buffer)
        del net
        assert held() is None


def test_what_cannot_be_is_refused_on_every_rank(comm, grid, fails):
    """A bias of another width, tensors of two grids, and a parameter of partial sums."""
    weight, sums = nn.Parameter(spread(grid, W, WEIGHT)), Layout(sums=("x", "y"))
    narrow = nn.Parameter(rows_of(grid, 1, 1, Layout((), "x")))
    with Grid(comm, (1, 2, 2)) as other:
        for text, refused in (
            ("bias", lambda: nn.linear(nn.Tensor(rows_of(grid, 8, 6)), weight, narrow)),
            ("two Grids", lambda: nn.add(leaf(grid, X, Layout((), "y")), leaf(other, X, Layout((), "y")))),
            ("two Grids", lambda: nn.linear(leaf(other, X), weight)),
            ("must not have partial sums", lambda: nn.Parameter(spread(grid, X, sums))),
        ):
            with given(text=text):
                fails(Pmm3dError, text, refused)
