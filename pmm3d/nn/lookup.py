"""Rows by their indices: lookups, also in tables of embeddings, and their adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..comm import Grid, call
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import LABEL_DTYPE, Box, Layout, natural, order_of
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from ..product.checks import passed_contents
from .compute import TensorSpec, array_namespace, check_type, computing, local_results
from .contract import Gradient, LazyMatrix
from .dense import OTHER, weight_axis
from .parallel import BackwardSync
from .parameter import Parameter
from .parts import matrix_transpose
from .tensor import Matrix, Tensor, as_tensor, relayout

__all__ = ["scatter_add", "take"]


class Indices(NamedTuple):
    """Words for the errors of an operation about its indices.

    name     the operation
    what     the indices
    shape    their shape
    one      an index
    range    the number of valid indices, `count`
    """

    name: str
    what: str
    shape: str
    one: str
    range: str


TAKEN = Indices("take", "indices", "(number of rows, 1)", "the index", "x has {count} rows")
ADDED = Indices("scatter_add", "indices", "(rows of x, 1)", "the index", "the result has {count} rows")


def take(x: Matrix, indices: Matrix | Sequence[int] | np.ndarray) -> Tensor:
    """Rows of x by their indices. Row i of the result is row indices[i] of x.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout.
    indices : Tensor, DistMatrix, or array
        (k, 1), integers from 0 to m - 1, in any layout of the rows; or k integers on the host, the same on all ranks.

    Returns
    -------
    Tensor
        (k, n). Rows are split like the indices, but not over x and y; those of a host array over data and z. Columns
        are over y, with partial sums over x. A relayout completes the sums.

    Raises
    ------
    Pmm3dError
        On every rank, for an index outside x.
    LayoutError, DTypeError
        On every rank, if indices are not a column of integers, and for ragged rows of x.
    GridError
        On every rank, if the indices are on another Grid.

    Notes
    -----
    x is relaid out: x splits its rows, y its columns, and it is gathered over the other axes. A rank needs memory for
    1/(Gx Gy) of x. The ranks compare the check of the indices by an all-reduce of 24 bytes. The gradient is a
    `scatter_add`: the all-gather becomes a reduce-scatter.

    A step with a host array is not replayed, because it may differ from step to step. Pass a DistMatrix of int64.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (3, 2), lambda i, j: 10 * i + j)
    ...     nn.take(x, [2, 0, 2]).gather()
    array([[20., 21.],
           [ 0.,  1.],
           [20., 21.]])
    """
    x = as_tensor(x)
    check_type("take", x.spec)
    table = matrix_transpose(x)
    matrix = checked(TAKEN, _matrix_of(x, TAKEN, indices, table.shape[1]), table.shape[1], x.grid)
    return looked_up("take", matrix, table)


def scatter_add(x: Matrix, indices: Matrix | Sequence[int] | np.ndarray, rows: int) -> Tensor:
    """Sums of rows with equal indices. Row j of the result is the sum of the rows i of x with indices[i] = j.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (k, n), in any layout.
    indices : Tensor, DistMatrix, or array
        As in `take`, from 0 to rows - 1.
    rows : int
        Number of rows of the result. Rows whose index does not occur are 0.

    Returns
    -------
    Tensor
        (rows, n). Rows are over x and columns over y, with partial sums over the axes that split the rows of the
        indices. A relayout completes the sums.

    Raises
    ------
    Pmm3dError
        On every rank, for an index outside the result.
    LayoutError, DTypeError
        On every rank, if indices are not a column of integers, one for each row of x.
    GridError
        On every rank, if the indices are on another Grid.

    Notes
    -----
    The rows of x are relaid out like those of the indices, and its columns over y. A rank needs memory for 1/(Gx Gy) of
    the result. Equal indices on a rank are summed in ascending order of the rows. The gradient is a `take`, with sums
    over x.

    Host arrays and replays: as in `take`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (3, 2), lambda i, j: 10 * i + j)
    ...     nn.scatter_add(x, [1, 0, 1], 2).gather()
    array([[10., 11.],
           [20., 22.]])
    """
    x = as_tensor(x)
    count = natural(rows, "scatter_add: rows is a whole number of at least 0", 0, LayoutError)
    check_type("scatter_add", x.spec)
    matrix = checked(ADDED, _matrix_of(x, ADDED, indices, count), count, x.grid)
    if matrix.shape[0] != x.shape[0]:
        raise LayoutError(f"scatter_add: x has {x.shape[0]} rows, and there are {matrix.shape[0]} indices")
    matrix = _without_x_and_y(matrix)
    of_rows, (row_unit, _) = matrix.layout.rows, matrix.layout.units
    unit = unit_of(x.layout.units[1], "y")
    x = relayout(x, layout_of(of_rows, ("y",), (), (row_unit, unit)))
    spec, summed_over = x.spec, layout_of(of_rows, ("y",), ("x",), (row_unit, unit))
    table = spec.like((spec.shape[1], count), layout_of(("y",), ("x",), (), (unit, 1)))
    box = table.layout.box(table.shape, table.grid.shape, table.grid.coords)
    lookup, out = Lookup("scatter_add", table), table.new()
    index, *inside = local_results(x.grid, partial(_own_indices, matrix, x.library, box, count))
    call(x.grid.engine, partial(lookup.add, 0, "scatter_add"), x.shard, out, index, *inside, writes=[out])

    def rule(gradient: Array, *places: Array) -> tuple[Gradient]:
        dx = spec.new()
        call(spec.grid.engine, partial(lookup.columns, "scatter_add backward"), gradient, dx, *places, writes=[dx])
        return (Gradient(dx, summed_over),)

    saved = dict(zip(("scatter_add.index", "scatter_add.inside"), (index, *inside)))
    layout = layout_of(("y",), ("x",), of_rows, (unit, 1))
    return matrix_transpose(x.from_op(out, (x,), rule, keep=saved, shape=table.shape, layout=layout))


def looked_up(name: str, matrix: DistMatrix, table: Tensor) -> Tensor:
    """Columns of a table by indices that were checked, as rows; see `transformer.embedding`."""
    matrix = _without_x_and_y(matrix)
    rows = matrix.layout.rows
    k = weight_axis(table.layout)
    gathers = k is not None and isinstance(table, Parameter)
    k = k or "y"
    if not gathers:
        table = relayout(table, layout_of((k,), (OTHER[k],)))
    units = table.layout.units
    layout = layout_of(rows, (k,), (OTHER[k],), (matrix.layout.units[0], units[0]))
    spec = table.spec.like((matrix.shape[0], table.shape[0]), layout)
    full = BackwardSync.of(table.grid).weights.gathered(table, table.tape.phase) if gathers else table.shard
    engine, shape, out = table.grid.engine, tuple(full.shape), spec.new()
    lookup = Lookup(name, table.spec)
    index, *inside = local_results(table.grid, partial(_own_indices, matrix, spec.library, table.box, table.shape[1]))

    def rule(gradient: Array, *places: Array) -> tuple[LazyMatrix]:
        def fill(out: Array, beta: int, _: slice) -> None:
            written = {"updates" if beta else "writes": [out]}
            call(engine, partial(lookup.add, beta, f"{name} backward"), gradient, out, *places, **written)

        return (LazyMatrix(layout_of((k,), (OTHER[k],), rows, units), shape, fill, "reduce dW"),)

    call(engine, partial(lookup.columns, name), full, out, index, *inside, writes=[out])
    saved = dict(zip((f"{name}.index", f"{name}.inside"), (index, *inside)))
    return table.from_op(out, (table,), rule, keep=saved, shape=spec.shape, layout=layout)


class Lookup(NamedTuple):
    """Columns of a table by their indices, as rows, and the adjoint, on this rank.

    index    for each row, a column of the rank's block of the table
    inside   whether the block has the row's column; left out if it has all columns
    """

    name: str
    table: TensorSpec

    def columns(self, passes: str, full: Array, out: Array, index: Array, *inside: Array) -> None:
        """Set the rows of `out` to columns of the block `full`, or to 0. passes: name of the passes over memory."""
        xp, grid, library = array_namespace(full), self.table.grid, self.table.library
        with computing(grid, self.name, name=passes):
            if full.shape[1]:
                out[...] = library.columns(full, index).T
            if inside:
                out[...] = xp.where(inside[0], out, 0)

    def add(self, beta: int, passes: str, rows: Array, out: Array, index: Array, *inside: Array) -> None:
        """Compute out = beta out + the sum of the rows of each column."""
        xp, grid, library = array_namespace(out), self.table.grid, self.table.library
        with computing(grid, self.name, name=passes):
            if not beta:
                out[...] = 0
            if out.shape[1]:
                own = xp.where(inside[0], rows, 0) if inside else rows
                library.add_columns(out, index, library.astype(own, library.dtype(out)), grid.workspace)


def _matrix_of(x: Tensor, words: Indices, indices: Any, count: int) -> Matrix:
    """Indices as a matrix. A host array is split over data and z. count: number of valid indices."""
    if isinstance(indices, (Tensor, DistMatrix)):
        return indices
    host, grid, name = np.asarray(indices), x.grid, words.name
    if grid.engine.recorder is not None:
        grid.engine.recorder.refuse(f"the indices of {name} are in a host array, which may differ from step to step")
    with grid.collective_call(name, host.shape, str(host.dtype), *passed_contents(grid, host)):
        if host.ndim != 1 or not (host.dtype.kind in "iu" or not host.size):
            raise DTypeError(
                f"{name}: indices are a list of integers, or a DistMatrix of one column; got an array of "
                f"{host.dtype} of shape {host.shape}"
            )
        if host.dtype.kind == "u":  # large values would become negative
            _check_values(words, host, count, Layout(), 0)
    layout, shape = Layout(("data", "z")), (len(host), 1)
    box = layout.box(shape, grid.shape, grid.coords)
    local = x.library.made(box.shape, LABEL_DTYPE, lambda: host[box.r0 : box.r1, None].astype(LABEL_DTYPE))
    return DistMatrix(grid, local, shape, layout)


def _without_x_and_y(matrix: DistMatrix) -> DistMatrix:
    """Indices whose rows are not split over x and y."""
    rows = tuple([axis for axis in matrix.layout.rows if axis not in OTHER])
    if matrix.layout.named == rows:
        return matrix
    return redistributed(matrix, layout_of(rows, (), (), (matrix.layout.units[0], 1)))


def redistributed(matrix: DistMatrix, layout: Layout) -> DistMatrix:
    """Indices in another layout, with the same `labels_below`."""
    local = local_results(matrix.grid, lambda: matrix.redistribute(layout).local)
    moved = DistMatrix(matrix.grid, local, matrix.shape, layout)
    moved.labels_below = matrix.labels_below
    return moved


def _own_indices(matrix: DistMatrix, library: NumpyLibrary, box: Box, count: int) -> tuple[Array, ...]:
    """For each index of this rank, the column in the rank's block of the table, and whether the index is in the block.
    The second array is left out if the block has all `count` columns."""
    held = matrix.local.reshape(-1)
    if matrix.library != library:
        held = library.from_numpy(matrix.library.to_numpy(held), "int64")
    held = library.astype(held, "int64")
    if box.shape[1] == count:
        return (held,)
    inside = (held >= box.c0) & (held < box.c1)
    return (held - box.c0).clip(0, max(0, box.shape[1] - 1)), inside[:, None]


def checked(words: Indices, indices: Matrix, count: int, grid: Grid) -> DistMatrix:
    """Indices without partial sums, which `check_indices` accepts."""
    matrix = indices.value if isinstance(indices, Tensor) else indices
    if matrix.grid is grid and matrix.layout.sums:
        held = matrix.layout
        matrix = redistributed(matrix, layout_of(held.rows, held.cols, (), held.units))
    call(grid.engine, partial(check_indices, words, matrix, count, grid))
    return matrix


def check_indices(words: Indices, matrix: DistMatrix, count: int, grid: Grid) -> None:
    """Raises GridError, LayoutError, DTypeError or Pmm3dError, on every rank, for invalid indices. On a device, values
    of indices with a known `labels_below` are not checked, because the host would wait for the device.

    count   number of valid indices
    grid    the Grid of the other operand
    """
    known = matrix.labels_below is not None and matrix.labels_below <= count and not matrix.library.on_host
    with nullcontext() if known else grid.collective_call(words.name):
        if matrix.grid is not grid:
            raise GridError(
                f"{words.name}: {words.what} must be on the Grid of the other operand; they are on two Grids "
                f"({grid.shape} and {matrix.grid.shape})"
            )
        if matrix.shape[1] != 1:
            raise LayoutError(
                f"{words.name}: {words.what} must be a matrix of one column, {words.shape}; got "
                f"{matrix.shape[0]} x {matrix.shape[1]}"
            )
        if not matrix.dtype.startswith(("int", "uint")):
            raise DTypeError(
                f"{words.name}: {words.what} must be integers; got {matrix.dtype}. Convert them, for example by "
                "DistMatrix.from_global(grid, array.astype('int64'), layout=...)"
            )
        if not known and matrix.library.has_data:
            host = matrix.library.to_numpy(matrix.local).reshape(-1)
            _check_values(words, host, count, matrix.layout, matrix.box.r0)


def _check_values(words: Indices, host: np.ndarray, count: int, layout: Layout, first: int) -> None:
    """Raises Pmm3dError for values outside of 0 to count - 1. host: stored rows from `first` of a matrix."""
    wrong = np.flatnonzero((host < 0) | (host >= count))
    if len(wrong):
        row, order = first + int(wrong[0]), order_of(layout.units[0])
        if order is not None:
            sequence, place = divmod(row, len(order.positions))
            row = sequence * len(order.positions) + order.positions[place]
        valid = f"so {words.what} are 0 to {count - 1}" if count else f"so there are no valid {words.what}"
        raise Pmm3dError(
            f"{words.name}: row {row} has {words.one} {host[wrong[0]]}; {words.range.format(count=count)}, {valid}"
        )
