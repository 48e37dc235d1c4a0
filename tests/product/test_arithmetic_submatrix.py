"""Copies of rows and columns, and back, on every grid."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped
from samples import HOST_DTYPES, TESTED, UP_TO_4
from test_arithmetic import LAYOUTS, assert_is, made

from pmm3d import DistMatrix, DTypeError, Layout, LayoutError, Pmm3dError
from pmm3d.layout import EMPTY

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6])
WINDOWS = [
    (slice(2, 9), slice(1, 6)),
    (slice(None), slice(None)),
    (slice(3, 3), slice(None)),
    (slice(12, 13), slice(4)),
    (slice(5, None), slice(6, 7, 1)),
    (slice(0, 5), slice(0, 0)),
]
SHAPE = (13, 7)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_parts_of_matrices_in_all_layouts(grid):
    for number, (layout, target) in enumerate(product(LAYOUTS, LAYOUTS)):
        rows, cols = WINDOWS[number % len(WINDOWS)]
        a, whole = made(grid, SHAPE, layout)
        part, turned = a.submatrix(rows, cols, target), a.T.submatrix(cols, rows)
        assert part.layout == target
        assert_is(part, whole[rows, cols], turned, whole[rows, cols].T, a, whole)


@pytest.mark.parallel([1, 4], thorough=[2, 6])
@each_grid
def test_and_back(grid):
    for number, (layout, target) in enumerate(product(LAYOUTS[:-1], LAYOUTS)):
        rows, cols = WINDOWS[number % len(WINDOWS)]
        a, whole = made(grid, SHAPE, layout)
        part, values = made(grid, whole[rows, cols].shape, target, seed=5)
        before = a.fills
        assert a.set_submatrix(rows, cols, part) is a and a.fills == before + 1
        whole[rows, cols] = values
        assert_is(a, whole)
        a.T.set_submatrix(cols, rows, part.T * 2)
        whole[rows, cols] *= 2
        assert_is(a, whole)
        assert np.array_equal(a.local, whole[a.box.within(EMPTY)])


@pytest.mark.parallel([2], thorough=UP_TO_4)
@looped(
    "library, dtype",
    [*product([TESTED, "standin"], (*HOST_DTYPES, "int64")), *product(["torch"], ("bfloat16", "float32", "complex64"))],
)
def test_types(some_grid, library, dtype):
    rows, cols = WINDOWS[0]
    a, whole = made(some_grid, SHAPE, dtype=dtype, library=library)
    part = a.H.submatrix(cols, rows, Layout.B)
    assert part.dtype == dtype and type(part.local) is type(a.local) and not part.conjugated
    assert_is(part, whole[rows, cols].conj().T)
    b, values = made(some_grid, SHAPE, Layout.C, dtype, library, seed=2)
    b.set_submatrix(rows, cols, part.T)
    b.T.set_submatrix(slice(0, 1), slice(None), a.submatrix(slice(None), slice(0, 1)).H)
    values[rows, cols], values[:, :1] = whole[rows, cols].conj(), whole[:, :1].conj()
    assert_is(b, values)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_each_rank_receives_what_it_did_not_hold(grid):
    rows, cols = WINDOWS[0]
    for layout, target in product((Layout.A, Layout.C, Layout("x", "y")), (Layout.A, Layout(), Layout("y"))):
        a, whole = made(grid, SHAPE, layout)
        grid.ledger.reset()
        part = a.submatrix(rows, cols, target)
        indices = np.arange(whole.size).reshape(SHAPE)
        held = set(indices[a.box.within(EMPTY)].ravel().tolist())
        wanted = set(indices[rows, cols][part.box.within(EMPTY)].ravel().tolist())
        assert grid.ledger.total(phase="submatrix").received == 8 * len(wanted - held)
        assert grid.ledger.total(phase="redistribute").calls == 0
        grid.ledger.reset()
        a.set_submatrix(rows, cols, part)
        mine = set(indices[rows, cols].ravel().tolist()) & held
        assert grid.ledger.total(phase="submatrix").received == 8 * len(mine - wanted)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_what_is_refused(some_grid, all_fail):
    (a, whole), every = made(some_grid, SHAPE), slice(None)
    part, single = a.submatrix(slice(0, 4), every), DistMatrix.empty(some_grid, (4, 7), dtype="float32")
    view = made(some_grid, SHAPE, dtype="complex64")[0].conj()
    empty = view.submatrix(slice(0, 0), every)
    put = lambda b, rows=slice(0, 4), into=a: lambda: into.set_submatrix(rows, every, b)
    all_fail(
        *(
            (LayoutError, "rows are a slice without step within 0 and 13", lambda rows=rows: a.submatrix(rows, every))
            for rows in (slice(0, 14), slice(-2, None), slice(0, 10, 2), slice(5, 4), 3, slice(0, 1.5), None)
        ),
        (LayoutError, "columns are a slice without step within 0 and 7", lambda: a.submatrix(every, slice(8))),
        (LayoutError, "a layout is a pmm3d.Layout", lambda: a.submatrix(every, every, "A")),
        (LayoutError, "set_submatrix: A is 4 x 7; it must be 3 x 7", put(part, slice(0, 3))),
        (Pmm3dError, "set_submatrix: A is a ndarray", put(whole[:4])),
        (DTypeError, "set_submatrix: the matrix is float64 of .*, A float32", put(single)),
        (LayoutError, "set_submatrix: the matrix is a conjugated view", put(empty, slice(0, 0), view)),
    )
    if some_grid.size > 1:
        sums = a.redistribute(Layout(sums=("x", "y", "z")))
        all_fail((LayoutError, "set_submatrix: the matrix is of partial sums", put(part, into=sums)))
    assert_is(a, whole)
