"""The axes of a process grid: names, sizes, and coordinates of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from math import gcd, prod
from operator import mul
from typing import Any, NamedTuple, TypeVar

from ..errors import GridError
from .cuts import natural

AXES = ("x", "y", "z", "data")
"""Axes of every grid."""
PIPE = "pipe"
"""The axis of pipeline stages of a network."""
SEQ = "seq"
"""The axis along which sequences are split."""
ULYSSES = "ulysses"
"""The axis along which sequences are split, and heads in attention."""
EXPERT, EXPERT_Z, EXPERT_DATA = FOLDED = "expert", "expert_z", "expert_data"
"""Folded axes, another view of the ranks along z and data: the ranks that share the experts of a network, and the ranks
along z and along data that hold the same experts. "expert:3" is the axis "expert" with its rank 3 as the first."""
FIRST_AT = f"{EXPERT}:"
"""Beginning of the names of this axis with another first rank."""
NO_FOLD = (1, 1)
ALL, STAGE = "all", "stage"
"""Names of two groups: all ranks of a grid, and all ranks of a stage."""
Numbers = TypeVar("Numbers", bound="_ByAxis")


class _Four(NamedTuple):
    x: int
    y: int
    z: int
    data: int


class _ByAxis(_Four):
    """Tuple with a number for each axis: x, y, z, data, and further axes of a grid.

    fold   numbers of neighbours along z and along data that the axis "expert" joins
    """

    names: tuple[str, ...] = AXES
    fold: tuple[int, int] = NO_FOLD

    @classmethod
    def of(
        cls: type[Numbers], names: Sequence[str], numbers: Iterable[int], fold: tuple[int, int] = NO_FOLD
    ) -> Numbers:
        """Make the tuple from names and numbers. The first names are `AXES`."""
        made: Numbers = tuple.__new__(cls, numbers)
        if names is not AXES and len(names) > len(AXES):
            made.__dict__.update(zip(names[len(AXES) :], made[len(AXES) :]), names=tuple(names))
        if fold != NO_FOLD:
            made.__dict__["fold"] = fold
        return made

    @property
    def expert_z(self) -> int:
        """Number for "expert_z", the ranks along z that hold the same experts."""
        return self.z // self.fold[0]

    @property
    def expert_data(self) -> int:
        """Number for "expert_data", the ranks along data that hold the same experts."""
        return self.data // self.fold[1]

    def _by_name(self) -> dict[str, int]:
        return dict(zip(self.names, self))

    def _asdict(self) -> dict[str, int]:
        return self._by_name()

    def _replace(self: Numbers, **numbers: int) -> Numbers:
        changed = self._by_name() | numbers
        if len(changed) > len(self):
            raise ValueError(f"{self} has no axis {', '.join(numbers.keys() - set(self.names))}")
        return self.of(self.names, changed.values(), self.fold)

    def without(self: Numbers, name: str) -> Numbers:
        """The tuple without one of the further axes."""
        left = {other: number for other, number in self._by_name().items() if other != name}
        return self.of(tuple(left), left.values(), self.fold)

    def __eq__(self, other: object) -> bool:
        return (
            tuple.__eq__(self, other)
            and self.names == getattr(other, "names", self.names)
            and self.fold == getattr(other, "fold", self.fold)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={number}' for name, number in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of, (self.names, tuple(self), self.fold)


class Coords(_ByAxis):
    """Coordinates of a rank along each axis.

    >>> Coords(x=1)._replace(z=2)
    Coords(x=1, y=0, z=2, data=0)
    """

    def __new__(cls, x: int = 0, y: int = 0, z: int = 0, data: int = 0, **others: int) -> Coords:
        return cls.of((*AXES, *others), (x, y, z, data, *others.values()))

    @property
    def expert(self) -> int:
        """Index along the axis "expert"."""
        return self.z % self.fold[0] + self.fold[0] * (self.data % self.fold[1])

    def __getattr__(self, name: str) -> int:
        """Index along "expert:3", the axis "expert" with its rank 3 as the first."""
        return (self.expert - first_of(name, self)) % prod(self.fold)

    def at(self, axis: str, index: int) -> Coords:
        """Coordinates of the rank that is number `index` of the axis, on which the other indices are the same.

        >>> GridShape(1, 1, 2, 4).folded(4).position(7).at("expert", 1), Coords(x=1).at("z", 2)
        (Coords(x=0, y=0, z=1, data=2), Coords(x=1, y=0, z=2, data=0))
        """
        axis, (along_z, along_data) = base_of(axis), self.fold
        if axis == EXPERT:
            low, high = index % along_z, index // along_z
            return self._replace(z=self.z // along_z * along_z + low, data=self.data // along_data * along_data + high)
        if axis == EXPERT_Z:
            return self._replace(z=index * along_z + self.z % along_z)
        if axis == EXPERT_DATA:
            return self._replace(data=index * along_data + self.data % along_data)
        return self._replace(**{axis: index})


FIRST = Coords()
"""Coordinates of the rank with the largest part of each matrix. Decisions by its sizes are the same on all ranks."""


class GridShape(_ByAxis):
    """Number of ranks along each axis of a grid.

    Parameters
    ----------
    x, y, z, data : int
        Ranks along the axes that every grid has.
    expert : int
        Ranks that share the experts of a network (`folded`). Default: 1. It adds no ranks.
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

    def __new__(cls, x: int, y: int, z: int, data: int = 1, expert: int = 1, **others: int) -> GridShape:
        for name in others:
            if not is_axis_name(name):
                raise GridError(
                    f"an axis of a grid cannot be named {name!r}: a name is one word that a shape does "
                    "not use for something else (size, names, ...)"
                )
        made = cls.of((*AXES, *others) if others else AXES, (x, y, z, data, *others.values()))
        return made if expert == 1 else made.folded(expert)

    def _asdict(self) -> dict[str, int]:
        return self._by_name() | ({EXPERT: self.expert} if self.expert > 1 else {})

    @property
    def expert(self) -> int:
        """Ranks along "expert"; 1 by default."""
        return prod(self.fold)

    def __getattr__(self, name: str) -> int:
        first_of(name, self)
        return prod(self.fold)

    def _replace(self, **numbers: int) -> GridShape:
        changed = super()._replace(**numbers)
        return changed if self.fold == NO_FOLD else self.of(self.names, changed).folded(self.expert)

    def folded(self, expert: int) -> GridShape:
        """The same shape with that many ranks along "expert": neighbours along z, then along data.

        Raises
        ------
        GridError
            Unless the number divides z, or is z times a divisor of data.

        Examples
        --------
        >>> from pmm3d import GridShape
        >>> shape = GridShape(1, 1, 2, 4).folded(4)
        >>> shape.expert, shape.expert_z, shape.expert_data, [shape.coords(rank).expert for rank in range(8)]
        (4, 1, 2, [0, 1, 2, 3, 0, 1, 2, 3])
        """
        expert = natural(expert, "expert is a number of ranks, at least 1", 1, GridError)
        along_z = gcd(self.z, expert)
        along_data, left = divmod(expert, along_z)
        if left or self.data % along_data or (along_data > 1 and along_z < self.z):
            fitting = [n for n in range(1, self.z + 1) if self.z % n == 0]
            fitting += [self.z * n for n in range(2, self.data + 1) if self.data % n == 0]
            raise GridError(
                f"{expert} ranks along expert do not fit grid {self}: the axis joins neighbours along z, then along "
                f"data. Possible numbers are {', '.join(map(str, fitting))}. For other numbers, choose the ranks along "
                "z and data"
            )
        return self.of(self.names, self, (along_z, along_data))

    def has(self, axis: str) -> bool:
        """Whether the shape has an axis of this name, also a folded one."""
        return axis in self.names or is_folded(axis)

    def in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes in the order of `names`, with folded axes last."""
        known = (*self.names, *FOLDED)
        return tuple(sorted(axes, key=lambda axis: known.index(base_of(axis))))

    def factors(self, axes: Iterable[str]) -> dict[str, int]:
        """Ranks along each axis of one view of all ranks: with folded axes in place of z and data if `axes` has one."""
        named = [axis for axis in axes if is_folded(axis)]
        if not named:
            return self._by_name()
        parts = {base_of(axis): axis for axis in named}
        others = {name: size for name, size in self._by_name().items() if name not in ("z", "data")}
        return others | {parts.get(axis, axis): getattr(self, axis) for axis in FOLDED}

    def strided(self, axis: str) -> tuple[int, int] | None:
        """Number and distance of the ranks along an axis; None if their distances differ.

        >>> GridShape(1, 1, 2, 4).folded(4).strided("expert"), GridShape(1, 1, 2, 4).folded(4).strided("expert_data")
        ((4, 1), (2, 4))
        """
        if not is_folded(axis):
            return getattr(self, axis), self.strides[self.names.index(axis)]
        (along_z, along_data), z, data = self.fold, self.strides[2], self.strides[3]
        if base_of(axis) == EXPERT_Z:
            return self.expert_z, z * along_z
        if base_of(axis) == EXPERT_DATA:
            return self.expert_data, data * along_data
        if along_data == 1 or along_z == 1 or data == z * along_z:
            return self.expert, z if along_z > 1 else data
        return None

    def rank_at(self, indices: Mapping[str, int]) -> int:
        """Rank with these indices along the axes of `factors`."""
        coords = Coords.of(self.names, [indices.get(name, 0) for name in self.names], self.fold)
        for axis, index in indices.items():
            if is_folded(axis):
                coords = coords.at(axis, (index + first_of(axis, self)) % getattr(self, axis))
        return self.rank(coords)

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
        return Coords.of(self.names, [rank // stride % size for size, stride in zip(self, self.strides)], self.fold)

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
        if any(map(is_folded, axes)):
            members = [coords]
            for axis in axes:
                members = [each.at(axis, index) for index in range(getattr(self, axis)) for each in members]
            return tuple(sorted(map(self.rank, members)))
        ranks = [self.rank(coords._replace(**dict.fromkeys(axes, 0)))]
        for stride, size, name in sorted(zip(self.strides, self, self.names)):
            if name in axes:
                ranks = [rank + index * stride for index in range(size) for rank in ranks]
        even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        return even if [*even] == ranks else tuple(ranks)

    def __str__(self) -> str:
        others = [
            f"{name} {size}" for name, size in zip((*self.names[3:], EXPERT), (*self[3:], self.expert)) if size > 1
        ]
        return f"{self.x}x{self.y}x{self.z}" + (f" ({', '.join(others)})" if others else "")


def is_axis_name(name: object) -> bool:
    """Whether an axis can have this name.

    >>> is_axis_name("seq"), is_axis_name("two words"), is_axis_name("size")
    (True, False, False)
    """
    return name in AXES or (isinstance(name, str) and name.isidentifier() and not hasattr(GridShape, name))


def is_folded(name: Any) -> bool:
    """Whether this is the name of a folded axis.

    >>> is_folded("expert_z"), is_folded("expert:3"), is_folded("z")
    (True, True, False)
    """
    return name in FOLDED or (isinstance(name, str) and name.startswith(FIRST_AT) and name[len(FIRST_AT) :].isdecimal())


def base_of(name: str) -> str:
    """The name of an axis without its first rank.

    >>> base_of("expert:3"), base_of("z")
    ('expert', 'z')
    """
    return name.partition(":")[0]


def first_of(name: str, of: object) -> int:
    """The rank that is the first of an axis: 3 for "expert:3". Raises AttributeError for another name without such an
    attribute."""
    if not is_folded(name):
        raise AttributeError(f"{type(of).__name__} has no attribute {name!r}")
    return int(name.partition(":")[2] or 0)


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
    folded = [name for name in names if is_folded(name)]
    others = [name for name in names if name not in folded]
    if folded and {"z", "data"} & {*others}:  # two views of the same ranks
        return False
    return all(map(is_axis_name, others)) and len({*map(base_of, folded), *others}) == len(names)
