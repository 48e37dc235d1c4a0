"""Where the elements of a matrix live: plain arithmetic for any rank of any grid, no MPI."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

from .errors import GridError, LayoutError

AXES = ("x", "y", "z", "data")


def part_sizes(size: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of a dim: ceil or floor of size / parts, the larger ones first. Parts may be empty."""
    small, larger = divmod(size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def part_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index`; see `part_sizes`."""
    small, larger = divmod(size, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)


def offsets(counts) -> list[int]:
    """Start of each of the consecutive pieces of the given sizes, and the end of the last."""
    return [0, *accumulate(counts)]


class Block(NamedTuple):
    """Rows r0:r1 and columns c0:c1 of a matrix."""

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

    def __and__(self, other: Block) -> Block:
        r0, c0 = max(self.r0, other.r0), max(self.c0, other.c0)
        return Block(r0, max(r0, min(self.r1, other.r1)), c0, max(c0, min(self.c1, other.c1)))

    def within(self, outer: Block) -> tuple[slice, slice]:
        """Slices that cut this block out of a local array that holds `outer`."""
        return slice(self.r0 - outer.r0, self.r1 - outer.r0), slice(self.c0 - outer.c0, self.c1 - outer.c0)


EMPTY = Block(0, 0, 0, 0)


class GridShape(NamedTuple):
    """Sizes of the four axes. Ranks run fastest along x, then y, z, data."""

    x: int
    y: int
    z: int
    data: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z * self.data

    def coords(self, rank: int) -> GridShape | None:
        """Position of a rank along each axis; None for a rank that the grid leaves idle."""
        if rank >= self.size:
            return None
        rest, x = divmod(rank, self.x)
        rest, y = divmod(rest, self.y)
        data, z = divmod(rest, self.z)
        return GridShape(x, y, z, data)

    def rank(self, coords: GridShape) -> int:
        return coords.x + self.x * (coords.y + self.y * (coords.z + self.z * coords.data))

    def along(self, axes) -> int:
        """Product of the sizes of the named axes."""
        product = 1
        for axis in axes:
            product *= getattr(self, axis)
        return product

    def __str__(self) -> str:
        tensor = f"{self.x}x{self.y}x{self.z}"
        return tensor if self.data == 1 else f"{tensor} (data {self.data})"


def parse_shape(text: str) -> GridShape:
    """GxxGyxGz, as in "2x2x2"."""
    try:
        x, y, z = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise GridError(f"a grid is written GxxGyxGz, as in 2x2x1; got {text!r}") from None
    return GridShape(x, y, z)


@dataclass(frozen=True)
class Layout:
    """Which grid axes split the rows and which split the columns, major to minor. Axes not named replicate.

    Layout(rows=("z", "x"), cols=("y",)): the rows are cut into Gz parts, each of those into Gx; the columns into Gy.
    Layout.A, Layout.B and Layout.C are what `matmul` takes and gives without moving anything first.
    """

    rows: tuple[str, ...] = ()
    cols: tuple[str, ...] = ()

    A: ClassVar[Layout]
    B: ClassVar[Layout]
    C: ClassVar[Layout]

    def __post_init__(self):
        for name in ("rows", "cols"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        named = self.rows + self.cols
        for axis in named:
            if axis not in AXES:
                raise LayoutError(f"{self} names the axis {axis!r}; the axes of a grid are {', '.join(AXES)}")
        if len(set(named)) < len(named):
            twice = sorted({axis for axis in named if named.count(axis) > 1})
            raise LayoutError(f"{self} names the axis {', '.join(twice)} twice; an axis can split one dim, once")

    def __str__(self) -> str:
        return f"Layout(rows={self.rows}, cols={self.cols})"

    @property
    def T(self) -> Layout:
        return Layout(self.cols, self.rows)

    def on(self, grid: GridShape) -> Layout:
        """The same layout without the axes of size 1, so that equal distributions compare equal."""
        return _reduced(self, grid)

    def parts(self, grid: GridShape) -> tuple[int, int]:
        """Into how many parts the rows and the columns are cut."""
        return grid.along(self.rows), grid.along(self.cols)

    def block(self, shape: tuple[int, int], grid: GridShape, coords: GridShape | None) -> Block:
        """The block that the rank at `coords` holds; the empty block for an idle rank."""
        if coords is None:
            return EMPTY
        return Block(*_range(shape[0], self.rows, grid, coords), *_range(shape[1], self.cols, grid, coords))

    def is_first(self, coords: GridShape) -> bool:
        """Whether the rank at `coords` is the first of those that hold its block: at 0 along the axes not named."""
        return all(index == 0 for axis, index in zip(AXES, coords) if axis not in self.rows + self.cols)

    def replicas(self, grid: GridShape) -> int:
        """How many ranks hold each element."""
        return grid.size // grid.along(self.rows + self.cols)


Layout.A = Layout(rows=("z", "x"), cols=("y",))
Layout.B = Layout(rows=("y", "z"), cols=("x",))
Layout.C = Layout(rows=("z", "y"), cols=("x",))


@lru_cache(maxsize=1024)
def _reduced(layout: Layout, grid: GridShape) -> Layout:
    return Layout(
        tuple(axis for axis in layout.rows if getattr(grid, axis) > 1),
        tuple(axis for axis in layout.cols if getattr(grid, axis) > 1),
    )


def _range(size: int, axes: tuple[str, ...], grid: GridShape, coords: GridShape) -> tuple[int, int]:
    start, stop = 0, size
    for axis in axes:
        low, high = part_range(stop - start, getattr(grid, axis), getattr(coords, axis))
        start, stop = start + low, start + high
    return start, stop


def cuts(size: int, axes: tuple[str, ...], grid: GridShape) -> list[tuple[int, dict[str, int]]]:
    """Start of each part of a dim and the coordinates that own it, in order."""
    parts = [(0, size, {})]
    for axis in axes:
        count = getattr(grid, axis)
        parts = [
            (start + low, start + high, {**owner, axis: index})
            for start, stop, owner in parts
            for index in range(count)
            for low, high in [part_range(stop - start, count, index)]
        ]
    return [(start, owner) for start, _, owner in parts]


def overlapping(starts: list[int], low: int, high: int) -> range:
    """Indices of the parts (given by their sorted starts) that may meet low:high. Empty parts may be among them."""
    if low >= high:
        return range(0)
    first = bisect_right(starts, low) - 1
    while first > 0 and starts[first - 1] == starts[first]:
        first -= 1
    return range(first, bisect_right(starts, high - 1))


def batch_layout(cols: str | None = "y") -> Layout:
    """Rows of a batch over data and z; its columns (the features) over an axis, or whole. What the other axes do not
    split they replicate."""
    return Layout(("data", "z"), cols or ())
