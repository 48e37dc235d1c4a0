"""Jobs under mpiexec that something happens to: their ranks, their output, their end."""

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

PATIENCE = 90.0
"""Seconds after which a job that is still there counts as a silent hang."""
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """How a job ended: its exit code (None: it had to be ended from outside), seconds since the fault, its output."""

    code: int | None
    seconds: float
    output: str


class Job:
    """A program on some ranks, under way, by pmm3d.launcher or another one; `environ` is set besides this process's
    variables. mark: a file that comes to be at the moment of the fault, if there is to be one in the program."""

    def __init__(self, ranks: int, program: Sequence[str | Path], log: Path, environ: Mapping[str, str], mark: Path,
                 launcher: Sequence[str] = ()):
        self.ranks, self.log, self.mark, self.fault_at = ranks, log, mark, 0.0
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        launcher = launcher or [sys.executable, "-m", "pmm3d.launcher", "-n", str(ranks)]
        command = [*launcher, *map(str, program)]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                                            env=os.environ | {"PYTHONPATH": path} | environ, preexec_fn=os.setpgrp)
        self.begun = time.time()

    def pids(self) -> dict[int, int]:
        """Process of each rank that is there now."""
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

    def running(self) -> bool:
        return self.process.poll() is None

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait; False if the job ends, or stays for too long, before the condition holds."""
        while not condition():
            if not self.running() or time.time() > self.begun + PATIENCE:
                return False
            time.sleep(0.01)
        return self.running()

    def all_there(self) -> bool:
        return len(self.pids()) == self.ranks

    def all_catch(self, number: int) -> bool:
        """Whether every rank has a handler for that signal."""
        try:
            statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids().values()]
        except OSError:
            return False
        caught = [int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"SigCgt:\s*(\w+)", "".join(statuses))]
        return sum(caught) == self.ranks

    def until_gone(self, pids: Iterable[int]) -> None:
        """Wait for the end of processes, which may come after that of mpiexec."""
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < self.begun + PATIENCE:
            time.sleep(0.05)

    def strike(self, number: int, victim: int | str, delay: float) -> bool:
        """The fault: a signal to a rank or to mpiexec, some seconds from now; False if it has ended by then."""
        time.sleep(delay)
        pids = self.pids() | {"mpiexec": self.process.pid}
        if victim not in pids or not self.running():
            return False
        self.fault_at = time.time()
        os.kill(pids[victim], number)
        return True

    def end(self, patience: float = PATIENCE) -> Ending:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        code = self.process.returncode
        now = time.time()
        end_job(self.process)
        if self.mark.exists():
            self.fault_at = self.mark.stat().st_mtime
        return Ending(code, now - (self.fault_at or self.begun), self.log.read_text(errors="replace"))
