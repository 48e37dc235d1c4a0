"""The communicators of a grid: made, and used for blocking calls, so that the watchdog knows who waits where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from .ledger import Ledger
from .stacks import Process, this_process
from .watch import POLL_SECONDS, Watch

HOST_BYTES = 256
"""Of a host's name in the message that tells of it; a name of DNS has 253 at most."""
MAKING = "making a Grid"


class WatchedComm(MPI.Intracomm):
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


def duplicates(parent: MPI.Intracomm, timeout: float,
               debug: bool) -> tuple[WatchedComm, MPI.Intracomm, list[Process], bool]:
    """(WatchedComm, a communicator for the watchdog, the Process of each rank, whether any asked for debug).

    Collective. Ranks that never come are named once the time is up.
    """
    watch = Watch(parent, timeout, False, None)
    comm = _duplicate(parent, watch, 1)
    other = _duplicate(comm, watch, 2)
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
    return WatchedComm(comm), other, processes, bool(numbers[:, 2].any())


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
