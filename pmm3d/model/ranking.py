"""Which grid serves a product: what each costs, all of them ranked, and the bytes that no algorithm can do without.

The time is modelled without overlap, for nominal rates: enough to rank grids, not to predict a run. Exact volumes and
memory are the plan's (`ProductPlan`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil, sqrt

from ..errors import GridError
from ..layout import GridShape, itemsize
from .plan import ProductPlan

FLOPS = 5e10
"""Flop/s (a multiply-add counts two) that a rank is taken to reach: a core of a recent CPU in float64."""
BANDWIDTH = 2e9
"""Bytes/s that a rank is taken to receive: a node's network shared by its cores."""

DIGITS = 9
"""Of a modelled time that count: costs that are equal compare equal however they were added up."""
SLACK = 1 + 1e-8
"""By which a bound may pass what it bounds, so that rounding leaves nothing out."""

Product = tuple[int, int, int]
"""m, n, k."""


def volumes(product: Product, grid: GridShape, dtype: str) -> dict[str, float]:
    """Bytes that a rank receives along each axis, with divisible sizes: (G-1)/G of the block gathered or reduced.

        >>> volumes((64, 64, 64), GridShape(2, 2, 2), "float64")
        {'x': 4096.0, 'y': 4096.0, 'z': 4096.0}
    """
    m, n, k = product
    blocks = {"x": m * k / (grid.z * grid.y), "y": m * n / (grid.z * grid.x), "z": k * n / (grid.y * grid.x)}
    size = itemsize(dtype)
    return {axis: size * block * (getattr(grid, axis) - 1) / getattr(grid, axis) for axis, block in blocks.items()}


def seconds(product: Product, grid: GridShape, dtype: str) -> float:
    """Modelled time of the busiest rank: its multiply-adds and what it receives."""
    m, n, k = product
    flops = 2 * ceil(m / grid.z) * ceil(n / grid.x) * ceil(k / grid.y)
    return flops / FLOPS + sum(volumes(product, grid, dtype).values()) / BANDWIDTH


def memory(product: Product, grid: GridShape, dtype: str) -> int:
    """Bytes on the fullest rank, of operands in Layout.A and Layout.B, the result, and the work arrays."""
    return ProductPlan(*product, dtype, grid).memory


def grids(ranks: int) -> list[GridShape]:
    """Every Gx x Gy x Gz of exactly that many ranks.

        >>> len(grids(8))
        10
    """
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [GridShape(x, y, ranks // (x * y)) for x in divisors for y in divisors if ranks % (x * y) == 0]


def ranked_grids(product: Product, ranks: int, dtype: str = "float64", limit: int | None = None) -> Iterator[GridShape]:
    """Grids of exactly that many ranks, best first. Equal ones: less memory, then the smaller y, then the larger z.

    limit   bytes that the fullest rank may hold; grids that need more are left out

        >>> next(ranked_grids((4096, 4096, 4096), 8))
        GridShape(x=2, y=2, z=2, data=1)
    """
    cost = {grid: _rounded(seconds(product, grid, dtype), DIGITS) for grid in grids(ranks)}
    for _, equal in groupby(sorted(cost, key=cost.__getitem__), cost.__getitem__):
        held = {grid: memory(product, grid, dtype) for grid in equal}
        fitting = [grid for grid, nbytes in held.items() if limit is None or nbytes <= limit]
        yield from sorted(fitting, key=lambda grid: _among_equals(grid, held[grid]))


def best_grid(product: Product, ranks: int, dtype: str = "float64", limit: int | None = None) -> GridShape:
    """The grid of least modelled time on at most that many ranks, so that it may leave some idle.

    Raises GridError if no grid keeps the fullest rank within `limit` bytes.

        >>> best_grid((512, 512, 512), 13)
        GridShape(x=2, y=2, z=3, data=1)
    """
    best = _Best(product, dtype, float("inf") if limit is None else limit)
    for grid in _candidates(best, ranks):
        best.offer(grid)
    if best.grids:
        return min(best.grids, key=lambda grid: _among_equals(grid, memory(product, grid, dtype)))
    smallest = min(memory(product, grid, dtype) for grid in grids(ranks))
    raise GridError(f"no grid of {ranks} ranks keeps m, n, k = {product} ({dtype}) within {limit:,} bytes a rank; "
                    f"the least is {smallest:,}. Use more ranks, or max_workspace= in matmul to go through k in "
                    "panels")


@dataclass
class _Best:
    """The grids of least (rounded) time among those offered that keep the limit, and of those the largest."""

    product: Product
    dtype: str
    limit: float
    seconds: float = float("inf")
    size: int = 0
    grids: list[GridShape] = field(default_factory=list)

    def offer(self, grid: GridShape) -> None:
        cost = _rounded(seconds(self.product, grid, self.dtype), DIGITS)
        key, best = (cost, -grid.size), (self.seconds, -self.size)
        if key > best or (self.limit < float("inf") and memory(self.product, grid, self.dtype) > self.limit):
            return
        if key < best:
            self.seconds, self.size, self.grids = cost, grid.size, []
        self.grids.append(grid)


def _candidates(best: _Best, ranks: int) -> Iterator[GridShape]:
    """The grids of more than half of the ranks that may be better than the best so far, or as good.

    With W the time of all multiply-adds and v_x, v_y, v_z those of receiving all of A, C and B, a grid takes at least
    (W + v_x (x-1) + v_y (y-1) + v_z (z-1)) / xyz: for x alone bounded by the means of y and z, and for x and y of the
    form b + a/z, as are the bytes that it holds. Only z that keep both bounds remain.
    """
    m, n, k = best.product
    work, second = 2 * m * n * k / FLOPS, itemsize(best.dtype) / BANDWIDTH
    a, c, b = second * m * k, second * m * n, second * k * n

    def least(x: int) -> float:
        others = 2 * sqrt(b * c * (ranks // 2 / x)) - b - c
        return (work + a * (x - 1) + max(0.0, others)) / ranks

    for bound, x in sorted((least(x), x) for x in range(1, ranks + 1)):
        if bound > best.seconds * SLACK:
            return
        for y in range(1, ranks // x + 1):
            fixed, falling = b / (x * y), (work + a * (x - 1) + c * (y - 1) - b) / (x * y)
            last = ranks // (x * y)
            first = max(ranks // 2 // (x * y) + 1, _from(falling, best.seconds * SLACK - fixed),
                        _holding(best, x, y, last))
            for z in range(last, first - 1, -1):
                if x * y * z >= best.size or fixed + falling / z < best.seconds:
                    yield GridShape(x, y, z)


def _holding(best: _Best, x: int, y: int, last: int) -> int:
    """The least z, up to the last, of which a rank may keep the limit: with divisible sizes, shards and blocks."""
    if best.limit == float("inf"):
        return 1
    m, n, k = best.product
    size = itemsize(best.dtype)
    falling = (m * k + k * n + m * n) / (x * y) + (x > 1) * m * k / y + (y > 1) * (2 - 1 / y) * m * n / x
    fixed = (last > 1) * k * n / (x * y)
    return _from(size * falling, best.limit * SLACK - size * fixed)


def _from(falling: float, rest: float) -> int:
    """The least z with falling / z <= rest, or one that is too large for any grid."""
    if falling <= 0:
        return 1
    return max(1, ceil(min(falling / rest, sys.maxsize))) if rest > 0 else sys.maxsize


def lower_bound(product: Product, ranks: int, dtype: str = "float64") -> float:
    """Bytes that some rank must receive in any algorithm that starts and ends with one copy of the matrices, spread
    evenly: Al Daas, Ballard, Grigori, Kumar, Rouse, SPAA 2022, theorem 3 (tight, independent of memory).

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


def _among_equals(grid: GridShape, held: int) -> tuple[float, int, int]:
    """What orders grids of equal time and size: sizes of memory compare equal where parts differ by a row."""
    return _rounded(held, 2), grid.y, -grid.z


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
