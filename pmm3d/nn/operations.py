"""Sums, extremes and softmax along the rows or columns of tensors, which may be split over ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..comm import call
from ..errors import LayoutError
from ..layout import Layout, without_order
from ..product import DistMatrix
from .arithmetic import sums_to
from .compute import TensorSpec, check_real, check_type, computing, local_results, sums_along
from .elementwise import TIMES, Elementwise, map_elementwise
from .parts import check_dim
from .statistics import as_column_or_row, begin_sum, first_extreme, log_sum_exp, share, sum_over
from .tensor import Matrix, Tensor, as_tensor, relayout, summed

__all__ = ["argmax", "log_softmax", "max", "mean", "min", "softmax", "sum"]


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
    spec, shape = x.spec, _reduced(x.shape, dim)
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
        call(spec.grid.engine, backward, dx, gradient, writes=[dx])
        return (dx,)

    return x.from_op(out, (x,), rule, shape=shape, layout=result.layout, pending=pending[-1] if pending else None)


def _reduced(shape: tuple[int, int], dim: int | None) -> tuple[int, int]:
    return shape[0] if dim == 1 else 1, shape[1] if dim == 0 else 1


def max(x: Matrix, dim: int | None = None) -> Tensor:
    """Largest element of all, or of each column (dim 0: over the rows) or of each row (dim 1: over the columns).

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout. Partial sums are summed first.
    dim : int or None
        0 or 1. Default: all elements.

    Returns
    -------
    Tensor
        (1, n), (m, 1), or (1, 1) for all elements. A dim that remains keeps its layout. Ranks along the axes that split
        the other dims hold the same result. A NaN among the elements is the result.

    Raises
    ------
    LayoutError
        For another `dim`, and if there are no elements along it.
    DTypeError
        For integers and complex numbers.

    Notes
    -----
    The gradient belongs to the first of several equal elements; among all elements, to the first one row by row.

    Let r be the number of a rank's rows (dim 1) or columns (dim 0), or 1 for all elements. Along each axis of G ranks
    that splits a reduced dim, each rank receives (G-1) 16 r bytes: elements and indices. The gradient sends nothing.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     nn.max(x, 1).gather().tolist(), nn.max(x).item()
    ([[2.0], [3.0]], 3.0)
    """
    return _extreme("max", x, dim)


def min(x: Matrix, dim: int | None = None) -> Tensor:
    """Smallest element of all, or of each column (dim 0: over the rows) or of each row (dim 1: over the columns).

    Parameters
    ----------
    x, dim
        As in `max`, also for result, errors, messages and gradients.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.min(DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j), 0).gather()
    array([[0., 1., 2.]])
    """
    return _extreme("min", x, dim)


def argmax(x: Matrix, dim: int | None = None) -> Tensor:
    """Index of the largest element, the first of several equal ones. It has no gradient.

    Parameters
    ----------
    x, dim
        As in `max`, also for errors and messages.

    Returns
    -------
    Tensor
        int64, of the shape and layout of `max`: rows (dim 0), columns (dim 1), or row * n + column for all elements.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     nn.argmax(x, 1).gather().tolist(), nn.argmax(x).gather().tolist()
    ([[2], [2]], [[5]])
    """
    x = _ready("argmax", x, dim)
    _, index = _extremes("argmax", x, dim, "max")
    library = x.library
    index = local_results(x.grid, lambda index: library.astype(index, "int64"), index)
    shape, layout = _reduced(x.shape, dim), _reduced_layout(x.layout, dim)
    return Tensor(DistMatrix(x.grid, index, shape, layout))


AT_INDEX = Elementwise(lambda library, g, index, rows, cols: library.xp.where(index == rows + cols, g, 0))


def _extreme(kind: str, x: Matrix, dim: int | None) -> Tensor:
    x = _ready(kind, x, dim)
    spec, (r0, _, c0, _) = x.spec, x.box
    value, index = _extremes(kind, x, dim, kind)

    def rule(gradient: Array, index: Array) -> tuple[Array]:
        width = spec.shape[1] if dim is None else 1
        rows = 0.0 if dim == 1 else _counted(spec, r0, 0, width)
        cols = 0.0 if dim == 0 else _counted(spec, c0, 1)
        return (map_elementwise(spec, kind + " backward", AT_INDEX, gradient, index, rows, cols),)

    shape, layout = _reduced(x.shape, dim), _reduced_layout(x.layout, dim)
    return x.from_op(value, (x,), rule, keep={f"{kind}.index": index}, shape=shape, layout=layout)


def _ready(name: str, x: Matrix, dim: int | None) -> Tensor:
    """Check x, sum its partial sums, and store its rows in ascending order if they are compared."""
    x = as_tensor(x)
    _check(name, x, 0 if dim is None else dim)
    check_real(name, x.spec)
    if any(size == 0 for size, reduces in zip(x.shape, (dim != 1, dim != 0)) if reduces):
        raise LayoutError(f"{name}: a tensor of {x.shape[0]} x {x.shape[1]} has no elements to compare")
    x = summed(x)
    return x if dim == 1 else relayout(x, without_order(x.layout))


def _extremes(name: str, x: Tensor, dim: int | None, kind: str) -> tuple[Array, Array]:
    """Return the extreme elements, and their indices in float64."""
    spec, box, library = x.spec, x.box, x.library
    shape = (spec.local_shape[0] if dim == 1 else 1, spec.local_shape[1] if dim == 0 else 1)

    def extremes(local: Array) -> tuple[Array, Array]:
        with spec.grid.ledger.phase(name):
            values, index = first_extreme(spec, box, local, dim, kind, name)
        return library.astype(values, spec.dtype).reshape(shape), index.reshape(shape)

    found: tuple[Array, Array] = local_results(spec.grid, extremes, x.shard)
    return found


def _reduced_layout(layout: Layout, dim: int | None) -> Layout:
    rows, cols = layout.rows if dim == 1 else (), layout.cols if dim == 0 else ()
    return Layout(rows, cols, (), (layout.units[0] if dim == 1 else 1, layout.units[1] if dim == 0 else 1))


def _counted(spec: TensorSpec, start: int, dim: int, width: int = 1) -> Array:
    """Index of each of this rank's rows (dim 0) as a column, or columns (1) as a row, times `width`; float64."""
    size = spec.local_shape[dim]
    shape = (1, size) if dim else (size, 1)
    values = lambda: (np.arange(start, start + size, dtype=float) * width).reshape(shape)
    return spec.library.made(shape, "float64", values)


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


def _check(name: str, x: Tensor, dim: int) -> None:
    check_type(name, x.spec)
    check_dim(name, dim)
