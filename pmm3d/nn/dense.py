"""The layer's product, by the schedule of AxoNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_
from typing import Any

from ..arrays import Array
from ..comm import Arrivals
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import Layout, transitions
from ..layout.layout import SINGLE, Unit, Units, layout_of
from ..product.checks import check_one_device, check_tf32
from ..product.relayout import relayout as relayout_array
from .compute import Form, column_sums, gemm
from .contract import Product
from .elementwise import Activation, activated, slope_of
from .forming import Coming, formed
from .functional import activation_named, of_output
from .parallel import Parallel
from .parameter import Parameter
from .tensor import Tensor, relayout

OTHER = {"y": "x", "x": "y"}
"""The axis that splits a layer's output columns, by that of its input columns."""
ACTIVATIONS = ("replicated", "sharded")
MOST_SCHEDULES = 1024
"""That a grid keeps."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activations: str = "replicated",
           tf32: bool | None = None, activation: Callable[[Tensor], Tensor] | str | None = None) -> Tensor:
    """O = I W + b, or f(I W + b), by the schedule of AxoNN (Singh et al., SC'24).

    x        (m, k)  rows over data, z; columns over y (or x); brought into this layout if it has another. The rows may
                     also be over x (or y): then they are gathered
    weight   (k, n)  rows over y, sharded over z; columns over x (or with x and y exchanged). Any other tensor is
                     brought into the block that is needed
    bias     (1, n)  columns as the weight's; brought there if it has another layout
    activations      "replicated" over the axis that is summed, or "sharded": the rows of O also over that axis
                     (sequence parallelism, Korthikanti et al. 2022)
    tf32             let a device round float32 factors to 10 bits of mantissa; None: as a Parameter's precision says,
                     and not for any other weight
    activation       f, a function such as nn.gelu or its name ("gelu"): the result is f(linear(...)). On the host,
                     `nn.relu`, `nn.tanh` and `nn.sigmoid` overwrite each strip of I W + b once it is summed;
                     `Sequential` passes them here

    Returns O (m, n): rows over data, z (and y, or x, if sharded), in units of I's; columns over x (or y), in units of
    W's, whose units of rows are those of I's columns: what is made head by head is cut between heads, here and in the
    layer that takes it. If there are fewer units of rows (sequences) than ranks along these axes, y (or x) cuts inside
    them. Raises LayoutError if the k differ, Pmm3dError for other activations, DTypeError for tf32 where
    nothing would be rounded.

    Each rank receives, of its own blocks (all-reduce volumes up to 64 KiB: see `collectives.all_reduce`):

        forward    (Gz-1)/Gz |W|  +  2 (Gy-1)/Gy |O|
        backward   if I needs a gradient: (Gz-1)/Gz |W| unless it was kept  +  2 (Gx-1)/Gx |I|
                   +  (Gz-1) |W shard|  +  2 (Gdata-1)/Gdata |W shard|

    Sharded, the two halves of each all-reduce are a reduce-scatter here and an all-gather in the next layer, of the
    same bytes; with `Overlap.regather_inputs` the input is gathered once more.

    dI = dO W^T is summed over x while dW = I^T dO is computed (OAR), dW is summed over z during the rest of the
    backward pass (ORS), and the next weight is gathered during this one's GEMM (OAG).

        >>> from pmm3d import DistMatrix, Grid, nn
        >>> with Grid(shape="fsdp") as grid:
        ...     linear(Tensor(DistMatrix.random(grid, (4, 3), dtype="float32")), nn.Linear(grid, 3, 2).weight).shape
        (4, 2)
    """
    if activations not in ACTIVATIONS:
        raise Pmm3dError(f'activations are "replicated" or "sharded"; got {activations!r}')
    if tf32 is None:
        tf32 = isinstance(weight, Parameter) and weight.precision.tf32
    else:
        check_tf32(tf32, x, "linear")
    activation = activation_named(activation) if isinstance(activation, str) else activation
    in_place, known = of_output(activation), x.grid.attached.setdefault(_Schedule, {})
    key = (id(x.form), id(weight.form), None if bias is None else id(bias.form), type(weight), x.requires_grad,
           weight.requires_grad, activations, tf32, in_place, x.tape.parallel.overlap.regather_inputs)
    schedule: _Schedule | None = known.get(key)
    if schedule is None:
        given = x, weight, bias
        x, weight, bias, schedule = _scheduled(x, weight, bias, activations, tf32, in_place)
        if x.library.on_host and all(map(is_, given, (x, weight, bias))):  # devices are compared in each call
            if len(known) == MOST_SCHEDULES:
                known.clear()
            known[key] = schedule
    inputs = schedule.rows_of(x.form, x.shard, x.layout, schedule.input, "gather I")
    full = schedule.full(weight, [weight.shard], x.tape.phase)
    out = schedule.output(inputs, full, bias)
    keep = [x.shard if schedule.regathers else inputs.wait()] if schedule.learns else []
    keep += [full] if not schedule.sharded and schedule.wanted else []
    keep += [] if schedule.activation is None else [out]
    parameter: Any = weight if schedule.sharded else None
    made = x.made(out, (x, weight) if bias is None else (x, weight, bias), partial(schedule.gradients, parameter),
                  keep=keep, shape=schedule.out.shape, layout=schedule.out.layout)
    return made if activation is None or schedule.activation is not None else activation(made)


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
            raise DTypeError(f"linear: the input is {x!r}, weight and bias {others!r}: they must be of one type and "
                             "library")
    if bias is not None and bias.shape != (1, weight.shape[1]):
        raise LayoutError(f"linear: the bias is {bias.shape[0]} x {bias.shape[1]}, the weight has {weight.shape[1]} "
                          "columns")


def _scheduled(x: Tensor, weight: Tensor, bias: Tensor | None, activations: str, tf32: bool,
               activation: Activation | None) -> tuple[Tensor, Tensor, Tensor | None, _Schedule]:
    """Input, weight and bias in the layouts that the layer takes, and what it does with them."""
    _check(x, weight, bias)
    k, n = _axes(x, weight)
    sharded = isinstance(weight, Parameter) and _lies_as(weight, k)
    inner, outer = weight.layout.units[0] if sharded else x.layout.units[1], weight.layout.units[1]
    x = _split_over(x, k, n, inner)
    row_unit, rows = x.layout.units[0], tuple([axis for axis in x.layout.rows if axis != n])
    if not sharded:
        weight = relayout(weight, layout_of((k,), (n,), (), (inner, outer)))
    if bias is not None:
        bias = relayout(bias, layout_of((), (n,), (), (1, outer)))
    out_rows = (*rows, k) if activations == "sharded" else rows
    if isinstance(row_unit, int) and x.shape[0] // row_unit < x.grid.shape.along(out_rows):  # too few sequences for k
        row_unit = tuple((axis, row_unit) for axis in rows)
    output = layout_of(out_rows, (n,), (), (row_unit, outer))
    out = x.form.like((x.shape[0], weight.shape[1]), output)
    others = weight.form, None if bias is None else bias.form
    return x, weight, bias, _Schedule(x.form, out, others, k, n, rows, x.requires_grad, weight.requires_grad, sharded,
                                      x.tape.parallel.overlap.regather_inputs, bias is not None, tf32, activation)


@dataclass(frozen=True)
class _Schedule:
    """What `linear` does with tensors of these forms, forward and backward; kept for the next step.

    came, out   forms of I as it comes, and of O;   others   of W and b;   k, n   the axes that split their columns
    rows        the axes that split the rows of what the GEMMs see
    wanted      whether the gradient of I is needed;   learns   whether that of W is: I is kept for it
    sharded     whether W is a parameter whose shards are gathered
    regathers   whether I is kept as it comes;   biased: whether there is a bias
    tf32        whether GEMMs may round float32 to it
    activation  None, or that of which O is the result
    """

    came: Form
    out: Form
    others: tuple[Form, Form | None]
    k: str
    n: str
    rows: tuple[str, ...]
    wanted: bool
    learns: bool
    sharded: bool
    regathers: bool
    biased: bool
    tf32: bool
    activation: Activation | None

    @cached_property
    def input(self) -> Layout:
        """Of I as the GEMMs see it."""
        return layout_of(self.rows, (self.k,), (), self.came.layout.units)

    @cached_property
    def result(self) -> Layout:
        """Of O as the GEMMs make it, but for its sum over k's axis."""
        return layout_of(self.rows, (self.n,), (), self.out.layout.units)

    @cached_property
    def of_gradients(self) -> tuple[Layout, Layout, Layout]:
        """As dI, dW and db are made, with their sums to be done."""
        units, outer = self.came.layout.units, self.out.layout.units[1]
        return (layout_of(self.rows, (self.k,), (self.n,), units),
                layout_of((self.k,), (self.n,), self.rows, (units[1], outer)),
                layout_of((), (self.n,), self.rows, (1, outer)))

    def full(self, weight: Any, kept: Sequence[Array], phase: str) -> Array:
        """The block of the weight: kept, or gathered."""
        return Parallel.of(self.came.grid).weights.take(weight, phase) if self.sharded else kept[0]

    def rows_of(self, form: Form, array: Array, held: Layout, layout: Layout, phase: str) -> Arrivals:
        """The array, which is in the layout `held`, in another one, with its rows brought together: under way, if
        rows that come are to be multiplied one rank's after the other."""
        if held == layout:
            return Arrivals.here(array)
        grid, steps = form.grid, transitions(held, layout, form.grid.shape, form.shape)
        overlap, axis = Parallel.of(grid).overlap, grid.axis(steps[0].axis or "x") if steps else None
        with grid.ledger.phase(phase):
            if (axis is None or len(steps) > 1 or (steps[0].kind, steps[0].dim) != ("gather", 0)
                    or not overlap.decomposes(axis, grid.hosts)):
                return Arrivals.here(relayout_array(grid, array, form.shape, held, layout).wait())
            counts = form.like(form.shape, held).counts(axis.name)
            return Arrivals(axis, array, form.new((sum(counts), array.shape[1])), counts)

    def output(self, inputs: Arrivals, full: Array, bias: Tensor | None) -> Array:
        """O, in its layout, with the activation."""
        begins = None if bias is None or self.out.grid.axis(self.k).index else bias.shard

        def fill(out: Array, beta: int, part: slice) -> None:
            if begins is not None:
                with self.out.grid.ledger.passing("bias"):
                    out[...], beta = begins, 1
            self._multiply(self.out, inputs, part, full, out, beta)

        size = inputs.whole.shape[0], full.shape[1]
        natural = layout_of(self.rows, (self.n,), (self.k,), self.out.layout.units)
        coming = formed(self.out, Product(natural, size, fill, "reduce O"), self.out.layout)
        return coming.wait() if self.activation is None else self._activated(coming)

    def _multiply(self, form: Form, rows: Arrivals, part: slice, factor: Array, out: Array, beta: float) -> None:
        """out = beta out + a part of the rows times the factor, as they come."""
        start, stop, _ = part.indices(rows.whole.shape[0])
        for low, high in rows.within(start, stop):
            gemm(form, rows.whole[low:high], factor, out[low - start : high - start], beta, tf32=self.tf32)

    def _activated(self, coming: Coming) -> Array:
        assert self.activation is not None
        if self.out.library.slice_elements is None:
            return activated(self.out, self.activation, coming.wait())
        for strip in coming.each():
            activated(self.out, self.activation, strip, in_place=True)
        return coming.wait()

    def gradients(self, weight: Parameter | None, gradient: Array, *kept: Array) -> list[Product | None]:
        """dI = dO W^T, a partial sum over n's axis; dW = I^T dO and db, sums over this rank's rows. None for what is
        not needed."""
        inputs, full = kept[: self.learns], kept[self.learns :]
        if self.activation is not None:
            gradient, full = slope_of(self.out, self.activation, gradient, full[-1]), full[:-1]
        coming = self.rows_of(self.out, gradient, self.out.layout, self.result, "gather dO")
        form, layouts, of_input, of_weight = self.came, self.of_gradients, None, None
        came = form.layout if self.regathers else self.input
        rows = self.rows_of(form, inputs[0], came, self.input, "gather I") if self.learns else None
        m, n = coming.whole.shape[0], gradient.shape[1]
        if self.wanted:
            whole = self.full(weight, full, "backward")
            of_input = Product(layouts[0], (m, whole.shape[0]), lambda out, beta, part: self._multiply(
                form, coming, part, whole.T, out, beta), "reduce dI")
        if rows is not None:
            of_weight = Product(layouts[1], (rows.whole.shape[1], n), lambda out, beta, _: gemm(
                form, rows.wait().T, coming.wait(), out, beta, tf32=self.tf32), "reduce dW")
        if not self.biased:
            return [of_input, of_weight]
        of_bias = Product(layouts[2], (1, n), lambda out, beta, _: column_sums(form, coming.wait(), out, beta),
                          "reduce dW")
        return [of_input, of_weight, of_bias]


def weight_layout(k: str, units: Units = SINGLE) -> Layout:
    """Of a layer's weight whose input's columns are split by that axis, in units of its rows and columns."""
    return layout_of((k, "z"), (OTHER[k],), (), units)


def _lies_as(weight: Tensor, k: str) -> bool:
    """As a layer's weight, in whatever units."""
    return weight.layout == weight_layout(k, weight.layout.units)


def _axes(x: Tensor, weight: Tensor) -> tuple[str, str]:
    """The axes that split the columns of I and of O: as the weight lies, or, if it is no layer's, as I does."""
    for k in OTHER:
        if _lies_as(weight, k):
            return k, OTHER[k]
    k = x.layout.cols[0] if x.layout.cols in (("x",), ("y",)) else "y"
    return k, OTHER[k]


def _split_over(x: Tensor, k: str, n: str, unit: Unit) -> Tensor:
    """I with its columns over k's axis; its rows over data and z at least, and over n's axis only as the last."""
    rows = tuple([axis for axis in x.layout.rows if axis not in (k, n)])
    if not {"data", "z"} <= set(rows):
        rows = ("data", "z", *(axis for axis in rows if axis not in ("data", "z")))
    units = x.layout.units[0], unit
    rows = (*rows, n) if x.layout.rows == (*rows, n) else rows
    return relayout(x, layout_of(rows, (k,), (), units))
