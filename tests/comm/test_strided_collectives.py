"""The strided collectives, compared with numpy and with the checked ones: both dims, gaps, order, work memory."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from fake_link import LIBRARY, run
from loops import given
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import DisagreementError, Grid
from pmm3d.comm import strided_collectives
from pmm3d.layout import aligned, offsets, part_sizes

SIZES = (1, 2, 3, 7, 8, 16, 17, 18, 24, 36)
"""Sizes of groups of one stage and of several."""


def rows_of(size):
    """Numbers of rows of the ranks: different, some 0."""
    return [(3, 0, 1, 4, 2, 0, 5, 1)[rank % 8] for rank in range(size)]


def wholes(axis, rows, cols, dtype):
    return [integers((rows, cols), dtype, seed=rank) for rank in axis.ranks]


def own(array, counts, rank, dim):
    start, stop = offsets(counts)[rank : rank + 2]
    return array[start:stop] if dim == 0 else array[:, start:stop]


def axes(grid):
    return [grid.axis(name) for name in ("x", "y", "z", "data", "everyone")]


def gapped(array, library, dtype):
    """A copy in a library, with other elements between the rows."""
    rows, cols = array.shape
    wide = np.full((rows, cols + 2), 77, array.dtype)
    wide[:, 1 : cols + 1] = array
    return to_library(wide, library, dtype)[:, 1 : cols + 1]


def empty(shape, library, dtype):
    return to_library(np.zeros(shape, "float32" if dtype == "bfloat16" else dtype), library, dtype)


def same(found, expected, library):
    found = np.asarray(to_numpy(found.float() if library == "torch" else found, library))
    assert found.shape == expected.shape and np.array_equal(found, expected)


def check_forms(grid, library, dtype):
    for axis in axes(grid):
        counts = rows_of(axis.size)
        size, rank = sum(counts), axis.index
        for dim in (0, 1):
            shape = (size, 3) if dim == 0 else (3, size)
            arrays = wholes(axis, *shape, dtype)
            whole, total = arrays[0], sum(arrays)
            part = gapped(own(whole, counts, rank, dim), library, dtype)
            out = empty(shape, library, dtype)
            assert axis._all_gather_into(part, out, counts, dim=dim).wait() is out
            same(out, whole, library)
            mine = (gapped if rank % 2 else to_library)(arrays[rank], library, dtype)
            landing = to_library(np.ones_like(own(total, counts, rank, dim)), library, dtype)
            assert axis._reduce_scatter_into(mine, landing, counts, 2, dim=dim).wait() is landing
            same(landing, own(total, counts, rank, dim) + 2, library)
            out = empty(shape, library, dtype)
            assert axis._all_reduce_into(mine, out).wait() is out
            same(out, total, library)
            same(mine, arrays[rank], library)
            mine = to_library(arrays[rank], library, dtype)
            strided = gapped(np.ones(shape, arrays[0].dtype), library, dtype)
            axis._all_reduce_into(mine, strided, 3).wait()
            same(strided, total + 3, library)
            assert axis._all_reduce_into(out, out).wait() is out
            same(out, axis.size * total, library)


def check_exchange(grid, library, dtype):
    """Rank s sends rank r an array of s % 3 rows and r % 4 + 1 columns: parts along both dims, with and without
    gaps."""
    for axis in axes(grid):
        for dims in ((0, 0), (1, 1), (1, 0), (0, 1)):
            rank, ranks = axis.index, range(axis.size)
            sent = [target % 4 + 1 for target in ranks] if dims[0] != dims[1] else [(rank + peer) % 3 for peer in ranks]
            received = [source % 3 for source in ranks] if dims[0] != dims[1] else [(rank + peer) % 3 for peer in ranks]

            def values(source, target, dims=dims):
                rows, cols = (source % 3, target % 4 + 1) if dims[0] != dims[1] else ((source + target) % 3, 2)
                drawn = integers((rows, cols), dtype, seed=10 * source + target)
                return drawn if dims in ((1, 0), (0, 0)) else drawn.T

            array = np.concatenate([values(rank, target) for target in ranks], axis=dims[0])
            expected = np.concatenate([values(source, rank) for source in ranks], axis=dims[1])
            laid = gapped if rank % 2 else to_library
            out = laid(0 * expected, library, dtype)
            assert axis._all_to_all_into(laid(array, library, dtype), out, sent, received, dims=dims).wait() is out
            same(out, expected, library)


@pytest.mark.parallel([4, 6], thorough=[1, 2, 8])
@each_grid
def test_forms_are_what_numpy_says(grid):
    for library, dtype in [(TESTED, "float64"), (TESTED, "float16"), ("standin", "complex64")]:
        with given(library=library, dtype=dtype):
            check_forms(grid, library, dtype)
            check_exchange(grid, library, dtype)


@pytest.mark.parallel([2, 3], thorough=[1, 4])
def test_forms_of_tensors(some_grid):
    for dtype in ["float32", "bfloat16"]:
        with given(dtype=dtype):
            check_forms(some_grid, "torch", dtype)
            check_exchange(some_grid, "torch", dtype)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_forms_move_and_say_what_the_checked_collectives_do(some_grid):
    """They give the same bits, bytes and names in the ledger. The arrays have one dim."""
    axis, rows = some_grid.everyone, 20_001
    counts = part_sizes(rows, axis.size)
    whole = np.random.default_rng(axis.index).standard_normal(rows)
    part = own(whole, counts, axis.index, 0)
    out, one, sums = np.empty_like(whole), np.empty_like(part), np.empty_like(whole)
    checked = lambda: [
        axis.all_gather(part, counts=counts),
        axis.reduce_scatter(whole, counts=counts),
        axis.all_reduce(whole),
    ]
    cheap = lambda: [
        axis._all_gather_into(part, out, counts),
        axis._reduce_scatter_into(whole, one, counts),
        axis._all_reduce_into(whole, sums),
    ]
    moved, results = [], []
    for begin in (checked, cheap):
        some_grid.ledger.reset()
        results.append([pending.wait().tobytes() for pending in begin()])
        totals = [
            some_grid.ledger.total(axis="all", operation=name)
            for name in ("all_gather", "reduce_scatter", "all_reduce")
        ]
        moved.append([(total.calls, total.sent, total.received) for total in totals])
    assert results[0] == results[1] and moved[0] == moved[1]


@pytest.mark.parallel([2, 4], thorough=[1])
def test_a_form_waits_for_what_comes_before_it(comm):
    """A sum, a gather of its result, and a sum of that are begun together. Rank 0 begins after the others have begun
    all three."""
    with Grid(comm, "ddp") as grid:
        axis = grid.everyone
        array, out, last = np.full((2, 40000), 1.0 + axis.index), np.zeros((2 * axis.size, 40000)), np.zeros((2, 40000))
        if axis.index == 0:
            comm.barrier()
        first = axis._all_reduce_into(array, array)
        second = axis._all_gather_into(array, out, [2] * axis.size, after=[first])
        third = axis._reduce_scatter_into(out, last, [2] * axis.size, after=[first, second])
        if axis.index:
            assert not third.done
            comm.barrier()
        third.wait()
        assert first.done and second.done
        total = axis.size * (axis.size + 1) / 2
        assert np.all(array == total) and np.all(out == total) and np.all(last == axis.size * total)


@pytest.mark.parallel([2])
def test_a_form_fails_with_what_it_waits_for(some_grid):
    """Its messages are not sent on any rank, because its input does not exist."""

    def broken(link):
        yield []
        raise ValueError("no values")

    axis = some_grid.everyone
    before = axis.begin("broken", broken)
    pending = axis._all_reduce_into(np.ones(1), np.ones(1), after=[before])
    for failed in (before, pending):
        with pytest.raises(ValueError, match="no values"):
            failed.wait()


@pytest.mark.parallel([2], thorough=[4])
def test_forms_of_calls_that_differ_are_found_with_debug(comm, monkeypatch, fails):
    monkeypatch.setenv("PMM3D_DEBUG", "1")
    with Grid(comm, "ddp") as grid:
        axis, array = grid.everyone, np.ones(grid.size)
        assert axis._all_reduce_into(array, array).wait()[0] == grid.size
        call = lambda: (
            axis._all_gather_into(array[:1], array, [1] * grid.size)
            if grid.rank
            else axis._all_reduce_into(array, array)
        ).wait()
        told = fails(DisagreementError, r"call #\d+ on axis all: the members' calls differ", call)
        assert "test_strided_collectives.py" in told


def test_columns_in_groups_of_any_size_and_in_the_work_memory_that_was_planned(monkeypatch):
    """All rows at once, and in rounds of a number of bytes, with at least one row."""
    for size, dtype, round_bytes in product(SIZES, ["float64", "float16"], [2**24, 100]):
        with given(size=size, dtype=dtype, round_bytes=round_bytes):
            monkeypatch.setattr(strided_collectives, "ROUND_BYTES", round_bytes)
            counts = rows_of(size)
            shape = 3, sum(counts)
            arrays = [integers(shape, dtype, seed=rank) for rank in range(size)]

            def gather(link):
                nbytes = strided_collectives.all_gather_work(shape, dtype, counts, link.rank, 1)
                with link.workspace.slab(nbytes, LIBRARY) as work:
                    part, out = own(arrays[0], counts, link.rank, 1), np.empty(shape, dtype)
                    return (yield from strided_collectives.all_gather_into(link, LIBRARY, part, out, counts, 1, work))

            def reduce(link):
                nbytes = strided_collectives.reduce_scatter_work(LIBRARY, arrays[link.rank], counts, link.rank, 1)
                with link.workspace.slab(nbytes, LIBRARY) as work:
                    out = np.empty((3, counts[link.rank]), dtype)
                    return (
                        yield from strided_collectives.reduce_scatter_into(
                            link, LIBRARY, arrays[link.rank], out, counts, 0, 1, work
                        )
                    )

            assert all(np.array_equal(found, arrays[0]) for found in run(size, gather)[0])
            most = max(round_bytes, sum(counts) * arrays[0].itemsize)
            work = strided_collectives.all_gather_work(shape, dtype, counts, 0, 1)
            assert work <= aligned(min(most, arrays[0].nbytes)) + 64 * size
            total = sum(array.astype("float64") for array in arrays)
            for rank, found in enumerate(run(size, reduce)[0]):
                assert np.array_equal(found, own(total, counts, rank, 1))


def test_a_sum_in_place_of_an_array_with_gaps_is_no_sum_of_a_copy():
    array = np.ones((2, 4))[:, ::2]
    with pytest.raises(AssertionError):
        run(2, lambda link: strided_collectives.all_reduce_into(link, LIBRARY, array, array))


@pytest.mark.parallel([2, 3], thorough=[1, 4, 6])
def test_several_arrays_are_summed_in_one_message(comm):
    """Whole arrays, or of each array only the part of this rank. The rest does not change."""
    for library in ["numpy", "torch"]:
        with given(library=library), Grid(comm, "ddp") as grid:
            axis, shapes = grid.data, [(4, 3), (1, 5), (0, 2), (7, 1)]
            wholes_of = lambda rank: [
                integers(shape, "float32", seed=rank + 10 * index) for index, shape in enumerate(shapes)
            ]
            total = [sum(each) for each in zip(*map(wholes_of, range(axis.size)))]
            for number in (1, 4):
                counts = [part_sizes(rows * cols, axis.size) for rows, cols in shapes[:number]]
                for parts in (None, counts):
                    grid.ledger.reset()
                    arrays = [to_library(array, library, "float32") for array in wholes_of(axis.index)[:number]]
                    before = axis._all_reduce_into(arrays[0], arrays[0] + 0)
                    axis._sum_coalesced(arrays, parts, after=[before]).wait()
                    for index, array in enumerate(arrays):
                        expected = wholes_of(axis.index)[index].reshape(-1)
                        start, stop = (0, None) if parts is None else offsets(counts[index])[axis.index :][:2]
                        expected[start:stop] = total[index].reshape(-1)[start:stop]
                        same(array.reshape(-1), expected, library)
                    name = "all_reduce" if parts is None else "reduce_scatter"
                    assert grid.ledger.total(operation=name).calls == (2 if parts is None else 1)
