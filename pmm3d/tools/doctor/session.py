"""Communication of the checks: waits with a time limit, answers to rank 0, child processes.

Only the construction of a Session can hang, because it creates communicators.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

PATIENCE = 5.0
"""Seconds for which a rank waits for another rank inside a check."""
SPIN_SECONDS, DOZE_SECONDS = 20e-6, 1e-3
"""A wait polls without a pause for SPIN_SECONDS, because it may measure a latency. Then it yields the core."""
MESSAGE, ANSWER = 1, 2
"""Tags of messages between ranks of a check, and of answers to rank 0."""


class NoAnswer(Exception):
    """Another rank did not arrive, or a message did not."""


class Answer(NamedTuple):
    """The facts of a rank, or its error. waited: the error is that another rank did not arrive."""

    facts: Any = None
    error: str = ""
    waited: bool = False


class Session:
    """One examination, on one rank. The constructor is collective.

    checks          number of checks; each has its own communicator, so that no check receives messages of an earlier
                    check that failed
    comm            communicator of the check in progress
    hosts           host name of each rank
    is_first_here   whether this rank is the first of its host
    name            identifies the examination, for example in names of scratch folders
    folder, grid    options of the user
    loading         seconds that Python took to load the packages
    """

    def __init__(
        self, comm: MPI.Intracomm, checks: int = 1, folder: Path = Path("."), grid: str = "auto", loading: float = 0.0
    ):
        self.folder, self.grid, self.loading = folder, grid, loading
        self.rank, self.size = comm.rank, comm.size
        self.comm, *self._comms = [comm.Dup() for _ in range(checks + 1)]
        self._unfinished: list[MPI.Request] = []
        self.hosts: list[str] = comm.allgather(socket.gethostname())
        self.name: str = comm.bcast(f"{socket.gethostname()}-{os.getpid()}")

    def begin(self) -> None:
        """Start the next check on this rank."""
        self.comm = self._comms.pop(0)

    @property
    def is_first_here(self) -> bool:
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def wait(self, request: MPI.Request, seconds: float = PATIENCE, doze: bool = False) -> None:
        """Complete a nonblocking operation. doze: sleep between polls, so that other ranks can use the core.

        Raises NoAnswer after the time limit. The request keeps its buffers then, because MPI may still write to them.
        """
        begun = time.perf_counter()
        while not request.Test():
            elapsed = time.perf_counter() - begun
            if elapsed > seconds:
                self._unfinished.append(request)
                here = f"rank {self.rank} on {self.hosts[self.rank]}"
                raise NoAnswer(f"{here} waited {seconds:g} s for another rank, which did not arrive")
            if doze:
                time.sleep(DOZE_SECONDS)
            elif elapsed > SPIN_SECONDS:
                os.sched_yield()

    def barrier(self, seconds: float = PATIENCE, doze: bool = False) -> None:
        self.wait(self.comm.Ibarrier(), seconds, doze)

    def receive(self, own: Answer, seconds: float) -> dict[int, Answer]:
        """Return the answers of the ranks that arrive within the time, on rank 0."""
        deadline = time.monotonic() + seconds
        answers = {self.rank: own}
        status = MPI.Status()
        while len(answers) < self.size and time.monotonic() < deadline:
            message = self.comm.improbe(MPI.ANY_SOURCE, ANSWER, status)
            if message is not None:
                answers[status.Get_source()] = message.recv()
            else:
                time.sleep(DOZE_SECONDS / 10)
        return answers


def child_output(seconds: float, *arguments: str) -> str:
    """Run Python with these arguments. Return the last line of its stdout, or of its stderr if it failed."""
    try:
        child = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines()
    return lines[-1] if lines else f"ended with code {child.returncode}"
