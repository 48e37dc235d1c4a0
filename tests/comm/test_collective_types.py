"""The five collectives for every element type of every array library."""

import numpy as np
import pytest
from loops import given
from samples import TESTED, integers, to_library, to_numpy

from pmm3d.layout import MATRIX_DTYPES, offsets, part_sizes

NUMPY = [dtype for dtype in MATRIX_DTYPES if dtype != "bfloat16"] + ["int64", "int8"]
UNSIGNED = ["uint8", "bool"]
"""Types that are sent, and not summed."""
STANDIN = ["float16", "float32", "complex128", "int64"]
TORCH = [*MATRIX_DTYPES, "int64", "int32"]
ROWS = (3, 0, 1, 4, 2, 0, 5, 1)
TRAILS = [(), (3,), (2, 3)]


def brought(axis, dtype, trail, rows=None):
    """Array of each rank of the axis, with `rows` rows, or with different numbers of rows, some of them 0."""
    low = 0 if dtype in UNSIGNED else -4
    return [integers((ROWS[rank] if rows is None else rows, *trail), dtype, rank, low) for rank in axis.ranks]


def assert_equal(found, expected, library):
    values = to_numpy(found, library)
    assert values.shape == expected.shape
    assert np.array_equal(values, expected.astype(values.dtype))


def assert_moved(axis, library, dtype, trail):
    parts = brought(axis, dtype, trail)
    mine, index = to_library(parts[axis.index], library, dtype), axis.index
    assert_equal(axis.all_gather(mine).wait(), np.concatenate(parts), library)
    assert_equal(axis.shift(mine).wait(), parts[index - 1], library)
    cut = [part[slice(*offsets(part_sizes(len(part), axis.size))[index : index + 2])] for part in parts]
    assert_equal(axis.all_to_all(mine).wait(), np.concatenate(cut), library)


def assert_added(axis, library, dtype, trail):
    wholes = brought(axis, dtype, trail, rows=7)
    mine, total = to_library(wholes[axis.index], library, dtype), sum(wholes)
    own = slice(*offsets(part_sizes(7, axis.size))[axis.index : axis.index + 2])
    assert_equal(axis.all_reduce(mine).wait(), total, library)
    assert_equal(axis.reduce_scatter(mine).wait(), total[own], library)


def check(grid, library, dtype):
    for axis in (grid.x, grid.y, grid.everyone):
        for trail in TRAILS:
            with given(trail=trail):
                assert_moved(axis, library, dtype, trail)
                if dtype not in UNSIGNED:
                    assert_added(axis, library, dtype, trail)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_numpy(some_grid):
    for dtype in NUMPY + UNSIGNED:
        check(some_grid, TESTED, dtype)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_a_device(some_grid):
    for dtype in STANDIN:
        check(some_grid, "standin", dtype)


@pytest.mark.parallel([3], thorough=[1, 2, 4])
def test_torch(some_grid):
    for dtype in TORCH + UNSIGNED:
        check(some_grid, "torch", dtype)
