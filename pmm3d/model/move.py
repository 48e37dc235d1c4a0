"""Moving a matrix from one tiling to another: a table of messages for each rank, in rounds so that the packed copies
have a bound. Pure functions of the two tilings, without MPI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ..layout import Tiled, aligned, itemsize, part_range
from ..layout.dealing import Common, Strided, packed, parts_met, strided
from ..layout.pieces import Piece, arriving, leaving

Runs = TypeVar("Runs")
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
    elements: int


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
    transposed, going = source.order == "F", leaving(source, target, rank)
    copies = [Copy(piece.array, piece.other, *_in_order(transposed, tuple(strided(piece.rows)),
                                                        tuple(strided(piece.cols))))
              for piece in going.pop(rank, [])]
    sides = _groups(going, transposed), _groups(arriving(source, target, rank), transposed)
    return Table(copies, (Round(*(list(_messages(side, number, rounds)) for side in sides))
                          for number in range(rounds)))


class _Source(NamedTuple):
    """A piece, from which the rows of each round are cut."""

    array: int
    rows: list[Common]
    cols: tuple[Strided, ...]
    shape: tuple[int, int]


_Groups = list[tuple[tuple[int, ...], list[_Source]]]


def _groups(pieces: dict[int, list[Piece]], transposed: bool) -> _Groups:
    """The pieces of each message, and all ranks that the message goes to."""
    groups: dict[Any, tuple[list[int], list[Piece]]] = {}
    for rank, of_rank in pieces.items():
        key = tuple((piece.array, id(piece.rows), id(piece.cols)) for piece in of_rank)
        groups.setdefault(key, ([], of_rank))[0].append(rank)
    return [(tuple(ranks), [_source(piece, transposed) for piece in of_ranks]) for ranks, of_ranks in groups.values()]


def _source(piece: Piece, transposed: bool) -> _Source:
    (rows, cols), (height, width) = (_in_order(transposed, *each) for each in ((piece.rows, piece.cols), piece.shape))
    return _Source(piece.array, rows, tuple(strided(packed(cols, 0, width))), (height, width))


def _messages(groups: _Groups, number: int, rounds: int) -> Iterator[Message]:
    for ranks, pieces in groups:
        parts = []
        for array, rows, cols, (height, width) in pieces:
            low, high = part_range(height, rounds, number)
            if low < high:
                parts.append(Part(array, tuple(strided(packed(rows, low, high))), cols, (high - low, width)))
        if parts:
            yield Message(ranks, tuple(parts), sum(part.shape[0] * part.shape[1] for part in parts))


def _in_order(transposed: bool, rows: Runs, cols: Runs) -> tuple[Runs, Runs]:
    return (cols, rows) if transposed else (rows, cols)


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
        """Elements that travel in one round, at most: of each piece so many rows."""
        return min(self.elements, self.elements // rounds + (rounds > 1) * self.width * self.pieces)


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
        """The fewest that keep the copies within so many bytes; as many as there can be if none do."""
        low, high = 1, self.most_rounds
        while low < high:
            middle = (low + high) // 2
            if self.work(middle) <= limit:
                high = middle
            else:
                low = middle + 1
        return low
