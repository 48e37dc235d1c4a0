"""Arithmetic of tensors, and operations along split rows or columns, compared with torch and with differences."""

from functools import partial
from itertools import count
from operator import add, mul, truediv
from types import SimpleNamespace

import numpy as np
import pytest
from differences import drawn
from loops import given, looped
from networks import ALL_GRIDS, GRIDS, INPUT, WIDEST, assert_replicas_agree, inner, on_each_grid, over_grids, spread
from samples import TESTED, integers, to_library, to_numpy
from scipy.special import log_softmax
from torch_reference import by_rank_0

from pmm3d import DistMatrix, DTypeError, Grid, GridError, LayoutError, nn
from pmm3d.layout import Layout, batch_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

ROWS, COLS, UNIT = 6, 12, 4
SHAPES = {"x": (ROWS, COLS), "w": (ROWS, COLS), "row": (1, COLS), "col": (ROWS, 1), "one": (1, 1)}
LAYOUTS = [
    INPUT, batch_layout("x"), Layout(), Layout(("y", "z"), "x"), Layout("data", ("y", "x")),
    Layout((), ("z", "y", "x")), Layout(("x", "y", "z")), Layout("data", "x", sums=("y", "z")),
    Layout("z", ("y", "x"), units=(3, 2)),
    Layout("data", ("x", "y"), units=(1, UNIT)),
]  # fmt: skip
ELEMENTWISE = {
    "x * w": lambda o, t: t["x"] * t["w"], "x / w": lambda o, t: t["x"] / t["w"], "x + w": lambda o, t: t["x"] + t["w"],
    "x - w": lambda o, t: t["x"] - t["w"], "x * x": lambda o, t: t["x"] * t["x"],
    "numbers": lambda o, t: 2 / (3 - t["x"] / 4) + (t["x"] * 2 - 1) - (1.5 + t["x"]) * 0.5 - -t["x"],
    "x * row": lambda o, t: t["x"] * t["row"], "row - x": lambda o, t: t["row"] - t["x"],
    "x / row": lambda o, t: t["x"] / t["row"], "row / x": lambda o, t: t["row"] / t["x"],
    "x * col": lambda o, t: t["x"] * t["col"], "col / x": lambda o, t: t["col"] / t["x"],
    "x + col": lambda o, t: t["x"] + t["col"], "x + one": lambda o, t: t["x"] + t["one"],
    "one * x": lambda o, t: t["one"] * t["x"], "x / one": lambda o, t: t["x"] / t["one"],
    "col * row": lambda o, t: t["col"] * t["row"], "row - col": lambda o, t: t["row"] - t["col"],
}  # fmt: skip
ALONG = {
    "sum 0": lambda o, t: o.sum(t["x"], 0), "sum 1": lambda o, t: o.sum(t["x"], 1),
    "mean 0": lambda o, t: o.mean(t["x"], 0), "mean 1": lambda o, t: o.mean(t["x"], 1),
    "sum": lambda o, t: o.sum(t["x"]) * t["w"], "mean": lambda o, t: o.mean(t["x"] * t["w"]),
    "softmax 0": lambda o, t: o.softmax(t["x"], 0), "softmax 1": lambda o, t: o.softmax(t["x"], 1),
    "log_softmax 0": lambda o, t: o.log_softmax(t["x"], 0), "log_softmax 1": lambda o, t: o.log_softmax(t["x"], 1),
    "columns": lambda o, t: o.columns(t["x"], 1, 3, UNIT), "half of each": lambda o, t: o.columns(t["x"], 0, 1, 2),
    "slices": lambda o, t: t["x"][:, 2:9] * t["w"][:, -7:], "an end": lambda o, t: t["x"][:, 5:],
    "nothing": lambda o, t: t["x"][:, 3:3],
    "split": lambda o, t: mixed(*o.split(t["x"], [1, 2, 1])), "split, one unit": lambda o, t: mixed(
        *o.split(t["x"], [5, 2, 5])),
    "split, a part unused": lambda o, t: o.split(t["x"], [1, 1, 0, 2])[3] * o.split(t["w"], [2, 2])[0],
    "normalized": lambda o, t: (t["x"] - o.mean(t["x"], 1)) / (o.sum(t["x"] * t["x"], 1) + 1),
    "attention": lambda o, t: o.softmax(o.columns(t["x"], 0, 2, UNIT) * o.columns(t["x"], 2, 4, UNIT), 1),
}  # fmt: skip


def mixed(one, middle, other):
    return one * other + one * middle[:, :1]


def of_torch(cases, shapes):
    """Title -> (result, name -> gradient of <result, random matrix>)."""
    import torch

    torch.set_num_threads(1)

    def columns(x, start, stop, unit):
        return x.reshape(len(x), -1, unit)[:, :, start:stop].reshape(len(x), -1)

    def split(x, sizes):
        return [columns(x, stop - size, stop, sum(sizes)) for size, stop in zip(sizes, np.cumsum(sizes))]

    functions = SimpleNamespace(
        split=split,
        sum=lambda x, dim=(0, 1): x.sum(dim, keepdim=True),
        mean=lambda x, dim=(0, 1): x.mean(dim, keepdim=True),
        columns=columns,
        softmax=torch.softmax,
        log_softmax=torch.log_softmax,
    )
    found = {}
    for title, case in cases.items():
        given = {name: torch.tensor(value, requires_grad=True) for name, value in values_of(shapes).items()}
        out = case(functions, given)
        (out * torch.from_numpy(drawn(tuple(out.shape), 40))).sum().backward()
        grads = {name: None if each.grad is None else each.grad.numpy() for name, each in given.items()}
        found[title] = out.detach().numpy(), grads
    return found


def values_of(shapes):
    return {name: drawn(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def assert_as_torch(grid, case, expected, shapes, layouts, library=TESTED):
    out, grads = expected
    given = {
        name: nn.Tensor(spread(grid, value, layouts[name], library), requires_grad=True)
        for name, value in values_of(shapes).items()
    }
    result = case(nn, given)
    assert result.shape == out.shape and result.dtype == "float64"
    assert np.abs(to_numpy(result.gather(), library) - out).max(initial=0) < 1e-12, layouts
    result.backward(spread(grid, drawn(out.shape, 40), result.layout.summed, library))
    for name, grad in grads.items():
        assert (given[name].grad is None) == (grad is None)
        if grad is not None:
            assert given[name].grad.layout == layouts[name].summed
            assert np.abs(to_numpy(given[name].grad.gather(), library) - grad).max(initial=0) < 1e-12, (name, layouts)
    assert_replicas_agree(grid, {name: given[name].grad for name, grad in grads.items() if grad is not None})


def fitting(shapes, layout):
    """The layout with those of its units that divide the sizes."""
    return {
        name: layout
        if all(size % unit == 0 for size, unit in zip(shape, layout.units))
        else Layout(layout.rows, layout.cols, layout.sums)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("library", [TESTED, "standin"])
@pytest.mark.parametrize("kind", ["elementwise", "along"])
def test_values_and_gradients_are_those_of_torch(comm, kind, library):
    """Each operation on each grid, in different layouts. In every second case all operands have one layout."""
    cases = {"elementwise": ELEMENTWISE, "along": ALONG}[kind]
    expected, turn = by_rank_0(comm, lambda: of_torch(cases, SHAPES)), count()

    def check(grid):
        for (title, case), number in zip(cases.items(), turn):
            layouts = {
                name: fitting(SHAPES, LAYOUTS[(number + number % 2 * 3 * index) % len(LAYOUTS)])[name]
                for index, name in enumerate(SHAPES)
            }
            assert_as_torch(grid, case, expected[title], SHAPES, layouts, library)

    on_each_grid(comm, check, None if library == TESTED else [WIDEST[comm.size]])


NARROW = "x / w", "row / x", "col / x", "one * x", "sum 0", "mean 1", "softmax 0", "softmax 1", "log_softmax 1"
"""Cases for three columns."""


@looped("rows, titles", [(2, NARROW), (0, [title for title in NARROW if title not in ("softmax 0", "sum 0")])])
@over_grids(lambda ranks: ALL_GRIDS[ranks][::3])
def test_parts_may_be_empty(comm, grid, rows, titles):
    """Two rows and three columns, on all grids; a matrix without rows."""
    shapes = {"x": (rows, 3), "w": (rows, 3), "row": (1, 3), "col": (rows, 1), "one": (1, 1)}
    cases = {title: {**ELEMENTWISE, **ALONG}[title] for title in titles}
    expected = by_rank_0(comm, lambda: of_torch(cases, shapes))
    for number, (title, case) in enumerate(cases.items()):
        assert_as_torch(grid, case, expected[title], shapes, dict.fromkeys(shapes, LAYOUTS[number % 6]))


LARGE = {
    "far": 1e4 * drawn((ROWS, COLS), 3),
    "near": 1e4 + drawn((ROWS, COLS), 4),
    "masked": np.where(np.arange(COLS) % 5 == 2, drawn((ROWS, COLS), 5) - 1e3, -np.inf),
}


@looped("title", LARGE)
@over_grids()
def test_softmax_of_large_numbers_and_of_masks(grid, title):
    """Also if a rank has only -inf."""
    x, labels = LARGE[title], np.full((ROWS, 1), 2)
    expected, loss = log_softmax(x, 1), -log_softmax(x, 1)[:, 2].mean()
    for layout in LAYOUTS[:6]:
        given = nn.Tensor(spread(grid, x, layout), requires_grad=True)
        out, cost = nn.softmax(given), nn.cross_entropy(given, spread(grid, labels, Layout()))
        assert np.abs(out.gather() - np.exp(expected)).max() < 1e-12
        assert np.allclose(nn.log_softmax(given).gather(), expected, rtol=1e-13, atol=1e-12)
        assert cost.item() == pytest.approx(loss, rel=1e-13)
        (inner(out, drawn(x.shape, 6)) + cost).backward()
        assert np.isfinite(given.grad.gather()).all()


# Bytes


def moved(grid, operation, *tensors):
    """Bytes that this rank receives."""
    grid.ledger.reset()
    operation(*tensors).shard
    return grid.ledger.total().received


@over_grids()
def test_what_moves(grid):
    """As documented: numbers per row, and nothing if the layouts fit."""
    tensor = lambda shape, layout: nn.Tensor(spread(grid, drawn(shape, 2), layout))
    x, row, col = tensor((16, 16), INPUT), tensor((1, 16), Layout((), "y")), tensor((16, 1), Layout(("data", "z")))
    (rows, cols), along_y, along_rows = x.box.shape, grid.y.size, [grid.data.size, grid.z.size]
    for operation in (
        lambda x: x * x,
        lambda x: x / row,
        lambda x: col - x,
        lambda x: x * 2 + 1,
        lambda x: nn.columns(x, 0, 1, 2),
        lambda x: nn.columns(x, 1, 2, 16 // along_y),
    ):
        assert moved(grid, operation, x) == 0 or along_y == 1
    assert moved(grid, nn.softmax, x) == 8 * 2 * rows * (along_y - 1)
    assert moved(grid, lambda x: nn.softmax(x, 0), x) == 8 * 2 * cols * sum(size - 1 for size in along_rows)
    assert moved(grid, lambda x: nn.sum(x, 1), x) <= 8 * 2 * rows * (along_y - 1)
    assert moved(grid, lambda x: x[:, 3:5], x) == (8 * rows * (16 - cols) if along_y > 1 else 0)


@over_grids(ALL_GRIDS)
def test_units_of_columns_stay(grid):
    """Five heads of four columns, on all grids. Nothing is sent after the product, and each head is on one rank."""
    x = nn.Tensor(spread(grid, drawn((8, 20), 1), Layout(("data", "z"), "y", units=(1, 4))))
    grid.ledger.reset()
    out = nn.columns(x, 1, 4, 4)
    assert grid.ledger.total().received == 0
    assert out.layout == Layout(("data", "z"), "y", units=(1, 3))
    assert out.box.c0 % 3 == 0 and out.box.shape[1] * 4 == x.box.shape[1] * 3
    assert np.array_equal(out.gather(), x.gather().reshape(8, 5, 4)[:, :, 1:4].reshape(8, 15))


# Errors

NO_NUMBERS = "2", None, 1j, np.ones((6, 8))


@over_grids(lambda ranks: GRIDS[ranks][-1:])
def test_what_is_refused(comm, grid, fails):
    with Grid(comm, "ddp") as elsewhere:
        x, other = (nn.Tensor(spread(each, drawn((6, 8), 1))) for each in (grid, elsewhere))
        whole = nn.Tensor(spread(grid, np.arange(48).reshape(6, 8), INPUT))
        narrow = nn.Tensor(spread(grid, drawn((6, 8), 1), dtype="float32"))
        of_integers = [partial(mul, whole, 0.5), partial(truediv, whole, 2), partial(nn.mean, whole, 0),
                       partial(nn.softmax, whole), partial(add, whole, whole)]  # fmt: skip
        by_rows, index = (slice(0, 2), slice(None)), x.__getitem__
        for kind, text, call in (
            (LayoutError, "6 x 8 and 6 x 2 do not match", lambda: x + x[:, :2]),
            (GridError, "two Grids", lambda: x * other),
            (DTypeError, "of one type and library", lambda: x * narrow),
            (LayoutError, "no whole number of units of 3", lambda: nn.columns(x, 0, 1, 3)),
            (LayoutError, "no whole number of units of 3", lambda: nn.split(x, [1, 2])),
            *((DTypeError, "floating point numbers", call) for call in of_integers),
            *(
                (LayoutError, "dim is 0, over the rows, or 1", partial(operation, x, dim))
                for operation in (nn.sum, nn.mean, nn.softmax, nn.log_softmax)
                for dim in (-1, 2)
            ),
            *((LayoutError, "split: sizes are numbers", partial(nn.split, x, sizes)) for sizes in ([], [-1, 9])),
            *(
                (LayoutError, "are outside of a unit of 4", partial(nn.columns, x, start, stop, 4))
                for start, stop in ((-1, 2), (2, 5), (3, 2))
            ),
            *(
                (LayoutError, r"x\[:, start:stop\]", partial(index, key))
                for key in (0, (0, 1), (slice(None), slice(0, 8, 2)), by_rows, (slice(None), 3))
            ),
            *((TypeError, "", partial(of, x, value)) for of in (add, truediv) for value in NO_NUMBERS),
            *((TypeError, "", partial(add, value, x)) for value in NO_NUMBERS),
        ):
            with given(text=text):
                fails(kind, text, call)


@pytest.mark.parallel([2], thorough=[1])
def test_a_conjugated_view_becomes_a_tensor_of_its_own(some_grid):
    """A write to the tensor does not change the matrix of the view."""
    whole = integers((4, 6), "complex128")
    matrix = DistMatrix.from_global(some_grid, whole)
    weight = nn.Parameter(matrix.H)
    assert np.array_equal(weight.gather(), whole.conj().T)
    weight.local[...] += 1j
    assert np.array_equal(weight.gather(), whole.conj().T + 1j) and np.array_equal(matrix.gather(), whole)


@pytest.mark.parallel([2], thorough=[1])
def test_a_matrix_beside_a_tensor_is_one_of_the_tape(some_grid):
    whole = integers((4, 6))
    matrix, x = (DistMatrix.from_global(some_grid, to_library(whole)) for _ in range(2))
    x = nn.Tensor(x, requires_grad=True)
    for made, right in ((matrix + x, 2 * whole), (matrix - x, 0 * whole), (matrix * x, whole * whole)):
        assert isinstance(made, nn.Tensor) and made.requires_grad and np.array_equal(to_numpy(made.gather()), right)
    matrix += x
    assert isinstance(matrix, nn.Tensor)
