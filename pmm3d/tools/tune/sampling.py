"""Timings of what all ranks do at once: repeated, freed of jumps of the clock, the slowest rank's; who was slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite, nan
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
YIELD_SECONDS, SLEEP_SECONDS, SLEPT = 2e-4, 1e-3, 1 / 8
"""Whoever waits for the others yields its core, then sleeps for a part of the time waited: they may need it."""
IDLE_SECONDS = 3e-3
"""Between two looks of a rank that has nothing to do: each takes a core some 20 us."""
LEAST_POINTS = 3
"""Of a section, before a rank is called slow."""

Work = Callable[[], Any]


class Share(NamedTuple):
    """How ranks share the cores of their node.

    crowd   ranks for each core, with the threads of the BLAS: so many times longer takes what keeps a core busy
    works   whether this rank is one of as many as there are cores
    """

    crowd: float
    works: bool


OWN_CORE = Share(1.0, True)


class Sampler:
    """Measures work that all ranks of a communicator do at once. Its methods are collective.

    comm      the ranks
    share     of the cores of this rank's node
    budget    seconds that sections may take, as a share of what they ask for; what one leaves is the next one's
    thrown    samples of this rank that were jumps of the clock
    left_out  points that were not measured, since the time of their section was up
    medians   section -> this rank's median of each point, in order; nan where its time does not count
    """

    def __init__(self, comm: MPI.Intracomm, budget: float = 1.0, clock: Callable[[], float] = time.perf_counter,
                 share: Share = OWN_CORE):
        self.comm, self.budget, self.clock, self.share = comm, budget, clock, share
        self.thrown = self.left_out = 0
        self.medians: dict[str, list[float]] = {}
        self._section, self._ends, self._over, self._due = "", inf, False, self.clock()

    @contextmanager
    def section(self, name: str, seconds: float) -> Iterator[None]:
        """What is measured in this context is of that name, and takes about so many seconds at most, and those that
        earlier sections have left."""
        self._due = max(self._due, self.clock()) + self.budget * seconds
        self._section, self._ends, self._over = name, self._due, False
        try:
            yield
        finally:
            self._section, self._ends, self._over = "", inf, False

    def largest(self, *values: float) -> list[float]:
        """Of each value, the largest of the ranks'."""
        mine, found = np.array(values, np.float64), np.empty(len(values), np.float64)
        self.comm.Allreduce(mine, found, MPI.MAX)
        return found.tolist()

    def meet(self, idle: bool = False) -> None:
        """Wait for all ranks, and leave them the cores meanwhile; idle: hardly wake up."""
        arrival, begun = self.comm.Ibarrier(), self.clock()
        while not arrival.Test():
            waited = self.clock() - begun
            if idle:
                time.sleep(IDLE_SECONDS)
            elif 0 <= waited < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(SLEEP_SECONDS, abs(waited) * SLEPT))

    def measure_busy(self, work: Work, before: Work | None = None, *,
                     sample_seconds: float = SAMPLE_SECONDS) -> float | None:
        """`measure` of work that keeps a core busy and waits for nobody. Ranks that take turns on a core do it one on
        each core, so that what is timed is no turn of another, and the time is stretched by how many they are."""
        seconds = self.measure(work, before, sample_seconds=sample_seconds, counts=self.share.works)
        return None if seconds is None else seconds * self.share.crowd

    def measure(self, work: Work, before: Work | None = None, *, samples: int = SAMPLES,
                sample_seconds: float = SAMPLE_SECONDS, counts: bool = True) -> float | None:
        """Seconds of a call of work, the slowest rank's median; None if the time of the section is up.

        before   called before each call, outside of the time
        counts   whether this rank's time does

        Raises Pmm3dError, on every rank, if the clock of one gives no time at all.
        """
        if self._over:
            self.left_out += 1
            return None
        for _ in range(ATTEMPTS):
            self._timed(work, before, 1, counts)
            estimate = self._timed(work, before, 1, counts)
            negative, over = self.largest(-estimate if estimate > 0 and counts else -inf, self.clock() - self._ends)
            if over > 0:
                self._over, self.left_out = True, self.left_out + 1
                return None
            calls = max(1, min(MOST_CALLS, round(-sample_seconds / negative)))
            seconds = [self._timed(work, before, calls, counts) for _ in range(samples)]
            kept = plausible(seconds) if counts else []
            self.thrown += len(seconds) - len(kept) if counts else 0
            own = median(kept) if kept else 0.0
            found, missing = self.largest(own, counts and not kept)
            if not missing:
                self.medians.setdefault(self._section, []).append(own if counts else nan)
                return found
        raise Pmm3dError(f"the clock of a rank's host gives no time: {ATTEMPTS * samples} timings in a row were not "
                         "positive. Measure again, or on another host")

    def _timed(self, work: Work, before: Work | None, calls: int, counts: bool) -> float:
        """Seconds of one of so many calls; without end where this rank has nothing to do."""
        if not counts:
            for _ in range(1 if before is None else calls):
                self.meet(idle=True)
            return inf
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
    """medians: of each rank, its median of each point; nan where it has none.

        >>> slow_ranks("gemm", [[1.0, 2.0, 3.0], [1.1, 2.0, 3.0], [5.0, 6.0, 3.0]])
        [SlowRank(rank=2, section='gemm', ratio=3.0)]
    """
    if not medians or len(medians[0]) < LEAST_POINTS:
        return []
    matrix = np.array(medians, float)
    ratios = matrix / np.nanmedian(matrix, axis=0)
    often = (ratios > SLOW).sum(axis=1) > np.isfinite(ratios).sum(axis=1) / 2
    return [SlowRank(int(rank), section, round(float(np.nanmedian(ratios[rank])), 1)) for rank in np.flatnonzero(often)]
