"""What the commands do with their ranks: start MPI, but do not wait for ever, let rank 0 speak, fail together."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from ..errors import Pmm3dError
from ..model.environment import Settings

if TYPE_CHECKING:
    from mpi4py import MPI
    from rich.console import Console

Answer = TypeVar("Answer")


@contextmanager
def all_ranks() -> Iterator[MPI.Intracomm]:
    """As a context: MPI's ranks, which end with one message and 2 if they all raise an error or one of them does.

    What no rank could foresee is raised, with its traceback.
    """
    sys.stderr = sys.__stderr__
    with _no_hang():
        from mpi4py import MPI
    from ..model.notes import show_notes

    show_notes()
    try:
        yield MPI.COMM_WORLD
    except Exception as error:
        if not isinstance(error, Pmm3dError) and not getattr(error, "everywhere", False):
            raise
        _fail(MPI.COMM_WORLD, error)


def on_first(comm: MPI.Intracomm, work: Callable[[], Answer]) -> Answer:
    """What rank 0 makes of the file system, on every rank; its Pmm3dError too. One rank reads instead of thousands."""
    result: Any = None
    error: Pmm3dError | None = None
    if comm.rank == 0:
        try:
            result = work()
        except Pmm3dError as raised:
            error = raised
    with _no_hang():
        result, error = comm.bcast((result, error))
    if error is not None:
        raise error
    return result


def time_limit() -> float:
    """Seconds of PMM3D_TIMEOUT; 0 if it makes no sense, of which the grid tells."""
    with suppress(Pmm3dError):
        return Settings().timeout
    return 0.0


def check_writable(*paths: Path | None) -> None:
    """Raises Pmm3dError unless files can be written there."""
    for path in filter(None, paths):
        folder = path.resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
            raise Pmm3dError(f"cannot write {path}: {folder} is not a folder that can be written")


def console(stream: TextIO) -> Console:
    """As wide as the launcher says: ranks cannot ask, since mpiexec may give them a terminal of its own."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    size: dict[str, Any] = {"width": int(columns), "height": 50} if columns.isdecimal() else {}
    return Console(file=stream, highlight=False, **size)


@contextmanager
def _no_hang() -> Iterator[None]:
    """Before there is a grid with a watchdog: a rank that is still here after PMM3D_TIMEOUT ends, with its stack."""
    if seconds := time_limit():
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _fail(comm: MPI.Intracomm, error: Exception) -> None:
    """The same error on all ranks is said once; that of one rank alone ends the job."""
    from ..comm.ending import all_come
    from ..comm.watch import abort_job

    said = f"pmm3d: {type(error).__name__}: {error}"
    if not all_come(comm):
        abort_job(comm, f"{said} (on rank {comm.rank})", 2)
    if comm.rank == 0:
        print(said, file=sys.stderr, flush=True)
    raise typer.Exit(2) from None
