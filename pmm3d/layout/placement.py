"""Who holds what of a matrix, and which pieces travel when it goes from one placement to another: layouts on one grid
or on two, or whole copies on some ranks. Each reader takes each piece from one holder: itself, or the one that matches
its own coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import LayoutError
from .cuts import naturals, overlapping, part_range
from .layout import EMPTY, Box, Layout, cutting_unit
from .shape import GridShape


@dataclass(frozen=True)
class Placement:
    """A matrix of some shape in a layout on a grid. Raises LayoutError for what is no shape or no Layout, for a layout
    that does not fit the grid or the shape, and for one of partial sums, of which no rank has an element.

        >>> Placement((10, 6), Layout("z"), GridShape(1, 2, 2)).parts(Box(4, 6, 0, 6))
        [(0, Box(r0=4, r1=5, c0=0, c1=6)), (2, Box(r0=5, r1=6, c0=0, c1=6))]
    """

    shape: tuple[int, int]
    layout: Layout
    grid: GridShape

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise LayoutError(f"a layout is a pmm3d.Layout; got {self.layout!r}")
        object.__setattr__(self, "shape", matrix_shape(self.shape))
        self.layout.on(self.grid)
        if self.layout.sums:
            raise LayoutError(f"{self.layout}: along {', '.join(self.layout.sums)} the ranks hold partial sums, of "
                              "which no rank has the elements; bring the matrix to a sum first: "
                              "redistribute(layout.summed)")
        if self.layout.units != (1, 1):
            self.box(0)

    def box(self, rank: int) -> Box:
        """What the rank holds."""
        return self.layout.box(self.shape, self.grid, self.grid.coords(rank))

    def largest(self) -> tuple[int, int]:
        """Rows and columns of the largest shard."""
        return self.box(0).shape

    def row_cuts(self) -> list[int]:
        """Where each part of the rows that is not empty begins, and the end of the last."""
        rows = self.shape[0]
        return [*(start for start, _ in self._cuts(0, 0, rows)), rows]

    def holder(self, rank: int, reader: int) -> int:
        """Of the ranks that hold what `rank` holds, the one that serves `reader`: itself where it is one."""
        here, there = self.grid.position(rank), self.grid.position(reader % self.grid.size)
        splitting = self.layout.splitting
        return self.grid.rank([mine if axis in splitting else theirs
                               for axis, mine, theirs in zip(self.grid.names, here, there)])

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        """(a rank that holds it, its box within the given one), each element of the given box once."""
        rows, cols = self._cuts(0, box.r0, box.r1), self._cuts(1, box.c0, box.c1)
        first = self.grid.position(0)
        ranks = [self.grid.rank(first._replace(**row, **col)) for _, row in rows for _, col in cols]
        return [(rank, self.box(rank) & box) for rank in ranks]

    def replicas(self, rank: int) -> list[int]:
        """All ranks that hold what `rank` holds."""
        splitting = self.layout.splitting
        indices = [(index,) if axis in splitting else range(size)
                   for axis, index, size in zip(self.grid.names, self.grid.position(rank), self.grid)]
        return [self.grid.rank(coords) for coords in product(*indices)]

    def _cuts(self, dim: int, low: int, high: int) -> list[tuple[int, dict[str, int]]]:
        axes = self.layout.cols if dim else self.layout.rows
        return cuts(self.shape[dim], axes, self.grid, low, high, self.layout.units[dim])


@dataclass(frozen=True)
class Part:
    """The rows and columns `window` of a placed matrix, as a matrix of their own, whose elements lie where they are.

        >>> part = Part(Placement((10, 6), Layout("z"), GridShape(1, 1, 2)), Box(4, 8, 0, 2))
        >>> part.box(0), part.box(1), part.row_cuts()
        (Box(r0=0, r1=1, c0=0, c1=2), Box(r0=1, r1=4, c0=0, c1=2), [0, 1, 4])
    """

    of: Placement
    window: Box

    @property
    def shape(self) -> tuple[int, int]:
        return self.window.shape

    def box(self, rank: int) -> Box:
        return (self.of.box(rank) & self.window).moved(-self.window.r0, -self.window.c0)

    def largest(self) -> tuple[int, int]:
        """Rows and columns that no rank has more of."""
        (rows, cols), (most_rows, most_cols) = self.shape, self.of.largest()
        return min(rows, most_rows), min(cols, most_cols)

    def row_cuts(self) -> list[int]:
        start, stop, *_ = self.window
        cuts = [max(first, start) - start for first, _ in self.of._cuts(0, start, stop)]
        return [*cuts, stop - start]

    def holder(self, rank: int, reader: int) -> int:
        return self.of.holder(rank, reader)

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        first_row, first_col = self.window.r0, self.window.c0
        return [(rank, piece.moved(-first_row, -first_col))
                for rank, piece in self.of.parts(box.moved(first_row, first_col))]

    def replicas(self, rank: int) -> Sequence[int]:
        return self.of.replicas(rank)


def matrix_shape(shape: Any) -> tuple[int, int]:
    """The shape as two ints. Raises LayoutError for anything but two whole numbers of at least 0.

        >>> matrix_shape([4, 3])
        (4, 3)
    """
    rows, cols = naturals(shape, "a matrix has two dims of at least 0, whole numbers", 0, LayoutError, 2)
    return rows, cols


@dataclass(frozen=True)
class Whole:
    """The whole matrix on each of the given ranks.

        >>> Whole((10, 6), (3,)).box(3), Whole((10, 6), (3,)).box(0).size
        (Box(r0=0, r1=10, c0=0, c1=6), 0)
    """

    shape: tuple[int, int]
    ranks: tuple[int, ...]

    def box(self, rank: int) -> Box:
        return Box(0, self.shape[0], 0, self.shape[1]) if rank in self.ranks else EMPTY

    def largest(self) -> tuple[int, int]:
        return self.shape

    def row_cuts(self) -> list[int]:
        return [0, self.shape[0]]

    def holder(self, rank: int, reader: int) -> int:
        return reader if reader in self.ranks else self.ranks[reader % len(self.ranks)]

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        return [(self.ranks[0], box)]

    def replicas(self, rank: int) -> Sequence[int]:
        return self.ranks


Placed = Placement | Whole | Part


def cuts(size: int, axes: tuple[str, ...], grid: GridShape, low: int, high: int,
         unit: int = 1) -> list[tuple[int, dict[str, int]]]:
    """Start of each part of a dim that has elements of low:high, and the coordinates that own it, in order. Takes as
    many steps as there are such parts, however many there are of others.

        >>> cuts(10, ("z",), GridShape(1, 1, 3), 5, 10)
        [(4, {'z': 1}), (7, {'z': 2})]
    """
    unit = cutting_unit(size, axes, unit, grid)
    size, low, high = size // unit, low // unit, -(-high // unit) if low < high else 0
    parts: list[tuple[int, int, dict[str, int]]] = [(0, size, {}) for _ in overlapping(size, 1, low, high)]
    for axis in axes:
        count = getattr(grid, axis)
        parts = [(start + begin, start + end, {**owner, axis: index}) for start, stop, owner in parts
                 for index in overlapping(stop - start, count, low - start, high - start)
                 for begin, end in [part_range(stop - start, count, index)]]
    return [(start * unit, owner) for start, _, owner in parts]


def incoming(source: Placed, target: Placed, rank: int) -> list[tuple[int, Box]]:
    """(source rank, box) of each piece of what `rank` holds in the target.

        >>> grid = GridShape(1, 1, 2)
        >>> incoming(Placement((4, 4), Layout("z"), grid), Placement((4, 4), Layout((), "z"), grid), 1)
        [(0, Box(r0=0, r1=2, c0=2, c1=4)), (1, Box(r0=2, r1=4, c0=2, c1=4))]
    """
    wanted = target.box(rank)
    if not wanted.size:
        return []
    return [(source.holder(owner, rank), piece) for owner, piece in source.parts(wanted)]


def outgoing(source: Placed, target: Placed, rank: int) -> list[tuple[int, Box]]:
    """(target rank, box) of each piece that `rank` sends: the mirror of `incoming`.

        >>> grid = GridShape(1, 1, 2)
        >>> outgoing(Placement((4, 4), Layout("z"), grid), Placement((4, 4), Layout((), "z"), grid), 0)
        [(0, Box(r0=0, r1=2, c0=0, c1=2)), (1, Box(r0=0, r1=2, c0=2, c1=4))]
    """
    held = source.box(rank)
    if not held.size:
        return []
    return [(reader, piece) for owner, piece in target.parts(held) for reader in target.replicas(owner)
            if source.holder(rank, reader) == rank]
