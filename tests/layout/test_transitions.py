"""pmm3d.layout.transitions: the steps, executed by numpy for all ranks of a grid, give the target layout."""

import heapq
from collections import defaultdict
from itertools import count, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loops import looped

from pmm3d import GridShape, Layout, LayoutError
from pmm3d.layout import Box, Placement, Tile, transitions

FIVE = GridShape(2, 2, 2, 2, seq=2)
grids = st.sampled_from(
    [
        GridShape(2, 2, 2),
        GridShape(3, 2, 1),
        GridShape(2, 1, 2, 2),
        GridShape(1, 2, 3, 2),
        GridShape(1, 1, 1),
        FIVE,
        GridShape(1, 2, 2, 1, seq=2),
        GridShape(2, 1, 1, 1, seq=3, pipe=2),
    ]
)


@st.composite
def layouts(draw, grid, shape):
    """Random layouts whose units divide the dims. In some, the last axes of a dim cut inside the units."""
    axes = draw(st.permutations(grid.names))
    a, b, c = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=3, max_size=3)))
    units = []
    for size, cuts in zip(shape, (axes[:a], axes[a:b])):
        unit = draw(st.sampled_from([unit for unit in (1, 2, 3, 6) if size % unit == 0]))
        units.append(draw(st.sampled_from([unit, {axis: unit for axis in cuts[: draw(st.integers(0, len(cuts)))]}])))
    return Layout(axes[:a], axes[a:b], axes[b:c], units)


@st.composite
def cases(draw):
    grid = draw(grids)
    shape = draw(st.tuples(*[st.sampled_from([0, 1, 4, 6, 7, 9, 12, 24])] * 2))
    return grid, shape, draw(layouts(grid, shape)), draw(layouts(grid, shape))


def held(whole, layout, grid):
    """Array of each rank. For partial sums, different numbers whose sum is the matrix."""
    arrays, rng = {}, np.random.default_rng(1)
    partial = {}
    for rank in range(grid.size):
        coords = grid.position(rank)
        along = tuple(getattr(coords, axis) for axis in layout.sums)
        partial.setdefault(along, rng.integers(-99, 99, whole.shape))
    first = (0,) * len(layout.sums)
    partial[first] = whole - sum(array for along, array in partial.items() if along != first)
    for rank in range(grid.size):
        coords = grid.position(rank)
        box = layout.summed.box(whole.shape, grid, coords)
        along = tuple(getattr(coords, axis) for axis in layout.sums)
        arrays[rank] = partial[along][box.r0 : box.r1, box.c0 : box.c1]
    return arrays


def line(grid, axis, rank):
    """The ranks along the axis through a rank, in order."""
    coords = grid.position(rank)
    return [grid.rank(coords._replace(**{axis: index})) for index in range(getattr(grid, axis))]


def done(step, before, arrays, shape, grid):
    """Arrays of the ranks after a step, from the arrays of the ranks along its axis and their boxes."""
    after = {}
    for rank, array in arrays.items():
        box = step.layout.summed.box(shape, grid, grid.position(rank))
        if step.kind == "move":
            whole = np.full(shape, 10**6)
            source = Placement(shape, before.summed, grid)
            for row, col in product(source.rows.within(box.r0, box.r1), source.cols.within(box.c0, box.c1)):
                owner = source.sender_for(Tile(row.part, col.part), rank)
                piece = Box(row.start, row.stop, col.start, col.stop)
                whole[piece.r0 : piece.r1, piece.c0 : piece.c1] = arrays[owner][piece.within(source.box(owner))]
            after[rank] = whole[box.r0 : box.r1, box.c0 : box.c1]
            continue
        members = line(grid, step.axis, rank)
        old = before.summed.box(shape, grid, grid.position(rank))
        if step.kind == "slice":
            after[rank] = array[box.within(old)]
        elif step.kind == "gather":
            after[rank] = np.concatenate([arrays[member] for member in members], step.dim)
        elif step.kind == "reduce_scatter":
            after[rank] = sum(arrays[member] for member in members)[box.within(old)]
        elif step.kind == "all_reduce":
            after[rank] = sum(arrays[member] for member in members)
        elif step.kind == "zero_others":
            after[rank] = array * (rank == members[0])
        else:
            assert step.kind == "all_to_all"
            cut = [slice(None), slice(None)]
            cut[1 - step.dim] = box.within(old)[1 - step.dim]
            after[rank] = np.concatenate([arrays[member][tuple(cut)] for member in members], step.dim)
    return after


def states(layout):
    return {
        axis: kind
        for kind, axes in (("rows", layout.rows), ("cols", layout.cols), ("sums", layout.sums))
        for axis in axes
    }


@settings(max_examples=150)
@given(cases(), st.booleans())
def test_the_steps_end_in_the_target_from_any_layout(case, told):
    grid, shape, source, target = case
    whole = np.random.default_rng(2).integers(-99, 99, shape)
    arrays, layout = held(whole, source, grid), source.on(grid)
    steps = transitions(source, target, grid, shape if told else None)
    for step in steps:
        assert step.axis == "" if step.kind == "move" else getattr(grid, step.axis) > 1
        arrays = done(step, layout, arrays, shape, grid)
        layout = step.layout
        for rank in range(grid.size):
            assert arrays[rank].shape == layout.summed.box(shape, grid, grid.position(rank)).shape
    reached = layout if steps or not told else target.on(grid)
    assert reached == target.on(grid)
    sums = defaultdict(int)
    for rank, array in arrays.items():
        coords = grid.position(rank)
        sums[coords._replace(**dict.fromkeys(target.sums, 0))] += array
    for coords, total in sums.items():
        box = target.summed.box(shape, grid, coords)
        assert np.array_equal(total, whole[box.r0 : box.r1, box.c0 : box.c1])


@given(cases())
def test_an_axis_in_the_same_place_is_left_alone_and_a_move_comes_once(case):
    grid, _shape, source, target = case
    steps = transitions(source, target, grid)
    assert [step.kind for step in steps].count("move") <= 1
    before, after = states(source.on(grid)), states(target.on(grid))
    same = {axis for axis in grid.names if before.get(axis) == after.get(axis)}
    if all(step.kind != "move" for step in steps):
        assert same.isdisjoint(step.axis for step in steps)
    assert not transitions(source, source, grid) and not transitions(target, target.on(grid), grid)


def received(kind, size, ranks):
    """Elements that a rank with `size` elements receives, in units of a rank's share of a whole matrix."""
    return {
        "slice": 0,
        "zero_others": 0,
        "gather": size * (ranks - 1),
        "all_reduce": 2 * size * (ranks - 1) / ranks,
        "reduce_scatter": size * (ranks - 1) / ranks,
        "all_to_all": size * (ranks - 1) / ranks,
    }[kind]


def neighbours(layout, target, axes):
    """Yield (kind, axis, layout) of each step of one of the axes. An axis cuts a dim only if it does so in the
    target."""
    for axis in axes:
        rows, cols, sums = (
            tuple(other for other in group if other != axis) for group in (layout.rows, layout.cols, layout.sums)
        )
        minor = [group[-1:] == (axis,) for group in (layout.rows, layout.cols)]
        if any(minor):
            yield "gather", axis, Layout(rows, cols, sums)
        if axis in layout.sums:
            yield "all_reduce", axis, Layout(rows, cols, sums)
        if axis not in layout.named:
            yield "zero_others", axis, Layout(rows, cols, (*sums, axis))
        for dim, wanted in enumerate((target.rows, target.cols)):
            if axis in wanted:
                longer = Layout((*rows, axis), cols, sums) if dim == 0 else Layout(rows, (*cols, axis), sums)
                if axis in layout.sums:
                    yield "reduce_scatter", axis, longer
                if axis not in layout.named:
                    yield "slice", axis, longer
                if minor[1 - dim]:
                    yield "all_to_all", axis, longer


def least(source, target, grid):
    """Smallest number of received elements of any sequence of steps along the axes whose state changes."""
    before, after = states(source.on(grid)), states(target.on(grid))
    axes = [axis for axis in grid.names if before.get(axis) != after.get(axis)]
    number, done, waiting = count(), set(), [(0, 0, source.on(grid))]
    while waiting:
        cost, _, layout = heapq.heappop(waiting)
        if layout == target.on(grid):
            return cost
        if layout in done:
            continue
        done.add(layout)
        size = grid.size / grid.along(layout.splitting)
        for kind, axis, found in neighbours(layout, target, axes):
            more = received(kind, size, getattr(grid, axis))
            heapq.heappush(waiting, (cost + more, next(number), found.on(grid)))
    return None


def total(steps, source, grid):
    cost, layout = 0, source.on(grid)
    for step in steps:
        cost += received(step.kind, grid.size / grid.along(layout.splitting), getattr(grid, step.axis))
        layout = step.layout
    return cost


@st.composite
def small_cases(draw):
    grid = draw(st.sampled_from([GridShape(2, 3, 2), GridShape(2, 2, 1, 4), GridShape(4, 1, 1, 1, seq=2)]))
    shape = 24, 24
    return grid, *(
        Layout(layout.rows, layout.cols, layout.sums)
        for layout in (draw(layouts(grid, shape)), draw(layouts(grid, shape)))
    )


@settings(max_examples=150)
@given(small_cases())
def test_no_order_of_steps_sends_less(case):
    grid, source, target = case
    steps = transitions(source, target, grid)
    assume(all(step.kind != "move" for step in steps))
    assert total(steps, source, grid) <= least(source, target, grid) + 1e-9


PLAIN = GridShape(2, 2, 2, 2)
EXAMPLES = {
    "weight gathered": (Layout(("y", "z"), "x"), Layout("y", "x"), "gather z 0"),
    "gradient of a weight": (
        Layout("y", "x", sums=("data", "z")),
        Layout(("y", "z"), "x"),
        "reduce_scatter z 0, all_reduce data",
    ),
    "gradient of a weight over data": (
        Layout("y", "x", sums=("z", "data")),
        Layout(("y", "z", "data"), "x"),
        "reduce_scatter z 0, reduce_scatter data 0",
    ),
    "output of a layer": (Layout(("data", "z"), "x", sums="y"), Layout(("data", "z"), "x"), "all_reduce y"),
    "output in shards": (Layout(("data", "z"), "x", sums="y"), Layout(("data", "z", "y"), "x"), "reduce_scatter y 0"),
    "rows to columns": (Layout(("z", "x"), "y"), Layout("z", ("y", "x")), "all_to_all x 0"),
    "columns to rows": (Layout("z", ("y", "x")), Layout(("z", "x"), "y"), "all_to_all x 1"),
    "cut before it is summed": (Layout(sums="z"), Layout("x", "y"), "slice x 0, slice y 1, all_reduce z"),
    "summed before it is gathered": (Layout("x", sums="z"), Layout(), "all_reduce z, gather x 0"),
    "one keeps it": (Layout("x"), Layout("x", sums=("z", "data")), "zero_others z, zero_others data"),
    "minor first, if both go": (Layout(("x", "y", "z")), Layout("x"), "gather z 0, gather y 0"),
    "minor gathered, major to the other dim": (Layout(("x", "y")), Layout((), "x"), "gather y 0, all_to_all x 0"),
    "the major goes": (Layout(("x", "y")), Layout("y"), "move"),
    "another order": (Layout(("x", "y")), Layout(("y", "x")), "move"),
    "one for another": (Layout("x"), Layout("y"), "move"),
    "dims changed": (Layout("x", "y"), Layout("y", "x"), "move"),
    "summed before it is moved": (Layout("x", sums="z"), Layout("z"), "reduce_scatter z 0, move"),
    "partial sums moved": (Layout("x", sums="z"), Layout("y", sums="z"), "move"),
    "moved, then kept": (Layout("x"), Layout("y", sums="z"), "move, zero_others z"),
    "other units": (Layout("x", units=(2, 1)), Layout("x", units=(3, 1)), "move"),
    "units of what is cut further": (Layout("x", units=(2, 1)), Layout(("x", "z"), units=(2, 1)), "slice z 0"),
    "units gained": (Layout((), "x"), Layout("x", units=(3, 1)), "all_to_all x 1"),
    "a cut inside units": (Layout("z", units=(4, 1)), Layout(("z", "y"), units=({"z": 4}, 1)), "slice y 0"),
    "no cut inside units": (Layout(("z", "y"), units=({"z": 4}, 1)), Layout("z", units=(4, 1)), "gather y 0"),
    "from inside units to heads": (
        Layout(("z", "x"), units=({"z": 4}, 1)),
        Layout("z", "x", units=(4, 2)),
        "all_to_all x 0",
    ),
    "units lost": (Layout(("x", "z"), units=(2, 1)), Layout(), "gather z 0, gather x 0"),
}


def in_words(steps):
    return ", ".join(
        " ".join(
            [step.kind]
            + [step.axis] * bool(step.axis)
            + [str(step.dim)] * (step.kind not in ("all_reduce", "zero_others", "move"))
        )
        for step in steps
    )


@looped("source, target, expected", EXAMPLES.values())
def test_the_steps_are(source, target, expected):
    assert in_words(transitions(source, target, PLAIN)) == expected


def test_cuts_at_the_same_places_are_the_same_in_other_units():
    source, target = Layout("x", units=(2, 1)), Layout(("x", "z"), units=(3, 1))
    assert in_words(transitions(source, target, PLAIN, (24, 1))) == "slice z 0"
    assert in_words(transitions(source, target, PLAIN, (6, 1))) == "move"
    assert in_words(transitions(source, Layout("x"), PLAIN, (8, 1))) == ""


def test_a_step_costs_nothing_along_an_axis_of_one_rank_and_unknown_ones_are_refused():
    assert transitions(Layout(("x", "y"), sums="z"), Layout((), "y"), GridShape(1, 1, 1, 4)) == []
    for source, target in ((Layout("w"), Layout()), (Layout(), Layout(sums="w"))):
        with pytest.raises(LayoutError, match="names the axis 'w'; the axes of this grid are x, y, z, data"):
            transitions(source, target, PLAIN)
