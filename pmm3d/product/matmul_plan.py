"""A product that is repeated: checked and planned once, then only carried out, at once or begun and waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from ..comm import leaves_in_order
from ..errors import GridError, LayoutError
from .checks import Options, grid_of, signature_of
from .multiply import Matrix, ProductRun
from .stored import StoredMatrix

Result = TypeVar("Result")


class Coming(Protocol):
    def test(self) -> bool: ...

    def wait(self) -> object: ...


class PendingProduct(Generic[Result]):
    """What a plan's `start` returns. done: whether `wait` has ended."""

    def __init__(self, coming: Sequence[Coming], finish: Callable[[], Result]):
        self._coming, self._finish, self.done = coming, finish, False
        self._result: Result | None = None
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Make progress with the operands. True once the result is there, which comes by `wait` alone: GEMMs run in the
        thread that waits."""
        for pending in self._coming:
            pending.test()
        return self.done

    def wait(self) -> Result | None:
        """Multiply, add up, and return the result, C of a MatmulPlan. Collective; a second time only the latter, or the
        error again."""
        if not self.done:
            self.done = True
            try:
                for pending in self._coming:
                    pending.wait()
                self._result = self._finish()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result


class MatmulPlan(Generic[Matrix]):
    """Repeated product C = alpha A B + beta C of the same matrices, checked and planned once.

    Arguments, messages, result, bits and errors are those of `matmul`. Making a plan and calling it are collective.
    The plan holds buffers until it is closed, or its grid is. If no operand is redistributed, the plan holds persistent
    requests of MPI too. A call compares nothing among the ranks: all ranks must make it.

    A call multiplies the elements that A, B and C hold at that time. They may be changed in place, the shard may be
    replaced (`a.local = array`), and so may torch's storage of the shard (`a.local.data = tensor`). The new shard has
    the same shape and type. If an operand is a view (`a.T`), this holds for the matrix of which it is a view.

    out   C, the same at every call; made by the plan if left out

    Raises, besides what `matmul` does, LayoutError for an operand of partial sums. A call raises LayoutError, on that
    rank alone, if the new shard has another shape or type.

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

    def __init__(self, a: Matrix, b: Matrix, *, alpha: complex = 1, beta: complex = 0, out: Matrix | None = None,
                 panels: int | None = None, max_workspace: int | None = None, tf32: bool = False,
                 overlap: str | None = None, order: str | None = None):
        self._grid = grid_of(a, b)
        options = Options(alpha, beta, panels, max_workspace, tf32, overlap, order)
        passed = signature_of(a), signature_of(b), signature_of(out), *options
        with ExitStack() as held, self._grid.engine.guard:
            with self._grid.collective_call("MatmulPlan", *passed):
                _check_not_partial(a, b)
                self._product = ProductRun(a, b, out, options, held)
            self._product.share()
            with self._grid.collective_call("MatmulPlan", self._product.persists):
                self._number, self._requests = self._grid.everyone.number, held.enter_context(ExitStack())
                self._product.persist(self._number, self._requests)
            self._held = held.pop_all()
        self.closed = self._under_way = False
        self._pending: PendingProduct[Matrix] | None = None

    def __call__(self) -> Matrix:
        """The product, in `out`. Raises GridError once the plan or its grid is closed, and in a second thread."""
        with self._grid.engine.guard:
            self._begin()
            return self._finish()

    def start(self) -> PendingProduct[Matrix]:
        """Begin the product. `wait()` of the object that is returned multiplies, and returns C. Until then A, B and C
        must not change. Operands that fit no role are redistributed first. Then A and B, or their first panels, are
        sent. If persistent requests are used, only the first round of a gather in several rounds (above 16 ranks, or by
        nodes) runs before `wait`. Collective, and so is the wait. Raises as a call does, and GridError if the last
        product was not waited for.
        """
        with self._grid.engine.guard:
            self._begin()
            self._pending = PendingProduct((), self._waited)
        return self._pending

    def _begin(self) -> None:
        if self.closed:
            raise GridError("this plan is closed: make another one, or use matmul")
        if self._under_way:
            raise GridError("this plan has a product under way: wait for that first, or make another plan")
        if not self._product.is_bound:
            self._product.bind()
            self._requests.close()
            self._product.persist(self._number, self._requests)
        self._under_way = True
        self._product.begin()

    def _waited(self) -> Matrix:
        with self._grid.engine.guard:
            return self._finish()

    def _finish(self) -> Matrix:
        result = self._product.finish()
        self._under_way = False
        return result

    @property
    def out(self) -> Matrix:
        """C."""
        return self._product.out

    def close(self) -> None:
        """Wait for the product that is under way, which is collective, and free requests and work memory. The result
        stays. Closing a plan twice does nothing. After a call that failed, messages may still arrive: the work memory
        is then kept until the program ends."""
        if self._under_way and self._pending is not None:
            self._pending.wait()
        if not self.closed:
            self.closed = True
            self._requests.close()
            if not self._under_way:
                self._held.close()

    def __enter__(self) -> MatmulPlan[Matrix]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not self._under_way or leaves_in_order(error):  # else the end of the grid's block closes it
            self.close()


def _check_not_partial(*operands: StoredMatrix) -> None:
    """Raises LayoutError for partial sums: a plan would multiply their sum as it was when the plan was made."""
    for name, matrix in zip("ab", operands):
        if isinstance(matrix, StoredMatrix) and matrix.layout.on(matrix.grid.shape).sums:
            raise LayoutError(f"MatmulPlan: {name} is of partial sums, {matrix.layout}. Pass their sum, "
                              f"{name}.redistribute({name}.layout.summed), or use matmul in each call")
