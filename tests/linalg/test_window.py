"""Windows of block-cyclic matrices: their elements, copies, and products."""

import numpy as np
import pytest
from samples import integers
from tiles import held, whole_of

from pmm3d import BlacsContext, DistMatrix, Grid
from pmm3d.linalg.window import Window, from_matrix, gemm

pytestmark = pytest.mark.parallel([4], thorough=[1, 2, 6])


def window_of(context, whole, blocks, part, first=(0, 0)):
    descriptor = context.descriptor(*whole.shape, *blocks, *first)
    arrays = held(descriptor.cyclic, context.grid.rank, whole, more=1)
    return Window(arrays[0] if arrays else np.empty((1, 0), whole.dtype, order="F"), descriptor, *part)


def test_windows_are_copied_and_multiplied(comm):
    shape = (2, comm.size // 2) if comm.size % 2 == 0 else (1, comm.size)
    whole = integers((23, 19), "float64", seed=1)
    with BlacsContext(comm, shape) as context:
        for part in ((0, 0, 23, 19), (5, 3, 9, 9), (7, 7, 1, 1), (3, 3, 0, 4)):
            window = window_of(context, whole, (4, 3), part, tuple(size - 1 for size in shape))
            row, col, rows, cols = part
            expected = whole[row : row + rows, col : col + cols]
            assert (whole_of(window) == expected).all()
            copy = window.like()
            for own_rows, own_cols, i, j in copy.own():
                copy.array[own_rows, own_cols] = expected[np.ix_(i, j)]
            assert (whole_of(copy) == expected).all()
            assert copy.cyclic.rows.alike(window.cyclic.rows) and copy.cyclic.cols.alike(window.cyclic.cols)
            result = window.like(cols, cols)
            gemm("T", "N", 1, window, copy, 0, result)
            assert (whole_of(result) == expected.T @ expected).all()


def test_a_matrix_becomes_a_window(comm):
    with Grid(comm) as grid, BlacsContext(grid, (1, comm.size)) as context:
        a = DistMatrix.from_function(grid, (9, 7), lambda i, j: i - 2.0 * j)
        assert (whole_of(from_matrix(a, context, 2)) == a.gather()).all()
