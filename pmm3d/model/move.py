"""Redistribution of a matrix from one tiling to another: the schedule of each rank. Rounds bound the memory of packed
copies. The functions are pure and use no MPI."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ..layout import Tiled, aligned, itemsize, part_range
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
    return RankMove(source, target, rank, ranks).schedule(rounds)


class _Part(NamedTuple):
    """A piece of a packed message, by rows as they are packed.

    array           number of the array of this rank's source or target
    height, width   number of rows and of columns
    rows            runs of rows in the array
    cols            columns in the message, and in the array
    """

    array: int
    height: int
    width: int
    rows: list[Strided]
    cols: list[tuple[Indices, Indices]]


_Messages = list[tuple[tuple[int, ...], list[_Part]]]
"""Other ranks, and the parts of the message to each of them, or from them."""


class RankMove:
    """The messages of one rank in a move, before they are divided into rounds. Arguments: see `tile_move`.

    elements         number of elements that the rank packs and unpacks
    stays_in_place   whether no element moves if source and target are the same arrays
    """

    def __init__(self, source: Tiled, target: Tiled, rank: int, ranks: int):
        going, coming = send_blocks(source, target, rank), recv_blocks(source, target, rank)
        self._inputs, self._outputs = len(source.tiles(rank)), len(target.tiles(rank))
        self._everyone, self._by_columns = Members(range(ranks), rank), source.order == "F"
        stays = [copy for piece in going.pop((rank,), ()) for copy in self._copies(piece)]
        self._stays, self._leaving, self._arriving = tuple(stays), self._packed(going), self._packed(coming)
        self.elements = sum([part.height * part.width for _, parts in self._leaving + self._arriving for part in parts])
        self.stays_in_place = self.elements == 0 and all(
            here[1:] == there[1:]
            and here.start == 0
            and here.times == 1
            and here.across is not None
            and here.across[::2] == (0, 1)
            for (here,), there in stays
        )

    def _copies(self, piece: Piece) -> list[Sum]:
        """Return the copies of a piece that stays on the rank."""
        rows, cols = (piece.cols, piece.rows) if self._by_columns else (piece.rows, piece.cols)
        across = [
            (Indices(here, here + length, times, step), Indices(there, there + length, times, step_there))
            for here, there, length, times, step, step_there in cols
        ]
        target = self._inputs + piece.other
        return [
            Sum(
                (Span(piece.array, here, here + length, Strides(times, step, source)),),
                Span(target, there, there + length, Strides(times, step_there, place)),
            )
            for here, there, length, times, step, step_there in rows
            for source, place in across
        ]

    def _packed(self, messages: Messages) -> _Messages:
        """Return the parts of each message."""
        parts_of: _Messages = []
        for peers, pieces in messages.items():
            parts = list[_Part]()
            for array, (height, width), rows, cols, _ in pieces:
                if self._by_columns:
                    height, width, rows, cols = width, height, cols, rows
                across = [
                    (
                        Indices(there, there + length, times, length if times > 1 else 0),
                        Indices(here, here + length, times, step),
                    )
                    for here, there, length, times, step, _ in packed(cols, 0, width)
                ]
                parts.append(_Part(array, height, width, rows, across))
            parts_of.append((peers, parts))
        return parts_of

    def schedule(self, rounds: int) -> Schedule:
        """Return the schedule in this number of rounds."""
        table, messages = _Packing(self._inputs + self._outputs), bool(self._leaving or self._arriving)
        made = [] if messages or not self._stays else [Round(copies=self._stays)]
        for number in range(rounds if messages else 0):
            table.used = 0
            sends, packs = table.messages(self._leaving, 0, number, rounds)
            receives, unpacks = table.messages(self._arriving, self._inputs, number, rounds)
            if packs:
                made.append(Round(copies=tuple([Sum((span,), place) for place, span in packs])))
            made += windows(self._everyone, sends, receives, () if number else self._stays)
            if unpacks:
                made.append(Round(sums=tuple([Sum((place,), span) for place, span in unpacks])))
        return Schedule(
            tuple(filter(any, made)), tuple(table.work), table.most, self._inputs, self._outputs, tuple(table.packed)
        )


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

    def messages(
        self, side: _Messages, array: int, number: int, of: int
    ) -> tuple[list[tuple[int, Span]], list[tuple[Span, Span]]]:
        """Return (rank, span) of the messages of round `number` of `of`, and pairs of spans: in a message, and in an
        array. Arrays are numbered from `array`."""
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
                        Span(array + part.array, here, here + length, Strides(times, step, across)),
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
