"""Sums, differences, products and quotients of tensors, element by element.

One row, one column or one element goes with all others, on either side. The result is laid out as the first matrix that
is not repeated, in each dim; the other is brought there. A matrix in that layout, or a vector that is whole or cut
alike, moves nothing; the gradient of what was repeated is a sum over the rows or columns that it went to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from ..arrays import Array
from ..errors import DTypeError, GridError, LayoutError
from ..layout import Layout
from ..product import DistMatrix
from .compute import Form, array_namespace, by_rows, check_type, computing, elementwise
from .contract import Gradient
from .tensor import Tensor, as_tensor, relayout, whole

Operand = Any
"""A Tensor, a DistMatrix or a number."""
__all__ = ["add", "divide", "multiply", "scale", "subtract"]


class Slope(NamedTuple):
    """The derivative by one operand: of(gradient, *operands), of those operands that it needs, by their numbers."""

    needs: tuple[int, ...]
    of: Callable[..., Array]


AS_IT_IS, NEGATIVE = Slope((), lambda g: g), Slope((), lambda g: -g)


def add(a: Operand, b: Operand) -> Tensor:
    """a + b, of tensors, matrices or numbers, one of them a tensor or matrix. Shapes and layouts: see `nn.arithmetic`.

    Raises LayoutError if the shapes do not go together, GridError and DTypeError for two grids, libraries or types.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
        ...     add(x, x).gather()
        array([[0., 2., 4.]])
    """
    return _operation("add", a, b, lambda p, q: p + q, (AS_IT_IS, AS_IT_IS))


def subtract(a: Operand, b: Operand) -> Tensor:
    """a - b; the rest as of `add`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     (1 - Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))).gather()
        array([[ 1.,  0., -1.]])
    """
    return _operation("subtract", a, b, lambda p, q: p - q, (AS_IT_IS, NEGATIVE))


def multiply(a: Operand, b: Operand) -> Tensor:
    """a * b, element by element; the rest as of `add`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
        ...     (x * x).gather()
        array([[0., 1., 4.]])
    """
    if isinstance(a, Real):
        a, b = b, a
    if isinstance(b, Real):
        return scale(a, float(b))
    return _operation("multiply", a, b, lambda p, q: p * q, (Slope((1,), lambda g, q: g * q),
                                                             Slope((0,), lambda g, p: g * p)))


def divide(a: Operand, b: Operand) -> Tensor:
    """a / b, element by element; the rest as of `add`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     (1 / Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j + 1))).gather().round(4)
        array([[1.    , 0.5   , 0.3333]])
    """
    if isinstance(b, Real):
        return scale(a, 1 / float(b))
    return _operation("divide", a, b, lambda p, q: p / q, (Slope((1,), lambda g, q: g / q),
                                                           Slope((0, 1), lambda g, p, q: -g * p / (q * q))))


def scale(x: Tensor | DistMatrix, factor: float) -> Tensor:
    """factor x, in the layout of x, partial sums too.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     scale(DistMatrix.from_function(grid, (1, 3), lambda i, j: i + j), 0.5).gather()
        array([[0. , 0.5, 1. ]])
    """
    x, factor = as_tensor(x), float(factor)
    check_type("scale", x.form)
    scaled = partial(elementwise, x.form, lambda part: part * factor)
    return x.made(scaled(x.shard), (x,), lambda gradient: (scaled(gradient),))


def _operation(name: str, a: Operand, b: Operand, function: Callable[..., Array], slopes: Sequence[Slope]) -> Tensor:
    linear = not any(slope.needs for slope in slopes)
    pair = [each if linear else whole(each) for each in _tensors(a, b)]
    shape, layout = _together(name, *pair)
    pair = [relayout(each, _within(each.shape, shape, layout)) for each in pair]
    form, shards = pair[0].form.like(shape, layout), [each.shard for each in pair]
    out, wanted = _by_elements(form, function, *shards), [each.requires_grad for each in pair]
    needed = sorted({index for slope, wants in zip(slopes, wanted) if wants for index in slope.needs})
    shapes = [each.shape for each in pair]

    def rule(gradient: Array, *kept: Array) -> list[Gradient | None]:
        operands = dict(zip(needed, kept))
        parts = list[Gradient | None]()
        for size, (needs, slope), wants in zip(shapes, slopes, wanted):
            part = _by_elements(form, slope, gradient, *(operands[index] for index in needs)) if wants else None
            parts.append(None if part is None else summed_to(size, form, part))
        return parts

    return pair[0].made(out, pair, rule, keep=[shards[index] for index in needed], shape=shape, layout=layout)


def _by_elements(form: Form, function: Callable[..., Array], *arrays: Array) -> Array:
    out = form.new()
    with computing(form.grid, "elementwise"):
        by_rows(function, out, *arrays)
    return out


def _tensors(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Both as tensors; a number is one of one element."""
    like = as_tensor(b if isinstance(a, Real) else a)
    one, other = (as_tensor(like.form.filled(float(each)) if isinstance(each, Real) else each) for each in (a, b))
    return one, other


def _together(name: str, a: Tensor, b: Tensor) -> tuple[tuple[int, int], Layout]:
    """Shape and layout of the result."""
    if a.grid is not b.grid:
        raise GridError(f"{name}: the operands are on two Grids ({a.grid.shape} and {b.grid.shape})")
    if (a.dtype, a.library) != (b.dtype, b.library):
        raise DTypeError(f"{name}: the operands are {a.dtype} of {a.library.kind} and {b.dtype} of {b.library.kind}; "
                         "they must be of one type and library")
    check_type(name, a.form)
    if any(p != q and 1 not in (p, q) for p, q in zip(a.shape, b.shape)):
        raise LayoutError(f"{name}: {a.shape[0]} x {a.shape[1]} and {b.shape[0]} x {b.shape[1]} do not go together: "
                          "rows and columns must be as many, or one")
    sizes, axes, units = list[int](), list[tuple[str, ...]](), list[int]()
    for dim, (p, q) in enumerate(zip(a.shape, b.shape)):
        taken = b if p == 1 != q else a
        sizes.append(taken.shape[dim])
        cut = (taken.layout.rows, taken.layout.cols)[dim]
        axes.append(tuple(axis for axis in cut if not dim or axis not in axes[0]))
        units.append(taken.layout.units[dim])
    sums = a.layout.sums if a.shape == tuple(sizes) else ()
    return (sizes[0], sizes[1]), Layout(axes[0], axes[1], sums, units)


def _within(shape: tuple[int, int], whole: tuple[int, int], layout: Layout) -> Layout:
    """Where an operand of that shape must be for a result in a layout: whole in the dims in which it is repeated."""
    rows, cols = (() if size != full else axes for size, full, axes in zip(shape, whole, (layout.rows, layout.cols)))
    return Layout(rows, cols, layout.sums, [unit if axes else 1 for unit, axes in zip(layout.units, (rows, cols))])


def summed_to(shape: tuple[int, int], form: Form, gradient: Array) -> Gradient:
    """The gradient of a matrix of that shape, of one row or column where the result has many, from the gradient of the
    result, which has that form: this rank's sum, over those that it went to here."""
    (rows, cols), sums, units = (form.layout.rows, form.layout.cols), tuple[str, ...](), list(form.layout.units)
    xp = array_namespace(gradient)
    if shape[0] != form.shape[0]:
        gradient, rows, sums, units[0] = xp.sum(gradient, axis=0, keepdims=True), (), rows, 1
    if shape[1] != form.shape[1]:
        gradient, cols, sums, units[1] = xp.sum(gradient, axis=1, keepdims=True), (), (*sums, *cols), 1
    return Gradient(gradient, Layout(rows, cols, sums, units))
