"""The fully connected layer in four dimensions: the schedule of AxoNN (Singh et al., SC'24), forward and backward."""

from __future__ import annotations

from contextlib import contextmanager

from ..arrays import library_of
from ..comm.collectives import gather_parts, sum_arrays
from ..errors import LayoutError
from ..layout import Layout, batch_layout
from ..model.volumes import all_reduce_work
from .parameter import Parameter
from .tensor import Form, Tensor, relayout


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """O = I W + b.

    x        (m, k)  rows over data, z; columns over y (or x); brought into this layout if it has another
    weight   (k, n)  rows over y, sharded over z; columns over x (or with x and y exchanged)
    bias     (1, n)  columns as the weight's
    result   (m, n)  rows over data, z; columns over x (or y)

    Each rank receives, of its own blocks (all-reduce volumes up to 64 KiB: see `collectives.all_reduce`):

        forward    (Gz-1)/Gz |W|  +  2 (Gy-1)/Gy |O|
        backward   (Gz-1)/Gz |W| unless it was kept  +  2 (Gx-1)/Gx |I| unless I needs no gradient
                   +  (Gz-1) |W shard|  +  2 (Gdata-1)/Gdata |W shard|

    dI = dO W^T is summed over x while dW = I^T dO is computed (OAR), dW is summed over z during the rest of the
    backward pass (ORS), and the next weight is gathered during this one's GEMM (OAG).
    """
    grid, tape = x.grid, x.tape
    (k_axis, _), (n_axis,) = weight.layout.rows, weight.layout.cols
    if x.shape[1] != weight.shape[0]:
        raise LayoutError(f"linear: the input has {x.shape[1]} columns, the weight {weight.shape[0]} rows")
    x = relayout(x, batch_layout(k_axis))
    form, inputs, wanted = x.form, x.local, x.requires_grad
    out = form.new((inputs.shape[0], weight.local.shape[1]))
    full = tape.parallel.weights.take(weight, tape.phase)
    biased = bias is not None and grid.axis(k_axis).index == 0
    if biased:
        out[...] = bias.local
    wait_all(reduced_product(form, inputs, full, out, int(biased), grid.axis(k_axis), "reduce O"))
    del full

    def rule(gradient):
        full = tape.parallel.weights.take(weight, "backward")
        dx, coming = form.new() if wanted else None, []
        if wanted:
            coming = reduced_product(form, gradient, full.T, dx, 0, grid.axis(n_axis), "reduce dI")
        del full
        tape.parallel.gradients.matrix(weight, lambda out, beta: gemm(form, inputs.T, gradient, out, beta))
        if bias is not None:
            tape.parallel.gradients.vector(bias, lambda out, beta: column_sums(form, gradient, out, beta))
        wait_all(coming)
        return dx, None, None

    parents = (x, weight) if bias is None else (x, weight, bias)
    return x.made(out, parents, rule, shape=(x.shape[0], weight.shape[1]), layout=Layout(x.layout.rows, n_axis))


def reduced_product(form: Form, a, b, c, beta, axis, phase: str) -> list:
    """C = A B + beta C, summed over an axis: rows in strips, each on its way as soon as it is there."""
    parallel = form.tape.parallel
    if axis.size == 1:
        gemm(form, a, b, c, beta)
        return []
    coming, strips = [], parallel.row_strips(*c.shape, form.dtype)
    size = (strips[0].stop - strips[0].start) * c.shape[1]
    parallel.gradients.note("rows", len(strips) * all_reduce_work(size, form.dtype, axis.size, 0), 1)
    for rows in strips:
        gemm(form, a[rows], b, c[rows], beta)
        with form.grid.ledger.phase(phase):
            coming.append(reduce(axis, c[rows]))
        if not parallel.overlap.oar:
            coming[-1].wait()
    return coming


def wait_all(coming) -> None:
    for pending in coming:
        pending.wait()


def gemm(form: Form, a, b, c, beta=0) -> None:
    """C = A B + beta C on this rank, while collectives go on."""
    with computing(form.grid, "gemm"):
        if a.shape[1] and 0 not in c.shape:
            form.library.gemm(a, b, c, 1, beta, form.grid.workspace)
        elif beta == 0:
            c[...] = 0
        if not form.library.on_host and not form.grid.engine.idle():
            form.library.synchronize()


def column_sums(form: Form, array, out, beta=0) -> None:
    """out (1, n) = beta out + the sum of the rows of a local array."""
    ones = form.new((1, array.shape[0]))
    ones[...] = 1
    gemm(form, ones, array, out, beta)


def reduce(axis, array):
    """Start the sum of an array over an axis, in place."""
    library = library_of(array)
    return axis.begin("all_reduce", lambda link: sum_arrays(link, library, array, array))


def gather(axis, array):
    """The arrays that all ranks of an axis bring, of one shape, stacked: (G, *shape)."""
    library, shape = library_of(array), tuple(array.shape)
    counts = [shape[0]] * axis.size
    stacked = library.empty((sum(counts), *shape[1:]), library.dtype(array))
    axis.begin("all_gather", lambda link: gather_parts(link, library, array, stacked, counts)).wait()
    return stacked.reshape((axis.size, *shape))


@contextmanager
def computing(grid, what: str):
    """Time in this context is computation, and collectives go on under it."""
    with grid.ledger.computing(what), grid.engine.background():
        yield
