"""Programs of a hostile reader: accepted code gives the right result, and other code is refused on every rank."""

from weakref import ref

import numpy as np
import pytest
from loops import given
from networks import assert_replicas_agree, spread
from samples import to_numpy

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim

pytestmark = pytest.mark.deadline(240)
four = pytest.mark.parallel(4)
INPUT = batch_layout("y")
RANDOM = np.random.default_rng(0)
X, W, SQUARE, G = (RANDOM.random(shape) for shape in ((8, 6), (6, 4), (6, 6), (8, 4)))


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


two = pytest.mark.parallel([2])


@two
def test_sharded_activations_of_fewer_rows_than_ranks(comm):
    for rows in (1, 2, 3):
        with given(rows=rows), Grid(comm, (1, 2, 1), timeout=30) as grid:
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


@four
def test_a_bias_of_another_width_is_refused_on_every_rank(comm):
    with Grid(comm, (2, 2, 1), timeout=30) as grid:
        weight = nn.Parameter(rows_of(grid, 6, 4, Layout(("y", "z"), "x")))
        bias = nn.Parameter(rows_of(grid, 1, 1, Layout((), "x")))
        with pytest.raises(Pmm3dError):
            nn.linear(nn.Tensor(rows_of(grid, 8, 6)), weight, bias)


@four
def test_ranks_that_use_different_layers_are_told_before_the_first_sum_of_a_backward_pass(comm):
    with Grid(comm, (2, 1, 1), data=2, timeout=30) as grid:
        a, b = (nn.Linear(grid, 6, 4, dtype="float64", seed=seed) for seed in (1, 2))
        x = nn.Tensor(rows_of(grid, 8, 6), requires_grad=True)
        out = a(x) + b(x) if grid.rank == 0 else a(x)
        with pytest.raises(DisagreementError):
            out.backward(rows_of(grid, 8, 4, out.layout))


@four
def test_types_that_differ_are_refused_or_right(comm):
    """Otherwise the BLAS would read an array as the result's type, beyond its end."""
    for which in ["input", "gradient", "rule", "bias"]:
        with given(which=which):
            types = {name: "float32" if name == which else "float64" for name in ("input", "gradient", "rule", "bias")}
            with Grid(comm, (2, 2, 1)) as grid:

                def compute():
                    weight = nn.Parameter(spread(grid, W, Layout(("y", "z"), "x"), dtype="float64"))
                    bias = nn.Parameter(spread(grid, W[:1], Layout((), "x"), dtype=types["bias"]))
                    x = leaf(grid, X, dtype=types["input"])
                    y = nn.linear(x, weight, bias)
                    if which == "rule":
                        y = y.from_op(y.shard, (y,), lambda g: (y.library.astype(g, "float32"),))
                    y.backward(spread(grid, G, Layout(), dtype=types["gradient"]))
                    return np.concatenate(
                        [y.gather(), weight.grad.gather(), x.grad.gather().reshape(-1, 4), bias.grad.gather()]
                    )

                right_or_refused(
                    compute, np.concatenate([X @ W + W[:1], X.T @ G, (G @ W.T).reshape(-1, 4), G.sum(0)[None]])
                )


@four
def test_an_array_that_was_written_to_counts_in_the_next_forward_pass(comm):
    with Grid(comm, (1, 1, 2), 2) as grid:
        net = nn.Linear(grid, 6, 4, bias=False, dtype="float64")
        before = net(spread(grid, X)).gather()
        net.weight.local[...] *= 2
        np.testing.assert_array_equal(net(spread(grid, X)).gather(), 2 * before)


@four
def test_weights_changed_between_a_forward_pass_and_its_backward_pass(comm):
    """The gradient is that of the forward pass, or the backward pass is refused."""
    with Grid(comm, (2, 2, 1)) as grid:
        net = nn.Linear(grid, 6, 4, bias=False, dtype="float64")
        x, before, step = leaf(grid, X), to_numpy(net.weight.gather()), optim.SGD(net.parameters(), lr=1.0)
        out = net(x)
        net(spread(grid, X)).backward(spread(grid, G, Layout()))
        step.step()
        try:
            out.backward(spread(grid, G, Layout()))
        except Pmm3dError:
            return
        np.testing.assert_allclose(x.grad.gather(), G @ before.T)


@four
def test_a_weight_that_moves_after_it_was_used(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        layer = nn.Linear(grid, 6, 6, bias=False, dtype="float64")
        layer.weight.assign(spread(grid, SQUARE, Layout()))
        x = leaf(grid, X)
        try:
            layer(nn.linear(x, layer.weight)).backward(spread(grid, X, Layout()))
        except Pmm3dError:
            return
        np.testing.assert_allclose(x.grad.gather(), X @ SQUARE.T @ SQUARE.T)


@four
def test_weight_products_drained_while_others_are_still_deferred(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        weight = nn.Parameter(spread(grid, W, Layout(("y", "z"), "x")))
        with nn.defer_weights(grid) as queue:
            nn.linear(leaf(grid, X), weight).backward(spread(grid, G, Layout()))
            queue.drain()
            assert len(queue) == 0 and weight.grad is not None
        np.testing.assert_allclose(weight.grad.gather(), X.T @ G)


@four
def test_gradients_of_two_tensors_share_no_memory(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        a, b, start = leaf(grid, X), leaf(grid, X), spread(grid, X)
        (a + b).backward(start)
        a.grad.local[...] = 7
        np.testing.assert_array_equal(b.grad.gather(), X)
        np.testing.assert_array_equal(start.gather(), X)


@four
def test_a_bias_in_another_layout_than_the_output(comm):
    for axis in ["x", "y"]:
        with given(axis=axis):
            with Grid(comm, (2, 2, 1)) as grid:
                weight = nn.Parameter(spread(grid, W, Layout(("y", "z"), "x")))
                bias = nn.Parameter(spread(grid, W[:1], Layout((), axis)))
                right_or_refused(lambda: nn.linear(nn.Tensor(spread(grid, X)), weight, bias).gather(), X @ W + W[:1])


@four
def test_vectors_of_a_layer_norm_in_any_layout(comm):
    for of_gain, of_bias in [(("x", "y"), ("x", "y")), (("x",), ("y",)), ((), ())]:
        with given(of_gain=of_gain, of_bias=of_bias):
            rows, vector = RANDOM.random((8, 8)), np.arange(8.0)[None]
            with Grid(comm, (2, 2, 1)) as grid:
                rows = grid.comm.bcast(rows)
                gain, bias = (nn.Parameter(spread(grid, vector, Layout((), axes))) for axes in (of_gain, of_bias))
                wanted = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
                wanted = wanted * vector + vector
                right_or_refused(lambda: nn.layer_norm(nn.Tensor(spread(grid, rows)), gain, bias).gather(), wanted)


@four
def test_cross_entropy_of_classes_over_two_axes(comm):
    labels = np.array([[1], [3], [5], [7], [0], [2], [4], [6]])
    logits = np.linspace(0, 3, 64).reshape(8, 8) ** 2 % 1
    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(8), labels[:, 0]])
    with Grid(comm, (2, 2, 1)) as grid:
        spread_labels = spread(grid, labels, Layout())
        right_or_refused(
            lambda: nn.cross_entropy(nn.Tensor(spread(grid, logits, Layout((), ("x", "y")))), spread_labels).item(),
            wanted,
        )


LAYOUTS = [Layout("z", "x", units=(4, 1)), Layout(("data", "z"), "x")]


@four
def test_zero_1_of_parameters_in_units_or_split_over_data(comm):
    for layout in LAYOUTS:
        with given(layout=layout):
            whole = np.arange(72.0).reshape(12, 6)
            with Grid(comm, (1, 1, 2), 2) as grid:
                parameter = nn.Parameter(spread(grid, whole, layout))
                opt = optim.SGD([parameter], lr=1.0, momentum=0.5, shard_over_data=True)
                nn.scale(parameter, 1.0).backward(spread(grid, whole, Layout()))
                opt.step()
                assert not parameter.gather().any()


@four
def test_one_optimizer_clips_and_another_steps(comm):
    with Grid(comm, "ddp") as grid:
        parameter = nn.Parameter(spread(grid, SQUARE, Layout("z", "x")))
        shards, steps = optim.SGD([parameter], lr=1.0, shard_over_data=True), optim.SGD([parameter], lr=1.0)
        nn.scale(parameter, 1.0).backward(spread(grid, SQUARE, Layout()))
        shards.clip(0.5)
        steps.step()
        assert_replicas_agree(grid, {"parameter": parameter._stored})


@four
def test_recompute_drops_as_in_the_forward_pass_whatever_is_set_since(comm):
    found = []
    with Grid(comm, (2, 2, 1)) as grid:
        for wrapped in (lambda module: module, nn.Recompute):
            net, x = wrapped(nn.Sequential(grid, nn.Dropout(grid, 0.5, seed=0))), leaf(grid, X)
            out = net(x)
            net.train(False)
            out.backward(spread(grid, X))
            found.append(x.grad.gather())
    np.testing.assert_array_equal(*found)


@four
def test_a_backward_pass_that_failed_leaves_the_random_state(comm):
    fails = []

    def failing(x):
        if fails:
            raise ZeroDivisionError
        return x

    with Grid(comm, (2, 2, 1)) as grid:
        net = nn.Recompute(nn.Sequential(grid, nn.Dropout(grid, 0.5), failing))
        out = net(leaf(grid, X))
        net(leaf(grid, X))
        fails.append(True)
        with pytest.raises(ZeroDivisionError):
            out.backward(spread(grid, X))
        assert net.random_state() == {"0": 2}


@four
def test_a_step_after_a_backward_pass_that_failed_is_refused(comm):
    """Otherwise missing sums would be ignored silently."""

    def fails(gradient):
        raise ZeroDivisionError

    with Grid(comm, "ddp") as grid:
        first, last = nn.Linear(grid, 6, 6, dtype="float64"), nn.Linear(grid, 6, 4, dtype="float64", cols="x")
        opt = optim.SGD([*first.parameters(), *last.parameters()], lr=1.0)
        hidden = first(spread(grid, X))
        out = last(hidden.from_op(hidden.shard, (hidden,), fails))
        with pytest.raises(ZeroDivisionError):
            out.backward(spread(grid, G, Layout()))
        with pytest.raises(Pmm3dError):
            opt.step()


@four
def test_a_target_that_needs_a_gradient_gets_it_or_is_refused(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        a, b = leaf(grid, X), leaf(grid, 2 * X)
        try:
            nn.mse(a, b).backward()
        except Pmm3dError:
            return
        np.testing.assert_allclose(b.grad.gather(), 2 * X / X.size)


@four
def test_a_gradient_left_by_no_sync_goes_with_its_network(comm):
    with Grid(comm, (1, 1, 2), 2) as grid:
        net = nn.Linear(grid, 6, 4, dtype="float64")
        with nn.no_sync(grid):
            nn.mse(net(spread(grid, X)), spread(grid, G)).backward()
        net.weight.grad = None
        held = ref(net.weight.grad_buffer)
        del net
        assert held() is None


@four
def test_tensors_of_two_grids_are_refused(comm):
    for operation in ["add", "linear"]:
        with given(operation=operation):
            refused = False
            with Grid(comm, (2, 2, 1)) as grid, Grid(comm, (1, 2, 2)) as other:
                try:
                    if operation == "add":
                        nn.add(leaf(grid, X, Layout((), "y")), leaf(other, X, Layout((), "y")))
                    else:
                        nn.linear(leaf(grid, X), nn.Parameter(spread(other, W, Layout(("y", "z"), "x"))))
                except Pmm3dError:
                    refused = True
            assert refused


@four
def test_a_parameter_of_partial_sums_learns_or_is_refused(comm):
    with Grid(comm, (2, 2, 1)) as grid:
        try:
            parameter = nn.Parameter(spread(grid, X, Layout(sums=("x", "y"))))
        except LayoutError:
            return
        opt = optim.SGD([parameter], lr=1.0)
        nn.scale(parameter, 1.0).backward(spread(grid, X, Layout()))
        np.testing.assert_allclose(opt.gradient_norm(), np.linalg.norm(X))
        opt.step()
        np.testing.assert_allclose(parameter.gather(), 0 * X, atol=1e-12)
