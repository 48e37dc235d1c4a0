"""What commands share: ranks that start MPI and end together, rank 0 that reads files, commands of one process."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..errors import LauncherError, Pmm3dError
from ..model import machine
from ..model.environment import Settings, task_rank
from ..model.launch import check_launcher
from .terminal import complain, complaining, headline, let_first_rank_speak

if TYPE_CHECKING:
    from mpi4py import MPI

Answer = TypeVar("Answer")

WRONG, UNFORESEEN = 2, 1
"""Exit codes: of errors that the user can mend, which are one line; of unexpected errors, which have a traceback."""
MOST_LINES = 8
"""Of different errors on as many ranks."""


@contextmanager
def all_ranks() -> Iterator[MPI.Intracomm]:
    """As a context: MPI's ranks, which end it together. An error of any kind, on whichever ranks, is said once and ends
    the command on all of them: with 2 if it is a Pmm3dError, otherwise with 1 and a traceback."""
    sys.stderr = sys.__stderr__
    comm, ending = _started()
    error: BaseException | None = None
    try:
        yield comm
    except BaseException as raised:
        error = raised
    if code := _end_together(ending, error):
        raise typer.Exit(code) from None


def _started() -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """MPI's world, and one like it in which the ranks end. What is in the way of MPI is said by the first one alone."""
    first = task_rank(os.environ) == 0
    try:
        check_launcher()
        if (shared := machine.share_cores(os.environ)) and first:
            print(f"pmm3d: {shared}", file=sys.stderr, flush=True)
        with no_hang():
            from mpi4py import MPI

            ending = MPI.COMM_WORLD.Dup()
    except LauncherError as error:
        if first:
            complain(error)
        let_first_rank_speak()
        raise typer.Exit(WRONG) from None
    from ..model.notes import show_notes

    show_notes()
    return MPI.COMM_WORLD, ending


def one_process(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that needs no MPI and no other ranks: only rank 0 runs it, and MPI is not initialized. A
    Pmm3dError is printed in one line, and ends the command with exit code 2."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        if task_rank(os.environ):
            return
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        with complaining():
            command(*arguments, **options)

    return run


def one_of(*choices: str) -> Callable[[Any], Any]:
    """Return a callback of a typer option that refuses other values; of an option that may be given more than once,
    each of them."""

    def check(value: Any) -> Any:
        for each in [value] if isinstance(value, str) else value or ():
            if each not in choices:
                raise typer.BadParameter(f"{each!r} is none of {', '.join(choices)}")
        return value

    return check


def on_first(comm: MPI.Intracomm, work: Callable[[], Answer]) -> Answer:
    """What rank 0 makes of the file system, on every rank; its errors too. One rank reads instead of thousands."""
    result: Any = None
    error: Exception | None = None
    if comm.rank == 0:
        try:
            result = work()
        except Exception as raised:
            error = raised
    with no_hang():
        result, error = comm.bcast((result, error))
    if error is not None:
        raise error
    return result


def time_limit() -> float:
    """Seconds of PMM3D_TIMEOUT; 0 if it makes no sense, of which the grid tells."""
    with suppress(Pmm3dError):
        return Settings().timeout
    return 0.0


@contextmanager
def no_hang(seconds: float | None = None) -> Iterator[None]:
    """As a context, for calls that no watchdog sees: a process that is in it for too long prints its stack and ends.

    seconds   the limit (default: `time_limit`); 0: none
    """
    limit = time_limit() if seconds is None else seconds
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_together(comm: MPI.Intracomm, error: BaseException | None) -> int:
    """Return the exit code of all ranks. A rank with an error ends the job if the others do not come soon."""
    from mpi4py import MPI

    from ..comm import abort_job, all_come, all_leave

    code = 0 if error is None else _exit_code(error)
    mine = array("q", [comm.size if error is None else comm.rank, -code, getattr(error, "everywhere", False)])
    least = array("q", mine)
    arrival = comm.Iallreduce(mine, least, MPI.MIN)
    if error is None:
        all_leave(comm, time_limit(), arrival)
    elif not all_come(comm, arrival=arrival):
        shown = "" if code == WRONG else "".join(traceback.format_exception(error))
        abort_job(comm, f"{shown}{_in_a_line(error)} (on rank {comm.rank})", code)
    first, negative_code, everywhere = least
    if negative_code:
        with no_hang():
            _print_errors(comm, error, first, bool(everywhere))
    return -negative_code


def _print_errors(comm: MPI.Intracomm, error: BaseException | None, first: int, everywhere: bool) -> None:
    """Print each error once, on rank 0. The first rank with an unexpected error prints its traceback."""
    from ..text import ranks_in_words

    if error is not None and comm.rank == first and _exit_code(error) == UNFORESEEN:
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    line = "" if error is None else _in_a_line(error)
    lines = [line] * (comm.rank == 0) if everywhere else comm.gather(line)
    groups: dict[str, list[int]] = {}
    for rank, line in enumerate(lines or ()):
        groups.setdefault(line, []).append(rank)
    for line, ranks in [(line, ranks) for line, ranks in groups.items() if line][:MOST_LINES]:
        print(line + (f" (on {ranks_in_words(ranks)})" if len(groups) > 1 else ""), file=sys.stderr, flush=True)


def _exit_code(error: BaseException) -> int:
    return WRONG if isinstance(error, Pmm3dError) or getattr(error, "everywhere", False) else UNFORESEEN


def _in_a_line(error: BaseException) -> str:
    if _exit_code(error) == WRONG:
        return f"pmm3d: {headline(error)}"
    return f"pmm3d: an unexpected error; please report it with the output of pmm3d doctor: {headline(error)}"
