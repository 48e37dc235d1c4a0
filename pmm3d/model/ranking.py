"""Which grid serves a product: what each costs, all of them ranked, and the bytes that no algorithm can do without.

The time is modelled without overlap, for nominal rates: enough to rank grids, not to predict a run. Exact volumes and
memory are the plan's (`ProductPlan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import ceil, sqrt

from ..errors import GridError
from ..layout import GridShape, itemsize
from .plan import ProductPlan

FLOPS = 5e10
"""Flop/s (a multiply-add counts two) that a rank is taken to reach: a core of a recent CPU in float64."""
BANDWIDTH = 2e9
"""Bytes/s that a rank is taken to receive: a node's network shared by its cores."""

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
    return _ranked(product, grids(ranks), dtype, limit)


def best_grid(product: Product, ranks: int, dtype: str = "float64", limit: int | None = None) -> GridShape:
    """The grid of least modelled time on at most that many ranks, so that it may leave some idle.

    Raises GridError if no grid keeps the fullest rank within `limit` bytes.

        >>> best_grid((512, 512, 512), 13)
        GridShape(x=2, y=2, z=3, data=1)
    """
    found = [grid for used in range(ranks, ranks // 2, -1) for grid in grids(used)]
    best = next(_ranked(product, found, dtype, limit), None)
    if best is None:
        smallest = min(memory(product, grid, dtype) for grid in grids(ranks))
        raise GridError(f"no grid of {ranks} ranks keeps m, n, k = {product} ({dtype}) within {limit:,} bytes a rank; "
                        f"the least is {smallest:,}. Use more ranks, or max_workspace= in matmul to go through k in "
                        "panels")
    return best


def _ranked(product: Product, found: list[GridShape], dtype: str, limit: int | None) -> Iterator[GridShape]:
    """The grids, best first; memory, which takes longer to work out than time, is asked for where it decides."""
    cost = {grid: _rounded(seconds(product, grid, dtype), 9) for grid in found}
    for _, equal in groupby(sorted(found, key=cost.__getitem__), cost.__getitem__):
        held = {grid: memory(product, grid, dtype) for grid in equal}
        fitting = [grid for grid, nbytes in held.items() if limit is None or nbytes <= limit]
        yield from sorted(fitting, key=lambda grid: (-grid.size, _rounded(held[grid], 2), grid.y, -grid.z))


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


def _rounded(value: float, digits: int) -> float:
    """Nine digits: costs that are equal compare equal however they were added up. Two: so do sizes whose parts differ
    by a row."""
    return float(f"{value:.{digits}g}")
