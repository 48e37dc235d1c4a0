"""Schedules of moves between tilings, executed on all ranks of a fake link."""

import numpy as np
from fake_link import LIBRARY, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiles import IDLE_TOO, held, shapes, tilings

from pmm3d import GridShape
from pmm3d.comm import Buffers, run_rounds
from pmm3d.model.move import Move, tile_move
from pmm3d.model.rounds import count


@st.composite
def moves(draw):
    """(source, target, ranks, rounds)."""
    ranks, shape = draw(st.integers(1, 64) | st.just(IDLE_TOO)), draw(shapes)
    sizes = [draw(st.integers(1, 4)) for _ in range(5)]
    while np.prod(sizes) > ranks:
        sizes[np.argmax(sizes)] //= 2
    of_ranks = st.just(GridShape(*sizes[:4], seq=sizes[4]))
    return *(draw(tilings(shape, ranks, of_ranks)) for _ in range(2)), ranks, draw(st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(moves(), st.sampled_from([0, 2]))
def test_a_move_brings_each_element_once(move, beta):
    """Both ends of a message agree on its place and size, each element is written once, no rank receives an element
    that it has, and a round keeps its bound."""
    source, target, ranks, rounds = move
    whole = np.arange(source.shape[0] * source.shape[1]).reshape(source.shape)
    have = [held(source, rank, whole) for rank in range(ranks)]
    made = [held(target, rank, np.full_like(whole, -1)) for rank in range(ranks)]
    schedules = [tile_move(source, target, rank, ranks, rounds) for rank in range(ranks)]
    bounds = Move(source, target, "float64").sides

    def moving(link):
        schedule, arrays = schedules[link.rank], [*have[link.rank], *made[link.rank]]
        if source.order == "F":
            arrays = [array.T for array in arrays]
        assert schedule.work_rows <= sum(side.in_round(rounds) for side in bounds)
        with link.workspace.slab(8 * schedule.work_rows, LIBRARY) as work:
            buffers = Buffers(schedule, LIBRARY, arrays, [0] * len(arrays), work, beta, "int64")
            yield from run_rounds(link, buffers, schedule.rounds)

    _, links = run(ranks, moving)
    for rank, schedule in enumerate(schedules):
        for array, wanted in zip(made[rank], held(target, rank, whole)):
            assert (array == np.where(wanted >= 0, wanted - beta, wanted)).all()
        stored, needed = (
            np.concatenate([[], *map(np.ravel, held(side, rank, whole, mark=-1))]) for side in (source, target)
        )
        missing = np.count_nonzero((needed >= 0) & ~np.isin(needed, stored))
        assert links[rank].record.received == count(schedule, 8).received == 8 * missing
