"""Every schedule, for all ranks of a group, without MPI: the tables are executed on symbols. A row of IN is a symbol
with its rank and number. A sum is a tuple of symbols in order."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmm3d.layout import offsets, part_sizes
from pmm3d.model import schedule as tables
from pmm3d.model.rounds import IN, NOTHING, OUT, count, packing_bytes
from pmm3d.model.schedule import WINDOW
from pmm3d.model.stages import stages

EMPTY = None


class Rank:
    """The buffers of one rank. Work buffers share memory as planned, so a value that is overwritten too early changes
    the result."""

    def __init__(self, schedule, given, out):
        self.schedule, self.given, self.out = schedule, given, out
        self.memory = [EMPTY] * schedule.work_rows
        self.received = self.sent = 0

    def places(self, span):
        """The list that contains a span, and the numbers of its elements there."""
        if span.buffer == IN:
            return self.given, range(span.start, span.stop)
        if span.buffer == OUT:
            return self.out, range(span.start, span.stop)
        start, rows, wide, _ = self.schedule.work[span.buffer - 2]
        assert span.stop <= rows
        step = 2 if wide else 1
        return self.memory, range(start + step * span.start, start + step * span.stop, step)

    def read(self, span):
        memory, places = self.places(span)
        assert all(memory[place] is not EMPTY for place in places)
        return [memory[place] for place in places]

    def write(self, span, values):
        memory, places = self.places(span)
        assert len(values) == len(places)
        for place, value in zip(places, values):
            memory[place] = value
            if self.is_wide(span):
                memory[place + 1] = value

    def is_wide(self, span):
        return span.buffer > OUT and self.schedule.work[span.buffer - 2].wide

    def add(self, total):
        parts = [self.read(part) for part in total.parts]
        for number, part in enumerate(total.parts):
            memory, places = self.places(part)
            target, others = self.places(total.target)
            assert number < 2 or memory is not target or not set(places) & set(others), "an alias beyond the second"
        self.write(total.target, parts[0] if len(parts) == 1 else [tuple(row) for row in zip(*parts)])


def execute(ranks):
    """Execute all tables to their end. Messages are matched in order, and each has a partner."""
    mail = {}
    under_way = {number: walk(number, rank, mail) for number, rank in enumerate(ranks)}
    while under_way:
        moved = False
        for number, steps in list(under_way.items()):
            try:
                moved |= next(steps)
            except StopIteration:
                del under_way[number]
                moved = True
        assert moved, "all ranks wait for messages that nobody sends"
    assert not any(mail.values()), "messages that nobody receives"


def walk(number, rank, mail):
    for each in rank.schedule.rounds:
        assert len(each.sends) <= 2 * WINDOW and len({peer for peer, _ in each.sends} & {number}) == 0
        check_hazards(rank, each)
        for peer, span in each.sends:
            values = ["token"] if span.buffer == NOTHING else rank.read(span)
            if values:
                mail.setdefault((number, peer), []).append((values, rank.is_wide(span)))
            rank.sent += 0 if span.buffer == NOTHING else len(values) * (2 if rank.is_wide(span) else 1)
        for copy in each.copies:
            rank.add(copy)
        for peer, span in each.receives:
            if span.buffer != NOTHING and span.rows == 0:
                continue
            while not mail.get((peer, number)):
                yield False
            values, wide = mail[peer, number].pop(0)
            if span.buffer != NOTHING:
                assert wide == rank.is_wide(span)
                rank.write(span, values)
                rank.received += len(values) * (2 if wide else 1)
        for total in each.sums:
            rank.add(total)
        yield True


def check_hazards(rank, each):
    """Assert that during the messages of a round each place is written at most once, and not while it is sent or
    copied."""

    def elements(span):
        memory, places = rank.places(span)
        return {(id(memory), place + more) for place in places for more in range(2 if rank.is_wide(span) else 1)}

    read = {
        one
        for span in [*(span for _, span in each.sends), *(part for copy in each.copies for part in copy.parts)]
        if span.buffer != NOTHING
        for one in elements(span)
    }
    written = [
        elements(span)
        for span in [*(span for _, span in each.receives), *(copy.target for copy in each.copies)]
        if span.buffer != NOTHING
    ]
    assert not any(read & places for places in written) and sum(map(len, written)) == len(set().union(*written))


def leaves(value):
    """The symbols of a sum, in their order."""
    return (
        [value]
        if not isinstance(value, tuple) or value[0] == "in"
        else [leaf for part in value for leaf in leaves(part)]
    )


def contract(ranks):
    """The documented order of a sum of these ranks: stage by stage, in rank order within each, as nested tuples."""
    sums = list(ranks)
    for radix in stages(len(sums)):
        stride = len(sums) // radix
        sums = [sums[first] if radix == 1 else tuple(sums[first::stride]) for first in range(stride)]
    return sums[0]


def expected(ranks, per_node, row):
    """The sum of a row over all ranks, in the documented order."""

    def named(value):
        return ("in", value, row) if isinstance(value, int) else tuple(map(named, value))

    if per_node == 1:
        return named(contract(range(ranks)))
    nodes = [contract(range(first, first + per_node)) for first in range(0, ranks, per_node)]

    def within(value):
        return named(nodes[value]) if isinstance(value, int) else tuple(map(within, value))

    return within(contract(range(len(nodes))))


def symbols(rank, rows):
    return [("in", rank, row) for row in range(rows)]


def check_counts(ranks):
    """Assert that `count` equals the messages of the tables, and the planned work memory that which is used."""
    for rank in ranks:
        volume = count(rank.schedule, 8)
        assert (volume.received, volume.sent) == (8 * rank.received, 8 * rank.sent)
        assert all(
            start + rows * (2 if wide else 1) <= rank.schedule.work_rows and (not wide or start % 2 == 0)
            for start, rows, wide, _ in rank.schedule.work
        )


@st.composite
def groups(draw):
    """(nodes, ranks on each, whether collectives are hierarchical)."""
    per_node = draw(st.integers(1, 8))
    nodes = draw(st.integers(1, 64 // per_node))
    return nodes * per_node, per_node if 1 < per_node < nodes * per_node and draw(st.booleans()) else 1


counts_of = lambda ranks: st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).map(tuple)
EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(st.data(), groups())
def test_a_gather_brings_each_row_once(data, group):
    size, per_node = group
    counts = data.draw(counts_of(size))
    whole = [symbol for rank, rows in enumerate(counts) for symbol in symbols(rank, rows)]
    ranks = [
        Rank(tables.all_gather(counts, rank, per_node), symbols(rank, counts[rank]), [EMPTY] * sum(counts))
        for rank in range(size)
    ]
    execute(ranks)
    assert all(rank.out == whole for rank in ranks)
    assert sum(rank.received for rank in ranks) == (size - 1) * sum(counts)
    check_counts(ranks)


@EXAMPLES
@given(st.data(), groups(), st.booleans())
def test_a_reduce_scatter_adds_in_the_order_of_the_contract(data, group, low):
    size, per_node = group
    counts = data.draw(counts_of(size))
    ranks = [
        Rank(tables.reduce_scatter(counts, rank, per_node, low), symbols(rank, sum(counts)), [EMPTY] * counts[rank])
        for rank in range(size)
    ]
    execute(ranks)
    found = [row for rank in ranks for row in rank.out]
    assert found == [expected(size, per_node, row) for row in range(sum(counts))]
    for number, row in enumerate(found):
        assert sorted(leaves(row)) == [("in", rank, number) for rank in range(size)]
    check_counts(ranks)


@EXAMPLES
@given(st.integers(0, 20), groups(), st.booleans(), st.booleans(), st.booleans())
def test_an_all_reduce_gives_every_rank_the_sum(rows, group, low, whole, in_place):
    size, per_node = group
    made = [tables.all_reduce(rows, size, rank, per_node, low, whole) for rank in range(size)]
    given_ = [symbols(rank, rows) for rank in range(size)]
    ranks = [Rank(table, mine, mine if in_place else [EMPTY] * rows) for table, mine in zip(made, given_)]
    execute(ranks)
    assert all(rank.out == [expected(size, per_node, row) for row in range(rows)] for rank in ranks)
    check_counts(ranks)


@EXAMPLES
@given(st.data(), st.integers(1, 80))
def test_an_all_to_all_brings_each_part_to_its_rank(data, size):
    factor = data.draw(st.integers(1, 9))
    sent = [tuple((3 * rank + factor * peer) % 4 for peer in range(size)) for rank in range(size)]
    received = list(zip(*sent))
    ranks = [
        Rank(
            tables.all_to_all(sent[rank], received[rank], rank),
            symbols(rank, sum(sent[rank])),
            [EMPTY] * sum(received[rank]),
        )
        for rank in range(size)
    ]
    execute(ranks)
    starts = [offsets(counts) for counts in sent]
    assert all(
        rank.out
        == [
            ("in", source, row)
            for source in range(size)
            for row in range(starts[source][number], starts[source][number + 1])
        ]
        for number, rank in enumerate(ranks)
    )
    check_counts(ranks)


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
    ranks = [
        Rank(tables.shared_all_gather(counts, rank, per_node), [], blocks[rank // per_node]) for rank in range(size)
    ]
    execute(ranks)
    whole = [symbol for rank, rows in enumerate(counts) for symbol in symbols(rank, rows)]
    assert all(block == whole for block in blocks)
    assert sum(rank.received for rank in ranks) == (len(blocks) - 1) * sum(counts)


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


def test_messages_of_thousands_of_ranks_find_their_partners():
    """The rounds of each rank are compared with those of its peers: same order, same sizes, few rounds and messages."""
    for size, per_node in [(256, 8), (4096, 1)]:
        counts = tuple(part_sizes(size + 3, size))
        for make in (
            lambda rank: tables.all_gather(counts, rank, per_node),
            lambda rank: tables.reduce_scatter(counts, rank, per_node),
            lambda rank: tables.all_reduce(size, size, rank, per_node),
        ):
            for rank in (1, size - 1):
                own = make(rank)
                for peer in {peer for each in own.rounds for peer, _ in (*each.sends, *each.receives)}:
                    sent = [span.rows for each in own.rounds for to, span in each.sends if to == peer and span.rows]
                    other = make(peer)
                    got = [
                        span.rows
                        for each in other.rounds
                        for source, span in each.receives
                        if source == rank and span.rows
                    ]
                    assert sent == got
                messages = sum(len(each.sends) for each in own.rounds)
                assert messages <= (2 * sum(stages(size)) if per_node == 1 else size)
                assert len(own.rounds) <= size // WINDOW + 8


@pytest.mark.parametrize("columns", [False, True])
def test_copies_of_messages_are_counted_once_an_array(columns):
    table = tables.all_gather((2, 3), 0)
    assert packing_bytes(table, (10, 10), (False, False), columns) == 0
    assert packing_bytes(table, (10, 10), (True, False), columns) == 64
    assert packing_bytes(table, (10, 10), (True, True), columns) == 128
    staged = tables.reduce_scatter((1,) * 64, 0)
    assert packing_bytes(staged, (64, 64), (True, True), columns) == 7 * 8 * 64


def test_each_stage_of_every_size_is_a_table():
    for size, low in product((1, 2, 17, 24), (False, True)):
        assert len(tables.reduce_scatter(tuple([1] * size), 0, 1, low).rounds) == len(stages(size))
