"""The five collectives on every axis of several grids, and for every element type, compared with numpy."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import DisagreementError, Grid
from pmm3d.layout import MATRIX_DTYPES, itemsize, offsets, part_sizes

pytestmark = pytest.mark.parallel([4, 6], thorough=[1, 2, 8])
AXES = ("x", "y", "z", "data", "everyone")
KINDS = [(TESTED, "float64", trail) for trail in ((), (3,), (2, 3))] + [("standin", "complex64", (2,))]
"""Array library, type, and trailing dims: the arrays have one dim more."""
UNSIGNED = ["uint8", "bool"]
"""Types that are sent, and not summed."""
NUMPY = [dtype for dtype in MATRIX_DTYPES if dtype != "bfloat16"] + ["int64", "int8"]
STANDIN = ["float16", "float32", "complex128", "int64"]
TORCH = [*MATRIX_DTYPES, "int64", "int32"]


def rows_of(rank):
    """Number of rows of a rank's array: different, and 0 for some ranks."""
    return (3, 0, 1, 4, 2, 0, 5, 1)[rank]


def one(rows, rank, dtype, trail):
    """Array of a rank. Any rank can compute it."""
    return integers((rows, *trail), dtype, seed=rank, low=0 if dtype in UNSIGNED else -4)


def own(parts, index):
    return slice(*offsets(parts)[index : index + 2])


def collectives(axis, library, dtype, trail):
    """(name, function that begins the collective with options, expected result) of each collective on an axis. Arrays
    of one dim also have distances and sizes that are at the limits."""
    index, ranks = axis.index, axis.ranks
    distances, rows_of_sums = ((1, -1, axis.size, 2, -7), (0, 7, 60_000)) if trail == () else ((1,), (7,))
    parts = [one(rows_of(rank), rank, dtype, trail) for rank in ranks]
    counts = [[(sender + 2 * reader) % 4 for reader in range(axis.size)] for sender in range(axis.size)]
    mixed = [one(sum(sent), rank, dtype, trail) for sent, rank in zip(counts, ranks)]
    brought = np.concatenate([array[own(sent, index)] for array, sent in zip(mixed, counts)])
    part, mine = (to_library(arrays[index], library, dtype) for arrays in (parts, mixed))
    sizes = list(map(len, parts))
    yield "all_gather", lambda **more: axis.all_gather(part, **more), np.concatenate(parts)
    yield "all_gather with counts", lambda **more: axis.all_gather(part, counts=sizes, **more), np.concatenate(parts)
    yield "all_to_all", lambda **more: axis.all_to_all(mine, counts=counts[index], **more), brought
    for by in distances:
        yield f"shift {by}", lambda by=by, **more: axis.shift(part, by, **more), parts[(index - by) % axis.size]
    for rows in rows_of_sums if dtype not in UNSIGNED else ():
        wholes = [one(rows, rank, dtype, trail) for rank in ranks]
        whole, total = to_library(wholes[index], library, dtype), sum(wholes)
        scattered = total[own(part_sizes(rows, axis.size), index)]
        yield f"all_reduce of {rows}", lambda whole=whole, **more: axis.all_reduce(whole, **more), total
        yield f"reduce_scatter of {rows}", lambda whole=whole, **more: axis.reduce_scatter(whole, **more), scattered


def assert_equal(found, expected, library):
    values = to_numpy(found, library)
    assert values.shape == expected.shape and np.array_equal(values, expected.astype(values.dtype))


def axes(grid):
    """The axes with several ranks, and the axis "data" with one rank."""
    found = [grid.axis(name) for name in AXES]
    return [axis for axis in found if axis.size > 1 or axis.name == "data"]


def check_results(grid, library, dtype, trail):
    for axis in axes(grid):
        for name, begin, expected in collectives(axis, library, dtype, trail):
            with given(name=name, axis=axis.name, library=library, dtype=dtype, trail=trail):
                assert_equal(begin().wait(), expected, library)


@each_grid
def test_results_are_those_of_numpy(grid):
    for kind in KINDS:
        check_results(grid, *kind)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_every_type_of_numpy_and_of_a_device(some_grid):
    for library, dtypes in ((TESTED, NUMPY + UNSIGNED), ("standin", STANDIN)):
        for dtype in dtypes:
            check_results(some_grid, library, dtype, (3,))


@pytest.mark.parallel([3], thorough=[1, 2, 4])
def test_every_type_of_torch(some_grid):
    for dtype in TORCH + UNSIGNED:
        check_results(some_grid, "torch", dtype, (3,))


@each_grid
def test_out_is_filled_and_returned(grid):
    for library in (TESTED, "standin"):
        for axis in axes(grid):
            for name, begin, expected in collectives(axis, library, "float32", ()):
                for beta in (None, 2) if name.startswith("reduce_scatter") else (None,):
                    with given(library=library, axis=axis.name, name=name, beta=beta):
                        out = to_library(np.full(expected.shape, 7, "float32"), library)
                        assert begin(out=out, **({"beta": beta} if beta else {})).wait() is out
                        assert_equal(out, expected + 7 * (beta or 0), library)


@each_grid
def test_several_under_way_on_all_axes_are_waited_for_in_another_order(grid):
    """They do not receive each other's messages."""
    begun = [
        (begin(), expected, (axis.name, name))
        for axis in axes(grid)
        for name, begin, expected in collectives(axis, TESTED, "float64", ())
    ]
    first = 5 * grid.rank % len(begun)
    for pending, expected, which in reversed(begun[first:] + begun[:first]):
        with given(which=which):
            assert_equal(pending.wait(), expected, TESTED)
            assert pending.done and pending.test()
    assert grid.engine.idle()


@each_grid
def test_the_ledger_counts_every_byte(grid):
    for axis in axes(grid):
        for dtype in ("float64", "float16"):
            width, rows, others = itemsize(dtype), [rows_of(rank) for rank in axis.ranks], axis.size - 1
            mine, (own7, large_own) = rows[axis.index], (part_sizes(n, axis.size)[axis.index] for n in (7, 60_000))
            part, whole, large = (one(count, 0, dtype, ()) for count in (mine, 7, 60_000))
            in_parts = 60_000 - large_own + others * large_own
            expected = {
                "all_gather": (part, others * mine, sum(rows) - mine),
                "reduce_scatter": (whole, 7 - own7, others * own7),
                "all_reduce": (whole, others * 7, others * 7),
                "shift": (part, mine * (others > 0), rows[axis.index - 1] * (others > 0)),
                "all_reduce of a large array": (large, in_parts, in_parts),
            }
            for name, (array, sent, received) in expected.items():
                with given(axis=axis.name, dtype=dtype, name=name):
                    operation = name.partition(" ")[0]
                    grid.ledger.reset()
                    getattr(axis, operation)(array).wait()
                    entry = grid.ledger.total(axis=axis.name, operation=operation)
                    assert (entry.calls, entry.sent, entry.received) == (1, width * sent, width * received)


@pytest.mark.parallel([6, 8], thorough=[2, 3, 4])
def test_in_stages_as_of_many_ranks(comm, stages_of_two):
    """With 3 and 6 ranks there are also pairs. all_to_all and shift do not use stages."""
    with Grid(comm, "ddp", debug=True) as grid:
        for kind in KINDS:
            check_results(grid, *kind)
        with pytest.raises(DisagreementError, match="the members' calls differ"):
            grid.data.all_gather(np.ones(3)).wait() if grid.rank else grid.data.shift(np.ones(3)).wait()
