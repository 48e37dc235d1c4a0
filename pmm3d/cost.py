"""What a product costs on a grid: bytes that each rank moves, its work, its memory; the best grid; the lower bound.

Exact volumes are in `product.ProductPlan`; here are the figures that rank grids, for the busiest rank.
"""

from __future__ import annotations

from math import sqrt

from .arrays import itemsize
from .errors import GridError
from .layout import GridShape

FLOPS = 5e10
"""Multiply-adds count two: flop/s that a rank is taken to reach when grids are ranked."""
BANDWIDTH = 2e9
"""Bytes/s that a rank is taken to receive when grids are ranked."""


def _ceil(size: int, parts: int) -> int:
    return -(-size // parts)


def volumes(product, grid: GridShape, dtype: str) -> dict[str, float]:
    """Bytes that a rank receives along each axis, with divisible sizes: (G-1)/G of the block gathered or reduced."""
    m, n, k = product
    size = itemsize(dtype)
    blocks = {
        "x": m * k / (grid.z * grid.y),
        "y": m * n / (grid.z * grid.x),
        "z": k * n / (grid.y * grid.x),
    }
    return {axis: size * block * (getattr(grid, axis) - 1) / getattr(grid, axis) for axis, block in blocks.items()}


def memory(product, grid: GridShape, dtype: str) -> int:
    """Bytes on the fullest rank: shards of A, B and C, and the gathered blocks and partial sums of the product."""
    m, n, k = product
    rows, cols, depth = _ceil(m, grid.z), _ceil(n, grid.x), _ceil(k, grid.y)
    shards = (rows * depth) / grid.x + (depth * cols) / grid.z + (rows * cols) / grid.y
    gathered = rows * depth * (grid.x > 1) + depth * cols * (grid.z > 1) + 2 * rows * cols * (grid.y > 1)
    return int(itemsize(dtype) * (shards + gathered))


def seconds(product, grid: GridShape, dtype: str) -> float:
    """Modelled time without overlap, for nominal rates: enough to rank grids, not to predict a run."""
    m, n, k = product
    flops = 2 * _ceil(m, grid.z) * _ceil(n, grid.x) * _ceil(k, grid.y)
    return flops / FLOPS + sum(volumes(product, grid, dtype).values()) / BANDWIDTH


def grids(ranks: int) -> list[GridShape]:
    """Every Gx x Gy x Gz of exactly that many ranks."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [GridShape(x, y, ranks // (x * y)) for x in divisors for y in divisors if ranks % (x * y) == 0]


def ranked_grids(product, ranks: int, dtype: str = "float64", limit: int | None = None) -> list[GridShape]:
    """Grids of exactly that many ranks, best first. Equal ones: fewer bytes of memory, then the larger z, then x."""
    fitting = [grid for grid in grids(ranks) if limit is None or memory(product, grid, dtype) <= limit]
    return sorted(fitting, key=lambda grid: (_rounded(seconds(product, grid, dtype)), memory(product, grid, dtype),
                                             grid.y, -grid.z))


def best_grid(product, ranks: int, dtype: str = "float64", limit: int | None = None) -> GridShape:
    """The grid of least modelled time on at most that many ranks, so that it may leave some idle.

    Raises GridError if no grid keeps the fullest rank within `limit` bytes.
    """
    candidates = [ranked[0] for used in range(ranks, ranks // 2, -1)
                  if (ranked := ranked_grids(product, used, dtype, limit))]
    if not candidates:
        smallest = min(memory(product, grid, dtype) for grid in grids(ranks))
        raise GridError(
            f"no grid of {ranks} ranks keeps m, n, k = {product} ({dtype}) within {limit:,} bytes a rank; "
            f"the least is {smallest:,}. Use more ranks, or max_workspace= in matmul to go through k in steps"
        )
    return min(candidates, key=lambda grid: _rounded(seconds(product, grid, dtype)))


def lower_bound(product, ranks: int, dtype: str = "float64") -> float:
    """Bytes that some rank must receive in any algorithm that starts and ends with one copy of the matrices, spread
    evenly: Al Daas, Ballard, Grigori, Kumar, Rouse, SPAA 2022, theorem 3 (tight, independent of memory)."""
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


def _rounded(value: float) -> float:
    """Nine digits: equal costs compare equal however they were added up."""
    return float(f"{value:.9g}")
