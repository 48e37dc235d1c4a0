"""Grids of a number of ranks, ranked by the time of a product on a machine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from heapq import nsmallest
from math import sqrt

from ..errors import GridError
from ..layout import GridShape, itemsize, multiplied_in
from ..text import counted, in_bytes
from .candidates import LARGER, Ranking
from .grid_search import NO_LIMIT, Estimate, estimated_bytes, least_bytes, shapes_of, shapes_up_to
from .machines import Machine, flop_of
from .plan import ProductPlan
from .planning import AUTO
from .product_costs import Product, ProductCosts, Sizes3, Timed

__all__ = [
    "Product",
    "best_grid",
    "best_of_few",
    "lower_bound",
    "memory",
    "nominal",
    "rank_products",
    "ranked_grids",
    "seconds_on_cores",
    "timed_grids",
]

PRICED = 50
"""Number of grids that are priced: the best ones by the estimate."""
ALL = 2**31
"""A number that exceeds every number of grids."""
DIGITS = 9
"""Significant digits of prices in comparisons. Prices that differ only by rounding compare equal."""
NEAR = 1.1
"""A grid is left out if the estimate of its memory exceeds the limit by more than this factor."""
MOST_RANKS = 1024
"""Factor of the number of ranks up to which the error message about memory searches for a sufficient number."""
WORTH = 1.1
"""Speedup from which a grid of at most half of the ranks is preferred to the best grid of more ranks."""
ROUNDED_DOWN = 1 - 1e-9
"""Factor of a lower bound of seconds, which are rounded otherwise."""
TURN = 1e-3
"""Additional seconds of a collective if ranks share cores. An agreement of 8 ranks on 2 cores takes 0.7 to 1.2 ms, and
an agreement of 2 ranks 0.02 ms. Figures that were measured with shared cores include this time."""


def lower_bound(product: Product, ranks: int, dtype: str = "float64") -> float:
    """Return the least number of bytes that some rank receives, in any algorithm.

    The bound holds for algorithms that begin and end with one evenly distributed copy of the matrices. It is tight and
    independent of memory (Al Daas, Ballard, Grigori, Kumar, Rouse, SPAA 2022, theorem 3).

        >>> round(lower_bound((64, 64, 64), 8))
        12288
    """
    large, middle, small = sorted(product, reverse=True)
    owned = (large * middle + large * small + middle * small) / ranks
    if small == 0:
        return 0.0
    if ranks <= large / middle:
        accessed = (large * middle + large * small) / ranks + middle * small
    elif ranks <= large * middle / small**2:
        accessed = 2 * sqrt(large * middle * small**2 / ranks) + large * middle / ranks
    else:
        accessed = 3 * (large * middle * small / ranks) ** (2 / 3)
    return itemsize(dtype) * max(0.0, accessed - owned)


def memory(product: Product, grid: GridShape, dtype: str) -> int:
    """Return the bytes on the fullest rank of a grid: operands in Layout.A and Layout.B, the result, and work
    arrays."""
    return ProductPlan(*product, dtype, grid).memory


def nominal(ranks_per_node: int) -> Machine:
    """Return the nominal machine, the default without measurements, with this number of ranks on a node."""
    from .machines import load  # reads a file

    return load("nominal").with_ranks_per_node(ranks_per_node)


def rank_products(
    product: Product,
    ranks: int,
    dtype: str,
    machine: Machine,
    *,
    limit: int | None = None,
    exact: bool = True,
    top: int = 10,
    overlap: str = AUTO,
    run: int | None = None,
    beside: int = 1,
) -> Ranking:
    """Rank grids for C (m, n) = A (m, k) B, the fastest first.

    An estimate selects the grids that are priced. The result does not contain any other grid. Ties have a fixed
    order, so all ranks choose the same grid. Grids of more ranks come first. Then come grids whose axes cross fewer
    borders of nodes, grids with less memory (in two digits), with a smaller y, and with a larger z.

    Parameters
    ----------
    product, ranks, dtype, machine, overlap, run, beside
        As in `ProductCosts`.
    limit
        Bytes that a rank may hold. Default: the machine's memory.
    exact
        Whether grids have exactly this number of ranks (default), or more than half of it (`shapes_up_to`).
    top
        Number of grids that are priced, at least 50.

    Raises
    ------
    GridError
        If no grid keeps the limit. The message names the least sufficient number of ranks.

    Examples
    --------
    >>> rank_products((512, 512, 512), 8, "float64", nominal(8)).candidates[0].grid
    GridShape(x=2, y=2, z=2, data=1)
    """
    limit = (machine.memory or NO_LIMIT) if limit is None else limit
    kept, dropped, shapes = timed_grids(
        product, ranks, dtype, machine, limit=limit, exact=exact, top=top, overlap=overlap, run=run, beside=beside
    )
    candidates = [each.candidate() for each in kept]
    too_large = [
        replace(each.candidate(), why_not=f"holds {in_bytes(each.plan.memory)} a rank, more than {in_bytes(limit)}")
        for each in dropped
    ]
    what, flop = f"{' x '.join(map(str, product))} {dtype}", flop_of(*product, dtype)
    priced = {each.grid[:3] for each in [*kept, *dropped]}
    large = sum(shape not in priced and estimated_bytes(product, dtype, shape) > limit for shape in shapes)
    return Ranking(what, ranks, candidates, too_large, flop, dtype, len(shapes), {LARGER: large} if large else {})


def timed_grids(
    product: Product,
    ranks: int,
    dtype: str,
    machine: Machine,
    *,
    limit: int = NO_LIMIT,
    exact: bool = True,
    top: int = 1,
    overlap: str = AUTO,
    run: int | None = None,
    beside: int = 1,
) -> tuple[list[Timed], list[Timed], list[Sizes3]]:
    """Return the grids of `rank_products` that keep the limit, those that do not, and all considered grids.

    Arguments and errors are those of `rank_products`.
    """
    costs = ProductCosts(product, ranks, dtype, machine, overlap, run, beside)
    shapes = shapes_of(ranks) if exact else shapes_up_to(ranks)
    presets = [(ranks, 1, 1), (1, 1, ranks)] if exact else []
    timed = sorted(map(costs.timed, _worth(costs, shapes, limit, max(top, PRICED), presets)), key=_order)
    kept, dropped = list[Timed](), list[Timed]()
    for each in timed:
        (kept if each.plan.memory <= limit else dropped).append(each)
    if not kept:
        raise _nothing_fits(costs, limit, min(each.plan.memory for each in dropped))
    return kept, dropped, shapes


def ranked_grids(
    product: Product, ranks: int, dtype: str = "float64", limit: int | None = None, machine: Machine | None = None
) -> Iterator[GridShape]:
    """Return all grids of exactly this number of ranks that keep the limit, the best first.

    `limit` is in bytes on the fullest rank (default: no limit). The default of `machine` is the nominal machine with
    one node. Raises GridError if no grid keeps the limit.

        >>> next(ranked_grids((4096, 4096, 4096), 8))
        GridShape(x=2, y=2, z=2, data=1)
    """
    limit = NO_LIMIT if limit is None else limit
    ranking = rank_products(product, ranks, dtype, machine or nominal(ranks), limit=limit, top=ALL)
    return (candidate.grid for candidate in ranking.candidates)


def best_grid(
    product: Product, ranks: int, dtype: str = "float64", limit: int | None = None, machine: Machine | None = None
) -> GridShape:
    """Return the grid with the least predicted time on at most this number of ranks. The other ranks are idle.

    `limit` and `machine` are those of `ranked_grids`. Raises GridError if no grid keeps the limit.

        >>> best_grid((512, 512, 512), 8)
        GridShape(x=2, y=2, z=2, data=1)
    """
    limit = NO_LIMIT if limit is None else limit
    ranking = rank_products(product, ranks, dtype, machine or nominal(ranks), limit=limit, exact=False)
    return ranking.candidates[0].grid


def best_of_few(
    product: Product,
    best: Timed,
    ranks: int,
    dtype: str,
    machine: Machine,
    cores: int,
    *,
    limit: int = NO_LIMIT,
    overlap: str = AUTO,
    run: int | None = None,
) -> Timed:
    """Return the fastest grid of at most half of the ranks if it is `WORTH` times as fast as `best`; else `best`.

    `best` is the best grid of more than half of the ranks. `cores` is the number of cores that the ranks of a node
    share. Other arguments are those of `rank_products`.

        >>> machine = nominal(8)
        >>> def few(size, cores):
        ...     best = timed_grids((size, size, size), 8, "float64", machine)[0][0]
        ...     return str(best_of_few((size, size, size), best, 8, "float64", machine, cores).grid)
        >>> few(64, 8), few(512, 8), few(512, 2), few(4096, 2)
        ('1x1x1', '2x2x2', '1x1x2', '2x2x2')
    """
    seconds, found = seconds_on_cores(best, ranks, machine, cores), dict[int, Timed]()
    for number in _numbers(ranks, machine.ranks_per_node, cores):
        on_one_node = number <= machine.ranks_per_node  # then the product has one GEMM
        if on_one_node and WORTH * _gemm_on_cores(product, number, dtype, machine, cores) > seconds:
            continue
        with suppress(GridError):
            found[number] = timed_grids(product, number, dtype, machine, limit=limit, overlap=overlap, run=run)[0][0]
    taken = {number: seconds_on_cores(each, number, machine, cores) for number, each in found.items()}
    fastest = min(taken, key=lambda number: (taken[number], -number), default=0)
    return found[fastest] if fastest and WORTH * taken[fastest] < seconds else best


def seconds_on_cores(timed: Timed, ranks: int, machine: Machine, cores: int) -> float:
    """Return the seconds of a product, without the agreement of all ranks, if the ranks of a node share its cores.

    `ranks` is the number of busy ranks on all nodes. `cores` is the number of cores of a node.
    """
    busy, terms = min(ranks, machine.ranks_per_node), timed.terms
    turns = sum([size > 1 for size in timed.grid[:3]]) if busy > cores and not machine.key else 0
    computed = sum([terms.get(name, 0.0) for name in ("gemm", "passes", "overhead")])
    return timed.seconds - terms.get("all", 0.0) + (_slower(busy, machine, cores) - 1) * computed + turns * TURN


def _slower(busy: int, machine: Machine, cores: int) -> float:
    """Return the factor of the time of computations if this number of busy ranks shares the cores of a node."""
    measured = max(1.0, machine.ranks_per_node / cores) if machine.key else 1.0
    return max(1.0, busy / cores) / measured


def _gemm_on_cores(product: Product, ranks: int, dtype: str, machine: Machine, cores: int) -> float:
    """Return the shortest GEMM, a lower bound of `seconds_on_cores` of the grids of these ranks on one node."""
    m, n, k = product
    blocks = [(-(-m // z), -(-n // x), -(-k // y)) for x, y, z in shapes_of(ranks)]
    shortest = min([machine.gemm_seconds(*block, multiplied_in(dtype)) if all(block) else 0.0 for block in blocks])
    return ROUNDED_DOWN * _slower(ranks, machine, cores) * shortest


def _numbers(ranks: int, per_node: int, cores: int) -> list[int]:
    """Return the numbers of ranks to try: powers of two, the cores of a node, and the ranks of a node."""
    powers = {2**power for power in range(ranks.bit_length())}
    return sorted(number for number in powers | {cores, per_node} if 0 < number <= ranks // 2)


def _worth(costs: ProductCosts, shapes: list[Sizes3], limit: int, number: int, presets: list[Sizes3]) -> list[Sizes3]:
    """Return the grids to price: the best by the estimate, presets, and with a limit also those with least memory."""
    if len(shapes) <= number:
        return shapes
    product, dtype, worth, fitting = costs.product, costs.dtype, dict.fromkeys(presets), shapes
    if limit < NO_LIMIT:
        fitting = [shape for shape in shapes if estimated_bytes(product, dtype, shape) <= NEAR * limit]
        worth |= dict.fromkeys(least_bytes(product, dtype, shapes))
    return [*(worth | dict.fromkeys(nsmallest(number, fitting, key=Estimate(costs))))]


def _order(each: Timed) -> tuple[float, ...]:
    """Return the sort key of a grid."""
    grid, held = each.grid, _rounded(each.plan.memory, 2)
    return _rounded(each.seconds, DIGITS), -grid.size, each.crossed, held, grid.y, -grid.z


def _nothing_fits(costs: ProductCosts, limit: int, least: int) -> GridError:
    product, dtype, ranks = costs.product, costs.dtype, costs.ranks

    def fits(number: int) -> bool:
        """Return whether a grid of at most this number of ranks keeps the limit. Up to 128 ranks the result is exact.
        With more ranks, only the grids with the least estimate are tried."""
        return any(
            memory(product, GridShape(*shape), dtype) <= limit
            for shape in least_bytes(product, dtype, shapes_up_to(number))
        )

    powers = [ranks * 2**power for power in range(MOST_RANKS.bit_length())]
    last = bisect_left(powers, True, key=fits)
    more = "Use more ranks"
    if last < len(powers):
        first = powers[max(0, last - 1)]
        enough = first + bisect_left(range(first, powers[last]), True, key=fits)
        more = f"Use at least {counted(enough, 'rank')}"
    within = "the largest address" if limit >= NO_LIMIT else f"{limit:,} bytes a rank"
    return GridError(
        f"no grid of {counted(ranks, 'rank')} keeps m, n, k = {product} ({dtype}) within {within}; the "
        f"least is {least:,}. {more}, or limit the work arrays (max_workspace), so that k is "
        "divided into panels"
    )


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
