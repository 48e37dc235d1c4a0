"""Gradients: compared with differences, as adjoints, accumulated over the batches of a step, and independent of their
layout."""

import numpy as np
import pytest
from differences import H, assert_gradients_are_differences
from mpi_runner.plugin import all_tests
from networks import (
    CLASSES,
    EVEN,
    GRIDS,
    INPUT,
    assert_replicas_agree,
    batch_of,
    gradients_of,
    inner,
    largest_difference,
    loss_of,
    network_of,
    over_grids,
    spread,
    weights_of,
    whole_numbers,
)
from samples import integers

from pmm3d import nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim

ROWS, COLS, OUT = 11, 7, 5
WEIGHT, TURNED = Layout(("y", "z"), "x"), Layout(("x", "z"), "y")
ACROSS, WHOLE, TWO_AXES = batch_layout("x"), batch_layout(None), Layout("data", ("y", "x"))
LABELS = np.arange(ROWS)[:, None] % OUT
TARGET = 0.25 + integers((ROWS, COLS), seed=9)


def vector(cols):
    return Layout((), cols)


def linear_of(x_layout, cols):
    weight, other = (WEIGHT, "x") if cols == "y" else (TURNED, "y")
    inputs = {"x": ((ROWS, COLS), x_layout), "W": ((COLS, OUT), weight), "b": ((1, OUT), vector(other))}
    return inputs, lambda t: nn.linear(t["x"], t["W"], t["b"])


def of_x(function, layout=INPUT):
    return {"x": ((ROWS, COLS), layout)}, lambda t: function(t["x"])


def of_two(function, layout=INPUT, other=INPUT):
    return {"x": ((ROWS, COLS), layout), "w": ((ROWS, COLS), other)}, lambda t: function(t["x"], t["w"])


def norm_of(layout, cols):
    inputs = {"x": ((ROWS, COLS), layout), "g": ((1, COLS), vector(cols)), "b": ((1, COLS), vector(cols))}
    return inputs, lambda t: nn.layer_norm(t["x"], t["g"], t["b"])


def of_logits(layout, rows):
    return {"x": ((ROWS, OUT), layout)}, lambda t: nn.cross_entropy(t["x"], spread(t["x"].grid, LABELS, rows))


def target(grid, layout):
    return spread(grid, TARGET, layout)


OPERATIONS = {
    "relu": of_x(nn.relu), "gelu": of_x(nn.gelu), "tanh": of_x(nn.tanh), "silu": of_x(nn.silu),
    "sigmoid": of_x(nn.sigmoid, ACROSS),
    "dropout": of_x(lambda x: nn.dropout(x, 0.4, seed=3, stream=2)),
    "scale": of_x(lambda x: nn.scale(x, -1.5)),
    "add": of_two(nn.add), "add, two layouts": of_two(nn.add, INPUT, ACROSS), "add, one whole": of_two(nn.add, WHOLE),
    "operators": of_two(lambda x, w: -(x - 2 * w) / 3 + x * 0.5 + x),
    "x to y": of_x(lambda x: nn.relayout(x, INPUT), ACROSS),
    "whole to y": of_x(lambda x: nn.relayout(x, INPUT), WHOLE),
    "y to whole": of_x(lambda x: nn.relayout(x, WHOLE)),
    "used after": of_x(lambda x: nn.add(nn.relayout(x, WHOLE), nn.tanh(nn.relayout(x, ACROSS)))),
    "layer_norm": norm_of(INPUT, "y"), "layer_norm, x": norm_of(ACROSS, "x"), "layer_norm, moved": norm_of(WHOLE, "x"),
    "layer_norm, two axes": norm_of(TWO_AXES, ("y", "x")), "layer_norm, from two axes": norm_of(TWO_AXES, "x"),
    "products": ({"x": ((ROWS, COLS), INPUT), "t": ((ROWS, COLS), WEIGHT), "g": ((1, COLS), vector(("y", "x"))),
                  "v": ((1, COLS), vector("x"))}, lambda t: t["x"] * t["t"] / (t["g"] * t["g"] + 1) - t["v"]),
    "penalty": ({"t": ((ROWS, COLS), WEIGHT), "g": ((1, COLS), vector(("y", "x")))},
                lambda t: nn.sum(nn.mean(t["t"] * t["t"] * t["g"], 1), 0)),
    "linear": linear_of(INPUT, "y"), "linear, turned": linear_of(ACROSS, "x"), "linear, moved": linear_of(ACROSS, "y"),
    "linear, whole": linear_of(WHOLE, "y"),
    "mse": of_x(lambda x: nn.mse(x, target(x.grid, INPUT))),
    "mse, two layouts": of_x(lambda x: nn.mse(x, target(x.grid, ACROSS))),
    "mse, whole": of_x(lambda x: nn.mse(x, nn.Tensor(target(x.grid, INPUT))), WHOLE),
    "mae": of_x(lambda x: nn.mae(x, target(x.grid, WHOLE))),
    "cross_entropy": of_logits(INPUT, WHOLE), "cross_entropy, whole": of_logits(WHOLE, Layout("z")),
    "cross_entropy, two axes": of_logits(TWO_AXES, Layout()),
}  # fmt: skip


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@over_grids(check=False)
def test_gradients_are_central_differences(grid):
    assert_gradients_are_differences(grid, OPERATIONS)


def linear_layers(grid):
    """Affine layers, whose results are exact for integers."""
    make = lambda inputs, outputs, **options: nn.Linear(grid, inputs, outputs, dtype="float64", **options)
    two = nn.Sequential(grid, make(COLS, 6), nn.Dropout(grid, 0.75), make(6, OUT, cols="x"))
    return {
        "Linear": (make(COLS, OUT), ("y", "x", None)),
        "Linear without bias": (make(COLS, OUT, bias=False, cols="x"), ("x",)),
        "Dropout": (nn.Dropout(grid, 0.5, seed=7), ("y", None)),
        "Sequential": (nn.Sequential(grid, make(COLS, 6), nn.Dropout(grid, 0.5), make(6, OUT, cols="x")), ("y",)),
        "Residual": (nn.Residual(nn.Sequential(grid, make(COLS, 3), make(3, COLS, cols="x"))), ("y", None)),
        "Residual of one": (nn.Residual(make(COLS, COLS)), ("y",)),
        "Recompute": (nn.Recompute(two), ("y",)),
    }


def assert_adjoint(net, cols):
    """<J u, v> = <u, J* v>, exact: the layer is affine."""
    grid, x, u = net.grid, *(integers((ROWS, COLS), seed=seed) for seed in (1, 2))
    state = net.random_state()
    image = lambda array: net(spread(grid, array, batch_layout(cols)))
    with nn.no_grad(grid):
        ends = []
        for array in (x + u, x):
            net.set_random_state(state)
            ends.append(image(array).gather())
    net.set_random_state(state)
    given = nn.Tensor(spread(grid, x, batch_layout(cols)), requires_grad=True)
    v = integers(ends[0].shape, seed=3)
    inner(net(given), v).backward()
    assert np.vdot(ends[0] - ends[1], v) == np.vdot(u, given.grad.gather()) != 0
    assert_replicas_agree(grid, {"x": given.grad})


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
@over_grids()
def test_layers_and_their_gradients_are_adjoint(grid):
    for net, layouts in linear_layers(grid).values():
        whole_numbers(net)
        for cols in layouts:
            assert_adjoint(net, cols)


def deep(grid):
    """Every kind of layer, and a map from whole arrays to a loss."""
    make = lambda inputs, outputs, seed: nn.Linear(grid, inputs, outputs, dtype="float64", seed=seed)
    inside = nn.Sequential(grid, make(9, 13, 2), nn.LayerNorm(grid, 13, dtype="float64"), nn.gelu, make(13, 9, 3))
    again = nn.Recompute(nn.Residual(inside))
    return nn.Sequential(grid, make(COLS, 9, 1), nn.tanh, nn.Residual(inside), again, nn.silu, make(9, OUT, 4))


@pytest.mark.parallel([4, 8], thorough=[1, 2, 6])
@over_grids()
def test_gradients_of_a_deep_network_are_differences(grid):
    """A part is used twice, once with recomputation. The gradient is by all parameters together."""
    net, (x, y) = deep(grid), batch_of(CLASSES._replace(sizes=(COLS, OUT)), 0, ROWS)
    loss = lambda: loss_of(net, CLASSES, x, y)
    loss().backward()
    found, start, random = gradients_of(net), weights_of(net), np.random.default_rng(3)
    assert_replicas_agree(grid, {name: parameter.grad for name, parameter in net.named_parameters().items()})
    towards = {name: random.standard_normal(value.shape) for name, value in start.items()}
    ends = []
    for h in (H, -H):
        for name, parameter in net.named_parameters().items():
            parameter.assign(spread(grid, start[name] + h * towards[name], parameter.layout))
        with nn.no_grad(grid):
            ends.append(loss().item())
    slope = sum(np.vdot(found[name], towards[name]) for name in found)
    assert abs(slope - (ends[0] - ends[1]) / (2 * H)) < 1e-8


def accumulated(grid, cuts, synced, shard):
    """Weights after two steps of gradient descent, each on batches of the rows between the cuts."""
    net = network_of(grid, CLASSES)
    optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data=shard)
    for step in range(2):
        x, y = batch_of(CLASSES, step)
        for start, stop, now in zip(cuts, cuts[1:], synced):
            loss = loss_of(net, CLASSES, x[start:stop], y[start:stop]) * ((stop - start) / len(x))
            with nn.Tape.of(grid).set(syncing=now):
                loss.backward()
        optimizer.step()
    return weights_of(net)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@over_grids(lambda ranks: GRIDS[ranks][: 4 if all_tests else 2])
def test_gradients_of_the_batches_of_a_step_add_up(grid):
    """Summed over the ranks once, each time, or sometimes. The result is the gradient of the whole batch."""
    whole = accumulated(grid, [0, 23], [True], False)
    for shard in (False, True) if grid.data.size > 1 else (False,):
        for synced in ((False, True), (True, True), (True, False, True), (False, True, True)):
            cuts = [0, 9, 23] if len(synced) == 2 else [0, 11, 13, 23]
            assert largest_difference(accumulated(grid, cuts, synced, shard), whole) < 1e-13


@pytest.mark.parallel([4])
@over_grids(lambda ranks: [("2x1x1", 2), ("hsdp", 2)])
def test_without_sync_nothing_moves_along_data(grid):
    net = network_of(grid, EVEN)
    for _ in range(2):
        grid.ledger.reset()
        with nn.no_sync(grid):
            loss_of(net, EVEN, *batch_of(EVEN, 0)).backward()
        assert grid.ledger.total(phase="reduce data").calls == grid.ledger.total(phase="reduce vectors").calls == 0
