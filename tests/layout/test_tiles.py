"""Distributions of dims, matrices in tiles, and the pieces of a move between tilings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped
from tiles import IDLE_TOO, held, indices, placements, places, shapes

from pmm3d import BlockCyclic, Blocks, GridShape, Layout, LayoutError
from pmm3d.layout import Box, Placement
from pmm3d.layout.distribution import Cyclic, Intervals, Split, Strided, in_common, packed, parts_met, strided
from pmm3d.layout.pieces import send_blocks

numbers = st.integers(1, 6)
cyclics = st.builds(
    lambda size, block, parts, first, offset: Cyclic(size, block, parts, first % parts, offset),
    st.integers(0, 40),
    numbers,
    numbers,
    st.integers(0, 5),
    st.integers(0, 17),
)
intervals = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(
    lambda sizes: Intervals((0, *np.cumsum(sizes).tolist()))
)


@st.composite
def splits(draw):
    """A window of a dim that axes cut. The units of an axis are multiples of the units of the axes after it."""
    counts, units = tuple(draw(st.lists(numbers, max_size=3))), [draw(numbers)]
    for _ in counts[1:]:
        units.append(draw(st.sampled_from([unit for unit in range(1, units[-1] + 1) if units[-1] % unit == 0])))
    whole = units[0] * draw(st.integers(0, 12))
    offset = draw(st.integers(0, whole))
    return Split(draw(st.integers(0, whole - offset)), counts, tuple(units), offset, whole)


dealings = cyclics | intervals | splits()


@given(cyclics)
def test_blocks_are_dealt_out_as_scalapack_does(dealt):
    """Compared with INDXG2P and INDXG2L of ScaLAPACK's TOOLS, with indices counted from 0."""
    found = [
        (run.part, run.local + step) for run in dealt.within(0, dealt.size) for step in range(run.stop - run.start)
    ]
    glob = range(dealt.offset, dealt.offset + dealt.size)
    assert found == [
        (
            (index // dealt.block + dealt.first) % dealt.parts,
            index // (dealt.block * dealt.parts) * dealt.block + index % dealt.block,
        )
        for index in glob
    ]
    for part in range(dealt.parts):
        assert [(part, place) for place in places(dealt, part)] == [each for each in found if each[0] == part]
        whole = range(dealt.offset + dealt.size)
        assert dealt.extent(part) == sum((index // dealt.block + dealt.first) % dealt.parts == part for index in whole)


@given(dealings)
def test_what_each_part_has_is_what_all_have(dealt):
    runs = list(dealt.within(0, dealt.size))
    assert [run.start for run in runs] + [dealt.size] == [0] + [run.stop for run in runs]
    for part in range(dealt.parts):
        assert list(dealt.runs(part)) == [run for run in runs if run.part == part]


@given(dealings, st.data())
def test_bounds_of_parts_are_kept(mine, data):
    most, span, shortest = mine.spacing
    of_parts = [indices(mine, part) for part in range(mine.parts)]
    assert all(len(each) <= most and (not each or each[-1] + 1 - each[0] <= span) for each in of_parts)
    inner = [run for run in mine.within(0, mine.size) if run.start > 0 and run.stop < mine.size]
    assert all(run.stop - run.start >= shortest for run in inner)
    others = data.draw(
        st.builds(lambda block, parts: Cyclic(mine.size, block, parts), numbers, numbers)
        | st.builds(lambda one, other: Split(mine.size, (one, other)), numbers, numbers)
    )
    for one, other in ((mine, others), (others, mine)):
        assert parts_met(one, other) >= max(len(in_common(one, part, other)) for part in range(one.parts))


@given(dealings, st.integers(-3, 45), st.integers(-3, 45))
def test_who_has_a_range_is_who_has_it_of_the_whole(dealt, low, high):
    one_by_one = lambda runs: [
        (run.part, run.start + step, run.local + step) for run in runs for step in range(run.stop - run.start)
    ]
    whole = one_by_one(dealt.within(0, dealt.size))
    assert one_by_one(dealt.within(low, high)) == [each for each in whole if low <= each[1] < high]


@given(st.data())
def test_what_two_parts_have_in_common(data):
    mine = data.draw(cyclics)
    others = data.draw(
        st.one_of(
            st.just(Intervals((0, mine.size // 3, mine.size))),
            st.builds(lambda one, other: Split(mine.size, (one, other)), numbers, numbers),
            st.builds(lambda block, parts: Cyclic(mine.size, block, parts), numbers, numbers),
        )
    )
    if data.draw(st.booleans()):
        mine, others = others, mine
    for part in range(mine.parts):
        found = in_common(mine, part, others)
        pairs = sorted((here, other, there) for other, runs in found.items() for here, there in one_by_one(runs))
        owner = {
            index: (run.part, run.local + index - run.start)
            for run in others.within(0, others.size)
            for index in range(run.start, run.stop)
        }
        assert pairs == [(place, *owner[index]) for index, place in zip(indices(mine, part), places(mine, part))]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4))), st.integers(0, 12), st.integers(0, 12)
)
def test_even_steps_and_packing_leave_every_index_where_it_is(gaps, low, more):
    here = there = 0
    runs = []
    for gap_here, gap_there, length in gaps:
        runs.append(Strided(here + gap_here, there + gap_there, length))
        here, there = here + gap_here + length, there + gap_there + length
    whole = one_by_one(runs)
    assert one_by_one(strided(runs)) == whole
    for given_as in (runs, strided(runs)):
        part = one_by_one(packed(given_as, low, low + more))
        assert part == [(place, number) for number, (place, _) in enumerate(whole[low : low + more])]


def one_by_one(runs):
    return [
        (run.here + turn * run.step_here + step, run.there + turn * run.step_there + step)
        for run in runs
        for turn in range(run.times)
        for step in range(run.length)
    ]


def test_a_cyclic_dim_and_a_part_of_it_are_few_copies():
    runs = in_common(Cyclic(6400, 64, 5), 2, Intervals((0, 3200, 6400)))
    assert [len(shared) for shared in runs.values()] == [1, 1]
    assert [len(shared) for shared in in_common(Cyclic(10**6, 64, 5), 2, Split(10**6, (3,))).values()] <= [3] * 3


@given(shapes.flatmap(lambda shape: st.tuples(placements(shape), st.integers(0, 13), st.integers(0, 13))))
def test_a_placement_and_its_windows_are_tiles_in_boxes(drawn):
    whole, row, col = drawn
    row, col = min(row, whole.shape[0]), min(col, whole.shape[1])
    window = whole.sub(row, col, whole.shape[0] - row, whole.shape[1] - col)
    for placement in (whole, window):
        for rank in range(IDLE_TOO):
            boxes = [
                Box(
                    *(
                        edge
                        for dealt, part in zip((placement.rows, placement.cols), tile)
                        for edge in edges(dealt, part)
                    )
                )
                for tile in placement.tiles(rank)
            ]
            assert [box.size for box in boxes] == [placement.box(rank).size] or not boxes
            assert not boxes or boxes == [placement.box(rank)] or not boxes[0].size
            assert all(box.size <= placement.most()[0] for box in boxes)
            assert window.local_shapes(rank) == whole.local_shapes(rank)
            for tile in placement.tiles(rank):
                copies = sorted(placement.owners_of(tile))
                assert rank in copies and all(placement.tiles(copy) == (tile,) for copy in copies)
                assert {placement.sender_for(tile, reader) for reader in range(IDLE_TOO)} <= set(copies)
                assert placement.sender_for(tile, rank) == rank


def edges(dealt, part):
    found = [edge for run in dealt.runs(part) for edge in (run.start, run.stop)]
    return found or [0, 0]


def test_replicas_share_the_work_of_sending():
    """If the layout replicates over z, each rank along z sends to a different part of the readers."""
    grid = GridShape(2, 1, 4)
    source = Placement((16, 16), Layout(rows="x"), grid)
    target = Placement((16, 16), Layout(rows=("z", "x")), grid)
    for rank in range(grid.size):
        readers = {reader for ranks in send_blocks(source, target, rank) for reader in ranks} - {rank}
        assert {grid.coords(reader).z for reader in readers} <= {grid.coords(rank).z}


def test_a_rank_of_many_finds_its_pieces_in_few_steps():
    """On 2^60 ranks, so no step can list the parts of a dim."""
    grid = GridShape(2**20, 2**20, 2**20)
    rows, other = (Placement((2**62, 5), Layout(axes), grid) for axes in (("z", "y", "x"), ("x", "z", "y")))
    assert list(send_blocks(rows, other, 5)) == [(5 * 2**20,)]
    assert parts_met(rows.rows, other.rows) == 2


def test_a_part_of_a_part_lies_in_the_same_arrays():
    whole = np.arange(15 * 11).reshape(15, 11)
    cyclic = BlockCyclic((15, 11), (2, 3), (2, 2), "C", (1, 0))
    sub = cyclic.sub(3, 1, 9, 8).sub(2, 2, 5, 4)
    assert sub == cyclic.sub(5, 3, 5, 4) and sub.shape == (5, 4)
    for rank in range(4):
        [array], [part] = held(cyclic, rank, whole), sub.tiles(rank)
        found = array[np.ix_(places(sub.rows, part.row), places(sub.cols, part.col))]
        assert (found == whole[5:10, 3:7][np.ix_(indices(sub.rows, part.row), indices(sub.cols, part.col))]).all()
        assert sub.local_shapes(rank)[0] <= cyclic.local_shapes(rank)[0]


def test_numberings_of_a_process_grid_and_ranks_of_it():
    by_rows, by_columns = (BlockCyclic((4, 4), (1, 1), (2, 3), numbering) for numbering in "RC")
    assert [by_rows.tiles(rank) for rank in (1, 3, 6)] == [((0, 1),), ((1, 0),), ()]
    assert [by_columns.tiles(rank) for rank in (1, 3, 6)] == [((1, 0),), ((1, 1),), ()]
    chosen = BlockCyclic((4, 4), (1, 1), (1, 2), ranks=(5, 2))
    assert [chosen.tiles(rank) for rank in (5, 2, 0)] == [((0, 0),), ((0, 1),), ()]
    assert chosen.owners_of(chosen.tiles(2)[0]) == (2,) and chosen.local_shapes(0) == []


def cyclic(**changes):
    return BlockCyclic(**{"shape": (4, 4), "blocks": (2, 2), "process_grid": (2, 2), **changes})


def boxes(*of_ranks):
    return Blocks.of_boxes(of_ranks, (5, 4))


def test_boxes_of_ranks_are_blocks():
    assert boxes((0, 3, 0, 4), (3, 3, 0, 0), (3, 5, 0, 4)) == Blocks((0, 3, 5), (0, 4), [[0], [2]])
    assert Blocks.of_boxes([(0, 0, 0, 3)], (0, 3)).local_shapes(0) == [(0, 3)]


ONE, TWO = GridShape(1, 1, 1), ([0, 2], [0, 3])
ON_RANKS = {
    "2 x 2 on ranks up to 3": cyclic(),
    "1 x 2 on ranks up to 4": cyclic(process_grid=(1, 2), ranks=(0, 4)),
    "ranks up to 3": Blocks((0, 4), (0, 4), [[3]]),
    "1x1x5": Placement((4, 4), Layout("z"), GridShape(1, 1, 5)),
}
"""The ranks that a message names -> tiles that need them."""
REFUSED = [
    (lambda: Placement((2, 2), "A", ONE), "a layout is a pmm3d.Layout; got 'A'"),
    (lambda: Placement((3,), Layout.A, ONE), r"two dims of at least 0.*got \(3,\)"),
    (lambda: Placement((1, 2, 3), Layout.A, ONE), "two dims of at least 0"),
    (lambda: Placement((-1, 4), Layout.A, ONE), "two dims of at least 0"),
    (lambda: Placement((3, 2), Layout.A, ONE).sub(1, 0, 3, 1), "rows 1:4 and columns 0:1 .* matrix of 3 x 2"),
    (lambda: cyclic().sub(2, 0, 3, 1), "rows 2:5 and columns 0:1 .* matrix of 4 x 4"),
    (lambda: cyclic(blocks=(0, 2)), r"blocks .*whole numbers of at least 1; got \(0, 2\)"),
    (lambda: cyclic(blocks=(2, 2.5)), r"blocks .*whole numbers of at least 1; got \(2, 2.5\)"),
    (lambda: cyclic(process_grid=(2, 0)), r"process_grid .*whole numbers of at least 1; got \(2, 0\)"),
    (lambda: cyclic(first=(2, 0)), r"process \(2, 0\) of a process grid of 2 x 2"),
    (lambda: cyclic(numbering="F"), "numbering .*got 'F'"),
    (lambda: cyclic(ranks=(0, 1, 2)), r"2 x 2 has 4 ranks, each once; got \(0, 1, 2\)"),
    (lambda: cyclic(ranks=(0, 1, 2, 2)), r"2 x 2 has 4 ranks, each once; got \(0, 1, 2, 2\)"),
    (lambda: cyclic(ranks=(0, 1, 2, -3)), "ranks are whole numbers, counted from 0"),
    (lambda: cyclic(ranks="four"), "ranks are whole numbers, counted from 0; got 'four'"),
    (lambda: cyclic(shape=(-1, 2)), r"two dims of at least 0.*got \(-1, 2\)"),
    (lambda: Blocks(*TWO, [[0, 1]]), "1 x 1 blocks .* owners of 1 x 2"),
    (lambda: Blocks(*TWO, [[0], [1]]), "1 x 1 blocks .* owners of 2 x 1"),
    (lambda: Blocks([0, 2, 1], [0, 3], [[0], [0]]), r"row_cuts: .*got \[0, 2, 1\]"),
    (lambda: Blocks([0, 2], [1, 3], [[0]]), r"col_cuts: .*got \[1, 3\]"),
    (lambda: Blocks(*TWO, 5), "owners of blocks are lists of ranks; got 5"),
    (lambda: Blocks(*TWO, [["a"]]), "ranks are whole numbers, counted from 0"),
    (lambda: Blocks(*TWO, [[0]], "A"), "order of arrays .*got 'A'"),
    *((lambda counts=counts: Blocks.rows_of(counts, 4), "rows of each rank") for counts in (3, [3, -1], [1.5], None)),
    (
        lambda: boxes((0, 4, 0, 4), (3, 5, 0, 4)),
        r"element \(3, 0\), counted from 0, is in the blocks of rank 0 and of rank 1",
    ),
    (lambda: boxes((0, 3, 0, 4), (3, 5, 1, 4)), r"element \(3, 0\), counted from 0, is in no rank's block"),
    (lambda: boxes((0, 6, 0, 4)), "rank 0 has the rows 0 to 6, counted from 0, of 5"),
    (lambda: boxes((0, 5, 3, 1)), "rank 0 has the columns 3 to 1"),
    *((lambda tiled=tiled: tiled.check_ranks(3), words) for words, tiled in ON_RANKS.items()),
]


@looped("call, words", REFUSED)
def test_what_can_be_no_tiles_is_refused(call, words):
    with pytest.raises(LayoutError, match=words):
        call()


def test_tiles_fit_a_communicator_with_their_ranks():
    for tiled in ON_RANKS.values():
        tiled.check_ranks(5)
