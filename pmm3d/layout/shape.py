"""The axes of a process grid: their names, sizes, and the index of each rank along them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ..errors import GridError

AXES = ("x", "y", "z", "data")


class Coords(NamedTuple):
    """Where a rank is along each axis.

        >>> Coords(x=1)._replace(z=2)
        Coords(x=1, y=0, z=2, data=0)
    """

    x: int = 0
    y: int = 0
    z: int = 0
    data: int = 0


FIRST = Coords()
"""The rank that has the largest part of everything: what it decides by sizes, all ranks decide."""


class GridShape(NamedTuple):
    """Sizes of the four axes. Ranks run fastest along x, then y, z, data.

        >>> shape = GridShape(2, 2, 2)
        >>> shape.size, shape.coords(5), shape.rank(Coords(x=1, z=1))
        (8, Coords(x=1, y=0, z=1, data=0), 5)
    """

    x: int
    y: int
    z: int
    data: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z * self.data

    def coords(self, rank: int) -> Coords | None:
        """Position of a rank along each axis; None for a rank that the grid leaves idle."""
        return self.position(rank) if rank < self.size else None

    def position(self, rank: int) -> Coords:
        """The same, of a rank that is not idle."""
        rest, x = divmod(rank, self.x)
        rest, y = divmod(rest, self.y)
        data, z = divmod(rest, self.z)
        return Coords(x, y, z, data)

    def rank(self, coords: Coords) -> int:
        return coords.x + self.x * (coords.y + self.y * (coords.z + self.z * coords.data))

    def along(self, axes: Iterable[str]) -> int:
        """Product of the sizes of the named axes."""
        return prod(getattr(self, axis) for axis in axes)

    def __str__(self) -> str:
        tensor = f"{self.x}x{self.y}x{self.z}"
        return tensor if self.data == 1 else f"{tensor} (data {self.data})"


def parse_shape(text: str) -> GridShape:
    """The shape that is written GxxGyxGz. Raises GridError for any other text.

        >>> parse_shape("2x3x1")
        GridShape(x=2, y=3, z=1, data=1)
    """
    try:
        x, y, z = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise GridError(f"a grid is written GxxGyxGz, as in 2x2x1; got {text!r}") from None
    return GridShape(x, y, z)
