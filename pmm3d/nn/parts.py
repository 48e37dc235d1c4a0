"""Parts of tensors whose rows and columns may be split over ranks: slices, splits, concatenation, the transpose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ..arrays import Array, copy_into
from ..comm import call
from ..errors import LayoutError
from ..layout import Layout, RaggedRows, natural, naturals, offsets, whole_number, without_order
from ..layout.layout import Unit
from .arithmetic import check_alike
from .compute import TensorSpec, check_type
from .ragged_rows import same_rows
from .tensor import Matrix, Tensor, as_tensor, relayout, results_of, summed

__all__ = ["columns", "concat", "matrix_transpose", "rows", "split"]

DIMS = "rows", "columns"


def columns(x: Matrix, start: int, stop: int, unit: int | None = None) -> Tensor:
    """Columns `start` to `stop` of each unit of columns, such as of each head.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). n is a multiple of the unit.
    start, stop : int
        In a unit, the first column, and the column after the last one; the same on all ranks, as `unit`.
    unit : int or None
        Number of columns of a unit. Default: n. The result is then x[:, start:stop].

    Returns
    -------
    Tensor
        (m, n / unit * (stop - start)), in the layout of x, with smaller units of columns.

    Raises
    ------
    LayoutError
        If n is no multiple of the unit, or if columns are outside the unit.

    Notes
    -----
    If ranks hold whole units (see `Layout.units`), nothing is sent. Otherwise x is relaid out first. A single unit is
    gathered over the columns.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.columns(DistMatrix.from_function(grid, (1, 6), lambda i, j: j), 1, 3, unit=3).gather()
    array([[1., 2., 4., 5.]])
    """
    return _slice("columns", as_tensor(x), 1, start, stop, unit)


def rows(x: Matrix, start: int, stop: int, unit: int | None = None) -> Tensor:
    """Rows `start` to `stop` of each unit of rows, such as of each sequence.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). m is a multiple of the unit.
    start, stop : int
        In a unit, the first row, and the row after the last one; the same on all ranks, as `unit`.
    unit : int or None
        Number of rows of a unit. Default: m. The result is then x[start:stop].

    Returns
    -------
    Tensor
        (m / unit * (stop - start), n), in the layout of x, with smaller units of rows. x[start:stop] has the units of x
        if it begins and ends between them, else units of 1.

    Raises
    ------
    LayoutError
        If m is no multiple of the unit, if rows are outside the unit, and for ragged rows.

    Notes
    -----
    If ranks hold whole units, nothing is sent. Otherwise x is relaid out first. Of a single unit whose rows are split,
    each rank receives the elements of its new shard that it did not store (phase "submatrix" of the ledger). The
    backward pass sends them back.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (6, 1), lambda i, j: i)
    ...     nn.rows(x, 0, 1, unit=3).gather().T, nn.Tensor(x)[1:3].gather().T
    (array([[0., 3.]]), array([[1., 2.]]))
    """
    return _slice("rows", as_tensor(x), 0, start, stop, unit)


def split(x: Matrix, sizes: Iterable[int], dim: int = 1) -> list[Tensor]:
    """Parts of each unit of columns (dim 1) or of rows (dim 0), a tensor for each part.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). n, or m, is a multiple of the sum of the sizes, which is the unit.
    sizes : iterable of int
        Number of columns, or rows, of each part, the same on all ranks.
    dim : int
        0 or 1. Default: 1.

    Raises
    ------
    LayoutError
        If the sizes do not fit, and for another `dim`.

    Notes
    -----
    split(x, [size, size, size]) returns queries, keys and values of a projection whose columns are stored head by head.
    If ranks hold whole heads, nothing is sent. Other messages are those of `columns` and of `rows`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     parts = nn.split(DistMatrix.from_function(grid, (1, 6), lambda i, j: j), [1, 2])
    ...     [part.gather().tolist() for part in parts]
    [[[0.0, 3.0]], [[1.0, 2.0, 4.0, 5.0]]]
    """
    x, dim = as_tensor(x), check_dim("split", dim)
    what = f"split: sizes are numbers of {DIMS[dim]}, one for each part"
    given = list(sizes) if isinstance(sizes, Iterable) else sizes
    edges = offsets(naturals(given, what, 0, LayoutError))
    if len(edges) == 1:
        raise LayoutError(f"{what}; got []")
    check_unit("split", x, edges[-1], dim)
    return _split("split", x, dim, edges[-1], list(pairwise(edges)))


def concat(tensors: Sequence[Matrix], dim: int = 0) -> Tensor:
    """The rows of several tensors below each other (dim 0), or their columns beside each other (dim 1).

    Parameters
    ----------
    tensors : sequence of Tensor or DistMatrix
        At least one. Their numbers of columns (dim 0) or of rows (dim 1) are equal. Partial sums are summed first.
    dim : int
        0 or 1. Default: 0.

    Returns
    -------
    Tensor
        In the layout of the first tensor. Along `dim` it has units of 1 if the tensors end inside units.

    Raises
    ------
    LayoutError
        If the sizes differ, without tensors, for another `dim`, and for ragged rows if their number would change.
    GridError, DTypeError
        If grids, libraries or types of the tensors differ.

    Notes
    -----
    If `dim` is not split, tensors in another layout are relaid out, and nothing else is sent. If it is split, each rank
    receives the elements of its shard of the result that it did not store (phase "submatrix" of the ledger), and the
    backward pass sends them back.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (1, 2), lambda i, j: j)
    ...     nn.concat([x, x]).gather().tolist(), nn.concat([x, x], 1).gather().tolist()
    ([[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0, 0.0, 1.0]])
    """
    parts = [summed(as_tensor(each)) for each in tensors]
    dim = check_dim("concat", dim)
    if not parts:
        raise LayoutError("concat: at least one tensor is needed")
    check_alike("concat", *parts)
    first = parts[0]
    check_type("concat", first.spec)
    for each in parts:
        if not same_rows(each.shape[1 - dim], first.shape[1 - dim]):
            raise LayoutError(
                f"concat: along dim {dim}, tensors have equal numbers of {DIMS[1 - dim]}; got "
                f"{', '.join(f'{one.shape[0]} x {one.shape[1]}' for one in parts)}"
            )
    edges, units = offsets([int(each.shape[dim]) for each in parts]), list(first.layout.units)
    units[dim] = _common_unit(units[dim], edges)
    layout = Layout(first.layout.rows, first.layout.cols, (), units)
    shape = (edges[-1], first.shape[1]) if dim == 0 else (first.shape[0], edges[-1])
    moves = layout.parts(first.grid.shape)[dim] > 1
    if moves:
        layout = without_order(layout)
        parts = [relayout(each, without_order(each.layout)) for each in parts]
    else:
        parts = [relayout(each, layout) for each in parts]
    cut = Cut(
        "concat", first.spec.like(shape, layout), [each.spec for each in parts], dim, max(1, edges[-1]),
        list(pairwise(edges)), moves,
    )  # fmt: skip
    out, wanted = cut.parent.new(), [each.requires_grad for each in parts]
    call(first.grid.engine, cut.join, out, *[each.shard for each in parts], writes=[out])

    def rule(gradient: Array) -> list[Array | None]:
        made = [spec.new() if wants else None for spec, wants in zip(cut.parts, wanted)]
        written = [each for each in made if each is not None]
        call(cut.parent.grid.engine, partial(cut.cut, backward=True), gradient, *made, writes=written)
        return made

    return parts[0].from_op(out, parts, rule, shape=shape, layout=layout)


def matrix_transpose(x: Matrix) -> Tensor:
    """The transpose of x. The same as x.T of a tensor.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout, also with partial sums.

    Returns
    -------
    Tensor
        (n, m). The axes that split the rows of x split its columns, and the other way round. Nothing is sent.

    Raises
    ------
    LayoutError
        For ragged rows.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.matrix_transpose(DistMatrix.from_function(grid, (1, 3), lambda i, j: j)).gather()
    array([[0.],
           [1.],
           [2.]])
    """
    x = as_tensor(x)
    if isinstance(x.shape[0], RaggedRows):
        x.shape[0].refuse()
    spec, turned = x.spec, x.spec.like(x.shape[::-1], x.layout.T)

    def transposed(like: TensorSpec, array: Array, name: str) -> Array:
        out = like.new()
        with like.grid.ledger.passing(name):
            call(like.grid.engine, partial(copy_into, like.library), array.T, out, writes=[out])
        return out

    return x.from_op(
        transposed(turned, x.shard, "matrix_transpose"),
        (x,),
        lambda gradient: (transposed(spec, gradient, "matrix_transpose backward"),),
        shape=turned.shape,
        layout=turned.layout,
    )


class Cut(NamedTuple):
    """A tensor and its parts along a dim.

    parent   spec of the whole tensor
    parts    specs of the parts
    unit     number of rows or columns of which each part has the range (start, stop)
    moves    whether parts are moved between ranks; there is one unit then. Otherwise each rank has whole units
    """

    name: str
    parent: TensorSpec
    parts: list[TensorSpec]
    dim: int
    unit: int
    ranges: list[tuple[int, int]]
    moves: bool

    def cut(self, local: Array, *parts: Array | None, backward: bool = False) -> None:
        """Fill the parts, except those that are None, from the whole tensor. Collective if parts are moved."""
        matrix = self.parent.matrix(local)
        with self.parent.grid.ledger.passing(self.name + " backward" * backward):
            for (start, stop), spec, part in zip(self.ranges, self.parts, parts):
                if part is None:
                    continue
                if self.moves:
                    part[...] = matrix.submatrix(*self._window(start, stop), spec.layout).local
                else:
                    self._in_units(part, stop - start)[...] = self._in_units(local, self.unit)[:, :, start:stop]

    def join(self, local: Array, *parts: Array | None, backward: bool = False) -> None:
        """Fill the whole tensor from the parts. A part that is None is zero. Collective if parts are moved."""
        covered = sum(stop - start for start, stop in self.ranges)
        matrix = self.parent.matrix(local)
        with self.parent.grid.ledger.passing(self.name + " backward" * backward):
            if covered < self.unit or any(part is None for part in parts):
                local[...] = 0
            for (start, stop), spec, part in zip(self.ranges, self.parts, parts):
                if part is None:
                    continue
                if self.moves:
                    matrix.set_submatrix(*self._window(start, stop), spec.matrix(part))
                else:
                    self._in_units(local, self.unit)[:, :, start:stop] = self._in_units(part, stop - start)

    def _window(self, start: int, stop: int) -> tuple[slice, slice]:
        return (slice(start, stop), slice(None)) if self.dim == 0 else (slice(None), slice(start, stop))

    def _in_units(self, array: Array, size: int) -> Array:
        """View of a contiguous local array in which the last but one dim, or the last one, counts a unit's rows or
        columns: (units, 1, rows, columns) or (rows, units, columns)."""
        height, width = self.parent.local_shape
        if self.dim == 0:
            return array.reshape(height // self.unit, 1, size, width)
        return array.reshape(height, width // self.unit, size)


def _slice(name: str, x: Tensor, dim: int, start: int, stop: int, unit: int | None) -> Tensor:
    unit = x.shape[dim] if unit is None else unit
    check_unit(name, x, unit, dim)
    try:
        start, stop = whole_number(start), whole_number(stop)
    except TypeError:
        raise LayoutError(f"{name}: start and stop are whole numbers; got {start!r} and {stop!r}") from None
    if not 0 <= start <= stop <= unit:
        raise LayoutError(f"{name}: {start} to {stop} are outside of a unit of {unit} {name}")
    return _split(name, x, dim, unit, [(start, stop)])[0]


def check_unit(name: str, x: Tensor, unit: int, dim: int = 1) -> None:
    """Raises LayoutError if the rows or columns of x are no whole units."""
    size = x.shape[dim]
    try:
        unit = whole_number(unit)
    except TypeError:
        raise LayoutError(f"{name}: a unit is a whole number of {DIMS[dim]}; got {unit!r}") from None
    if (unit < 1 and size) or (unit and size % unit):
        raise LayoutError(f"{name}: {size} {DIMS[dim]} are no whole number of units of {unit}")


def check_dim(name: str, dim: int) -> int:
    """Return the dim as an int. Raises LayoutError if it is not 0 or 1."""
    return natural(dim, f"{name}: dim is 0, over the rows, or 1, over the columns", 0, LayoutError, most=1)


def _split(name: str, x: Tensor, dim: int, unit: int, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """The rows or columns (start, stop) of each unit, a tensor for each range."""
    unit = max(1, unit)
    of_all = dim == 0 and unit == x.shape[0]
    moves = of_all and x.layout.parts(x.grid.shape)[0] > 1
    held = x.layout.units[dim]
    x = summed(relayout(x, without_order(x.layout))) if moves else in_units(x, unit, dim)
    size, now, sizes, units = x.shape[dim], x.layout.units[dim], list(x.shape), list(x.layout.units)
    count = now // unit if isinstance(now, int) else 1
    parts = list[TensorSpec]()
    for start, stop in ranges:
        sizes[dim] = size // unit * (stop - start)
        units[dim] = _common_unit(held, (start, stop)) if of_all else max(1, count * (stop - start))
        layout = Layout(x.layout.rows, x.layout.cols, x.layout.sums, units)
        parts.append(x.spec.like((sizes[0], sizes[1]), layout))
    cut = Cut(name, x.spec, parts, dim, unit, ranges, moves)
    made = [part.matrix(part.new()) for part in parts]
    arrays = [part.local for part in made]
    call(x.grid.engine, cut.cut, x.shard, *arrays, writes=arrays)

    def rule(*gradients: Array | None) -> tuple[Array]:
        dx = cut.parent.new()
        call(cut.parent.grid.engine, partial(cut.join, backward=True), dx, *gradients, writes=[dx])
        return (dx,)

    return results_of(made, (x,), rule)


def _common_unit(unit: Unit, edges: Sequence[int]) -> int:
    """The unit, if all edges are between units, else 1."""
    return unit if isinstance(unit, int) and not any(edge % unit for edge in edges) else 1


def in_units(x: Tensor, unit: int, dim: int = 1) -> Tensor:
    """Relayout x so that its columns (or rows) are split in whole units. If there is one unit, they are gathered.
    Columns of ragged rows are not gathered: one rank holds the unit."""
    axes, units = [x.layout.rows, x.layout.cols], list(x.layout.units)
    held = units[dim]
    gathers = unit == x.shape[dim] and not isinstance(x.shape[0], RaggedRows)
    if gathers and x.layout.parts(x.grid.shape)[dim] > 1:
        axes[dim], units[dim] = (), 1
    elif not isinstance(held, int) or held % unit:
        units[dim] = unit
    return relayout(x, Layout(axes[0], axes[1], x.layout.sums, units))
