"""Operations along the rows or columns of tensors, which may be split over ranks, one function with its rule each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

from ..arrays import Array
from ..errors import LayoutError
from ..layout import Layout
from ..product import DistMatrix
from .arithmetic import sums_to
from .compute import check_type, computing, sums_along
from .elementwise import TIMES, Elementwise, map_elementwise
from .statistics import added, beside, log_sum_exp, share, total
from .tensor import Tensor, as_tensor, relayout, whole

__all__ = ["columns", "log_softmax", "mean", "softmax", "sum"]

Matrix = Tensor | DistMatrix


def sum(x: Matrix, dim: int) -> Tensor:
    """The sums over the rows (dim 0): (1, n), or over the columns (dim 1): (m, 1).

    x   (m, n)   in any layout, of partial sums too

    The other dim stays as it is; all ranks along the axes that split this one, or that hold partial sums, hold the
    result. Each receives an all-reduce of its part of the result along each such axis, which goes on in the background;
    the gradient moves nothing. Raises LayoutError for another dim, DTypeError for integers.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     sum(DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j), 1).gather().tolist()
        [[3.0], [6.0]]
    """
    return _summed("sum", as_tensor(x), dim, 1.0)


def mean(x: Matrix, dim: int) -> Tensor:
    """The means over the rows (dim 0) or over the columns (dim 1), NaN of none; the rest as of `sum`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     mean(DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j), 0).gather().tolist()
        [[0.5, 1.5, 2.5]]
    """
    x = as_tensor(x)
    _check("mean", x, dim)
    return _summed("mean", x, dim, share(x.shape[dim]))


def _summed(name: str, x: Tensor, dim: int, factor: float) -> Tensor:
    _check(name, x, dim)
    form, shape = x.form, (1, x.shape[1]) if dim == 0 else (x.shape[0], 1)
    with computing(form.grid, "statistics", name=name):
        own = sums_to(shape, form, x.shard)
        result = form.like(shape, own.layout.summed)
        out = map_elementwise(result, None, TIMES, own.array, factor)
    with form.grid.ledger.phase(name):
        pending = added(form.grid, out, (*x.layout.sums, *own.layout.sums))

    def rule(gradient: Array) -> tuple[Array]:
        dx = form.new()
        with form.grid.ledger.passing(name + " backward"):
            dx[...] = map_elementwise(result, None, TIMES, gradient, factor)
        return (dx,)

    return x.made(out, (x,), rule, shape=shape, layout=result.layout, pending=pending[-1] if pending else None)


def softmax(x: Matrix, dim: int = 1) -> Tensor:
    """exp(x) / sum of exp(x) over the columns (dim 1) or over the rows (dim 0), of numbers of any size.

    x   (m, n)   that dim whole, or split over one or several axes

    Returns (m, n), laid out as x, its partial sums done. Along each axis of G ranks that splits the dim, each receives
    (G-1) 2 r numbers, r its rows (dim 1) or columns (dim 0): the others' largest numbers and sums; backward, an
    all-reduce of r numbers. Raises LayoutError for another dim, DTypeError for integers.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     softmax(DistMatrix.from_function(grid, (1, 4), lambda i, j: 1e4 + 0 * j)).gather()
        array([[0.25, 0.25, 0.25, 0.25]])
    """
    return _normalized("softmax", x, dim, SOFTMAX)


def log_softmax(x: Matrix, dim: int = 1) -> Tensor:
    """x - log(sum of exp(x)) over the columns (dim 1) or over the rows (dim 0); the rest as of `softmax`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     log_softmax(DistMatrix.from_function(grid, (1, 2), lambda i, j: 1e4 * j)).gather()
        array([[-10000.,      0.]])
    """
    return _normalized("log_softmax", x, dim, LOG_SOFTMAX)


class Normalized(NamedTuple):
    """The elementwise functions of a softmax.

    value     of x, the largest element of its row or column, and the logarithm of the sum of exp(x - largest)
    weight    of the gradient and the result: the terms of the sum that the slope needs; None: the gradient
    slope     of the gradient, the result and that sum
    """

    value: Elementwise
    weight: Callable[..., Array] | None
    slope: Elementwise


SOFTMAX = Normalized(Elementwise(lambda library, x, largest, log: library.xp.exp(x - largest - log)), operator.mul,
                     Elementwise(lambda _, g, out, sums: (g - sums) * out))
LOG_SOFTMAX = Normalized(Elementwise(lambda _, x, largest, log: x - largest - log), None,
                         Elementwise(lambda library, g, out, sums: g - library.xp.exp(out) * sums))


def _normalized(name: str, x: Matrix, dim: int, functions: Normalized) -> Tensor:
    x = whole(as_tensor(x))
    _check(name, x, dim)
    form, local = x.form, x.shard
    with form.grid.ledger.phase(name):
        largest, logarithm, _ = log_sum_exp(form, local, dim, name)
    out = map_elementwise(form, name, functions.value, local, beside(largest, dim), beside(logarithm, dim))

    def rule(gradient: Array, out: Array) -> tuple[Array]:
        weight, backward = functions.weight, name + " backward"
        with computing(form.grid, "elementwise", name=backward):
            terms = gradient if weight is None else map_elementwise(form, None, weight, gradient, out)
            sums = sums_along(terms, dim)
        with form.grid.ledger.phase(name):
            sums = beside(total(form.grid, sums, (form.layout.rows, form.layout.cols)[dim]), dim)
        return (map_elementwise(form, backward, functions.slope, gradient, out, sums),)

    return x.made(out, (x,), rule, keep=[out])


def columns(x: Matrix, start: int, stop: int, unit: int | None = None) -> Tensor:
    """Columns start to stop of each unit of so many: of each head. x[:, start:stop] is that of the whole matrix.

    x      (m, n)   n a multiple of the unit
    unit   columns; None: all n are one

    Returns (m, n / unit * (stop - start)), laid out as x, its units of columns as much smaller. Nothing is moved where
    x is cut in whole units (`Layout.units`, or sizes that divide); else it is brought there first, and if there is one
    unit only its columns are brought together. Raises LayoutError for a unit that does not fit, or columns outside.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     columns(DistMatrix.from_function(grid, (1, 6), lambda i, j: j), 1, 3, unit=3).gather()
        array([[1., 2., 4., 5.]])
    """
    x = as_tensor(x)
    (rows, cols), unit = x.shape, x.shape[1] if unit is None else unit
    if unit < 1 and cols or unit and cols % unit:
        raise LayoutError(f"columns: {cols} columns are no whole number of units of {unit}")
    if not 0 <= start <= stop <= unit:
        raise LayoutError(f"columns: {start} to {stop} lie outside of a unit of {unit} columns")
    x, taken = _in_units(x, max(1, unit)), stop - start
    form, local, count = x.form, x.shard, cols // max(1, unit)
    here = form.local_shape[0], form.local_shape[1] // max(1, unit)
    row_unit, held = form.layout.units
    units = row_unit, max(1, (held if isinstance(held, int) else unit) // max(1, unit) * taken)
    layout = Layout(form.layout.rows, form.layout.cols, form.layout.sums, units)
    out = form.like((rows, count * taken), layout).new()
    with form.grid.ledger.passing("columns"):
        out.reshape(*here, taken)[...] = local.reshape(*here, unit)[:, :, start:stop]

    def rule(gradient: Array) -> tuple[Array]:
        dx = form.new()
        with form.grid.ledger.passing("columns backward"):
            dx[...] = 0
            dx.reshape(*here, unit)[:, :, start:stop] = gradient.reshape(*here, taken)
        return (dx,)

    return x.made(out, (x,), rule, shape=(rows, count * taken), layout=layout)


def _in_units(x: Tensor, unit: int) -> Tensor:
    """The matrix, its columns cut in whole units; brought together if there is one only."""
    rows, cols, sums, (row_unit, held) = x.layout.rows, x.layout.cols, x.layout.sums, x.layout.units
    if unit == x.shape[1] and Layout((), cols).on(x.grid.shape).cols:
        cols, held = (), 1
    elif not isinstance(held, int) or held % unit:
        held = unit
    return relayout(x, Layout(rows, cols, sums, (row_unit, held)))


def _check(name: str, x: Tensor, dim: int) -> None:
    check_type(name, x.form)
    if dim not in (0, 1):
        raise LayoutError(f"{name}: dim is 0, over the rows, or 1, over the columns; got {dim!r}")
