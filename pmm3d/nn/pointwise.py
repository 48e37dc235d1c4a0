"""Elementwise functions of one array, and their slopes, in the form that each array library computes in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..layout import LOW_PRECISION
from .compute import PER_ELEMENT, Form, computing, elementwise


class Pointwise(NamedTuple):
    """A function f of each element.

    value      (x, library): f(x)
    slope      (g, kept, library): g times the derivative of f, by x, or by f(x)
    of_output  whether `kept` is f(x), which is then all that is kept; else x
    torch      the name of torch's own kernels: in torch.ops.aten, the slope's with "_backward"
    into       (f, slope) for numpy's arrays, which also take out=: there is no array between them and the result
    """

    value: Callable[[Array, NumpyLibrary], Array]
    slope: Callable[[Array, Array, NumpyLibrary], Array]
    of_output: bool
    torch: str
    into: tuple[Callable[..., Array], Callable[..., Array]] | None = None


# Small results keep their relative accuracy: expit(-x) instead of 1 - expit(x), ndtr instead of 1 + erf,
# (1 - y) (1 + y) instead of 1 - y y.


def _logistic(x: Array, library: NumpyLibrary) -> Array:
    return library.special("expit")(x)


def _silu_slope(g: Array, x: Array, library: NumpyLibrary) -> Array:
    return g * (_logistic(x, library) * (1 + x * _logistic(-x, library)))


def _normal(x: Array, library: NumpyLibrary) -> Array:
    """The normal distribution function."""
    return library.special("ndtr")(x)


def _gelu_slope(g: Array, x: Array, library: NumpyLibrary) -> Array:
    density = library.xp.exp(-0.5 * x * x) * (1 / sqrt(2 * pi))
    return g * (_normal(x, library) + x * density)


def _tanh_slope(g: Array, y: Array, library: NumpyLibrary) -> Array:
    return g * ((1 - y) * (1 + y))


RELU = Pointwise(lambda x, library: library.xp.maximum(x, 0), lambda g, out, _: g * (out > 0), True, "relu",
                 (lambda x, out=None: np.maximum(x, 0, out=out),
                  lambda g, kept, out=None: np.multiply(g, kept > 0, out=out)))
TANH = Pointwise(lambda x, library: library.xp.tanh(x), _tanh_slope, True, "tanh",
                 (np.tanh, lambda g, kept, out=None: np.multiply(g, (1 - kept) * (1 + kept), out=out)))
SIGMOID = Pointwise(_logistic, lambda g, out, _: g * (out * (1 - out)), True, "sigmoid")
SILU = Pointwise(lambda x, library: x * _logistic(x, library), _silu_slope, False, "silu")
GELU = Pointwise(lambda x, library: x * _normal(x, library), _gelu_slope, False, "gelu")


class OnePass(NamedTuple):
    """A Pointwise for arrays of one library: value(x), slope(gradient, kept); into: whether both take out=."""

    value: Callable[..., Array]
    slope: Callable[..., Array]
    into: bool = False


def in_one_pass(function: Pointwise, library: NumpyLibrary, dtype: str) -> OnePass:
    """torch's own kernels; a fused one where the library makes such (cupy); else the expression, of slices in cache."""
    if library.name == "numpy" and library.has_data and function.into is not None and dtype not in LOW_PRECISION:
        return OnePass(*function.into, into=True)
    return _of_library(function, library) if library.has_data else _expressions(function, library)


@cache
def _of_library(function: Pointwise, library: NumpyLibrary) -> OnePass:
    if library.name == "torch":
        return _of_torch(library.xp.ops.aten, function.torch)
    value, slope, _ = _expressions(function, library)
    return OnePass(library.fused(value), library.fused(slope))


def rounded(library: NumpyLibrary, made: Array, like: Array) -> Array:
    """What is made, in the type of another array."""
    dtype = library.dtype(like)
    return made if library.dtype(made) == dtype else library.astype(made, dtype)


def in_one_kernel(library: NumpyLibrary, maker: Callable[[NumpyLibrary], Callable[..., Array]]) -> Callable[..., Array]:
    """The elementwise function that a maker, a function of a module, makes for a library; fused where that is done."""
    return _fused(library, maker) if library.has_data and not library.on_host else maker(library)


@cache
def _fused(library: NumpyLibrary, maker: Callable[[NumpyLibrary], Callable[..., Array]]) -> Callable[..., Array]:
    return library.fused(maker(library))


def _expressions(function: Pointwise, library: NumpyLibrary) -> OnePass:
    def widened(x: Array) -> Array:
        return library.astype(x, "float32") if library.dtype(x) in LOW_PRECISION else x

    def value(x: Array) -> Array:
        return rounded(library, function.value(widened(x), library), x)

    def slope(g: Array, kept: Array) -> Array:
        return rounded(library, function.slope(g, widened(kept), library), g)

    return OnePass(value, slope)


def _of_torch(aten: Any, name: str) -> OnePass:
    if name == "relu":
        return OnePass(aten.relu, lambda g, out: aten.threshold_backward(g, out, 0))
    return OnePass(getattr(aten, name), getattr(aten, f"{name}_backward"))


def activated(form: Form, function: Pointwise, array: Array) -> Array:
    """Return the function of a local array of that form."""
    apply = in_one_pass(function, form.library, form.dtype)
    with computing(form.grid, "elementwise", PER_ELEMENT * prod(array.shape), function.torch):
        return elementwise(form, apply.value, array, into=apply.into)


def slope_of(form: Form, function: Pointwise, gradient: Array, kept: Array) -> Array:
    """The gradient by the function's argument, of a new array."""
    apply = in_one_pass(function, form.library, form.dtype)
    with computing(form.grid, "elementwise", PER_ELEMENT * prod(form.local_shape), function.torch + " backward"):
        return elementwise(form, apply.slope, gradient, kept, into=apply.into)
