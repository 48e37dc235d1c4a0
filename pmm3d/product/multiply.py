"""The 3D product: C = alpha A B + beta C on distributed matrices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import is_
from typing import Any, Generic, TypeVar

from ..arrays import Array, Slab, scale
from ..comm.guard import one_thread
from ..layout import Layout
from ..model.plan import BY_COLUMNS, BY_ROWS, Operand, ProductPlan, RankPlan, native
from ..model.planning import AUTO, plan_product
from .checks import Options, check_operands, check_options, check_tf32, grid_of, scalar, signature_of
from .decomposed import multiply_decomposed
from .panels import OperandPanels, ResultStrips, met
from .posted import Factors, Posted, can_post
from .recent_plans import RecentPlans
from .relayout import refill, summed
from .shared import SharedSums, axes_in_node
from .stored import StoredMatrix

Matrix = TypeVar("Matrix", bound=StoredMatrix)


@one_thread
def matmul(a: Matrix, b: Matrix, *, alpha: complex = 1, beta: complex = 0, out: Matrix | None = None,
           panels: int | None = None, max_workspace: int | None = None, tf32: bool = False,
           overlap: str | None = None, order: str | None = None) -> Matrix:
    """C = alpha A B + beta C by the 3D algorithm (Agarwal et al., IBM J. Res. Dev. 39(5), 1995).

    a    (m, k)  rows over z, cols over y, sharded over x
    b    (k, n)  rows over y, cols over x, sharded over z
    out  (m, n)  rows over z, cols over x, sharded over y: C, written in place; a new matrix in Layout.C if left out

    panels          number of panels along k, and of strips of the columns of C: the messages of one run under the GEMM
                    of another. Sums along k then run in another order. Left out: 1, or what max_workspace needs
    max_workspace   bytes of work memory a rank may use, copies of redistributed operands included; kept by more panels
                    along k, and by moving in rounds
    overlap         how communication runs under the GEMM. "none": a rank waits for its messages. "decomposed": the rows
                    of A are multiplied as they arrive, one rank's after the other, and the rows of C that another rank
                    keeps are sent as soon as they are computed. Bytes, and the order of sums, are those of "none".
                    "auto", or left out: as PMM3D_OVERLAP says, or else "none" on one node, and across nodes
                    "decomposed" if the product can be decomposed
    order           of the shards of a new C: "C", by rows, if left out; "F", by columns, in a layout that is sharded
                    along the columns
    tf32            let a device round factors of float32 and complex64 to 10 bits of mantissa, for speed

    As in BLAS, A and B do not count if alpha is 0: C = beta C, and nothing is sent. If beta is 0, C is not read.

    Returns C. Each rank receives (Gx-1)/Gx |A block| + (Gz-1)/Gz |B block| + (Gy-1)/Gy |C block| bytes. The axes may
    play other roles where the layouts say so (`a.T @ b` moves no operand); an operand that fits no role is
    redistributed first, phase "redistribute" of the ledger; one of partial sums is brought to its sum before that, in
    memory of its own. The BLAS conjugates what it transposes, so that `a.H @ b` takes what `a.T @ b` does; what it
    cannot conjugate as it lies (`a.H.T`, or `a.H` into a transposed out) is conjugated in work memory: where it was
    gathered, else in a copy that `max_workspace` counts.

    On a device C is ready for what is asked of the current stream from then on, as after any operation of the array
    library: the host does not wait for the GEMM, unless what C is summed from is sent.

    Raises, on every rank: LayoutError if the sizes do not match or out is read-only or an operand, or one of partial
    sums, GridError for operands on different grids, DTypeError for mixed types and for tf32 on the host or of other
    types, MemoryLimitError, DisagreementError if the ranks passed different things.

        >>> from pmm3d import DistMatrix, Grid, Layout, matmul
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (4, 3), lambda i, j: i + j)
        ...     b = DistMatrix.from_function(grid, (3, 2), lambda i, j: i - j, layout=Layout.B)
        ...     c = a @ b
        ...     matmul(a, b, out=c, alpha=2, beta=-1).gather()
        array([[ 5.,  2.],
               [ 8.,  2.],
               [11.,  2.],
               [14.,  2.]])
    """
    grid, a, b = grid_of(a, b), summed(a, alpha), summed(b, alpha)
    options = Options(alpha, beta, panels, max_workspace, tf32, overlap, order)
    passed = signature_of(a), signature_of(b), signature_of(out), *options
    with ExitStack() as borrowed:
        with grid.together("matmul", *passed):
            product = Prepared(a, b, out, options, borrowed)
        product.share()
        product.multiply()
    return product.out


class Prepared(Generic[Matrix]):
    """A product whose arguments were checked, with its plan and work memory, which `borrowed` gives back: all that may
    fail on one rank alone is done."""

    def __init__(self, a: Matrix, b: Matrix, out: Matrix | None, options: Options, borrowed: ExitStack):
        check_operands(a, b, out, options.beta)
        check_options(options, out)
        check_tf32(options.tf32, a)
        self.alpha, self.beta = (scalar(name, getattr(options, name), a.dtype) for name in ("alpha", "beta"))
        self.tf32, how = options.tf32, (options.panels, options.max_workspace, options.overlap)
        if out is None:
            out = _new_by_columns(a, b, options)
        self._given, turned = (a, b), out is not None and out.order == BY_COLUMNS
        first, second, c = (b.T, a.T, out.T) if out is not None and turned else (a, b, out)
        self.plan, self.mine = _planned(first, second, c, *how)
        nbytes = 0 if self.mine is None else self.mine.own_work
        self._slab = borrowed.enter_context(a.grid.workspace.slab(nbytes, a.library))
        self.out = _new_result(a, self.plan, self.plan.c_layout) if out is None else out
        self._sums = SharedSums.of(a.grid)
        self.bind()

    def bind(self) -> None:
        """Take A, B and C from the memory that they have now. Nothing is sent."""
        (a, b), work, turned = self._given, self._slab.again(), self.out.order == BY_COLUMNS
        for matrix in (a, b, self.out):
            if self.out.library.name == "torch":  # only torch can replace the storage of an array
                matrix.check_shard()
        self._bound = self._memory()
        self.first, self.second = (b.T, a.T) if turned else (a, b)
        self.c: StoredMatrix = self.out.T if turned else self.out
        self.natives = tuple(_in_layout(matrix, layout, work) for matrix, layout in (
            (self.first, self.plan.a_layout), (self.second, self.plan.b_layout), (self.c, self.plan.c_layout)))
        self.work = work.rest()

    @property
    def is_bound(self) -> bool:
        """Whether A, B and C are still in the memory that `bind` found. A caller replaces it by `matrix.local = array`,
        torch by `matrix.local.data = tensor`."""
        (arrays, places), (now, there) = self._bound, self._memory()
        return all(map(is_, arrays, now)) and places == there

    def _memory(self) -> tuple[list[Array], list[tuple[Any, ...]]]:
        """The shards, of views those of their bases, and where they lie. numpy never moves an array, and takes 1 us to
        tell its address."""
        arrays = [matrix.base.memory for matrix in (*self._given, self.out)]
        return arrays, [] if self.out.library.name == "numpy" else list(map(self.out.place_of, arrays))

    def share(self) -> None:
        """Have the memory for partial sums that ranks share, if there is to be any. Collective, once all ranks are
        known to have prepared the same."""
        if self.plan.shared_work:
            self._sums.reserve(self.plan.roles[1], self.plan.shared_work)

    @property
    def can_post(self) -> bool:
        """Whether its messages are the same each time; the same on all ranks."""
        in_place = all(native is matrix for native, matrix in zip(self.natives, (self.first, self.second, self.c)))
        return self.alpha != 0 and can_post(self.plan, in_place, self.first)

    def posted(self, held: ExitStack, plan: int) -> Posted | None:
        """Return the product with persistent requests, if it `can_post`; None on a rank that has no part in it.

        plan   its number, the same on all ranks
        """
        if self.mine is None:
            return None
        a, b, c = self.natives
        factors = Factors(a, b, c, self.alpha, self.beta, self.tf32)
        return Posted(self.mine, factors, self.work.again(), held, plan)

    def multiply(self) -> None:
        """Collective. As in BLAS, A and B do not count if alpha is 0: then nothing is sent."""
        if self.alpha == 0:
            with self.out.grid.ledger.phase("multiply"):
                scale(self.out.library, self.out.stored, self.beta)
            self.out.fills += 1
            return
        matrices: tuple[StoredMatrix, ...] = (self.first, self.second, self.c)
        rest = self.work.again()
        for matrix, taken, read in zip(matrices, self.natives, (True, True, self.beta != 0)):
            if taken is not matrix and read:
                refill(matrix, taken, rest, self.plan.rounds)
        if self.mine is not None:
            a, b, c = self.natives
            slots = self._sums.slots(self.plan.roles[1]) if self.mine.shared_work else []
            _multiply(self.mine, a, b, c, self.alpha, self.beta, self.tf32, rest.again(), slots)
        if self.natives[2] is not self.c:
            refill(self.natives[2], self.c, rest, self.plan.rounds)
        self.out.fills += 1


def plan_for(a: StoredMatrix, b: StoredMatrix, out: StoredMatrix | None, panels: int | None,
             max_workspace: int | None, overlap: str | None = None) -> ProductPlan:
    """The plan of `matmul` for these arguments; for an out by columns that of its transpose, B.T A.T."""
    if out is not None and out.order == "F":
        a, b, out = b.T, a.T, out.T
    return _planned(a, b, out, panels, max_workspace, overlap)[0]


def _planned(a: StoredMatrix, b: StoredMatrix, out: StoredMatrix | None, panels: int | None,
             max_workspace: int | None, overlap: str | None) -> tuple[ProductPlan, RankPlan | None]:
    """The plan, and this rank's part of it if it has one; the recent ones are kept with the grid."""
    grid, c = a.grid, None if out is None else _operand(out)
    plans = grid.attached.setdefault(ProductPlan, RecentPlans())

    def make() -> tuple[ProductPlan, RankPlan | None]:
        plan = plan_product(_operand(a), _operand(b), c, a.dtype, grid.shape,
                            panels=None if panels is None else int(panels), max_workspace=max_workspace,
                            gemm_copies=a.library.gemm_copies, spreads=tuple(map(grid.spread_of, "xyz")),
                            in_node=axes_in_node(grid) if a.shared or b.shared else frozenset(),
                            overlap=grid.overlap if overlap in (None, AUTO) else str(overlap), nodes=grid.hosts)
        grid.ledger.predict(f"matmul of {plan.m} x {plan.n} x {plan.k}", plan.memory)
        return plan, None if grid.coords is None else plan.on_rank(grid.coords)

    asked = panels, max_workspace, overlap
    return plans.get((_operand(a), _operand(b), c, a.dtype, a.library.gemm_copies, *asked), make)


def _operand(matrix: StoredMatrix) -> Operand:
    return Operand(matrix.shape, matrix.layout.summed, matrix.order, matrix.conjugated, matrix.shared)


def _new_by_columns(a: Matrix, b: Matrix, options: Options) -> Matrix | None:
    """C, if its shards are to lie so; sharded along its columns where several ranks add it up."""
    if options.order in (None, BY_ROWS):
        return None
    plan = plan_for(a, b, None, options.panels, options.max_workspace, options.overlap)
    m_axis, k_axis, n_axis = plan.roles
    summed_up = getattr(plan.grid, k_axis) > 1
    return _new_result(a, plan, native(m_axis, n_axis, k_axis, 1) if summed_up else plan.c_layout, BY_COLUMNS)


def _new_result(like: Matrix, plan: ProductPlan, layout: Layout, order: str = BY_ROWS) -> Matrix:
    rows, cols = layout.box((plan.m, plan.n), plan.grid, like.grid.coords).shape
    memory = like.library.empty((rows, cols) if order == BY_ROWS else (cols, rows), like.dtype)
    return type(like)(like.grid, memory if order == BY_ROWS else memory.T, (plan.m, plan.n), layout, order)


def _in_layout(matrix: StoredMatrix, layout: Layout, work: Slab) -> StoredMatrix:
    """The matrix if it lies so, else one of the same shape and order that does, in work memory."""
    grid = matrix.grid
    if matrix.layout.on(grid.shape) == layout.on(grid.shape):
        return matrix
    return matrix.over(work.array(matrix.stored_shape(layout, grid), matrix.dtype), layout, grid)


def _multiply(plan: RankPlan, a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, alpha: complex, beta: complex,
              tf32: bool, work: Slab, slots: Sequence[Array]) -> None:
    """This rank's part: bring a panel together while the GEMM of the one before runs, then reduce C."""
    panels_a, panels_b = OperandPanels.of_a(plan, a, work), OperandPanels.of_b(plan, b, work)
    strips = ResultStrips(plan, c, alpha, beta, tf32, (panels_a.conjugated, panels_b.conjugated), work, slots)
    met(panels_a, panels_b, brings=True)
    if plan.plan.decomposed:
        multiply_decomposed(plan, panels_a, panels_b, strips)
        met(panels_a, panels_b)
        return
    coming = panels_a.start(0), panels_b.start(0)
    for index in range(plan.plan.panels):
        panel_a, panel_b = coming[0].wait(), coming[1].wait()
        last = index == plan.plan.panels - 1
        if not last:
            coming = panels_a.start(index + 1), panels_b.start(index + 1)
        panels_a.conjugate(panel_a)
        panels_b.conjugate(panel_b)
        for strip, (low, high) in enumerate(plan.strips):
            strips.add(strip, panel_a, panel_b[:, low:high], first=index == 0)
            if last:
                strips.finish(strip)
    strips.wait()
    met(panels_a, panels_b)
