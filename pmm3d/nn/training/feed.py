"""Batches for the loop: there on every rank before any rank takes its part; signals are heard on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .agreed import Agreed, step_agreement
from .observer import Observer
from .passes import Batch
from .run import Run

if TYPE_CHECKING:
    from ...io import Loader


class Feed:
    """Between two batches all ranks agree, by one all-reduce: whether the next one was read, what signals came, whether
    to look at the pace. Its methods are called by all ranks, but for `wanted` collective. What went wrong
    is kept for each loader: a validation may come between a batch that could not be read and the step that takes it."""

    def __init__(self, run: Run, observer: Observer):
        self._run, self._observer = run, observer
        self._request = 0
        self._failed: dict[Loader, Exception | None] = {}

    def agreed(self, loader: Loader, loss: float = 0.0, square: float = 0.0) -> Agreed:
        """At the end of a step, or before a batch. loss, square: this rank's parts of the loss and of the square of the
        gradient's norm."""
        problem = loader.fetch()
        agreed = step_agreement(self._run.grid, loss, square, request=self._run.signals.taken(),
                                look=self._observer.pace.due(), failed=problem is not None)
        self._request = max(self._request, agreed.request)
        self._failed.pop(loader, None)
        if agreed.failed:
            self._failed[loader] = problem
        if agreed.look:
            self._observer.pace.look()
        return agreed

    def ask(self, loader: Loader) -> int:
        """What any rank wants, before a batch that follows no step."""
        self.agreed(loader)
        return self.wanted()

    def wanted(self) -> int:
        """The most urgent signal that any rank has had since the last time."""
        request, self._request = self._request, 0
        return request

    def take(self, loader: Loader) -> Batch:
        """The batch that was agreed on; raises, on every rank, what went wrong on any."""
        if loader in self._failed:
            with self._run.grid.collective_call("Loader", always=True):
                if (problem := self._failed.pop(loader)) is not None:
                    raise problem
        return loader.take()

    def begin_epoch(self, loader: Loader) -> None:
        """After the last batch of an epoch: on to the next one, if there is one to come."""
        loader.next_epoch()
        if not self._run.done:
            self._request = self.ask(loader)
