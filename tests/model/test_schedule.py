"""Every schedule, for all ranks of a group, without MPI: `check` executes the tables on symbols."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import looped
from samples import grids_of
from tiles import held, shapes, tilings

from pmm3d import GridShape, Pmm3dError
from pmm3d.layout import offsets, part_sizes
from pmm3d.model import schedule as tables
from pmm3d.model.check import Element, check
from pmm3d.model.move import tile_move
from pmm3d.model.rounds import IN, OUT, Round, Schedule, Span, Sum, WorkBuffer, count, packing_bytes
from pmm3d.model.schedule import WINDOW
from pmm3d.model.stages import stages

EMPTY = None
FEW = st.sampled_from([GridShape(*shape, data) for n in (1, 3, 4) for shape, data in grids_of(n, (1, 2))])


def contract(terms):
    """The sum of these terms in the documented order: stage by stage, in rank order within each, as nested tuples."""
    for radix in stages(len(terms)):
        stride = len(terms) // radix
        terms = [terms[first] if radix == 1 else tuple(terms[first::stride]) for first in range(stride)]
    return terms[0]


def expected(ranks, per_node, row):
    """The sum of a row over all ranks: first within each node, then over the nodes."""
    terms = [Element(rank, row) for rank in range(ranks)]
    return contract([contract(terms[first : first + per_node]) for first in range(0, ranks, per_node)])


def symbols(rank, rows):
    return [Element(rank, row) for row in range(rows)]


def volumes(schedules):
    """Rows that all ranks receive, which are those that they send. What a rank sends is counted as what it receives."""
    found = [count(schedule, 1) for schedule in schedules]
    for schedule, (received, sent, _) in zip(schedules, found):
        turned = tuple(each._replace(sends=each.receives, receives=each.sends) for each in schedule.rounds)
        assert count(schedule._replace(rounds=turned), 1)[:2] == (sent, received)
    assert sum(each.received for each in found) == sum(each.sent for each in found)
    assert all(len(each.sends) <= 2 * WINDOW for schedule in schedules for each in schedule.rounds)
    return sum(each.received for each in found)


@st.composite
def groups(draw):
    """(nodes, ranks on each, whether collectives are hierarchical)."""
    per_node = draw(st.integers(1, 8))
    nodes = draw(st.integers(1, 64 // per_node))
    return nodes * per_node, per_node if 1 < per_node < nodes * per_node and draw(st.booleans()) else 1


counts_of = lambda ranks: st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).map(tuple)
EXAMPLES = settings(max_examples=40, deadline=None)


@EXAMPLES
@given(st.data(), groups())
def test_a_gather_brings_each_row_once(data, group):
    size, per_node = group
    counts = data.draw(counts_of(size))
    whole = [symbol for rank, rows in enumerate(counts) for symbol in symbols(rank, rows)]
    made = [tables.all_gather(counts, rank, per_node) for rank in range(size)]
    assert check(made, [(symbols(rank, counts[rank]), [EMPTY] * sum(counts)) for rank in range(size)]) == [whole] * size
    assert volumes(made) == (size - 1) * sum(counts)


@EXAMPLES
@given(st.data(), groups(), st.booleans())
def test_a_reduce_scatter_adds_in_the_order_of_the_contract(data, group, low):
    size, per_node = group
    counts = data.draw(counts_of(size))
    made = [tables.reduce_scatter(counts, rank, per_node, low) for rank in range(size)]
    out = check(made, [(symbols(rank, sum(counts)), [EMPTY] * counts[rank]) for rank in range(size)])
    assert [row for rows in out for row in rows] == [expected(size, per_node, row) for row in range(sum(counts))]
    assert volumes(made) >= (size - 1) * sum(counts)


@EXAMPLES
@given(st.integers(0, 20), groups(), st.booleans(), st.booleans(), st.booleans())
def test_an_all_reduce_gives_every_rank_the_sum(rows, group, low, whole, in_place):
    size, per_node = group
    made = [tables.all_reduce(rows, size, rank, per_node, low, whole) for rank in range(size)]
    given_ = [symbols(rank, rows) for rank in range(size)]
    out = check(made, [(mine, mine if in_place else [EMPTY] * rows) for mine in given_])
    assert out == [[expected(size, per_node, row) for row in range(rows)]] * size
    assert rows == 0 or size == 1 or volumes(made) > 0


def pairwise(terms):
    """The sum of neighbours, then of neighbouring sums, and so on."""
    while len(terms) > 1:
        terms = [terms[i] if i + 1 == len(terms) else (terms[i], terms[i + 1]) for i in range(0, len(terms), 2)]
    return terms[0]


@EXAMPLES
@given(st.data(), st.integers(1, 16), st.booleans(), st.booleans())
def test_pairwise_sums_of_consecutive_ranks_are_a_part_of_the_whole_sum(data, ranks, low, whole):
    counts = data.draw(counts_of(ranks))
    rows = sum(counts)
    wanted = [pairwise([Element(rank, row) for rank in range(ranks)]) for row in range(rows)]
    made = [tables.reduce_scatter(counts, rank, 1, low, True) for rank in range(ranks)]
    out = check(made, [(symbols(rank, rows), [EMPTY] * counts[rank]) for rank in range(ranks)])
    assert [row for rows in out for row in rows] == wanted and volumes(made) == (ranks - 1) * rows
    made = [tables.all_reduce(rows, ranks, rank, 1, low, whole, True) for rank in range(ranks)]
    assert check(made, [(mine, mine) for mine in (symbols(rank, rows) for rank in range(ranks))]) == [wanted] * ranks


@EXAMPLES
@given(st.data(), st.integers(1, 80))
def test_an_all_to_all_brings_each_part_to_its_rank(data, size):
    factor = data.draw(st.integers(1, 9))
    sent = [tuple((3 * rank + factor * peer) % 4 for peer in range(size)) for rank in range(size)]
    received = list(zip(*sent))
    made = [tables.all_to_all(sent[rank], received[rank], rank) for rank in range(size)]
    buffers = [(symbols(rank, sum(sent[rank])), [EMPTY] * sum(received[rank])) for rank in range(size)]
    starts = [offsets(counts) for counts in sent]
    assert check(made, buffers) == [
        [
            Element(source, row)
            for source in range(size)
            for row in range(starts[source][number], starts[source][number + 1])
        ]
        for number in range(size)
    ]
    assert volumes(made) == sum(map(sum, sent)) - sum(sent[rank][rank] for rank in range(size))


@EXAMPLES
@given(groups(), st.data())
def test_a_shared_gather_brings_each_row_to_each_node(group, data):
    """OUT is one list for the ranks of a node, and each row of another node arrives there once."""
    size, per_node = group
    per_node = size if per_node == 1 else per_node
    counts = data.draw(counts_of(size))
    edges = offsets(counts)
    blocks = [[EMPTY] * sum(counts) for _ in range(size // per_node)]
    for rank, rows in enumerate(counts):
        blocks[rank // per_node][edges[rank] : edges[rank + 1]] = symbols(rank, rows)
    made = [tables.shared_all_gather(counts, rank, per_node) for rank in range(size)]
    check(made, [([], blocks[rank // per_node]) for rank in range(size)])
    whole = [symbol for rank, rows in enumerate(counts) for symbol in symbols(rank, rows)]
    assert all(block == whole for block in blocks)
    assert volumes(made) == (len(blocks) - 1) * sum(counts)


@looped("size", [2, 5, 16, 23])
def test_both_ends_have_a_message_in_the_same_window(monkeypatch, size):
    monkeypatch.setattr(tables, "WINDOW", 3)
    drawn = np.random.default_rng(size).integers(0, 2, (size, size))
    made = [
        tables.windows(
            tables.Members(range(size), own),
            [(peer, Span(IN, peer, peer + 1)) for peer in range(size) if drawn[own, peer]],
            [(peer, Span(OUT, peer, peer + 1)) for peer in range(size) if drawn[peer, own]],
        )
        for own in range(size)
    ]
    for number in range(len(made[0])):
        sent = {(own, peer) for own in range(size) for peer, _ in made[own][number].sends}
        assert sent == {(peer, own) for own in range(size) for peer, _ in made[own][number].receives}
        assert all(len(rounds[number].sends) <= 3 for rounds in made)


A, B = Span(IN, 0, 1), Span(OUT, 0, 1)
TO_1, FROM_0 = Round(sends=((1, A),)), Round(receives=((0, B),))
FAULTS = {
    "partner": [(TO_1,), ()],
    "gets 1 rows": [(TO_1,), (Round(receives=((0, Span(OUT, 0, 2)),)),)],
    "received before": [(TO_1, TO_1), (FROM_0, FROM_0)],
    "is written while": [(TO_1,), (FROM_0._replace(copies=(Sum((A,), B),)),)],
    "before it is written": [(), (Round(copies=(Sum((Span(2, 0, 1),), B),)),)],
    "is outside": [(), (Round(copies=(Sum((Span(2, 4, 5),), B),)),)],
    "twice": [(), (Round(sums=(Sum((A, A), B),)),)],
    "never written": [(), (Round(sums=(Sum((A,), Span(OUT, 1, 2)),)),)],
    "different numbers": [(), (Round(sums=(Sum((A, Span(IN, 1, 3)), B),)),)],
    "overlaps": [(), (Round(sums=(Sum((A, Span(IN, 1, 2), Span(IN, 2, 3)), Span(IN, 2, 3)),)),)],
}


@pytest.mark.parametrize("words", FAULTS)
def test_the_check_finds_faults_of_tables(words):
    made = [Schedule(rounds, (WorkBuffer(0, 8, False),), 1) for rounds in FAULTS[words]]
    with pytest.raises(Pmm3dError, match=rf"schedule of rank \d, round \d: rows .* of buffer .*{words}"):
        check(made)


def test_ranks_add_in_one_order():
    """Ranks 0 and 1 exchange their rows, and each adds its own row first."""
    made = [
        Schedule(
            (Round(((1 - rank, A),), ((1 - rank, Span(2, 0, 1)),), sums=(Sum((A, Span(2, 0, 1)), B),)),),
            (WorkBuffer(0, 1, False),),
            1,
        )
        for rank in range(2)
    ]
    with pytest.raises(Pmm3dError, match="another order"):
        check(made)


def test_no_rank_leaves_a_barrier_before_all_have_come():
    """Messages carry the set of ranks that have entered. At the end, each rank has the set of all ranks of its
    group."""
    for size, per_node in [(1, 0), (2, 0), (3, 0), (7, 0), (16, 0), (48, 0), (12, 4), (6, 3)]:
        made = [tables.barrier(size, rank, per_node) for rank in range(size)]
        known = [{rank} for rank in range(size)]
        for number in range(len(made[0].rounds)):
            before = [set(each) for each in known]
            for rank, table in enumerate(made):
                for peer, _ in table.rounds[number].sends:
                    assert rank in [source for source, _ in made[peer].rounds[number].receives]
                    known[peer] |= before[rank]
        first = lambda rank, each=per_node: rank // each * each if each else 0
        group = lambda rank, each=per_node: range(first(rank), first(rank) + (each or size))
        assert all(known[rank] == set(group(rank)) for rank in range(size))


def rows_of(messages, rank):
    """Numbers of rows of the messages with a rank, in order."""
    return [span.rows for peer, span in messages if peer == rank and span.rows]


@looped("size, per_node", [(256, 8), (4096, 1)])
def test_messages_of_thousands_of_ranks_find_their_partners(size, per_node):
    """The rounds of each rank are compared with those of its peers: same order, same sizes, few rounds and messages."""
    counts = tuple(part_sizes(size + 3, size))
    for make, rank in product(
        (
            lambda rank: tables.all_gather(counts, rank, per_node),
            lambda rank: tables.reduce_scatter(counts, rank, per_node),
            lambda rank: tables.all_reduce(size, size, rank, per_node),
        ),
        (1, size - 1),
    ):
        own = make(rank)
        sends = [send for each in own.rounds for send in each.sends]
        for peer in {peer for each in own.rounds for peer, _ in (*each.sends, *each.receives)}:
            receives = [receive for each in make(peer).rounds for receive in each.receives]
            assert rows_of(sends, peer) == rows_of(receives, rank)
        assert len(sends) <= (2 * sum(stages(size)) if per_node == 1 else size)
        assert len(own.rounds) <= size // WINDOW + 8


@pytest.mark.parametrize("columns", [False, True])
def test_copies_of_messages_are_counted_once_an_array(columns):
    table = tables.all_gather((2, 3), 0)
    for strided, nbytes in (((False, False), 0), ((True, False), 64), ((True, True), 128)):
        assert packing_bytes(table, (10, 10), strided, columns) == nbytes
    staged = tables.reduce_scatter((1,) * 64, 0)
    assert packing_bytes(staged, (64, 64), (True, True), columns) == 7 * 8 * 64


@settings(max_examples=60)
@given(st.data())
def test_a_tile_move_brings_each_element_to_its_place(data):
    """Layouts, block-cyclic matrices and other cuts, in some rounds. Places without an element stay as they are."""
    shape, ranks = data.draw(shapes), 4
    source, target = (data.draw(tilings(shape, ranks, FEW)) for _ in range(2))
    whole = np.arange(prod(shape)).reshape(shape)
    by_rows = lambda arrays: [array.T if source.order == "F" else array for array in arrays]
    symbols = lambda array: [Element(0, int(value)) if value >= 0 else None for value in array.ravel()]
    given_arrays, wanted = ([by_rows(held(side, rank, whole)) for rank in range(ranks)] for side in (source, target))
    unused = lambda array: [None if value >= 0 else Element(1, number) for number, value in enumerate(array.ravel())]
    buffers = [[*map(symbols, given_arrays[rank]), *map(unused, wanted[rank])] for rank in range(ranks)]
    cols = [[array.shape[1] for array in given_arrays[rank] + wanted[rank]] for rank in range(ranks)]
    rounds = data.draw(st.integers(1, 3))
    check([tile_move(source, target, rank, ranks, rounds) for rank in range(ranks)], buffers, cols)
    for rank in range(ranks):
        for array, found in zip(wanted[rank], buffers[rank][len(given_arrays[rank]) :]):
            assert all(one == each for one, each in zip(symbols(array), found) if one is not None)
