"""In which order operands and C had best lie for a GEMM, from what `pmm3d tune blas` measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import log
from typing import NamedTuple

ORDERS = tuple("".join(orders) for orders in product("nt", repeat=3))
"""Of A, B and C: each by rows, "n", or by columns, "t"."""
EQUAL = 0.01
"""GEMMs whose times differ by less are equal: the first of ORDERS is taken."""
NEAR = 2.0
"""Times as large, or as small, that each dim of a GEMM may be to go by one that was measured."""
BY_ROWS, BY_COLUMNS = "C", "F"
LETTERS = {BY_ROWS: "n", BY_COLUMNS: "t"}


class Timed(NamedTuple):
    """A GEMM C (m, n) = A (m, k) B (k, n) that was timed: seconds by each of ORDERS."""

    m: int
    n: int
    k: int
    dtype: str
    seconds: Mapping[str, float]


def nearest(timed: Iterable[Timed], dtype: str, **dims: int) -> Timed | None:
    """The GEMM of that type whose dims are nearest to these, of m, n and k; None if none is NEAR. Of equally near ones
    the one with most operations.

        >>> timed = [Timed(64, 512, 512, "float32", {}), Timed(2048, 512, 512, "float32", {})]
        >>> nearest(timed, "float32", m=1500, k=512).m, nearest(timed, "float32", m=300)
        (2048, None)
    """
    found = []
    for gemm in timed:
        away = [abs(log(max(1, getattr(gemm, dim)) / max(1, size))) for dim, size in dims.items()]
        if gemm.dtype == dtype and max(away) <= log(NEAR):
            found.append((sum(away), -gemm.m * gemm.n * gemm.k, gemm[:3], gemm))
    return min(found)[-1] if found else None


def best_orders(gemm: Timed, a: str = "nt", b: str = "nt", c: str = "nt") -> str:
    """The fastest of the orders that are left open.

        >>> gemm = Timed(64, 8, 8, "float32", dict(zip(ORDERS, (1.0, 0.9, 2.0, 2.0, 1.0, 0.5, 2.0, 2.0))))
        >>> best_orders(gemm), best_orders(gemm, a="n"), best_orders(gemm, c="n")
        ('tnt', 'nnt', 'nnn')
    """
    open_ones = [orders for orders in ORDERS if orders[0] in a and orders[1] in b and orders[2] in c]
    least = min(gemm.seconds[orders] for orders in open_ones)
    return next(orders for orders in open_ones if gemm.seconds[orders] <= least * (1 + EQUAL))
