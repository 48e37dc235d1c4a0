"""The order in which the ranks of a world run tests of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from pmm3d.model import machine


def phases(counts: Sequence[int], size: int, cores: int | None = None) -> list[dict]:
    """Tests by their rank counts, as phases for a world of so many ranks.

    In a phase, `blocks` blocks of `ranks` ranks each run `tests` (indices) beside each other. Ranks outside the blocks
    go on to the next phase in which they have a part.
    """
    return [
        {"ranks": ranks, "blocks": blocks(ranks, size, cores or len(machine.cores())), "tests": tests}
        for ranks in sorted({*counts})
        if (tests := [index for index, count in enumerate(counts) if count == ranks])
    ]


def one_by_one(counts: Sequence[int]) -> list[dict]:
    """Each test in a phase of its own: no other test beside it."""
    return [{"ranks": ranks, "blocks": 1, "tests": [index]} for index, ranks in enumerate(counts)]


def blocks(ranks: int, size: int, cores: int) -> int:
    """Number of blocks at work at a time: as many ranks as cores, and two blocks at least if the world holds them."""
    return min(size // ranks, max(2, cores // ranks))
