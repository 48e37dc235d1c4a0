"""Who may use a grid: nobody once it is closed, and one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

from ..errors import GridError

Operation = TypeVar("Operation", bound=Callable[..., Any])


class Guard:
    """As a context: this thread uses the grid. May be entered again inside.

    closed   whether the grid is

    Raises GridError at once, before MPI is called, if the grid is closed or another thread is inside. Messages of two
    threads on the same communicators would meet each other's, and wait for ever.
    """

    def __init__(self) -> None:
        self.closed = False
        self._inside = threading.RLock()
        self._user = ""

    def check_open(self) -> None:
        if self.closed:
            raise GridError("this grid is closed. What uses it belongs inside its with block, or before close(); what "
                            "is to be kept is gathered, or redistributed to another Grid, before")

    def __enter__(self) -> None:
        self.check_open()
        here = threading.current_thread().name
        if not self._inside.acquire(blocking=False):
            raise GridError(f"thread {here} uses this grid while thread {self._user} does. One thread at a time uses a "
                            "grid: let them take turns, or give each thread a Grid over a communicator of its own")
        self._user = here

    def __exit__(self, *_: object) -> None:
        self._inside.release()


def one_thread(operation: Operation) -> Operation:
    """Decorator: until the operation ends its thread is alone on the grid of its operands."""

    @wraps(operation)
    def alone(*operands: Any, **options: Any) -> Any:
        grids = (given.grid for given in (*operands, *options.values()) if hasattr(given, "grid"))
        grid = next(grids, None)
        with nullcontext() if grid is None else grid.engine.guard:
            return operation(*operands, **options)

    return alone  # type: ignore[return-value]
