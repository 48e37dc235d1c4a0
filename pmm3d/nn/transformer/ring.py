"""Sequences that several ranks along seq share: the rows of each rank, and exchange of keys and values.

A block of queries processes blocks of keys in descending order of storage: from its own block to the first, then from
the last block to the block after its own. The gradient of a block of keys adds blocks of queries in the opposite order.
A ring (Liu et al. 2023, arXiv 2310.01889) visits the ranks in this order. So each sum continues the sum of the rank
before, and the bits do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...arrays import Array, library_of
from ...comm import Grid, Pending, assign
from ...layout import SEQ, Box, Coords, GridShape, Layout
from ..contract import EVERYTHING
from .sequence import row_positions, sequence_length

KEYS, GRADIENTS, HOME = 0, 2, 6
"""First tags of keys and values, of their gradients in two pieces, and of the gradients on the last hop."""
WHAT = {
    KEYS: "keys and values",
    GRADIENTS: "gradients of keys",
    GRADIENTS + 2: "gradients of keys",
    HOME: "gradients of keys, home",
    HOME + 2: "gradients of keys, home",
}


class Segment(NamedTuple):
    """Consecutive rows on a rank along seq: a part of a sequence, or several whole sequences.

    `sequence` is the first sequence in the batch, and `number` the number of sequences. `rows` are rows of the local
    array, and `first` is the first row in the whole batch. `position` contains the positions of each sequence's rows.
    """

    rank: int
    sequence: int
    number: int
    rows: slice
    first: int
    position: np.ndarray


class Share(NamedTuple):
    """A segment of this rank, and the ring of ranks with the other rows of its sequence.

    `members` are the segments of the ranks, in the order of the rows, and `here` is the index of this rank's segment.
    used[i][j] is True if queries of member i see keys of member j. The keys and values of member j are sent to the next
    reach[j] members.
    """

    own: Segment
    members: tuple[Segment, ...]
    here: int
    used: tuple[tuple[bool, ...], ...]
    reach: tuple[int, ...]

    def visits(self) -> list[int]:
        """Other members whose keys and values are sent to this rank, in the order of the ring."""
        size = len(self.members)
        return [member for hop in range(1, size) if self.reach[member := (self.here - hop) % size] >= hop]

    def hop(self, member: int) -> int:
        """Number of hops from a member to this rank."""
        return (self.here - member) % len(self.members)


@lru_cache(maxsize=256)
def shares(
    layout: Layout, rows: int, grid: GridShape, coords: Coords, causal: bool, window: int | None
) -> tuple[Share, ...]:
    """Shares of the rank at `coords`, for a matrix of tokens.

    >>> layout, grid = Layout("seq"), GridShape(1, 1, 1, seq=4)
    >>> share, = shares(layout, 8, grid, grid.coords(2), True, None)
    >>> share.own.position.tolist(), share.visits(), share.reach
    ([4, 5], [1, 0], (3, 2, 1, 0))
    """
    ranks = range(getattr(grid, SEQ)) if SEQ in layout.rows else range(1)
    of_ranks = [_segments(layout, rows, grid, coords, rank) for rank in ranks]
    here = getattr(coords, SEQ) if SEQ in layout.rows else 0
    of_rank = []
    for own in of_ranks[here]:
        members = tuple(
            each for rank in of_ranks for each in rank if each.sequence <= own.sequence < each.sequence + each.number
        )
        used = tuple(
            tuple(_sees(queries.position, keys.position, causal, window) for keys in members) for queries in members
        )
        size = len(members)
        reach = tuple(
            max([hop for hop in range(1, size) if used[(index + hop) % size][index]], default=0)
            for index in range(size)
        )
        of_rank.append(Share(own, members, members.index(own), used, reach))
    return tuple(of_rank)


def uncut_sequences(box: Box, position: np.ndarray) -> tuple[Share, ...]:
    """Shares of a rank with whole sequences in a box. position: positions of the rows of a sequence."""
    number, rows = (box.r1 - box.r0) // max(1, len(position)), slice(0, box.r1 - box.r0)
    own = Segment(0, box.r0 // max(1, len(position)), number, rows, box.r0, position)
    return (Share(own, (own,), 0, ((True,),), (0,)),) if number else ()


def _segments(layout: Layout, rows: int, grid: GridShape, coords: Coords, rank: int) -> list[Segment]:
    """Segments of a rank along seq: parts of sequences, and consecutive whole sequences."""
    if SEQ in layout.rows:
        coords = coords._replace(**{SEQ: rank})
    box, length = layout.box((rows, 0), grid, coords), sequence_length(layout, rows)
    position = row_positions(layout, rows, box)
    first, last = -(-box.r0 // max(1, length)) * length, box.r1 // max(1, length) * length
    edges = sorted({box.r0, box.r1, *(edge for edge in (first, last) if box.r0 < edge < box.r1)})
    segments = []
    for start, stop in pairwise(edges):
        number = max(1, (stop - start) // length)
        segments.append(
            Segment(
                rank,
                start // length,
                number,
                slice(start - box.r0, stop - box.r0),
                start,
                position[start - box.r0 : stop - box.r0][:length],
            )
        )
    return segments


def _sees(queries: np.ndarray, keys: np.ndarray, causal: bool, window: int | None) -> bool:
    """Whether any query sees any key."""
    if window is None:
        return not causal or bool(queries.max() >= keys.min())
    queries = np.sort(queries)
    place = np.searchsorted(queries, keys)
    after, before = queries[np.minimum(place, len(queries) - 1)] - keys, keys - queries[np.maximum(place - 1, 0)]
    return bool(((after >= 0) & (after < window) | (before > 0) & (before < window) & (not causal)).any())


class Visit(NamedTuple):
    """Keys that this rank's queries see: a piece of a segment, its keys and values, and in backward their gradients."""

    keys: Segment
    piece: slice
    arrays: tuple[Array, ...]
    gradients: tuple[Array, ...] = ()


Posted = tuple[int, tuple[Array, ...], tuple[Array, ...], list[list[Pending]]]
"""A member, arrays for its keys and values, arrays for their gradients, and the receives of each group of arrays."""


class Ring:
    """Exchange in a ring: each rank sends keys and values to the next rank.

    In `backward`, gradients of the keys and values follow, in float32 or wider. Each rank adds its part. The last rank
    sends the sums to their owner. Receives of a member are posted before the computation on the previous member.
    """

    def __init__(self, grid: Grid, own: Sequence[Array], block: int):
        self.grid, self.own, self._block = grid, tuple(own), block
        self._sent = list[Pending]()

    def forward(self, share: Share) -> Iterator[Visit]:
        """Start the exchange. Returns an iterator of visits, in order."""
        return self._visits(share, (), *self._begin(share, ()))

    def backward(self, share: Share, totals: Sequence[Array]) -> Iterator[Visit]:
        """Start the exchange with gradients, in two pieces each, so that two ranks can add at the same time. Request
        the first visit after this rank has added the first part of its own contributions.

        totals: gradients of this rank's keys and values"""
        own = tuple(each[share.own.rows] for each in totals)
        return self._visits(share, own, *self._begin(share, own))

    def _begin(self, share: Share, gradients: Sequence[Array]) -> tuple[Iterator[int], Posted | None]:
        """Send this rank's keys and values. Returns the members after the first, and the receives of the first."""
        if share.reach[share.here]:
            self._send([each[share.own.rows] for each in self.own], self._next(share), KEYS)
        following = iter(share.visits())
        return following, self._post(share, next(following, None), gradients)

    def _visits(
        self, share: Share, gradients: Sequence[Array], following: Iterator[int], posted: Posted | None
    ) -> Iterator[Visit]:
        home = self._leave(share, gradients) if gradients and share.reach[share.here] else []
        while posted is not None:
            member, arrays, totals, pending = posted
            _wait(pending[0])
            posted = self._post(share, next(following, None), gradients)
            onwards, used = share.hop(member) < share.reach[member], share.used[share.here][member]
            if onwards:
                self._send(arrays, self._next(share), KEYS)
            keys = share.members[member]
            if not gradients:
                if used:
                    yield Visit(keys, EVERYTHING, arrays)
                continue
            to, tag = (self._next(share), GRADIENTS) if onwards else (keys.rank, HOME)
            for number, piece in enumerate(self._pieces(len(keys.position))):
                _wait(pending[1 + number])
                visit = Visit(keys, piece, *(tuple(each[piece] for each in group) for group in (arrays, totals)))
                if used:
                    yield visit
                self._send(visit.gradients, to, tag + 2 * number)
        for total, arriving, receives in home:
            _wait(receives)
            assign(self.grid.engine, total, arriving)
        _wait(self._sent)
        self._sent = []

    def _leave(self, share: Share, gradients: Sequence[Array]) -> list[tuple[Array, Array, list[Pending]]]:
        """Send this rank's gradients into the ring. Returns (gradient, array for the final sum, receives) for each."""
        rows = len(share.own.position)
        last = share.members[(share.here + share.reach[share.here]) % len(share.members)].rank
        arriving, pending = [self._new(rows, each) for each in gradients], list[Pending]()
        for number, piece in enumerate(self._pieces(rows)):
            pending += self._receive([each[piece] for each in arriving], last, HOME + 2 * number)
            self._send([each[piece] for each in gradients], self._next(share), GRADIENTS + 2 * number)
        return [(each, array, pending) for each, array in zip(gradients, arriving)]

    def _post(self, share: Share, member: int | None, gradients: Sequence[Array]) -> Posted | None:
        """Post the receives of a member's keys and values, and of each piece of their gradients."""
        if member is None:
            return None
        before, rows = share.members[share.here - 1].rank, len(share.members[member].position)
        arrays, totals = (tuple(self._new(rows, each) for each in group) for group in (self.own, gradients))
        pending = [self._receive(arrays, before, KEYS)]
        for number, piece in enumerate(self._pieces(rows) if totals else ()):
            pending.append(self._receive([each[piece] for each in totals], before, GRADIENTS + 2 * number))
        return member, arrays, totals, pending

    def _pieces(self, rows: int) -> list[slice]:
        """Two halves of whole blocks of keys, the last rows first."""
        half = rows // 2 // self._block * self._block
        return [slice(half, rows), slice(half)] if half else [slice(rows)]

    def _next(self, share: Share) -> int:
        return share.members[(share.here + 1) % len(share.members)].rank

    def _new(self, rows: int, like: Array) -> Array:
        library = library_of(like)
        return self.grid.workspace.array((rows, like.shape[1]), library.dtype(like), library)

    def _send(self, arrays: Sequence[Array], to: int, tag: int) -> None:
        self._sent = [each for each in self._sent if not each.done]
        with self.grid.ledger.phase("ring attention"):
            self._sent += [
                self.grid.axis(SEQ).send(each, to, tag=tag + number, agreed=True, message=WHAT[tag])
                for number, each in enumerate(arrays)
            ]

    def _receive(self, arrays: Sequence[Array], source: int, tag: int) -> list[Pending]:
        with self.grid.ledger.phase("ring attention"):
            return [
                self.grid.axis(SEQ).receive(each, source, tag=tag + number, agreed=True, message=WHAT[tag])
                for number, each in enumerate(arrays)
            ]


def _wait(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait()


def in_turn(
    share: Share, arrays: Sequence[Array], gradients: Sequence[Array], others: Iterator[Visit]
) -> Iterator[tuple[Visit, str]]:
    """Yield (visit, `part` of `kernel.attend`) for all keys that queries of a segment see, in the order of the sums.
    others: visits of other members."""
    rows = share.own.rows
    own = Visit(share.own, EVERYTHING, *(tuple(each[rows] for each in group) for group in (arrays, gradients)))
    yield own, "before" if len(share.members) > 1 else ""
    for visit in others:
        yield visit, ""
    if len(share.members) > 1:
        yield own, "after"
