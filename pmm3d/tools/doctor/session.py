"""What checks stand on: the ranks and their hosts, waiting with a time limit, telling rank 0. Nothing here hangs, but
for making communicators."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from mpi4py import MPI

from .finding import by_host

PATIENCE = 5.0
"""Seconds that a rank waits for another one in the middle of a check."""
SPIN_SECONDS = 20e-6
DOZE_SECONDS = 1e-3


class Silence(TimeoutError):
    """Other ranks did not come, or a message did not arrive."""


class Session:
    """One examination, on one rank. Making it is collective.

    comm       for the current check alone, so that what an earlier one left behind cannot be mistaken for its messages
    hosts      the name of each rank's node
    folder, grid      what the user asked for
    started    seconds that this process took to get here
    """

    def __init__(self, comm, checks: int, folder: Path = Path("."), grid: str = "auto", started: float = 0.0):
        self.folder, self.grid, self.started = folder, grid, started
        self.rank, self.size = comm.rank, comm.size
        self._comms = [comm.Dup() for _ in range(checks)]
        self._told = comm.Dup()
        self._mail: list = []
        self._stranded: list = []
        self.hosts: list[str] = comm.allgather(socket.gethostname())
        self.comm = self._comms[0] if self._comms else comm

    def begin(self, number: int) -> None:
        """The check of that number starts on this rank."""
        self.comm = self._comms[number]

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each host."""
        return [ranks[0] for ranks in by_host(self.hosts).values()]

    @property
    def is_first_here(self) -> bool:
        return self.rank in self.first_ranks

    def wait(self, request, seconds: float = PATIENCE, doze: bool = False) -> None:
        """Complete a nonblocking operation, or raise Silence. doze: sleep between looks, to leave the core to others.

        The buffers of one that does not complete are kept, since MPI may still write to them.
        """
        begun = time.perf_counter()
        while not request.Test():
            elapsed = time.perf_counter() - begun
            if elapsed > seconds:
                self._stranded.append(request)
                raise Silence(f"rank {self.rank} on {self.host} waited {seconds:g} s for another rank in vain")
            if doze:
                time.sleep(DOZE_SECONDS)
            elif elapsed > SPIN_SECONDS:
                os.sched_yield()

    def barrier(self, seconds: float = PATIENCE, doze: bool = False) -> None:
        self.wait(self.comm.Ibarrier(), seconds, doze)

    def tell(self, number: int, what) -> None:
        """Send rank 0 what the check of that number found here, an object that can be pickled."""
        self._mail.append(self._told.isend(what, 0, number))

    def told(self, number: int, seconds: float) -> dict[int, object]:
        """What the ranks told of that check; those that did not within the time are missing. Rank 0 only."""
        deadline = time.monotonic() + seconds
        heard: dict[int, object] = {}
        status = MPI.Status()
        while len(heard) < self.size:
            message = self._told.improbe(MPI.ANY_SOURCE, number, status)
            if message is not None:
                heard[status.Get_source()] = message.recv()
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(DOZE_SECONDS / 10)
        return heard

    def broadcast_code(self, code: int | None, seconds: float) -> int:
        """The exit code that rank 0 gives, on every rank."""
        told = bytearray([code or 0])
        self.wait(self._told.Ibcast([told, MPI.BYTE]), seconds, doze=True)
        return told[0]

    def close(self) -> None:
        """Free the communicators; collective. Those with messages under way stay until the end of the program."""
        for request in self._mail:
            request.wait()
        if not self._stranded:
            for comm in (*self._comms, self._told):
                comm.Free()
