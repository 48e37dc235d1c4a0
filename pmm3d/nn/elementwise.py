"""Elementwise functions of local arrays: a loop over slices, and kernels that a library runs in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import pi, prod, sqrt
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary, by_rows
from ..layout import LOW_PRECISION
from .compute import PER_ELEMENT, TensorSpec, computing


@dataclass(frozen=True, eq=False)
class Elementwise:
    """An elementwise function that some libraries compute in one pass. Make it at module level: kernels are cached.

    expression   (library, *operands) -> array. 16-bit operands are passed as float32, unless another operand is
                 float32 or float64
    torch        a kernel of torch, or (torch, *operands) -> array. None: the expression
    widens       pass 16-bit operands as float32 also beside operands of float32 or float64
    """

    expression: Callable[..., Array]
    torch: Callable[..., Array] | None = None
    widens: bool = False

    def compiled(self, library: NumpyLibrary, dtype: str, *operands: Any) -> Callable[..., Array]:
        """Kernel of this library for operands of these types, with a result of type `dtype`."""
        return _compiled(
            self, library, dtype, tuple([library.dtype(each) if hasattr(each, "dtype") else "" for each in operands])
        )


@cache
def _compiled(function: Elementwise, library: NumpyLibrary, dtype: str, types: tuple[str, ...]) -> Callable[..., Array]:
    if library.name == "torch" and function.torch is not None:
        return partial(function.torch, library.xp)
    low, widens = {dtype, *types} & set(LOW_PRECISION), function.widens or not {"float32", "float64"} & set(types)

    def computed(*operands: Any) -> Array:
        if not low:
            return function.expression(library, *operands)
        if widens:
            operands = tuple(
                [
                    library.astype(each, "float32") if given in LOW_PRECISION else each
                    for each, given in zip(operands, types)
                ]
            )
        made = function.expression(library, *operands)
        return made if library.dtype(made) == dtype else library.astype(made, dtype)

    return library.fused(computed)


class Aten:
    """A kernel of torch, as a function of (torch, *operands). more, named: arguments after the operands."""

    def __init__(self, name: str, *more: Any, **named: Any):
        self._name, self._more, self._named = name, more, named
        self._out = "grad_input" if name.endswith("_backward") else "out"

    def __call__(self, torch: Any, *operands: Array) -> Array:
        return getattr(torch.ops.aten, self._name)(*operands, *self._more, **self._named)

    def into(self, torch: Any, out: Array, *operands: Array) -> Array:
        """Write the result to `out`, which may be one of the operands, and return it."""
        return self.bound(torch, out, *operands)()

    def bound(self, torch: Any, out: Array, *operands: Array) -> Callable[[], Array]:
        """The function that repeats `into` on these arrays."""
        kernel = getattr(getattr(torch.ops.aten, self._name), self._out)
        return partial(kernel, *operands, *self._more, **self._named, **{self._out: out})


KERNELS = {
    operator.add: Aten("add"),
    operator.sub: Aten("sub"),
    operator.mul: Aten("mul"),
    operator.truediv: Aten("div"),
    operator.neg: Aten("neg"),
}
"""torch's kernels of operators. They write directly to the array of the result; a loop over slices would write twice.
"""


def map_elementwise(
    spec: TensorSpec, name: str | None, function: Callable[..., Array] | Elementwise, *operands: Any, out: Array = None
) -> Array:
    """function(*operands), element by element, as a local array of the given spec.

    Parameters
    ----------
    spec : TensorSpec
        Spec of the result: its grid, library, element type and local shape.
    name : str or None
        Name of the pass in a dry run. The time counts as "elementwise", and collectives progress in the background.
        None: the call is part of a `computing` section.
    function : callable
        Function of slices of the arrays, such as operator.add.
    *operands
        Arrays of the result's shape, or of one row or one column; and numbers.
    out : Array or None
        Array for the result, which may be one of the operands. Default: a new array.

    Notes
    -----
    On the host, the function is called for slices that fit into a core's cache, in as many threads as the BLAS has. A
    device, and torch's own kernels, compute all elements at once. In a dry run the function is not called.

    Examples
    --------
    >>> from operator import add
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
    ...     nn.map_elementwise(x.spec, "add", add, x.local, 1)
    array([[1., 2., 3.]])
    """
    if name is not None:
        work, recorder = PER_ELEMENT * prod(spec.local_shape), spec.grid.engine.recorder
        if recorder is not None and out is None:
            out = spec.new()
        with computing(spec.grid, "elementwise", work, name):
            made = map_elementwise(spec, None, function, *operands, out=out)
        if recorder is not None:
            recorder.kernel("elementwise", work, partial(_bound, spec, function), (out, *operands), name, [out])
        return made
    library = spec.library
    if (kernel := _aten(spec, function, operands)) is not None:
        return kernel.into(library.xp, spec.new() if out is None else out, *operands)
    if isinstance(function, Elementwise):
        function = function.compiled(library, spec.dtype, *operands) if library.has_data else function.expression
    if out is None and library.slice_elements is None:
        made = function(*operands)
        return made if library.dtype(made) == spec.dtype else library.astype(made, spec.dtype)
    out = spec.new() if out is None else out
    by_rows(library, function, out, *operands)
    return out


def _bound(
    spec: TensorSpec, function: Callable[..., Array] | Elementwise, out: Array, *operands: Any
) -> Callable[[], Any]:
    """Return the function that repeats `map_elementwise` on the same arrays."""
    library = spec.library
    if (kernel := _aten(spec, function, operands)) is not None:
        return kernel.bound(library.xp, out, *operands)
    if isinstance(function, Elementwise):
        function = function.compiled(library, spec.dtype, *operands)
    return partial(by_rows, library, function, out, *operands)


def _aten(spec: TensorSpec, function: Callable[..., Array] | Elementwise, operands: Sequence[Any]) -> Aten | None:
    """Kernel of torch that writes directly to the result."""
    library = spec.library
    kernel = function.torch if isinstance(function, Elementwise) else KERNELS.get(function)
    if (
        isinstance(kernel, Aten)
        and library.name == "torch"
        and library.has_data
        and all([hasattr(each, "dtype") and library.dtype(each) == spec.dtype for each in operands])
    ):
        return kernel
    return None


TIMES = Elementwise(lambda _, x, factor: x * factor, lambda torch, x, factor: torch.mul(x, factor))
"""Product of an array and a number. In a plain product of float16, numpy would round the number to float16 first."""


class Activation(NamedTuple):
    """An elementwise function f. `value` computes f(x), and `slope` computes g f'(x).

    The operands of `slope` are g and f(x) if `of_output`, else g and x. Numbers on which f depends follow in both.
    """

    name: str
    value: Elementwise
    slope: Elementwise
    of_output: bool


CUBIC, STEEP = 0.044715, 2 * sqrt(2 / pi)
"""Coefficients of the tanh form of GELU."""


# Small results keep their relative accuracy: expit(-x) instead of 1 - expit(x), ndtr instead of 1 + erf,
# (1 - y) (1 + y) instead of 1 - y y.


def _logistic(library: NumpyLibrary, x: Array) -> Array:
    return library.special("expit")(x)


def _normal(library: NumpyLibrary, x: Array) -> Array:
    """Cumulative distribution function of the normal distribution."""
    return library.special("ndtr")(x)


def _silu_slope(library: NumpyLibrary, g: Array, x: Array) -> Array:
    return g * (_logistic(library, x) * (1 + x * _logistic(library, -x)))


def _gelu_slope(library: NumpyLibrary, g: Array, x: Array) -> Array:
    density = library.xp.exp(-0.5 * x * x) * (1 / sqrt(2 * pi))
    return g * (_normal(library, x) + x * density)


def _gelu_tanh_factor(library: NumpyLibrary, x: Array) -> Array:
    """Factor of x in GPT-2's GELU, which approximates the normal distribution: (1 + tanh u) / 2 = expit(2 u)."""
    return _logistic(library, x * ((1 + CUBIC * x * x) * STEEP))


def _gelu_tanh_slope(library: NumpyLibrary, g: Array, x: Array) -> Array:
    factor, near = _gelu_tanh_factor(library, x), library.xp.clip(x, -32, 32)  # beyond 32, the second term is 0
    other = _gelu_tanh_factor(library, -x)
    return g * (factor + near * factor * other * ((1 + 3 * CUBIC * near * near) * STEEP))


RELU = Activation(
    "relu",
    Elementwise(lambda library, x: library.xp.maximum(x, 0), Aten("relu")),
    Elementwise(lambda _, g, out: g * (out > 0), Aten("threshold_backward", 0)),
    True,
)
TANH = Activation(
    "tanh",
    Elementwise(lambda library, x: library.xp.tanh(x), Aten("tanh")),
    Elementwise(lambda _, g, out: g * ((1 - out) * (1 + out)), Aten("tanh_backward")),
    True,
)
SIGMOID = Activation(
    "sigmoid",
    Elementwise(_logistic, Aten("sigmoid")),
    Elementwise(lambda _, g, out: g * (out * (1 - out)), Aten("sigmoid_backward")),
    True,
)
SILU = Activation(
    "silu",
    Elementwise(lambda library, x: x * _logistic(library, x), Aten("silu")),
    Elementwise(_silu_slope, Aten("silu_backward")),
    False,
)
GELU = Activation(
    "gelu",
    Elementwise(lambda library, x: x * _normal(library, x), Aten("gelu")),
    Elementwise(_gelu_slope, Aten("gelu_backward")),
    False,
)
GELU_TANH = Activation(
    "gelu_tanh",
    Elementwise(lambda library, x: x * _gelu_tanh_factor(library, x), Aten("gelu", approximate="tanh")),
    Elementwise(_gelu_tanh_slope, Aten("gelu_backward", approximate="tanh")),
    False,
)
