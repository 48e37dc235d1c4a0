"""pmm3d.layout.placement: senders and readers agree on every piece, an element comes from one rank that has it."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import grids_of

from pmm3d import GridShape, Layout, LayoutError
from pmm3d.layout import EMPTY, Placement, Whole, incoming, outgoing

IDLE_TOO = 8  # ranks of the communicator; grids may use fewer


@st.composite
def layouts(draw, shape, grid):
    axes = draw(st.permutations(grid.names))
    first, second = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
    units = [draw(st.sampled_from([unit for unit in (1, 2, 3) if size % unit == 0])) for size in shape]
    return Layout(rows=axes[:first], cols=axes[first:second], units=units)


grids = st.sampled_from([*(GridShape(*shape, data) for n in (1, 3, 6, 7, 8) for shape, data in grids_of(n, (1, 2))),
                         GridShape(1, 2, 1, 2, seq=2), GridShape(2, 1, 1, 1, seq=3)])
shapes = st.tuples(st.integers(0, 13), st.integers(0, 13))
wholes = st.sets(st.integers(0, IDLE_TOO - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@st.composite
def placements(draw, shape):
    if draw(st.integers(0, 4)) == 0:
        return Whole(shape, draw(wholes))
    grid = draw(grids)
    return Placement(shape, draw(layouts(shape, grid)), grid)


pairs = shapes.flatmap(lambda shape: st.tuples(placements(shape), placements(shape)))


def messages(found):
    """(source, target) -> blocks in the order in which they travel, from (source, target, block)."""
    travelling = defaultdict(list)
    for source, target, box in found:
        travelling[source, target].append(box)
    return dict(travelling)


@given(pairs)
def test_what_is_sent_is_what_is_awaited(pair):
    source, target = pair
    awaited = [(rank, me, box) for me in range(IDLE_TOO) for rank, box in incoming(source, target, me)]
    sent = [(me, rank, box) for me in range(IDLE_TOO) for rank, box in outgoing(source, target, me)]
    assert messages(awaited) == messages(sent)


@given(pairs)
def test_each_element_comes_once_from_a_rank_that_has_it(pair):
    source, target = pair
    for me in range(IDLE_TOO):
        arrived = np.zeros(target.shape, int)
        for rank, box in incoming(source, target, me):
            assert source.box(rank) & box == box
            arrived[box.within(EMPTY)] += 1
        wanted = target.box(me)
        assert np.all(arrived[wanted.within(EMPTY)] == 1)
        assert arrived.sum() == wanted.size


@given(pairs)
def test_nothing_travels_that_is_there_already(pair):
    source, target = pair
    for me in range(IDLE_TOO):
        for rank, box in incoming(source, target, me):
            assert rank == me or source.box(me) & box != box


@given(pairs)
def test_holders_hold_the_same_and_replicas_are_all_of_them(pair):
    placement, other = pair
    for rank, box in placement.parts(other.box(3)):
        held = placement.box(rank)
        assert held & box == box
        copies = sorted(placement.replicas(rank))
        assert copies == sorted(set(copies)) and rank in copies
        assert {placement.box(copy) for copy in copies} == {held}
        assert {placement.holder(rank, reader) for reader in range(IDLE_TOO)} <= set(copies)


def test_replicas_share_the_work_of_sending():
    """From a layout that replicates over z, every rank of z serves its own readers."""
    grid = GridShape(2, 1, 4)
    source = Placement((16, 16), Layout(rows="x"), grid)
    target = Placement((16, 16), Layout(rows=("z", "x")), grid)
    for rank in range(grid.size):
        readers = [reader for reader, _ in outgoing(source, target, rank) if reader != rank]
        assert {grid.coords(reader).z for reader in readers} <= {grid.coords(rank).z}


def test_bad_placements_are_refused():
    grid = GridShape(1, 1, 1)
    with pytest.raises(LayoutError, match="a layout is a pmm3d.Layout; got 'A'"):
        Placement((2, 2), "A", grid)
    for shape in ((3,), (1, 2, 3), (-1, 4)):
        with pytest.raises(LayoutError, match="a matrix has two dims of at least 0"):
            Placement(shape, Layout.A, grid)
