"""Layouts: the role of each axis of a grid for a matrix, and the rows and columns that each rank stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from ..errors import LayoutError
from .cuts import natural
from .shape import AXES, EXPERT, FOLDED, Coords, GridShape, base_of, can_be_named, is_axis_name, is_folded

if TYPE_CHECKING:
    from .order import RowOrder

Axes = str | tuple[str, ...] | list[str]
Unit = int | tuple[tuple[str, Any], ...]
"""Number of rows (or columns) that no cut separates: one number for all axes of the dim, or (axis, number) for each
axis whose number is not 1. ("", RowOrder) if rows are stored in another order than ascending."""
Units = tuple[Unit, Unit]
SINGLE: Units = 1, 1
"""Units of a layout whose rows and columns may be cut anywhere."""


class Box(NamedTuple):
    """Rows r0:r1 and columns c0:c1 of a matrix.

    Parameters
    ----------
    r0, r1, c0, c1 : int
        Bounds of the rows and of the columns, counted from 0; the ends are not included.

    Attributes
    ----------
    shape : tuple of int
        Number of rows and of columns.
    size : int
        Number of elements.

    Examples
    --------
    >>> from pmm3d import Box
    >>> Box(0, 4, 0, 6) & Box(2, 8, 5, 9)
    Box(r0=2, r1=4, c0=5, c1=6)
    """

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.r1 - self.r0, self.c1 - self.c0

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def __and__(self, other: Box) -> Box:
        r0, c0 = max(self.r0, other.r0), max(self.c0, other.c0)
        return Box(r0, max(r0, min(self.r1, other.r1)), c0, max(c0, min(self.c1, other.c1)))

    def moved(self, rows: int, cols: int) -> Box:
        """The box, moved down and to the right."""
        return Box(self.r0 + rows, self.r1 + rows, self.c0 + cols, self.c1 + cols)

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Slices that cut this box out of an array that contains another box.

        Parameters
        ----------
        outer : Box
            Box of the array.

        Examples
        --------
        >>> from pmm3d import Box
        >>> Box(2, 4, 0, 3).within(Box(2, 8, 0, 6))
        (slice(0, 2, None), slice(0, 3, None))
        """
        return slice(self.r0 - outer.r0, self.r1 - outer.r0), slice(self.c0 - outer.c0, self.c1 - outer.c0)


EMPTY = Box(0, 0, 0, 0)


class RaggedRows:
    """Number of rows in a shape, if it differs among the ranks along the axes that split the rows.

    A rank does not know the numbers of other ranks. Ranks along the other axes have the same number. `Layout.box`
    counts this rank's rows from 0.

    here   number of rows of this rank

    Raises LayoutError if it is used as a number.

        >>> Layout("z", "y").box((RaggedRows(3), 6), GridShape(1, 2, 4), GridShape(1, 2, 4).coords(7))
        Box(r0=0, r1=3, c0=3, c1=6)
    """

    def __init__(self, here: int):
        self.here = here

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedRows) and other.here == self.here

    def __hash__(self) -> int:
        return hash((RaggedRows, self.here))

    def __repr__(self) -> str:
        """Text that is the same on all ranks, because the ranks compare calls with ragged tensors."""
        return "ragged"

    def refuse(self, *_: object) -> NoReturn:
        raise LayoutError(
            "the rows are ragged: a rank does not know how many rows other ranks have, so rows can "
            "neither be moved, nor counted, nor averaged over. Give a layer the axis of its input's "
            "columns (cols=), or make a matrix of known shape: "
            "DistMatrix.from_local(grid, x.local, shape, layout=layout)"
        )

    __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse
    __rtruediv__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = refuse


@dataclass(frozen=True, repr=False)
class Layout:
    """How the axes of a grid distribute a matrix.

    Each axis splits the rows, or splits the columns, or has partial sums. Along an axis that is not named, the matrix
    is replicated.

    Parameters
    ----------
    rows, cols : str or tuple of str
        Axes that split the rows and the columns, from major to minor.
    sums : str or tuple of str
        Axes of partial sums: the matrix is the sum of the shards along them.
    units : tuple of two int or dict
        Numbers of rows and of columns that no cut separates, such as those of a sequence, or of a head. A dict contains
        the units of some axes; other axes cut anywhere. The unit of an axis must be a multiple of the units of the axes
        after it. A dict also contains the order in which rows are stored, if `nn.transformer.token_layout` made it.

    Attributes
    ----------
    A, B, C : Layout
        The layouts of operands and result for which `matmul` redistributes nothing.

    Raises
    ------
    LayoutError
        For a wrong name of an axis, an axis that is named twice, and wrong units. Methods that take a grid raise it if
        the grid has no such axis, and `box` if a dim is no multiple of its unit.

    Notes
    -----
    Layout(rows=("z", "x"), cols="y") cuts the rows into Gz parts and each part into Gx, and the columns into Gy. With
    rows=("z", "y") and units=({"z": 128}, 1), z cuts between sequences of 128 rows, and y cuts inside them. Sizes need
    not be multiples: parts differ by at most one unit.

    The folded axes "expert", "expert_z" and "expert_data" are another view of the ranks along z and data (`Grid`), so a
    layout names axes of one view. "expert:3" is the axis "expert" with its rank 3 as the first: with a unit of all
    rows, only the ranks of index 3 store the matrix.

    Examples
    --------
    >>> from pmm3d import GridShape, Layout
    >>> Layout("z", "y").box((10, 6), GridShape(1, 2, 4), GridShape(1, 2, 4).coords(7))
    Box(r0=8, r1=10, c0=3, c1=6)
    >>> Layout("z", units=(5, 1)).box((20, 6), GridShape(1, 1, 3), GridShape(1, 1, 3).coords(0))
    Box(r0=0, r1=10, c0=0, c1=6)
    >>> Layout(("z", "y"), units=({"z": 5}, 1)).box((20, 6), GridShape(1, 2, 2), GridShape(1, 2, 2).coords(1))
    Box(r0=5, r1=10, c0=0, c1=6)
    >>> Layout("z", sums="y").on(GridShape(2, 1, 4)), Layout("z", sums="y").summed
    (Layout(rows=('z',), cols=()), Layout(rows=('z',), cols=()))
    """

    rows: tuple[str, ...] = ()
    cols: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    units: Units = SINGLE

    named: ClassVar[tuple[str, ...]]
    """Axes that do not replicate. Each layout has its own."""

    A: ClassVar[Layout]
    B: ClassVar[Layout]
    C: ClassVar[Layout]

    def __init__(
        self, rows: Axes = (), cols: Axes = (), sums: Axes = (), units: Sequence[Unit | Mapping[str, int]] = SINGLE
    ):
        fields = vars(self)
        for name, value in (("rows", rows), ("cols", cols), ("sums", sums)):
            if not isinstance(value, (str, tuple, list)):
                raise LayoutError(f"the {name} of a layout are an axis, or a tuple of them; got {value!r}")
            fields[name] = (value,) if isinstance(value, str) else tuple(value)
        fields["units"] = units if units is SINGLE else _checked_units(units, fields["rows"], fields["cols"])
        fields["named"] = fields["rows"] + fields["cols"] + fields["sums"]
        if fields["sums"] and any(":" in str(axis) for axis in fields["sums"]):
            raise LayoutError(f"{self} has partial sums over an axis with a first rank: name {EXPERT!r} for sums")
        try:
            if can_be_named(self.named):
                return
        except TypeError:  # a name is unhashable
            pass
        for axis in self.named:
            if not is_axis_name(axis) and not is_folded(axis):
                raise LayoutError(
                    f"{self} names the axis {axis!r}, which no grid can have. Every grid has the axes "
                    f"{', '.join((*AXES, *FOLDED))}, and the axes that were passed as axes=, seq= and pipe="
                )
        if {"z", "data"} & {*self.named} and any(map(is_folded, self.named)):
            raise LayoutError(
                f"{self} names z or data together with {', '.join(filter(is_folded, self.named))}, which is another "
                f"view of the ranks along z and data: name {', '.join(FOLDED)} instead"
            )
        named = [base_of(axis) if is_folded(axis) else axis for axis in self.named]
        twice = sorted({axis for axis in named if named.count(axis) > 1})
        raise LayoutError(
            f"{self} names the axis {', '.join(twice)} twice; an axis can split one dim, once, or hold partial sums"
        )

    def __str__(self) -> str:
        sums = f", sums={self.sums}" if self.sums else ""
        units = "" if self.units == SINGLE else f", units={self.units}"
        return f"Layout(rows={self.rows}, cols={self.cols}{sums}{units})"

    __repr__ = __str__

    @cached_property
    def splitting(self) -> tuple[str, ...]:
        """Axes that split rows or columns."""
        return self.rows + self.cols

    @cached_property
    def summed(self) -> Layout:
        """Layout of the sum: the same layout without `sums`."""
        return Layout(self.rows, self.cols, units=self.units) if self.sums else self

    @cached_property
    def T(self) -> Layout:
        """The layout of the transpose."""
        turned = Layout(self.cols, self.rows, self.sums, self.units[::-1])
        vars(turned)["T"] = self
        return turned

    def on(self, grid: GridShape) -> Layout:
        """The layout without axes of one rank and units without effect. Equal distributions compare equal."""
        return _reduced(self, grid)

    def parts(self, grid: GridShape) -> tuple[int, int]:
        """Number of parts into which rows and columns are cut."""
        self.check_axes(grid)
        return grid.along(self.rows), grid.along(self.cols)

    def box(self, shape: tuple[int, int], grid: GridShape, coords: Coords | None) -> Box:
        """Rows and columns that one rank stores.

        Parameters
        ----------
        coords : Coords or None
            Place of the rank. Axes that are left out have index 0. None: an idle rank.

        Returns
        -------
        Box
            The rows and columns; an empty box for an idle rank.
        """
        if coords is None:
            return EMPTY
        if isinstance(shape[0], RaggedRows):
            return _box(self, (0, shape[1]), grid, coords)._replace(r0=0, r1=shape[0].here)
        return _box(self, shape, grid, coords)

    def check_axes(self, grid: GridShape) -> None:
        """Raise LayoutError if the grid lacks one of the axes."""
        for axis in self.named:
            if not grid.has(axis):
                raise LayoutError(f"{self} names the axis {axis!r}; the axes of this grid are {', '.join(grid.names)}")

    def is_first(self, coords: Coords) -> bool:
        """Whether a rank is the first of those that store the same elements.

        Returns
        -------
        bool
            True if its index is 0 along each axis that replicates.
        """
        if any(map(is_folded, self.named)):
            named = {*map(base_of, self.named)}
            others = [axis for axis in coords.names if axis not in ("z", "data")]
            return not any(getattr(coords, axis) for axis in (*others, *FOLDED) if axis not in named)
        return {axis for axis, index in zip(coords.names, coords) if index}.issubset(self.named)

    def replicas(self, grid: GridShape) -> int:
        """Number of ranks that store each element, or the same partial sum."""
        self.check_axes(grid)
        return grid.size // grid.along(self.named)


layout_of = lru_cache(maxsize=4096)(Layout)
"""`Layout`, cached for code that needs the same layouts in each step."""
Layout.A = Layout(rows=("z", "x"), cols=("y",))
Layout.B = Layout(rows=("y", "z"), cols=("x",))
Layout.C = Layout(rows=("z", "y"), cols=("x",))


def batch_layout(cols: str | None = "y") -> Layout:
    """Layout of a batch: rows split over data and z, columns (features) over one axis, or not split if `cols` is None.

    The other axes replicate.

        >>> batch_layout("y")
        Layout(rows=('data', 'z'), cols=('y',))
    """
    return Layout(("data", "z"), cols or ())


@lru_cache(maxsize=1024)
def _reduced(layout: Layout, grid: GridShape) -> Layout:
    layout.check_axes(grid)
    rows, cols, sums = [
        tuple([axis for axis in axes if getattr(grid, axis) > 1]) for axes in (layout.rows, layout.cols, layout.sums)
    ]
    units: Any = SINGLE
    if layout.units != SINGLE:
        units = [unit if axes else order_entry(unit) or 1 for unit, axes in zip(layout.units, (rows, cols))]
    return Layout(rows, cols, grid.in_order(sums), units)


@lru_cache(maxsize=4096)
def _box(layout: Layout, shape: tuple[int, int], grid: GridShape, coords: Coords) -> Box:
    try:
        row_unit, col_unit = layout.units
        return Box(
            *_range(shape[0], layout.rows, row_unit, grid, coords),
            *_range(shape[1], layout.cols, col_unit, grid, coords),
        )
    except AttributeError:
        layout.check_axes(grid)
        if coords.names == grid.names:
            raise
        return _box(layout, shape, grid, grid.position(grid.rank(coords)))


def _range(size: int, axes: tuple[str, ...], unit: Unit, grid: GridShape, coords: Any) -> tuple[Any, Any]:
    """First and last index of a part. coords: its indices, numbers or arrays."""
    start: Any = 0
    for axis, multiple in zip(axes, cutting_units(size, axes, unit, grid)):
        index, (small, larger) = getattr(coords, axis), divmod(size // multiple, getattr(grid, axis))
        is_larger = index < larger
        start = start + (index * small + larger + (index - larger) * is_larger) * multiple
        size = (small + is_larger) * multiple
    return start, start + size


def row_range(layout: Layout, rows: int, grid: GridShape, coords: Any) -> tuple[Any, Any]:
    """First row of a part, and first row after it. coords: indices along the axes that split the rows, numbers or
    arrays."""
    return _range(rows, layout.rows, layout.units[0], grid, coords)


def unit_of(unit: Unit, axis: str) -> int:
    """Unit of the cuts of an axis along a dim.

    >>> unit_of(4, "z"), unit_of((("z", 4),), "z"), unit_of((("z", 4),), "y")
    (4, 4, 1)
    """
    return unit if isinstance(unit, int) else dict(unit).get(axis, 1)


def order_of(unit: Unit | Mapping[str, Any]) -> RowOrder | None:
    """Order in which the rows (or columns) of a dim are stored; None: ascending.

    >>> from .order import RowOrder
    >>> order_of((("", RowOrder("zigzag", 8, 2, 1)), ("data", 8))), order_of(8)
    (RowOrder(name='zigzag', length=8, block=2, ranks=1), None)
    """
    return None if isinstance(unit, int) else dict(unit).get("")


def without_order(layout: Layout) -> Layout:
    """The layout with rows and columns stored in ascending order.

    >>> from .order import RowOrder
    >>> without_order(Layout("z", units=({"": RowOrder("zigzag", 8, 2, 1)}, 1)))
    Layout(rows=('z',), cols=())
    """
    units = [unit if isinstance(unit, int) else tuple(entry for entry in unit if entry[0]) for unit in layout.units]
    return layout if units == [*layout.units] else Layout(layout.rows, layout.cols, layout.sums, units)


def order_entry(unit: Unit | Mapping[str, Any]) -> tuple[tuple[str, RowOrder], ...]:
    """The entry of a unit that contains its order; none if the order is ascending."""
    order = order_of(unit)
    return () if order is None else (("", order),)


def cutting_units(size: int, axes: tuple[str, ...], unit: Unit, grid: GridShape) -> list[int]:
    """Unit of the cuts of each axis along a dim of this size; 1 for an axis of one rank.

    Raises LayoutError if the size is not a multiple of the unit.

        >>> cutting_units(12, ("z", "y"), 4, GridShape(1, 1, 2)), cutting_units(10, ("z",), 4, GridShape(1, 1, 1))
        ([4, 1], [1])
    """
    if unit == 1:
        return [1] * len(axes)
    units = [unit_of(unit, axis) if getattr(grid, axis) > 1 else 1 for axis in axes]
    largest = max(units, default=1)
    if size % largest:
        raise LayoutError(
            f"a dim of {size} is cut in units of {largest} by {', '.join(axes)}: it must be a multiple of the unit"
        )
    return units


def _checked_units(units: Any, *dims: tuple[str, ...]) -> Units:
    what = (
        "the units of a layout are two whole numbers of at least 1: rows and columns that no cut separates. Each "
        "may be a dict of such numbers by axis"
    )
    if not isinstance(units, (tuple, list)) or len(units) != 2:
        raise LayoutError(f"{what}; got {units!r}")
    row_unit, col_unit = (_checked_unit(unit, axes, what) for unit, axes in zip(units, dims))
    return row_unit, col_unit


def _checked_unit(unit: Any, axes: tuple[str, ...], what: str) -> Unit:
    """Unit of a dim that these axes cut: a number if it is the same for all axes. Raises LayoutError."""
    if not isinstance(unit, (Mapping, tuple)):
        return natural(unit, what, 1, LayoutError)
    try:
        by_axis = {axis: natural(number, what, 1, LayoutError) for axis, number in dict(unit).items() if axis}
    except (TypeError, ValueError):
        raise LayoutError(f"{what}; got {unit!r}") from None
    units, order = [by_axis.get(axis, 1) for axis in axes], order_entry(unit)
    for axis, (before, after) in zip(axes[1:], pairwise(units)):
        if before % after:
            raise LayoutError(
                f"axis {axis} cuts in units of {after}, and the axis before it in units of {before}: a "
                "unit must be a multiple of those of the axes after it"
            )
    if len(set(units)) == 1 and not order:
        return units[0]
    return (
        *order,
        *sorted((axis, number) for axis, number in by_axis.items() if number > 1 and axis in (axes or by_axis)),
    ) or 1
