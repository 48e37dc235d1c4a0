"""Where the ranks of a communicator run: a few bytes for each, and the name of each host once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DEAD = "dead: its process is gone"
COMPUTES = "it computes without letting Python's threads run"
STATES = {"T": "stopped by a signal (SIGSTOP, or a debugger)", "t": "stopped by a debugger", "Z": DEAD, "X": DEAD,
          "D": "waiting for a disk or a file system", "R": COMPUTES}
"""By the state's letter in /proc/PID/stat: why the process does not answer."""
ROW = np.dtype([("host", np.uint64), ("namespace", np.int64), ("pid", np.int32), ("name_bytes", np.uint16),
                ("debug", np.uint8)], align=True)
"""What each rank tells all others when a Grid is made. host: a digest of its name."""


class Process(NamedTuple):
    """Where a rank runs. pid: 0 if it is not known; namespace: number of the PID namespace that the pid belongs to
    (containers may have their own)."""

    host: str = ""
    pid: int = 0
    namespace: int = 0

    def described(self, rank: int) -> str:
        return f"rank {rank}" + (f" (host {self.host}, pid {self.pid})" if self.pid else "")


def this_process(host: str) -> Process:
    try:
        return Process(host, os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return Process(host, os.getpid())


def process_state(pid: int) -> str | None:
    """Why a process of this machine does not answer, if it does not; None if nothing is known."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # ENOENT, ESRCH
        return DEAD
    except OSError:  # for example, no file descriptor is left
        return None
    return STATES.get(letter)


def row(process: Process, debug: bool) -> np.ndarray:
    """One ROW: that of this process."""
    name = process.host.encode()
    digest = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
    return np.array([(digest, process.namespace, process.pid, len(name), debug)], ROW)


def first_of_each(values: np.ndarray) -> np.ndarray:
    """The index of the first of each value, ascending.

        >>> first_of_each(np.array([7, 7, 2, 7, 2])).tolist()
        [0, 2]
    """
    return np.sort(np.unique(values, return_index=True)[1])


class Processes(Sequence[Process]):
    """The Process of each rank, made when it is asked for.

    rows    a ROW of each rank;   names: of the hosts, in the order of their first ranks
    hosts   number of them

        >>> known = Processes(np.concatenate([row(Process(host, 1), False) for host in "aba"]), ["a", "b"])
        >>> known[2].host, known.hosts, known.first_ranks(), known.local_rank(2), known.neighbours(0)
        ('a', 2, [0, 1], 1, {0: 1, 2: 1})
    """

    def __init__(self, rows: np.ndarray, names: Sequence[str]):
        _, firsts, host = np.unique(rows["host"], return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        self._firsts, self._host = firsts[order], np.argsort(order).astype(np.int32)[host]
        self._pids, self._namespaces = rows["pid"].copy(), rows["namespace"].copy()
        self._names = list(names)
        self.hosts = len(self._firsts)

    @classmethod
    def unknown(cls, size: int) -> Processes:
        """Of so many ranks that have not told where they run."""
        return cls(np.zeros(size, ROW), [""])

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        return Process(self._names[self._host[rank]], int(self._pids[rank]), int(self._namespaces[rank]))

    def host_of(self, rank: int) -> str:
        return self._names[self._host[rank]]

    def nodes(self) -> np.ndarray:
        """Of each rank, the number of its host."""
        return self._host

    def node_of(self, rank: int) -> int:
        """The number of its host, in the order of their first ranks."""
        return int(self._host[rank])

    def first_ranks(self) -> list[int]:
        """The first rank of each host."""
        return self._firsts.tolist()

    def local_rank(self, rank: int) -> int:
        """Its number among the ranks of its host."""
        return int(np.count_nonzero(self._host[:rank] == self._host[rank]))

    def beside(self, rank: int) -> int:
        """How many ranks its host has."""
        return int(np.count_nonzero(self._host == self._host[rank]))

    def per_node(self) -> int:
        """The ranks of the host that has most."""
        return int(np.bincount(self._host).max())

    def run(self) -> int:
        """Ranks that are sure to be on one host if they follow each other and the first is a multiple of that: all that
        a host has where each has as many, 1 where ranks are dealt out to the hosts in turn.

            >>> [Processes(np.concatenate([row(Process(host, 1), False) for host in hosts]), ["a", "b"]).run()
            ...  for hosts in ("aaaabbbb", "aaaabb", "aabbbb", "abab")]
            [4, 4, 2, 1]
        """
        changes = np.flatnonzero(np.diff(self._host)) + 1
        return int(np.gcd.reduce(changes)) if len(changes) else len(self)

    def places(self) -> np.ndarray:
        """Of each rank, a number that those have in common which see each other's processes: of one host and namespace.
        Negative for a rank that has not told."""
        pairs = np.stack([self._host, self._namespaces.astype(np.int64)], axis=1)
        _, found = np.unique(pairs, axis=0, return_inverse=True)
        return np.where(self._pids != 0, found.reshape(-1), -1 - np.arange(len(self)))

    def first_near(self, rank: int, ranks: Sequence[int]) -> int:
        """The first of these ranks on the same host as `rank`, which is one of them."""
        return ranks[int(np.argmax(self._host[np.asarray(ranks)] == self._host[rank]))]

    def neighbours(self, rank: int) -> dict[int, int]:
        """Rank -> pid of the processes that it can see under these numbers: of its host and namespace, its own too."""
        near = (self._host == self._host[rank]) & (self._namespaces == self._namespaces[rank]) & (self._pids != 0)
        ranks = np.flatnonzero(near)
        return dict(zip(ranks.tolist(), self._pids[ranks].tolist()))
