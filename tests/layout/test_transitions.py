"""pmm3d.layout.transitions: the steps, done with numpy for all ranks of a grid, end where they should."""

import heapq
from collections import defaultdict
from itertools import count, permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pmm3d import GridShape, Layout, LayoutError
from pmm3d.layout import Placement, Step, incoming, transitions

FIVE = GridShape(2, 2, 2, 2, seq=2)
grids = st.sampled_from([
    GridShape(2, 2, 2), GridShape(3, 2, 1), GridShape(2, 1, 2, 2), GridShape(1, 2, 3, 2), GridShape(1, 1, 1), FIVE,
    GridShape(1, 2, 2, 1, seq=2), GridShape(2, 1, 1, 1, seq=3, pipe=2),
])


@st.composite
def layouts(draw, grid, shape):
    """Any, with units that divide the dims."""
    axes = draw(st.permutations(grid.names))
    a, b, c = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=3, max_size=3)))
    units = [draw(st.sampled_from([unit for unit in (1, 2, 3) if size % unit == 0])) for size in shape]
    return Layout(axes[:a], axes[a:b], axes[b:c], units)


@st.composite
def cases(draw):
    grid = draw(grids)
    shape = draw(st.tuples(*[st.sampled_from([0, 1, 4, 6, 7, 9, 12, 24])] * 2))
    return grid, shape, draw(layouts(grid, shape)), draw(layouts(grid, shape))


def held(whole, layout, grid):
    """What each rank holds: of a sum, numbers of its own that make it up."""
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
    """What each rank holds after a step, from what the ranks of its axis held, and by no other knowledge than boxes."""
    after = {}
    for rank, array in arrays.items():
        box = step.layout.summed.box(shape, grid, grid.position(rank))
        if step.kind == "move":
            whole = np.full(shape, 10**6)
            source, target = (Placement(shape, layout.summed, grid) for layout in (before, step.layout))
            for owner, piece in incoming(source, target, rank):
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
        elif step.kind == "keep":
            after[rank] = array * (rank == members[0])
        else:
            assert step.kind == "all_to_all"
            cut = [slice(None), slice(None)]
            cut[1 - step.dim] = box.within(old)[1 - step.dim]
            after[rank] = np.concatenate([arrays[member][tuple(cut)] for member in members], step.dim)
    return after


def states(layout):
    return {axis: kind for kind, axes in (("rows", layout.rows), ("cols", layout.cols), ("sums", layout.sums))
            for axis in axes}


@settings(max_examples=400)
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
    grid, shape, source, target = case
    steps = transitions(source, target, grid)
    assert [step.kind for step in steps].count("move") <= 1
    before, after = states(source.on(grid)), states(target.on(grid))
    same = {axis for axis in grid.names if before.get(axis) == after.get(axis)}
    if all(step.kind != "move" for step in steps):
        assert same.isdisjoint(step.axis for step in steps)
    assert not transitions(source, source, grid) and not transitions(target, target.on(grid), grid)


def received(kind, size, ranks):
    """Of a rank that holds so many elements, in units of a rank's share of a whole matrix."""
    return {"slice": 0, "keep": 0, "gather": size * (ranks - 1), "all_reduce": 2 * size * (ranks - 1) / ranks,
            "reduce_scatter": size * (ranks - 1) / ranks, "all_to_all": size * (ranks - 1) / ranks}[kind]


def neighbours(layout, grid, axes):
    """(kind, axis, layout) of every step that any of the axes can make."""
    dims = {0: layout.rows, 1: layout.cols}
    for axis in axes:
        rest = [tuple(other for other in group if other != axis) for group in (layout.rows, layout.cols, layout.sums)]
        ends = [dim for dim in dims if dims[dim][-1:] == (axis,)]
        for dim in ends:
            yield "gather", axis, Layout(*rest)
        if axis in layout.sums:
            yield "all_reduce", axis, Layout(*rest)
        if axis not in layout.named:
            yield "keep", axis, Layout(*rest[:2], (*rest[2], axis))
        for dim in dims:
            longer = Layout(*(group + (axis,) * (dim == number) for number, group in enumerate(rest[:2])), rest[2])
            if axis in layout.sums:
                yield "reduce_scatter", axis, longer
            if axis not in layout.named:
                yield "slice", axis, longer
            if ends == [1 - dim]:
                yield "all_to_all", axis, longer


def least(source, target, grid):
    """Fewest elements received on any way along the axes whose state changes."""
    before, after = states(source), states(target)
    axes = [axis for axis in grid.names if getattr(grid, axis) > 1 and (
        before.get(axis) != after.get(axis) or after.get(axis) in ("rows", "cols") and source != target)]
    axes = [axis for axis in axes if before.get(axis) != after.get(axis)]
    number, best = count(), {}
    waiting = [(0, next(number), source.on(grid))]
    while waiting:
        cost, _, layout = heapq.heappop(waiting)
        if layout == target.on(grid):
            return cost
        if best.setdefault(layout, cost) < cost or best.get((layout, "done")):
            continue
        best[layout, "done"] = True
        for kind, axis, found in neighbours(layout, grid, axes):
            size = grid.size / grid.along(layout.splitting)
            heapq.heappush(waiting, (cost + received(kind, size, getattr(grid, axis)), next(number), found.on(grid)))
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
    return grid, *(Layout(layout.rows, layout.cols, layout.sums)
                   for layout in (draw(layouts(grid, shape)), draw(layouts(grid, shape))))


@given(small_cases())
def test_no_order_of_steps_sends_less(case):
    grid, source, target = case
    steps = transitions(source, target, grid)
    assume(all(step.kind != "move" for step in steps))
    assert total(steps, source, grid) <= least(source, target, grid) + 1e-9
