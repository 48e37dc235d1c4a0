"""Indices of the largest elements, lookups and sums of rows by index, and the gradients of equal elements."""

import numpy as np
import pytest
from loops import looped
from networks import ALL_GRIDS, WIDEST, over_grids, spread
from samples import integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

X = integers((7, 5), seed=3, low=-2, high=2)
LAYOUTS = [
    batch_layout("y"), Layout(), Layout(("y", "z"), "x"), Layout((), ("z", "y", "x")), Layout(("x", "y", "z")),
    Layout("data", "x", sums=("y", "z")),
]  # fmt: skip


def whole(tensor):
    return to_numpy(tensor.gather())


@over_grids(ALL_GRIDS)
def test_of_equal_elements_the_first_is_the_largest(grid):
    """X has few different numbers, so each row and each column has several extremes."""
    first = lambda dim: np.expand_dims(X.argmax(dim), dim)
    for layout in LAYOUTS:
        x = nn.Tensor(spread(grid, X, layout), requires_grad=True)
        for dim in (0, 1):
            index, g = nn.argmax(x, dim), integers((7, 1) if dim else (1, 5), seed=4, low=1, high=5)
            assert index.dtype == "int64" and not index.requires_grad
            assert np.array_equal(whole(index), first(dim))
            nn.max(x, dim).backward(spread(grid, g, Layout()))
            expected = np.zeros(X.shape)
            np.put_along_axis(expected, first(dim), g, dim)
            assert np.array_equal(whole(x.grad), expected)
            x.grad = None
        assert whole(nn.argmax(x)).tolist() == [[X.argmax()]]
        nn.min(x).backward()
        assert np.array_equal(whole(x.grad), np.arange(X.size).reshape(X.shape) == X.argmin())


@over_grids(lambda ranks: [WIDEST[ranks]])
def test_partial_sums_of_indices_are_summed(grid):
    """Before they are checked: the part of a rank alone may be out of range."""
    layout, wanted = Layout(sums=("x", "y")), np.array([[2], [4], [0]])
    ranks = grid.x.size * grid.y.size
    own = wanted - 5 * (ranks - 1) if grid.x.index == grid.y.index == 0 else np.full((3, 1), 5)
    indices = DistMatrix(grid, to_library(own), (3, 1), layout)
    x = nn.Tensor(spread(grid, X, batch_layout("y")))
    assert np.array_equal(whole(nn.take(x, indices)), X[wanted[:, 0]])
    assert np.array_equal(whole(nn.transformer.embedding(indices, x.T)), X[wanted[:, 0]])
    expected = np.zeros((5, 5))
    expected[wanted[:, 0]] = X[:3]
    assert np.array_equal(whole(nn.scatter_add(x[:3], indices, 5)), expected)


@over_grids(ALL_GRIDS)
def test_nan_is_the_largest_and_the_smallest(grid):
    """Also beside infinite numbers; the first NaN counts."""
    x = X.copy()
    x[1, 2], x[5, 0], x[5, 4] = np.inf, np.nan, np.nan
    given = nn.Tensor(spread(grid, x, batch_layout("y")))
    for dim in (0, 1):
        assert np.array_equal(whole(nn.max(given, dim)), x.max(dim, keepdims=True), equal_nan=True)
        assert np.array_equal(whole(nn.min(given, dim)), x.min(dim, keepdims=True), equal_nan=True)
        assert np.array_equal(whole(nn.argmax(given, dim)), np.expand_dims(x.argmax(dim), dim))
    assert np.isnan(nn.max(given).item()) and whole(nn.argmax(given)).tolist() == [[25]]


@over_grids(lambda ranks: [WIDEST[ranks]])
def test_extremes_of_minus_infinity(grid):
    x = nn.Tensor(spread(grid, np.full((3, 2), -np.inf), batch_layout("y")))
    assert whole(nn.max(x, 0)).tolist() == [[-np.inf] * 2] and whole(nn.argmax(x, 1)).tolist() == [[0]] * 3
    assert whole(nn.argmax(x)).tolist() == [[0]]


INDICES = np.array([[6], [0], [6], [3], [3], [6], [1], [2]])


@over_grids(ALL_GRIDS)
def test_rows_by_indices_of_every_layout(grid):
    """A matrix of indices, a tensor of the step itself, and a list. Exact."""
    g = integers((8, 5), seed=6, low=-2, high=2)
    expected = np.zeros(X.shape)
    np.add.at(expected, INDICES[:, 0], g)
    for layout in LAYOUTS:
        x = nn.Tensor(spread(grid, X, layout), requires_grad=True)
        rows = layout.rows if not layout.sums else ()
        for indices in (spread(grid, INDICES, Layout(rows)), nn.Tensor(spread(grid, INDICES, Layout())), INDICES[:, 0]):
            out = nn.take(x, indices)
            assert np.array_equal(whole(out), X[INDICES[:, 0]])
            out.backward(spread(grid, g, Layout(("data", "z"))))
            assert np.array_equal(whole(x.grad), expected)
            x.grad = None
            added = nn.Tensor(spread(grid, g, layout), requires_grad=True)
            total = nn.scatter_add(added, indices, 7)
            assert np.array_equal(whole(total), expected)
            total.backward(spread(grid, X, batch_layout("x")))
            assert np.array_equal(whole(added.grad), X[INDICES[:, 0]])
        assert np.array_equal(whole(nn.take(x, nn.argmax(x, 0).T)), X[X.argmax(0)])


@over_grids(lambda ranks: ALL_GRIDS[ranks][::2])
def test_rows_and_columns_in_the_order_of_fortran(grid):
    """Slices and concatenation of shards that are stored by columns."""
    x = nn.Tensor(DistMatrix.from_global(grid, to_library(X), layout=batch_layout("y"), order="F"))
    assert np.array_equal(whole(x[2:6]), X[2:6]) and np.array_equal(whole(x.T[1:3]), X.T[1:3])
    assert np.array_equal(whole(nn.concat([x, x[:1]])), np.concatenate([X, X[:1]]))
    assert np.array_equal(whole(nn.max(x, 1)), X.max(1, keepdims=True))


@over_grids(ALL_GRIDS)
def test_a_slice_keeps_the_layout(grid):
    """Rows stay split over the same axes, and units of columns stay."""
    layout = Layout(("data", "z"), "y", units=(1, 2))
    x = nn.Tensor(spread(grid, integers((9, 8), seed=1), layout))
    for made, shape in ((x[1:], (8, 8)), (nn.concat([x, x[:2]]), (11, 8)), (nn.split(x, [4, 5], 0)[0], (4, 8))):
        assert made.layout == layout and made.shape == shape
        assert made.local.shape == layout.box(shape, grid.shape, grid.coords).shape
    sequences = nn.Tensor(spread(grid, integers((12, 8), seed=1), Layout(("data", "z"), "y", units=(3, 1))))
    grid.ledger.reset()
    assert nn.rows(sequences, 0, 2, 3).layout == Layout(("data", "z"), "y", units=(2, 1))
    assert grid.ledger.total().received == 0


@pytest.mark.parallel([1])
def test_a_matrix_beside_a_tensor_in_a_product(comm):
    with Grid(comm) as grid:
        x, matrix = nn.Tensor(spread(grid, X), requires_grad=True), spread(grid, X.T.copy())
        for made, right in ((x @ matrix, X @ X.T), (matrix @ x, X.T @ X)):
            assert isinstance(made, nn.Tensor) and made.requires_grad and np.array_equal(whole(made), right)


@pytest.mark.parallel([4])
@looped("order", ["zigzag", "striped"])
def test_rows_that_are_stored_in_another_order(comm, order):
    """Slices, joined rows, indices and first maxima are those of the matrix, not of the shards. Exact."""
    whole_x, indices = integers((24, 5), seed=7, low=-2, high=2), [23, 0, 7, 7, 12]
    with Grid(comm, (1, 1, 2), axes={"seq": 2}) as grid:
        x = nn.Tensor(spread(grid, whole_x, token_layout(grid, 12, order=order)), requires_grad=True)
        for made, right in (
            (x[1:11], whole_x[1:11]),
            (nn.rows(x, 0, 2, 12), whole_x.reshape(2, 12, 5)[:, :2].reshape(4, 5)),
            (nn.concat([x, x[20:]]), np.concatenate([whole_x, whole_x[20:]])),
            (nn.concat([x, x], 1), np.concatenate([whole_x, whole_x], 1)),
            (nn.argmax(x, 0), whole_x.argmax(0)[None, :]),
            (nn.argmax(x, 1), whole_x.argmax(1)[:, None]),
            (x.T, whole_x.T),
            (x @ x.T, whole_x @ whole_x.T),
            (nn.take(x, indices), whole_x[indices]),
            (nn.grouped_linear(x, [x[:5], x[5:10]], [7, 17]),
             np.concatenate([whole_x[:7] @ whole_x[:5], whole_x[7:] @ whole_x[5:10]])),
        ):  # fmt: skip
            assert np.array_equal(whole(made), right)
        nn.max(x, 0).backward(DistMatrix.ones(grid, (1, 5), layout=Layout(), library=x.library.kind))
        expected = np.zeros(whole_x.shape)
        np.put_along_axis(expected, whole_x.argmax(0)[None, :], 1.0, 0)
        assert np.array_equal(whole(x.grad), expected)


@pytest.mark.parallel([4])
@looped("order", ["plain", "zigzag"])
def test_a_table_whose_rows_are_split_in_sequences(comm, order):
    """Units of rows differ among the axes of the layout, so they do not fit the layout of a weight."""
    whole_x = integers((16, 4), seed=8, low=-2, high=2)
    with Grid(comm, (1, 1, 2), axes={"seq": 2}) as grid:
        x = nn.Tensor(spread(grid, whole_x, token_layout(grid, 8, order=order)))
        tokens = spread(grid, np.array([[3], [0]]), Layout())
        for made, right in (
            (nn.take(x.T, [1, 0]), whole_x.T[[1, 0]]),
            (nn.transformer.embedding(tokens, x), whole_x.T[[3, 0]]),
            (nn.linear(x.T, x), whole_x.T @ whole_x),
            (nn.grouped_linear(x.T, [x, x], [1, 3]), whole_x.T @ whole_x),
        ):
            assert np.array_equal(whole(made), right)


@pytest.mark.parallel([4])
@looped("order", ["zigzag", "striped"])
def test_the_place_of_a_wrong_index_is_that_in_the_matrix(comm, fails, order):
    indices = np.zeros((24, 1), int)
    indices[19] = 7
    with Grid(comm, (1, 1, 2), axes={"seq": 2}) as grid:
        matrix = DistMatrix.from_global(grid, indices, layout=token_layout(grid, 12, order=order))
        x = nn.Tensor(spread(grid, X))
        fails(Pmm3dError, "row 19 has the index 7; x has 7 rows, so indices are 0 to 6", lambda: nn.take(x, matrix))
