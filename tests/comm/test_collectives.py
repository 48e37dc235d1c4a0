"""The five collectives on every axis of several grids, compared with numpy."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import DisagreementError, Grid
from pmm3d.layout import itemsize, offsets, part_sizes

pytestmark = pytest.mark.parallel([4, 6], thorough=[1, 2, 8])
AXES = ("x", "y", "z", "data", "everyone")
KINDS = [(TESTED, "float64", trail) for trail in ((), (3,), (2, 3))] + [("standin", "complex64", (2,))]
"""Array library, type, and trailing dims: the arrays have one dim more."""


def rows_of(rank):
    """Number of rows of a rank's array: different, and 0 for some ranks."""
    return (3, 0, 1, 4, 2, 0, 5, 1)[rank]


def one(rows, rank, dtype, trail, seed=0):
    """Array of a rank. Any rank can compute it."""
    return integers((rows, *trail), dtype, seed=100 * seed + rank)


def brought(axis, dtype, trail, rows=None, seed=0):
    return [one(rows_of(rank) if rows is None else rows, rank, dtype, trail, seed) for rank in axis.ranks]


def assert_equal(found, expected, library):
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(to_numpy(found, library), expected.astype(to_numpy(found, library).dtype))


def axes(grid):
    """The axes with several ranks, and the axis "data" with one rank."""
    found = [grid.axis(name) for name in AXES]
    return [axis for axis in found if axis.size > 1 or axis.name == "data"]


@each_grid
def test_all_gather(grid):
    for library, dtype, trail in KINDS:
        with given(library=library, dtype=dtype, trail=trail):
            for axis in axes(grid):
                parts = brought(axis, dtype, trail)
                found = axis.all_gather(to_library(parts[axis.index], library, dtype)).wait()
                assert_equal(found, np.concatenate(parts), library)


@each_grid
def test_reduce_scatter(grid):
    for library, dtype, trail in KINDS:
        with given(library=library, dtype=dtype, trail=trail):
            for axis in axes(grid):
                wholes = brought(axis, dtype, trail, rows=7)
                found = axis.reduce_scatter(to_library(wholes[axis.index], library, dtype)).wait()
                start, stop = offsets(part_sizes(7, axis.size))[axis.index :][:2]
                assert_equal(found, sum(wholes)[start:stop], library)


@each_grid
def test_all_reduce(grid):
    for library, dtype, trail in KINDS:
        with given(library=library, dtype=dtype, trail=trail):
            for axis in axes(grid):
                for rows in (0, 5, 6000):
                    arrays = brought(axis, dtype, trail, rows)
                    found = axis.all_reduce(to_library(arrays[axis.index], library, dtype)).wait()
                    assert_equal(found, sum(arrays), library)


@each_grid
def test_all_to_all(grid):
    for library, dtype, trail in KINDS:
        with given(library=library, dtype=dtype, trail=trail):
            for axis in axes(grid):
                counts = [[(sender + 2 * reader) % 4 for reader in range(axis.size)] for sender in range(axis.size)]
                arrays = [one(sum(counts[index]), rank, dtype, trail) for index, rank in enumerate(axis.ranks)]
                mine = to_library(arrays[axis.index], library, dtype)
                found = axis.all_to_all(mine, counts=counts[axis.index]).wait()
                cut = [offsets(counts[sender])[axis.index :][:2] for sender in range(axis.size)]
                expected = np.concatenate([array[start:stop] for array, (start, stop) in zip(arrays, cut)])
                assert_equal(found, expected, library)


@each_grid
def test_shift(grid):
    for library, dtype, trail in KINDS:
        with given(library=library, dtype=dtype, trail=trail):
            for axis in axes(grid):
                arrays = brought(axis, dtype, trail)
                for by in (1, -1, axis.size, 2, -7):
                    found = axis.shift(to_library(arrays[axis.index], library, dtype), by).wait()
                    assert_equal(found, arrays[(axis.index - by) % axis.size], library)


@each_grid
def test_out_is_filled_and_returned(grid):
    for library in (TESTED, "standin"):
        with given(library=library):
            for axis in axes(grid):
                parts, wholes = brought(axis, "float32", (3,)), brought(axis, "float32", (3,), rows=7)
                counts, part = [len(part) for part in parts], to_library(parts[axis.index], library)
                whole, total = to_library(wholes[axis.index], library), sum(wholes)
                low, high = offsets(part_sizes(7, axis.size))[axis.index :][:2]

                def check(out, start, expected):
                    assert start(out).wait() is out
                    assert_equal(out, expected, library)

                def empty(rows):
                    return to_library(np.full((rows, 3), 7, "float32"), library)

                check(
                    empty(sum(counts)), lambda out: axis.all_gather(part, out=out, counts=counts), np.concatenate(parts)
                )
                check(empty(high - low), lambda out: axis.reduce_scatter(whole, out=out), total[low:high])
                check(empty(high - low), lambda out: axis.reduce_scatter(whole, out=out, beta=2), total[low:high] + 14)
                check(empty(7), lambda out: axis.all_reduce(whole, out=out), total)
                check(whole, lambda out: axis.all_reduce(whole, out=out), total)
                before = parts[axis.index - 1]
                check(empty(len(before)), lambda out: axis.shift(part, out=out), before)


@each_grid
def test_several_under_way_are_waited_for_in_another_order(grid):
    for axis in axes(grid):
        arrays = [integers((5, 2), seed=rank) for rank in axis.ranks]
        mine, total = arrays[axis.index], sum(arrays)
        low, high = offsets(part_sizes(5, axis.size))[axis.index :][:2]
        pending = {
            "sum": axis.all_reduce(mine),
            "gathered": axis.all_gather(mine),
            "twice": axis.all_reduce(2 * mine),
            "scattered": axis.reduce_scatter(mine),
            "next": axis.shift(mine),
            "last": axis.shift(mine, -1),
        }
        order = list(pending)[axis.index % 6 :] + list(pending)[: axis.index % 6]
        found = {name: pending[name].wait() for name in reversed(order)}
        assert np.array_equal(found["sum"], total) and np.array_equal(found["twice"], 2 * total)
        assert np.array_equal(found["gathered"], np.concatenate(arrays))
        assert np.array_equal(found["scattered"], total[low:high])
        assert np.array_equal(found["next"], arrays[axis.index - 1])
        assert np.array_equal(found["last"], arrays[(axis.index + 1) % axis.size])
        assert all(one.done and one.test() for one in pending.values())
    assert grid.engine.idle()


@each_grid
def test_axes_work_side_by_side(grid):
    """Collectives of all axes in progress at the same time do not receive each other's messages."""
    started = [(axis, axis.all_reduce(np.array([1.0, axis.index]))) for axis in axes(grid) * 3]
    for axis, pending in reversed(started):
        assert np.array_equal(pending.wait(), [axis.size, axis.size * (axis.size - 1) / 2])


@each_grid
def test_the_ledger_counts_every_byte(grid):
    for axis in axes(grid):
        for dtype in ("float64", "float16"):
            with given(dtype=dtype):
                width = 3 * itemsize(dtype)
                rows = [rows_of(rank) for rank in axis.ranks]
                mine, others = rows[axis.index], axis.size - 1
                own7, own4000 = part_sizes(7, axis.size)[axis.index], part_sizes(12000, axis.size)[axis.index]
                part, whole, large = (one(count, 0, dtype, (3,)) for count in (mine, 7, 4000))
                expected = {
                    "all_gather": (lambda: axis.all_gather(part), others * mine, sum(rows) - mine),
                    "reduce_scatter": (lambda: axis.reduce_scatter(whole), 7 - own7, others * own7),
                    "all_reduce": (lambda: axis.all_reduce(whole), others * 7, others * 7),
                    "shift": (lambda: axis.shift(part), mine * (others > 0), rows[axis.index - 1] * (others > 0)),
                }
                for name, (start, sent, received) in expected.items():
                    grid.ledger.reset()
                    start().wait()
                    entry = grid.ledger.total(axis=axis.name, operation=name)
                    assert (entry.calls, entry.sent, entry.received) == (1, width * sent, width * received)
                grid.ledger.reset()
                axis.all_reduce(large).wait()
                volume = (12000 - own4000 + others * own4000) * itemsize(dtype)
                if 12000 * itemsize(dtype) * axis.size > 2**16 and others:
                    assert (grid.ledger.total().sent, grid.ledger.total().received) == (volume, volume)


@pytest.mark.parallel([2, 3, 4, 6, 8])
def test_in_stages_as_of_many_ranks(comm, stages_of_two):
    """With 3 and 6 ranks there are also pairs. all_to_all and shift do not use stages."""
    with Grid(comm, "ddp", debug=True) as grid:
        for test in (test_all_gather, test_reduce_scatter, test_all_reduce, test_all_to_all, test_shift):
            test.__wrapped__(grid)
        with pytest.raises(DisagreementError, match="not the same on its ranks"):
            grid.data.all_gather(np.ones(3)).wait() if grid.rank else grid.data.shift(np.ones(3)).wait()
