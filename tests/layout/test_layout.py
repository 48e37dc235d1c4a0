"""pmm3d.layout: the owners of every element, on grids of up to 4096 ranks."""

from collections import Counter
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loops import given as named
from loops import looped
from samples import grids_of

from pmm3d import GridError, LayoutError
from pmm3d.layout import (
    AXES,
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
SHAPES = [(64, 96), (61, 103), (7, 3), (1, 1), (0, 5), (4, 0), (10**9, 3 * 10**9 + 1)]
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
local_shapes = st.integers(0, 60)


@st.composite
def layouts(draw, axes=AXES, units=((1, 1),)):
    axes = draw(st.permutations(axes))
    first, second = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
    return Layout(rows=axes[:first], cols=axes[first:second], units=draw(st.sampled_from(units)))


@st.composite
def with_units(draw):
    """A layout with units, a shape of whole units, a grid with a named axis."""
    layout = draw(layouts((*AXES, "seq"), [(1, 1), (2, 1), (3, 4), (1, 7)]))
    rows, cols = (unit * draw(st.integers(0, 12)) for unit in layout.units)
    return layout, (rows, cols), draw(st.builds(GridShape, *[st.integers(1, 3)] * 4, seq=st.integers(1, 3)))


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


@looped("size", [1, 2, 3, 4, 6, 7, 8, 12])
def test_every_small_grid_owns_each_element_as_often_as_it_should(size):
    for shape3, data in grids_of(size, data=(1, 2, 3)):
        for layout in SHARDED + PARTIAL:
            for shape in SHAPES:
                assert_tiles(layout, shape, GridShape(*shape3, data))


@given(layouts(), local_shapes, local_shapes, small_grids)
def test_any_layout_owns_each_element_as_often_as_it_should(layout, rows, cols, grid):
    assert_tiles(layout, (rows, cols), grid)
    counted = np.zeros((rows, cols), int)
    for rank in range(grid.size):
        counted[layout.box((rows, cols), grid, grid.coords(rank)).within(EMPTY)] += 1
    assert np.all(counted == layout.replicas(grid))


@given(with_units())
def test_no_cut_parts_a_unit(case):
    layout, shape, grid = case
    assert_tiles(layout, shape, grid)
    of_units = Layout(layout.rows, layout.cols)
    for rank in range(grid.size):
        box = layout.box(shape, grid, grid.coords(rank))
        row_unit, col_unit = layout.units
        counted = of_units.box((shape[0] // row_unit, shape[1] // col_unit), grid, grid.coords(rank))
        assert box == (counted.r0 * row_unit, counted.r1 * row_unit, counted.c0 * col_unit, counted.c1 * col_unit)


@given(with_units(), local_shapes, local_shapes)
def test_cuts_in_units_name_the_owner_of_each_part(case, low, high):
    layout, (size, _), grid = case
    wanted, column = Box(low, min(high, size), 0, 1), Layout(layout.rows, units=(layout.units[0], 1))
    expected = {
        box.r0: box
        for box in (column.box((size, 1), grid, grid.coords(rank)) for rank in range(grid.size))
        if (box & wanted).size
    }
    assert_owners(Placement((size, 1), column, grid), low, high, expected)


@looped(
    "row_axes, units",
    [(("z", "seq"), {"z": 4}), (("z", "y", "seq"), {"z": 12, "y": 4, "seq": 2}), (("y", "z"), {"y": 4, "z": 1})],
)
def test_an_axis_cuts_inside_the_units_of_the_axes_before_it(row_axes, units):
    grid, size = GridShape(1, 2, 3, seq=2), 60
    layout = Layout(row_axes, units=(units, 1))
    assert_tiles(layout, (size, 3), grid)
    for rank in range(grid.size):
        coords, start, stop = grid.coords(rank), 0, size
        for axis in row_axes:
            begin, end = part_range((stop - start) // units.get(axis, 1), getattr(grid, axis), getattr(coords, axis))
            start, stop = start + begin * units.get(axis, 1), start + end * units.get(axis, 1)
        assert layout.box((size, 3), grid, coords) == (start, stop, 0, 3)
        assert Placement((size, 3), layout, grid).box(rank) == (start, stop, 0, 3)


def test_units_by_axis_are_compared_by_what_they_say():
    one, grid = Layout(("z", "y"), units=({"z": 4}, 1)), GridShape(1, 2, 2)
    assert one == Layout(("z", "y"), units=({"y": 1, "z": 4, "x": 3}, 1)) != Layout(("z", "y"), units=(4, 1))
    assert Layout("z", units=({"z": 4}, 1)) == Layout("z", units=(4, 1))
    of_numpy = Layout(("z", "y"), units=({"z": np.int64(4), "y": np.int32(4)}, 1))
    assert type(of_numpy.units[0]) is int and of_numpy == Layout(("z", "y"), units=(4, 1))
    assert one.on(GridShape(1, 1, 2)) == Layout("z", units=(4, 1)) and one.on(grid) == one
    assert Layout(one.rows, one.cols, one.sums, one.units) == one and eval(repr(one)) == one
    with pytest.raises(LayoutError, match="axis y cuts in units of 4, and the axis before it in units of 6"):
        Layout(("z", "y"), units=({"z": 6, "y": 4}, 1))
    with pytest.raises(LayoutError, match="a dim of 10 is cut in units of 4 by z, y"):
        one.box((10, 1), grid, grid.coords(0))


def assert_owners(placement, low, high, expected):
    """expected: for each part with rows in low:high, its first row and its box."""
    found = list(placement.rows.within(low, high))
    assert [run.start - run.local for run in found] == sorted(expected)
    for run in found:
        boxes = {placement.box(rank) for rank in placement.owners_of(Tile(run.part, 0))}
        assert boxes == {expected[run.start - run.local]}


def test_the_first_rank_is_first_on_named_axes_too():
    grid = GridShape(2, 1, 1, 1, seq=2, pipe=2)
    for layout in (Layout("seq", "x"), Layout(("x", "pipe"))):
        assert layout.box((9, 5), grid, FIRST) == layout.box((9, 5), grid, grid.coords(0))
        assert layout.box((9, 5), grid, Coords(x=1)) == layout.box((9, 5), grid, grid.coords(1))


def test_a_dim_is_no_multiple_of_its_unit():
    layout, grid = Layout("z", "y", units=(4, 1)), GridShape(1, 2, 2)
    for call in (lambda: layout.box((10, 4), grid, grid.coords(0)), lambda: Placement((10, 4), layout, grid)):
        with pytest.raises(LayoutError, match="a dim of 10 is cut in units of 4 by z: it must be a multiple"):
            call()
    whole = GridShape(1, 2, 1)
    assert layout.box((10, 4), whole, whole.coords(1)) == Placement((10, 4), layout, whole).box(1) == (0, 10, 2, 4)
    assert layout.on(whole) == Layout((), "y") and Layout(units=(3, 2)).on(grid) == Layout()


@looped(
    "units",
    [
        0,
        (1,),
        (0, 1),
        (1, -2),
        (1, 1.5),
        "ab",
        (True, 1),
        None,
        (1, 2, 3),
        ({"x": 0}, 1),
        ({"x": 1.5}, 1),
        ((3, 4), 1),
        (((1, 2, 3),), 1),
    ],
)
def test_units_that_are_none_are_refused(units):
    with pytest.raises(LayoutError, match="the units of a layout are two whole numbers of at least 1"):
        Layout("x", units=units)


def test_partial_sums_are_no_replicas():
    layout, grid = Layout("x", units=(2, 3), sums=("data", "z")), GridShape(2, 2, 2, 2)
    assert Layout((), "x", ("data", "z"), (3, 2)) == layout.T and layout == layout.T.T
    assert (summed := layout.summed) == Layout("x", units=(2, 3)) != layout and summed.summed is summed
    assert layout.on(grid) == Layout("x", sums=("z", "data"), units=(2, 1))
    assert layout.on(GridShape(1, 2, 1)) == Layout()
    assert layout.splitting == ("x",) and layout.named == ("x", "data", "z")
    assert (layout.replicas(grid), layout.summed.replicas(grid)) == (2, 8)
    firsts = [rank for rank in range(grid.size) if layout.is_first(grid.coords(rank))]
    assert firsts == [rank for rank in range(grid.size) if grid.coords(rank).y == 0]
    assert [rank for rank in range(16) if layout.summed.is_first(grid.coords(rank))] == [0, 1]
    assert layout.box((8, 8), grid, grid.coords(1)) == layout.summed.box((8, 8), grid, grid.coords(1))
    assert str(layout) == repr(layout) == "Layout(rows=('x',), cols=(), sums=('data', 'z'), units=(2, 3))"
    assert eval(str(layout)) == layout and str(Layout("x")) == "Layout(rows=('x',), cols=())"
    with pytest.raises(LayoutError, match=r"along data, z the ranks hold partial sums.*redistribute\(layout.summed\)"):
        Placement((8, 8), layout, grid)


def test_fully_sharded_layouts_replicate_nothing():
    for grid in LARGE_GRIDS:
        for layout in SHARDED:
            named = set(layout.rows + layout.cols)
            assert layout.replicas(grid) == (1 if "data" in named else grid.data)
        assert Layout().replicas(grid) == grid.size


@given(layouts(), local_shapes, local_shapes, small_grids)
def test_the_parts_of_the_minor_axis_are_the_block_of_the_major(layout, rows, cols, grid):
    assume(layout.rows)
    *major, minor = layout.rows
    outer = Layout(major, layout.cols)
    for rank in range(grid.size):
        coords = grid.coords(rank)
        along = [coords._replace(**{minor: index}) for index in range(getattr(grid, minor))]
        parts = [layout.box((rows, cols), grid, place) for place in along]
        whole = outer.box((rows, cols), grid, coords)
        assert [part.r0 for part in parts] == [whole.r0, *(part.r1 for part in parts)][: len(parts)]
        assert parts[-1].r1 == whole.r1
        assert {part[2:] for part in parts} == {whole[2:]}
        assert [part.r1 - part.r0 for part in parts] == part_sizes(whole.r1 - whole.r0, len(parts))


@given(st.integers(0, 10**15), st.integers(1, 5000))
def test_parts_are_ceil_or_floor_larger_first(size, parts):
    sizes = part_sizes(size, parts)
    assert len(sizes) == parts and sum(sizes) == size
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    starts = offsets(sizes)
    for index in {0, parts // 3, parts - 1}:
        assert part_range(size, parts, index) == (starts[index], starts[index + 1])


@given(local_shapes, st.permutations(AXES), st.integers(0, 4), small_grids, local_shapes, local_shapes)
def test_cuts_name_the_owner_of_each_part(size, axes, used, grid, low, high):
    axes = tuple(axes[:used])
    wanted, layout = Box(low, min(high, size), 0, 1), Layout(rows=axes)
    expected = {
        box.r0: box
        for box in (layout.box((size, 1), grid, grid.coords(rank)) for rank in range(grid.size))
        if (box & wanted).size
    }
    assert_owners(Placement((size, 1), layout, grid), low, high, expected)


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


def test_layouts_that_distribute_equally_are_equal_on_the_grid():
    flat = GridShape(1, 4, 1)
    assert Layout.A.on(flat) == Layout(cols="y")
    assert Layout.A.on(GridShape(2, 2, 2)) == Layout.A
    assert Layout(rows="x", cols=("y", "z")) == Layout.B.T
    assert Layout(rows="x") == Layout(rows=("x",)) == Layout(rows=["x"])
    assert Layout.C.parts(GridShape(2, 3, 4)) == (12, 2)


@looped("rows, cols", [(("x", "x"), ()), ("z", ("y", "z")), (("data", "x", "data"), "y")])
def test_an_axis_named_twice_is_refused(rows, cols):
    with pytest.raises(LayoutError, match="twice"):
        Layout(rows, cols)
    with pytest.raises(LayoutError, match="names the axis z twice"):
        Layout("x", "z", sums="z")


@looped("layout", [Layout("w"), Layout(cols="X"), Layout(("z", "rows")), Layout("x", sums="xy")])
def test_an_axis_that_the_grid_does_not_have_is_refused_there(layout):
    grid = GridShape(2, 1, 1)
    calls = [layout.on, layout.parts, layout.replicas, lambda grid: Placement((4, 4), layout, grid)]
    calls += [] if layout.sums else [lambda grid: layout.box((4, 4), grid, grid.coords(1))]
    for call in calls:
        with pytest.raises(LayoutError, match="names the axis '(w|X|rows|xy)'; the axes of this grid are x, y, z, da"):
            call(grid)
    with pytest.raises(LayoutError, match="the axes of this grid are x, y, z, data, seq$"):
        layout.on(GridShape(2, 1, 1, seq=1))


@looped("axis", ["", "two words", "1", "size", "names", "coords", "_replace", 3, None, ["x"]])
def test_what_can_be_no_axis_is_refused_at_once(axis):
    with pytest.raises(LayoutError, match="names the axis .*, which no grid can have"):
        Layout(rows=(axis,))
    if isinstance(axis, str):
        with pytest.raises(GridError, match="an axis of a grid cannot be named"):
            GridShape(1, 1, 1, 1, **{axis: 2})


def test_grids_are_written_with_crosses():
    assert parse_shape("2x3X4") == GridShape(2, 3, 4)
    assert str(GridShape(2, 3, 4)) == "2x3x4" and str(GridShape(1, 1, 1, 2)) == "1x1x1 (data 2)"
    for text in ("2x2", "axbxc", "", "2x2x2x2", "2 2 2"):
        with pytest.raises(GridError, match="GxxGyxGz"):
            parse_shape(text)
