"""Tensors with a different number of rows on each rank: results as for all rows together, and refused operations."""

import numpy as np
import pytest
from networks import assert_replicas_agree, on_each_grid
from samples import integers, to_library, to_numpy

from pmm3d import DistMatrix, LayoutError, nn
from pmm3d.layout import Layout, RaggedRows
from pmm3d.nn.compute import TensorSpec
from pmm3d.nn.tensor import Tensor

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

COLUMNS, OUT = 6, 4
LAYOUT = Layout(("data", "z"), "y")


def rows_of(grid, place, step=0):
    """Number of rows of a place along data and z; 0 for some."""
    return (3 * place + 2 * step) % 5


def batch(grid, step=0):
    """(ragged tensor of this rank, the rows of all places in order)."""
    places = grid.data.size * grid.z.size
    parts = [integers((rows_of(grid, place, step), COLUMNS), seed=10 * step + place) for place in range(places)]
    own = parts[grid.data.index * grid.z.size + grid.z.index]
    box = LAYOUT.box((0, COLUMNS), grid.shape, grid.coords)
    local = to_library(np.ascontiguousarray(own[:, box.c0 : box.c1]))
    return nn.ragged(grid, local, COLUMNS, LAYOUT, requires_grad=True), np.concatenate(parts), own


def test_values_and_gradients_are_those_of_all_rows(comm):
    def check(grid):
        for step in range(3):
            layer = nn.Linear(grid, COLUMNS, OUT, dtype="float64", seed=1)
            x, rows, own = batch(grid, step)
            assert x.shape == (RaggedRows(len(own)), COLUMNS) and x.box.shape == tuple(x.local.shape)
            out = layer(x) * 2
            weight, bias = (to_numpy(each.gather()) for each in layer.parameters())
            expected = (2 * (own @ weight + bias))[:, out.box.c0 : out.box.c1]
            assert out.box.r1 == len(own) and np.abs(to_numpy(out.local) - expected).max(initial=0) < 1e-13
            total = nn.sum(nn.sum(out * out, 1), 0)
            whole = 2 * (rows @ weight + bias)
            assert abs(total.item() - (whole * whole).sum()) < 1e-9
            total.backward()
            assert np.allclose(to_numpy(layer.weight.grad.gather()), 4 * rows.T @ whole, atol=1e-9)
            assert np.allclose(to_numpy(layer.bias.grad.gather()), 4 * whole.sum(0), atol=1e-9)
            mine = (4 * 2 * (own @ weight + bias) @ weight.T)[:, x.box.c0 : x.box.c1]
            assert np.abs(to_numpy(x.grad.local) - mine).max(initial=0) < 1e-9
            assert_replicas_agree(grid, {"weight": layer.weight.grad})
            summed = layer.weight.grad.gather()
            layer.weight.grad = x.grad = None
            out = layer(x) * 2
            out.backward(out * 2)
            assert np.allclose(to_numpy(layer.weight.grad.gather()), to_numpy(summed), atol=1e-9)
            assert np.abs(to_numpy(x.grad.local) - mine).max(initial=0) < 1e-9

    on_each_grid(comm, check)


def test_layer_norm_softmax_and_whole_columns(comm):
    """Columns may be gathered and split again; rows are not sent. A relayout from y to x would need all ranks."""

    def check(grid):
        x, _, own = batch(grid)
        norm = nn.LayerNorm(grid, COLUMNS, dtype="float64")
        out = nn.softmax(norm(nn.relayout(x, Layout(("data", "z")))), 1)
        normal = (own - own.mean(1, keepdims=True)) / np.sqrt(own.var(1, keepdims=True) + 1e-5)
        expected = np.exp(normal) / np.exp(normal).sum(1, keepdims=True)
        assert out.layout == LAYOUT
        assert np.abs(to_numpy(out.local) - expected[:, out.box.c0 : out.box.c1]).max(initial=0) < 1e-12
        nn.sum(nn.sum(out * out, 1), 0).backward()
        assert x.grad.shape == x.shape and x.grad.local.shape == x.local.shape

    on_each_grid(comm, check)


def test_other_counts_in_each_step_take_no_room(comm):
    """The number of cached forms is that of the weights, for any number of steps."""

    def check(grid):
        layer, kept = nn.Linear(grid, COLUMNS, OUT, dtype="float64", seed=1), []
        for step in range(6):
            x, _, _ = batch(grid, step)
            nn.sum(nn.sum(layer(x), 1), 0).backward()
            kept.append(grid.attached[TensorSpec].cache_info().currsize)
        assert kept[2:] == [kept[2]] * 4

    on_each_grid(comm, check)


def test_what_needs_all_rows_is_refused(comm, fails):
    def check(grid):
        x, _, _ = batch(grid)
        there = DistMatrix.random(grid, (3, COLUMNS), layout=LAYOUT)
        for refused in (
            lambda: nn.mean(x, 0),
            lambda: nn.mse(x, Tensor(x.value)),
            lambda: x.gather(),
            lambda: nn.dropout(x, 0.5, 1),
            lambda: int(x.shape[0]),
            lambda: nn.r2(x, x),
        ):
            fails(LayoutError, "the rows are ragged", refused)
        fails(LayoutError, "do not match", lambda: x + there)
        fails(LayoutError, r"do not match.*rows=x.shape\[0\]", lambda: x + batch(grid)[0])
        fails(LayoutError, "the target is", lambda: nn.mse(x, batch(grid)[0], reduction="sum"))
        if grid.x.size > 1 < grid.y.size:
            norm = nn.LayerNorm(grid, COLUMNS, cols="x", dtype="float64")
            fails(LayoutError, r"Give a layer the axis .* \(cols=\)", lambda: norm(x))
        if grid.data.size * grid.z.size > 1:
            fails(LayoutError, "the rows are ragged", lambda: nn.relayout(x, Layout((), "y")))
            fails(LayoutError, "the rows are ragged", lambda: nn.softmax(x, 0))
        layer = nn.Linear(grid, COLUMNS, OUT, dtype="float64", seed=1)
        sharded = nn.ragged(grid, x.local, COLUMNS, Layout(("data", "z", "x"), "y"))
        for decomposed in (False, True) if grid.x.size > 1 else ():
            nn.Tape.of(grid).parallel.overlap = nn.Overlap(decomposed=decomposed)
            fails(LayoutError, "the rows are ragged", lambda: layer(sharded))

    on_each_grid(comm, check)


def test_two_ragged_tensors_go_together_where_one_has_the_rows_of_the_other(comm, fails):
    """If one rank has other rows, all ranks raise."""

    def check(grid):
        x, _, own = batch(grid)
        made = lambda local: nn.ragged(grid, local, COLUMNS, LAYOUT, rows=x.shape[0])
        assert np.array_equal(to_numpy((x + made(x.local)).local), 2 * to_numpy(x.local))
        longer = to_library(np.zeros((len(own) + (grid.rank == 0), x.box.shape[1])))
        fails(LayoutError, f"the array has {rows_of(grid, 0) + 1} rows on rank 0", lambda: made(longer))
        fails(
            LayoutError,
            "rows is x.shape\\[0\\] of another ragged tensor; got 3",
            lambda: nn.ragged(grid, x.local, COLUMNS, LAYOUT, rows=3),
        )

    on_each_grid(comm, check)


def test_a_loss_that_is_a_sum_is_that_of_all_rows(comm):
    def check(grid):
        x, rows, own = batch(grid)
        zeros = nn.Tensor(DistMatrix(grid, 0 * x.local, x.shape, LAYOUT))
        loss = nn.mse(nn.cast(x, "float64"), zeros, reduction="sum")
        assert abs(loss.item() - (rows**2).sum()) < 1e-9
        loss.backward()
        assert np.abs(to_numpy(x.grad.local) - 2 * own[:, x.box.c0 : x.box.c1]).max(initial=0) < 1e-12

    on_each_grid(comm, check)


def test_a_cast_to_the_type_that_it_has_is_no_operation(comm):
    def check(grid):
        x, _, _ = batch(grid)
        assert nn.cast(x, "float64") is x and nn.cast(x, "float32") is not x

    on_each_grid(comm, check)
