"""How a matrix goes from one placement to another: in rounds, so that the copies that travel have a bound."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..layout import Box, Placed, aligned, incoming, itemsize, outgoing, part_range

ROUND_BYTES = 2**24
"""Of the copies on a rank at once, where the caller sets no limit: messages that are long for any network."""


@dataclass(frozen=True)
class Side:
    """The largest shard on one side of a move, and into how many pieces the other side's cuts part its rows."""

    rows: int
    cols: int
    pieces: int

    def elements(self, rounds: int) -> int:
        """The most that travels of it in one round: of each piece so many rows."""
        return self.cols * min(self.rows, self.rows if rounds == 1 else self.rows // rounds + self.pieces)


@dataclass(frozen=True)
class Move:
    """From one placement of a matrix to another. In each of the rounds a rank sends and receives the next rows of each
    of its pieces.

        >>> from pmm3d.layout import GridShape, Layout, Placement
        >>> grid = GridShape(1, 1, 4)
        >>> rows, cols = (Placement((100, 100), layout, grid) for layout in (Layout("z"), Layout((), "z")))
        >>> move = Move(rows, cols, "float64")
        >>> move.work(1), move.work(10), move.rounds(10000)
        (40064, 5248, 5)
    """

    source: Placed
    target: Placed
    dtype: str

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Of what is sent, and of what is received."""
        ours, theirs = self.source.row_cuts(), self.target.row_cuts()
        return _side(self.source, ours, theirs), _side(self.target, theirs, ours)

    def work(self, rounds: int) -> int:
        """Bytes of copies on any rank."""
        return sum(aligned(side.elements(rounds) * itemsize(self.dtype)) for side in self.sides)

    @property
    def most_rounds(self) -> int:
        return max(1, *(side.rows for side in self.sides))

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

    def incoming(self, rank: int) -> list[tuple[int, Box]]:
        """(from which rank, which box), this rank's own among them."""
        return incoming(self.source, self.target, rank)

    def outgoing(self, rank: int) -> list[tuple[Box, list[int]]]:
        """(box, to which ranks), this rank among them."""
        readers: dict[Box, list[int]] = {}
        for reader, box in outgoing(self.source, self.target, rank):
            readers.setdefault(box, []).append(reader)
        return list(readers.items())


def in_round(box: Box, number: int, rounds: int) -> Box:
    """What of a piece travels in a round."""
    first, last = part_range(box.r1 - box.r0, rounds, number)
    return Box(box.r0 + first, box.r0 + last, box.c0, box.c1)


def _side(placement: Placed, cuts: list[int], others: list[int]) -> Side:
    """cuts: where the parts of the rows begin, and the end of the last; others: likewise, on the other side."""
    pieces = (bisect_left(others, high) - bisect_right(others, low) + 1 for low, high in pairwise(cuts))
    return Side(*placement.largest(), max(pieces, default=0))
