"""Which grid serves a GPT by the five-term model: every 4D grid of so many ranks, those dropped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import GridError, Pmm3dError
from ..layout import GridShape
from .axonn import ORDER, Bandwidths
from .candidates import Candidate, Ranking, preset_of
from .gpt import GPT

DTYPE = "bfloat16"
"""Of the products."""
MOST_LOOKED_AT = 20_000
"""Grids of other numbers of ranks that are looked at to say how many would do."""


@dataclass(frozen=True)
class Search:
    """Which grids are looked at.

    powers_of_two   only those whose four sizes are
    min_tensor      ranks at least along x, y and z together
    memory          bytes that a rank may hold; None for no limit
    """

    powers_of_two: bool = False
    min_tensor: int = 1
    memory: int | None = None


def grids_4d(ranks: int, powers_of_two: bool = False) -> Iterator[GridShape]:
    """Every grid of exactly that many ranks.

        >>> len(list(grids_4d(1024))), len(list(grids_4d(12))), len(list(grids_4d(12, powers_of_two=True)))
        (286, 40, 0)
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0 and not (powers_of_two and size & (size - 1))]
    for x in sizes:
        for y in sizes:
            for z in sizes:
                data, over = divmod(ranks, x * y * z)
                if not over and data in sizes:
                    yield GridShape(x, y, z, data)


def rank_by_axonn(gpt: GPT, ranks: int, bandwidths: Bandwidths, search: Search,
                  order: tuple[str, ...] = ORDER) -> Ranking:
    """All grids by the five-term model: seconds of collectives alone. Ranks run along the axes in that order,
    innermost first. Raises GridError if no grid is left."""
    candidates, dropped, considered = list[Candidate](), list[Candidate](), 0
    for grid in grids_4d(ranks, search.powers_of_two):
        considered += 1
        memory = gpt.memory(grid)
        reason = why_not(gpt, grid, memory, search)
        terms = dict[str, float]()
        if not reason:
            try:
                terms = gpt.axonn_seconds(grid, bandwidths, order)
            except Pmm3dError as error:
                reason = str(error)
        found = Candidate(grid, sum(terms.values()), terms, memory, preset=preset_of(grid), why_not=reason)
        (dropped if reason else candidates).append(found)
    candidates.sort(key=_best_first)
    return checked(Ranking(str(gpt), ranks, candidates, dropped, gpt.flop, DTYPE, considered), gpt, search)


def why_not(gpt: GPT, grid: GridShape, memory: dict[str, int], search: Search) -> str:
    """What speaks against a grid, in words; empty if nothing does."""
    tensor = grid.x * grid.y * grid.z
    if tensor < search.min_tensor:
        return f"x y z = {tensor} is less than min-tensor = {search.min_tensor}"
    if reason := gpt.why_not(grid):
        return reason
    if search.memory is not None and sum(memory.values()) > search.memory:
        return f"holds {sum(memory.values()):,} bytes on a rank, more than {search.memory:,}"
    return ""


def checked(ranking: Ranking, gpt: GPT, search: Search) -> Ranking:
    """It, if a grid is left. Raises GridError, which says what is short."""
    if ranking.candidates:
        return ranking
    if not ranking.dropped:
        raise GridError(f"no grid of {ranking.ranks} ranks has sizes that are all powers of two: ask for such a number "
                        "of ranks, or for grids of any sizes")
    fitting = [dropped for dropped in ranking.dropped if not why_not(gpt, dropped.grid, {}, search)]
    if not fitting:
        one = ranking.dropped[len(ranking.dropped) // 2]
        raise GridError(f"no grid of {ranking.ranks} ranks can take {ranking.what}; {one.grid}, for one: "
                        f"{one.why_not}. {_enough(gpt, ranking.ranks, search)}")
    least = min(fitting, key=lambda dropped: sum(dropped.memory.values()))
    if search.memory is None or sum(least.memory.values()) <= search.memory:
        raise GridError(f"no grid of {ranking.ranks} ranks is left: grid {least.grid}: {least.why_not}")
    kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in least.memory.items())
    raise GridError(f"no grid of {ranking.ranks} ranks holds {ranking.what} within {search.memory:,} bytes a rank: the "
                    f"fullest rank of {least.grid} needs {sum(least.memory.values()):,} ({kinds}). "
                    f"{_enough(gpt, ranking.ranks, search)}")


def _enough(gpt: GPT, ranks: int, search: Search) -> str:
    """The least number of ranks, above these, of which a grid fits, in words."""
    looked_at = 0
    while looked_at < MOST_LOOKED_AT:
        ranks += 1
        for grid in grids_4d(ranks, search.powers_of_two):
            looked_at += 1
            if not gpt.why_not(grid) and not why_not(gpt, grid, gpt.memory(grid), search):
                return f"The least number of ranks that fits is {ranks}, as {grid}"
        looked_at += 1
    return f"No number of ranks up to {ranks} fits either"


def _best_first(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    """Of those that take as long: who holds less, then by their sizes, so that the order is always the same."""
    return candidate.seconds, sum(candidate.memory.values()), tuple(candidate.grid)
