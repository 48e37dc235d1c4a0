"""Processes of a job on this machine: the processes below mpiexec, their ranks, and how they end."""

from __future__ import annotations

import os
import select
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Environment variables in which mpiexec passes a process its rank."""
PARENT, VIRTUAL_SIZE, STATUS = 1, 20, -1
"""Indices of the fields of /proc/PID/stat that follow the name."""


def end_job(process: subprocess.Popen, grace: float = 2.0) -> None:
    """End an mpiexec and every process below it. Do nothing if mpiexec has ended.

    mpiexec gets SIGTERM first, so that it removes its files in /tmp and /dev/shm. `grace` seconds later it is killed.
    The ranks are killed one by one, because MPICH and Open MPI put each rank into its own process group.
    """
    if process.poll() is not None:
        return
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        below += descendants(process.pid)
        process.kill()
        process.wait()
    kill(below)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """Return the processes below this one, from /proc or from ps; children precede their own children."""
    parents = {
        int(folder.name): int(stat[PARENT]) for folder in Path("/proc").glob("[0-9]*") if (stat := _stat(folder.name))
    }
    if not parents:
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
        parents = {int(pid): int(parent) for pid, parent in map(str.split, lines)}
    processes = [ancestor]
    for pid in processes:
        processes += [child for child, parent in parents.items() if parent == pid]
    return processes[1:]


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name; [] if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


@dataclass
class RankProcess:
    """A rank on this machine.

    status   None while the process runs; then its wait(2) status, or -1 if its parent has already reaped the process
    """

    rank: int
    pid: int
    status: int | None = None

    def note_end(self) -> None:
        stat = _stat(self.pid)
        self.status = int(stat[STATUS]) if stat and stat[0] in "ZX" else -1

    def is_ending(self) -> bool:
        """Return whether the kernel has freed the memory of the process."""
        stat = _stat(self.pid)
        return not stat or stat[VIRTUAL_SIZE] == "0"


class LocalRanks:
    """The ranks below an mpiexec on this machine. No ranks are found on systems without pidfd.

    running    ranks that run, by descriptor
    ended      ranks in the order in which they ended
    hydra      whether mpiexec is MPICH's or derived from it: its ranks have PMI_RANK and no other variable of a rank
    suspects   the first rank that failed, and the ranks that were ending at that moment: MPICH's mpiexec kills the
               other ranks as soon as one begins to end, and a killed rank may be gone first
    """

    def __init__(self, mpiexec: int):
        self._mpiexec, self._seen = mpiexec, set[int]()
        self._variables = tuple(f"{name}=".encode() for name in RANK_VARIABLES if name not in os.environ)
        self.hydra = False
        self.running: dict[int, RankProcess] = {}
        self.ended: list[RankProcess] = []
        self.suspects: list[RankProcess] = []
        self._poll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._watch(mpiexec)

    def _watch(self, pid: int) -> int:
        """Return a descriptor of a process, whose end `wait` records; -1 if the process has already ended."""
        if self._poll is not None:
            with suppress(OSError):
                descriptor = os.pidfd_open(pid)
                self._poll.register(descriptor, select.EPOLLIN)
                return descriptor
        return -1

    def look(self) -> None:
        """Find new ranks: the topmost processes below mpiexec that have a variable of a rank."""
        parents = [self._mpiexec]
        for parent in parents:
            for pid in set(_children(parent)) - self._seen:
                rank = self._rank_of(pid)
                if rank is None:
                    parents.append(pid)
                elif (descriptor := self._watch(pid)) >= 0:
                    self.running[descriptor] = RankProcess(rank, pid)
                    self._seen.add(pid)

    def _rank_of(self, pid: int) -> int | None:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(word.split(b"=", 1) for word in words if word.startswith(self._variables))
            for number in filter(bytes.isdigit, variables.values()):
                self.hydra = set(variables) == {b"PMI_RANK"}
                return int(number)
        return None

    def wait(self, seconds: float) -> None:
        """Wait until a rank or mpiexec ends, for at most `seconds`. Record the ranks that ended, in order."""
        if self._poll is None:
            return time.sleep(min(seconds, 0.05))
        for descriptor, _ in self._poll.poll(seconds):
            os.close(descriptor)  # also removes it from the epoll
            if process := self.running.pop(descriptor, None):
                process.note_end()
                self.ended.append(process)
                if process.status and not self.suspects:
                    self.suspects = [process, *(other for other in self.running.values() if other.is_ending())]

    def close(self) -> None:
        for descriptor in self.running:
            os.close(descriptor)
        if self._poll is not None:
            self._poll.close()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []
