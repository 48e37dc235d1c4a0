"""Operations along the rows or columns of tensors, which may be split over ranks."""

from __future__ import annotations

import operator
from builtins import sum as sum_of
from collections.abc import Callable, Sequence
from itertools import pairwise

from ..arrays import Array
from ..comm import call
from ..errors import LayoutError
from ..layout import Layout, offsets
from ..product import DistMatrix
from .arithmetic import sums_to
from .compute import check_type, computing, local_results, sums_along
from .elementwise import TIMES, Elementwise, map_elementwise
from .statistics import as_column_or_row, begin_sum, log_sum_exp, share, sum_over
from .tensor import Tensor, as_tensor, relayout, results_of, summed

__all__ = ["columns", "log_softmax", "mean", "softmax", "split", "sum"]

Matrix = Tensor | DistMatrix


def sum(x: Matrix, dim: int | None = None) -> Tensor:
    """Sum of all elements, or sums over the rows (dim 0) or over the columns (dim 1).

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout, also with partial sums.
    dim : int or None
        0 or 1. Default: all elements.

    Returns
    -------
    Tensor
        (1, n), (m, 1), or (1, 1) for all elements. A dim that remains keeps its layout. Ranks along the axes that split
        the summed dims hold the same result.

    Raises
    ------
    LayoutError
        For another `dim`.
    DTypeError
        For integers.

    Notes
    -----
    Along each axis that splits a summed dim or has partial sums, each rank receives an all-reduce of its part of the
    result. The all-reduce continues in the background. The gradient sends nothing.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     nn.sum(x, 1).gather().tolist(), nn.sum(x).item()
    ([[3.0], [6.0]], 9.0)
    """
    return _summed("sum", as_tensor(x), dim, 1.0)


def mean(x: Matrix, dim: int | None = None) -> Tensor:
    """Mean of all elements, or means over the rows (dim 0) or over the columns (dim 1).

    A mean of no elements is NaN.

    Parameters
    ----------
    x, dim
        As in `sum`, also for result, errors and messages.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     nn.mean(x, 0).gather().tolist(), nn.mean(x).item()
    ([[0.5, 1.5, 2.5]], 1.5)
    """
    x = as_tensor(x)
    _check("mean", x, 0 if dim is None else dim)
    return _summed("mean", x, dim, share(x.shape[0] * x.shape[1] if dim is None else x.shape[dim]))


def _summed(name: str, x: Tensor, dim: int | None, factor: float) -> Tensor:
    _check(name, x, 0 if dim is None else dim)
    spec, shape = x.spec, (x.shape[0] if dim == 1 else 1, x.shape[1] if dim == 0 else 1)
    with computing(spec.grid, "statistics", name=name):
        own = sums_to(shape, spec, x.shard)
    result = spec.like(shape, own.layout.summed)
    out = map_elementwise(result, name, TIMES, own.array, factor)
    with spec.grid.ledger.phase(name):
        pending = begin_sum(spec.grid, out, (*x.layout.sums, *own.layout.sums))

    def backward(dx: Array, gradient: Array) -> None:
        with spec.grid.ledger.passing(name + " backward"):
            dx[...] = map_elementwise(result, None, TIMES, gradient, factor)

    def rule(gradient: Array) -> tuple[Array]:
        dx = spec.new()
        call(spec.grid.engine, backward, dx, gradient)
        return (dx,)

    return x.from_op(out, (x,), rule, shape=shape, layout=result.layout, pending=pending[-1] if pending else None)


def softmax(x: Matrix, dim: int = 1) -> Tensor:
    """exp(x) / sum of exp(x), over the columns (dim 1) or over the rows (dim 0).

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). `dim` may be split over one or several axes. Large numbers do not overflow.
    dim : int
        0 or 1. Default: 1.

    Returns
    -------
    Tensor
        (m, n), in the layout of x without partial sums.

    Raises
    ------
    LayoutError
        For another `dim`.
    DTypeError
        For integers.

    Notes
    -----
    Let r be the number of a rank's rows (dim 1) or columns (dim 0). Along each axis of G ranks that splits `dim`, each
    rank receives (G-1) 2 r numbers: maxima and sums of the other ranks. The backward pass all-reduces r numbers.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.softmax(DistMatrix.from_function(grid, (1, 4), lambda i, j: 1e4 + 0 * j)).gather()
    array([[0.25, 0.25, 0.25, 0.25]])
    """
    return _normalized("softmax", x, dim, SOFTMAX, operator.mul, SLOPE_OF_SOFTMAX)


def log_softmax(x: Matrix, dim: int = 1) -> Tensor:
    """x - log(sum of exp(x)), over the columns (dim 1) or over the rows (dim 0).

    Parameters
    ----------
    x, dim
        As in `softmax`, also for result, errors and messages.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.log_softmax(DistMatrix.from_function(grid, (1, 2), lambda i, j: 1e4 * j)).gather()
    array([[-10000.,      0.]])
    """
    return _normalized("log_softmax", x, dim, LOG_SOFTMAX, None, SLOPE_OF_LOG_SOFTMAX)


SOFTMAX = Elementwise(lambda library, x, largest, log: library.xp.exp(x - largest - log))
LOG_SOFTMAX = Elementwise(lambda _, x, largest, log: x - largest - log)
SLOPE_OF_SOFTMAX = Elementwise(lambda _, g, out, sums: (g - sums) * out)
SLOPE_OF_LOG_SOFTMAX = Elementwise(lambda library, g, out, sums: g - library.xp.exp(out) * sums)


def _normalized(
    name: str, x: Matrix, dim: int, value: Elementwise, term: Callable[..., Array] | None, slope: Elementwise
) -> Tensor:
    """value(x, largest, logarithm of the sum of exp(x - largest)), with slope(gradient, result, sum of the terms)."""
    x = summed(as_tensor(x))
    _check(name, x, dim)
    spec, local, backward = x.spec, x.shard, name + " backward"

    def statistics(local: Array) -> tuple[Array, Array]:
        with spec.grid.ledger.phase(name):
            largest, logarithm, _ = log_sum_exp(spec, local, dim, name)
        return as_column_or_row(largest, dim), as_column_or_row(logarithm, dim)

    out = map_elementwise(spec, name, value, local, *local_results(spec.grid, statistics, local))

    def sums(gradient: Array, out: Array) -> Array:
        with computing(spec.grid, "elementwise", name=backward):
            own = sums_along(gradient if term is None else map_elementwise(spec, None, term, gradient, out), dim)
        with spec.grid.ledger.phase(name):
            return as_column_or_row(sum_over(spec.grid, own, (spec.layout.rows, spec.layout.cols)[dim]), dim)

    def rule(gradient: Array, out: Array) -> tuple[Array]:
        of_terms = local_results(spec.grid, sums, gradient, out)
        return (map_elementwise(spec, backward, slope, gradient, out, of_terms),)

    return x.from_op(out, (x,), rule, keep={f"{name}.output": out})


def columns(x: Matrix, start: int, stop: int, unit: int | None = None) -> Tensor:
    """Columns `start` to `stop` of each unit of columns, such as of each head.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). n is a multiple of the unit.
    start, stop : int
        In a unit, the first column, and the column after the last one.
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
    x = as_tensor(x)
    unit = x.shape[1] if unit is None else unit
    check_unit("columns", x, unit)
    if not 0 <= start <= stop <= unit:
        raise LayoutError(f"columns: {start} to {stop} are outside of a unit of {unit} columns")
    return _cut("columns", x, unit, [(start, stop)])[0]


def split(x: Matrix, sizes: Sequence[int]) -> list[Tensor]:
    """Parts of each unit of columns, a tensor for each part.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n). n is a multiple of the sum of the sizes, which is the unit.
    sizes : sequence of int
        Number of columns of each part.

    Raises
    ------
    LayoutError
        If the sizes do not fit.

    Notes
    -----
    split(x, [size, size, size]) returns queries, keys and values of a projection whose columns are stored head by head.
    If ranks hold whole heads, nothing is sent.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     parts = nn.split(DistMatrix.from_function(grid, (1, 6), lambda i, j: j), [1, 2])
    ...     [part.gather().tolist() for part in parts]
    [[[0.0, 3.0]], [[1.0, 2.0, 4.0, 5.0]]]
    """
    x, edges = as_tensor(x), offsets(sizes)
    if not sizes or min(sizes) < 0:
        raise LayoutError(f"split: sizes are numbers of columns, one for each part; got {list(sizes)}")
    check_unit("split", x, edges[-1])
    return _cut("split", x, edges[-1], list(pairwise(edges)))


def check_unit(name: str, x: Tensor, unit: int) -> None:
    cols = x.shape[1]
    if (unit < 1 and cols) or (unit and cols % unit):
        raise LayoutError(f"{name}: {cols} columns are no whole number of units of {unit}")


def _cut(name: str, x: Tensor, unit: int, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The columns (start, stop) of each unit, a tensor for each range."""
    unit = max(1, unit)
    x = in_units(x, unit)
    spec, (rows, cols), (row_unit, held) = x.spec, x.shape, x.layout.units
    count = held // unit if isinstance(held, int) else 1
    here = spec.local_shape[0], spec.local_shape[1] // unit
    made = list[DistMatrix]()
    for start, stop in ranges:
        units = row_unit, max(1, count * (stop - start))
        layout = Layout(spec.layout.rows, spec.layout.cols, spec.layout.sums, units)
        part = spec.like((rows, cols // unit * (stop - start)), layout)
        made.append(part.matrix(part.new()))
    covered = sum_of(stop - start for start, stop in ranges)

    def forward(local: Array, *parts: Array) -> None:
        with spec.grid.ledger.passing(name):
            for (start, stop), part in zip(ranges, parts):
                part.reshape(*here, stop - start)[...] = local.reshape(*here, unit)[:, :, start:stop]

    def backward(dx: Array, *gradients: Array | None) -> None:
        with spec.grid.ledger.passing(name + " backward"):
            if covered < unit or any(gradient is None for gradient in gradients):
                dx[...] = 0
            for (start, stop), gradient in zip(ranges, gradients):
                if gradient is not None:
                    dx.reshape(*here, unit)[:, :, start:stop] = gradient.reshape(*here, stop - start)

    def rule(*gradients: Array | None) -> tuple[Array]:
        dx = spec.new()
        call(spec.grid.engine, backward, dx, *gradients)
        return (dx,)

    call(spec.grid.engine, forward, x.shard, *(part.local for part in made))
    return results_of(made, (x,), rule)


def in_units(x: Tensor, unit: int) -> Tensor:
    """Relayout x so that its columns are split in whole units. If there is one unit, they are gathered."""
    rows, cols, sums, (row_unit, held) = x.layout.rows, x.layout.cols, x.layout.sums, x.layout.units
    if unit == x.shape[1] and Layout((), cols).on(x.grid.shape).cols:
        cols, held = (), 1
    elif not isinstance(held, int) or held % unit:
        held = unit
    return relayout(x, Layout(rows, cols, sums, (row_unit, held)))


def _check(name: str, x: Tensor, dim: int) -> None:
    check_type(name, x.spec)
    if dim not in (0, 1):
        raise LayoutError(f"{name}: dim is 0, over the rows, or 1, over the columns; got {dim!r}")
