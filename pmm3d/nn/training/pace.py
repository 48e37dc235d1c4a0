"""Which rank the others wait for, told while the training runs."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from ...comm import Grid
from .run_log import logger

LOOK_SECONDS = 10.0
"""Between two looks at the ranks' waits: a message of two numbers from each rank."""
SLOW, WAITED = 2.0, 0.25
"""Told of is a rank that is busy so many times as long as the median, if others wait for that share of the time."""


class Slowest(NamedTuple):
    """rank    that waits least;   ratio   its busy time over the median;   waited   seconds that the others waited
    longer than it, on average"""

    rank: int
    ratio: float
    waited: float


def slowest(seconds: float, waited: list[float]) -> Slowest:
    """Of the ranks' seconds of waiting for messages, within a time of all. A rank that waits is not busy."""
    rank = min(range(len(waited)), key=waited.__getitem__)
    busy = [max(1e-9, seconds - each) for each in waited]
    others = (sum(waited) - waited[rank]) / max(1, len(waited) - 1)
    return Slowest(rank, busy[rank] / median(busy), others - waited[rank])


class Pace:
    """Looks at the ranks' waits every now and then; rank 0 tells once of each rank that others wait for."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._looked, self._before = time.perf_counter(), self._waited()
        self._told: set[int] = set()

    def _waited(self) -> float:
        """For messages; not for the loader, which is the rank's own affair."""
        return sum(entry.waited for key, entry in self._grid.ledger.entries.items() if key.axis)

    def due(self) -> bool:
        """Whether rank 0 would look now."""
        return self._grid.rank == 0 and self._grid.size > 1 and time.perf_counter() - self._looked > LOOK_SECONDS

    def look(self) -> None:
        """Collective."""
        now, waited = time.perf_counter(), self._waited()
        seconds = now - self._looked
        everyones = self._grid.comm.gather(max(0.0, waited - self._before))
        self._looked, self._before = now, waited
        if everyones is not None:
            self._tell(seconds, slowest(seconds, everyones))

    def _tell(self, seconds: float, found: Slowest) -> None:
        if found.rank in self._told or found.ratio < SLOW or found.waited < WAITED * seconds:
            return
        self._told.add(found.rank)
        logger.warning(f"rank {found.rank} (host {self._grid.host_of(found.rank)}) is {found.ratio:.1f} times slower "
                       f"than the median: others waited {found.waited:.0f} of the last {seconds:.0f} s for it")
