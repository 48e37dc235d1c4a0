"""The 3D product: C = alpha A B + beta C on distributed matrices."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from numbers import Number, Real

from . import cost
from .arrays import overlap
from .errors import DTypeError, GridError, LayoutError, Pmm3dError
from .layout import Layout
from .matrix import DistMatrix
from .panels import OperandPanels, ResultPanels
from .product import LocalPlan, Operand, ProductPlan, check_dtypes, plan_product
from .redistribute import Placement

PANELS_ACROSS_HOSTS = 4


def matmul(a: DistMatrix, b: DistMatrix, *, alpha=1, beta=0, out: DistMatrix | None = None, panels: int | None = None,
           max_workspace: int | None = None) -> DistMatrix:
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

    Raises, on every rank: LayoutError if the sizes do not match or out is read-only or an operand, GridError for
    operands on different grids, DTypeError for mixed types, MemoryLimitError, DisagreementError if the ranks passed
    different things.
    """
    grid = a.grid
    with grid.together("matmul", a.signature(), _signature(b), _signature(out), alpha, beta, panels, max_workspace):
        _check(a, b, out, alpha, beta)
        a, b, c = (b.T, a.T, out.T) if out is not None and out.order == "F" else (a, b, out)
        plan = plan_for(a, b, c, panels, max_workspace)
        if c is None:
            c = out = _new(grid, (plan.m, plan.n), plan.c_layout, a)
    with _placed(a, plan.a_layout) as native_a, _placed(b, plan.b_layout) as native_b:
        with _placed(c, plan.c_layout, back=True, read=beta != 0) as native_c:
            if grid.active:
                _multiply(plan.local(grid.coords), native_a, native_b, native_c, alpha, beta)
    return out


def _signature(matrix):
    return matrix.signature() if isinstance(matrix, DistMatrix) else type(matrix).__name__


def _check(a, b, out, alpha, beta) -> None:
    for name, matrix in (("b", b), ("out", out)):
        if not isinstance(matrix, DistMatrix) and not (name == "out" and matrix is None):
            raise Pmm3dError(f"matmul: {name} is a {type(matrix).__name__}; it must be a DistMatrix")
        if matrix is not None and matrix.grid is not a.grid:
            raise GridError(f"A is on grid {a.grid.shape}, {name} on another Grid ({matrix.grid.shape}); "
                            f"bring it over with {name}.redistribute(layout, grid)")
    check_dtypes(a.dtype, b.dtype, out and out.dtype)
    if a.library != b.library or (out is not None and out.library != a.library):
        raise LayoutError(f"A is in {a.library}, B in {b.library}, out in {out and out.library}: use one array library")
    for name, scalar in (("alpha", alpha), ("beta", beta)):
        if not isinstance(scalar, Number if a.dtype.startswith("complex") else Real):
            raise DTypeError(f"matmul: {name} is {scalar!r}, which cannot scale a {a.dtype} matrix")
    if out is None and beta != 0:
        raise LayoutError("matmul: beta needs out=, the C that it scales")
    if out is not None and not out.library.writable(out.local):
        raise LayoutError("matmul: out is read-only")
    if out is not None and any(overlap(a.library, out.local, matrix.local) for matrix in (a, b)):
        raise LayoutError("matmul: out shares memory with an operand, which would change while it is read")


def plan_for(a: DistMatrix, b: DistMatrix, out: DistMatrix | None, panels: int | None,
             max_workspace: int | None) -> ProductPlan:
    """The plan of `matmul` for these arguments, from the grid's cache."""
    grid = a.grid
    operands = [matrix and Operand(matrix.shape, matrix.layout, matrix.order) for matrix in (a, b, out)]
    key = (*operands, a.dtype, panels, max_workspace)
    if key not in grid.plans:
        if panels is None:
            panels = 1 if grid.hosts == 1 else PANELS_ACROSS_HOSTS
        plan = plan_product(*operands, a.dtype, grid.shape, panels=panels, max_workspace=max_workspace)
        grid.plans[key] = plan
        product = (plan.m, plan.n, plan.k)
        grid.ledger.predict("matmul of {} x {} x {}".format(*product), cost.memory(product, grid.shape, a.dtype))
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
    with ExitStack() as borrowed:

        def work(shape, dtype=local.plan.dtype):
            return borrowed.enter_context(a.grid.workspace.borrow(shape, dtype, a.library))

        panels_a, panels_b = OperandPanels.of_a(local, a, work), OperandPanels.of_b(local, b, work)
        result = ResultPanels(local, c, alpha, beta, work)
        coming = panels_a.start(0), panels_b.start(0)
        for step in range(local.plan.steps):
            panel_a, panel_b = (panel.wait() for panel in coming)
            last = step == local.plan.steps - 1
            if not last:
                coming = panels_a.start(step + 1), panels_b.start(step + 1)
            for index, (low, high) in enumerate(result.columns):
                result.add(index, panel_a, panel_b[:, low:high], first=step == 0)
                if last:
                    result.finish(index)
        result.wait()
