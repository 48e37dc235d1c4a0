"""The communicators of a grid: made, and used for blocking calls, so that the watchdog knows who waits where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import GridError, LauncherError
from ..model.environment import tasks_in_environment
from .ledger import Ledger
from .processes import ROW, Processes, first_of_each, row
from .stacks import this_process
from .watch import POLL_SECONDS, Watch

MAKING = "making a Grid"


class OwnedComm(MPI.Intracomm):
    """A communicator of a grid.

    kept   Free does nothing: messages are on their way that nobody receives, and MPI would give its number, and with
           it these messages, to another communicator
    """

    kept = False

    def Free(self) -> None:
        if not self.kept:
            super().Free()


class WatchedComm(OwnedComm):
    """A communicator whose blocking calls are known to the watchdog while they last: these, no others.

    waiting   a function from the call's name to the context in which it is made
    """

    waiting: Callable[[str], AbstractContextManager[Any]] = staticmethod(nullcontext)  # type: ignore[assignment]

    def Barrier(self) -> None:
        with self.waiting("Barrier"):
            super().Barrier()

    def allgather(self, sendobj: Any) -> list[Any]:
        with self.waiting("allgather"):
            return super().allgather(sendobj)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        with self.waiting("gather"):
            return super().gather(sendobj, root)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, on every rank."""
        mine, found = np.array([value], np.float64), np.empty(1, np.float64)
        with self.waiting("largest"):
            self.Allreduce(mine, found, MPI.MAX)
        return float(found[0])

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self.waiting("bcast"):
            return super().bcast(obj, root)


def check_communicator(comm: MPI.Intracomm) -> None:
    """Raises GridError if it is none that this process belongs to, LauncherError under the launcher of another MPI."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        given = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else f"a {type(comm).__name__}"
        raise GridError(f"comm is an intracommunicator of mpi4py that this process belongs to; got {given}")
    _check_launcher(comm)


def _check_launcher(comm: MPI.Intracomm) -> None:
    tasks, variable = tasks_in_environment(os.environ) or (1, "")
    if tasks > 1 and comm.size == MPI.COMM_WORLD.size == 1:
        from .hosts import mpi_name

        raise LauncherError(f"the launcher started {tasks} tasks ({variable}={tasks}) but MPI sees a world of 1 rank: "
                            f"it belongs to another MPI than mpi4py's ({mpi_name()}). Use the mpiexec beside this "
                            "Python (python -m pmm3d.launcher), or srun --mpi= with the plugin of this MPI")


def duplicates(parent: MPI.Intracomm, timeout: float, debug: bool,
               made: ExitStack) -> tuple[WatchedComm, MPI.Intracomm, Processes, bool]:
    """(WatchedComm, a communicator for the watchdog, the Process of each rank, whether any asked for debug).

    made   frees them at its end

    Collective: each rank tells 24 bytes of itself, and the first of each host its name. Ranks that never come are named
    once the time is up.
    """
    watch = Watch(parent, timeout, False, None)
    comm = WatchedComm(_duplicate(parent, watch, 1))
    made.callback(comm.Free)
    other = _duplicate(comm, watch, 2)
    made.callback(other.Free)
    here = this_process(MPI.Get_processor_name())
    mine, rows = row(here, debug), np.empty(comm.size, ROW)
    _wait(comm.Iallgather(mine.view(np.uint8), rows.view(np.uint8)), watch, MAKING, parent.size, 3)
    firsts = first_of_each(rows["host"])
    lengths = np.zeros(comm.size, np.int32)
    lengths[firsts] = rows["name_bytes"][firsts]
    own, text = here.host.encode()[: lengths[comm.rank]], np.empty(lengths.sum(), np.uint8)
    _wait(comm.Iallgatherv([own, MPI.BYTE], [text, lengths, MPI.BYTE]), watch, MAKING, parent.size, 4)
    names = [part.tobytes().decode() for part in np.split(text, np.cumsum(lengths[firsts])[:-1])]
    return comm, other, Processes(rows, names), bool(rows["debug"].any())


def all_leave(comm: MPI.Intracomm, timeout: float) -> None:
    """Wait until all ranks are here; those that do not come are named once the time is up."""
    _wait(comm.Ibarrier(), Watch(comm, timeout, False, None), "leaving", comm.size, 1)


def _duplicate(parent: MPI.Intracomm, watch: Watch, number: int) -> MPI.Intracomm:
    comm, request = parent.Idup()
    _wait(request, watch, MAKING, parent.size, number)
    return comm


def _wait(request: MPI.Request, watch: Watch, what: str, size: int, number: int) -> None:
    begun = time.perf_counter()
    record = Ledger().begin("all", what, number, range(size))
    watch.begun["all"] = record
    while not request.Test():
        if time.perf_counter() - begun < POLL_SECONDS:
            os.sched_yield()
            continue
        watch.waits(record, begun)
        time.sleep(1e-3)
    watch.done()
