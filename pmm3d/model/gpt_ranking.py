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


@dataclass(frozen=True)
class Search:
    """Conditions for grids.

    powers_of_two   whether the four sizes must be powers of two
    min_tensor      least number of ranks along x, y and z together
    memory          bytes that a rank may hold; None: no limit
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
    """Rank all grids by the five-term model: by the seconds of collectives alone, then by memory and by sizes.

    order   axes in the order in which ranks run along them, innermost first

    Raises GridError if no grid is left.
    """
    candidates, dropped = list[Candidate](), list[Candidate]()
    for grid in grids_4d(ranks, search.powers_of_two):
        memory, terms = gpt.memory(grid), dict[str, float]()
        reason = _why_not(gpt, grid, memory, search)
        if not reason:
            try:
                terms = gpt.axonn_seconds(grid, bandwidths, order)
            except Pmm3dError as error:
                reason = str(error)
        found = Candidate(grid, sum(terms.values()), terms, memory, preset=preset_of(grid), why_not=reason)
        (dropped if reason else candidates).append(found)
    if not candidates and not dropped:
        raise GridError(f"no grid of {ranks} ranks has sizes that are all powers of two: name a power of two, or leave "
                        "out --powers-of-two")
    if not candidates:
        one = min(dropped, key=lambda each: (not each.why_not.startswith("holds"), sum(each.memory.values())))
        raise GridError(f"no grid of {ranks} ranks is left for {gpt}; for example, {one.grid}: {one.why_not}. Change "
                        "the number of ranks, or the limit")
    candidates.sort(key=lambda each: (each.seconds, sum(each.memory.values()), tuple(each.grid)))
    return Ranking(str(gpt), ranks, candidates, dropped, gpt.flop, DTYPE, len(candidates) + len(dropped))


def _why_not(gpt: GPT, grid: GridShape, memory: dict[str, int], search: Search) -> str:
    """Return the reason why a grid cannot be used, in words; "" if it can."""
    tensor, held = grid.x * grid.y * grid.z, sum(memory.values())
    if tensor < search.min_tensor:
        return f"x y z = {tensor} is less than min-tensor = {search.min_tensor}"
    if search.memory is not None and held > search.memory:
        return gpt.why_not(grid) or f"holds {held:,} bytes on a rank, more than {search.memory:,}"
    return gpt.why_not(grid)
