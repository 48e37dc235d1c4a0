"""Schedules of collectives: tables of the messages and sums of one rank, in their order.

A schedule is a value (`pmm3d.model.rounds`). Pure functions compute the schedule of any rank in a group of any size,
from the rows of each rank's part, the number of ranks and the nodes (`pmm3d.model.node_map`).
`pmm3d.comm.executor.run_schedule` executes a schedule, and `count` counts its bytes.

The order of each sum is the order of a tuple in the table. This order depends on the number of ranks and, if sums run
by nodes, on the ranks of each node. It does not depend on the size of the message, on the partition of an array, or on
the rank that keeps a part. So sums by panels or in buckets, with overlap or without, are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from ..layout import LOW_PRECISION, itemsize, offsets, part_sizes
from .node_map import FLAT, NodeMap
from .rounds import IN, NOTHING, OUT, Round, Schedule, Span, Sum, Volume, WorkBuffer, accumulator, count, is_wide
from .stages import in_pairs, stages, stages_of

WINDOW = 64
"""Largest number of messages of a level in a round, in each direction. A round by nodes may have two levels. The number
is limited because a test of thousands of requests takes longer than most messages."""
SMALL_BYTES = 2**16
"""Bytes of an array, times the sum of its stages' sizes, up to which an all-reduce sends whole arrays. Latency
dominates for such arrays, and whole arrays take half of the rounds."""


class _Table:
    """The work buffers of a schedule under construction. low, pairwise: as in `reduce_scatter`."""

    def __init__(self, low: bool = False, pairwise: bool = False):
        self.low, self.pairwise, self.used, self.most = low, pairwise, 0, 0
        self.work: list[WorkBuffer] = []

    def buffer(self, rows: int, wide: bool) -> Span:
        """Return the span of a new work buffer."""
        wide = wide and self.low
        start = self.used + (self.used % 2 if wide else 0)
        self.used = start + rows * (2 if wide else 1)
        self.most = max(self.most, self.used)
        self.work.append(WorkBuffer(start, rows, wide))
        return Span(len(self.work) + 1, 0, rows)

    def done(self, rounds: Iterable[Round]) -> Schedule:
        return Schedule(tuple(rounds), tuple(self.work), self.most)


class Members(NamedTuple):
    """Some ranks of a group in their order, and the index of this rank among them."""

    ranks: Sequence[int]
    own: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@lru_cache(maxsize=128)
def all_gather(counts: tuple[int, ...], rank: int, per_node: int = 1) -> Schedule:
    """Return an all-gather: OUT contains the parts of all ranks in order. IN is the rank's part, and may be its place
    in OUT.

    counts     rows of each rank's part
    per_node   number of ranks of each node if the gather runs by nodes, else 1. By nodes, each part is sent to one rank
               of every other node, which sends it to the other ranks of its node

        >>> [(peer, span[:3]) for peer, span in all_gather((2, 1), 1).rounds[0].receives]
        [(0, (1, 0, 2))]
    """
    part = Span(IN, 0, counts[rank])
    if per_node == 1:
        return _Table().done(_gather(Members(range(len(counts)), rank), counts, part, OUT))
    starts, (node, own), local, across = offsets(counts), divmod(rank, per_node), *_levels(len(counts), rank, per_node)

    def place(other: int) -> Span:
        first = other * per_node + own
        return Span(OUT, starts[first], starts[first + 1])

    def in_node(other: int, brought: Span) -> list[Round]:
        first, last = other * per_node, (other + 1) * per_node
        members = Members(local.ranks, own)
        return _gather(members, counts[first:last], brought, OUT, starts[first])

    sends = [(peer, part) for peer in across.ranks]
    receives = [(peer, place(other)) for other, peer in enumerate(across.ranks)]
    rounds = _beside([windows(across, sends, receives), in_node(node, part)])
    others = [other for other in range(across.size) if other != node]
    step = nodes_at_once(per_node)
    for first in range(0, len(others), step):
        rounds += _beside([in_node(other, place(other)) for other in others[first : first + step]])
    return _Table().done(rounds)


@lru_cache(maxsize=128)
def reduce_scatter(
    counts: tuple[int, ...], rank: int, per_node: int = 1, low: bool = False, pairwise: bool = False
) -> Schedule:
    """Return a reduce-scatter: OUT is the sum over the ranks of this rank's part of IN. OUT and IN share no memory.

    counts     rows of each rank's part
    per_node   number of ranks of each node if sums run by nodes (first within each node, then across), else 1
    low        whether the type has low precision. Partial sums are then in the accumulator's type, and rounded once
    pairwise   order of the sums, as in a NodeMap

        >>> [part[:3] for part in reduce_scatter((2, 1), 1).rounds[0].sums[0].parts]
        [(2, 0, 1), (0, 2, 3)]
    """
    table, addend, out = _Table(low, pairwise), Span(IN, 0, sum(counts)), Span(OUT, 0, counts[rank])
    if per_node == 1:
        return table.done(_reduce(table, Members(range(len(counts)), rank), addend, out, counts))
    starts, (_, own), local, across = offsets(counts), divmod(rank, per_node), *_levels(len(counts), rank, per_node)
    column = counts[own::per_node]
    sums, edges = table.buffer(sum(column), wide=True), offsets(column)

    def in_node(other: int) -> list[Round]:
        first, last = other * per_node, (other + 1) * per_node
        return _reduce(
            table,
            local,
            Span(IN, starts[first], starts[last]),
            Span(sums.buffer, edges[other], edges[other + 1]),
            counts[first:last],
        )

    rounds, free, step = list[Round](), table.used, nodes_at_once(per_node)
    for first in range(0, across.size, step):
        table.used = free
        rounds += _beside([in_node(other) for other in range(first, min(first + step, across.size))])
    table.used = free
    return table.done(rounds + _reduce(table, across, sums, out, column))


@lru_cache(maxsize=128)
def all_reduce(
    size: int,
    ranks: int,
    rank: int,
    per_node: int = 1,
    low: bool = False,
    undivided: bool = False,
    pairwise: bool = False,
) -> Schedule:
    """Return an all-reduce: on every rank, OUT is the sum over the ranks of IN. OUT may be IN.

    size       rows of the array
    per_node, low, pairwise   as in `reduce_scatter`
    undivided  whether each rank receives and adds whole arrays (`sends_undivided`). Otherwise the all-reduce is a
               reduce-scatter and an all-gather

        >>> len(all_reduce(4, 8, 0).rounds), len(all_reduce(4, 8, 0, undivided=True).rounds)
        (2, 1)
    """
    table, array, out = _Table(low, pairwise), Span(IN, 0, size), Span(OUT, 0, size)
    everyone = Members(range(ranks), rank)
    if per_node == 1:
        if undivided:
            return table.done(_reduce(table, everyone, array, out))
        counts = part_sizes(size, ranks)
        own = table.buffer(counts[rank], wide=False)
        return table.done(_reduce(table, everyone, array, own, counts) + _gather(everyone, counts, own, OUT))
    local, across = _levels(ranks, rank, per_node)
    if undivided:
        wide, rounds = array, list[Round]()
        if low:
            wide = table.buffer(size, wide=True)
            rounds.append(Round(sums=(Sum((array,), wide),)))
        sums, free = table.buffer(size, wide=True), table.used
        rounds += _reduce(table, local, wide, sums)
        table.used = free
        return table.done(rounds + _reduce(table, across, sums, out))
    counts = part_sizes(size, per_node)
    parts, start = part_sizes(counts[local.own], across.size), offsets(counts)[local.own]
    sums, free = table.buffer(counts[local.own], wide=True), table.used
    rounds = _reduce(table, local, array, sums, counts)
    table.used = free
    own = table.buffer(parts[across.own], wide=False)
    rounds += _reduce(table, across, sums, own, parts)
    rounds += _gather(across, parts, own, OUT, start)
    return table.done(rounds + _gather(local, counts, Span(OUT, start, start + counts[local.own]), OUT))


@lru_cache(maxsize=8)
def all_to_all(sent: tuple[int, ...], received: tuple[int, ...], rank: int) -> Schedule:
    """Return an all-to-all: part r of IN is sent to rank r, and part r of OUT received from rank r.

    `sent` and `received` are the rows for and from each rank. OUT and IN share no memory.
    """
    everyone = Members(range(len(sent)), rank)
    going, coming = (
        [Span(buffer, start, stop) for start, stop in pairwise(offsets(rows))]
        for buffer, rows in ((IN, sent), (OUT, received))
    )
    rounds = windows(everyone, list(enumerate(going)), list(enumerate(coming)), (Sum((going[rank],), coming[rank]),))
    return _Table().done(rounds)


@lru_cache(maxsize=128)
def barrier(ranks: int, rank: int, per_node: int = 0) -> Schedule:
    """Return a barrier of empty messages, whose distance along the ring doubles in each round.

    per_node   number of ranks of each node, for a barrier within each node. Default: a barrier of all ranks

        >>> [[peer for peer, _ in each.sends] for each in barrier(6, 5).rounds]
        [[0], [1], [3]]
    """
    return _Table().done(_barrier(_levels(ranks, rank, per_node or ranks)[0]))


@lru_cache(maxsize=128)
def shared_all_gather(counts: tuple[int, ...], rank: int, per_node: int) -> Schedule:
    """Return an all-gather into an array that the ranks of a node share. OUT contains the parts of this node's ranks.

    Each rank sends its part to the ranks with its number in the other nodes, so a link carries each byte once. A
    barrier of the node's ranks follows.
    """
    edges, (local, across) = offsets(counts), _levels(len(counts), rank, per_node)
    part = Span(OUT, edges[rank], edges[rank + 1])
    receives = [(peer, Span(OUT, edges[peer], edges[peer + 1])) for peer in across.ranks]
    return _Table().done(windows(across, [(peer, part) for peer in across.ranks], receives) + _barrier(local))


def sends_undivided(size: int, dtype: str, ranks: int, per_node: int = 1) -> bool:
    """Return whether an all-reduce of `size` elements sends whole arrays, because they are small. By nodes, both levels
    must be small."""
    return is_small(size * itemsize(dtype if per_node == 1 else accumulator(dtype)), ranks, per_node)


def is_small(nbytes: float, ranks: int, per_node: int = 1) -> bool:
    """Return `sends_undivided` of an array of `nbytes`."""
    if per_node > 1:
        return is_small(nbytes, per_node) and is_small(nbytes, ranks // per_node)
    return nbytes * sum(stages(ranks)) <= SMALL_BYTES


def gather_volume(counts: Sequence[int], rank: int, row_bytes: int, node_map: NodeMap = FLAT) -> Volume:
    """Return the bytes of an all-gather of parts with these numbers of rows.

    >>> gather_volume([3, 3, 2], 2, 8)
    Volume(received=48, sent=32, work=0)
    """
    return count(gather_schedule(counts, rank, row_bytes, node_map), row_bytes)


def reduce_volume(counts: Sequence[int], rank: int, cols: int, dtype: str, node_map: NodeMap = FLAT) -> Volume:
    """Return the bytes of a reduce-scatter to parts with these numbers of rows of `cols` elements.

    >>> reduce_volume([2, 1], 0, 10, "float64")
    Volume(received=160, sent=80, work=192)
    """
    return count(reduce_schedule(counts, rank, dtype, node_map), cols * itemsize(dtype))


def all_reduce_volume(size: int, dtype: str, ranks: int, rank: int, node_map: NodeMap = FLAT) -> Volume:
    """Return the bytes of an all-reduce of `size` elements.

    >>> all_reduce_volume(3, "float64", 2, 0), all_reduce_volume(100001, "float64", 2, 1).received
    (Volume(received=24, sent=24, work=64), 800008)
    """
    return count(sum_schedule(size, dtype, ranks, rank, node_map), itemsize(dtype))


def gather_schedule(counts: Sequence[int], rank: int, row_bytes: int, node_map: NodeMap) -> Schedule:
    """Return the schedule of an all-gather of parts with these numbers of rows."""
    by_nodes = node_map.per_node > 1 and sum(counts) * row_bytes >= node_map.gathers_from
    return all_gather(tuple(counts), rank, node_map.per_node if by_nodes else 1)


def reduce_schedule(counts: Sequence[int], rank: int, dtype: str, node_map: NodeMap) -> Schedule:
    """Return the schedule of a reduce-scatter to parts with these numbers of rows."""
    per_node = node_map.per_node if node_map.sums else 1
    return reduce_scatter(tuple(counts), rank, per_node, dtype in LOW_PRECISION, node_map.pairwise)


def sum_schedule(size: int, dtype: str, ranks: int, rank: int, node_map: NodeMap = FLAT) -> Schedule:
    """Return the schedule of an all-reduce of `size` elements."""
    per_node = node_map.per_node if node_map.sums else 1
    undivided = sends_undivided(size, dtype, ranks, per_node)
    return all_reduce(size, ranks, rank, per_node, dtype in LOW_PRECISION, undivided, node_map.pairwise)


def nodes_at_once(per_node: int) -> int:
    """Return the number of nodes whose parts are exchanged within a node in one round."""
    return max(1, WINDOW // max(1, per_node - 1))


def _levels(ranks: int, rank: int, per_node: int) -> tuple[Members, Members]:
    """Return the ranks of this rank's node, and the ranks with the same number in their nodes."""
    node, own = divmod(rank, per_node)
    return (Members(range(node * per_node, (node + 1) * per_node), own), Members(range(own, ranks, per_node), node))


def windows(
    members: Members,
    sends: Sequence[tuple[int, Span]],
    receives: Sequence[tuple[int, Span]],
    copies: tuple[Sum, ...] = (),
) -> list[Round]:
    """Return messages between any number of ranks, in rounds by distance along the ring: sender and receiver have a
    message in the same round. Messages to the rank itself are left out."""
    place, own, size = members.ranks.index, members.own, members.size

    def by_window(messages: Sequence[tuple[int, Span]], sign: int) -> list[list[tuple[int, Span]]]:
        if size <= WINDOW + 1 and len(messages) == size:
            others = [*messages[own + 1 :], *messages[:own]]
            return [others if sign > 0 else others[::-1]]
        of_windows: list[list[tuple[int, Span]]] = [[] for _ in range(max(1, -(-(size - 1) // WINDOW)))]
        ordered = sorted(((sign * (place(message[0]) - own)) % size, message) for message in messages)
        for distance, message in ordered:
            if distance:
                of_windows[(distance - 1) // WINDOW].append(message)
        return of_windows

    going, coming = by_window(sends, 1), by_window(receives, -1)
    return [
        Round(tuple(each), tuple(others), () if number else copies)
        for number, (each, others) in enumerate(zip(going, coming))
    ]


def _gather(members: Members, counts: Sequence[int], part: Span, out: int, first: int = 0) -> list[Round]:
    """Return the rounds that gather all parts in the rows of `out` from `first` on. `part` may be its place there."""
    edges = [first + edge for edge in offsets(counts)]
    place, rounds = Span(out, edges[members.own], edges[members.own + 1]), list[Round]()
    for stage in reversed(stages_of(members.size, members.own)):
        regions = [Span(out, start, stop) for start, stop in stage.rows(edges)]
        mine = regions[stage.digit] if rounds else part
        group = Members([members.ranks[peer] for peer in stage.peers], stage.digit)
        copies = (Sum((part,), place),) if not rounds and part != place else ()
        rounds += windows(group, [(peer, mine) for peer in group.ranks], list(zip(group.ranks, regions)), copies)
    return rounds


def _reduce(
    table: _Table, members: Members, addend: Span, out: Span, counts: Sequence[int] | None = None
) -> list[Round]:
    """Return the rounds of out = the sum of the ranks' `addend`. With `counts`, `out` is this rank's part of the sum.
    Without `counts`, each rank receives and adds whole arrays, and OUT may be IN."""
    edges, steps = offsets(counts or ()), stages_of(members.size, members.own)
    rounds, current = list[Round](), addend
    for stage in steps:
        regions = [current] * len(stage.peers)
        if counts is not None:
            rows = stage.rows(edges)
            shift = current.start - rows[0][0]
            regions = [Span(current.buffer, shift + low, shift + high) for low, high in rows]
        exchanged, parts = _exchange(table, [members.ranks[peer] for peer in stage.peers], stage.digit, regions)
        target = out if stage is steps[-1] else _target(table, parts, stage.digit)
        sums: tuple[Sum, ...] = (Sum(tuple(parts), target),)
        if table.pairwise and len(parts) > 1:
            of_pairs, target = _pairwise(table, parts)
            sums = tuple(of_pairs)
            if stage is steps[-1]:
                sums = (*sums, Sum((target,), out))
        elif counts is None and current.buffer == IN and target.buffer == OUT and stage.digit > 1:
            # OUT may be IN, but the target of a sum may only be one of its first two parts
            sums = Sum(tuple(parts), parts[0]), Sum((parts[0],), out)
        rounds += [*exchanged[:-1], exchanged[-1]._replace(sums=sums)]
        current = target
    return rounds


def _pairwise(table: _Table, parts: Sequence[Span]) -> tuple[list[Sum], Span]:
    """Return the sums of neighbours, then of neighbouring sums, and so on; and the span of the last one."""
    sums = list[Sum]()

    def add(one: Span, other: Span) -> Span:
        target = other if one.buffer == IN else one
        if table.low and not is_wide(table.work, target):
            target = table.buffer(one.rows, wide=True)
        sums.append(Sum((one, other), target))
        return target

    return sums, in_pairs(parts, add)


def _exchange(
    table: _Table, ranks: Sequence[int], digit: int, regions: Sequence[Span]
) -> tuple[list[Round], list[Span]]:
    """Return rounds that send each region to its rank, and the parts of this rank's region, in the order of the
    ranks."""
    own = regions[digit]
    wide = is_wide(table.work, own)
    parts = [own if number == digit else table.buffer(own.rows, wide) for number in range(len(ranks))]
    return windows(Members(ranks, digit), list(zip(ranks, regions)), list(zip(ranks, parts))), parts


def _target(table: _Table, parts: Sequence[Span], digit: int) -> Span:
    """Return the buffer of a partial sum: the first received part, which is one of the first two parts. In low
    precision: a new buffer."""
    if table.low and not is_wide(table.work, parts[0]):
        return table.buffer(parts[0].rows, wide=True)
    return parts[1 if digit == 0 else 0]


def _beside(tables: Sequence[Sequence[Round]]) -> list[Round]:
    """Return the rounds of several schedules side by side: round i contains all rounds i."""
    merged = []
    for rounds in zip_longest(*tables, fillvalue=Round()):
        merged.append(Round(*(tuple(chain.from_iterable(items)) for items in zip(*rounds))))
    return merged


def _barrier(members: Members) -> list[Round]:
    rounds, distance, nothing = list[Round](), 1, Span(NOTHING, 0, 0)
    while distance < members.size:
        target, source = (members.ranks[(members.own + sign * distance) % members.size] for sign in (1, -1))
        rounds.append(Round(((target, nothing),), ((source, nothing),)))
        distance *= 2
    return rounds
