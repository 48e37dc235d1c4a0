"""The 3D product: C = alpha A B + beta C on distributed matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import proxy

from ..arrays import Array, Borrowed, Slab, scale
from ..comm import Grid, Terms, clock, one_thread
from ..layout import LOW_PRECISION, Layout
from ..model.plan import BY_COLUMNS, BY_ROWS, Operand, ProductPlan, RankPlan, native
from ..model.planning import AUTO, plan_product
from .checks import (
    Options,
    check_arrays,
    check_operands,
    check_options,
    check_tf32,
    grid_of,
    named,
    result_dtype,
    scalar,
    signature_of,
)
from .operand import OperandGather
from .relayout import refill, summed
from .result import Result
from .shared import axes_in_node, shared_sums
from .stored import StoredMatrix, new_array

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Planned = tuple[ProductPlan, RankPlan | None]
CACHED_PLANS = 256
"""Largest number of plans, and of checked products, that a grid caches. Each takes a few KiB, and holds no arrays."""
PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types of options whose equal values have one meaning. Complex numbers may differ in the sign of a zero."""


class CheckedProduct(NamedTuple):
    """All that depends only on the forms of the matrices and on the options of a product.

    plan          plan of the product by rows: if C is stored by columns, of C^T = B^T A^T
    mine          this rank's part of the plan, or None
    alpha, beta   factors, as Python numbers
    tf32          option of `matmul`
    shape, layout, order   shape of this rank's shard of a new C, and its layout and order
    """

    plan: ProductPlan
    mine: RankPlan | None
    alpha: complex
    beta: complex
    tf32: bool
    shape: tuple[int, int]
    layout: Layout
    order: str


@one_thread
def multiplied(a: Matrix, b: Matrix, out: Matrix | None = None, options: Options = Options()) -> Matrix:
    """Compute C = alpha A B + beta C. Implementation of `matmul`, with its options in a tuple. Collective.

    The grid caches the terms of the comparison and the checked product, by the forms of the matrices.
    """
    grid, a, b = grid_of(a, b), summed(a, options.alpha), summed(b, options.alpha)
    forms, types = (signature_of(a), signature_of(b), signature_of(out)), tuple(map(type, options))
    cache: dict[Any, tuple[Terms, CheckedProduct]] = grid.attached.setdefault(CheckedProduct, {})
    key = (*forms, *options, *types, *grid._named()) if PLAIN.issuperset(types) else None
    known = cache.get(key)
    terms = grid._terms("matmul", *forms, *options) if known is None else known[0]
    if known and (b.grid is not grid or b.library != a.library or (out is not None and out.grid is not grid)):
        known = None
    borrowed: Borrowed[Slab] | None = None
    try:
        with grid._call_on(terms):
            if known is None:
                product = checked(a, b, out, options)
                keep(cache, key, (terms, product), CACHED_PLANS)
            else:
                check_arrays(a, b, out)
                product = known[1]
            run = ProductRun(product, a, b, out)
            borrowed = run.borrow()
            run.bind(borrowed.lent)
        run.begin()
        return run.finish()
    finally:
        if borrowed is not None:
            borrowed.__exit__()


def keep(cache: dict[Any, Any], key: tuple[Any, ...] | None, checked: Any, most: int) -> None:
    """Keep a checked call for the next calls of the same forms. Drop the oldest one if there are more than `most`."""
    if key is not None:
        cache[key] = checked
        if len(cache) > most:
            del cache[next(iter(cache))]


def checked(a: Matrix, b: Matrix, out: Matrix | None, options: Options, what: str = "matmul") -> CheckedProduct:
    """Check the arguments of `matmul`, and plan the product. what: name of the operation in error messages."""
    check_operands(a, b, out, options.beta, what, wide=True)
    with named(what):
        check_options(options, out)
        c_dtype = result_dtype(a.dtype, options.out_dtype, out)
    check_tf32(options.tf32, a, what, c_dtype)
    alpha, beta = (scalar(name, getattr(options, name), c_dtype, what) for name in ("alpha", "beta"))
    how = options.panels, options.max_workspace, options.overlap
    operands = _operand(a), _operand(b), None if out is None else _operand(out)
    shape = a.shape[0], b.shape[1]
    with named(what):
        if out is None and options.order == BY_COLUMNS:
            layout = _layout_by_columns(_planned(a, c_dtype, *operands, *how)[0])
            operands = *operands[:2], Operand(shape, layout, BY_COLUMNS)
        plan, mine = _planned(a, c_dtype, *_by_rows(*operands), *how)
    layout, order = (plan.c_layout, BY_ROWS) if operands[2] is None else (operands[2].layout, operands[2].order)
    local = layout.box(shape, a.grid.shape, a.grid.coords).shape
    return CheckedProduct(plan, mine, alpha, beta, options.tf32, local, layout, order)


class ProductRun(Generic[Matrix]):
    """A checked product and its matrices. Call `borrow` and `bind` first. After that no error occurs on one rank only.
    `begin` and `finish` compute the product, and can be repeated, with other factors after `scale`.
    """

    def __init__(self, product: CheckedProduct, a: Matrix, b: Matrix, out: Matrix | None):
        self.plan, self.mine, self.alpha, self.beta, self._tf32, shape, layout, order = product
        self.operands = a, b
        if out is None:
            memory = new_array(a.library, shape, self.plan.c_dtype, order)
            out = type(a)(a.grid, memory, (a.shape[0], b.shape[1]), layout, order)
        self.out: Matrix = out
        self._shared = list[Array]()

    def borrow(self) -> Borrowed[Slab]:
        """Borrow the work memory from the grid. The caller returns it."""
        return self.out.grid.workspace.slab(self.own_work, self.out.library)

    @property
    def own_work(self) -> int:
        """Bytes of work memory on this rank."""
        return 0 if self.mine is None else self.mine.own_work

    def bind(self, work: Slab) -> None:
        """Bind the product to the present memory of A, B and C, and to work memory of `own_work` bytes. Nothing is
        sent."""
        a, b = self.operands
        for matrix in (a, b, self.out):
            if self.out.library.name == "torch":  # only torch can replace the storage of an array
                matrix._check_shard()
        self._matrices = _by_rows(a, b, self.out)
        self._natives: tuple[StoredMatrix, ...] = self._matrices
        self._rest = work
        if self.plan.moves:
            layouts, work = (self.plan.a_layout, self.plan.b_layout, self.plan.c_layout), work.again()
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

    def scale(self, alpha: complex, beta: complex) -> None:
        """Set the factors of the next calls."""
        if (alpha, beta) == (self.alpha, self.beta):
            return
        self.alpha, self.beta = alpha, beta
        if self.mine is not None:
            self._c.scale(beta)
            if self._gemm is not None:
                self._gemm = self._bound_gemm()

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
            not plan.moves
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
        dtypes = {self.plan.dtype, self.plan.c_dtype}
        plain = len(dtypes) == 1 and not dtypes & {*LOW_PRECISION}
        if self._c.is_bound and not self.plan.decomposed and plain and self.mine.depth:
            self._gemm = self._bound_gemm()

    def _bound_gemm(self) -> Callable[[], None]:
        return self.out.library.bound_gemm(
            self._a.factor,
            self._b.factor,
            self._c.sums,
            self.alpha,
            self._c.beta(first=True),
            self._work,
            conjugated=(self._a.conjugated, self._b.conjugated),
        )

    @property
    def moved(self) -> list[tuple[StoredMatrix, StoredMatrix]]:
        """(matrix, place in the layout of the plan) of each matrix that is redistributed before the product."""
        reads = (True, True, self.beta != 0) if self.plan.moves else ()
        sides = zip(self._matrices, self._natives, reads)
        return [(matrix, place) for matrix, place, read in sides if place is not matrix and read]

    @property
    def moved_back(self) -> list[tuple[StoredMatrix, StoredMatrix]]:
        """(place, matrix) of C, if it is redistributed after the product."""
        return [] if self._natives[2] is self._matrices[2] else [(self._natives[2], self._matrices[2])]

    @property
    def operands_gathered(self) -> list[OperandGather]:
        """A and B, if they are gathered by messages. The product has no panels."""
        return [operand for operand in (self._a, self._b) if operand.elements]

    @property
    def result(self) -> Result:
        """C on this rank, which is not idle."""
        return self._c

    def begin(self) -> None:
        """Redistribute operands whose layouts fit no role, and begin to gather the first panels. Collective."""
        if self.alpha == 0:
            return
        if self.plan.shared_work:
            self.share()
        for matrix, place in self.moved:
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
            for place, matrix in self.moved_back:
                refill(place, matrix, self._rest.again(), self.plan.rounds)
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

    def multiply_gathered(self) -> None:
        """Run the GEMM of a product without panels and decomposition, whose operands the caller has gathered."""
        self._add(self._a.wait(0), self._b.wait(0), *self._c.all_rows[0], first=True)

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
            rounded=self.plan.c_dtype == self.plan.dtype,
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
    """A, B and C of the product that stores C by rows: those of out^T = B^T A^T if out is stored by columns. They are
    matrices, or Operands."""
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
    operands = _operand(a), _operand(b), None if out is None else _operand(out)
    c_dtype = a.dtype if out is None else out.dtype
    return _planned(a, c_dtype, *_by_rows(*operands), panels, max_workspace, overlap)[0]


def _planned(like: StoredMatrix, c_dtype: str, *operands_and_how: Any) -> Planned:
    """Plan and this rank's part of it, or None. The grid caches both.

    like               matrix with the grid, the type and the library of the operands
    c_dtype            type of C
    operands_and_how   A, B, C or None; panels, max_workspace, overlap
    """
    if ProductPlan not in like.grid.attached:
        like.grid.attached[ProductPlan] = lru_cache(maxsize=CACHED_PLANS)(_planner(proxy(like.grid)))
    plans: Callable[..., Planned] = like.grid.attached[ProductPlan]
    return plans(like.dtype, c_dtype, like.library.gemm_copies, *operands_and_how)


def _planner(grid: Grid) -> Callable[..., Planned]:
    """Return the function that plans products on a grid.

    A plan depends only on its arguments, so all ranks make the same plan, whatever their caches contain.
    """

    def planned(
        dtype: str,
        c_dtype: str,
        gemm_copies: bool,
        a: Operand,
        b: Operand,
        c: Operand | None,
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
            out_dtype=c_dtype,
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


def _layout_by_columns(plan: ProductPlan) -> Layout:
    """Layout of a new C whose shards are stored by columns. C is sharded along its columns if several ranks sum it."""
    m_axis, k_axis, n_axis = plan.axis_roles
    summed_up = getattr(plan.grid, k_axis) > 1
    return native(m_axis, n_axis, k_axis, 1) if summed_up else plan.c_layout


def _in_layout(matrix: StoredMatrix, layout: Layout, work: Slab) -> StoredMatrix:
    """The matrix if it has this layout, else an unfilled matrix of the same shape and order, in work memory."""
    if matrix.has_layout(layout):
        return matrix
    return matrix._over(work.array(matrix._stored_shape(layout, matrix.grid), matrix.dtype), layout, matrix.grid)
