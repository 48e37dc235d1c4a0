"""Operations on tensors, one function with its gradient rule each. Elementwise ones move no data.

A new one: compute the local result, name the parents, and say how the gradient goes back. `square`, complete:

    def square(x):
        form, local, out = x.form, x.local, x.form.new()
        in_chunks(lambda part: part * part, out, local)

        def rule(gradient):
            dx = form.new()
            in_chunks(lambda g, part: 2 * g * part, dx, gradient, local)
            return (dx,)

        return x.made(out, (x,), rule)
"""

from __future__ import annotations

from math import pi, sqrt

import array_api_compat
import numpy as np

from ..arrays import NumpyLibrary, random
from ..errors import LayoutError, Pmm3dError
from ..layout import Box, Layout, part_sizes
from .dense import column_sums, computing, gather, linear, reduce
from .parameter import Parameter
from .tensor import CHUNK, Form, Tensor, add, in_chunks, relayout, scale

__all__ = ["add", "dropout", "gelu", "layer_norm", "linear", "relayout", "relu", "scale", "sigmoid", "silu", "tanh"]


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return _elementwise(x, lambda part, xp: part.clip(0), lambda out, xp: out > 0, of_output=True)


def tanh(x: Tensor) -> Tensor:
    return _elementwise(x, lambda part, xp: xp.tanh(part), lambda out, xp: 1 - out * out, of_output=True)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _elementwise(x, _logistic, lambda out, xp: out * (1 - out), of_output=True)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""

    def derivative(part, xp):
        gate = _logistic(part, xp)
        return gate * (1 + part * (1 - gate))

    return _elementwise(x, lambda part, xp: part * _logistic(part, xp), derivative)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), Phi the normal distribution function, exact (by erf)."""

    def derivative(part, xp):
        density = xp.exp(-0.5 * part * part) * (1 / sqrt(2 * pi))
        return _normal(part) + part * density

    return _elementwise(x, lambda part, xp: part * _normal(part), derivative)


def _elementwise(x: Tensor, function, derivative, of_output: bool = False) -> Tensor:
    """function(part, namespace), with the derivative taken of the input, or of the output, which is then all that is
    kept."""
    form, local = x.form, x.local
    xp = array_api_compat.array_namespace(local)
    out = form.new()
    with computing(form.grid, "elementwise"):
        in_chunks(lambda part: function(part, xp), out, local)
    kept = out if of_output else local

    def rule(gradient):
        dx = form.new()
        with computing(form.grid, "elementwise"):
            in_chunks(lambda g, part: g * derivative(part, xp), dx, gradient, kept)
        return (dx,)

    return x.made(out, (x,), rule)


def _logistic(part, xp):
    return 0.5 * (1 + xp.tanh(0.5 * part))


def _normal(part):
    return 0.5 * (1 + _erf(part * sqrt(0.5)))


def _erf(part):
    if array_api_compat.is_torch_array(part):
        return part.erf()
    if array_api_compat.is_cupy_array(part):
        from cupyx.scipy.special import erf
    else:
        from scipy.special import erf
    return erf(part)


def dropout(x: Tensor, p: float, seed: int, stream: int = 0) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p).

    Which ones depends on seed, stream, and row and column in the whole matrix only: the same on every grid.
    """
    if not 0 <= p < 1:
        raise Pmm3dError(f"dropout: p is a probability below 1; got {p}")
    if p == 0:
        return x
    form = x.form
    kept = form.library.from_numpy(_kept(x.box, x.shape[1], p, seed, stream, form.grid.workspace), "uint8")

    def masked(array):
        out = form.new()
        with computing(form.grid, "elementwise"):
            in_chunks(lambda part, keep: part * keep * (1 / (1 - p)), out, array, kept)
        return out

    return x.made(masked(x.local), (x,), lambda gradient: (masked(gradient),))


def _kept(box: Box, columns: int, p: float, seed: int, stream: int, workspace) -> np.ndarray:
    """1 for the elements of a block that stay, 0 for the others; uint8."""
    kept = workspace.array(box.shape, "uint8", NumpyLibrary())
    limit = np.uint64(int(p * 2**64))
    cols = np.arange(box.c0, box.c1, dtype=np.uint64)
    step = max(1, CHUNK // max(1, len(cols)))
    for start in range(0, box.shape[0], step):
        rows = np.arange(box.r0 + start, min(box.r1, box.r0 + start + step), dtype=np.uint64)
        kept[start : start + step] = random.bits(rows[:, None] * np.uint64(columns) + cols, seed, stream) >= limit
    return kept


def layer_norm(x: Tensor, gain: Parameter, bias: Parameter, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias, along the columns, which may be split over ranks.

    x           (m, n)   rows over data, z; columns over one axis
    gain, bias  (1, n)   columns as x

    Each rank receives (G-1) 2 m_local numbers forward (the other ranks' means and squares, put together as in Chan,
    Golub, LeVeque 1983) and, backward, the sum of as many.
    """
    if x.shape[1] != gain.shape[1]:
        raise LayoutError(f"layer_norm: the input has {x.shape[1]} columns, the layer {gain.shape[1]}")
    x = relayout(x, Layout(x.layout.rows, gain.layout.cols))
    form, local, axis, tape = x.form, x.local, x.grid.axis(gain.layout.cols[0]), x.tape
    xp = array_api_compat.array_namespace(local)
    mean, variance = _moments(form, local, axis)
    inverse = 1 / xp.sqrt(variance + eps)
    normal, out = form.new(), form.new()
    with computing(form.grid, "elementwise"):
        _by_rows(lambda part, m, s: (part - m) * s, normal, local, mean, inverse)
        _by_rows(lambda part: part * gain.local + bias.local, out, normal)

    def rule(gradient):
        scaled, product, dx = form.new(), form.new(), form.new()
        with computing(form.grid, "elementwise"):
            _by_rows(lambda g: g * gain.local, scaled, gradient)
            in_chunks(lambda g, part: g * part, product, scaled, normal)
            sums = xp.stack([xp.sum(scaled, axis=1), xp.sum(product, axis=1)])
        with form.grid.ledger.phase("layer norm"):
            sums = reduce(axis, sums).wait() / form.shape[1]
        with computing(form.grid, "elementwise"):
            _by_rows(lambda g, part, a, b, s: (g - a - part * b) * s, dx, scaled, normal, sums[0][:, None],
                     sums[1][:, None], inverse)
            in_chunks(lambda g, part: g * part, product, gradient, normal)
        tape.parallel.gradients.vector(gain, lambda out, beta: column_sums(form, product, out, beta))
        tape.parallel.gradients.vector(bias, lambda out, beta: column_sums(form, gradient, out, beta))
        return dx, None, None

    return x.made(out, (x, gain, bias), rule)


def _moments(form: Form, local, axis):
    """(mean, variance) of each row, as columns, put together from each rank's own mean and sum of squares."""
    xp = array_api_compat.array_namespace(local)
    columns = local.shape[1]
    deviation = form.new()
    with computing(form.grid, "elementwise"):
        mean = xp.sum(local, axis=1) / max(1, columns)
        _by_rows(lambda part, m: (part - m) ** 2, deviation, local, mean[:, None])
        mine = xp.stack([mean, xp.sum(deviation, axis=1)])
    with form.grid.ledger.phase("layer norm"):
        told = gather(axis, mine)
    shares = part_sizes(form.shape[1], axis.size)
    mean = sum(told[rank, 0] * (shares[rank] / form.shape[1]) for rank in range(axis.size))
    squares = sum(told[rank, 1] + shares[rank] * (told[rank, 0] - mean) ** 2 for rank in range(axis.size))
    return mean[:, None], (squares / form.shape[1])[:, None]


def _by_rows(function, out, *arrays) -> None:
    """out = function(*arrays) on slices of rows; arrays of one column go along."""
    step = max(1, CHUNK // max(1, out.shape[1]))
    for start in range(0, out.shape[0], step):
        out[start : start + step] = function(*(array[start : start + step] for array in arrays))
