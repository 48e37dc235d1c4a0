"""Jobs under mpiexec that something happens to: their ranks, end and words. A job that stays is a silent hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pmm3d.tools.launcher import descendants, end_job

PATIENCE = 90.0
"""Seconds after which a job counts as a silent hang."""
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """How a job ended: its exit code (None: it had to be ended from outside), the time from the fault on, its words."""

    code: int | None
    seconds: float
    said: str


class Job:
    """A program on some ranks, under way.

    program   what `pmm3d.launcher` is to run;   environ   variables to set besides this process's
    launcher  another command in place of `pmm3d.launcher -n RANKS`
    """

    def __init__(self, ranks: int, program, log: Path, environ=None, launcher=None):
        self.ranks, self.log, self.disturbed = ranks, log, None
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        start = launcher or [sys.executable, "-m", "pmm3d.launcher", "-n", str(ranks)]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [*start, *map(str, program)], stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path} | (environ or {}), start_new_session=True)
        self.begun = time.time()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> dict[int, int]:
        """Process of each rank that is there now."""
        found = {}
        for pid in descendants(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_python = b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            ranks = [word.partition(b"=")[2] for word in words if word.partition(b"=")[0] in RANK_VARIABLES]
            if ranks and is_python:
                found.setdefault(int(ranks[0]), pid)
        return found

    def until(self, condition) -> bool:
        """Wait; False if the job ends, or stays for too long, before the condition holds."""
        while not condition():
            if self.process.poll() is not None or time.time() > self.begun + PATIENCE:
                return False
            time.sleep(0.01)
        return self.process.poll() is None

    def all_there(self) -> bool:
        return len(self.pids()) == self.ranks

    def all_catch(self, number: int) -> bool:
        """Whether every rank has a handler for that signal."""
        pids = self.pids()
        return len(pids) == self.ranks and all(_catches(pid, number) for pid in pids.values())

    def until_gone(self, pids) -> None:
        """Wait for the end of processes, which may come after that of mpiexec."""
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < self.begun + PATIENCE:
            time.sleep(0.05)

    def disturb(self) -> None:
        """The fault happens now."""
        self.disturbed = time.time()

    def end(self, mark: Path | None = None) -> Ending:
        """Wait for the end; mark: a file that came to be at the moment of the fault."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        now = time.time()
        end_job(self.process)
        if mark is not None and mark.exists():
            self.disturbed = mark.stat().st_mtime
        return Ending(code, now - (self.disturbed or self.begun), self.said())


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
