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

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, GridError, LayoutError, Pmm3dError, nn
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
    "exp": lambda o, t: o.exp(t["x"]), "log": lambda o, t: o.log(t["x"] * t["x"]),
    "sqrt": lambda o, t: o.sqrt(t["x"] * t["x"] + 1), "abs": lambda o, t: abs(t["x"]) + o.abs(t["w"]),
    "powers": lambda o, t: t["x"] ** 3 - o.pow(t["w"], -2) + (t["x"] * 0) ** 1, "x ** 0": lambda o, t: t["x"] ** 0,
    "clip": lambda o, t: o.clip(t["x"], -1, 1) * o.clip(t["w"], max=0.25),
    "at a limit": lambda o, t: o.clip(t["x"] * 0 + 1, 1, 2) + o.clip(t["w"], min=0),
    "maximum": lambda o, t: o.maximum(t["x"], t["w"]), "minimum": lambda o, t: o.minimum(t["x"], t["w"]),
    "maximum, row": lambda o, t: o.maximum(t["x"], t["row"]), "of equals": lambda o, t: o.maximum(t["x"], t["x"]),
    "minimum, number": lambda o, t: o.minimum(0.25, t["x"]), "minimum, col": lambda o, t: o.minimum(t["col"], t["w"]),
    "where": lambda o, t: o.where(o.relu(t["x"]), t["w"], t["x"]),
    "where row": lambda o, t: o.where(o.relu(t["row"]), t["x"], t["col"]),
    "where x": lambda o, t: o.where(o.relu(t["x"]), t["row"], 0.5),
    "where number": lambda o, t: o.where(o.relu(t["w"]), 2, t["x"]),
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
    "max 0": lambda o, t: o.max(t["x"], 0), "max 1": lambda o, t: o.max(t["x"], 1),
    "max": lambda o, t: o.max(t["x"]) * t["w"], "min": lambda o, t: o.min(t["x"]) * t["w"],
    "min 0": lambda o, t: o.min(t["x"], 0), "min 1": lambda o, t: o.min(t["x"], 1),
    "standardized": lambda o, t: (t["x"] - o.min(t["x"], 0)) / (o.max(t["x"], 0) - o.min(t["x"], 0) + 1),
}  # fmt: skip
PARTS = {
    "transpose": lambda o, t: o.matrix_transpose(t["x"] * t["w"]), "of a row": lambda o, t: t["row"].T * t["col"].T,
    "rows": lambda o, t: o.rows(t["x"], 1, 3, 3), "rows of pairs": lambda o, t: o.rows(t["x"], 0, 1, 2),
    "a slice": lambda o, t: t["x"][1:5] * t["w"][-4:], "of both": lambda o, t: t["x"][2:5, 3:8],
    "no rows": lambda o, t: t["x"][3:3], "split of rows": lambda o, t: mixed(*o.split(t["x"], [2, 2, 2], 0)),
    "uneven": lambda o, t: o.concat(o.split(t["x"], [3, 0, 1, 2], 0)[::-1]),
    "units of rows": lambda o, t: o.split(t["x"], [1, 2], 0)[1],
    "unused": lambda o, t: o.split(t["x"], [1, 5], 0)[0] * o.split(t["w"], [5, 1], 0)[1],
    "concat": lambda o, t: o.concat([t["x"], t["row"], t["w"]]),
    "concat of columns": lambda o, t: o.concat([t["col"], t["x"], t["w"], t["x"]], 1),
    "concat of one": lambda o, t: o.concat([t["x"]]) + o.concat([t["w"]], 1),
    "matmul": lambda o, t: t["x"] @ t["w"].T, "gram": lambda o, t: t["x"].T @ t["x"],
    "outer": lambda o, t: o.matmul(t["col"], t["row"]),
    "matmul of a sum": lambda o, t: (t["x"] + t["w"]) @ t["w"].T @ t["x"],
    "take": lambda o, t: o.take(t["x"], [4, 0, 4, 5, 1, 4, 3]), "take nothing": lambda o, t: o.take(t["x"], []),
    "take a row": lambda o, t: o.take(t["row"], [0, 0]),
    "scatter_add": lambda o, t: o.scatter_add(t["x"], [4, 0, 4, 2, 0, 4], 5),
    "there and back": lambda o, t: o.scatter_add(o.take(t["x"], [1, 5, 5]), [3, 0, 3], 4) * t["x"][:4],
    "groups": lambda o, t: o.grouped_linear(t["x"], [t["w"].T, t["x"].T, t["w"].T], [1, 0, 5]),
    "two groups": lambda o, t: o.grouped_linear(t["x"], [t["x"].T, t["w"].T @ t["w"] @ t["x"].T], [4, 2]),
}  # fmt: skip


def mixed(one, middle, other):
    return one * other + one * middle[:, :1]


def of_torch(cases, shapes):
    """Title -> (result, name -> gradient of <result, random matrix>)."""
    import torch

    torch.set_num_threads(1)

    def columns(x, start, stop, unit):
        return x.reshape(len(x), -1, unit)[:, :, start:stop].reshape(len(x), -1)

    def split(x, sizes, dim=1):
        if dim == 0:
            return [part.T for part in split(x.T, sizes)]
        return [columns(x, stop - size, stop, sum(sizes)) for size, stop in zip(sizes, np.cumsum(sizes))]

    def rows(x, start, stop, unit):
        return columns(x.T, start, stop, unit).T

    def extreme(function):
        return lambda x, dim=None: function(x).reshape(1, 1) if dim is None else function(x, dim, keepdim=True).values

    def grouped_linear(x, weights, sizes):
        return torch.cat([part @ weight for part, weight in zip(x.split(sizes), weights)])

    functions = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("abs", "clip", "exp", "log", "matmul", "pow", "relu", "sqrt")},
        maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
        minimum=lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
        where=lambda condition, a, b: torch.where(condition != 0, a, b),
        max=extreme(torch.max),
        min=extreme(torch.min),
        matrix_transpose=lambda x: x.T,
        rows=rows,
        concat=lambda tensors, dim=0: torch.cat(list(tensors), dim),
        take=lambda x, indices: x[torch.tensor(indices, dtype=torch.int64)],
        scatter_add=lambda x, indices, rows: x.new_zeros(rows, x.shape[1]).index_add(0, torch.tensor(indices), x),
        grouped_linear=grouped_linear,
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
@pytest.mark.parametrize("kind", ["elementwise", "along", "parts"])
def test_values_and_gradients_are_those_of_torch(comm, kind, library):
    """Each operation on each grid, in different layouts. In every second case all operands have one layout."""
    cases = {"elementwise": ELEMENTWISE, "along": ALONG, "parts": PARTS}[kind]
    expected, turn = by_rank_0(comm, lambda: of_torch(cases, SHAPES)), count()

    def check(grid):
        for (title, case), number in zip(cases.items(), turn):
            layouts = {
                name: fitting(SHAPES, LAYOUTS[(number + number % 2 * 3 * index) % len(LAYOUTS)])[name]
                for index, name in enumerate(SHAPES)
            }
            assert_as_torch(grid, case, expected[title], SHAPES, layouts, library)

    on_each_grid(comm, check, None if library == TESTED else [WIDEST[comm.size]])


NARROW = ("x / w", "row / x", "col / x", "one * x", "sum 0", "mean 1", "softmax 0", "softmax 1", "log_softmax 1",
          "powers", "maximum, row", "where row", "max 0", "max 1", "min", "transpose", "no rows", "concat",
          "concat of columns", "gram", "take nothing")  # fmt: skip
"""Cases for three columns."""
NOT_OF_NOTHING = "softmax 0", "sum 0", "max 0", "min", "no rows"
"""Cases that need rows, or whose gradient is another one without them."""


@looped("rows, titles", [(2, NARROW), (0, [title for title in NARROW if title not in NOT_OF_NOTHING])])
@over_grids(lambda ranks: ALL_GRIDS[ranks][::3])
def test_parts_may_be_empty(comm, grid, rows, titles):
    """Two rows and three columns, on all grids; a matrix without rows."""
    shapes = {"x": (rows, 3), "w": (rows, 3), "row": (1, 3), "col": (rows, 1), "one": (1, 1)}
    cases = {title: {**ELEMENTWISE, **ALONG, **PARTS}[title] for title in titles}
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
    assert moved(grid, lambda x: nn.max(x, 1), x) == 8 * 2 * rows * (along_y - 1)
    assert moved(grid, lambda x: nn.max(x, 0), x) == 8 * 2 * cols * sum(size - 1 for size in along_rows)
    for operation in (
        nn.matrix_transpose,
        lambda x: nn.rows(x, 1, 2, rows),
        lambda x: nn.where(x, x, 0.0),
        lambda x: nn.concat([x, x], 1) if along_y == 1 else x,
        lambda x: nn.concat([x, x], 0) if rows == 16 else x,
    ):
        assert moved(grid, operation, x) == 0
    few = nn.relayout(x, Layout(("data", "z")))
    assert moved(grid, lambda x: x[:], few) == 0
    assert moved(grid, lambda x: x[1:], few) <= 8 * 16 * 16 // len(range(0, 16, rows))


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
PAIR = np.array([[1], [0]])


@over_grids(lambda ranks: GRIDS[ranks][-1:])
def test_what_is_refused(comm, grid, fails):
    with Grid(comm, "ddp") as elsewhere:
        x, other = (nn.Tensor(spread(each, drawn((6, 8), 1))) for each in (grid, elsewhere))
        whole = nn.Tensor(spread(grid, np.arange(48).reshape(6, 8), INPUT))
        narrow = nn.Tensor(spread(grid, drawn((6, 8), 1), dtype="float32"))
        of_integers = [partial(mul, whole, 0.5), partial(truediv, whole, 2), partial(nn.mean, whole, 0),
                       partial(nn.softmax, whole), partial(add, whole, whole), partial(nn.max, whole),
                       partial(nn.exp, whole), partial(nn.concat, [whole]), partial(nn.take, whole, [0])]  # fmt: skip
        index, imaginary = x.__getitem__, nn.Tensor(spread(grid, drawn((6, 8), 1) * 1j))
        of_complex = [partial(nn.abs, imaginary), partial(nn.maximum, imaginary, 0), partial(nn.argmax, imaginary)]
        empty, wide = (nn.Tensor(spread(grid, drawn(shape, 1))) for shape in ((0, 8), (6, 9)))
        abroad = spread(elsewhere, PAIR)
        weights, outside = [x.T, x.T], nn.Tensor(spread(grid, np.array([[0], [7]]), Layout()))
        for kind, text, call in (
            (LayoutError, "6 x 8 and 6 x 2 do not match", lambda: x + x[:, :2]),
            (GridError, "two Grids", lambda: x * other),
            (DTypeError, "of one type .*and library", lambda: x * narrow),
            (LayoutError, "no whole number of units of 3", lambda: nn.columns(x, 0, 1, 3)),
            (LayoutError, "no whole number of units of 3", lambda: nn.split(x, [1, 2])),
            (LayoutError, "6 rows are no whole number of units of 4", lambda: nn.split(x, [1, 3], 0)),
            (LayoutError, "outside of a unit of 3 rows", lambda: nn.rows(x, 2, 4, 3)),
            (LayoutError, "start and stop are whole numbers; got 0.5 and 2", lambda: nn.rows(x, 0.5, 2)),
            (LayoutError, "start and stop are whole numbers; got 0 and None", lambda: nn.columns(x, 0, None)),
            (LayoutError, "unit is a whole number of rows; got 2.0", lambda: nn.rows(x, 0, 1, 2.0)),
            (LayoutError, "unit is a whole number of columns; got 'a'", lambda: nn.rms_norm(x, x[:1], unit="a")),
            (LayoutError, "at least one tensor", lambda: nn.concat([])),
            *((LayoutError, "concat: dim is 0, .* got", partial(nn.concat, [x], dim)) for dim in (True, 2, 0.0)),
            *((LayoutError, "split: dim is 0, .* got", partial(nn.split, x, [8], dim)) for dim in (True, 2)),
            (LayoutError, "equal numbers of columns; got 6 x 8, 6 x 9", lambda: nn.concat([x, wide])),
            (LayoutError, "equal numbers of rows; got 6 x 8, 0 x 8", lambda: nn.concat([x, empty], 1)),
            (GridError, "two Grids", lambda: nn.concat([x, other])),
            (DTypeError, "of one type .*and library", lambda: nn.concat([x, narrow])),
            (GridError, "two Grids", lambda: nn.where(other, x, x)),
            (LayoutError, "do not match", lambda: nn.where(x[:2], x, x)),
            (LayoutError, "has no elements to compare", lambda: nn.max(empty, 0)),
            (LayoutError, "has no elements to compare", lambda: nn.argmax(empty)),
            (LayoutError, r"A is 6 x 8 and B 6 x 8", lambda: x @ x),
            (GridError, "two Grids", lambda: x @ other.T),
            (DTypeError, "of one type .*and library", lambda: x @ narrow.T),
            (Pmm3dError, "made of a DistMatrix; got float", lambda: x @ 2.0),
            (Pmm3dError, "the exponent is a number", lambda: x**x),
            (Pmm3dError, "clip: min and max are numbers", lambda: nn.clip(x, 2, 1)),
            (Pmm3dError, "clip: min and max are numbers", lambda: nn.clip(x, np.nan)),
            (Pmm3dError, "row 1 has the index 6; x has 6 rows, so indices are 0 to 5", lambda: nn.take(x, [5, 6])),
            (Pmm3dError, "row 1 has the index 7; x has 6 rows", lambda: nn.take(x, outside)),
            (Pmm3dError, "the result has 2 rows, so indices are 0 to 1", lambda: nn.scatter_add(x, [2] * 6, 2)),
            (Pmm3dError, "1 has the index 9223372036854775809;", lambda: nn.take(x, np.array([5, 2**63 + 1], "u8"))),
            (Pmm3dError, "x has 0 rows, so there are no valid indices", lambda: nn.take(empty, [0])),
            (GridError, "take: indices must be on the Grid .*two Grids", lambda: nn.take(x, abroad)),
            (GridError, "scatter_add: indices must be on", lambda: nn.scatter_add(x[:2], nn.Tensor(abroad), 6)),
            (GridError, "embedding: tokens must be on", lambda: nn.transformer.embedding(abroad, x)),
            (LayoutError, "x has 6 rows, and there are 2 indices", lambda: nn.scatter_add(x, [0, 1], 2)),
            (LayoutError, "rows is a whole number", lambda: nn.scatter_add(x, [0] * 6, -1)),
            (DTypeError, "indices are a list of integers", lambda: nn.take(x, [0.5])),
            (DTypeError, "indices are a list of integers", lambda: nn.take(x, [[0]])),
            (DTypeError, "indices must be integers", lambda: nn.take(x, x[:, :1])),
            (LayoutError, "a matrix of one column", lambda: nn.take(x, whole)),
            (LayoutError, "2 weights, and 1 sizes", lambda: nn.grouped_linear(x, weights, [6])),
            (LayoutError, "add up to 5; x has 6 rows", lambda: nn.grouped_linear(x, weights, [4, 1])),
            (LayoutError, "weights of 8 rows", lambda: nn.grouped_linear(x, [x.T, x], [4, 2])),
            (LayoutError, "sizes are whole numbers", lambda: nn.grouped_linear(x, weights, [7, -1])),
            (Pmm3dError, "at least one weight", lambda: nn.grouped_linear(empty, [], [])),
            *((DTypeError, "real numbers", call) for call in of_complex),
            *((DTypeError, "floating point numbers", call) for call in of_integers),
            *(
                (LayoutError, "dim is 0, over the rows, or 1", partial(operation, x, dim))
                for operation in (nn.sum, nn.mean, nn.softmax, nn.log_softmax, nn.max, nn.argmax)
                for dim in (-1, 2, True, 0.0)
            ),
            *(
                (LayoutError, "split: sizes are numbers", partial(nn.split, x, sizes))
                for sizes in ([], [-1, 9], 8, [1.5], None)
            ),
            *(
                (LayoutError, "are outside of a unit of 4", partial(nn.columns, x, start, stop, 4))
                for start, stop in ((-1, 2), (2, 5), (3, 2))
            ),
            *(
                (LayoutError, r"x\[:, start:stop\]. Steps are not supported", partial(index, key))
                for key in (0, (0, 1), (slice(None), slice(0, 8, 2)), (), (slice(None), 3), (slice(None),) * 3)
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


@pytest.mark.parallel([2], thorough=[1, 4])
def test_sizes_of_groups_that_differ_among_the_ranks_are_refused(some_grid, fails, comm):
    x = nn.Tensor(spread(some_grid, drawn((2, 3), 1)))
    if comm.size > 1:
        sizes = iter([1, 1] if comm.rank else [2, 0])
        fails(DisagreementError, "grouped_linear: .* different", lambda: nn.grouped_linear(x, [x.T, x.T], sizes))
    assert nn.grouped_linear(x, [x.T, x.T], iter(np.array([2, 0]))).shape == (2, 2)


@pytest.mark.parallel([2], thorough=[1, 4])
def test_sizes_and_limits_of_every_kind_of_whole_number(some_grid):
    """A dim of numpy, sizes in an array or of a generator, and a step of 1."""
    x = nn.Tensor(spread(some_grid, drawn((6, 8), 1)))
    for sizes in (np.array([2, 6]), (size for size in (2, 6)), (2, np.int64(6))):
        assert [part.shape for part in nn.split(x, sizes)] == [(6, 2), (6, 6)]
    assert nn.rows(x, np.int32(1), np.uint8(3)).shape == (2, 8) and nn.sum(x, np.int64(1)).shape == (6, 1)
    assert x[::1] is x and x[::1, 1:3:1].shape == (6, 2)


@pytest.mark.parallel([1])
def test_the_power_of_0_has_no_slope_for_an_infinite_gradient(some_grid):
    x = nn.Tensor(spread(some_grid, drawn((1, 3), 1)), requires_grad=True)
    (x**0).backward(spread(some_grid, np.array([[np.inf, np.nan, 1]])))
    assert to_numpy(x.grad.gather()).tolist() == [[0, 0, 0]]
