"""Who holds what of a matrix, and which pieces travel when it goes from one placement to another: layouts on one grid
or on two, or whole copies on some ranks. Each reader takes each piece from one holder: itself, or the one that matches
its own coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import LayoutError
from .cuts import overlapping, part_range, whole_number
from .layout import EMPTY, Box, Layout
from .shape import AXES, FIRST, GridShape


@dataclass(frozen=True)
class Placement:
    """A matrix of some shape in a layout on a grid. Raises LayoutError for what is no shape or no Layout.

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

    def box(self, rank: int) -> Box:
        """What the rank holds."""
        return self.layout.box(self.shape, self.grid, self.grid.coords(rank))

    def holder(self, rank: int, reader: int) -> int:
        """Of the ranks that hold what `rank` holds, the one that serves `reader`: itself where it is one."""
        here, there = self.grid.position(rank), self.grid.position(reader % self.grid.size)
        return self.grid.rank(there._replace(**{axis: getattr(here, axis) for axis in self.layout.splitting}))

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        """(a rank that holds it, its box within the given one), each element of the given box once."""
        rows = cuts(self.shape[0], self.layout.rows, self.grid)
        cols = cuts(self.shape[1], self.layout.cols, self.grid)
        found = []
        for row in overlapping([start for start, _ in rows], box.r0, box.r1):
            for col in overlapping([start for start, _ in cols], box.c0, box.c1):
                rank = self.grid.rank(FIRST._replace(**rows[row][1], **cols[col][1]))
                piece = self.box(rank) & box
                if piece.size:
                    found.append((rank, piece))
        return found

    def replicas(self, rank: int) -> list[int]:
        """All ranks that hold what `rank` holds."""
        here = self.grid.position(rank)
        free = [axis for axis in AXES if axis not in self.layout.splitting]
        others = product(*(range(getattr(self.grid, axis)) for axis in free))
        return [self.grid.rank(here._replace(**dict(zip(free, indices)))) for indices in others]


def matrix_shape(shape: Any) -> tuple[int, int]:
    """The shape as two ints. Raises LayoutError for anything but two whole numbers of at least 0.

        >>> matrix_shape([4, 3])
        (4, 3)
    """
    try:
        rows, cols = map(whole_number, shape)
    except (TypeError, ValueError):
        rows, cols = -1, -1
    if rows < 0 or cols < 0:
        raise LayoutError(f"a matrix has two dims of at least 0, whole numbers; got the shape {shape!r}")
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

    def holder(self, rank: int, reader: int) -> int:
        return reader if reader in self.ranks else self.ranks[reader % len(self.ranks)]

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        return [(self.ranks[0], box)]

    def replicas(self, rank: int) -> Sequence[int]:
        return self.ranks


def cuts(size: int, axes: tuple[str, ...], grid: GridShape) -> list[tuple[int, dict[str, int]]]:
    """Start of each part of a dim and the coordinates that own it, in order.

        >>> cuts(10, ("z",), GridShape(1, 1, 3))
        [(0, {'z': 0}), (4, {'z': 1}), (7, {'z': 2})]
    """
    parts: list[tuple[int, int, dict[str, int]]] = [(0, size, {})]
    for axis in axes:
        count = getattr(grid, axis)
        parts = [(start + low, start + high, {**owner, axis: index}) for start, stop, owner in parts
                 for index in range(count) for low, high in [part_range(stop - start, count, index)]]
    return [(start, owner) for start, _, owner in parts]


def incoming(source: Placement | Whole, target: Placement | Whole, rank: int) -> list[tuple[int, Box]]:
    """(source rank, box) of each piece of what `rank` holds in the target.

        >>> grid = GridShape(1, 1, 2)
        >>> incoming(Placement((4, 4), Layout("z"), grid), Placement((4, 4), Layout((), "z"), grid), 1)
        [(0, Box(r0=0, r1=2, c0=2, c1=4)), (1, Box(r0=2, r1=4, c0=2, c1=4))]
    """
    wanted = target.box(rank)
    if not wanted.size:
        return []
    return [(source.holder(owner, rank), piece) for owner, piece in source.parts(wanted)]


def outgoing(source: Placement | Whole, target: Placement | Whole, rank: int) -> list[tuple[int, Box]]:
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
