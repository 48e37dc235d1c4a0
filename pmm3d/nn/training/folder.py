"""The folder of a run: it belongs to this job while the run lasts, and rank 0 writes into it for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...comm import Grid
from ...errors import Pmm3dError
from ...io.lock import RunLock


class RunFolder:
    """path: None for a run that writes nothing, for which all of this does nothing."""

    def __init__(self, grid: Grid, path: Path | None):
        self._grid, self.path = grid, path
        self._lock: RunLock | None = None

    @contextmanager
    def owning(self) -> Iterator[None]:
        """As a context, which may be entered again inside: no other job may write into the folder. Collective.

        Raises FolderInUseError, on every rank, if another job has the folder; nothing was changed there.
        """
        if self._lock is not None or self.path is None:
            yield
            return
        lock = self._lock = RunLock(self.path)
        try:
            self.on_first(lock.acquire)
            yield
        finally:
            lock.release()
            self._lock = None

    def on_first(self, body: Callable[[], None]) -> None:
        """Rank 0 does it; all ranks raise what it could not do in the folder. Collective."""
        problem: Pmm3dError | None = None
        if self._grid.rank == 0:
            try:
                body()
            except OSError as error:
                at = error.filename2 or error.filename or self.path
                problem = Pmm3dError(f"{at} cannot be written: {error.strerror}")
            except Pmm3dError as error:
                problem = error
            except Exception as error:
                problem = Pmm3dError(f"{self.path} cannot be used: {type(error).__name__}: {error}")
        problem = self._grid.comm.bcast(problem)
        with self._grid.collective_call("training", str(self.path)):
            if problem is not None:
                raise problem
