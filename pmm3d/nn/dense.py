"""The fully connected layer in four dimensions: the schedule of AxoNN (Singh et al., SC'24), forward and backward."""

from __future__ import annotations

from ..arrays import Array
from ..comm import Axis, Pending
from ..errors import LayoutError
from ..layout import Layout, batch_layout
from ..model.volumes import all_reduce_work
from .compute import column_sums, gemm, sum_over
from .parameter import Parameter
from .tensor import Form, Tensor, relayout


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """O = I W + b.

    x        (m, k)  rows over data, z; columns over y (or x); brought into this layout if it has another
    weight   (k, n)  rows over y, sharded over z; columns over x (or with x and y exchanged)
    bias     (1, n)  columns as the weight's

    Returns O (m, n): rows over data, z; columns over x (or y). Raises LayoutError if the k differ.

    Each rank receives, of its own blocks (all-reduce volumes up to 64 KiB: see `collectives.all_reduce`):

        forward    (Gz-1)/Gz |W|  +  2 (Gy-1)/Gy |O|
        backward   (Gz-1)/Gz |W| unless it was kept  +  2 (Gx-1)/Gx |I| unless I needs no gradient
                   +  (Gz-1) |W shard|  +  2 (Gdata-1)/Gdata |W shard|

    dI = dO W^T is summed over x while dW = I^T dO is computed (OAR), dW is summed over z during the rest of the
    backward pass (ORS), and the next weight is gathered during this one's GEMM (OAG).

        >>> from pmm3d import DistMatrix, Grid, nn
        >>> with Grid(shape="fsdp") as grid:
        ...     x = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j, dtype="float32")
        ...     nn.linear(nn.Tensor(x), nn.Linear(grid, 3, 2).weight).shape
        (2, 2)
    """
    grid, tape = x.grid, x.tape
    (k_axis, _), (n_axis,) = weight.layout.rows, weight.layout.cols
    if x.shape[1] != weight.shape[0]:
        raise LayoutError(f"linear: the input has {x.shape[1]} columns, the weight {weight.shape[0]} rows")
    x = relayout(x, batch_layout(k_axis))
    form, inputs, wanted = x.form, x.local, x.requires_grad
    out = form.new((inputs.shape[0], weight.local.shape[1]))
    full = tape.parallel.weights.take(weight, tape.phase)
    beta = 0
    if bias is not None and grid.axis(k_axis).index == 0:
        out[...], beta = bias.local, 1
    wait_all(reduced_product(form, inputs, full, out, beta, grid.axis(k_axis), "reduce O"))
    del full

    def rule(gradient: Array) -> tuple[Array | None, None, None]:
        full = tape.parallel.weights.take(weight, "backward")
        dx, sums = None, []
        if wanted:
            dx = form.new()
            sums = reduced_product(form, gradient, full.T, dx, 0, grid.axis(n_axis), "reduce dI")
        del full
        tape.parallel.gradients.matrix(weight, lambda out, beta: gemm(form, inputs.T, gradient, out, beta))
        if bias is not None:
            tape.parallel.gradients.vector(bias, lambda out, beta: column_sums(form, gradient, out, beta))
        wait_all(sums)
        return dx, None, None

    parents = (x, weight) if bias is None else (x, weight, bias)
    return x.made(out, parents, rule, shape=(x.shape[0], weight.shape[1]), layout=Layout(x.layout.rows, n_axis))


def reduced_product(form: Form, a: Array, b: Array, c: Array, beta: int, axis: Axis, phase: str) -> list[Pending]:
    """C = A B + beta C, summed over an axis: rows in strips, each on its way as soon as it is there. Returns the sums
    under way."""
    parallel = form.tape.parallel
    if axis.size == 1:
        gemm(form, a, b, c, beta)
        return []
    sums, (rows, cols) = list[Pending](), c.shape
    strips = parallel.row_strips(rows, cols, form.dtype)
    size = (strips[0].stop - strips[0].start) * cols
    parallel.gradients.note_work("rows", len(strips) * all_reduce_work(size, form.dtype, axis.size, 0), 1)
    for strip in strips:
        gemm(form, a[strip], b, c[strip], beta)
        with form.grid.ledger.phase(phase):
            sums.append(sum_over(axis, c[strip]))
        if not parallel.overlap.oar:
            sums[-1].wait()
    return sums


def wait_all(sums: list[Pending]) -> None:
    for pending in sums:
        pending.wait()
