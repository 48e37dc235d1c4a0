"""Redistribution of a matrix from one tiling to another: the schedule of each rank. Rounds bound the memory of packed
copies. The functions are pure and use no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout import Tiled, aligned, itemsize, part_range
from ..layout.distribution import Strided, packed, parts_met, turned
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
    going, coming = send_blocks(source, target, rank), recv_blocks(source, target, rank)
    if source.order == "F":
        going, coming = _transposed(going), _transposed(coming)
    inputs, outputs, everyone = len(source.tiles(rank)), len(target.tiles(rank)), Members(range(ranks), rank)
    stays = tuple(
        Sum((_span(piece.array, rows, cols),), _span(inputs + piece.other, turned(rows), turned(cols)))
        for piece in going.pop((rank,), [])
        for rows in piece.rows
        for cols in piece.cols
    )
    leaving, arriving = (
        [
            (peers, [(piece, packed(piece.cols, 0, piece.shape[1])) for piece in pieces])
            for peers, pieces in messages.items()
        ]
        for messages in (going, coming)
    )
    table = _Packing(inputs + outputs)
    made = [Round(copies=stays)] if stays and not leaving and not arriving else []
    for number in range(rounds if leaving or arriving else 0):
        table.used = 0
        sends, packs = table.messages(leaving, 0, number, rounds)
        receives, unpacks = table.messages(arriving, inputs, number, rounds)
        if packs:
            made.append(Round(copies=tuple(Sum((span,), place) for place, span in packs)))
        made += windows(everyone, sends, receives, () if number else stays)
        if unpacks:
            made.append(Round(sums=tuple(Sum((place,), span) for place, span in unpacks)))
    return Schedule(tuple(filter(any, made)), tuple(table.work), table.most, inputs, outputs, tuple(table.packed))


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
        self,
        side: Sequence[tuple[tuple[int, ...], list[tuple[Piece, list[Strided]]]]],
        array: int,
        number: int,
        of: int,
    ) -> tuple[list[tuple[int, Span]], list[tuple[Span, Span]]]:
        """Return (rank, span) of the messages of round `number` of `of`, and pairs of spans: in a message, and in an
        array. Arrays are numbered from `array`. `side` has the pieces and their columns, by ranks."""
        messages, pairs = list[tuple[int, Span]](), list[tuple[Span, Span]]()
        for peers, pieces in side:
            start, parts = self.used, list[Span]()
            for piece, cols in pieces:
                height, width = piece.shape
                low, high = part_range(height, of, number)
                if low < high:
                    parts.append(Span(self._buffer(self.used, high - low, width), 0, high - low))
                    rows = packed(piece.rows, low, high)
                    one = len(rows) == len(cols) == rows[0].times == cols[0].times == 1
                    found = [
                        (
                            parts[-1] if one else _span(parts[-1].buffer, turned(down), turned(right)),
                            _span(array + piece.array, down, right),
                        )
                        for down in rows
                        for right in cols
                    ]
                    pairs += found
            if parts:
                message = (
                    parts[0]
                    if len(parts) == 1
                    else Span(self._buffer(start, self.used - start, 1), 0, self.used - start)
                )
                if len(parts) == 1 and one:
                    self.packed += found
                messages += [(peer, message) for peer in peers]
        return messages, pairs


def _span(buffer: int, rows: Strided, cols: Strided) -> Span:
    """Return the elements at the indices `here`."""
    across = Indices(cols.here, cols.here + cols.length, cols.times, cols.step_here)
    return Span(buffer, rows.here, rows.here + rows.length, Strides(rows.times, rows.step_here, across))


def stays_in_place(schedule: Schedule) -> bool:
    """Return whether no element moves if source and target are the same arrays."""
    return all(
        part[1:] == target[1:] and part.start == 0 and part.times == 1 and part.across[::2] == (0, 1)
        for each in schedule.rounds
        for (part,), target in each.copies
        if part.across is not None
    )


def _transposed(messages: Messages) -> Messages:
    return {
        ranks: [piece._replace(rows=piece.cols, cols=piece.rows) for piece in pieces]
        for ranks, pieces in messages.items()
    }


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
        whole = min(self.elements // rounds, self.width * (self.height // rounds))
        return min(self.elements, whole + self.width * self.pieces) if rounds > 1 else self.elements


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
        return 1 + bisect_left(range(1, self.most_rounds), True, key=lambda rounds: self.work(rounds) <= limit)
