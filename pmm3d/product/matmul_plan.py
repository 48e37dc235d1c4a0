"""Public interface of the product: one product (`matmul`), and repeated products with one check and one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from ..comm import PlanResources, leaves_in_order
from ..errors import GridError, LayoutError
from .checks import Options, check_out, grid_of, signature_of
from .matrix import DistMatrix
from .multiply import ProductRun, checked, multiplied
from .stored import StoredMatrix

Result = TypeVar("Result")


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

    Raises
    ------
    LayoutError
        If the sizes do not match, or if `out` is read-only, an operand, or one of partial sums.
    GridError
        If the operands are on different grids.
    DTypeError
        For mixed types, for labels, and for `tf32` on the host or for other types.
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
    return multiplied(a, b, out, Options(alpha, beta, panels, max_workspace, tf32, overlap, order))


class Coming(Protocol):
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
        self, coming: Sequence[Coming], finish: Callable[[], Result], failed: Callable[[], None] = lambda: None
    ):
        self._coming, self._finish, self._failed, self.done = coming, finish, failed, False
        self._result: Result | None = None
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Progress the messages, and return `done`. Only `wait` multiplies."""
        for pending in self._coming:
            pending.test()
        return self.done

    def wait(self) -> Result | None:
        """Multiply, sum, and return the result: C for a MatmulPlan, None for a PgemmPlan. Collective.

        A second call returns the same result, or raises the same error.
        """
        if not self.done:
            self.done = True
            try:
                for pending in self._coming:
                    pending.wait()
                self._result = self._finish()
            except BaseException as error:
                self._error = error
                self._failed()
        if self._error is not None:
            raise self._error
        return self._result


class MatmulPlan:
    """C = alpha A B + beta C, repeated for the same matrices, checked and planned once.

    Parameters
    ----------
    a, b, alpha, beta, out, panels, max_workspace, tf32, overlap, order
        See `matmul`.

    Attributes
    ----------
    out : DistMatrix
        C, the same matrix at every call.

    Raises
    ------
    LayoutError
        For an operand of partial sums. Other errors: see `matmul`. A call raises LayoutError, on that
        rank alone, if a new shard has another shape or type, or if C is then read-only or shares memory with A or B.

    Notes
    -----
    Making a plan and calling it are collective. Messages, result and bits are those of `matmul`. A call compares
    nothing among the ranks, so all ranks must make it. A plan holds work memory, and persistent requests of MPI if no
    operand is redistributed, until it or its grid is closed, or until it is garbage-collected.

    A call multiplies the elements that A, B and C contain at that time. They may be changed in place, the shard may be
    replaced (`a.local = array`), and so may torch's storage of the shard (`a.local.data = tensor`). If an operand is a
    view (`a.T`), this holds for the matrix of which it is a view.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, MatmulPlan
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (4, 3), lambda i, j: i + j)
    ...     b = DistMatrix.from_function(grid, (3, 2), lambda i, j: i - j, layout=Layout.B)
    ...     with MatmulPlan(a, b) as product:
    ...         for _ in range(3):
    ...             c = product()
    ...     c.gather()
    array([[ 5.,  2.],
           [ 8.,  2.],
           [11.,  2.],
           [14.,  2.]])
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
    ):
        self._grid = grid_of(a, b)
        options = Options(alpha, beta, panels, max_workspace, tf32, overlap, order)
        passed = signature_of(a), signature_of(b), signature_of(out), *options
        with PlanResources() as held, self._grid.engine.guard:
            with self._grid.collective_call("MatmulPlan", *passed):
                _check_not_partial(a, b)
                self._product = ProductRun(checked(a, b, out, options), a, b, out)
                held.enter_context(self._product.borrow())
                self._product.bind()
                self._number, self._requests = self._grid.everyone._number, held.enter_context(ExitStack())
                self._product.persist(self._number, self._requests)
            self._product.share()
            self._held = held.pop_all()
            self._grid.engine.hold(self, self._held)
        self.closed = False
        self._pending: PendingProduct[DistMatrix] | None = None

    def __call__(self) -> DistMatrix:
        """Multiply, and return C. Raises GridError if the plan or its grid is closed, or in a second thread."""
        with self._grid.engine.guard:
            self._begin()
            return self._finish()

    def start(self) -> PendingProduct[DistMatrix]:
        """Begin the product: send A and B, or their first panels. Collective.

        Returns
        -------
        PendingProduct
            Its `wait()` multiplies, and returns C; it is collective too. Until then A, B and C must not change.

        Raises
        ------
        GridError
            If the plan is closed, or if the last product was not waited for.

        Notes
        -----
        Operands that fit no role are redistributed first. With persistent requests, only the first round of an
        all-gather in several rounds (above 16 ranks, or by nodes) runs before `wait`.
        """
        with self._grid.engine.guard:
            self._begin()
            self._pending = PendingProduct((), self._waited)
        return self._pending

    def _begin(self) -> None:
        if self.closed:
            raise GridError("this plan is closed: make another one, or use matmul")
        if self._held.under_way:
            raise GridError("this plan has a product under way: wait for that first, or make another plan")
        if not self._product.is_bound:
            check_out("MatmulPlan", self.out, *self._product.operands)
            self._product.bind()
            self._requests.close()
            self._product.persist(self._number, self._requests)
        self._held.under_way = True
        self._product.begin()

    def _waited(self) -> DistMatrix:
        with self._grid.engine.guard:
            return self._finish()

    def _finish(self) -> DistMatrix:
        result = self._product.finish()
        self._held.under_way, self._pending = False, None
        return result

    @property
    def out(self) -> DistMatrix:
        """C."""
        return self._product.out

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
        self.closed = True
        engine.dropped.append(self._held)
        engine.free_dropped()

    def __enter__(self) -> MatmulPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held.under_way or leaves_in_order(error):  # otherwise the grid's block closes it
            self.close()


def _check_not_partial(*operands: StoredMatrix) -> None:
    """Raise LayoutError for partial sums, because a plan would reuse their sum from the time when it was made."""
    for name, matrix in zip("ab", operands):
        if isinstance(matrix, StoredMatrix) and matrix.layout.on(matrix.grid.shape).sums:
            raise LayoutError(
                f"MatmulPlan: {name} is of partial sums, {matrix.layout}. Pass their sum, "
                f"{name}.redistribute({name}.layout.summed), or use matmul in each call"
            )
