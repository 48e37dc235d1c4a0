"""Public interface of the product: one product (`matmul`), and repeated products with one check and one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from ..comm import PlanResources, leaves_in_order
from ..errors import GridError, LayoutError
from .checks import Options, check_form, check_not_partial, check_out, compared_dtype, grid_of, scalar, signature_of
from .matrix import DistMatrix
from .multiply import ProductRun, checked, multiplied
from .stored import StoredMatrix

Result = TypeVar("Result")
BOUND = 32
"""Largest number of sets of matrices for which a plan has persistent requests."""


def matmul(
    a: DistMatrix,
    b: DistMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
    panels: int | None = None,
    max_workspace: int | None = None,
    tf32: bool = False,
    overlap: str | None = None,
    order: str | None = None,
    out_dtype: Any = None,
) -> DistMatrix:
    """C = alpha A B + beta C by the 3D algorithm of Agarwal et al.

    Parameters
    ----------
    a : DistMatrix, (m, k)
        A. Nothing is redistributed if rows are split over z, columns over y, and shards over x (Layout.A).
    b : DistMatrix, (k, n)
        B. Nothing is redistributed if rows are split over y, columns over x, and shards over z (Layout.B).
    alpha, beta : number
        Factors. As in BLAS, A and B are not read if alpha is 0, and C is not read if beta is 0.
    out : DistMatrix, (m, n), or None
        C, which is overwritten. Default: a new matrix in Layout.C: rows over z, columns over x, shards over y.
    panels : int or None
        Number of panels along k. The messages of one panel run during the GEMM of another. Default: 1, or the number
        that `max_workspace` needs.
    max_workspace : int or None
        Bytes of work memory that a rank may use, including copies of redistributed operands. Default: no limit.
    tf32 : bool
        Let a GPU round the factors of float32 and complex64 products to 10 bits of mantissa.
    overlap : str or None
        "none": a rank waits for its messages. "decomposed": rows of A are multiplied as they arrive, and rows of C are
        sent as soon as they are computed. "auto" (default, unless PMM3D_OVERLAP is set): "none" on one node; across
        nodes "decomposed", if the product can be decomposed.
    order : str or None
        Order of the shards of a new C: "C" (default) or "F". With "F", C is sharded along its columns.
    out_dtype : str, dtype or None
        Element type of a new C, as in torch: that of A and B (default), or a wider one. Pairs of types: float16 and
        float32, bfloat16 and float32, float32 and float64, complex64 and complex128. An `out` of the wider type has the
        same effect.

    Raises
    ------
    LayoutError
        If the sizes do not match, or if `out` is read-only, an operand, or one of partial sums.
    GridError
        If the operands are on different grids.
    DTypeError
        For other pairs of types, for labels, for a factor that cannot scale C, and for `tf32` on the host or for other
        types.
    MemoryLimitError
        If the product cannot be done within `max_workspace` bytes.
    DisagreementError
        If ranks passed different arguments.

    Notes
    -----
    Each rank receives (Gx-1)/Gx of its block of A, (Gz-1)/Gz of its block of B, and (Gy-1)/Gy of its block of C. On
    the best grid, and if it divides the sizes, this equals the lower bound of all algorithms.

    The axes take other roles if the layouts require this: `a.T @ b` redistributes nothing. An operand that fits no role
    is redistributed first (phase "redistribute" of the ledger). Partial sums are summed before that, in memory of their
    own.

    The BLAS conjugates an operand that it also transposes, so `a.H @ b` costs as much as `a.T @ b`. Other conjugated
    views are conjugated in work memory, which `max_workspace` counts.

    If C has a wider type, A and B are sent in their own type, and partial sums in that of C. Nothing is rounded to the
    type of A and B. The factors are widened in work memory, 512 columns of A and rows of B at a time: 512 (m/Gz + n/Gx)
    elements of the type of C. A device multiplies float16 and bfloat16 into float32 without copies.

    With panels, sums along k are added in a different order, so the last bits can differ. "decomposed" and "none" have
    the same bits and bytes.

    On a device, C is ready in the order of the current stream. The host does not wait for the GEMM, unless partial sums
    of C are sent.

    Source: R. C. Agarwal et al., IBM J. Res. Dev. 39(5), 1995.

    Examples
    --------
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
    return multiplied(
        a, b, out, Options(alpha, beta, panels, max_workspace, tf32, overlap, order, compared_dtype(out_dtype))
    )


class Operation(Protocol):
    """Messages that have begun."""

    def test(self) -> bool: ...

    def wait(self) -> object: ...


class PendingProduct(Generic[Result]):
    """A product that a plan has begun.

    Attributes
    ----------
    done : bool
        Whether `wait` has ended.
    """

    def __init__(
        self, begun: Sequence[Operation], finish: Callable[[], Result], failed: Callable[[], None] = lambda: None
    ):
        self._begun, self._failed, self.done = begun, failed, False
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Progress the messages, and return `done`. Only `wait` multiplies."""
        for pending in self._begun:
            pending.test()
        return self.done

    def wait(self) -> Result | None:
        """Multiply, sum, and return the result: C for a MatmulPlan, None for a PgemmPlan. Collective.

        A second call returns the same result, or raises the same error.
        """
        if self._finish is not None:
            finish, self._finish, self.done = self._finish, None, True  # it holds the matrices
            try:
                for pending in self._begun:
                    pending.wait()
                self._result = finish()
            except BaseException as error:
                self._error = error
                self._failed()
        if self._error is not None:
            raise self._error
        return self._result


class MatmulPlan:
    """C = alpha A B + beta C, repeated for matrices of the same form, checked and planned once.

    Parameters
    ----------
    a, b, alpha, beta, out, panels, max_workspace, tf32, overlap, order, out_dtype
        See `matmul`. The matrices and the factors are those of calls that pass no others.

    Attributes
    ----------
    out : DistMatrix
        C of calls that pass no `out`.

    Raises
    ------
    LayoutError
        For an operand of partial sums. Other errors: see `matmul`.

    Notes
    -----
    Making a plan and calling it are collective. Messages, result and bits are those of `matmul`. A call compares
    nothing among the ranks, so all ranks must make it with the same arguments. It raises its errors on the ranks that
    find them, before a message is sent; with PMM3D_DEBUG=1 the ranks compare the call, and all of them raise. A plan
    holds work memory, and persistent requests of MPI if no operand is redistributed, until it or its grid is closed, or
    until it is garbage-collected. It has requests of the last 32 sets of matrices, its own among them. Requests of a
    matrix that is garbage-collected are freed in the next collective.

    A call multiplies the elements that A, B and C contain at that time. They may be changed in place, the shard may be
    replaced (`a.local = array`), and so may torch's storage of the shard (`a.local.data = tensor`). If an operand is a
    view (`a.T`), this holds for the matrix of which it is a view.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, MatmulPlan
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (4, 3), lambda i, j: i + j)
    ...     b = DistMatrix.from_function(grid, (3, 2), lambda i, j: i - j, layout=Layout.B)
    ...     ones = DistMatrix.ones(grid, (4, 3))
    ...     with MatmulPlan(a, b) as product:
    ...         c = product()
    ...         product(ones, alpha=2, beta=-1) is c
    ...     c.gather()
    True
    array([[ 1., -2.],
           [-2., -2.],
           [-5., -2.],
           [-8., -2.]])
    """

    def __init__(
        self,
        a: DistMatrix,
        b: DistMatrix,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        out: DistMatrix | None = None,
        panels: int | None = None,
        max_workspace: int | None = None,
        tf32: bool = False,
        overlap: str | None = None,
        order: str | None = None,
        out_dtype: Any = None,
    ):
        self._grid = grid_of(a, b, "MatmulPlan")
        options = Options(alpha, beta, panels, max_workspace, tf32, overlap, order, compared_dtype(out_dtype))
        passed = signature_of(a), signature_of(b), signature_of(out), *options
        with PlanResources() as held, self._grid.engine.guard:
            with self._grid.collective_call("MatmulPlan", *passed):
                check_not_partial("MatmulPlan", a, b)
                self._product = checked(a, b, out, options, "MatmulPlan")
                first = ProductRun(self._product, a, b, out)
                self._work = held.enter_context(first.borrow())
                self._matrices, self._makes_out = (a, b, first.out), out is None
                self._number, self._bound = self._grid.everyone._number, list[_Bound]()
                self._bind(*self._matrices)
            first.share()
            self._held = held.pop_all()
            self._grid.engine.hold(self, self._held)
        self.closed = False
        self._pending: PendingProduct[DistMatrix] | None = None

    def __call__(
        self,
        a: DistMatrix | None = None,
        b: DistMatrix | None = None,
        *,
        out: DistMatrix | None = None,
        alpha: complex | None = None,
        beta: complex | None = None,
    ) -> DistMatrix:
        """Compute C = alpha A B + beta C, and return C; see `start`. Collective."""
        with self._grid.engine.guard:
            return self._begin(a, b, out, alpha, beta)()

    def start(
        self,
        a: DistMatrix | None = None,
        b: DistMatrix | None = None,
        *,
        out: DistMatrix | None = None,
        alpha: complex | None = None,
        beta: complex | None = None,
    ) -> PendingProduct[DistMatrix]:
        """Begin the product: send A and B, or their first panels. Collective.

        Parameters
        ----------
        a, b, out : DistMatrix or None
            Matrices of this product. Shape, layout, order, element type, array library and grid are those of the
            plan's matrices; each is a conjugated view if that of the plan is one. They must not change until the
            product ends. Default: those of the plan.
        alpha, beta : number or None
            Factors of this product. Default: those of the plan.

        Returns
        -------
        PendingProduct
            Its `wait()` multiplies, and returns C; it is collective too.

        Raises
        ------
        LayoutError
            For a matrix of another form, and if `out` is read-only or shares memory with A or B.
        DTypeError
            If a factor cannot scale the matrices.
        GridError
            If the plan or its grid is closed, if the last product was not waited for, or for a matrix on another grid.

        Notes
        -----
        Operands that fit no role are redistributed first. With persistent requests, only the first round of an
        all-gather in several rounds (above 16 ranks, or by nodes) runs before `wait`.
        """
        with self._grid.engine.guard:
            self._pending = PendingProduct((), partial(self._waited, self._begin(a, b, out, alpha, beta)))
        return self._pending

    def _begin(self, a: Any, b: Any, out: Any, alpha: Any, beta: Any) -> Callable[[], DistMatrix]:
        """Begin a product, and return the function that ends it."""
        if self.closed:
            raise GridError("this plan is closed: make another one, or use matmul")
        if self._held.under_way:
            raise GridError("this plan has a product under way: wait for that first, or make another plan")
        if self._grid.debug:
            with self._grid.collective_call("MatmulPlan", *map(signature_of, (a, b, out)), alpha, beta):
                bound, into = self._checked(a, b, out, alpha, beta)
        else:
            bound, into = self._checked(a, b, out, alpha, beta)
        self._held.under_way = True
        bound.run.begin()
        return partial(self._finish, bound, into)

    def _checked(self, a: Any, b: Any, out: Any, alpha: Any, beta: Any) -> tuple[_Bound, DistMatrix]:
        """Check the arguments of a call, and bind the product to its matrices. Return also its C."""
        matrices, product = self._matrices, self._product
        if not (a is b is out is None):
            given = [own if matrix is None else matrix for matrix, own in zip((a, b, out), matrices)]
            for name, matrix, own in zip(("a", "b", "out"), given, matrices):
                if matrix is not own:
                    check_form("MatmulPlan", name, matrix, own)
            matrices = given[0], given[1], given[2]
        alpha = product.alpha if alpha is None else scalar("alpha", alpha, self.out.dtype, "MatmulPlan")
        beta = product.beta if beta is None else scalar("beta", beta, self.out.dtype, "MatmulPlan")
        if beta != 0 and out is None and self._makes_out and not self.out.fills:
            raise LayoutError(
                "MatmulPlan: beta needs a C that it scales, and no product was written to this one. Call the plan "
                "with beta=0 first, or pass out=plan.out if you have filled it"
            )
        for bound in reversed(self._bound):
            if bound.fits(*matrices):
                if bound is not self._bound[-1]:
                    self._bound = [*[each for each in self._bound if each is not bound], bound]
                break
        else:
            bound = self._bind(*matrices)
        if not matrices[2].writable:
            check_out("MatmulPlan", matrices[2])
        bound.run.scale(alpha, beta)
        return bound, matrices[2]

    def _bind(self, a: DistMatrix, b: DistMatrix, out: DistMatrix) -> _Bound:
        """Bind the product to the memory of these matrices, of checked forms. Drop the sets of matrices whose memory is
        no longer theirs, and the least recently used ones."""
        check_out("MatmulPlan", out, a, b)
        run = ProductRun(self._product, a._alias, b._alias, out._alias)
        run.bind(self._work)
        with PlanResources() as requests:
            run.persist(self._number, requests)
            bound = _Bound(run, (a, b, out), partial(_forget, ref(self)))
            self._grid.engine.hold(bound, requests.pop_all())
        self._bound = [*[each for each in self._bound if each.is_current], bound][-BOUND:]
        return bound

    def _waited(self, finish: Callable[[], DistMatrix]) -> DistMatrix:
        with self._grid.engine.guard:
            return finish()

    def _finish(self, bound: _Bound, out: DistMatrix) -> DistMatrix:
        bound.run.finish()
        out.fills += 1
        self._held.under_way, self._pending = False, None
        return out

    @property
    def out(self) -> DistMatrix:
        """C of calls that pass no `out`."""
        return self._matrices[2]

    def close(self) -> None:
        """Wait for the product in progress, and free requests and work memory. The wait is collective.

        C remains valid. Closing a plan twice has no effect. After a failed call, messages may still arrive, so the
        work memory is kept until the grid is closed.
        """
        engine = self._grid.engine
        if self.closed or engine.guard.closed:
            return
        if self._pending is not None:
            self._pending.wait()
        self.closed, self._bound = True, []
        engine.dropped.append(self._held)
        engine.free_dropped()

    def __enter__(self) -> MatmulPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held.under_way or leaves_in_order(error):  # otherwise the grid's block closes it
            self.close()


class _Bound:
    """A product that is bound to the memory of A, B and C, with its persistent requests. It does not keep the matrices
    alive.

    forget   called with the bound product when the first of the matrices is garbage-collected
    """

    def __init__(self, run: ProductRun[DistMatrix], matrices: Sequence[DistMatrix], forget: Callable[[_Bound], object]):
        self.run = run
        gone = partial(_gone, ref(self), forget)
        bases = [matrix.base for matrix in matrices]  # for a view, the matrix whose shard it reads
        self._memory = [(ref(base, gone), base.memory, _place_of(base)) for base in bases]

    def fits(self, *matrices: StoredMatrix) -> bool:
        """Whether these are the matrices, with the memory that they had. A caller can replace it by
        `matrix.local = array`, or in torch by `matrix.local.data = tensor`."""
        for matrix, (known, array, place) in zip(matrices, self._memory):
            base = matrix.base
            if known() is not base or base._memory is not array or (place and place != _place_of(base)):
                return False
        return True

    @property
    def is_current(self) -> bool:
        """Whether the matrices are alive and have the memory that they had."""
        bases = [base for known, _, _ in self._memory if (base := known()) is not None]
        return len(bases) == len(self._memory) and self.fits(*bases)


def _place_of(base: StoredMatrix) -> tuple[Any, ...]:
    """Address of a shard. Empty for numpy, which never moves an array, and whose address takes 1 us to get."""
    return () if base.library.name == "numpy" else base._place_of(base.memory)


def _gone(bound: ref[_Bound], forget: Callable[[_Bound], object], _: object) -> None:
    if (known := bound()) is not None:
        forget(known)


def _forget(plan: ref[MatmulPlan], bound: _Bound) -> None:
    """Drop a bound product of a plan. The list is replaced, because garbage may be collected while it is read."""
    if (known := plan()) is not None:
        known._bound = [each for each in known._bound if each is not bound]
