"""The 3D product: C = alpha A B + beta C on distributed matrices."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

from . import collectives
from .arrays import LOW_PRECISION, is_contiguous, sum_in_order
from .errors import GridError, LayoutError, Pmm3dError
from .layout import Layout, offsets
from .matrix import DistMatrix
from .product import LocalPlan, Operand, ProductPlan, check_dtypes, plan_product
from .redistribute import Placement

PANELS_ACROSS_HOSTS = 4


def matmul(a: DistMatrix, b: DistMatrix, *, alpha=1, beta=0, out: DistMatrix | None = None, panels: int | None = None,
           max_workspace: int | None = None) -> DistMatrix:  # fmt: skip
    """C = alpha A B + beta C by the 3D algorithm (Agarwal et al., IBM J. Res. Dev. 39(5), 1995).

    a    (m, k)  rows over z, cols over y, sharded over x
    b    (k, n)  rows over y, cols over x, sharded over z
    out  (m, n)  rows over z, cols over x, sharded over y: C, written in place; a new matrix in Layout.C if left out

    panels          cut the product into panels along k, and the columns of C, so that communication runs under the
                    GEMM; 1 on one node and 4 across nodes if left out. Sums along k then run in another order.
    max_workspace   bytes of work arrays a rank may use; kept by more steps along k

    Each rank receives (Gx-1)/Gx |A block| + (Gz-1)/Gz |B block| + (Gy-1)/Gy |C block| bytes. The axes may play other
    roles where the layouts say so (`a.T @ b` moves no operand); an operand that fits no role is redistributed first,
    phase "redistribute" of the ledger.

    Raises, on every rank: LayoutError if the sizes do not match or out is read-only, GridError for operands on
    different grids, DTypeError for mixed types, MemoryLimitError, DisagreementError if the ranks passed different
    things.
    """
    grid = a.grid
    with grid.together("matmul", a.signature(), _signature(b), _signature(out), alpha, beta, panels, max_workspace):
        _check(a, b, out, beta)
        if out is not None and out.order == "F":
            a, b, out = b.T, a.T, out.T
        plan = plan_for(a, b, out, panels, max_workspace)
        if out is None:
            out = _new(grid, (plan.m, plan.n), plan.c_layout, a)
    with _placed(a, plan.a_layout) as native_a, _placed(b, plan.b_layout) as native_b:
        with _placed(out, plan.c_layout, back=True, read=beta != 0) as native_c:
            if grid.active:
                _multiply(plan.local(grid.coords), native_a, native_b, native_c, alpha, beta)
    return out


def _signature(matrix):
    return matrix.signature() if isinstance(matrix, DistMatrix) else type(matrix).__name__


def _check(a, b, out, beta) -> None:
    for name, matrix in (("b", b), ("out", out)):
        if not isinstance(matrix, DistMatrix) and not (name == "out" and matrix is None):
            raise Pmm3dError(f"matmul: {name} is a {type(matrix).__name__}; it must be a DistMatrix")
        if matrix is not None and matrix.grid is not a.grid:
            raise GridError(f"A is on grid {a.grid.shape}, {name} on another Grid ({matrix.grid.shape}); "
                            f"bring it over with {name}.redistribute(layout, grid)")  # fmt: skip
    check_dtypes(a.dtype, b.dtype, out and out.dtype)
    if a.library != b.library or (out is not None and out.library != a.library):
        raise LayoutError(f"A is in {a.library}, B in {b.library}, out in {out and out.library}: use one array library")
    if out is None and beta != 0:
        raise LayoutError("matmul: beta needs out=, the C that it scales")
    if out is not None and not out.library.writable(out.local):
        raise LayoutError("matmul: out is read-only")


def plan_for(a: DistMatrix, b: DistMatrix, out: DistMatrix | None, panels: int | None,
             max_workspace: int | None) -> ProductPlan:  # fmt: skip
    """The plan of `matmul` for these arguments, from the grid's cache."""
    grid = a.grid
    operands = [matrix and Operand(matrix.shape, matrix.layout, matrix.order) for matrix in (a, b, out)]
    key = (*operands, a.dtype, panels, max_workspace)
    if key not in grid.plans:
        if panels is None:
            panels = 1 if grid.hosts == 1 else PANELS_ACROSS_HOSTS
        grid.plans[key] = plan_product(*operands, a.dtype, grid.shape, panels=panels, max_workspace=max_workspace)
    return grid.plans[key]


def _new(grid, shape, layout: Layout, like: DistMatrix) -> DistMatrix:
    block = Placement(shape, layout, grid.shape).block(grid.rank)
    return DistMatrix(grid, like.library.empty(block.shape, like.dtype), shape, layout)


@contextmanager
def _placed(matrix: DistMatrix, layout: Layout, back: bool = False, read: bool = True):
    """The matrix in a layout, redistributed through a work array if it has another one.

    back   what the context wrote is brought back to the matrix;   read   its contents matter
    """
    grid = matrix.grid
    if matrix.layout.on(grid.shape) == layout.on(grid.shape):
        yield matrix
        return
    shape = Placement(matrix.shape, layout, grid.shape).block(grid.rank).shape
    stored = shape if matrix.order == "C" else shape[::-1]
    with grid.workspace.borrow(stored, matrix.dtype, matrix.library) as local:
        local = local if matrix.order == "C" else local.T
        moved = DistMatrix(grid, local, matrix.shape, layout, matrix.order)
        if read:
            matrix._move_into(moved)
        yield moved
        if back:
            moved._move_into(matrix)


def _multiply(local: LocalPlan, a: DistMatrix, b: DistMatrix, c: DistMatrix, alpha, beta) -> None:
    """This rank's part: gather the panels of a step while the GEMM of the step before runs, then reduce C."""
    plan, grid, library = local.plan, a.grid, a.library
    wide = plan.dtype in LOW_PRECISION and plan.steps > 1
    with ExitStack() as borrowed:

        def work(shape, dtype=plan.dtype):
            return borrowed.enter_context(grid.workspace.borrow(shape, dtype, library))

        panels_a, panels_b = _panels_of_a(local, a, work), _panels_of_b(local, b, work)
        columns = [local.panel(index) for index in range(plan.panels if local.reduces else 1)]
        if not local.reduces:
            columns = [(0, local.cols)]
        outs = [c.local[:, low:high] for low, high in columns]
        partial = [work((local.rows, high - low)) for low, high in columns] if local.reduces else outs
        sums = [work(tuple(array.shape), "float32") for array in partial] if wide else partial
        reductions = []
        coming = panels_a.start(0), panels_b.start(0)
        for step in range(plan.steps):
            panel_a, panel_b = (pending.wait() for pending in coming)
            last = step == plan.steps - 1
            if not last:
                coming = panels_a.start(step + 1), panels_b.start(step + 1)
            for index, (low, high) in enumerate(columns):
                kept = (0 if local.reduces or wide else beta) if step == 0 else 1
                _gemm(grid, library, panel_a, panel_b[:, low:high], sums[index], alpha, kept)
                if last and wide:
                    sum_in_order(library, [sums[index]], partial[index], 0 if local.reduces else beta)
                if last and local.reduces:
                    reductions.append(_reduce(local, grid, library, partial[index], outs[index], beta))
                    if index:
                        reductions[index - 1].wait()
        for reduction in reductions:
            reduction.wait()
        if not library.on_host:
            library.synchronize()


def _gemm(grid, library, a, b, c, alpha, beta) -> None:
    with grid.ledger.phase("multiply"), grid.ledger.computing("gemm"), grid.engine.background():
        if a.shape[1]:
            library.gemm(a, b, c, alpha, beta, grid.workspace)
        elif beta == 0:
            c[...] = 0
        elif beta != 1:
            c *= beta
        if not library.on_host and not grid.engine.idle():
            library.synchronize()


def _reduce(local: LocalPlan, grid, library, partial, out, beta):
    """Start the reduction of a panel of C over the k axis."""
    axis = grid.axis(local.plan.roles[1])
    with grid.ledger.phase("reduce C"):
        if local.plan.c == 0:
            return axis.reduce_scatter(partial, out=out, counts=local.c_counts, beta=beta)

        def all_reduce(link):
            yield from collectives.all_reduce(link, library, partial, out=partial, agreed=True)
            sum_in_order(library, [partial], out, beta)

        return axis.begin("all_reduce", all_reduce)


class _Ready:
    """A panel that needed no message."""

    def __init__(self, panel):
        self._panel = panel

    def wait(self):
        return self._panel


class _Panels:
    """The panels of one operand, step by step.

    shard     this rank's part, turned so that the sharded dim comes first
    axis      the axis along which it is gathered; None: the shard is the block
    along     0 or 1: the dim of `shard` that is contracted
    steps     for each step: the extents of dim 0 that each rank along the axis brings, and the slices of the
              contracted dim of the shard that belong to the step
    """

    def __init__(self, grid, library, phase, shard, axis, along, steps, buffers):
        self._grid, self._library, self._phase = grid, library, phase
        self._shard, self._axis, self._along = shard, axis, along
        self._steps, self._buffers = steps, buffers

    def start(self, step: int):
        """Begin to bring the step's panel together; wait() gives it, turned like the shard."""
        counts, slices = self._steps[step]
        pieces = [self._shard[low:high] if self._along == 0 else self._shard[:, low:high] for low, high in slices]
        depth = sum(high - low for low, high in slices)
        if self._axis is None:
            return _Ready(self._joined(pieces, depth, step))
        width = depth if self._along == 1 else self._shard.shape[1]
        panel = self._buffers[step % 2][: sum(counts) * width].reshape(sum(counts), width)
        start, stop = offsets(counts)[self._axis.index :][:2]
        place = panel[start:stop]
        if len(pieces) == 1 and is_contiguous(self._library, pieces[0]):
            part = pieces[0]
        else:
            part = self._packed(pieces, place)
        with self._grid.ledger.phase(self._phase):
            return self._axis.all_gather(part, out=panel, counts=counts)

    def _joined(self, pieces, depth: int, step: int):
        if len(pieces) == 1:
            return pieces[0]
        shape = (depth, self._shard.shape[1]) if self._along == 0 else (self._shard.shape[0], depth)
        if depth == 0:
            return self._shard[: shape[0], : shape[1]]
        return self._packed(pieces, self._buffers[step % 2][: shape[0] * shape[1]].reshape(*shape))

    def _packed(self, pieces, place):
        start = 0
        for piece in pieces:
            stop = start + piece.shape[self._along]
            if self._along == 0:
                place[start:stop] = piece
            else:
                place[:, start:stop] = piece
            start = stop
        return place


class _Turned:
    """Panels whose sharded dim is that of the columns: turned back when they have arrived."""

    def __init__(self, panels):
        self._panels = panels

    def start(self, step: int):
        return _TurnedPending(self._panels.start(step))


class _TurnedPending:
    def __init__(self, pending):
        self._pending = pending

    def wait(self):
        return self._pending.wait().T


def _panels_of_a(local: LocalPlan, a: DistMatrix, work):
    plan, grid = local.plan, a.grid
    turned = plan.a == 1
    buffers = _buffers(local, local.rows, local.gathers_a or local.scattered, work)
    panels = _Panels(grid, a.library, "gather A", a.local.T if turned else a.local,
                     grid.axis(plan.roles[2]) if local.gathers_a else None, 0 if turned else 1,
                     local.a_steps, buffers)  # fmt: skip
    return _Turned(panels) if turned else panels


def _panels_of_b(local: LocalPlan, b: DistMatrix, work):
    plan, grid = local.plan, b.grid
    turned = plan.b == 1
    buffers = _buffers(local, local.cols, local.gathers_b or local.scattered, work)
    panels = _Panels(grid, b.library, "gather B", b.local.T if turned else b.local,
                     grid.axis(plan.roles[0]) if local.gathers_b else None, 1 if turned else 0,
                     local.b_steps, buffers)  # fmt: skip
    return _Turned(panels) if turned else panels


def _buffers(local: LocalPlan, other: int, needed: bool, work):
    """Two flat buffers for a step's panels, one after the other; one if there is one step."""
    if not needed:
        return []
    return [work((local.step_depth(0) * other,)) for _ in range(min(2, local.plan.steps))]
