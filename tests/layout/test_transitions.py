"""pmm3d.layout.transitions: the steps, executed by numpy for all ranks of a grid, give the target layout."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import looped

from pmm3d import GridShape, Layout, LayoutError
from pmm3d.layout import EMPTY, Box, Placement, Tile, transitions

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
    rng, first = np.random.default_rng(1), (0,) * len(layout.sums)
    partial = defaultdict(lambda: rng.integers(-99, 99, whole.shape))
    along = [tuple(getattr(grid.position(rank), axis) for axis in layout.sums) for rank in range(grid.size)]
    partial[first] = whole - sum(partial[key] for key in dict.fromkeys(along) if key != first)
    boxes = [layout.summed.box(whole.shape, grid, grid.position(rank)) for rank in range(grid.size)]
    return {rank: partial[key][box.within(EMPTY)] for rank, (key, box) in enumerate(zip(along, boxes))}


def line(grid, axis, rank):
    """The ranks along the axis through a rank, in order."""
    coords = grid.position(rank)
    return [grid.rank(coords._replace(**{axis: index})) for index in range(getattr(grid, axis))]


def moved(before, arrays, shape, grid, rank, box):
    """Array of a rank after a move: its box of a matrix, from the pieces of their owners."""
    whole, source = np.full(shape, 10**6), Placement(shape, before.summed, grid)
    for row, col in product(source.rows.within(box.r0, box.r1), source.cols.within(box.c0, box.c1)):
        owner = source.sender_for(Tile(row.part, col.part), rank)
        piece = Box(row.start, row.stop, col.start, col.stop)
        whole[piece.within(EMPTY)] = arrays[owner][piece.within(source.box(owner))]
    return whole[box.within(EMPTY)]


def done(step, before, arrays, shape, grid, rank):
    """Array of a rank after a step, from the arrays of the ranks along its axis and their boxes."""
    box = step.layout.summed.box(shape, grid, grid.position(rank))
    if step.kind == "move":
        return moved(before, arrays, shape, grid, rank, box)
    members = line(grid, step.axis, rank)
    parts = [arrays[member] for member in members]
    rows, cols = box.within(before.summed.box(shape, grid, grid.position(rank)))
    return {
        "slice": lambda: arrays[rank][rows, cols],
        "gather": lambda: np.concatenate(parts, step.dim),
        "reduce_scatter": lambda: sum(parts)[rows, cols],
        "all_reduce": lambda: sum(parts),
        "zero_others": lambda: arrays[rank] * (rank == members[0]),
        "all_to_all": lambda: np.concatenate(
            [part[:, cols] if step.dim == 0 else part[rows] for part in parts], step.dim
        ),
    }[step.kind]()


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
        arrays = {rank: done(step, layout, arrays, shape, grid, rank) for rank in arrays}
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
