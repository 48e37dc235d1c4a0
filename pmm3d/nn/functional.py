"""Activations, dropout, LayerNorm and RMSNorm, each a function with its gradient rule. Activations send nothing.

To write another one, compute the local result, name the operands, and return their gradients (see docs/networks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import mul
from typing import Any

from ..arrays import Array, random
from ..arrays.bits import Bits
from ..comm import assign, call
from ..errors import DTypeError, LayoutError, Pmm3dError, hint
from ..layout import LOW_PRECISION, Box, Layout, RaggedRows, real
from .compute import TensorSpec, array_namespace, column_sums, computing, local_results, sums_along
from .contract import Gradient, LazyMatrix
from .elementary import apply
from .elementwise import GELU, GELU_TANH, RELU, SIGMOID, SILU, TANH, Elementwise, map_elementwise
from .keep import Form
from .parts import check_unit, in_units
from .statistics import mean_squares, moments, sum_over
from .tensor import Tensor, relayout, summed

__all__ = ["dropout", "gelu", "gelu_tanh", "layer_norm", "relu", "rms_norm", "sigmoid", "silu", "tanh"]

MASKED = Elementwise(lambda _, x, mask, scale: x * mask * scale, lambda _, x, mask, scale: (x * mask).mul_(scale))
STANDARDIZED = Elementwise(lambda _, x, mean, inverse: (x - mean) * inverse)
STANDARDIZED_SLOPE = Elementwise(lambda _, g, normal, mean, slope, inverse: (g - mean - normal * slope) * inverse)
AFFINE = Elementwise(lambda _, x, gain, bias: x * gain + bias)


def relu(x: Tensor) -> Tensor:
    """max(x, 0).

    Parameters
    ----------
    x : Tensor
        (m, n), in any layout. Partial sums are summed first.

    Returns
    -------
    Tensor
        (m, n), in the layout of x. Nothing is sent.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.relu(nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j - 1))).gather()
    array([[0., 0., 1.]])
    """
    return apply(x, RELU)


def tanh(x: Tensor) -> Tensor:
    """tanh(x).

    Parameters
    ----------
    x : Tensor
        As in `relu`, also for the result.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.tanh(nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j))).gather().round(4)
    array([[0.    , 0.7616]])
    """
    return apply(x, TANH)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)).

    Parameters
    ----------
    x : Tensor
        As in `relu`, also for the result.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.sigmoid(nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j))).gather().round(4)
    array([[0.5   , 0.7311]])
    """
    return apply(x, SIGMOID)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x).

    Parameters
    ----------
    x : Tensor
        As in `relu`, also for the result.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.silu(nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j))).gather().round(4)
    array([[0.    , 0.7311]])
    """
    return apply(x, SILU)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the exact normal distribution function Phi.

    Parameters
    ----------
    x : Tensor
        As in `relu`, also for the result.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.gelu(nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j))).gather().round(4)
    array([[0.    , 0.8413]])
    """
    return apply(x, GELU)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, the approximation of `gelu` in GPT-2 ("gelu_new").

    Parameters
    ----------
    x : Tensor
        As in `relu`, also for the result.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.gelu_tanh(nn.Tensor(DistMatrix.from_function(grid, (1, 2), lambda i, j: j))).gather().round(4)
    array([[0.    , 0.8412]])
    """
    return apply(x, GELU_TANH)


ACTIVATIONS = {function.__name__: function for function in (relu, gelu, gelu_tanh, tanh, silu, sigmoid)}


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """Activation with this name. Raises Pmm3dError for an unknown name."""
    if name not in ACTIVATIONS:
        raise Pmm3dError(f"there is no activation named {name!r}{hint(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def dropout(x: Tensor, p: float, seed: int, stream: int | Callable[[], int] = 0) -> Tensor:
    """Zero each element with probability p, and multiply the others by 1 / (1 - p).

    Parameters
    ----------
    x : Tensor
        (m, n), in any layout. Partial sums are summed first.
    p : float
        Probability, at least 0 and below 1.
    seed : int
        Seed of the mask. The mask also depends on row and column in the whole matrix, so it is the same on every grid.
    stream : int or callable
        Second seed, or a function that returns it. A replayed step calls the function again. Default: 0.

    Returns
    -------
    Tensor
        (m, n), in the layout of x. Nothing is sent.

    Raises
    ------
    Pmm3dError
        For another `p`.

    Notes
    -----
    The mask that the backward pass needs takes a bit for each element.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 4), lambda i, j: 0 * j + 1))
    ...     nn.dropout(x, 0.5, seed=1).gather()
    array([[2., 0., 2., 0.]])
    """
    p = check_probability("dropout: p", p)
    if p == 0:
        return x
    x = summed(x)
    spec = x.spec
    if isinstance(spec.shape[0], RaggedRows):
        spec.shape[0].refuse()
    mask, scale = _dropout_mask(spec, x.box, p, seed, stream, x.tape.tile), 1 / (1 - p)
    out = map_elementwise(spec, "dropout", MASKED, x.shard, mask, scale)
    form = Form.of(spec.grid, Bits(), mask)

    def rule(gradient: Array, data: Array) -> tuple[Array]:
        return (map_elementwise(spec, "dropout backward", MASKED, gradient, form.decoded(data), scale),)

    is_kept = x.requires_grad and x.tape.recording and x.tape.keeping
    return x.from_op(out, (x,), rule, keep={"dropout.mask": form.encoded(mask)} if is_kept else {})


def check_probability(name: str, p: float) -> float:
    return real(p, f"{name} must be at least 0 and below 1", 0, Pmm3dError, 1)


def _dropout_mask(spec: TensorSpec, box: Box, p: float, seed: int, stream: int | Callable[[], int], tile: Any) -> Array:
    """Mask of dropout of a shard, uint8. tile: of `Tape`."""
    library = spec.library
    mask = spec.grid.workspace.array(box.shape, "uint8", library)
    runs = [(slice(None), box)] if tile is None else tile.runs(box)

    def fill(mask: Array) -> None:
        for rows, own in runs:
            fill_mask(mask[rows], own, spec.shape[1], p, seed, stream() if callable(stream) else stream)

    if library.has_data:
        call(spec.grid.engine, fill, mask, writes=[mask])
    else:
        library.passed("dropout mask", mask)
    return mask


def fill_mask(out: Array, box: Box, columns: int, p: float, seed: int, stream: int) -> None:
    """Fill `out` with the mask of dropout, 0 or 1, for a box of a matrix with this number of columns.

    The mask is the same on every grid and in every array library.
    """
    limit = int(p * 2**64)
    random.fill_by(lambda index: random.at_least(random.bits(index, seed, stream), limit), out, box, columns)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias, along the columns.

    Parameters
    ----------
    x : Tensor
        (m, n). The columns may be split over one or several axes.
    gain, bias : Tensor
        (1, n), of the type of x. If x is 16-bit, they may be float32.
    eps : float
        Added to the variance. Default: 1e-5.

    Returns
    -------
    Tensor
        (m, n), of the type of x. Its columns have the layout of `gain`.

    Raises
    ------
    LayoutError
        If the n differ.
    DTypeError
        For different types or libraries.

    Notes
    -----
    Along each axis of G ranks that splits the columns, each rank receives (G-1) 2 numbers for each of its rows: means
    and squares, which are merged as in Chan, Golub, LeVeque 1983. The backward pass all-reduces 2 numbers a row.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     norm = nn.LayerNorm(grid, 2)
    ...     x = nn.Tensor(DistMatrix.random(grid, (5, 2), dtype="float32"))
    ...     nn.layer_norm(x, norm.gain, norm.bias).shape
    (5, 2)
    """
    if x.library.name == "torch" and gain.dtype == x.dtype and x.grid.shape.along(gain.layout.cols) == 1:
        return _layer_norm_of_torch(x, gain, bias, eps)
    return _normalized("layer_norm", x, gain, bias, eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, unit: int | None = None) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * gain, along the columns (Zhang, Sennrich 2019).

    Parameters
    ----------
    x, gain, eps
        As in `layer_norm`, also for result and errors. Default of `eps`: 1e-6.
    unit : int or None
        Normalize each unit of this number of columns by its own mean square, such as each head. n is a multiple of the
        unit, and gain is (1, unit). The result has the layout of x, in whole units. Default: all columns are one unit.

    Notes
    -----
    Along each axis that splits the columns, the forward and the backward pass all-reduce a number for each row. With
    `unit`, nothing is sent if ranks hold whole units and the gain is replicated. The gradient of the gain then has
    partial sums over the axes that split rows or columns.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.random(grid, (5, 2), dtype="float32"))
    ...     nn.rms_norm(x, nn.RMSNorm(grid, 2).gain).shape
    (5, 2)
    >>> with Grid(shape="ddp") as grid:
    ...     heads = nn.Tensor(DistMatrix.from_function(grid, (1, 4), lambda i, j: 1.0 + 9 * (j > 1)))
    ...     nn.rms_norm(heads, nn.RMSNorm(grid, 4, unit=2, dtype="float64").gain, 0, unit=2).gather()
    array([[1., 1., 1., 1.]])
    """
    return _normalized("rms_norm", x, gain, None, eps, unit)


def _normalized(name: str, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, unit: int | None = None) -> Tensor:
    """Normalize by mean and variance; without bias, by the mean square. unit: as in `rms_norm`."""
    x, vectors = _aligned(name, x, [gain] if bias is None else [gain, bias], unit)
    gain, outer = vectors[0], x.spec
    spec = outer if unit is None else _of_units(outer, unit)
    local, cols, backward = _reshaped(spec, x.shard), spec.layout.cols, name + " backward"
    xp = array_namespace(local)
    wanted, learns, shifts = x.requires_grad, gain.requires_grad, bias is not None

    def statistics(local: Array) -> tuple[Array | int, Array]:
        with spec.grid.ledger.phase(name.replace("_", " ")):
            mean, variance = moments(spec, local) if shifts else (0, mean_squares(spec, local))
        with computing(spec.grid, "elementwise", name=name):
            return mean, 1 / xp.sqrt(variance + eps)

    mean, inverse = local_results(spec.grid, statistics, local)
    if bias is None:
        normal = map_elementwise(spec, name, mul, local, inverse)
        out = map_elementwise(spec, name, mul, normal, gain.shard)
    else:
        normal = map_elementwise(spec, name, STANDARDIZED, local, mean, inverse)
        out = map_elementwise(spec, name, AFFINE, normal, *(each.shard for each in vectors))

    def slopes(scaled: Array, normal: Array) -> Array:
        """Means over the columns that the gradient by x needs."""
        with computing(spec.grid, "elementwise", name=backward):
            means = [sums_along(scaled, 1)] * shifts
            sums = xp.stack([*means, sums_along(map_elementwise(spec, None, mul, scaled, normal), 1)])
        with spec.grid.ledger.phase(name.replace("_", " ")):
            return sum_over(spec.grid, sums, cols) / spec.shape[1]

    def rule(gradient: Array, normal: Array, inverse: Array, factor: Array) -> list[Array | LazyMatrix | None]:
        gradient = _reshaped(spec, gradient)
        product = map_elementwise(spec, backward, mul, gradient, normal) if learns else None
        of_rows = [None if product is None else _sum_of_rows(spec, product)]
        of_rows += [_sum_of_rows(spec, gradient)] * shifts
        if not wanted:
            return [None, *of_rows]
        scaled = map_elementwise(spec, backward, mul, gradient, factor)
        sums = local_results(spec.grid, slopes, scaled, normal)
        dx = map_elementwise(
            spec,
            backward,
            STANDARDIZED_SLOPE,
            scaled,
            normal,
            sums[0][:, None] if shifts else 0,
            sums[-1][:, None],
            inverse,
        )
        return [_reshaped(outer, dx), *of_rows]

    saved = {f"{name}.normal": normal, f"{name}.inverse": inverse, f"{name}.gain": gain}
    return x.from_op(_reshaped(outer, out), (x, *vectors), rule, keep=saved)


def _of_units(spec: TensorSpec, unit: int) -> TensorSpec:
    """Spec of a tensor in whole units of columns, with a row for each unit of each row."""
    rows, cols = spec.local_shape
    units = spec.shape[1] // unit
    return TensorSpec(
        spec.grid,
        (spec.shape[0] * units, unit),
        Layout((*spec.layout.rows, *spec.layout.cols)),
        spec.dtype,
        spec.library,
        (rows * (cols // unit), unit),
    )


def _reshaped(spec: TensorSpec, array: Array) -> Array:
    """Local array in the shape of the spec: a view, or a copy of an array with gaps or in another order."""
    if tuple(array.shape) == spec.local_shape:
        return array
    if not spec.library.is_contiguous(array):
        held = spec.new(tuple(array.shape))
        assign(spec.grid.engine, held, array)
        array = held
    return array.reshape(*spec.local_shape)


def _aligned(name: str, x: Tensor, vectors: list[Tensor], unit: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the input of a norm, and its gain and bias, with columns in the layout of the gain. With `unit`, return
    the input in whole units, and the gain replicated."""
    gain = vectors[0]
    if unit is not None:
        check_unit(name, x, unit)
        if gain.shape[1] != unit:
            raise LayoutError(f"{name}: units have {unit} columns, the gain {gain.shape[1]}")
    elif x.shape[1] != gain.shape[1]:
        raise LayoutError(f"{name}: the input has {x.shape[1]} columns, the layer {gain.shape[1]}")
    taken = ("float32", x.dtype) if x.dtype in LOW_PRECISION else (x.dtype,)
    if gain.dtype not in taken or any((each.dtype, each.library) != (gain.dtype, x.library) for each in vectors):
        raise DTypeError(
            f"{name}: the input is {x!r}, gain and bias {vectors!r}: they must be of one library and "
            "type, or gain and bias float32 if the input is 16-bit"
        )
    if unit is not None:
        return in_units(summed(x), unit), [relayout(gain, Layout())]
    units = x.layout.units[0], gain.layout.units[1]
    x = relayout(x, Layout(x.layout.rows, gain.layout.cols, units=units))
    return x, [gain, *(relayout(each, gain.layout) for each in vectors[1:])]


def _layer_norm_of_torch(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute `layer_norm` of whole rows by torch's kernels, which take a third of the time."""
    x, [gain, bias] = _aligned("layer_norm", x, [gain, bias])
    spec, library, local, size = x.spec, x.library, x.shard, [x.shape[1]]
    out, aten = spec.new(), library.xp.ops.aten if library.has_data else None

    def forward(out: Array, local: Array, gain: Array, bias: Array) -> tuple[Array, ...]:
        with computing(spec.grid, "elementwise", name="layer_norm"):
            if aten is None:
                library.passed("layer_norm", out, local)
                return tuple(library.empty((spec.local_shape[0], 1), spec.accumulation.dtype) for _ in range(2))
            out[...], mean, inverse = aten.native_layer_norm(local, size, gain[0], bias[0], eps)
            return mean, inverse

    mean, inverse = local_results(spec.grid, forward, out, local, gain.shard, bias.shard, writes=[out])
    needed = [x.requires_grad, gain.requires_grad, bias.requires_grad]
    of_rows = Layout((), spec.layout.cols, spec.layout.rows, (1, spec.layout.units[1]))

    def backward(dx: Array | None, gradient: Array, local: Array, *others: Array) -> tuple[Array | None, ...]:
        """Set `dx`, and return the gradients of gain and bias."""
        with computing(spec.grid, "elementwise", name="layer_norm backward"):
            if aten is None:
                library.passed("layer_norm backward", *2 * [gradient, local], *([] if dx is None else [dx]))
                return tuple(library.empty((1, size[0]), spec.dtype) for _ in range(2))
            mean, inverse, gain, bias = others
            of_input, *vectors = aten.native_layer_norm_backward(
                gradient, local, size, mean, inverse, gain[0], bias[0], needed
            )
            if dx is not None:
                dx[...] = of_input
            return tuple(vectors)

    def rule(gradient: Array, *saved_arrays: Array) -> list[Array | Gradient | None]:
        dx = spec.new() if needed[0] else None
        vectors = local_results(spec.grid, backward, dx, gradient, *saved_arrays, writes=[dx])
        return [
            dx,
            *(Gradient(each.reshape(1, -1), of_rows) if wanted else None for each, wanted in zip(vectors, needed[1:])),
        ]

    saved = {
        "layer_norm.input": x,
        "layer_norm.mean": mean,
        "layer_norm.inverse": inverse,
        "layer_norm.gain": gain,
        "layer_norm.bias": bias,
    }
    return x.from_op(out, (x, gain, bias), rule, keep=saved)


def _sum_of_rows(spec: TensorSpec, array: Array) -> LazyMatrix:
    """Gradient of a row that all rows of a batch share."""
    return LazyMatrix(
        Layout((), spec.layout.cols, spec.layout.rows, (1, spec.layout.units[1])),
        (1, array.shape[1]),
        lambda out, beta, _: column_sums(spec, array, out, beta),
        "reduce dW",
    )
