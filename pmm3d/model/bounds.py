"""The bytes that no algorithm for a product can do without."""

from __future__ import annotations

from math import sqrt

from ..layout import itemsize

Product = tuple[int, int, int]
"""m, n, k."""


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
