"""Processes of a job on this machine: those below mpiexec, which of them is which rank, how each ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""By which an mpiexec tells a process its rank."""
SEGMENTS = ("/dev/shm/mpich_shm_", "/dev/shm/ucx_shm_posix_", "/dev/shm/sm_segment.")
"""Files that MPICH, UCX and Open MPI map, and leave where a rank is killed."""
CPU_TICKS, VIRTUAL_SIZE = slice(11, 13), 20
"""Their positions in /proc/PID/stat behind the name."""
PIDFD_INFO = struct.Struct("QQ11Ii")
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3
"""Of Linux 6.15: how a process ended, also after another one has collected it."""


def end_job(process: subprocess.Popen, grace: float = 2.0) -> None:
    """End an mpiexec and every process below it; nothing happens if it has ended.

    First politely, so that it removes its files in /tmp and /dev/shm. The ranks are killed one by one, because MPICH
    and Open MPI put each into a process group of its own.
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
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """The processes below this one, from /proc or, where there is none, from ps; children before their own children."""
    parents, found = {}, [ancestor]
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    if not parents:
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
        parents = {int(pid): int(parent) for pid, parent in map(str.split, lines)}
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


class RankProcess:
    """A rank, seen from outside. Raises OSError if it has ended already.

    status   None while it runs; then as of wait(2), or -1 if that is not known
    """

    def __init__(self, rank: int, pid: int):
        self.rank, self.pid = rank, pid
        self.status: int | None = None
        self.descriptor = os.pidfd_open(pid)
        self._entry = os.open(f"/proc/{pid}/stat", os.O_RDONLY)

    def note_end(self) -> None:
        """It has ended: find out how, from its entry while nobody has collected it, or from the kernel's memory."""
        self.status = -1
        with suppress(OSError, ValueError, IndexError):
            state, *fields = os.pread(self._entry, 4096, 0).rpartition(b")")[2].split()
            if state in (b"Z", b"X"):
                self.status = int(fields[-1])
        if self.status == -1:
            with suppress(OSError):
                asked = PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13)
                mask, *_, status = PIDFD_INFO.unpack(fcntl.ioctl(self.descriptor, PIDFD_GET_INFO, asked))
                self.status = status if mask & PIDFD_INFO_EXIT else -1
        os.close(self._entry)
        os.close(self.descriptor)

    def is_ending(self) -> bool:
        """Whether its memory is gone already."""
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self._entry, 4096, 0).rpartition(b")")[2].split()[VIRTUAL_SIZE]) == 0
        return True

    def doing(self) -> str:
        """For whoever wonders why it has not ended: its state, where in the kernel it waits, and the CPU it has used.

        Of its first thread, which is Python's; the time is that of all its threads.
        """
        with suppress(OSError, ValueError, IndexError):
            words = os.pread(self._entry, 4096, 0).rpartition(b")")[2].split()
            used = sum(map(int, words[CPU_TICKS])) / os.sysconf("SC_CLK_TCK")
            place = ""
            with suppress(OSError):
                place = Path(f"/proc/{self.pid}/wchan").read_text().strip("0\n")
            return f"state {words[0].decode()}{place and f' in {place}'}, {used:.1f} s of CPU"
        return "ending"

    def segments(self) -> set[str]:
        """The files of its MPI in /dev/shm that it has mapped."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
            return {line[line.index("/") :] for line in lines if any(name in line for name in SEGMENTS)}
        return set()


class LocalRanks:
    """The ranks below an mpiexec on this machine, as they come and go. Knows none where the system does not tell.

    seen, ended   RankProcess in the order in which they were seen, and ended
    suspects      of the first that went wrong and those that were about to end with it: MPICH's mpiexec ends the others
                  as soon as a rank begins to end, and one of them may be gone before that rank is
    """

    def __init__(self, mpiexec: int):
        self._mpiexec = mpiexec
        self._variables = [f"{name}=".encode() for name in RANK_VARIABLES if name not in os.environ]
        self._running: dict[int, RankProcess] = {}
        self._pids: set[int] = set()
        self._poll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._own: int | None = None
        self.seen: list[RankProcess] = []
        self.ended: list[RankProcess] = []
        self.suspects: list[RankProcess] = []
        if self._poll is not None:
            with suppress(OSError):
                self._own = os.pidfd_open(mpiexec)
                self._poll.register(self._own, select.EPOLLIN)

    @property
    def running(self) -> Iterable[RankProcess]:
        return self._running.values()

    def look(self) -> None:
        """Find new ranks: processes with a rank's variable, below those without."""
        parents = [self._mpiexec] if self._poll is not None else []
        for parent in parents:
            for pid in _children(parent):
                if pid in self._pids:
                    continue
                rank = self._rank_of(pid)
                if rank is None:
                    parents.append(pid)
                else:
                    self._add(rank, pid)

    def _rank_of(self, pid: int) -> int | None:
        with suppress(OSError):
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(tuple(self._variables)) and word.rpartition(b"=")[2].isdigit():
                    return int(word.rpartition(b"=")[2])
        return None

    def _add(self, rank: int, pid: int) -> None:
        assert self._poll is not None
        with suppress(OSError):
            process = RankProcess(rank, pid)
            self._poll.register(process.descriptor, select.EPOLLIN)
            self._running[process.descriptor] = process
            self._pids.add(pid)
            self.seen.append(process)

    def wait(self, seconds: float) -> None:
        """Until a rank or mpiexec ends, so long at most; ends are noted in their order."""
        if self._poll is None:
            time.sleep(min(seconds, 0.05))
            return
        for descriptor, _ in self._poll.poll(seconds):
            self._poll.unregister(descriptor)
            if descriptor in self._running:
                process = self._running.pop(descriptor)
                process.note_end()
                self.ended.append(process)
                if process.status and not self.suspects:
                    self.suspects = [process, *(other for other in self.running if other.is_ending())]

    def close(self) -> None:
        if self._poll is not None:
            self._poll.close()
        for descriptor in filter(None, (self._own, *self._running)):
            os.close(descriptor)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    return []
