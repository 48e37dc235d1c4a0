"""pmm3d.layout: the owners of every element, on grids of up to 4096 ranks."""

from collections import Counter
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import given as named
from loops import looped

from pmm3d import GridError, LayoutError
from pmm3d.layout import (
    EMPTY,
    FIRST,
    Box,
    Coords,
    GridShape,
    Layout,
    Placement,
    Tile,
    offsets,
    overlapping,
    parse_shape,
    part_range,
    part_sizes,
)

SHARDED = [
    Layout.A,
    Layout.B,
    Layout.C,
    Layout(rows=("x", "y", "z")),
    Layout(cols=("z", "x"), rows=("y",)),
    Layout(rows=("z", "y"), cols=("x", "data")),
]
PARTIAL = [Layout(), Layout(rows="x"), Layout(rows="z", cols="y"), Layout(cols=("data", "x"))]
LARGE_GRIDS = [
    GridShape(16, 16, 16),
    GridShape(1, 4096, 1),
    GridShape(13, 17, 18),
    GridShape(8, 8, 8, 8),
    GridShape(3, 5, 7, 11),
]
small_grids = st.builds(GridShape, *[st.integers(1, 5)] * 4) | st.builds(
    GridShape, *[st.integers(1, 3)] * 4, seq=st.integers(1, 3)
)


@st.composite
def cuts(draw):
    """(grid, shape, layout, its axes with their units for each dim). A unit divides the unit before it."""
    grid = draw(small_grids)
    axes = draw(st.permutations(grid.names))
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(axes))] * 2)))
    dims = []
    for along in (axes[:first], axes[first:second]):
        units = [draw(st.sampled_from([1, 2, 7, 12]))]
        for _ in along[1:]:
            units.append(draw(st.sampled_from([unit for unit in range(1, units[-1] + 1) if units[-1] % unit == 0])))
        dims.append(dict(zip(along, units)))
    shape = tuple(max(dim.values(), default=1) * draw(st.integers(0, 12)) for dim in dims)
    return grid, shape, Layout(*map(tuple, dims), units=[dim or 1 for dim in dims]), dims


def assert_consecutive(ranges, size):
    """Assert that the ranges that are not empty are 0:size, in order and without gaps."""
    edges = sorted(part for part in ranges if part[0] < part[1])
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges)][: len(edges)]
    assert max((stop for _, stop in edges), default=0) == size


def assert_tiles(layout, shape, grid):
    """Assert that the boxes of all ranks divide the matrix, and that each is replicated as the layout determines."""
    owners_of = Counter(layout.box(shape, grid, grid.coords(rank)) for rank in range(grid.size))
    blocks = {box: count for box, count in owners_of.items() if box.size}
    rows, cols = {box[:2] for box in blocks}, {box[2:] for box in blocks}
    if shape[0] and shape[1]:
        assert_consecutive(rows, shape[0])
        assert_consecutive(cols, shape[1])
    assert len(blocks) == len(rows) * len(cols)
    assert sum(box.size for box in blocks) == shape[0] * shape[1]
    assert set(blocks.values()) <= {layout.replicas(grid)}


def test_large_grids_own_each_element_as_often_as_they_should():
    """Three shapes in turns, so that each layout and each grid is tested with all of them."""
    shapes = cycle([(12301, 4099), (61, 10**12 + 7), (5, 3)])
    for (grid, layout), shape in zip(product(LARGE_GRIDS, SHARDED + PARTIAL), shapes):
        with named(grid=grid, layout=layout, shape=shape):
            assert_tiles(layout, shape, grid)


@given(cuts())
def test_each_axis_cuts_the_block_of_the_axes_before_it_in_its_units(case):
    grid, shape, layout, dims = case
    placement = Placement(shape, layout, grid)
    for rank in range(grid.size):
        coords, edges = grid.coords(rank), []
        for size, dim in zip(shape, dims):
            start, stop = 0, size
            for axis, unit in dim.items():
                begin, end = part_range((stop - start) // unit, getattr(grid, axis), getattr(coords, axis))
                start, stop = start + begin * unit, start + end * unit
            edges += [start, stop]
        assert layout.box(shape, grid, coords) == placement.box(rank) == tuple(edges)


@given(cuts(), st.integers(0, 60), st.integers(0, 60))
def test_cuts_name_the_owners_of_each_part(case, low, high):
    grid, (size, _), layout, _ = case
    placement = Placement((size, 1), Layout(layout.rows, units=(layout.units[0], 1)), grid)
    owners_of = {}
    for box, rank in ((placement.box(rank), rank) for rank in range(grid.size)):
        if (box & Box(low, min(high, size), 0, 1)).size:
            owners_of.setdefault(box.r0, set()).add(rank)
    found = {run.start - run.local: run.part for run in placement.rows.within(low, high)}
    assert sorted(found) == sorted(owners_of)
    assert all({*placement.owners_of(Tile(part, 0))} == owners_of[first] for first, part in found.items())


FLAT, CUBE, ALL_TWO = GridShape(1, 4, 1), GridShape(2, 2, 2), GridShape(2, 2, 2, 2)
BY_AXIS, OF_NUMPY = Layout(("z", "y"), units=({"z": 4}, 1)), {"z": np.int64(4), "y": np.int32(4)}
SUMS = Layout("x", units=(2, 3), sums=("data", "z"))
EQUAL = [
    (Layout(rows="x"), Layout(rows=("x",))),
    (Layout(rows="x"), Layout(rows=["x"])),
    (Layout(rows="x", cols=("y", "z")), Layout.B.T),
    (Layout.A.on(FLAT), Layout(cols="y")),
    (Layout.A.on(CUBE), Layout.A),
    (BY_AXIS, Layout(("z", "y"), units=({"y": 1, "z": 4, "x": 3}, 1))),
    (BY_AXIS.on(CUBE), BY_AXIS),
    (BY_AXIS.on(GridShape(1, 1, 2)), Layout("z", units=(4, 1))),
    (Layout(BY_AXIS.rows, BY_AXIS.cols, BY_AXIS.sums, BY_AXIS.units), BY_AXIS),
    (Layout("z", units=({"z": 4}, 1)), Layout("z", units=(4, 1))),
    (Layout(("z", "y"), units=(OF_NUMPY, 1)), Layout(("z", "y"), units=(4, 1))),
    (Layout("z", "y", units=(4, 1)).on(FLAT), Layout((), "y")),
    (Layout(units=(3, 2)).on(CUBE), Layout()),
    (SUMS.T, Layout((), "x", ("data", "z"), (3, 2))),
    (SUMS.T.T, SUMS),
    (SUMS.summed, Layout("x", units=(2, 3))),
    (SUMS.on(ALL_TWO), Layout("x", sums=("z", "data"), units=(2, 1))),
    (SUMS.on(FLAT), Layout()),
]


@looped("one, other", EQUAL)
def test_layouts_that_say_the_same_are_equal(one, other):
    assert one == other and eval(repr(one)) == eval(str(other)) == one


def test_units_count_only_where_an_axis_cuts():
    assert type(Layout("z", units=(OF_NUMPY, 1)).units[0]) is int and Layout(("z", "y"), units=(4, 1)) != BY_AXIS
    whole, layout = GridShape(1, 2, 1), Layout("z", "y", units=(4, 1))
    assert layout.box((10, 4), whole, whole.coords(1)) == Placement((10, 4), layout, whole).box(1) == (0, 10, 2, 4)
    assert Layout.C.parts(GridShape(2, 3, 4)) == (12, 2)


def test_the_first_rank_is_first_on_named_axes_too():
    grid = GridShape(2, 1, 1, 1, seq=2, pipe=2)
    for layout in (Layout("seq", "x"), Layout(("x", "pipe"))):
        assert layout.box((9, 5), grid, FIRST) == layout.box((9, 5), grid, grid.coords(0))
        assert layout.box((9, 5), grid, Coords(x=1)) == layout.box((9, 5), grid, grid.coords(1))


def test_partial_sums_are_no_replicas():
    summed, ranks = SUMS.summed, range(ALL_TWO.size)
    assert summed != SUMS and summed.summed is summed
    assert SUMS.splitting == ("x",) and SUMS.named == ("x", "data", "z")
    assert (SUMS.replicas(ALL_TWO), summed.replicas(ALL_TWO)) == (2, 8)
    firsts = [[rank for rank in ranks if each.is_first(ALL_TWO.coords(rank))] for each in (SUMS, summed)]
    assert firsts == [[rank for rank in ranks if ALL_TWO.coords(rank).y == 0], [0, 1]]
    assert SUMS.box((8, 8), ALL_TWO, ALL_TWO.coords(1)) == summed.box((8, 8), ALL_TWO, ALL_TWO.coords(1))


@given(st.integers(0, 10**15), st.integers(1, 5000))
def test_parts_are_ceil_or_floor_larger_first(size, parts):
    sizes = part_sizes(size, parts)
    assert len(sizes) == parts and sum(sizes) == size
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    starts = offsets(sizes)
    for index in {0, parts // 3, parts - 1}:
        assert part_range(size, parts, index) == (starts[index], starts[index + 1])


@given(st.integers(0, 50), st.integers(1, 20), st.integers(-5, 60), st.integers(-5, 60))
def test_parts_that_overlap_a_range_are_found_by_arithmetic(size, parts, low, high):
    meeting = [index for index in range(parts) if set(range(low, high)) & set(range(*part_range(size, parts, index)))]
    assert list(overlapping(size, parts, low, high)) == meeting


def test_few_steps_find_the_parts_of_many():
    """The pieces of a rank, among 2^60 ranks."""
    grid = GridShape(2**20, 2**20, 2**20)
    placement = Placement((2**62, 5), Layout(("z", "y", "x")), grid)
    assert [
        (placement.sender_for(Tile(run.part, 0), 0), *run[1:]) for run in placement.rows.within(2**61 + 1, 2**61 + 5)
    ] == [(2**59, 2**61 + 1, 2**61 + 4, 1), (2**59 + 1, 2**61 + 4, 2**61 + 5, 0)]


def test_blocks_meet_and_cut():
    outer, inner = Box(2, 9, 10, 20), Box(4, 30, 0, 12)
    assert outer & inner == inner & outer == Box(4, 9, 10, 12)
    assert (outer & Box(20, 30, 10, 20)).size == 0
    whole = np.arange(40 * 40).reshape(40, 40)
    local = whole[outer.within(EMPTY)]
    assert local.shape == outer.shape
    assert np.array_equal(local[(outer & inner).within(outer)], whole[4:9, 10:12])


def test_ranks_run_fastest_along_x_and_the_rest_is_idle():
    grid = GridShape(2, 3, 2, 2)
    assert [grid.coords(rank) for rank in (0, 1, 2, 6, 12)] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
    ]
    assert all(grid.rank(grid.coords(rank)) == rank for rank in range(grid.size))
    assert grid.coords(grid.size) is None
    assert Layout.A.box((5, 5), grid, None).size == 0


GRID = GridShape(1, 2, 2)
NO_UNITS = [0, (1,), (0, 1), (1, -2), (1, 1.5), "ab", (True, 1), None, (1, 2, 3), ({"x": 0}, 1), ({"x": 1.5}, 1)]
NO_UNITS += [((3, 4), 1), (((1, 2, 3),), 1)]
NO_AXES = ["", "two words", "1", "size", "names", "coords", "_replace", 3, None, ["x"]]
REFUSED = [
    *((lambda units=units: Layout("x", units=units), "units of a layout are two whole numbers") for units in NO_UNITS),
    *((lambda axis=axis: Layout(rows=(axis,)), "which no grid can have") for axis in NO_AXES),
    *((lambda axis=axis: GridShape(1, 1, 1, 1, **{axis: 2}), "cannot be named") for axis in NO_AXES[:7]),
    (lambda: Layout(("x", "x")), "names the axis x twice"),
    (lambda: Layout("z", ("y", "z")), "names the axis z twice"),
    (lambda: Layout("x", "z", sums="z"), "names the axis z twice"),
    (lambda: Layout(("z", "y"), units=({"z": 6, "y": 4}, 1)), "y cuts in units of 4, and the axis before it .* of 6"),
    (lambda: Layout("z", units=(4, 1)).box((10, 4), GRID, FIRST), "a dim of 10 is cut in units of 4 by z"),
    (lambda: Layout(("z", "y"), units=({"z": 4}, 1)).box((10, 1), GRID, FIRST), "10 is cut in units of 4 by z, y"),
    (lambda: Placement((10, 4), Layout("z", units=(4, 1)), GRID), "a dim of 10 is cut in units of 4 by z"),
    (lambda: Placement((8, 8), Layout(sums=("data", "z")), GRID), "along data, z .*partial sums.*redistribute"),
    (lambda: Layout("w").on(GridShape(2, 1, 1, seq=1)), "the axes of this grid are x, y, z, data, seq$"),
    *((lambda text=text: parse_shape(text), "GxxGyxGz") for text in ("2x2", "axbxc", "", "2x2x2x2", "2 2 2")),
]


@looped("call, words", REFUSED)
def test_what_can_be_no_layout_or_grid_is_refused(call, words):
    with pytest.raises((LayoutError, GridError), match=words):
        call()


@looped("layout", [Layout("w"), Layout(cols="X"), Layout(("z", "rows")), Layout("x", sums="xy")])
def test_an_axis_that_the_grid_does_not_have_is_refused_there(layout):
    calls = [layout.on, layout.parts, layout.replicas, lambda grid: Placement((4, 4), layout, grid)]
    calls += [] if layout.sums else [lambda grid: layout.box((4, 4), grid, grid.coords(1))]
    for call in calls:
        with pytest.raises(LayoutError, match="names the axis '(w|X|rows|xy)'; the axes of this grid are x, y, z, da"):
            call(GRID)


def test_grids_are_written_with_crosses():
    assert parse_shape("2x3X4") == GridShape(2, 3, 4)
    assert str(GridShape(2, 3, 4)) == "2x3x4" and str(GridShape(1, 1, 1, 2)) == "1x1x1 (data 2)"
