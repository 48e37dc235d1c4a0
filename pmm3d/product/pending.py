"""A product that was begun: its operands are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Coming(Protocol):
    def test(self) -> bool: ...

    def wait(self) -> object: ...


class PendingProduct(Generic[Result]):
    """What a plan's `start` returns. done: whether `wait` has ended."""

    def __init__(self, coming: Sequence[Coming], finish: Callable[[], Result]):
        self._coming, self._finish, self.done = coming, finish, False
        self._result: Result | None = None

    def test(self) -> bool:
        """Make progress with the operands. True once the result is there, which comes by `wait` alone: GEMMs run in the
        thread that waits."""
        for pending in self._coming:
            pending.test()
        return self.done

    def wait(self) -> Result | None:
        """Multiply, add up, and return the result, C of a MatmulPlan. Collective; a second time only the latter."""
        if not self.done:
            for pending in self._coming:
                pending.wait()
            self._result, self.done = self._finish(), True
        return self._result
