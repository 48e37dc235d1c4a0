"""Small products on few ranks: further ranks would cost more in messages than they save in computation."""

from __future__ import annotations

from ..errors import GridError
from .candidates import Candidate
from .machines import Machine
from .planning import AUTO
from .product_costs import Product
from .ranking import rank_products

WORTH = 1.1
"""Speedup over the best grid of more ranks from which a grid of at most half of the ranks is chosen."""
TURN = 1e-3
"""Seconds that a collective takes longer if ranks share cores: an agreement of 8 ranks on 2 cores takes 0.7 to 1.2 ms,
of 2 ranks 0.02. The figures of a machine that was measured so include it."""


def best_of_few(product: Product, best: Candidate, ranks: int, dtype: str, machine: Machine, cores: int, *,
                limit: int, overlap: str = AUTO, run: int | None = None) -> Candidate:
    """Return the fastest grid of at most half of the ranks if it is `WORTH` times as fast as `best`; else `best`.

    product   m, n, k
    best      the best grid of more than half of the ranks
    cores     number of cores that the ranks of a node share
    limit, overlap, run   as of `rank_products`

        >>> from .ranking import nominal
        >>> machine = nominal(8)
        >>> def few(size, cores):
        ...     best = rank_products((size, size, size), 8, "float64", machine).candidates[0]
        ...     return str(best_of_few((size, size, size), best, 8, "float64", machine, cores, limit=2**63).grid)
        >>> few(64, 8), few(512, 8), few(512, 2), few(4096, 2)
        ('1x1x1', '2x2x2', '1x1x2', '2x2x2')
    """
    seconds = seconds_on_cores(best, ranks, machine, cores)
    candidates = {}
    for number in _numbers(ranks, machine.ranks_per_node, cores):
        try:
            ranking = rank_products(product, number, dtype, machine, limit=limit, top=1, overlap=overlap,
                                    run=run)
        except GridError:
            continue
        candidates[number] = ranking.candidates[0]
    taken = {number: seconds_on_cores(candidate, number, machine, cores) for number, candidate in candidates.items()}
    fastest = min(taken, key=lambda number: (taken[number], -number), default=0)
    return candidates[fastest] if fastest and WORTH * taken[fastest] < seconds else best


def _numbers(ranks: int, per_node: int, cores: int) -> list[int]:
    """Numbers of ranks to try: powers of two, the cores of a node, and the ranks of a node."""
    powers = {2**power for power in range(ranks.bit_length())}
    return sorted(number for number in powers | {cores, per_node} if 0 < number <= ranks // 2)


def seconds_on_cores(candidate: Candidate, ranks: int, machine: Machine, cores: int) -> float:
    """Return the seconds of a candidate, without the agreement of all ranks, if the ranks of a node share its cores.

    ranks   number of busy ranks, on all nodes
    cores   number of cores of a node
    """
    busy, terms = min(ranks, machine.ranks_per_node), candidate.terms
    measured = max(1.0, machine.ranks_per_node / cores) if machine.key else 1.0
    slower = max(1.0, busy / cores) / measured
    turns = sum(size > 1 for size in candidate.grid[:3]) if busy > cores and not machine.key else 0
    computed = sum(terms.get(name, 0.0) for name in ("gemm", "passes", "overhead"))
    return candidate.seconds - terms.get("all", 0.0) + (slower - 1) * computed + turns * TURN
