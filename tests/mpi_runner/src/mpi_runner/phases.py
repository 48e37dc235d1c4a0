"""Order in which the ranks of a world run tests of several sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence


def phases(counts: Sequence[int], size: int, cores: int | None = None) -> list[dict]:
    """Phases of tests for a world of `size` ranks. counts: number of ranks of each test.

    In a phase, `blocks` blocks of `ranks` ranks each run `tests` (indices) at the same time. Ranks outside the blocks
    continue with a later phase.
    """
    return [
        {"ranks": ranks, "blocks": blocks(ranks, size, cores or len(os.sched_getaffinity(0))), "tests": tests}
        for ranks in sorted({*counts})
        if (tests := [index for index, count in enumerate(counts) if count == ranks])
    ]


def one_by_one(counts: Sequence[int]) -> list[dict]:
    """Phases of one test each."""
    return [{"ranks": ranks, "blocks": 1, "tests": [index]} for index, ranks in enumerate(counts)]


def blocks(ranks: int, size: int, cores: int) -> int:
    """Number of blocks that work at the same time: one rank per core, and at least two blocks if they fit the world."""
    return min(size // ranks, max(2, cores // ranks))
