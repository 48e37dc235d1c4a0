"""Orders in which the rows of sequences are stored, so that ranks which share a sequence have equal work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..errors import LayoutError, hint
from .distribution import Run, Spacing, Split

ORDERS = ("plain", "zigzag", "striped")
"""Names of the orders."""


class RowOrder(NamedTuple):
    """Order of the rows of each sequence of `length` rows, in blocks of `block` rows. It is an entry of a unit of rows.

    name    "zigzag": first block, last block, second block, last but one, ...; "striped": the blocks r, r + ranks,
            r + 2 ranks, ... for each r; "plain": ascending
    ranks   of "striped": number of ranks that share sequences

        >>> RowOrder.of("zigzag", 8, 2), RowOrder.of("zigzag", 8, 1)
        (RowOrder(name='zigzag', length=8, block=2, ranks=1), None)
        >>> RowOrder.of("striped", 8, 2, 2).positions
        (0, 1, 4, 5, 2, 3, 6, 7)
    """

    name: str
    length: int
    block: int
    ranks: int

    @classmethod
    def of(cls, name: str, length: int, ranks: int, block: int = 1) -> RowOrder | None:
        """Return the order, or None if it is ascending. With block=1, a block of "zigzag" has 1 / (2 ranks) of the
        sequence. Raises LayoutError for an unknown name."""
        if name not in ORDERS:
            raise LayoutError(f"order must be one of {', '.join(ORDERS)}; got {name!r}{hint(name, ORDERS)}")
        if name == "zigzag" and block == 1:
            block = max(1, -(-length // (2 * ranks)))
        order = cls(name, length, block, ranks if name == "striped" else 1)
        return None if all(stored == position for stored, position, _ in _pieces(order)) else order

    @property
    def positions(self) -> tuple[int, ...]:
        """Position in its sequence of each row, in the order in which rows are stored."""
        return tuple(position for _, first, count in _pieces(self) for position in range(first, first + count))

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first stored row, first row of the matrix, number of rows) of each piece with stored rows low:high."""
        for sequence in range(low // self.length, -(-high // self.length)):
            for stored, position, count in _pieces(self):
                start, stop = stored + sequence * self.length, stored + sequence * self.length + count
                first, last = max(low, start), min(high, stop)
                if first < last:
                    yield first, sequence * self.length + position + first - start, last - first


@lru_cache(maxsize=64)
def _pieces(order: RowOrder) -> tuple[tuple[int, int, int], ...]:
    """(first stored row, first position, number of rows) of each block of a sequence, in the order of storage."""
    blocks = [*range(-(-order.length // order.block))]
    if order.name == "zigzag":
        blocks = [each for pair in zip(blocks, reversed(blocks)) for each in pair][: len(blocks)]
    elif order.name == "striped":
        blocks = [block for rank in range(order.ranks) for block in blocks[rank :: order.ranks]]
    pieces, stored = [], 0
    for block in blocks:
        count = min(order.block, order.length - block * order.block)
        pieces.append((stored, block * order.block, count))
        stored += count
    return tuple(pieces)


@dataclass(frozen=True)
class Ordered:
    """A dim of sequences that is cut as `split`, after its rows were brought into an order.

    >>> list(Ordered(Split(8, (2,)), RowOrder("zigzag", 8, 2, 1)).runs(0))
    [Run(part=0, start=0, stop=2, local=0), Run(part=0, start=6, stop=8, local=2)]
    """

    split: Split
    order: RowOrder

    @property
    def size(self) -> int:
        return self.split.size

    @property
    def parts(self) -> int:
        return self.split.parts

    @property
    def spacing(self) -> Spacing:
        return Spacing(self.split.spacing.most, self.size, 1)

    def runs(self, part: int) -> Iterator[Run]:
        runs = [
            Run(part, row, row + count, run.local + stored - run.start)
            for run in self.split.runs(part)
            for stored, row, count in self.order.pieces(run.start, run.stop)
        ]
        yield from sorted(runs, key=lambda run: run.start)

    def within(self, low: int, high: int) -> Iterator[Run]:
        length, runs = self.order.length, list[Run]()
        for stored, row, count in self.order.pieces(low // length * length, -(-high // length) * length):
            first, last = max(low, row), min(high, row + count)
            for run in self.split.within(stored + first - row, stored + last - row) if first < last else ():
                runs.append(run._replace(start=run.start + row - stored, stop=run.stop + row - stored))
        yield from sorted(runs, key=lambda run: run.start)
