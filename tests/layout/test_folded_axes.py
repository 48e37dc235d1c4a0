"""Folded axes: another view of the ranks along z and data, in which some of them share the experts of a network."""

from itertools import product

import numpy as np
import pytest

from pmm3d import GridShape, Layout
from pmm3d.comm.nodes import groups_along
from pmm3d.errors import GridError, LayoutError
from pmm3d.layout import FOLDED, Placement, Tile, transitions
from pmm3d.model.machines.groups import groups_of

SHAPES = [
    (GridShape(2, 1, 2, 4, **others), expert) for expert in (1, 2, 4, 8) for others in ({}, {"seq": 2}, {"pipe": 2})
]


def of_expert(shape, expert, rows):
    axis = f"expert:{expert % shape.expert}"
    return Layout((axis, "y", "expert_z"), "x", units=({axis: max(1, rows)}, 1))


@pytest.mark.parametrize("base,expert", SHAPES)
def test_folded_axes_are_a_view_of_all_ranks_along_z_and_data(base, expert):
    shape = base.folded(expert)
    assert (shape.expert, shape.expert * shape.expert_z * shape.expert_data) == (expert, base.z * base.data)
    assert (shape.size, shape.names, tuple(shape)) == (base.size, base.names, tuple(base))
    assert (shape == base) == (expert == 1) and GridShape(**shape._asdict()) == shape
    seen = set()
    for rank in range(shape.size):
        coords = shape.coords(rank)
        others = [getattr(coords, name) for name in shape.names if name not in ("z", "data")]
        seen.add((*others, *(getattr(coords, axis) for axis in FOLDED)))
        for axis in FOLDED:
            group = shape.group([axis], coords)
            assert group[getattr(coords, axis)] == rank and len(group) == getattr(shape, axis)
            assert [shape.rank(coords.at(axis, index)) for index in range(len(group))] == list(group)
    assert len(seen) == shape.size


@pytest.mark.parametrize("base,expert", SHAPES)
def test_a_matrix_is_stored_once_on_the_ranks_of_its_owner(base, expert):
    shape = base.folded(expert)
    for number, rows in product(range(3), (0, 1, 5)):
        layout = of_expert(shape, number, rows)
        placement, first = Placement((rows, 3), layout, shape), []
        for rank in range(shape.size):
            coords = shape.coords(rank)
            box = layout.box((rows, 3), shape, coords)
            assert not box.size or coords.expert == number % expert
            assert placement.box(rank) == box
            [tile] = placement.tiles(rank)
            assert rank in placement.owners_of(tile) and placement.sender_for(tile, rank) == rank
            if layout.is_first(coords):
                first.append(box.size)
        assert sum(first) == 3 * rows
        if rows:
            assert {shape.coords(rank).expert for rank in placement.owners_of(Tile(0, 0))} == {number % expert}


def test_relayouts_between_both_views_are_moves():
    shape = GridShape(1, 1, 2, 4).folded(4)
    layout = of_expert(shape, 3, 6)
    assert [step.kind for step in transitions(layout, Layout(("data", "z")), shape, (6, 4))] == ["move"]
    assert [step.kind for step in transitions(layout, Layout(), shape, (6, 4))] == ["move"]  # not in rank order
    plain = Layout("expert", units=({"expert": 6}, 1))
    assert [(step.kind, step.axis) for step in transitions(plain, Layout(), shape, (6, 4))] == [("gather", "expert")]
    for source in (Layout((), "expert"), Layout(sums="expert")):  # the axis counted from another rank
        assert [step.kind for step in transitions(source, Layout("expert:1"), shape, (8, 8))][-1] == "move"
    one = GridShape(1, 1, 2, 4)
    assert layout.on(one) == Layout("expert_z")


def test_the_placement_of_folded_axes_on_nodes():
    shape = GridShape(1, 1, 8).folded(4)
    group = groups_of(shape, 6)["expert"]
    assert (group.size, group.nodes, group.stride) == (4, 2, 1)  # ranks 4 to 7
    composed = GridShape(2, 1, 2, 4, seq=2).folded(4)
    assert groups_of(composed, 4)["expert"].size == 4 and composed.strided("expert") is None
    for each, names in product((shape, composed), (("expert",), ("expert_z",), ("expert_z", "expert_data"))):
        nodes = np.arange(each.size) // 3
        rows = {tuple(each.group(names, each.coords(rank))) for rank in range(each.size)}
        assert sorted(map(tuple, groups_along(names, each, nodes))) == sorted(tuple(nodes[[*row]]) for row in rows)


def test_a_changed_shape_is_folded_anew():
    shape = GridShape(1, 1, 2, 4).folded(4)
    assert shape._replace(data=2).expert_data == 1
    with pytest.raises(GridError, match="do not fit"):
        shape._replace(data=1)


@pytest.mark.parametrize("expert", (0, -2, 2.0))
def test_what_is_no_number_of_ranks_is_refused(expert):
    with pytest.raises(GridError, match="expert is a number of ranks, at least 1"):
        GridShape(1, 1, 2, 4, expert=expert)


@pytest.mark.parametrize("expert", (3, 6, 16))
def test_a_number_that_does_not_fit_is_refused(expert):
    with pytest.raises(GridError, match=r"neighbours along z, then along data. Possible numbers are 1, 2, 4, 8"):
        GridShape(1, 1, 2, 4).folded(expert)


@pytest.mark.parametrize(
    "rows,words",
    [
        (("z", "expert"), "names z or data together with expert"),
        (("expert", "expert:3"), "names the axis expert twice"),
    ],
)
def test_layouts_that_name_an_axis_in_both_views_are_refused(rows, words):
    with pytest.raises(LayoutError, match=words):
        Layout(rows)
    with pytest.raises(LayoutError, match="partial sums over an axis with a first rank"):
        Layout(sums="expert:3")
