"""What becomes of the job when a rank raises, drops its grid, or leaves the program: nobody waits for ever."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from mpi4py import MPI

from ..errors import GridError
from .axis import Axis
from .engine import Engine, Pending, Posted
from .stacks import line_of
from .uncaught import ARRIVAL_SECONDS, INTERRUPTED, come
from .watch import Watch, abort_job

AGREED_SECONDS = 10.0
"""Where all ranks are known to have raised the error, they may be slow to come: one that caught it is a mistake."""


def all_come(comm: MPI.Intracomm, seconds: float = ARRIVAL_SECONDS) -> bool:
    """Whether all ranks come here within a few seconds."""
    try:
        return come(comm.Ibarrier(), seconds)
    except MPI.Exception:
        return False


def leaves_in_order(error: BaseException | None) -> bool:
    """Whether a block ends as planned: without an error, or because its generator was closed or its task cancelled."""
    asyncio = sys.modules.get("asyncio.exceptions")  # a program without asyncio need not load it
    return error is None or isinstance(error, (GeneratorExit, *([asyncio.CancelledError] if asyncio else [])))


def raised(comm: MPI.Intracomm, watch: Watch, error: BaseException) -> None:
    """The `with` of a grid ends with an error: unless all ranks end theirs so, the job ends, with this traceback, or
    with one line after Ctrl-C."""
    watch.ending = f"{type(error).__name__}: {error}"
    seconds = AGREED_SECONDS if getattr(error, "everywhere", False) else ARRIVAL_SECONDS
    if comm.size > 1 and not all_come(comm, seconds):
        _end_with(error, comm, f"pmm3d: rank {comm.rank} raised; ending the job.\n"
                               + "".join(traceback.format_exception(error)))
    watch.ending = ""


def _end_with(error: BaseException, comm: MPI.Intracomm, text: str) -> None:
    if isinstance(error, KeyboardInterrupt):
        abort_job(comm, f"pmm3d: rank {comm.rank} was interrupted (Ctrl-C) at {line_of(error)}; ending the job.",
                  INTERRUPTED)
    abort_job(comm, text, 1)


def dropped(comm: MPI.Intracomm, watch: Watch) -> None:
    """A grid is gone, or the program ends, without close(): an error that not all ranks end with ends the job."""
    if MPI.Is_finalized():  # by the program, while the grid was open
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    ends = not threading.main_thread().is_alive()
    if comm.size > 1 and ends and error is not None:
        watch.ending = f"{type(error).__name__}: {error}"
        if not all_come(comm):
            _end_with(error, comm, f"pmm3d: rank {comm.rank} left the program with {watch.ending}; ending the job.")
    watch.leave("its program has ended" if ends else "it has dropped the grid")


def complete(engine: Engine, axes: Sequence[Axis], waiting: Callable[[str], AbstractContextManager[None]],
             comm: MPI.Intracomm) -> None:
    """Wait for what is under way. Collective. axes: the first is that of all ranks; waiting: in it MPI is called, and
    blocks. Raises GridError, which all ranks must be told, if members of an axis never began it."""
    everyone = axes[0]
    waited: list[Pending | Posted] = [*engine.under_way(), *engine.posted]
    counts = [axis.even() for axis in axes]
    uneven = [axis.name for axis, even in zip(axes, counts) if not even.wait()]
    failed = [pending.record.key.axis for pending in engine.abandoned]
    kept = [axis.name in [*uneven, *failed] or axis.kept for axis in axes]
    with waiting("count of calls"):
        figures = np.array([everyone.number, *kept], np.int64)
        comm.Allreduce(MPI.IN_PLACE, figures, MPI.MAX)
    everyone.count_on_from(int(figures[0]))
    for axis, somewhere in zip(axes, figures[1:]):
        axis.keep(bool(somewhere))
    if uneven:
        records = [each.record for each in waited]
        names = ", ".join(str(record) for record in records if record is not None and record.key.axis in uneven)
        raise GridError(f"not all members of axis {', '.join(uneven)} have begun the same number of collectives; "
                        f"under way here: {names or 'none'}. Every member must make the call")
    for each in waited:
        if each.record is not None:
            each.wait()


def stopped(engine: Engine) -> None:
    """Nothing goes on. Arrays and buffers of collectives that some members never began, or that failed, live to the end
    of the program: MPI may still read or write them."""
    engine.close()
    if unfinished := [*engine.under_way(), *engine.abandoned, *engine.posted]:
        weakref.finalize(MPI, unfinished.clear).atexit = False
