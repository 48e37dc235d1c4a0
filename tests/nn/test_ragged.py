"""Tensors with a different number of rows on each rank: results as for all rows together, and refused operations."""

import numpy as np
import pytest
from networks import assert_replicas_agree, over_grids
from samples import integers, to_library, to_numpy

from pmm3d import DistMatrix, LayoutError, nn
from pmm3d.layout import Layout, RaggedRows
from pmm3d.nn.compute import TensorSpec

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

COLUMNS, OUT = 6, 4
LAYOUT = Layout(("data", "z"), "y")


def rows_of(grid, place, step=0):
    """Number of rows of a place along data and z; 0 for some."""
    return (3 * place + 2 * step) % 5


def batch(grid, step=0):
    """(ragged tensor of this rank, the rows of all places in order, the rows of this rank)."""
    places = grid.data.size * grid.z.size
    parts = [integers((rows_of(grid, place, step), COLUMNS), seed=10 * step + place) for place in range(places)]
    own = parts[grid.data.index * grid.z.size + grid.z.index]
    box = LAYOUT.box((0, COLUMNS), grid.shape, grid.coords)
    local = to_library(np.ascontiguousarray(own[:, box.c0 : box.c1]))
    return nn.ragged(grid, local, COLUMNS, LAYOUT, requires_grad=True), np.concatenate(parts), own


def layer_of(grid):
    return nn.Linear(grid, COLUMNS, OUT, dtype="float64", seed=1)


def is_near(local, expected, limit):
    return np.abs(to_numpy(local) - expected).max(initial=0) < limit


@over_grids()
def test_values_and_gradients_are_those_of_all_rows(grid):
    for step in range(3):
        layer = layer_of(grid)
        x, rows, own = batch(grid, step)
        assert x.shape == (RaggedRows(len(own)), COLUMNS) and x.box.shape == tuple(x.local.shape)
        out = layer(x) * 2
        weight, bias = (to_numpy(each.gather()) for each in layer.parameters())
        mine, whole = 2 * (own @ weight + bias), 2 * (rows @ weight + bias)
        assert out.box.r1 == len(own) and is_near(out.local, mine[:, out.box.c0 : out.box.c1], 1e-13)
        total = nn.sum(out * out)
        assert abs(total.item() - (whole * whole).sum()) < 1e-9
        of_x = (4 * mine @ weight.T)[:, x.box.c0 : x.box.c1]
        again = layer(x) * 2
        for backward in (total.backward, lambda again=again: again.backward(again * 2)):
            backward()
            assert np.allclose(to_numpy(layer.weight.grad.gather()), 4 * rows.T @ whole, atol=1e-9)
            assert np.allclose(to_numpy(layer.bias.grad.gather()), 4 * whole.sum(0), atol=1e-9)
            assert is_near(x.grad.local, of_x, 1e-9)
            assert_replicas_agree(grid, {"weight": layer.weight.grad})
            layer.weight.grad = layer.bias.grad = x.grad = None


@over_grids()
def test_layer_norm_softmax_and_whole_columns(grid):
    """Columns may be gathered and split again; rows are not sent. A relayout from y to x would need all ranks."""
    x, _, own = batch(grid)
    norm = nn.LayerNorm(grid, COLUMNS, dtype="float64")
    out = nn.softmax(norm(nn.relayout(x, Layout(("data", "z")))), 1)
    normal = (own - own.mean(1, keepdims=True)) / np.sqrt(own.var(1, keepdims=True) + 1e-5)
    expected = np.exp(normal) / np.exp(normal).sum(1, keepdims=True)
    assert out.layout == LAYOUT and is_near(out.local, expected[:, out.box.c0 : out.box.c1], 1e-12)
    nn.sum(out * out).backward()
    assert x.grad.shape == x.shape and x.grad.local.shape == x.local.shape


@over_grids()
def test_elements_and_columns_of_ragged_rows(grid):
    """Elementary functions, choices, the largest of each row, and columns beside each other."""
    x, _, own = batch(grid)
    out = nn.where(nn.relu(x), nn.exp(x), nn.maximum(x, -1)) + nn.max(x, 1)
    expected = np.where(own > 0, np.exp(own), np.maximum(own, -1)) + own.max(1, keepdims=True)
    assert is_near(out.local, expected[:, x.box.c0 : x.box.c1], 1e-12)
    nn.sum(out).backward()
    assert x.grad.local.shape == x.local.shape
    columns = nn.relayout(x, Layout(("data", "z")))
    assert is_near(nn.concat([columns, columns * 2], 1).local, np.concatenate([own, 2 * own], 1), 1e-12)


@over_grids()
def test_other_counts_in_each_step_take_no_room(grid):
    """The number of cached forms is that of the weights, for any number of steps."""
    layer, kept = layer_of(grid), []
    for step in range(6):
        x, _, _ = batch(grid, step)
        nn.sum(layer(x)).backward()
        kept.append(grid.attached[TensorSpec].cache_info().currsize)
    assert kept[2:] == [kept[2]] * 4


@over_grids()
def test_what_needs_all_rows_is_refused(grid, fails):
    x, layer = batch(grid)[0], layer_of(grid)
    there = DistMatrix.random(grid, (3, COLUMNS), layout=LAYOUT)
    refused = [
        lambda: nn.mean(x, 0),
        lambda: nn.mse(x, nn.Tensor(x.value)),
        lambda: x.gather(),
        lambda: nn.dropout(x, 0.5, 1),
        lambda: int(x.shape[0]),
        lambda: nn.r2(x, x),
    ]
    refused += [
        lambda: x.T,
        lambda: x[1:],
        lambda: nn.split(x, [1, 2], 0),
        lambda: nn.concat([x, x]),
        lambda: nn.take(x, [0]),
        lambda: nn.grouped_linear(x, [layer.weight], [3]),
    ]
    if grid.data.size * grid.z.size > 1:
        refused += [lambda: nn.relayout(x, Layout((), "y")), lambda: nn.softmax(x, 0), lambda: nn.max(x, 0)]
    if grid.y.size > 1:
        refused += [lambda: nn.concat([x, x], 1)]
    if grid.x.size > 1:
        sharded = nn.ragged(grid, x.local, COLUMNS, Layout(("data", "z", "x"), "y"))
        refused += [lambda: layer(sharded)]
    for decomposed in (False, True):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(decomposed=decomposed)
        for call in refused:
            fails(LayoutError, "the rows are ragged", call)
    fails(LayoutError, "do not match", lambda: x + there)
    fails(LayoutError, r"do not match.*rows=x.shape\[0\]", lambda: x + batch(grid)[0])
    fails(LayoutError, "the target is", lambda: nn.mse(x, batch(grid)[0], reduction="sum"))
    if grid.x.size > 1 < grid.y.size:
        fails(LayoutError, r"\(cols=\)", lambda: nn.LayerNorm(grid, COLUMNS, cols="x", dtype="float64")(x))


@over_grids()
def test_two_ragged_tensors_go_together_where_one_has_the_rows_of_the_other(grid, fails):
    """If one rank has other rows, all ranks raise."""
    x, _, own = batch(grid)
    made = lambda local, rows=x.shape[0]: nn.ragged(grid, local, COLUMNS, LAYOUT, rows=rows)
    assert np.array_equal(to_numpy((x + made(x.local)).local), 2 * to_numpy(x.local))
    longer = to_library(np.zeros((len(own) + (grid.rank == 0), x.box.shape[1])))
    fails(LayoutError, f"the array has {rows_of(grid, 0) + 1} rows on rank 0", lambda: made(longer))
    fails(LayoutError, "of another ragged tensor; got 3", lambda: made(x.local, 3))


@over_grids()
def test_a_loss_that_is_a_sum_is_that_of_all_rows(grid):
    x, rows, own = batch(grid)
    zeros = nn.Tensor(DistMatrix(grid, 0 * x.local, x.shape, LAYOUT))
    assert nn.cast(x, "float64") is x and nn.cast(x, "float32") is not x
    loss = nn.mse(x, zeros, reduction="sum")
    assert abs(loss.item() - (rows**2).sum()) < 1e-9
    loss.backward()
    assert is_near(x.grad.local, 2 * own[:, x.box.c0 : x.box.c1], 1e-12)
