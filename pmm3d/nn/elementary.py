"""Elementary functions of tensors, element by element: powers, exponentials, logarithms, absolute values, limits."""

from __future__ import annotations

from math import inf
from numbers import Real
from typing import Any

from ..arrays import Array, NumpyLibrary
from ..errors import Pmm3dError
from .compute import check_real
from .elementwise import Activation, Aten, Elementwise, map_elementwise
from .tensor import Matrix, Tensor, as_tensor, summed

__all__ = ["abs", "clip", "exp", "log", "pow", "sqrt"]


def _power_slope(_: NumpyLibrary, g: Array, x: Array, exponent: float) -> Array:
    return g * (exponent * x ** (exponent - 1))


def _clip_slope(library: NumpyLibrary, g: Array, x: Array, low: float, high: float) -> Array:
    return library.xp.where((x >= low) & (x <= high), g, 0)


EXP = Activation(
    "exp", Elementwise(lambda library, x: library.xp.exp(x), Aten("exp")), Elementwise(lambda _, g, out: g * out), True
)
LOG = Activation(
    "log", Elementwise(lambda library, x: library.xp.log(x), Aten("log")), Elementwise(lambda _, g, x: g / x), False
)
SQRT = Activation(
    "sqrt",
    Elementwise(lambda library, x: library.xp.sqrt(x), Aten("sqrt")),
    Elementwise(lambda _, g, out: g / (2 * out)),
    True,
)
ABS = Activation(
    "abs",
    Elementwise(lambda library, x: library.xp.abs(x), Aten("abs")),
    Elementwise(lambda library, g, x: g * library.xp.sign(x)),
    False,
)
POW = Activation("pow", Elementwise(lambda _, x, exponent: x**exponent), Elementwise(_power_slope), False)
CONSTANT = POW._replace(slope=Elementwise(lambda library, g, x, exponent: library.xp.zeros_like(g)))
"""x to the power of 0. The slope of `POW` would be NaN at 0, and for an infinite gradient."""
CLIP = Activation(
    "clip", Elementwise(lambda library, x, low, high: library.xp.clip(x, low, high)), Elementwise(_clip_slope), False
)


def exp(x: Matrix) -> Tensor:
    """e to the power of x.

    Parameters
    ----------
    x : Tensor or DistMatrix
        (m, n), in any layout. Partial sums are summed first.

    Returns
    -------
    Tensor
        (m, n), in the layout of x. Nothing is sent.

    Raises
    ------
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.exp(DistMatrix.from_function(grid, (1, 2), lambda i, j: j)).gather().round(4)
    array([[1.    , 2.7183]])
    """
    return apply(x, EXP)


def log(x: Matrix) -> Tensor:
    """Natural logarithm of x; -inf for 0, NaN for negative numbers.

    Parameters
    ----------
    x : Tensor or DistMatrix
        As in `exp`, also for result and errors.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.log(DistMatrix.from_function(grid, (1, 2), lambda i, j: j + 1)).gather().round(4)
    array([[0.    , 0.6931]])
    """
    return apply(x, LOG)


def sqrt(x: Matrix) -> Tensor:
    """Square root of x; NaN for negative numbers.

    Parameters
    ----------
    x : Tensor or DistMatrix
        As in `exp`, also for result and errors.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.sqrt(DistMatrix.from_function(grid, (1, 3), lambda i, j: j * j)).gather()
    array([[0., 1., 2.]])
    """
    return apply(x, SQRT)


def abs(x: Matrix) -> Tensor:
    """Absolute value of x. The same as abs(x) of a tensor. The gradient at 0 is 0, as in torch.

    Parameters
    ----------
    x : Tensor or DistMatrix
        As in `exp`, also for result and errors.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.abs(DistMatrix.from_function(grid, (1, 3), lambda i, j: j - 1)).gather()
    array([[1., 0., 1.]])
    """
    return apply(x, ABS)


def pow(x: Matrix, exponent: float) -> Tensor:
    """x to the power of a number. The same as x**exponent of a tensor.

    Parameters
    ----------
    x : Tensor or DistMatrix
        As in `exp`, also for the result.
    exponent : float
        The same number on all ranks. A negative x has a power if the exponent is a whole number, else NaN.

    Raises
    ------
    DTypeError
        For integers and complex numbers.
    Pmm3dError
        If the exponent is no number.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     (nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j)) ** 3).gather()
    array([[0., 1., 8.]])
    """
    if not isinstance(exponent, Real):
        raise Pmm3dError(
            f"pow: the exponent is a number, the same on all ranks; got a {type(exponent).__name__}. "
            "nn.exp(y * nn.log(x)) has a tensor y as exponent"
        )
    return apply(x, POW if exponent else CONSTANT, float(exponent))


def clip(x: Matrix, min: float | None = None, max: float | None = None) -> Tensor:
    """x limited to the range from min to max.

    Parameters
    ----------
    x : Tensor or DistMatrix
        As in `exp`, also for the result.
    min, max : float or None
        The same numbers on all ranks. Default: no limit. Elements outside have the gradient 0; those at a limit have
        the gradient of x, as in torch.

    Raises
    ------
    DTypeError
        For integers and complex numbers.
    Pmm3dError
        If the limits are no numbers, or if min is larger than max.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.clip(DistMatrix.from_function(grid, (1, 4), lambda i, j: j), 1, 2).gather()
    array([[1., 1., 2., 2.]])
    """
    low, high = (limit if given is None else given for given, limit in ((min, -inf), (max, inf)))
    if not (isinstance(low, Real) and isinstance(high, Real) and low <= high):
        raise Pmm3dError(f"clip: min and max are numbers, and min is at most max; got {min!r} and {max!r}")
    return apply(x, CLIP, float(low), float(high))


def apply(x: Matrix, function: Activation, *numbers: Any) -> Tensor:
    """function(x, *numbers), element by element. Partial sums are summed first."""
    x = as_tensor(x)
    check_real(function.name, x.spec)
    x = summed(x)
    spec, local = x.spec, x.shard
    out = map_elementwise(spec, function.name, function.value, local, *numbers)
    backward = function.name + " backward"
    saved = {f"{function.name}.output": out} if function.of_output else {f"{function.name}.input": x}
    return x.from_op(
        out,
        (x,),
        lambda gradient, array: (map_elementwise(spec, backward, function.slope, gradient, array, *numbers),),
        keep=saved,
    )
