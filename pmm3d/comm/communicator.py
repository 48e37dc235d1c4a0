"""Creation of a grid's communicators, and blocking calls on them that report their waits to the watchdog."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import GridError, LauncherError
from ..model.environment import tasks_in_environment
from .hang import source_line
from .ledger import Ledger
from .nodes import ROW, Processes, first_of_each, row, this_process
from .watch import POLL_SECONDS, Watch, logger

MAKING, LEAVING = "making a Grid", "leaving"


class OwnedComm(MPI.Intracomm):
    """A communicator of a grid.

    unfreeable   whether Free does nothing, because unreceived messages are in flight. After Free, MPI could reuse the
                 communicator's number, and another communicator would receive these messages
    """

    unfreeable = False

    def Free(self) -> None:
        if not self.unfreeable:
            super().Free()


class WatchedComm(OwnedComm):
    """A communicator that reports the blocking calls defined here to the watchdog.

    watched   weak reference to the function that returns the context of a call, from its name. It is a method of the
              grid, which owns this communicator
    """

    watched: Callable[[], Callable[[str], AbstractContextManager[Any]] | None] = staticmethod(lambda: None)

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Return the context of a blocking call."""
        watched = self.watched()
        return nullcontext() if watched is None else watched(what)

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
        """Return the largest of the ranks' values, on every rank. Collective."""
        mine, maximum = np.array([value], np.float64), np.empty(1, np.float64)
        with self.waiting("largest"):
            self.Allreduce(mine, maximum, MPI.MAX)
        return float(maximum[0])

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self.waiting("bcast"):
            return super().bcast(obj, root)


def check_communicator(comm: MPI.Intracomm) -> None:
    """Check a caller's communicator before the first call of MPI.

    Raises GridError if MPI is not initialized or already finalized, or if `comm` is not an intracommunicator of this
    process. Raises LauncherError under the launcher of another MPI.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "is already finalized" if MPI.Is_initialized() else "is not initialized"
        raise GridError(
            f"MPI {state}. Use a Grid after MPI.Init() and before MPI.Finalize(). Importing mpi4py.MPI "
            "calls the former, unless mpi4py.rc.initialize is False"
        )
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        given = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else f"a {type(comm).__name__}"
        raise GridError(f"comm is an intracommunicator of mpi4py that this process belongs to; got {given}")
    _check_launcher(comm)


def _check_launcher(comm: MPI.Intracomm) -> None:
    tasks, variable = tasks_in_environment(os.environ) or (1, "")
    if tasks > 1 and comm.size == MPI.COMM_WORLD.size == 1:
        from .nodes import mpi_name

        raise LauncherError(
            f"the launcher started {tasks} tasks ({variable}={tasks}) but MPI sees a world of 1 rank: "
            f"it belongs to another MPI than mpi4py's ({mpi_name()}). Use the mpiexec beside this "
            "Python (python -m pmm3d.launcher), or srun --mpi= with the plugin of this MPI"
        )


def own_duplicate(comm: MPI.Intracomm, timeout: float, what: str = MAKING) -> MPI.Intracomm:
    """Return pmm3d's duplicate of a caller's communicator. Collective.

    The first call makes the duplicate. It is stored as an MPI attribute of `comm` and freed together with `comm`.
    pmm3d calls nothing else on `comm`, because its messages and collectives could match those of the caller.

    timeout   seconds after which a warning about missing ranks is logged, again after twice the time; 0: never
    what      the operation, for the warning
    """
    duplicate: Any = comm.Get_attr(_attribute())
    if duplicate is None:
        duplicate, request = comm.Idup()
        begun, due = time.perf_counter(), timeout if comm.rank < 2 else 0.0  # ranks 0 and 1: one of them may be missing
        while not request.Test():
            waited = _pause(begun)
            if due and waited > due:
                due *= 2
                where = this_process(MPI.Get_processor_name()).described(comm.rank)
                logger.warning(
                    f"{where} has waited {waited:.0f} s in {what}, at {source_line(sys._getframe())}. The "
                    f"job goes on. Some of the {comm.size} ranks of the communicator have not come. All of "
                    "its ranks must make this call: look for a rank that is stopped, has ended, or does "
                    f"something else. The limit is {timeout:g} s: PMM3D_TIMEOUT, or timeout= of a Grid; "
                    "0 for none."
                )
        comm.Set_attr(_attribute(), duplicate)
    return duplicate


@cache
def _attribute() -> int:
    """Return the MPI key of the attribute that stores a communicator's duplicate."""

    def free(comm: MPI.Comm, key: int, duplicate: MPI.Intracomm) -> None:
        if duplicate != MPI.COMM_NULL and not MPI.Is_finalized():
            duplicate.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


def duplicates(
    own: MPI.Intracomm, timeout: float, debug: bool, made: ExitStack
) -> tuple[WatchedComm, MPI.Intracomm, Processes, bool]:
    """Return (WatchedComm, communicator for the watchdog, Processes, whether debug is on for any rank). Collective.

    own    `own_duplicate` of the caller's communicator
    made   frees the communicators at its end

    Each rank sends its ROW (24 bytes), and the first rank of each host the name of the host. After the time limit, a
    warning lists the ranks that have not come.
    """
    while (old := own.improbe(tag=Watch.TAG)) is not None:  # left over from the creation of an earlier Grid
        old.recv()
    watch = Watch(own, timeout, False, None, silence=False)
    comm = WatchedComm(_duplicate(own, watch, 1))
    made.callback(comm.Free)
    other = _duplicate(comm, watch, 2)
    made.callback(other.Free)
    here = this_process(MPI.Get_processor_name())
    mine, rows = row(here, debug), np.empty(comm.size, ROW)
    _wait(comm.Iallgather(mine.view(np.uint8), rows.view(np.uint8)), watch, MAKING, own.size, 3)
    firsts = first_of_each(rows["host"])
    lengths = np.zeros(comm.size, np.int32)
    lengths[firsts] = rows["name_bytes"][firsts]
    own_name, text = here.host.encode()[: lengths[comm.rank]], np.empty(lengths.sum(), np.uint8)
    _wait(comm.Iallgatherv([own_name, MPI.BYTE], [text, lengths, MPI.BYTE]), watch, MAKING, own.size, 4)
    names = [part.tobytes().decode() for part in np.split(text, np.cumsum(lengths[firsts])[:-1])]
    return comm, other, Processes(rows, names), bool(rows["debug"].any())


def all_leave(comm: MPI.Intracomm, timeout: float, arrival: MPI.Request | None = None) -> None:
    """Wait until all ranks call this function. After the time limit, list the missing ranks and end the job.

    comm      a communicator that only pmm3d uses
    timeout   in seconds; 0: no limit
    arrival   request of a nonblocking collective that all ranks must begin. Default: of a barrier
    """
    _wait(arrival or comm.Ibarrier(), Watch(comm, timeout, False, None), LEAVING, comm.size, 1)


def _duplicate(parent: MPI.Intracomm, watch: Watch, number: int) -> MPI.Intracomm:
    comm, request = parent.Idup()
    _wait(request, watch, MAKING, parent.size, number)
    return comm


def _wait(request: MPI.Request, watch: Watch, what: str, size: int, number: int) -> None:
    begun = time.perf_counter()
    record = Ledger().begin("all", what, number, range(size))
    watch.begun["all"] = record
    while not request.Test():
        if _pause(begun) >= POLL_SECONDS:
            watch.waits(record, begun)
    watch.done()


def _pause(begun: float) -> float:
    """Yield the core, or sleep 1 ms in a longer wait. Returns the seconds since `begun`."""
    waited = time.perf_counter() - begun
    if waited < POLL_SECONDS:
        os.sched_yield()
    else:
        time.sleep(1e-3)
    return waited
