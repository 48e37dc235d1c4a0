"""Redistribution of a matrix from one tiling to another: the schedule of each rank. Rounds bound the memory of packed
copies. The functions are pure and use no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ..layout import Placement, Tiled, aligned, itemsize, part_range
from ..layout.distribution import Strided, packed, parts_met
from ..layout.pieces import Messages, Piece, recv_blocks, send_blocks
from .rounds import Indices, Round, Schedule, Span, Strides, Sum, WorkBuffer
from .schedule import Members, windows

ROUND_BYTES = 2**24
"""Default limit of the bytes of packed copies on a rank. Messages of this size reach the bandwidth of any network."""


def tile_move(source: Tiled, target: Tiled, rank: int, ranks: int, rounds: int = 1) -> Schedule:
    """Return the schedule of one of `ranks` ranks. Its buffers are the rank's arrays of the source, then those of the
    target. Its work memory is in elements.

    In each of the rounds a rank packs the next rows of each of its pieces, exchanges one message with each peer, and
    unpacks. If the source is stored by columns, the schedule is that of the transposes.

        >>> from pmm3d.layout import GridShape, Layout, Placement
        >>> rows, cols = (Placement((4, 4), layout, GridShape(1, 1, 2)) for layout in (Layout("z"), Layout((), "z")))
        >>> schedule = tile_move(rows, cols, 0, 2, rounds=2)
        >>> [(peer, span[:3]) for each in schedule.rounds for peer, span in each.sends]
        [(1, (2, 0, 1)), (1, (4, 0, 1))]
        >>> schedule.packed[0][1].across
        Indices(start=2, stop=4, times=1, step=0)
    """
    return RankMove([(source, target)], rank, ranks).schedule(rounds)


class _Part(NamedTuple):
    """A piece of a packed message, by rows as they are packed.

    array           number of the buffer
    height, width   number of rows and of columns
    rows            runs of rows in the array
    cols            columns in the message, and in the array
    """

    array: int
    height: int
    width: int
    rows: list[Strided]
    cols: list[tuple[Indices, Indices]]


Pair = tuple[Tiled, Tiled]
"""Source and target of a matrix."""
_Messages = list[tuple[tuple[int, ...], list[_Part]]]
"""Other ranks, and the parts of the message to each of them, or from them."""


class RankMove:
    """The messages of one rank in moves of one or several matrices, before they are divided into rounds. There is one
    message to each rank for all matrices.

    pairs            source and target of each matrix
    rank, ranks      see `tile_move`
    unread           numbers of the pairs whose source is not read: the target is multiplied by its factor only

    elements         number of elements that the rank packs and unpacks
    stays_in_place   whether no element moves if source and target are the same arrays
    """

    def __init__(self, pairs: Sequence[Pair], rank: int, ranks: int, unread: Sequence[int] = ()):
        tiles = [[len(tiled.tiles(rank)) for tiled in pair] for pair in pairs]
        self._inputs, self._outputs = map(sum, zip(*tiles))
        self._everyone, stays, scaled = Members(range(ranks), rank), list[Sum](), list[Sum]()
        leaving, arriving = list[_Messages](), list[_Messages]()
        read, written = 0, self._inputs
        for number, ((source, target), (inputs, outputs)) in enumerate(zip(pairs, tiles)):
            by_columns = source.order == "F"
            if number in unread:
                whole = send_blocks(Placement.copies(target.shape, (rank,)), target, rank).get((rank,), ())
                scaled += [Sum((), copy.target) for piece in whole for copy in _copies(piece, by_columns, 0, written)]
            else:
                going, coming = send_blocks(source, target, rank), recv_blocks(source, target, rank)
                for piece in going.pop((rank,), ()):
                    stays += _copies(piece, by_columns, read, written)
                leaving.append(_packed(going, by_columns, read))
                arriving.append(_packed(coming, by_columns, written))
            read, written = read + inputs, written + outputs
        self._stays, self._scaled = tuple(stays), tuple(scaled)
        self._leaving, self._arriving = _together(leaving), _together(arriving)
        self.elements = sum([part.height * part.width for _, parts in self._leaving + self._arriving for part in parts])
        self.stays_in_place = self.elements == 0 and all(
            here[1:] == there[1:]
            and here.start == 0
            and here.times == 1
            and here.across is not None
            and here.across[::2] == (0, 1)
            for (here,), there in stays
        )

    def schedule(self, rounds: int) -> Schedule:
        """Return the schedule in this number of rounds."""
        table, messages = _Packing(self._inputs + self._outputs), bool(self._leaving or self._arriving)
        made = [Round((), (), () if messages else self._stays, self._scaled)]
        for number in range(rounds if messages else 0):
            table.used = 0
            sends, packs = table.messages(self._leaving, number, rounds)
            receives, unpacks = table.messages(self._arriving, number, rounds)
            if packs:
                made.append(Round(copies=tuple([Sum((span,), place) for place, span in packs])))
            made += windows(self._everyone, sends, receives, () if number else self._stays)
            if unpacks:
                made.append(Round(sums=tuple([Sum((place,), span) for place, span in unpacks])))
        return Schedule(
            tuple(filter(any, made)), tuple(table.work), table.most, self._inputs, self._outputs, tuple(table.packed)
        )


def _copies(piece: Piece, by_columns: bool, source: int, target: int) -> list[Sum]:
    """Return the copies of a piece that stays on the rank. source, target: numbers of the first buffers of both."""
    rows, cols = (piece.cols, piece.rows) if by_columns else (piece.rows, piece.cols)
    across = [
        (Indices(here, here + length, times, step), Indices(there, there + length, times, step_there))
        for here, there, length, times, step, step_there in cols
    ]
    return [
        Sum(
            (Span(source + piece.array, here, here + length, Strides(times, step, read)),),
            Span(target + piece.other, there, there + length, Strides(times, step_there, written)),
        )
        for here, there, length, times, step, step_there in rows
        for read, written in across
    ]


def _packed(messages: Messages, by_columns: bool, first: int) -> _Messages:
    """Return the parts of each message. first: number of the first buffer."""
    parts_of: _Messages = []
    for peers, pieces in messages.items():
        parts = list[_Part]()
        for array, (height, width), rows, cols, _ in pieces:
            if by_columns:
                height, width, rows, cols = width, height, cols, rows
            across = [
                (
                    Indices(there, there + length, times, length if times > 1 else 0),
                    Indices(here, here + length, times, step),
                )
                for here, there, length, times, step, _ in packed(cols, 0, width)
            ]
            parts.append(_Part(first + array, height, width, rows, across))
        parts_of.append((peers, parts))
    return parts_of


def _together(of_pairs: Sequence[_Messages]) -> _Messages:
    """Return one message to each rank, with the parts of all pairs in their order."""
    of_pairs = [messages for messages in of_pairs if messages]
    if len(of_pairs) <= 1:
        return of_pairs[0] if of_pairs else []
    of_peer: dict[int, list[tuple[int, int]]] = {}
    for pair, messages in enumerate(of_pairs):
        for number, (peers, _) in enumerate(messages):
            for peer in peers:
                of_peer.setdefault(peer, []).append((pair, number))
    peers_of: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    for peer in sorted(of_peer):  # ranks that receive the same parts share a message
        key = tuple(of_peer[peer])
        peers_of[key] = (*peers_of.get(key, ()), peer)
    return [
        (peers, [part for pair, number in key for part in of_pairs[pair][number][1]]) for key, peers in peers_of.items()
    ]


class _Packing:
    """Work buffers of the packed messages of a schedule under construction."""

    def __init__(self, first: int):
        self.used = self.most = 0
        self.work, self.packed = list[WorkBuffer](), list[tuple[Span, Span]]()
        self._first = first

    def _buffer(self, start: int, rows: int, cols: int) -> int:
        """Return the number of a new buffer."""
        self.work.append(WorkBuffer(start, rows, False, cols))
        self.used = start + rows * cols
        self.most = max(self.most, self.used)
        return self._first + len(self.work) - 1

    def messages(self, side: _Messages, number: int, of: int) -> tuple[list[tuple[int, Span]], list[tuple[Span, Span]]]:
        """Return (rank, span) of the messages of round `number` of `of`, and pairs of spans: in a message, and in an
        array."""
        messages, pairs = list[tuple[int, Span]](), list[tuple[Span, Span]]()
        for peers, parts in side:
            start, spans = self.used, list[Span]()
            for part in parts:
                low, high = part_range(part.height, of, number)
                if low == high:
                    continue
                buffer = self._buffer(self.used, high - low, part.width)
                spans.append(Span(buffer, 0, high - low))
                rows = packed(part.rows, low, high)
                one = len(rows) == len(part.cols) == rows[0].times == part.cols[0][0].times == 1
                copies = [
                    (
                        spans[-1]
                        if one
                        else Span(buffer, there, there + length, Strides(times, length if times > 1 else 0, place)),
                        Span(part.array, here, here + length, Strides(times, step, across)),
                    )
                    for here, there, length, times, step, _ in rows
                    for place, across in part.cols
                ]
                pairs += copies
            if spans:
                message = spans[0]
                if len(spans) > 1:
                    message = Span(self._buffer(start, self.used - start, 1), 0, self.used - start)
                elif one:
                    self.packed += copies
                messages += [(peer, message) for peer in peers]
        return messages, pairs


@dataclass(frozen=True)
class Side:
    """Bounds, over all ranks, of the storage on one side of a move.

    elements   elements of a rank's tiles
    width      sum of the widths of a rank's tiles
    height     height of a tile
    pieces     number of parts of the other side that a tile's rows are in
    """

    elements: int
    width: int
    height: int
    pieces: int

    def in_round(self, rounds: int) -> int:
        """Return the largest number of elements that a rank sends or receives in one round."""
        full_pieces = min(self.elements // rounds, self.width * (self.height // rounds))
        return min(self.elements, full_pieces + self.width * self.pieces) if rounds > 1 else self.elements


@dataclass(frozen=True)
class Move:
    """The memory of a move, and the number of rounds that keeps it within a limit. All ranks get the same results.

    >>> from pmm3d.layout import GridShape, Layout, Placement
    >>> grid = GridShape(1, 1, 4)
    >>> rows, cols = (Placement((100, 100), layout, grid) for layout in (Layout("z"), Layout((), "z")))
    >>> move = Move(rows, cols, "float64")
    >>> move.work(1), move.work(10), move.rounds(10000)
    (40064, 5248, 5)
    """

    source: Tiled
    target: Tiled
    dtype: str

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Bounds of sent and of received elements."""
        return self._side(self.source, self.target), self._side(self.target, self.source)

    def _side(self, mine: Tiled, others: Tiled) -> Side:
        transposed, (elements, height, width) = self.source.order == "F", mine.most()
        width, rows, other_rows = (height, mine.cols, others.cols) if transposed else (width, mine.rows, others.rows)
        return Side(elements, width, rows.spacing.most, parts_met(rows, other_rows))

    def work(self, rounds: int) -> int:
        """Return the largest number of bytes of copies on a rank."""
        return sum(aligned(side.in_round(rounds) * itemsize(self.dtype)) for side in self.sides)

    @property
    def most_rounds(self) -> int:
        return max(1, *(side.height for side in self.sides))

    def rounds(self, limit: int) -> int:
        """Return the least number of rounds that keeps the copies within `limit` bytes, or else `most_rounds`."""
        if 2 * aligned(prod(self.source.shape) * itemsize(self.dtype)) <= limit:  # no rank packs more
            return 1
        return 1 + bisect_left(range(1, self.most_rounds), True, key=lambda rounds: self.work(rounds) <= limit)
