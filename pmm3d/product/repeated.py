"""A product that is repeated: checked and planned once, then only carried out, at once or begun and waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from ..comm.ending import leaves_in_order
from ..errors import GridError
from .checks import Options, grid_of, signature_of
from .multiply import Matrix, Prepared
from .orders import look_up
from .relayout import summed

Result = TypeVar("Result")


class Coming(Protocol):
    def test(self) -> bool: ...

    def wait(self) -> object: ...


class PendingProduct(Generic[Result]):
    """What a plan's `start` returns. done: whether `wait` has ended."""

    def __init__(self, coming: Sequence[Coming], finish: Callable[[], Result]):
        self._coming, self._finish, self.done = coming, finish, False
        self._result: Result | None = None
        self._error: Exception | None = None

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
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result


class MatmulPlan(Generic[Matrix]):
    """C = alpha A B + beta C of these matrices, again and again: `matmul` without what can be done once.

    Arguments, what travels, the result, its bits and the errors are those of `matmul`; collective. Arguments are
    checked and agreed on here; buffers, and where nothing is redistributed the requests of MPI, are the plan's until it
    is closed, or its grid is. A call reads what A, B and C hold then, posts, multiplies and returns C, and compares
    nothing: all ranks must make it. Changing the memory of a matrix in place is fine; a plan is bound to the matrices.

    out   C, the same at every call; made by the plan if left out

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
        self._grid, a, b = grid_of(a, b), summed(a), summed(b)
        options = Options(alpha, beta, panels, max_workspace, tf32, overlap, order)
        passed = signature_of(a), signature_of(b), signature_of(out), *options
        look_up(self._grid, "MatmulPlan", order)
        with ExitStack() as held, self._grid.engine.guard:
            with self._grid.together("MatmulPlan", *passed):
                self._product = Prepared(a, b, out, options, held)
            self._product.share()
            self._posts = self._product.can_post
            with self._grid.together("MatmulPlan", self._posts):
                self._posted = self._product.posted(held) if self._posts else None
            self._held = held.pop_all()
        self.closed = self._under_way = False
        self._pending: PendingProduct[Matrix] | None = None

    def __call__(self) -> Matrix:
        """The product, in `out`. Raises GridError once the plan or its grid is closed, and in a second thread."""
        with self._grid.engine.guard:
            self._begin()
            return self._finish()

    def start(self) -> PendingProduct[Matrix]:
        """Begin it: where a product's messages are the same each time, and nothing is redistributed, the operands are
        on their way; else nothing is, yet. `wait()` of what is returned multiplies, and gives C; until then A and B
        stay as they are. Collective, and so is the wait. Raises as a call does, and GridError where the last one was
        not waited for.
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
        if self._posted is not None:
            self._posted.begin()
        self._under_way = True

    def _waited(self) -> Matrix:
        with self._grid.engine.guard:
            return self._finish()

    def _finish(self) -> Matrix:
        self._under_way = False
        if not self._posts:
            self._product.multiply()
        elif self._posted is not None:
            self._posted.finish()
            self._product.out.fills += 1
        return self._product.out

    @property
    def out(self) -> Matrix:
        """C."""
        return self._product.out

    def close(self) -> None:
        """Give back buffers and requests, once a product that is under way is done: then collective. The result stays.
        Closing it twice is nothing."""
        if self._under_way and self._pending is not None:
            self._pending.wait()
        if not self.closed:
            self.closed = True
            self._held.close()

    def __enter__(self) -> MatmulPlan[Matrix]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not self._under_way or leaves_in_order(error):  # else the end of the grid's block closes it
            self.close()
