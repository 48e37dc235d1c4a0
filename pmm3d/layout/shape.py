"""The axes of a process grid: names, sizes, and coordinates of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from math import prod
from operator import mul
from typing import Any, NamedTuple, TypeVar

from ..errors import GridError

AXES = ("x", "y", "z", "data")
"""Axes of every grid."""
PIPE = "pipe"
"""The axis of pipeline stages of a network."""
SEQ = "seq"
"""The axis along which sequences are split."""
ULYSSES = "ulysses"
"""The axis along which sequences are split, and heads in attention."""
ALL, STAGE = "all", "stage"
"""Names of two groups: all ranks of a grid, and all ranks of a stage."""
Numbers = TypeVar("Numbers", bound="_ByAxis")


class _Four(NamedTuple):
    x: int
    y: int
    z: int
    data: int


class _ByAxis(_Four):
    """Tuple with a number for each axis: x, y, z, data, and further axes of a grid."""

    names: tuple[str, ...] = AXES

    @classmethod
    def of(cls: type[Numbers], names: Sequence[str], numbers: Iterable[int]) -> Numbers:
        """Make the tuple from names and numbers. The first names are `AXES`."""
        made: Numbers = tuple.__new__(cls, numbers)
        if names is not AXES and len(names) > len(AXES):
            made.__dict__.update(zip(names[len(AXES) :], made[len(AXES) :]), names=tuple(names))
        return made

    def _asdict(self) -> dict[str, int]:
        return dict(zip(self.names, self))

    def _replace(self: Numbers, **numbers: int) -> Numbers:
        changed = self._asdict() | numbers
        if len(changed) > len(self):
            raise ValueError(f"{self} has no axis {', '.join(numbers.keys() - set(self.names))}")
        return self.of(self.names, changed.values())

    def without(self: Numbers, name: str) -> Numbers:
        """The tuple without one of the further axes."""
        left = {other: number for other, number in self._asdict().items() if other != name}
        return self.of(tuple(left), left.values())

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.names == getattr(other, "names", self.names)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={number}' for name, number in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of, (self.names, tuple(self))


class Coords(_ByAxis):
    """Coordinates of a rank along each axis.

    >>> Coords(x=1)._replace(z=2)
    Coords(x=1, y=0, z=2, data=0)
    """

    def __new__(cls, x: int = 0, y: int = 0, z: int = 0, data: int = 0, **others: int) -> Coords:
        return cls.of((*AXES, *others), (x, y, z, data, *others.values()))


FIRST = Coords()
"""Coordinates of the rank with the largest part of each matrix. Decisions by its sizes are the same on all ranks."""


class GridShape(_ByAxis):
    """Number of ranks along each axis of a grid.

    Parameters
    ----------
    x, y, z, data : int
        Ranks along the axes that every grid has.
    **others : int
        Ranks along further axes, by name.

    Attributes
    ----------
    size : int
        Number of ranks.
    names : tuple of str
        Names of the axes.
    stages : int
        Ranks along "pipe"; 1 without this axis.

    Raises
    ------
    GridError
        For a name that is no identifier, or that a shape uses for something else.

    Notes
    -----
    Ranks run fastest along x, then y, z, further axes in the order named, "pipe", and data (`inner_first`).

    Examples
    --------
    >>> from pmm3d import GridShape
    >>> shape = GridShape(2, 2, 2)
    >>> shape.size, shape.coords(5), shape.rank(shape.coords(5))
    (8, Coords(x=1, y=0, z=1, data=0), 5)
    >>> longer = GridShape(2, 2, 1, 2, seq=2)
    >>> str(longer), longer.seq, longer.names[-1], longer.coords(9)
    ('2x2x1 (data 2, seq 2)', 2, 'seq', Coords(x=1, y=0, z=0, data=1, seq=0))
    """

    def __new__(cls, x: int, y: int, z: int, data: int = 1, **others: int) -> GridShape:
        for name in others:
            if not is_axis_name(name):
                raise GridError(
                    f"an axis of a grid cannot be named {name!r}: a name is one word that a shape does "
                    "not use for something else (size, names, ...)"
                )
        return cls.of((*AXES, *others) if others else AXES, (x, y, z, data, *others.values()))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self)

    @property
    def stages(self) -> int:
        """Number of ranks along the axis "pipe"; 1 without it."""
        return getattr(self, PIPE, 1)

    @cached_property
    def inner_first(self) -> tuple[str, ...]:
        """Axes in the order in which ranks run along them, fastest first.

        Examples
        --------
        >>> from pmm3d import GridShape
        >>> GridShape(2, 2, 1, 2, pipe=2, seq=2).inner_first
        ('x', 'y', 'z', 'seq', 'pipe', 'data')
        """
        return tuple(sorted(self.names, key=lambda name: (name == "data", name == PIPE)))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Difference between the ranks of neighbours, for each axis."""
        order = self.inner_first
        return tuple(self.along(order[: order.index(name)]) for name in self.names)

    def coords(self, rank: int) -> Coords | None:
        """Index of a rank along each axis.

        Returns
        -------
        Coords or None
            The indices; None for a rank that the grid leaves idle.
        """
        return self.position(rank) if rank < self.size else None

    def position(self, rank: int) -> Coords:
        """Index along each axis of a rank that is not idle."""
        return Coords.of(self.names, [rank // stride % size for size, stride in zip(self, self.strides)])

    def rank(self, coords: Iterable[int]) -> int:
        """The rank at these indices."""
        return sum(map(mul, coords, self.strides))

    def along(self, axes: Iterable[str]) -> int:
        """Number of ranks along several axes together."""
        return prod(getattr(self, axis) for axis in axes)

    def axes_of(self, group: str) -> tuple[str, ...]:
        """Axes of a group of ranks, by its name in records.

        Parameters
        ----------
        group : str
            An axis, joint axes ("data+pipe"), "stage" or "all".

        Examples
        --------
        >>> from pmm3d import GridShape
        >>> shape = GridShape(2, 2, 1, pipe=2)
        >>> shape.axes_of("x"), shape.axes_of("data+pipe"), shape.axes_of("stage"), shape.axes_of("all")[3:]
        (('x',), ('data', 'pipe'), ('x', 'y', 'z', 'data'), ('data', 'pipe'))
        """
        named = {ALL: self.names, STAGE: self.without(PIPE).names}
        return named.get(group) or tuple(group.split("+"))

    def group(self, axes: Collection[str], coords: Coords) -> range | tuple[int, ...]:
        """Ranks whose indices differ from those of one rank only along the named axes.

        Returns
        -------
        range or tuple of int
            The ranks in ascending order; a range if their distances are equal.

        Examples
        --------
        >>> from pmm3d import GridShape
        >>> shape = GridShape(2, 2, 2)
        >>> shape.group(["y"], shape.coords(1)), shape.group(["x", "z"], shape.coords(2))
        (range(1, 4, 2), (2, 3, 6, 7))
        """
        ranks = [self.rank(coords._replace(**dict.fromkeys(axes, 0)))]
        for stride, size, name in sorted(zip(self.strides, self, self.names)):
            if name in axes:
                ranks = [rank + index * stride for index in range(size) for rank in ranks]
        even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        return even if [*even] == ranks else tuple(ranks)

    def __str__(self) -> str:
        others = [f"{name} {size}" for name, size in zip(self.names[3:], self[3:]) if size > 1]
        return f"{self.x}x{self.y}x{self.z}" + (f" ({', '.join(others)})" if others else "")


def is_axis_name(name: object) -> bool:
    """Whether an axis can have this name.

    >>> is_axis_name("seq"), is_axis_name("two words"), is_axis_name("size")
    (True, False, False)
    """
    return name in AXES or (isinstance(name, str) and name.isidentifier() and not hasattr(GridShape, name))


def parse_shape(text: str) -> GridShape:
    """Parse a shape in the form GxxGyxGz. Raises GridError for other text.

    >>> parse_shape("2x3x1")
    GridShape(x=2, y=3, z=1, data=1)
    """
    try:
        x, y, z = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise GridError(f"a grid is written GxxGyxGz, as in 2x2x1; got {text!r}") from None
    return GridShape(x, y, z)


@lru_cache(maxsize=1024)
def can_be_named(names: tuple[Any, ...]) -> bool:
    """Whether these are distinct valid names of axes. Raises TypeError for unhashable names.

    >>> can_be_named(("x", "seq")), can_be_named(("x", "x"))
    (True, False)
    """
    return all(map(is_axis_name, names)) and len(set(names)) == len(names)
