"""The 3D product: C = alpha A B + beta C on distributed matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar
from weakref import proxy

from ..arrays import Array, Slab, scale
from ..comm import Grid, clock, one_thread
from ..layout import LOW_PRECISION, Layout
from ..model.plan import BY_COLUMNS, BY_ROWS, Operand, ProductPlan, RankPlan, native
from ..model.planning import AUTO, plan_product
from .checks import Options, check_operands, check_options, check_tf32, grid_of, scalar, signature_of
from .operand import OperandGather
from .relayout import refill, summed
from .result import Result
from .shared import axes_in_node, shared_sums
from .stored import StoredMatrix, new_array

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Planned = tuple[ProductPlan, RankPlan | None]
CACHED_PLANS = 256
"""Largest number of plans that a grid caches. A plan takes a few KiB."""


@one_thread
def multiplied(a: Matrix, b: Matrix, out: Matrix | None = None, options: Options = Options()) -> Matrix:
    """Compute C = alpha A B + beta C. Implementation of `matmul`, with its options in a tuple. Collective."""
    grid, a, b = grid_of(a, b), summed(a, options.alpha), summed(b, options.alpha)
    passed = signature_of(a), signature_of(b), signature_of(out), *options
    with ExitStack() as borrowed:
        with grid.collective_call("matmul", *passed):
            product = ProductRun(a, b, out, options, borrowed)
        product.begin()
        return product.finish()


class ProductRun(Generic[Matrix]):
    """A checked product, bound to its plan, matrices and work memory. `borrowed` frees the work memory.

    After `__init__` no error occurs on one rank only. `begin` and `finish` compute the product, and can be repeated.

    plan   plan of the product by rows: if `out` is stored by columns, of out^T = B^T A^T
    mine   this rank's part of the plan, or None
    """

    def __init__(self, a: Matrix, b: Matrix, out: Matrix | None, options: Options, borrowed: ExitStack):
        check_operands(a, b, out, options.beta)
        check_options(options, out)
        check_tf32(options.tf32, a)
        self.alpha, self.beta = (scalar(name, getattr(options, name), a.dtype) for name in ("alpha", "beta"))
        self._tf32, how = options.tf32, (options.panels, options.max_workspace, options.overlap)
        if out is None and options.order == BY_COLUMNS:
            out = _new_by_columns(a, b, how)
        self.operands = a, b
        self.plan, self.mine = _planned(*_by_rows(a, b, out), *how)
        nbytes = 0 if self.mine is None else self.mine.own_work
        self._slab = borrowed.enter_context(a.grid.workspace.slab(nbytes, a.library))
        self.out: Matrix = _new_result(a, self.plan, self.plan.c_layout) if out is None else out
        self._shared = list[Array]()
        self.bind()

    def bind(self) -> None:
        """Bind the product to the present memory of A, B and C. Nothing is sent."""
        (a, b), work = self.operands, self._slab.again()
        for matrix in (a, b, self.out):
            if self.out.library.name == "torch":  # only torch can replace the storage of an array
                matrix._check_shard()
        bases = [matrix.base for matrix in (a, b, self.out)]  # for a view, the matrix whose shard it reads
        self._memory = [(base, base.memory, self._place_of(base.memory)) for base in bases]
        self._matrices = _by_rows(a, b, self.out)
        self._natives: tuple[StoredMatrix, ...] = self._matrices
        if self.plan.moves:
            layouts = self.plan.a_layout, self.plan.b_layout, self.plan.c_layout
            self._natives = tuple(_in_layout(each, layout, work) for each, layout in zip(self._matrices, layouts))
        self._rest = work.rest()
        self._gemm: Callable[[], None] | None = None
        if self.mine is not None:
            left, right, c = self._natives
            self._work = self._rest.again()
            self._a = OperandGather(self.mine, self.mine.a, left, self._work)
            self._b = OperandGather(self.mine, self.mine.b, right, self._work)
            # if decomposed, the GEMM of the first rows of A needs all of B
            in_order = (self._b, self._a) if self.plan.decomposed else (self._a, self._b)
            self._operands = [operand for operand in in_order if operand.begins]
            self._c = Result(self.mine, c, self.beta, self._work)

    @property
    def is_bound(self) -> bool:
        """Whether A, B and C still have the memory that `bind` found. A caller can replace it by
        `matrix.local = array`, or in torch by `matrix.local.data = tensor`."""
        for base, array, place in self._memory:
            if base.memory is not array or (place and place != self._place_of(array)):
                return False
        return True

    def _place_of(self, array: Array) -> tuple[Any, ...]:
        """Address of a shard. Empty for numpy, which never moves an array, and whose address takes 1 us to get."""
        return () if self.out.library.name == "numpy" else self.out._place_of(array)

    def share(self) -> None:
        """Allocate the shared memory for partial sums, if the plan needs more than there is. Collective over the
        grid."""
        if self.plan.shared_work:
            self._shared = shared_sums(self.out.grid, self.plan.axis_roles[1], self.plan.shared_work)

    @property
    def persists(self) -> bool:
        """Whether each call sends the same messages, from and to the same host memory. The same on all ranks."""
        grid, plan = self.out.grid, self.plan
        return (
            self.alpha != 0
            and not plan.moves
            and plan.panels == 1
            and self.out.library.on_host
            and grid.dry_run is None
            and not grid.engine.debug
        )

    def persist(self, number: int, requests: ExitStack) -> None:
        """Bind messages to persistent requests, and the GEMM to its arrays, if the product `persists`. Nothing is sent.

        number     number of the plan, the same on all ranks
        requests   stack that frees the requests
        """
        if self.mine is None or not self.persists:
            return
        for each in (self._a, self._b, self._c):
            each.persist(number, requests)
        if self._c.is_bound and not self.plan.decomposed and self.plan.dtype not in LOW_PRECISION and self.mine.depth:
            self._gemm = self.out.library.bound_gemm(
                self._a.factor,
                self._b.factor,
                self._c.sums,
                self.alpha,
                self._c.beta(first=True),
                self._work,
                conjugated=(self._a.conjugated, self._b.conjugated),
            )

    def begin(self) -> None:
        """Redistribute operands whose layouts fit no role, and begin to gather the first panels. Collective."""
        if self.alpha == 0:
            return
        if self.plan.shared_work:
            self.share()
        reads = (True, True, self.beta != 0) if self.plan.moves else ()
        for matrix, place, read in zip(self._matrices, self._natives, reads):
            if place is not matrix and read:
                refill(matrix, place, self._rest.again(), self.plan.rounds)
        if self.mine is not None:
            for operand in self._operands:
                operand.begin(0)

    def finish(self) -> Matrix:
        """Multiply, sum C, and return C. Collective.

        If alpha is 0, A and B are not read, as in BLAS, and nothing is sent.
        """
        if self.alpha == 0:
            with self.out.grid.ledger.phase("multiply"):
                scale(self.out.library, self.out._stored, self.beta)
        else:
            if self.mine is not None:
                self._multiply(self.plan.panels - 1)
            if self._natives[2] is not self._matrices[2]:
                refill(self._natives[2], self._matrices[2], self._rest.again(), self.plan.rounds)
        self.out.fills += 1
        return self.out

    def _multiply(self, last: int) -> None:
        """Run the GEMMs: one for each panel along k, or one in all without panels and decomposition.

        The last panel has one GEMM for each block of rows of C. If A comes in pieces, each piece has a GEMM.
        """
        a, b, c = self._a, self._b, self._c
        c.begin(self._shared)
        for panel in range(last + 1):
            left, right = a.wait(panel), b.wait(panel)
            if panel < last:
                for operand in self._operands:
                    operand.begin(panel + 1)
            for start, stop in c.blocks if panel == last else c.all_rows:
                for low, high in a.within(start, stop) if a.in_pieces else ((start, stop),):
                    self._add(left, right, low, high, first=panel == 0)
                if panel == last:
                    c.done()
        c.wait()
        for pending in [operand.end() for operand in self._operands]:
            if pending is not None:
                pending.wait()

    def _add(self, a: Array, b: Array, low: int, high: int, first: bool) -> None:
        """Run one GEMM: the rows low:high of A times B."""
        c = self._c
        gemm = self._gemm or partial(
            self.out.library.gemm,
            a[low:high],
            b,
            c.sums[low:high],
            self.alpha,
            c.beta(first),
            self._work,
            tf32=self._tf32,
            conjugated=(self._a.conjugated, self._b.conjugated),
        )
        run_gemm(self.out.grid, gemm)


def run_gemm(grid: Grid, gemm: Callable[[], None]) -> None:
    """Run a GEMM of a product on a grid, while messages make progress, and count its time."""
    with grid.ledger.phase("multiply"):
        begun, helped = clock(), grid.engine.computes()
        try:
            gemm()
        finally:
            if helped:
                grid.engine.computed()
            grid.ledger.computed("gemm", begun)


def _by_rows(a: Any, b: Any, out: Any) -> tuple[Any, Any, Any]:
    """A, B and C of the product that stores C by rows: those of out^T = B^T A^T if out is stored by columns."""
    return (b.T, a.T, out.T) if out is not None and out.order == BY_COLUMNS else (a, b, out)


def plan_for(
    a: StoredMatrix,
    b: StoredMatrix,
    out: StoredMatrix | None,
    panels: int | None,
    max_workspace: int | None,
    overlap: str | None = None,
) -> ProductPlan:
    """Plan of `matmul` for these arguments. If `out` is stored by columns, the plan of out^T = B^T A^T."""
    return _planned(*_by_rows(a, b, out), panels, max_workspace, overlap)[0]


def _planned(a: StoredMatrix, b: StoredMatrix, out: StoredMatrix | None, *how: Any) -> Planned:
    """Plan and this rank's part of it, or None. The grid caches both. how: panels, max_workspace, overlap."""
    if ProductPlan not in a.grid.attached:
        a.grid.attached[ProductPlan] = lru_cache(maxsize=CACHED_PLANS)(_planner(proxy(a.grid)))
    plans: Callable[..., Planned] = a.grid.attached[ProductPlan]
    c = None if out is None else _operand(out)
    return plans(_operand(a), _operand(b), c, a.dtype, a.library.gemm_copies, *how)


def _planner(grid: Grid) -> Callable[..., Planned]:
    """Return the function that plans products on a grid.

    A plan depends only on its arguments, so all ranks make the same plan, whatever their caches contain.
    """

    def planned(
        a: Operand,
        b: Operand,
        c: Operand | None,
        dtype: str,
        gemm_copies: bool,
        panels: int | None,
        max_workspace: int | None,
        overlap: str | None,
    ) -> Planned:
        plan = plan_product(
            a,
            b,
            c,
            dtype,
            grid.shape,
            panels=None if panels is None else int(panels),
            max_workspace=max_workspace,
            gemm_copies=gemm_copies,
            node_maps=tuple(map(grid._node_map_of, "xyz")),
            in_node=axes_in_node(grid) if a.shared or b.shared else frozenset(),
            overlap=grid.overlap if overlap in (None, AUTO) else str(overlap),
            nodes=grid.hosts,
        )
        grid.ledger.predict(f"matmul of {plan.m} x {plan.n} x {plan.k}", lambda: plan.memory)
        return plan, None if grid.coords is None else plan.on_rank(grid.coords)

    return planned


def _operand(matrix: StoredMatrix) -> Operand:
    return Operand(matrix.shape, matrix.layout.summed, matrix.order, matrix.conjugated, matrix.shared)


def _new_by_columns(a: Matrix, b: Matrix, how: tuple[Any, ...]) -> Matrix:
    """New C whose shards are stored by columns. C is sharded along its columns if several ranks sum it."""
    plan = _planned(a, b, None, *how)[0]
    m_axis, k_axis, n_axis = plan.axis_roles
    summed_up = getattr(plan.grid, k_axis) > 1
    return _new_result(a, plan, native(m_axis, n_axis, k_axis, 1) if summed_up else plan.c_layout, BY_COLUMNS)


def _new_result(like: Matrix, plan: ProductPlan, layout: Layout, order: str = BY_ROWS) -> Matrix:
    shape = layout.box((plan.m, plan.n), plan.grid, like.grid.coords).shape
    return type(like)(like.grid, new_array(like.library, shape, like.dtype, order), (plan.m, plan.n), layout, order)


def _in_layout(matrix: StoredMatrix, layout: Layout, work: Slab) -> StoredMatrix:
    """The matrix if it has this layout, else an unfilled matrix of the same shape and order, in work memory."""
    if matrix.has_layout(layout):
        return matrix
    return matrix._over(work.array(matrix._stored_shape(layout, matrix.grid), matrix.dtype), layout, matrix.grid)
