"""Which grid serves a GPT: every 4D grid of so many ranks, those dropped with the reason, the others ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import GridError, Pmm3dError
from ..layout import GridShape
from .axonn import ORDER, Bandwidths
from .candidates import Candidate, Ranking
from .gpt import GPT

DTYPE = "bfloat16"
"""Of a GPT's products."""


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
    for x in _divisors(ranks, powers_of_two):
        for y in _divisors(ranks // x, powers_of_two):
            for z in _divisors(ranks // (x * y), powers_of_two):
                data = ranks // (x * y * z)
                if not powers_of_two or data & (data - 1) == 0:
                    yield GridShape(x, y, z, data)


def preset_of(grid: GridShape) -> str:
    """The family of parallel training whose grid it is, as `Grid(shape=)` names them; "" if of none.

        >>> [preset_of(GridShape(*sizes)) for sizes in ((1, 1, 1, 8), (1, 1, 8), (1, 1, 4, 2), (8, 1, 1), (2, 2, 2))]
        ['ddp', 'fsdp', 'hsdp', 'megatron', '']
    """
    if grid.x == grid.y == grid.z == 1:
        return "ddp"
    if grid.x == grid.y == 1:
        return "fsdp" if grid.data == 1 else "hsdp"
    return "megatron" if grid.y == grid.z == 1 else ""


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
    return checked(Ranking(str(gpt), ranks, candidates, dropped, gpt.flop, DTYPE, considered), search)


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


def checked(ranking: Ranking, search: Search) -> Ranking:
    """It, if a grid is left. Raises GridError, which says what is short."""
    if ranking.candidates:
        return ranking
    if not ranking.dropped:
        raise GridError(f"no grid of {ranking.ranks} ranks has sizes that are all powers of two: ask for such a number "
                        "of ranks, or for grids of any sizes")
    least = min(ranking.dropped, key=lambda dropped: sum(dropped.memory.values()))
    if search.memory is not None and sum(least.memory.values()) > search.memory:
        kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in least.memory.items())
        raise GridError(f"no grid of {ranking.ranks} ranks holds {ranking.what} within {search.memory:,} bytes a rank: "
                        f"grid {least.grid} needs {sum(least.memory.values()):,} ({kinds})")
    raise GridError(f"no grid of {ranking.ranks} ranks is left for {ranking.what}: grid {least.grid}: {least.why_not}")


def _best_first(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    """Of those that take as long: who holds less, then by their sizes, so that the order is always the same."""
    return candidate.seconds, sum(candidate.memory.values()), tuple(candidate.grid)


def _divisors(number: int, powers_of_two: bool) -> Iterator[int]:
    for divisor in range(1, number + 1):
        if number % divisor == 0 and not (powers_of_two and divisor & (divisor - 1)):
            yield divisor
