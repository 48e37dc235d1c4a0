"""A job in a process group of its own: find its ranks, send signals to them, wait for its end, read its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pmm3d.tools.launcher import descendants, end_job

PATIENCE = 120.0
"""Seconds after which a job that still runs counts as a silent hang."""
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
ALONE_SECONDS = 5.0
"""A rank that is left alone for that long is not about to be ended with the others."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """The end of a job: exit code (None if the job had to be killed), seconds since the fault, output."""

    code: int | None
    seconds: float
    output: str


def command(ranks: int, program: Sequence[str | Path]) -> list[str]:
    """Command line of a Python program on some ranks; 0 ranks: without mpiexec."""
    launcher = ["-m", "pmm3d.launcher", "-n", str(ranks)] if ranks else []
    return [sys.executable, *launcher, *map(str, program)]


class Job:
    """A running command.

    log      file that receives the output
    environ  variables in addition to this process's; PYTHONPATH is extended
    folder   working folder (default: this process's)
    ranks    number of ranks, for `pids` and what uses it
    mark     file that the program creates at the moment of the fault
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
        *,
        folder: Path | None = None,
        ranks: int = 0,
        mark: Path | None = None,
    ):
        self.ranks, self.log, self.mark, self.fault_at = ranks, log, mark, 0.0
        environ = environ or {}
        paths = environ.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, paths))
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, **environ, "PYTHONPATH": path},
                preexec_fn=os.setpgrp,
            )
        self.begun = time.time()

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that exists now."""
        pids: dict[int, int] = {}
        for pid in descendants(self.process.pid):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_python = b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            rank = next((word.partition(b"=")[2] for word in variables if word.startswith(RANK_VARIABLES)), None)
            if rank is not None and is_python:
                pids.setdefault(int(rank), pid)
        return pids

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait for a condition. Return False if the job ends first, or after PATIENCE seconds."""
        while not condition():
            if self.process.poll() is not None or time.time() > self.begun + PATIENCE:
                return False
            time.sleep(0.01)
        return self.process.poll() is None

    def all_there(self) -> bool:
        return len(self.pids()) == self.ranks

    def all_catch(self, number: int) -> bool:
        """Whether every rank has a handler for this signal."""
        try:
            statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids().values()]
        except OSError:
            return False
        caught = [int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"SigCgt:\s*(\w+)", "".join(statuses))]
        return sum(caught) == self.ranks

    def until_gone(self, pids: Iterable[int]) -> None:
        """Wait until these processes have ended: they can outlive mpiexec."""
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < self.begun + PATIENCE:
            time.sleep(0.05)

    def strike(self, number: int, victim: int | str, delay: float = 0.0) -> bool:
        """Send a signal to a rank or to "mpiexec" after a delay in seconds. Return False if the victim has ended."""
        time.sleep(delay)
        pids = self.pids() | {"mpiexec": self.process.pid}
        if victim not in pids or self.process.poll() is not None:
            return False
        self.fault_at = time.time()
        os.kill(pids[victim], number)
        return True

    def only_left(self, victim: int) -> bool:
        """Wait for the end of the job. Return True, and end the job, if the victim is the only rank that is left.

        A rank that was stopped in MPI_Finalize, after the barrier in it, or later holds up no other rank: they have
        ended with success, and mpiexec waits for the victim for ever.
        """
        since = time.time()
        while self.process.poll() is None and time.time() < self.fault_at + PATIENCE:
            if list(self.pids()) != [victim]:
                since = time.time()
            elif time.time() > since + ALONE_SECONDS:
                end_job(self.process)
                return True
            time.sleep(0.05)
        return False

    def end(self, patience: float = PATIENCE) -> Ending:
        """Wait for the end of the job, and kill it after patience seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        code, now = self.process.returncode, time.time()
        end_job(self.process)
        if self.mark and self.mark.exists():
            self.fault_at = self.mark.stat().st_mtime
        return Ending(code, now - (self.fault_at or self.begun), self.log.read_text(errors="replace"))
