"""What checks stand on: the ranks and their hosts, waiting with a time limit, answers to rank 0, child processes.
Nothing here hangs, but for making communicators."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from .finding import ranks_by

PATIENCE = 5.0
"""Seconds that a rank waits for another one in the middle of a check."""
SPIN_SECONDS, DOZE_SECONDS = 20e-6, 1e-3
"""A wait tests without a pause at first, since latencies are measured; then it lets other ranks have the core."""
MESSAGE, ANSWER = 1, 2
"""Tags: of what checks send each other, and of what they tell rank 0."""


class NoAnswer(Exception):
    """Other ranks did not come, or a message did not arrive."""


class Answer(NamedTuple):
    """What a rank says to a check: its facts, or the error that it met; waited: in waiting for another rank."""

    facts: Any = None
    error: str = ""
    waited: bool = False


class Session:
    """One examination, on one rank. Making it is collective.

    comm            for the check under way alone, so that what an earlier one left behind is not taken for its messages
    hosts           the name of each rank's node
    first_ranks     the first rank of each host
    name            of this examination, like no other's
    folder, grid    what the user asked for
    started         seconds that this process took to get here
    """

    def __init__(self, comm: MPI.Intracomm, checks: int, folder: Path = Path("."), grid: str = "auto",
                 started: float = 0.0):
        self.folder, self.grid, self.started = folder, grid, started
        self.rank, self.size = comm.rank, comm.size
        self._comms = [comm.Dup() for _ in range(checks)]
        self.comm = self._comms[0]
        self._sent: list[MPI.Request] = []
        self._stranded: list[MPI.Request] = []
        self.hosts: list[str] = comm.allgather(socket.gethostname())
        self.name: str = comm.bcast(f"{socket.gethostname()}-{os.getpid()}")

    def begin(self, number: int) -> None:
        """The check of that number starts on this rank."""
        self.comm = self._comms[number]

    @property
    def first_ranks(self) -> list[int]:
        return [ranks[0] for ranks in ranks_by(self.hosts).values()]

    @property
    def is_first_here(self) -> bool:
        return self.rank in self.first_ranks

    def wait(self, request: MPI.Request, seconds: float = PATIENCE, doze: bool = False) -> None:
        """Complete a nonblocking operation. doze: sleep between looks, to leave the core to others.

        Raises NoAnswer if that takes longer. The buffers are kept then, since MPI may still write to them.
        """
        begun = time.perf_counter()
        while not request.Test():
            elapsed = time.perf_counter() - begun
            if elapsed > seconds:
                self._stranded.append(request)
                here = f"rank {self.rank} on {self.hosts[self.rank]}"
                raise NoAnswer(f"{here} waited {seconds:g} s for another rank in vain")
            if doze:
                time.sleep(DOZE_SECONDS)
            elif elapsed > SPIN_SECONDS:
                os.sched_yield()

    def barrier(self, seconds: float = PATIENCE, doze: bool = False) -> None:
        self.wait(self.comm.Ibarrier(), seconds, doze)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, on every rank."""
        mine, largest = np.array([value], np.float64), np.empty(1)
        self.wait(self.comm.Iallreduce(mine, largest, MPI.MAX))
        return float(largest[0])

    def send(self, answer: Answer) -> None:
        """Tell rank 0 what this rank says to the check under way."""
        self._sent.append(self.comm.isend(answer, 0, ANSWER))

    def receive(self, seconds: float) -> dict[int, Answer]:
        """The ranks' answers; those of ranks that gave none within the time are missing. Rank 0 only."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Answer] = {}
        status = MPI.Status()
        while len(answers) < self.size:
            message = self.comm.improbe(MPI.ANY_SOURCE, ANSWER, status)
            if message is not None:
                answers[status.Get_source()] = message.recv()
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(DOZE_SECONDS / 10)
        return answers

    def close(self) -> None:
        """Free the communicators; collective. Those with messages under way stay until the end of the program."""
        MPI.Request.waitall(self._sent)
        if not self._stranded:
            for comm in self._comms:
                comm.Free()


def child_says(seconds: float, *arguments: str) -> str:
    """The last line that Python prints when started with these arguments, or the last one of why it failed."""
    try:
        child = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=seconds,
                               stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines()
    return lines[-1] if lines else f"ended with code {child.returncode}"
