"""Sums, differences, products, quotients, and choices between elements of tensors, element by element.

An operand of one row, one column or one element is broadcast. In each dim the result has the layout of the first
operand that is not broadcast, and the other operand is relaid out. Nothing is sent if the layouts are equal, or if a
vector is replicated or split in the same way. The gradient of a broadcast operand is a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import combinations
from numbers import Real
from typing import Any

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, dtype_named
from ..errors import DTypeError, GridError, LayoutError
from ..layout import Layout
from ..product import DistMatrix
from ..product.checks import check_one_device
from .compute import TensorSpec, check_real, check_type, local_results, sums_along
from .contract import Gradient
from .elementwise import TIMES, Aten, Elementwise, map_elementwise
from .ragged_rows import same_rows
from .tensor import Tensor, as_tensor, relayout, summed

Operand = Any
"""A Tensor, a DistMatrix or a number."""
Shape = tuple[int, int]
__all__ = ["add", "cast", "divide", "maximum", "minimum", "multiply", "scale", "subtract", "where"]


Slope = tuple[Callable[..., Array] | Elementwise | None, tuple[int, ...]]
"""Derivative by one operand: a function of the gradient and of some operands (None: the gradient), and the indices of
these operands."""
AS_IT_IS: Slope = (None, ())
OPERANDS = "a", "b", "condition"
"""Names of the operands of an operation."""
OF_DIVISOR = Elementwise(lambda _, g, p, q: -(g / q) * (p / q))
MAXIMUM = Elementwise(lambda library, p, q: library.xp.maximum(p, q), Aten("maximum"))
MINIMUM = Elementwise(lambda library, p, q: library.xp.minimum(p, q), Aten("minimum"))
CHOSEN = Elementwise(lambda library, p, q, condition: library.xp.where(condition != 0, p, q))
OF_LARGER, OF_SMALLER, OF_CHOSEN, OF_OTHER = (
    Elementwise(lambda library, g, p, q: _of_winner(library, g, p < q, p == q)),
    Elementwise(lambda library, g, p, q: _of_winner(library, g, p > q, p == q)),
    Elementwise(lambda library, g, condition: library.xp.where(condition != 0, g, 0)),
    Elementwise(lambda library, g, condition: library.xp.where(condition != 0, 0, g)),
)


def add(a: Operand, b: Operand) -> Tensor:
    """a + b, element by element.

    Parameters
    ----------
    a, b : Tensor, DistMatrix or float
        At least one is a tensor or a matrix. An operand of one row, one column or one element is broadcast.

    Returns
    -------
    Tensor
        In each dim it has the layout of the first operand that is not broadcast.

    Raises
    ------
    LayoutError
        If the shapes do not match.
    GridError, DTypeError
        If grids, libraries or types of the operands differ.

    Notes
    -----
    An operand in another layout is relaid out. If the layouts are equal, nothing is sent.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
    ...     (x + 1).gather()
    array([[1., 2., 3.]])
    """
    return _operation("add", a, b, operator.add, AS_IT_IS, AS_IT_IS)


def subtract(a: Operand, b: Operand) -> Tensor:
    """a - b, element by element.

    Parameters
    ----------
    a, b : Tensor or float
        As in `add`, also for result, errors and layouts.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     (1 - nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))).gather()
    array([[ 1.,  0., -1.]])
    """
    return _operation("subtract", a, b, operator.sub, AS_IT_IS, (operator.neg, ()))


def multiply(a: Operand, b: Operand) -> Tensor:
    """a * b, element by element.

    Parameters
    ----------
    a, b : Tensor or float
        As in `add`, also for result, errors and layouts.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
    ...     (x * x).gather()
    array([[0., 1., 4.]])
    """
    if isinstance(a, Real):
        a, b = b, a
    if isinstance(b, Real):
        return scale(a, float(b))
    return _operation("multiply", a, b, operator.mul, (operator.mul, (1,)), (operator.mul, (0,)))


def divide(a: Operand, b: Operand) -> Tensor:
    """a / b, element by element.

    Parameters
    ----------
    a, b : Tensor or float
        As in `add`, also for result, errors and layouts.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     (1 / nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j + 1))).gather().round(4)
    array([[1.    , 0.5   , 0.3333]])
    """
    if isinstance(b, Real):
        return scale(a, 1 / float(b))
    return _operation("divide", a, b, operator.truediv, (operator.truediv, (1,)), (OF_DIVISOR, (0, 1)))


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger of a and b, element by element. NaN if one of them is NaN.

    Parameters
    ----------
    a, b : Tensor, DistMatrix or float
        As in `add`, also for result, errors and layouts. Partial sums are summed first. Complex numbers are refused.

    Notes
    -----
    The gradient belongs to the larger element. Equal elements get one half each, as in torch.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.maximum(DistMatrix.from_function(grid, (1, 3), lambda i, j: j), 1).gather()
    array([[1., 1., 2.]])
    """
    return _extreme("maximum", a, b, MAXIMUM, OF_LARGER, OF_SMALLER)


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller of a and b, element by element. NaN if one of them is NaN.

    Parameters
    ----------
    a, b : Tensor, DistMatrix or float
        As in `maximum`, also for result, errors, layouts and gradients.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.minimum(DistMatrix.from_function(grid, (1, 3), lambda i, j: j), 1).gather()
    array([[0., 1., 1.]])
    """
    return _extreme("minimum", a, b, MINIMUM, OF_SMALLER, OF_LARGER)


def _extreme(name: str, a: Operand, b: Operand, function: Elementwise, of_a: Elementwise, of_b: Elementwise) -> Tensor:
    check_real(name, as_tensor(b if isinstance(a, Real) else a).spec)
    return _operation(name, a, b, function, (of_a, (0, 1)), (of_b, (0, 1)))


def where(condition: Tensor | DistMatrix, a: Operand, b: Operand) -> Tensor:
    """a if the condition is not 0, else b, element by element.

    Parameters
    ----------
    condition : Tensor or DistMatrix
        Numbers of any type, such as a mask of 0 and 1. It has no gradient. An operand of one row, one column or one
        element is broadcast.
    a, b : Tensor, DistMatrix or float
        At least one is a tensor or a matrix. Both may be broadcast.

    Returns
    -------
    Tensor
        In each dim it has the layout of the first of a, b and `condition` that is not broadcast. Partial sums are
        summed first.

    Raises
    ------
    LayoutError
        If the shapes do not match.
    GridError, DTypeError
        If grids or libraries of the operands differ, or the types of a and b.

    Notes
    -----
    An operand in another layout is relaid out. If the layouts are equal, nothing is sent. The element that is not
    chosen gets the gradient 0, also if it is infinite or NaN.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j - 1))
    ...     nn.where(nn.relu(x), x, 10.0).gather()  # the elements above 0
    array([[10., 10.,  1.]])
    """
    return _operation("where", a, b, CHOSEN, (OF_CHOSEN, (2,)), (OF_OTHER, (2,)), condition=as_tensor(condition))


def scale(x: Tensor | DistMatrix, factor: float) -> Tensor:
    """factor * x, in the layout of x, which may have partial sums.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout.
    factor : float
        The same number on all ranks.

    Returns
    -------
    Tensor
        (m, n). Nothing is sent.

    Raises
    ------
    DTypeError
        For integers.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.scale(DistMatrix.from_function(grid, (1, 3), lambda i, j: i + j), 0.5).gather()
    array([[0. , 0.5, 1. ]])
    """
    x, factor = as_tensor(x), float(factor)
    check_type("scale", x.spec)
    spec, scaled = x.spec, map_elementwise(x.spec, "scale", TIMES, x.shard, factor)
    return x.from_op(scaled, (x,), lambda gradient: (map_elementwise(spec, "scale backward", TIMES, gradient, factor),))


def cast(x: Tensor | DistMatrix, dtype: str) -> Tensor:
    """x in another element type. The gradient is cast back to the type of x.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout. Partial sums are summed first.
    dtype : str
        "float16", "bfloat16" (torch only), "float32" or "float64".

    Returns
    -------
    Tensor
        (m, n), in the layout of x.

    Raises
    ------
    DTypeError
        If the library has no such type.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.cast(DistMatrix.from_function(grid, (1, 2), lambda i, j: j + 1e-4), "float16").gather()
    array([[1.e-04, 1.e+00]], dtype=float16)
    """
    x = summed(as_tensor(x))
    spec, other = x.spec, x.spec.typed(check_matrix_dtype(dtype_named(dtype), x.library))
    if spec.dtype == other.dtype:
        return x
    return x.from_op(
        map_elementwise(other, "cast", _as_it_is, x.shard),
        (x,),
        lambda gradient: (map_elementwise(spec, "cast backward", _as_it_is, gradient),),
    )


def _as_it_is(part: Array) -> Array:
    return part


def _of_winner(library: NumpyLibrary, g: Array, loses: Array, ties: Array) -> Array:
    """Gradient of an operand of `maximum` or `minimum`."""
    return library.xp.where(loses, 0, library.xp.where(ties, 0.5 * g, g))


def _operation(
    name: str,
    a: Operand,
    b: Operand,
    function: Callable[..., Array] | Elementwise,
    *slopes: Slope,
    condition: Tensor | None = None,
) -> Tensor:
    """function(a, b), or function(a, b, condition)."""
    linear = not any(needs for _, needs in slopes)
    operands = [each if linear else summed(each) for each in _tensors(a, b)]
    check_alike(name, *operands)
    check_type(name, operands[0].spec)
    if condition is not None:
        operands.append(summed(condition))
        check_alike(name, *operands, one_type=False)
    _check_shapes(name, operands)
    shapes = [each.shape for each in operands]
    rows, cols = ([size for size in sizes if size != 1] or [1] for sizes in zip(*shapes))
    shape = rows[0], cols[0]
    layout, places = _together(tuple(shapes), tuple([each.layout for each in operands]))
    operands = [relayout(each, place) for each, place in zip(operands, places)]
    spec, shards = operands[0].spec.like(shape, layout), [each.shard for each in operands]
    out, wanted = map_elementwise(spec, name, function, *shards), [each.requires_grad for each in operands]
    needed = sorted({index for (_, needs), wants in zip(slopes, wanted) if wants for index in needs})

    def rule(gradient: Array, *saved_arrays: Array) -> list[Gradient | None]:
        saved = dict(zip(needed, saved_arrays))

        def by(of: Callable[..., Array] | Elementwise | None, needs: tuple[int, ...]) -> Array:
            return (
                gradient
                if of is None
                else map_elementwise(spec, name + " backward", of, gradient, *map(saved.get, needs))
            )

        return [
            summed_to(size, spec, by(*slope)) if wants else None for size, slope, wants in zip(shapes, slopes, wanted)
        ]

    keep = {f"{name}.{OPERANDS[index]}": operands[index] for index in needed}
    return operands[0].from_op(out, operands[:2], rule, keep=keep, shape=shape, layout=layout)


def _tensors(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Convert both operands to tensors, a number to a 1 x 1 tensor."""
    like = as_tensor(b if isinstance(a, Real) else a)
    one, other = (as_tensor(like.spec.filled(float(each)) if isinstance(each, Real) else each) for each in (a, b))
    return one, other


def check_alike(name: str, *operands: Tensor, one_type: bool = True) -> None:
    """Raise GridError or DTypeError if the operands are on several Grids or devices, or of several libraries or types.

    one_type   False: types may differ
    """
    a = operands[0]
    for b in operands[1:]:
        if a.grid is not b.grid:
            raise GridError(
                f"{name}: the operands must be on one Grid; they are on two Grids ({a.grid.shape} and {b.grid.shape})"
            )
        if not a.library.on_host:
            check_one_device(name, a.shard, b.shard)
        if a.library != b.library or (one_type and a.dtype != b.dtype):
            raise DTypeError(
                f"{name}: the operands are {a.dtype} of {a.library.kind} and {b.dtype} of {b.library.kind}; "
                f"they must be of one {'type (nn.cast) and ' * one_type}library"
            )


def _check_shapes(name: str, operands: Sequence[Tensor]) -> None:
    for a, b in combinations(operands, 2):
        if not all([same_rows(p, q) or 1 in (p, q) for p, q in zip(a.shape, b.shape)]):
            raise LayoutError(
                f"{name}: {a.shape[0]} x {a.shape[1]} and {b.shape[0]} x {b.shape[1]} do not match: numbers "
                "of rows and of columns must be equal, or 1. Ragged rows are equal if one tensor was "
                "computed from the other, or made with its rows (nn.ragged(..., rows=x.shape[0]))"
            )


@lru_cache(maxsize=1024)
def _together(shapes: tuple[Shape, ...], layouts: tuple[Layout, ...]) -> tuple[Layout, list[Layout]]:
    """Layout of the result, and the layouts that the operands need for it."""
    by_row, by_col = (next((index for index, size in enumerate(sizes) if size != 1), 0) for sizes in zip(*shapes))
    rows, cols = layouts[by_row].rows, layouts[by_col].cols
    units = layouts[by_row].units[0], layouts[by_col].units[1]
    shape = shapes[by_row][0], shapes[by_col][1]
    sums = layouts[0].sums if shapes[0] == shape else ()
    layout = Layout(rows, [axis for axis in cols if axis not in rows], sums, units)
    return layout, [_within(size, shape, layout) for size in shapes]


def _within(shape: Shape, parent_shape: Shape, layout: Layout) -> Layout:
    """Layout of an operand for a result of the shape `parent_shape`. Dims in which the operand is broadcast are not
    split."""
    rows, cols = (
        () if size != full else axes for size, full, axes in zip(shape, parent_shape, (layout.rows, layout.cols))
    )
    units = [unit if axes else 1 for unit, axes in zip(layout.units, (rows, cols))]
    return layout if shape == parent_shape else Layout(rows, cols, layout.sums, units)


def summed_to(shape: Shape, spec: TensorSpec, gradient: Array) -> Gradient:
    """Gradient of a broadcast operand of this shape, from the gradient of the result."""
    contribution = sums_to(shape, spec, gradient)
    if spec.library.dtype(contribution.array) == spec.dtype:
        return contribution
    cast_to = partial(spec.library.astype, dtype=spec.dtype)
    return Gradient(local_results(spec.grid, cast_to, contribution.array), contribution.layout)


def sums_to(shape: Shape, spec: TensorSpec, gradient: Array) -> Gradient:
    """Return the same as `summed_to`, but sums of float16 and bfloat16 stay in float32."""
    (rows, cols), sums, units = (spec.layout.rows, spec.layout.cols), tuple[str, ...](), list(spec.layout.units)
    if shape[0] != spec.shape[0]:
        gradient, rows, sums, units[0] = local_results(spec.grid, _sums_of_columns, gradient), (), rows, 1
    if shape[1] != spec.shape[1]:
        gradient, cols, sums, units[1] = local_results(spec.grid, _sums_of_rows, gradient), (), (*sums, *cols), 1
    return Gradient(gradient, Layout(rows, cols, sums, units))


def _sums_of_columns(array: Array) -> Array:
    return sums_along(array, 0)[None, :]


def _sums_of_rows(array: Array) -> Array:
    return sums_along(array, 1)[:, None]
