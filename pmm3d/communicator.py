"""The communicators of a grid: made, and used for blocking calls, so that the watchdog knows who waits where."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import numpy as np
from mpi4py import MPI

from .hang import Place, place_here
from .ledger import Ledger
from .watch import POLL_SECONDS, Watch

HOST_BYTES = 256
MAKING = "making a Grid"


class WatchedComm(MPI.Intracomm):
    """A communicator whose blocking calls for objects are known to the watchdog while they last.

    waiting   a function from the call's name to the context in which it is made
    """

    waiting = staticmethod(nullcontext)

    def Barrier(self):
        with self.waiting("Barrier"):
            super().Barrier()

    def allgather(self, sendobj):
        with self.waiting("allgather"):
            return super().allgather(sendobj)

    def gather(self, sendobj, root=0):
        with self.waiting("gather"):
            return super().gather(sendobj, root)

    def bcast(self, obj, root=0):
        with self.waiting("bcast"):
            return super().bcast(obj, root)


def duplicates(parent, timeout: float, debug: bool):
    """(WatchedComm, a communicator for the watchdog, the Place of each rank, whether any asked for debug).

    Collective. Ranks that never come are named once the time is up.
    """
    watch = Watch(parent, timeout, False, None)
    comm = _made(parent, watch, 1)
    other = _made(comm, watch, 2)
    mine = np.zeros(HOST_BYTES + 24, np.uint8)
    here = place_here(MPI.Get_processor_name())
    host = here.host.encode()[:HOST_BYTES]
    mine[: len(host)] = np.frombuffer(host, np.uint8)
    mine[HOST_BYTES:].view(np.int64)[:] = here.pid, here.namespace, debug
    told = np.empty((comm.size, len(mine)), np.uint8)
    _finished(comm.Iallgather(mine, told), watch, MAKING, parent.size, 3)
    numbers = np.ascontiguousarray(told[:, HOST_BYTES:]).view(np.int64)
    names = [row[:HOST_BYTES].tobytes().rstrip(b"\0").decode(errors="replace") for row in told]
    places = [Place(name, pid, namespace) for name, (pid, namespace, _) in zip(names, numbers.tolist())]
    return WatchedComm(comm), other, places, bool(numbers[:, 2].any())


def _made(parent, watch: Watch, number: int):
    comm, request = parent.Idup()
    _finished(request, watch, MAKING, parent.size, number)
    return comm


def all_leave(comm, timeout: float) -> None:
    """Wait until all ranks are here; those that do not come are named once the time is up."""
    _finished(comm.Ibarrier(), Watch(comm, timeout, False, None), "leaving", comm.size, 1)


def _finished(request, watch: Watch, what: str, size: int, number: int) -> None:
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
