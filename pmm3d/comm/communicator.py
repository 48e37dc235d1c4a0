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
from .hang import Process, this_process
from .ledger import Ledger
from .watch import POLL_SECONDS, Watch

HOST_BYTES = 256
"""Of a host's name in the message that tells of it; a name of DNS has 253 at most."""
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
    """A communicator whose blocking calls for objects are known to the watchdog while they last.

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
               made: ExitStack) -> tuple[WatchedComm, MPI.Intracomm, list[Process], bool]:
    """(WatchedComm, a communicator for the watchdog, the Process of each rank, whether any asked for debug).

    made   frees them at its end

    Collective. Ranks that never come are named once the time is up.
    """
    watch = Watch(parent, timeout, False, None)
    comm = WatchedComm(_duplicate(parent, watch, 1))
    made.callback(comm.Free)
    other = _duplicate(comm, watch, 2)
    made.callback(other.Free)
    mine = np.zeros(HOST_BYTES + 24, np.uint8)
    here = this_process(MPI.Get_processor_name())
    host = here.host.encode()[:HOST_BYTES]
    mine[: len(host)] = np.frombuffer(host, np.uint8)
    mine[HOST_BYTES:].view(np.int64)[:] = here.pid, here.namespace, debug
    everyones = np.empty((comm.size, len(mine)), np.uint8)
    _wait(comm.Iallgather(mine, everyones), watch, MAKING, parent.size, 3)
    numbers = np.ascontiguousarray(everyones[:, HOST_BYTES:]).view(np.int64)
    names = [row[:HOST_BYTES].tobytes().rstrip(b"\0").decode(errors="replace") for row in everyones]
    processes = [Process(name, pid, namespace) for name, (pid, namespace, _) in zip(names, numbers.tolist())]
    return comm, other, processes, bool(numbers[:, 2].any())


def all_leave(comm: MPI.Intracomm, timeout: float) -> None:
    """Wait until all ranks are here; those that do not come are named once the time is up."""
    _wait(comm.Ibarrier(), Watch(comm, timeout, False, None), "leaving", comm.size, 1)


def _duplicate(parent: MPI.Intracomm, watch: Watch, number: int) -> MPI.Intracomm:
    comm, request = parent.Idup()
    _wait(request, watch, MAKING, parent.size, number)
    return comm


def _wait(request: MPI.Request, watch: Watch, what: str, size: int, number: int) -> None:
    begun = time.perf_counter()
    record = Ledger().begin("all", what, number, tuple(range(size)))
    watch.begun["all"] = number, record.name
    while not request.Test():
        if time.perf_counter() - begun < POLL_SECONDS:
            os.sched_yield()
            continue
        watch.waits(record, begun)
        time.sleep(1e-3)
    watch.done()
