"""Layouts: what each axis of a grid does to a matrix, and so which rows and columns each rank stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from ..errors import LayoutError
from .cuts import part_range
from .shape import AXES, Coords, GridShape

Axes = str | tuple[str, ...] | list[str]


class Box(NamedTuple):
    """Rows r0:r1 and columns c0:c1 of a matrix.

        >>> Box(0, 4, 0, 6) & Box(2, 8, 5, 9)
        Box(r0=2, r1=4, c0=5, c1=6)
    """

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.r1 - self.r0, self.c1 - self.c0

    @property
    def size(self) -> int:
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def __and__(self, other: Box) -> Box:
        r0, c0 = max(self.r0, other.r0), max(self.c0, other.c0)
        return Box(r0, max(r0, min(self.r1, other.r1)), c0, max(c0, min(self.c1, other.c1)))

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Slices that cut this box out of a local array that holds `outer`."""
        return slice(self.r0 - outer.r0, self.r1 - outer.r0), slice(self.c0 - outer.c0, self.c1 - outer.c0)


EMPTY = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """Which grid axes split the rows and which split the columns, major to minor. Axes not named replicate.

    Layout(rows=("z", "x"), cols=("y",)): the rows are cut into Gz parts, each of those into Gx; the columns into Gy.
    Layout.A, Layout.B and Layout.C are what `matmul` takes and gives without moving anything first.

    Raises LayoutError for an axis that no grid has, or that is named twice.

        >>> Layout("z", "y").box((10, 6), GridShape(1, 2, 4), GridShape(1, 2, 4).coords(7))
        Box(r0=8, r1=10, c0=3, c1=6)
    """

    rows: tuple[str, ...] = ()
    cols: tuple[str, ...] = ()

    A: ClassVar[Layout]
    B: ClassVar[Layout]
    C: ClassVar[Layout]

    def __init__(self, rows: Axes = (), cols: Axes = ()):
        for name, value in (("rows", rows), ("cols", cols)):
            if not isinstance(value, (str, tuple, list)):
                raise LayoutError(f"the {name} of a layout are split by an axis, or a tuple of them; got {value!r}")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for axis in self.splitting:
            if axis not in AXES:
                raise LayoutError(f"{self} names the axis {axis!r}; the axes of a grid are {', '.join(AXES)}")
        twice = sorted({axis for axis in self.splitting if self.splitting.count(axis) > 1})
        if twice:
            raise LayoutError(f"{self} names the axis {', '.join(twice)} twice; an axis can split one dim, once")

    def __str__(self) -> str:
        return f"Layout(rows={self.rows}, cols={self.cols})"

    @property
    def splitting(self) -> tuple[str, ...]:
        """The axes that split rows or columns."""
        return self.rows + self.cols

    @property
    def T(self) -> Layout:
        """The layout of the transpose."""
        return Layout(self.cols, self.rows)

    def on(self, grid: GridShape) -> Layout:
        """The same layout without the axes of size 1, so that equal distributions compare equal."""
        return _reduced(self, grid)

    def parts(self, grid: GridShape) -> tuple[int, int]:
        """Into how many parts the rows and the columns are cut."""
        return grid.along(self.rows), grid.along(self.cols)

    def box(self, shape: tuple[int, int], grid: GridShape, coords: Coords | None) -> Box:
        """What the rank at `coords` stores of a matrix of that shape; the empty box for an idle rank."""
        if coords is None:
            return EMPTY
        return Box(*_range(shape[0], self.rows, grid, coords), *_range(shape[1], self.cols, grid, coords))

    def is_first(self, coords: Coords) -> bool:
        """Whether the rank at `coords` is the first of those that hold its box: at 0 along the axes not named."""
        return all(index == 0 for axis, index in zip(AXES, coords) if axis not in self.splitting)

    def replicas(self, grid: GridShape) -> int:
        """How many ranks hold each element."""
        return grid.size // grid.along(self.splitting)


Layout.A = Layout(rows=("z", "x"), cols=("y",))
Layout.B = Layout(rows=("y", "z"), cols=("x",))
Layout.C = Layout(rows=("z", "y"), cols=("x",))


def batch_layout(cols: str | None = "y") -> Layout:
    """Rows of a batch over data and z; its columns (the features) over an axis, or whole. What the other axes do not
    split they replicate.

        >>> batch_layout("y")
        Layout(rows=('data', 'z'), cols=('y',))
    """
    return Layout(("data", "z"), cols or ())


@lru_cache(maxsize=1024)
def _reduced(layout: Layout, grid: GridShape) -> Layout:
    return Layout(*(tuple(axis for axis in axes if getattr(grid, axis) > 1) for axes in (layout.rows, layout.cols)))


def _range(size: int, axes: tuple[str, ...], grid: GridShape, coords: Coords) -> tuple[int, int]:
    start, stop = 0, size
    for axis in axes:
        low, high = part_range(stop - start, getattr(grid, axis), getattr(coords, axis))
        start, stop = start + low, start + high
    return start, stop
