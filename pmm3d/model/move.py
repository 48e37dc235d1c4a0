"""Redistribution of a matrix from one tiling to another: a table of messages for each rank. Rounds bound the memory of
packed copies. The functions are pure and use no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ..layout import Tiled, aligned, itemsize, part_range
from ..layout.distribution import Strided, packed, parts_met, strided
from ..layout.pieces import Messages, Piece, recv_blocks, send_blocks

ROUND_BYTES = 2**24
"""Default limit of the bytes of packed copies on a rank. Messages of this size reach the bandwidth of any network."""


class Part(NamedTuple):
    """A part of a message, packed by rows: a block of this shape in the rank's array number `array`. In each `Strided`,
    `here` is a position in the array and `there` a position in the message."""

    array: int
    rows: tuple[Strided, ...]
    cols: tuple[Strided, ...]
    shape: tuple[int, int]


class Message(NamedTuple):
    """A message that one rank sends to all of `ranks`, or that it receives from the only rank in `ranks`."""

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        return sum(prod(part.shape) for part in self.parts)


class Round(NamedTuple):
    """Messages that are in flight together."""

    sends: list[Message]
    receives: list[Message]


class Copy(NamedTuple):
    """Elements that stay on the rank. They are copied from its array number `source` to its array number `target`."""

    source: int
    target: int
    rows: tuple[Strided, ...]
    cols: tuple[Strided, ...]


class Table(NamedTuple):
    """The copies and rounds of one rank in a move."""

    copies: list[Copy]
    rounds: Iterable[Round]


def tile_move(source: Tiled, target: Tiled, rank: int, rounds: int = 1) -> Table:
    """Return the table of one rank. In each round a rank sends and receives the next rows of each of its pieces. If the
    source is stored by columns, the table is that of the transposes. The rounds are a generator.

        >>> from pmm3d.layout import GridShape, Layout, Placement
        >>> rows, cols = (Placement((4, 4), layout, GridShape(1, 1, 2)) for layout in (Layout("z"), Layout((), "z")))
        >>> [(message.ranks, message.elements) for each in tile_move(rows, cols, 0, 2).rounds for message in each.sends]
        [((1,), 2), ((1,), 2)]
    """
    going, coming = send_blocks(source, target, rank), recv_blocks(source, target, rank)
    if source.order == "F":
        going, coming = _transposed(going), _transposed(coming)
    copies = [
        Copy(piece.array, piece.other, tuple(strided(piece.rows)), tuple(strided(piece.cols)))
        for piece in going.pop((rank,), [])
    ]
    sides = [
        [
            (ranks, [(piece, tuple(strided(packed(piece.cols, 0, piece.shape[1])))) for piece in pieces])
            for ranks, pieces in messages.items()
        ]
        for messages in (going, coming)
    ]
    return Table(copies, (Round(*([*_messages(side, number, rounds)] for side in sides)) for number in range(rounds)))


def _transposed(messages: Messages) -> Messages:
    return {
        ranks: [piece._replace(rows=piece.cols, cols=piece.rows) for piece in pieces]
        for ranks, pieces in messages.items()
    }


def _messages(
    side: list[tuple[tuple[int, ...], list[tuple[Piece, tuple[Strided, ...]]]]], number: int, rounds: int
) -> Iterator[Message]:
    """Yield the messages of a round. `side` has the pieces and their columns, by ranks."""
    for ranks, pieces in side:
        parts = []
        for piece, cols in pieces:
            height, width = piece.shape
            low, high = part_range(height, rounds, number)
            if low < high:
                parts.append(
                    Part(piece.array, tuple(strided(packed(piece.rows, low, high))), cols, (high - low, width))
                )
        if parts:
            yield Message(ranks, tuple(parts))


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
