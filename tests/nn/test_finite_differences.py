"""Gradients compared with differences: tied weights, penalties, positional tables; backward passes that start at any
tensor, or leave the products of the weights to their caller."""

from contextlib import nullcontext

import numpy as np
import pytest
from differences import assert_gradients_are_differences, scalar
from loops import looped
from networks import (
    ALL_GRIDS,
    CLASSES,
    GRIDS,
    INPUT,
    batch_of,
    bits,
    gradients_of,
    inner,
    loss_of,
    network_of,
    on_each_grid,
    over_grids,
    spread,
    whole_numbers,
)
from samples import integers

from pmm3d import nn
from pmm3d.layout import Layout, batch_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

ROWS, SIZE = 11, 7
WEIGHT, TURNED, BIAS = Layout(("y", "z"), "x"), Layout(("x", "z"), "y"), Layout((), "x")
X = {"x": ((ROWS, SIZE), INPUT)}
W = ((SIZE, SIZE), WEIGHT)
TARGET = 0.25 + integers((SIZE, SIZE), seed=9)
TABLES = {
    "replicated": Layout(),
    "rows over z": Layout("z"),
    "columns over y": Layout((), "y"),
    "rows over y, z": Layout(("y", "z")),
    "as the batch": INPUT,
    "as a weight": WEIGHT,
}


def twice(t):
    return nn.linear(nn.tanh(nn.scale(nn.linear(t["x"], t["W"], t["b"]), 0.1)), t["W"])


def penalized(weight, kind=nn.mse):
    return kind(nn.scale(weight, 1), spread(weight.grid, TARGET, WEIGHT))


def penalty(kind, layout):
    return {"W": ((SIZE, SIZE), layout)}, lambda t: penalized(t["W"], kind)


def table(layout):
    """A table that is added before a layer, and to its result."""

    def operation(t):
        return nn.add(nn.linear(nn.add(t["x"], t["T"]), t["W"]), t["T"])

    return {**X, "W": W, "T": ((ROWS, SIZE), layout)}, operation


def parted(one, other):
    return nn.tanh(other) * nn.sum(one, 1) + other


OPERATIONS = {
    "tied": ({**X, "W": W, "b": ((1, SIZE), BIAS)}, twice),
    "tied, turned": ({**X, "W": ((SIZE, SIZE), TURNED)}, lambda t: nn.linear(nn.linear(t["x"], t["W"]), t["W"])),
    "tied to itself": ({"W": W}, lambda t: nn.linear(nn.relayout(nn.scale(t["W"], 0.5), INPUT), t["W"])),
    "split": ({"x": ((ROWS, 6), INPUT)}, lambda t: parted(*nn.split(t["x"], [1, 2]))),
    "a part of a split": ({"x": ((ROWS, 6), INPUT)}, lambda t: nn.tanh(nn.split(nn.tanh(t["x"]), [1, 2])[1])),
    "elementary": ({**X}, lambda t: nn.log(nn.exp(t["x"]) + 1) * nn.sqrt(abs(t["x"])) - nn.clip(t["x"], -1, 1) ** 3),
    "chosen": ({**X, "w": ((1, SIZE), BIAS)}, lambda t: nn.maximum(t["x"], t["w"]) * nn.minimum(t["x"], 0.4) + nn.where(
        nn.relu(t["x"]), t["w"], t["x"] ** 2)),
    "extremes": ({**X}, lambda t: nn.max(t["x"], 0) * nn.min(t["x"], 1) + nn.max(t["x"]) * nn.min(t["x"])),
    "parts": ({**X, "W": W}, lambda t: nn.concat([t["x"][2:], t["W"], t["x"][:1]])[3:, 1:5] * nn.rows(t["x"], 0, 1)[
        :, 2:6]),
    "rows by index": ({**X}, lambda t: nn.scatter_add(nn.take(nn.tanh(t["x"]), [7, 0, 7, 10]), [1, 2, 1, 0], 4)),
    "product": ({**X, "w": ((SIZE, ROWS), Layout("z", "x"))}, lambda t: nn.tanh(t["x"] @ t["w"] / 9) @ t["x"]),
    "groups": ({**X, "W": W, "V": ((SIZE, SIZE), TURNED)}, lambda t: nn.grouped_linear(
        t["x"], [t["W"], t["V"], t["W"]], [4, 7, 0])),
    "added to itself": ({"W": W}, lambda t: nn.add(t["W"], t["W"])),
    "added to the result": ({"x": ((SIZE, SIZE), INPUT), "W": W}, lambda t: nn.add(nn.linear(t["x"], t["W"]), t["W"])),
    "mse of a weight": penalty(nn.mse, WEIGHT), "mse of a turned weight": penalty(nn.mse, TURNED),
    "mae of a weight": penalty(nn.mae, WEIGHT), "mse of a replicated matrix": penalty(nn.mse, Layout()),
    "penalty": ({**X, "W": W}, lambda t: scalar(nn.linear(t["x"], t["W"])) + penalized(t["W"])),
    "penalty on a bias": ({**X, "W": W, "b": ((1, SIZE), BIAS)}, lambda t: scalar(twice(t)) + nn.mse(
        nn.scale(t["b"], 1), spread(t["b"].grid, TARGET[:1], Layout()))),
    **{f"table, {name}": table(layout) for name, layout in TABLES.items()},
}  # fmt: skip


@pytest.mark.parametrize("tables", [False, True], ids=["", "tables"])
def test_gradients_are_central_differences(comm, tables):
    chosen = {title: each for title, each in OPERATIONS.items() if title.startswith("table") == tables}
    on_each_grid(comm, lambda grid: assert_gradients_are_differences(grid, chosen), check=False)


STARTS = [INPUT, batch_layout("x"), Layout(), Layout("x", "z")]


@over_grids(ALL_GRIDS)
@looped("layout", STARTS)
def test_a_backward_pass_from_any_tensor(grid, layout):
    """From a gradient in any layout, the gradient of <out, gradient>: of leaves, of weights, and of results of both.
    A pass that starts at a leaf adds to its gradient. Exact."""
    x, g = integers((ROWS, SIZE), seed=1), integers((ROWS, 5), seed=2)
    for start in (lambda out: out.backward(spread(grid, g, layout)), lambda out: inner(out, g).backward()):
        net = whole_numbers(nn.Linear(grid, SIZE, 5, dtype="float64"))
        leaf = nn.Tensor(spread(grid, x), requires_grad=True)
        start(net(nn.add(nn.scale(leaf, 2), leaf)))
        leaf.backward(spread(grid, x))
        assert np.array_equal(leaf.grad.gather(), 3 * g @ np.asarray(net.weight.gather()).T + x)
        assert np.array_equal(gradients_of(net)["weight"], 3 * x.T @ g)
        assert np.array_equal(gradients_of(net)["bias"], g.sum(0, keepdims=True))


def gradients(grid, recompute, batches, deferred):
    """Gradients of batches of which only the last is summed over data. If deferred, the products of the weights are
    computed at the end of each backward pass."""
    net = network_of(grid, CLASSES, recompute=recompute)
    matrices = [parameter for parameter in net.parameters() if parameter.shape[0] > 1]
    for index in range(batches):
        loss = loss_of(net, CLASSES, *batch_of(CLASSES, index))
        with nn.Tape.of(grid).set(syncing=index == batches - 1):
            with nn.defer_weights(grid) if deferred else nullcontext() as queue:
                loss.backward()
            if deferred:
                assert index or all(weight.grad is None for weight in matrices)
                queue.drain()
    return bits(gradients_of(net))


@pytest.mark.nightly
@over_grids(GRIDS)
@looped("batches", [1, 2])
@looped("recompute", [False, True])
def test_deferred_weight_products_give_the_same_bits(grid, batches, recompute):
    assert gradients(grid, recompute, batches, True) == gradients(grid, recompute, batches, False)
