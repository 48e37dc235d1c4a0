"""Moving a matrix from one tiling to another: a table of messages for each rank, in rounds so that the packed copies
have a bound. Pure functions of the two tilings, without MPI."""

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
"""Largest number of bytes of packed copies on a rank, if the caller sets no limit: messages that are long for any
network."""


class Part(NamedTuple):
    """A part of a message. `here` of the runs counts in the rank's array number `array`, `there` in the message.

    shape   rows and columns of the part, which is packed by rows
    """

    array: int
    rows: tuple[Strided, ...]
    cols: tuple[Strided, ...]
    shape: tuple[int, int]


class Message(NamedTuple):
    """What one rank sends to `ranks`, all of which read the same elements, or receives from the one rank in `ranks`."""

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
    """Elements that stay on the rank: from its array number `source` to number `target`."""

    source: int
    target: int
    rows: tuple[Strided, ...]
    cols: tuple[Strided, ...]


class Table(NamedTuple):
    """What one rank does in a move."""

    copies: list[Copy]
    rounds: Iterable[Round]


def tile_move(source: Tiled, target: Tiled, rank: int, rounds: int = 1) -> Table:
    """The table of one rank. In each round a rank sends and receives the next rows of each of its pieces. The table of
    a source that is stored by columns is that of the transposes. Rounds are made one at a time, as they are read.

        >>> from pmm3d.layout import GridShape, Layout, Placement
        >>> rows, cols = (Placement((4, 4), layout, GridShape(1, 1, 2)) for layout in (Layout("z"), Layout((), "z")))
        >>> [(message.ranks, message.elements) for each in tile_move(rows, cols, 0, 2).rounds for message in each.sends]
        [((1,), 2), ((1,), 2)]
    """
    going, coming = send_blocks(source, target, rank), recv_blocks(source, target, rank)
    if source.order == "F":
        going, coming = _transposed(going), _transposed(coming)
    copies = [Copy(piece.array, piece.other, tuple(strided(piece.rows)), tuple(strided(piece.cols)))
              for piece in going.pop((rank,), [])]
    sides = [[(ranks, [(piece, tuple(strided(packed(piece.cols, 0, piece.shape[1])))) for piece in pieces])
              for ranks, pieces in messages.items()] for messages in (going, coming)]
    return Table(copies, (Round(*([*_messages(side, number, rounds)] for side in sides)) for number in range(rounds)))


def _transposed(messages: Messages) -> Messages:
    return {ranks: [piece._replace(rows=piece.cols, cols=piece.rows) for piece in pieces]
            for ranks, pieces in messages.items()}


def _messages(side: list[tuple[tuple[int, ...], list[tuple[Piece, tuple[Strided, ...]]]]], number: int,
              rounds: int) -> Iterator[Message]:
    """What of the pieces, of which the columns are known already, travels in a round."""
    for ranks, pieces in side:
        parts = []
        for piece, cols in pieces:
            height, width = piece.shape
            low, high = part_range(height, rounds, number)
            if low < high:
                parts.append(Part(piece.array, tuple(strided(packed(piece.rows, low, high))), cols,
                                  (high - low, width)))
        if parts:
            yield Message(ranks, tuple(parts))


@dataclass(frozen=True)
class Side:
    """Bounds of what any rank stores on one side of a move.

    elements   of its tiles;   width: of the rows of all of its tiles together
    height     of a tile;      pieces: parts of the other side that the rows of a tile are in
    """

    elements: int
    width: int
    height: int
    pieces: int

    def in_round(self, rounds: int) -> int:
        """Largest number of elements that travel in one round."""
        whole = min(self.elements // rounds, self.width * (self.height // rounds))
        return min(self.elements, whole + self.width * self.pieces) if rounds > 1 else self.elements


@dataclass(frozen=True)
class Move:
    """The packed copies of a move, and the rounds that keep them within a limit: the same on all ranks.

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
        """Of what is sent, and of what is received."""
        return self._side(self.source, self.target), self._side(self.target, self.source)

    def _side(self, mine: Tiled, others: Tiled) -> Side:
        transposed, (elements, height, width) = self.source.order == "F", mine.most()
        width, rows, other_rows = ((height, mine.cols, others.cols) if transposed else
                                   (width, mine.rows, others.rows))
        return Side(elements, width, rows.spacing.most, parts_met(rows, other_rows))

    def work(self, rounds: int) -> int:
        """Bytes of copies on any rank, at most."""
        return sum(aligned(side.in_round(rounds) * itemsize(self.dtype)) for side in self.sides)

    @property
    def most_rounds(self) -> int:
        return max(1, *(side.height for side in self.sides))

    def rounds(self, limit: int) -> int:
        """The fewest that keep the copies within this number of bytes; as many as there can be if none do."""
        return 1 + bisect_left(range(1, self.most_rounds), True, key=lambda rounds: self.work(rounds) <= limit)
