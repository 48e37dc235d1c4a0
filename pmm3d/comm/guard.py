"""Guard of a grid against use after close, and against use by several threads at once. Finalizers that do nothing in a
forked child, which has a copy of each object and of the state of MPI."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from mpi4py import MPI

from ..errors import GridError

Operation = TypeVar("Operation", bound=Callable[..., Any])


class Guard:
    """Reentrant context manager: inside, only this thread may use the grid.

    closed   whether the grid is closed, or was made by another process, of which this one is a forked child. A call of
             MPI in the child would receive messages of that process

    Entering raises GridError, before any call of MPI, if the grid is closed, if MPI is finalized, or if another thread
    is inside. On the same communicators, a thread could receive messages of another thread and then wait forever.
    """

    def __init__(self) -> None:
        self._closed, self._process = False, os.getpid()
        self._inside = threading.RLock()
        self._user = 0

    @property
    def closed(self) -> bool:
        return self._closed or os.getpid() != self._process

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value

    def check_open(self) -> None:
        """Raise GridError if the grid is closed, or MPI is finalized."""
        if self._closed:
            raise GridError(
                "this grid is closed: use it before close() (pmm3d_free), or inside its with block. To keep a "
                "matrix, gather it, or redistribute it to another grid, before the grid is closed"
            )
        if self.closed:
            raise GridError(
                "this grid was made by another process, of which this one is a forked child. Use the grid "
                "in that process only, and pass arrays to the child"
            )
        if MPI.Is_finalized():
            raise GridError("MPI is already finalized: close a Grid and the objects that use it before MPI.Finalize()")

    def __enter__(self) -> None:
        if self._closed or os.getpid() != self._process or MPI.Is_finalized():
            self.check_open()
        if not self._inside.acquire(blocking=False):
            here, names = threading.current_thread().name, {each.ident: each.name for each in threading.enumerate()}
            user = names.get(self._user, str(self._user))
            raise GridError(
                f"thread {here} uses this grid while thread {user} does. One thread at a time uses a "
                "grid: let them take turns, or give each thread a Grid over a communicator of its own"
            )
        self._user = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._inside.release()


def at_end(owner: object, release: Callable[..., object], *arguments: Any) -> weakref.finalize[..., object]:
    """Call release(*arguments) when the owner is garbage-collected, or at exit, unless this is a forked child then."""
    return weakref.finalize(owner, _in_process, os.getpid(), release, arguments)


def _in_process(process: int, release: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        release(*arguments)


def one_thread(operation: Operation) -> Operation:
    """Decorator: guard the grid of the first operand during an operation. Operands without a grid have no guard."""

    @wraps(operation)
    def alone(*operands: Any, **options: Any) -> Any:
        grid = getattr(operands[0] if operands else next(iter(options.values()), None), "grid", None)
        if grid is None:
            return operation(*operands, **options)
        with grid.engine.guard:
            return operation(*operands, **options)

    return alone  # type: ignore[return-value]
