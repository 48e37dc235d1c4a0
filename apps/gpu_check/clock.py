"""Time on a device: work is asked for, and done later, so a clock is read only once all of it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from mpi4py import MPI

from pmm3d.arrays import library_named

WARM_UP = 5
"""Timings that pass before those that count: for clocks to rise, kernels to be chosen and memory to be had."""
MOST = 200
"""Repetitions in a timing."""

Work = Callable[[], Any]


class Clock:
    """Times work of some ranks that ends on the device of a library. Collective over comm.

    sample   seconds that one timing is to last: what is asked for meanwhile is not waited for, so that the host may be
             ahead of the device as in a long run
    """

    def __init__(self, comm: MPI.Intracomm, library: str, sample: float):
        self.comm, self.library, self.sample = comm, library_named(library), sample

    def once(self, work: Work, times: int = 1) -> float:
        """Seconds of one of so many repetitions in a row, of the slowest rank."""
        self.library.synchronize()
        self.comm.Barrier()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self.library.synchronize()
        return self.comm.allreduce(time.perf_counter() - begun, MPI.MAX) / times

    def in_turns(self, works: Mapping[str, Work], rounds: int) -> dict[str, float]:
        """Median seconds of each, all of them in every round, and each round beginning with another one."""
        times = {name: self._warmed(work) for name, work in works.items()}
        names, found = [*works], {name: list[float]() for name in works}
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(self.once(works[name], times[name]))
        return {name: median(seconds) for name, seconds in found.items()}

    def _warmed(self, work: Work) -> int:
        """How many repetitions make a timing."""
        self.once(work)
        seconds = self.once(work, min(MOST, 1 + int(WARM_UP * self.sample / self.once(work))))
        return max(1, min(MOST, round(self.sample / seconds)))
