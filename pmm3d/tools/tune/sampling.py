"""Timings of what all ranks do at once: repeated, freed of jumps of the clock, the slowest rank's; who was slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ...errors import Pmm3dError

SAMPLES = 3
"""Timings of a point, of which the median counts."""
SAMPLE_SECONDS = 4e-3
"""That one of them lasts on a core of its own, by the fastest rank's first call: ranks that share a core take turns of
some milliseconds, and a shorter timing of one would not see the others."""
MOST_CALLS = 2000
"""In one of them."""
JUMP = 100.0
"""Times the median of the others, from which on it was the clock."""
ATTEMPTS = 3
"""To get timings that are none of the clock's jumps."""
SLOW = 2.0
"""Times the median of the ranks, from which on one is slow."""
YIELD_SECONDS, SLEEP_SECONDS = 2e-4, 5e-5
"""Whoever waits for the others yields its core, then sleeps: they may need it."""

Work = Callable[[], Any]


class Sampler:
    """Measures work that all ranks of a communicator do at once. Its methods are collective.

    comm      the ranks
    budget    seconds that a section may take, as a share of what it asks for
    thrown    samples of this rank that were jumps of the clock
    left_out  points that were not measured, since the time of their section was up
    medians   section -> this rank's median of each point, in order
    """

    def __init__(self, comm: MPI.Intracomm, budget: float = 1.0, clock: Callable[[], float] = time.perf_counter):
        self.comm, self.budget, self.clock = comm, budget, clock
        self.thrown = self.left_out = 0
        self.medians: dict[str, list[float]] = {}
        self._section, self._ends, self._over = "", inf, False

    @contextmanager
    def section(self, name: str, seconds: float) -> Iterator[None]:
        """What is measured in this context is of that name, and takes about so many seconds at most."""
        self._section, self._ends = name, self.clock() + self.budget * seconds
        self._over = False
        try:
            yield
        finally:
            self._section, self._ends, self._over = "", inf, False

    def largest(self, *values: float) -> list[float]:
        """Of each value, the largest of the ranks'."""
        mine, found = np.array(values, np.float64), np.empty(len(values), np.float64)
        self.comm.Allreduce(mine, found, MPI.MAX)
        return found.tolist()

    def meet(self) -> None:
        """Wait for all ranks, and leave them the cores meanwhile."""
        arrival, begun = self.comm.Ibarrier(), self.clock()
        while not arrival.Test():
            if 0 <= self.clock() - begun < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(SLEEP_SECONDS)

    def measure(self, work: Work, before: Work | None = None, *, samples: int = SAMPLES,
                sample_seconds: float = SAMPLE_SECONDS) -> float | None:
        """Seconds of a call of work, the slowest rank's median; None if the time of the section is up.

        before   called before each call, outside of the time

        Raises Pmm3dError, on every rank, if the clock of one gives no time at all.
        """
        if self._over:
            self.left_out += 1
            return None
        for _ in range(ATTEMPTS):
            self._timed(work, before, 1)
            estimate = self._timed(work, before, 1)
            negative, over = self.largest(-estimate if estimate > 0 else -inf, self.clock() - self._ends)
            if over > 0:
                self._over, self.left_out = True, self.left_out + 1
                return None
            calls = max(1, min(MOST_CALLS, round(-sample_seconds / negative)))
            seconds = [self._timed(work, before, calls) for _ in range(samples)]
            kept = plausible(seconds)
            self.thrown += len(seconds) - len(kept)
            own = median(kept) if kept else 0.0
            found, missing = self.largest(own, not kept)
            if not missing:
                self.medians.setdefault(self._section, []).append(own)
                return found
        raise Pmm3dError(f"the clock of a rank's host gives no time: {ATTEMPTS * samples} timings in a row were not "
                         "positive. Measure again, or on another host")

    def _timed(self, work: Work, before: Work | None, calls: int) -> float:
        """Seconds of one of so many calls."""
        if before is None:
            self.meet()
            begun = self.clock()
            for _ in range(calls):
                work()
            return (self.clock() - begun) / calls
        total = 0.0
        for _ in range(calls):
            before()
            self.meet()
            begun = self.clock()
            work()
            total += self.clock() - begun
        return total / calls


def plausible(samples: Sequence[float]) -> list[float]:
    """The timings that can be some: positive, and not more than 100 times the median of the others.

        >>> plausible([2.0, -1.0, 3.0, 0.0, 5000.0, 2.5])
        [2.0, 3.0, 2.5]
    """
    positive = [seconds for seconds in samples if isfinite(seconds) and seconds > 0]
    kept = list[float]()
    for index, seconds in enumerate(positive):
        others = positive[:index] + positive[index + 1 :]
        if not others or seconds <= JUMP * median(others):
            kept.append(seconds)
    return kept


class SlowRank(NamedTuple):
    """A rank that took more than twice as long as the median of the ranks, on most points of a section."""

    rank: int
    section: str
    ratio: float


def slow_ranks(section: str, medians: Sequence[Sequence[float]]) -> list[SlowRank]:
    """medians: of each rank, its median of each point.

        >>> slow_ranks("gemm", [[1.0, 2.0], [1.1, 2.0], [5.0, 6.0], [0.9, 1.9]])
        [SlowRank(rank=2, section='gemm', ratio=3.9)]
    """
    if not medians or not medians[0]:
        return []
    matrix = np.array(medians, float)
    ratios = matrix / np.median(matrix, axis=0)
    often = (ratios > SLOW).sum(axis=1) > matrix.shape[1] / 2
    return [SlowRank(int(rank), section, round(float(np.median(ratios[rank])), 1)) for rank in np.flatnonzero(often)]
