"""Products of tensors by the schedule of AxoNN: linear layers, and products of two activations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..arrays import Array
from ..comm import Arrivals, assign
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import Layout, transitions
from ..layout.layout import SINGLE, Units, layout_of
from ..product import DistMatrix
from ..product.checks import check_one_device, check_tf32
from ..product.relayout import relayout as relayout_array
from .arithmetic import check_alike
from .compute import TensorSpec, check_type, column_sums, gemm
from .contract import LazyMatrix
from .overlapped_gemm import gemm_then_relayout
from .parallel import BackwardSync
from .parameter import Parameter
from .tensor import Tensor, as_tensor, relayout

OTHER = {"y": "x", "x": "y"}
"""Axis of a layer's input columns -> axis of its output columns."""
ACTIVATIONS = ("replicated", "sharded")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activations: str = "replicated", tf32: bool | None = None
) -> Tensor:
    """O = I W + b, by the schedule of AxoNN.

    Parameters
    ----------
    x : Tensor
        I, (m, k). Rows over data and z; columns over y, or over x. An input in another layout is relaid out. If its
        rows are also over x (or y), they are gathered.
    weight : Tensor
        W, (k, n). Rows over y, sharded over z; columns over x; or with x and y exchanged. Any other tensor is relaid
        out.
    bias : Tensor or None
        b, (1, n), with columns in the layout of the weight's. Default: none.
    activations : str
        "replicated" (default): O is replicated over the axis of the sum. "sharded": the rows of O are also over this
        axis (sequence parallelism, Korthikanti et al. 2022).
    tf32 : bool or None
        Whether a device may round float32 factors to 10 bits of mantissa. Default: the precision of a Parameter.

    Returns
    -------
    Tensor
        O, (m, n). Rows over data and z (and y, or x, if sharded), in the units of I. Columns over x (or y), in the
        units of W. If there are fewer units of rows than ranks along these axes, y (or x) cuts inside them.

    Raises
    ------
    LayoutError
        If the k differ.
    DTypeError
        For different types, and for `tf32` if nothing would be rounded.
    Pmm3dError
        For other `activations`.

    Notes
    -----
    Each rank receives, of its own blocks (I, W and O as a GEMM uses them):

        forward    (Gz-1)/Gz |W|  +  2 (Gy-1)/Gy |O|
        backward   (Gz-1)/Gz |W| unless it was kept  +  2 (Gx-1)/Gx |I|     if I needs a gradient
                   (Gz-1) |W shard|  +  2 (Gdata-1)/Gdata |W shard|

    With "sharded" activations the two halves of each all-reduce are a reduce-scatter here and an all-gather in the next
    layer, of the same bytes. With `Overlap.regather_inputs` the input is gathered once more.

    dI = dO W^T is summed over x while dW = I^T dO is computed (OAR). dW is summed over z during the rest of the
    backward pass (ORS). The next weight is gathered during the GEMM of this one (OAG). Source: Singh et al., SC'24.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="fsdp") as grid:
    ...     x = nn.Tensor(DistMatrix.random(grid, (4, 3), dtype="float32"))
    ...     nn.linear(x, nn.Linear(grid, 3, 2).weight).shape
    (4, 2)
    """
    if activations not in ACTIVATIONS:
        raise Pmm3dError(f'activations are "replicated" or "sharded"; got {activations!r}')
    if tf32 is None:
        tf32 = isinstance(weight, Parameter) and weight.precision.tf32
    else:
        check_tf32(tf32, x, "linear")
    _check(x, weight, bias)
    kind = x.layout, weight.layout, isinstance(weight, Parameter), activations
    layouts = layouts_of(*kind)
    if activations == "sharded" and cuts_inside(x, layouts.out.rows):
        layouts = layouts_of(*kind, inside=True)
    x = relayout(x, layouts.came)
    if not layouts.gathers:
        weight = relayout(weight, layouts.weight)
    if bias is not None:
        bias = relayout(bias, layouts.bias)
    schedule = _Schedule(
        x.spec,
        x.spec.like((x.shape[0], weight.shape[1]), layouts.out),
        layouts,
        x.requires_grad,
        weight.requires_grad,
        x.tape.parallel.overlap.regather_inputs,
        bias is not None,
        tf32,
    )
    inputs = schedule.rows_of(x.spec, x.shard, x.layout, layouts.input, "gather I")
    full = schedule.full(weight, [weight.shard], x.tape.phase)
    out = schedule.output(inputs, full, bias)
    saved: dict[str, Any] = {}
    if schedule.learns:
        saved["linear.input"] = x if schedule.regathers or layouts.came == layouts.input else inputs.wait()
    if schedule.wanted and not layouts.gathers:
        saved["linear.weight"] = weight
    parameter: Any = weight if layouts.gathers else None
    return x.from_op(
        out,
        (x, weight) if bias is None else (x, weight, bias),
        partial(schedule.gradients, parameter),
        keep=saved,
        shape=schedule.out.shape,
        layout=layouts.out,
    )


def matmul(a: Tensor | DistMatrix, b: Tensor | DistMatrix, *, tf32: bool | None = None) -> Tensor:
    """C = A B, of two activations or other tensors. The same as a @ b.

    Parameters
    ----------
    a : Tensor or DistMatrix
        A, (m, k), in any layout. Best with rows over data and z, and columns over y or x.
    b : Tensor or DistMatrix
        B, (k, n), in any layout. Best with rows over the axis of the columns of A, and columns over the other of x
        and y.
    tf32 : bool or None
        As in `linear`.

    Returns
    -------
    Tensor
        C, (m, n), with the layout of the result of `linear`: rows over data and z in the units of A, columns over x (or
        y) in the units of B.

    Raises
    ------
    LayoutError
        If the k differ.
    GridError, DTypeError
        If grids, libraries or types differ, and for `tf32` if nothing would be rounded.

    Notes
    -----
    B has the role of the weight of `linear`. It is gathered over data and z. So the product needs least memory if B is
    the smaller operand; (b.T @ a.T).T exchanges the roles. Each rank receives, of blocks as a GEMM uses them:

        forward    the relayouts of A and B  +  2 (Gy-1)/Gy |C|
        backward   2 (Gx-1)/Gx |A|  +  the sum of dB over data and z, into the layout of B

    The sums run while the other gradient is computed, as in `linear`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j))
    ...     (x @ x.T).gather()
    array([[ 5.,  8.],
           [ 8., 14.]])
    """
    a, b = as_tensor(a), as_tensor(b)
    if a.shape[1] != b.shape[0]:
        raise LayoutError(
            f"matmul: A is {a.shape[0]} x {a.shape[1]} and B {b.shape[0]} x {b.shape[1]}; the columns of A and the "
            "rows of B must be equally many. x.T is the transpose of x"
        )
    check_alike("matmul", a, b)
    check_type("matmul", a.spec)
    return linear(a, b, tf32=tf32)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.shape[1] != weight.shape[0]:
        raise LayoutError(f"linear: the input has {x.shape[1]} columns, the weight {weight.shape[0]} rows")
    others = [weight] if bias is None else [weight, bias]
    for each in others:
        if each.grid is not x.grid:
            raise GridError(f"linear: tensors of two Grids: the input is {x!r}, weight and bias {others!r}")
        if not x.library.on_host:
            check_one_device("linear", x.shard, each.shard)
        if each.dtype != x.dtype or each.library != x.library:
            raise DTypeError(
                f"linear: the input is {x!r}, weight and bias {others!r}: they must be of one type and library"
            )
    if bias is not None and bias.shape != (1, weight.shape[1]):
        raise LayoutError(
            f"linear: the bias is {bias.shape[0]} x {bias.shape[1]}, the weight has {weight.shape[1]} columns"
        )


class Layouts(NamedTuple):
    """Layouts of one use of a layer, O = I W + b, and the axes of its columns.

    k, n                           axes that split the columns of I and of O
    gathers                        whether the weight is gathered
    came, input                    layout of I before and after its rows are gathered over n
    natural, result                layout of O with partial sums over k, and after the sum
    out                            layout of the returned tensor
    of_input, of_weight, of_bias   layouts with partial sums in which the rule returns dI, dW and db
    """

    k: str
    n: str
    gathers: bool
    came: Layout
    input: Layout
    weight: Layout
    bias: Layout
    natural: Layout
    result: Layout
    out: Layout
    of_input: Layout
    of_weight: Layout
    of_bias: Layout


@lru_cache(maxsize=1024)
def layouts_of(x: Layout, weight: Layout, is_parameter: bool, activations: str, inside: bool = False) -> Layouts:
    """Layouts of a layer with an input and a weight in these layouts. inside: k may cut units of the rows of O."""
    k = _column_axis(x, weight)
    n, gathers = OTHER[k], is_parameter and weight_axis(weight) is not None
    row_unit, outer = x.units[0], weight.units[1]
    units = row_unit, weight.units[0] if gathers else x.units[1]
    rows = tuple([axis for axis in x.rows if axis not in (k, n)])
    if not {"data", "z"} <= set(rows):
        rows = ("data", "z", *(axis for axis in rows if axis not in ("data", "z")))
    out_unit = tuple((axis, row_unit) for axis in rows) if inside else row_unit
    came = layout_of((*rows, n) if x.rows == (*rows, n) else rows, (k,), (), units)
    return Layouts(
        k,
        n,
        gathers,
        came,
        layout_of(rows, (k,), (), units),
        weight if gathers else layout_of((k,), (n,), (), (units[1], outer)),
        layout_of((), (n,), (), (1, outer)),
        layout_of(rows, (n,), (k,), (out_unit, outer)),
        layout_of(rows, (n,), (), (out_unit, outer)),
        layout_of((*rows, k) if activations == "sharded" else rows, (n,), (), (out_unit, outer)),
        layout_of(rows, (k,), (n,), units),
        layout_of((k,), (n,), rows, (units[1], outer)),
        layout_of((), (n,), rows, (1, outer)),
    )


class _Schedule(NamedTuple):
    """Forward and backward pass of `linear`.

    came, out   specs of I before the gather of its rows, and of O
    wanted      whether the gradient of I is needed
    learns      whether the gradient of W is needed
    regathers   whether I is saved before the gather of its rows
    """

    came: TensorSpec
    out: TensorSpec
    layouts: Layouts
    wanted: bool
    learns: bool
    regathers: bool
    biased: bool
    tf32: bool

    def full(self, weight: Any, saved: Sequence[Array], phase: str) -> Array:
        """Return the block of the weight: gathered if the weight is sharded, else saved."""
        return BackwardSync.of(self.came.grid).weights.gathered(weight, phase) if self.layouts.gathers else saved[0]

    def rows_of(self, spec: TensorSpec, array: Array, held: Layout, layout: Layout, phase: str) -> Arrivals:
        """Gather the rows of an array from the layout `held` to `layout`. A decomposed gather is still in progress."""
        if held == layout:
            return Arrivals.here(array)
        grid, steps = spec.grid, transitions(held, layout, spec.grid.shape, spec.shape)
        overlap, axis = BackwardSync.of(grid).overlap, grid.axis(steps[0].axis or "x") if steps else None
        with grid.ledger.phase(phase):
            if (
                axis is None
                or len(steps) > 1
                or (steps[0].kind, steps[0].dim) != ("gather", 0)
                or not overlap._decomposes(axis, grid.hosts)
            ):
                return Arrivals.here(relayout_array(grid, array, spec.shape, held, layout).wait())
            counts = spec.like(spec.shape, held).counts(axis.name)
            return Arrivals(axis, array, spec.new((sum(counts), array.shape[1])), counts)

    def output(self, inputs: Arrivals, full: Array, bias: Tensor | None) -> Array:
        """Compute O in the layout `out`. Collective."""
        begins = None if bias is None or self.out.grid.axis(self.layouts.k).index else bias.shard

        def fill(out: Array, beta: int, part: slice) -> None:
            if begins is not None:
                with self.out.grid.ledger.passing("bias"):
                    assign(self.out.grid.engine, out, begins)
                    beta = 1
            self._multiply(self.out, inputs, part, full, out, beta)

        product = LazyMatrix(self.layouts.natural, (inputs.gathered.shape[0], full.shape[1]), fill, "reduce O")
        return gemm_then_relayout(self.out, product, self.out.layout).wait()

    def _multiply(self, spec: TensorSpec, rows: Arrivals, part: slice, factor: Array, out: Array, beta: float) -> None:
        """Compute out = beta out + rows[part] factor. Each GEMM begins when its rows have arrived."""
        start, stop, _ = part.indices(rows.gathered.shape[0])
        for low, high in rows.within(start, stop):
            gemm(spec, rows.gathered[low:high], factor, out[low - start : high - start], beta, tf32=self.tf32)

    def gradients(self, weight: Parameter | None, gradient: Array, *saved: Array) -> list[LazyMatrix | None]:
        """Gradients dI = dO W^T, with partial sums over n, and dW = I^T dO and db, as sums over this rank's rows."""
        inputs, full = saved[: self.learns], saved[self.learns :]
        layouts, spec, of_input, of_weight = self.layouts, self.came, None, None
        coming = self.rows_of(self.out, gradient, self.out.layout, layouts.result, "gather dO")
        came = spec.layout if self.regathers else layouts.input
        rows = self.rows_of(spec, inputs[0], came, layouts.input, "gather I") if self.learns else None
        m, n = coming.gathered.shape[0], gradient.shape[1]
        if self.wanted:
            full_weight = self.full(weight, full, "backward")
            of_input = LazyMatrix(
                layouts.of_input,
                (m, full_weight.shape[0]),
                lambda out, beta, part: self._multiply(spec, coming, part, full_weight.T, out, beta),
                "reduce dI",
            )
        if rows is not None:
            of_weight = LazyMatrix(
                layouts.of_weight,
                (rows.gathered.shape[1], n),
                lambda out, beta, _: gemm(spec, rows.wait().T, coming.wait(), out, beta, tf32=self.tf32),
                "reduce dW",
            )
        if not self.biased:
            return [of_input, of_weight]
        of_bias = LazyMatrix(
            layouts.of_bias, (1, n), lambda out, beta, _: column_sums(spec, coming.wait(), out, beta), "reduce dW"
        )
        return [of_input, of_weight, of_bias]


def input_layout(x: Tensor, weight: Tensor) -> Layout:
    """Layout of an input with which a layer moves and gathers no rows."""
    return layouts_of(x.layout, weight.layout, isinstance(weight, Parameter), "replicated").input


def spec_of_result(x: TensorSpec, weight: Parameter, activations: str) -> TensorSpec:
    """Spec of the result of `linear` for an input of this spec, without partial sums."""
    kind = x.layout, weight.layout, True, activations
    layouts = layouts_of(*kind)
    if activations == "sharded" and cuts_inside(x, layouts.out.rows):
        layouts = layouts_of(*kind, inside=True)
    return x.typed(weight.dtype).like((x.shape[0], weight.shape[1]), layouts.out)


def cuts_inside(x: Tensor | TensorSpec, rows: tuple[str, ...]) -> bool:
    """Whether the last of these axes cuts inside the units of rows of x, because all axes together have more ranks than
    there are units. An axis of one rank does not cut. Raises LayoutError for ragged rows."""
    unit, shape = x.layout.units[0], x.grid.shape
    return isinstance(unit, int) and x.shape[0] // unit < shape.along(rows) and getattr(shape, rows[-1]) > 1


def weight_layout(k: str, units: Units = SINGLE) -> Layout:
    """Layout of a layer's weight. k: axis that splits the columns of the layer's input."""
    return layout_of((k, "z"), (OTHER[k],), (), units)


def weight_axis(layout: Layout) -> str | None:
    """The k of which this is the `weight_layout`, in any units; None for another layout."""
    return next((k for k in OTHER if (layout.rows, layout.cols, layout.sums) == ((k, "z"), (OTHER[k],), ())), None)


def _column_axis(x: Layout, weight: Layout) -> str:
    """Axis that splits the columns of I: from the layout of a sharded weight, else from that of I (default "y")."""
    return weight_axis(weight) or (x.cols[0] if x.cols in (("x",), ("y",)) else "y")
