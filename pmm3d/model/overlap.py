"""How a product's communication runs under its GEMM: each way replayed by a machine, and the fastest one taken."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from ..layout import offsets, part_sizes
from .candidates import Candidate
from .planning import PANELS_ACROSS_HOSTS
from .product_costs import NOTHING, Clock, ProductCosts, Sizes
from .stages import DIRECT

WORTH = 1.02
"""Times as fast that a way must be, by the model, as those before it: of ways that no model tells apart the plainest is
taken."""
SLOWER = {"panels": 1.2}
"""By how much panels take longer than their replay says. In 48 products on two nodes (`benchmarks/overlap.py choice`)
panels took 0.77 to 1.34 of the time without overlap, where the replay said 0.66 to 1.3. Decomposed products took about
the time that the replay said. GEMMs of panels pass over C repeatedly beside the copies of messages, which is not
measured."""
Sizes3 = tuple[int, int, int]


def best_way(seconds: Mapping[str, float]) -> str:
    """Of "none", "panels" and "decomposed", by what each takes.

        >>> best_way({"none": 1.0, "panels": 0.9}), best_way({"none": 1.0, "panels": 0.9, "decomposed": 0.95})
        ('none', 'decomposed')
    """
    expected = {way: SLOWER.get(way, 1.0) * took for way, took in seconds.items()}
    best, *others = expected
    for way in others:
        if WORTH * expected[way] < expected[best]:
            best = way
    return best


def priced(costs: ProductCosts, grid: Sizes3) -> Candidate:
    """The grid as a candidate, by the best way."""
    clocks = clocks_of(costs, grid)
    way = _way(costs, clocks)
    return costs.priced(*grid, panels=PANELS_ACROSS_HOSTS if way == "panels" else 1, clock=clocks[way], overlap=way)


def seconds_of(costs: ProductCosts, grid: Sizes3) -> float:
    """What a product takes on a grid x, y, z by the way that is chosen for it."""
    clocks = clocks_of(costs, grid)
    return clocks[_way(costs, clocks)].now


def held_by(costs: ProductCosts, grid: Sizes3) -> int:
    """Bytes on the first rank, about, by the way that is chosen for a grid x, y, z."""
    way = _way(costs, clocks_of(costs, grid))
    return sum(costs.held(*grid, panels=PANELS_ACROSS_HOSTS if way == "panels" else 1).values())


def _way(costs: ProductCosts, clocks: Mapping[str, Clock]) -> str:
    """The best; where it is not known how much the machine hides, the last: what a product then takes."""
    if costs.machine.hidden:
        return best_way({way: clock.now for way, clock in clocks.items()})
    return [*clocks][-1]


def clocks_of(costs: ProductCosts, grid: Sizes3, rows_come: bool = True) -> dict[str, Clock]:
    """What a product takes on a grid x, y, z by each way that there is for it, the plainest first.

    rows_come   whether A is gathered by rows, so that they can be multiplied as they come; else it comes whole
    """
    whole = costs.sizes(*grid, panels=1)
    found = {"none": costs.clock(whole)}
    cut = costs.sizes(*grid, panels=PANELS_ACROSS_HOSTS)
    if cut.panels > 1 or cut.strips > 1:
        found["panels"] = costs.clock(cut)
    flat = all(spread.inside == 1 for spread in costs.spreads(*grid))
    if flat and max(grid) <= DIRECT and (grid[0] > 1 and rows_come or grid[1] > 1):
        found["decomposed"] = _decomposed(costs, whole, rows_come)
    return found


def _decomposed(costs: ProductCosts, part: Sizes, rows_come: bool) -> Clock:
    """As `multiply_decomposed` does it: B first, then the rows of A, one rank's after the other under the GEMMs; of C
    the rows of other ranks first, each rank's on its way under the GEMMs of the next."""
    clock = Clock(costs.machine.overhead, costs.agreement)
    along_x, along_y, _ = costs.along(part.x, part.y, part.z)
    deep, pieces = part.depth, part.x if rows_come else 1
    coming_b = costs.begin_b(clock, part, deep)
    shares = max(1, pieces - 1)
    clock.posts(shares - 1)
    coming = [costs.begin_a(clock, part, deep, shares) for _ in range(shares)]
    clock.wait(coming_b, "z")
    if pieces == 1:
        clock.wait(coming.pop(), "x")
    edges = list(pairwise(offsets(part_sizes(part.rows, pieces))))
    in_order, leaving = [edges[0], *reversed(edges[1:])], []
    blocks = list(pairwise(offsets(part_sizes(part.rows, part.y))))
    for number, (start, stop) in enumerate([*blocks[1:], blocks[0]], 1):
        for index, (first, last) in enumerate(in_order):
            low, high = max(start, first), min(stop, last)
            if low < high:
                if index:
                    clock.wait(coming[index - 1], "x")
                    coming[index - 1] = NOTHING
                costs.multiply(clock, high - low, part.cols, deep)
        if number < part.y:
            clock.posts(number > 1)
            leaving.append(clock.begin(along_y, costs.sum_seconds(part, part.cols) / (part.y - 1)))
    for under in leaving:
        clock.wait(under, "y")
    return clock
