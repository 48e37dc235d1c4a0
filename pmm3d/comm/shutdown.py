"""The end of a grid: by `close` on all ranks, by garbage collection, or by an error. No rank waits forever.

An error that all ranks raise and none catches is printed once.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import GridError
from ..text import ranks_in_words
from .agreement import digest
from .axis import BALANCE, Axis
from .engine import Engine, Pending, PersistentRequests
from .hang import line_of
from .ledger import action_of
from .watch import Watch, abort_job

ARRIVAL_SECONDS = 3.0
"""Time limit in seconds for ranks that raise the same error. They arrive within milliseconds, but a rank that continues
to compute does not."""
AGREED_SECONDS = 10.0
"""The same for an error that all ranks are known to raise. A rank that does not arrive has caught it by mistake."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""
MARK = "raised_by_all"


def all_come(comm: MPI.Comm, seconds: float = ARRIVAL_SECONDS, arrival: MPI.Request | None = None) -> bool:
    """Return whether all ranks call this function within `seconds`. arrival: as in `all_leave`."""
    deadline = time.monotonic() + seconds
    with suppress(MPI.Exception):
        arrival = arrival or comm.Ibarrier()
        while not arrival.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True
    return False


def leaves_in_order(error: BaseException | None) -> bool:
    """Return whether a block ends regularly: without an error, or because its generator was closed or its task
    cancelled."""
    asyncio = sys.modules.get("asyncio.exceptions")  # a program without asyncio need not load it
    return error is None or isinstance(error, (GeneratorExit, *([asyncio.CancelledError] if asyncio else [])))


def raised(comm: MPI.Intracomm, watch: Watch, error: BaseException) -> None:
    """End the job if only some ranks leave the `with` of a grid with an error. Prints the traceback of this rank, or
    one line after Ctrl-C."""
    watch.ending = f"{type(error).__name__}: {error}"
    seconds = AGREED_SECONDS if getattr(error, "everywhere", False) else ARRIVAL_SECONDS
    if comm.size > 1 and not all_come(comm, seconds):
        where = f" in {action}" if (action := action_of(error)) else ""
        _end_with(
            error,
            comm,
            f"pmm3d: rank {comm.rank} raised{where}; ending the job.\n" + "".join(traceback.format_exception(error)),
        )
    watch.ending = ""


def _end_with(error: BaseException, comm: MPI.Intracomm, text: str) -> None:
    if isinstance(error, KeyboardInterrupt):
        abort_job(
            comm, f"pmm3d: rank {comm.rank} was interrupted (Ctrl-C) at {line_of(error)}; ending the job.", INTERRUPTED
        )
    abort_job(comm, text, 1)


def dropped(comm: MPI.Intracomm, watch: Watch, under_way: Sequence[Collection[object]]) -> None:
    """Handle the end of a grid or of the program without close(). If the program ends with an error on some ranks only,
    end the job.

    under_way   collections of the engine, of objects whose requests may be active
    """
    if MPI.Is_finalized():  # by the program, while the grid was open
        return
    _hold_forever([each for group in under_way for each in group])
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    ends = not threading.main_thread().is_alive()
    if comm.size > 1 and ends and error is not None:
        watch.ending = f"{type(error).__name__}: {error}"
        if not all_come(comm):
            _end_with(error, comm, f"pmm3d: rank {comm.rank} left the program with {watch.ending}; ending the job.")
    watch.leave("its program has ended" if ends else "it has dropped the grid")


def complete(
    engine: Engine,
    axes: Sequence[Axis],
    joint: Sequence[Axis],
    waiting: Callable[[str], AbstractContextManager[None]],
    comm: MPI.Intracomm,
) -> None:
    """Wait for the collectives and messages in progress. Collective.

    axes      axes of this rank; the first is the axis of all ranks
    joint     joint axes of this rank. Ranks differ in their joint axes, so one checksum covers all of them
    waiting   returns the context for a blocking call of MPI

    Raises GridError if members of an axis never began a collective, or if a point-to-point message has no partner. The
    caller must pass the error on to all ranks.
    """
    everyone, counted = axes[0], [*([axis] for axis in axes), joint]
    waited: list[Pending | PersistentRequests] = [*engine.under_way(), *engine.persistent]
    counts = [(axis.name, axis._even()) for axis in (*axes, *joint)]
    uneven = [name for name, even in counts if not even.wait()]
    failed = [pending.record.key.axis for pending in engine.abandoned]
    balances = np.array([sum(axis._balance for axis in group) % BALANCE for group in counted], np.int64)
    with waiting("count of calls"):
        comm.Allreduce(MPI.IN_PLACE, balances, MPI.SUM)
    unmatched = [axis.name for group, balance in zip(counted, balances.tolist()) if balance % BALANCE for axis in group]
    unfreeable = [
        any(axis.name in [*uneven, *failed, *unmatched] or axis._unfreeable for axis in each) for each in counted
    ]
    with waiting("count of calls"):
        figures = np.array([everyone._number, *unfreeable], np.int64)
        comm.Allreduce(MPI.IN_PLACE, figures, MPI.MAX)
    everyone._count_on_from(int(figures[0]))
    for group, somewhere in zip(counted, figures[1:].tolist()):
        for axis in group:
            axis._set_unfreeable(bool(somewhere))
    if uneven:
        records = [each.record for each in waited]
        names = ", ".join(str(record) for record in records if record is not None and record.key.axis in uneven)
        raise GridError(
            f"not all members of axis {', '.join(uneven)} have begun the same number of collectives; "
            f"under way here: {names or 'none'}. Every member must make the call"
        )
    if unmatched:
        names = ", ".join(str(each.record) for each in waited if each.record is not None and each.record.channel)
        raise GridError(
            f"messages from rank to rank on axis {', '.join(unmatched)} have no partner: each message "
            f"needs a receive with the same tag. Under way here: {names or 'none'}"
        )
    for each in waited:
        if each.record is not None:
            each.wait()


def stopped(engine: Engine) -> None:
    """Stop the engine. The arrays and buffers of unfinished and failed collectives are kept until the process ends. MPI
    may still access them, also in MPI_Finalize, which runs after the modules of Python are deleted."""
    engine.close()
    _hold_forever([*engine.under_way(), *engine.abandoned, *engine.persistent])


def _hold_forever(unfinished: list[object]) -> None:
    """Hold objects, and all that they refer to, for as long as the process lives."""
    if unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(unfinished))


def print_once(error: BaseException, comm: MPI.Intracomm, size: int, failed_here: bool) -> None:
    """Arrange that one rank prints an error that all ranks of comm raise, if none of them catches it.

    A second call for the same error has no effect. sys.excepthook is replaced while the error exists, and restored
    afterwards.

    comm          pmm3d's duplicate of the caller's communicator; used only if the program ends with the error
    size          its number of ranks
    failed_here   whether the error was caused on this rank, so that its traceback shows the cause
    """
    if size > 1 and not hasattr(error, MARK):
        setattr(error, MARK, mark := _Mark(comm, failed_here))
        if not isinstance(sys.excepthook, PrintOnce):
            sys.excepthook = PrintOnce(sys.excepthook)
        sys.excepthook.serve(mark)


class _Mark:
    """Attribute that marks an error raised by all ranks of comm. A pickled mark, as in an error sent to other ranks, is
    empty."""

    def __init__(self, comm: MPI.Comm = MPI.COMM_NULL, failed_here: bool = False):
        self.comm, self._failed_here = comm, failed_here

    def __reduce__(self) -> tuple[Any, ...]:
        return _Mark, ()

    def printing_rank(self, error: BaseException) -> int | None:
        """Return the first rank on which the error was caused. Returns None if not all ranks call this method, or if
        their errors have different texts. Collective."""
        if self.comm == MPI.COMM_NULL or MPI.Is_finalized():
            return None
        text = digest(f"{type(error).__name__}: {error}")
        preference = self.comm.rank + (0 if self._failed_here else self.comm.size)
        mine, largest = np.array([text, -text, -preference], np.int64), np.empty(3, np.int64)
        with suppress(MPI.Exception):
            arrival = self.comm.Iallreduce(mine, largest, MPI.MAX)
            if all_come(self.comm, arrival=arrival) and largest[0] == -largest[1]:
                return int(-largest[2]) % self.comm.size
        return None


class PrintOnce:
    """A sys.excepthook with which one rank prints a marked error. Errors without a mark go to the previous hook.

    The hook is installed for as long as such an error exists. That may be after the grid is closed, because an error
    leaves the `with` of a grid before it leaves the program.
    """

    def __init__(self, before: Any):
        self._before, self._served = before, 0

    def serve(self, mark: _Mark) -> None:
        """Stay installed until the mark, and with it the error, is gone."""
        self._served += 1
        weakref.finalize(mark, self._one_less).atexit = False

    def _one_less(self) -> None:
        self._served -= 1
        if not self._served and sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mark: _Mark | None = error.__dict__.pop(MARK, None)
        printing = None if mark is None else mark.printing_rank(error)
        if mark is None or printing is None:
            self._before(kind, error, trace)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if printing == mark.comm.rank:
            print(
                f"pmm3d: {ranks_in_words(range(mark.comm.size))} "
                + (
                    f"were interrupted (Ctrl-C); rank {printing} at {line_of(error)}"
                    if interrupted
                    else "end with this error:"
                ),
                file=sys.stderr,
            )
            if not interrupted or self._before is not sys.__excepthook__:
                self._before(kind, error, trace)
            sys.stderr.flush()
        all_come(mark.comm)  # a launcher kills the other ranks when the first one ends with an error
        if interrupted:
            raise SystemExit(INTERRUPTED)  # not the end by a signal, for which launchers print a long report
