"""Verification of C = A B: Freivalds' check with random vectors at any size, and exact comparison at small sizes."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from ..arrays import random
from ..layout import LOW_PRECISION
from .matmul_plan import matmul
from .matrix import DistMatrix
from .relayout import ascending

EXACT_WORK = 2**27
"""Largest m n k for which the whole product is compared on one rank."""
_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_LARGEST_INTEGER = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "complex64": 2**24}
"""Largest integer up to which the type represents all integers. Smaller sums are exact in any order."""


def apply(matrix: DistMatrix, vector: np.ndarray, absolute: bool = False) -> np.ndarray:
    """Return matrix @ vector in double precision on every rank, or |matrix| @ vector if `absolute`. Collective.

    The shard is copied a few rows at a time, to limit memory.
    """
    matrix = ascending(matrix)
    grid, box, library = matrix.grid, matrix.box, matrix.library
    result = np.zeros(matrix.shape[0], vector.dtype)
    if grid.coords is not None and matrix.layout.is_first(grid.coords):
        part = vector[box.c0 : box.c1]
        step = max(1, 2**16 // max(1, box.c1 - box.c0))
        for start in range(0, box.r1 - box.r0, step):
            rows = library.to_numpy(matrix._part((slice(start, start + step), slice(None))))
            rows = np.abs(rows) if absolute else rows
            result[box.r0 + start : box.r0 + start + rows.shape[0]] = rows.astype(vector.dtype) @ part
    return grid.everyone.all_reduce(result, agreed=True).wait()


def freivalds(
    a: DistMatrix, b: DistMatrix, c: DistMatrix, *, trials: int = 3, seed: int = 0, unit: float | None = None
) -> float:
    """Largest |A (B r) - C r| over random vectors r of +-1, in units of the expected rounding error. Collective.

    A product with a result of at most 1 is accepted. A wrong row of C passes one trial with a probability of at most
    1/2, and three trials with at most 1/8 (Freivalds, 1979). The expected error is 4 u sqrt(k) |A| |B| 1 / sqrt(n), for
    rounding errors of random sign. u is `unit` (default: the unit roundoff of the type of C). Partial sums are summed
    first.
    """
    a, b, c = ascending(a), ascending(b), ascending(c)
    k, n = max(1, b.shape[0]), b.shape[1]
    kind = np.complex128 if a.dtype.startswith("complex") else np.float64
    unit = unit or _UNIT_ROUNDOFF.get(c.dtype) or float(np.finfo(c.dtype).eps) / 2
    scale = 4 * unit * (sqrt(k) if c.dtype not in LOW_PRECISION else sqrt(b.grid.shape.size) + sqrt(k) * 2.0**-13)
    expected = scale / sqrt(max(1, n)) * apply(a, apply(b, np.ones(n), True), True)
    expected += np.finfo(np.float64).eps * sqrt(max(1, n * k)) * np.max(expected, initial=0) / scale
    worst = 0.0
    for trial in range(trials):
        signs = random.bits(np.arange(n, dtype=np.uint64), seed, trial) >> np.uint64(63)
        vector = (2 * signs.astype(np.float64) - 1).astype(kind)
        error = np.abs(apply(a, apply(b, vector)) - apply(c, vector))
        if not np.all(np.isfinite(error)):
            return float("inf")
        worst = max(worst, float(np.max(error / np.maximum(expected, np.finfo(np.float64).tiny), initial=0)))
    return worst


def exact_fits(m: int, n: int, k: int, dtype: str) -> bool:
    """Whether a product of small integers is exact in this type, and small enough to compare on one rank."""
    return m * n * k <= EXACT_WORK and 32 * k <= _LARGEST_INTEGER.get(dtype, 2**53)


def exact(a: DistMatrix, b: DistMatrix, **options: Any) -> bool:
    """Multiply integer matrices in the layouts of A and B, and compare each element with numpy's product on one rank.

    Collective. Layouts, type and options are those of the product to be verified.
    """
    factor_a, factor_b = _integers(a, 101), _integers(b, 102)
    c = matmul(factor_a, factor_b, **options).gather(0)
    factor_a, factor_b = factor_a.gather(0), factor_b.gather(0)
    right = True
    if a.grid.rank == 0:
        kind = np.complex128 if a.dtype.startswith("complex") else np.float64
        left, other, product = (a.library.to_numpy(x).astype(kind) for x in (factor_a, factor_b, c))
        right = np.array_equal(left @ other, product)
    return a.grid.comm.bcast(right)


def _integers(like: DistMatrix, seed: int) -> DistMatrix:
    """Random integer matrix, distributed like another matrix. That matrix may be a transposed or conjugated view."""
    stored = like if like.order == "C" else like.T
    made = DistMatrix.random(
        stored.grid,
        stored.shape,
        seed=seed,
        dtype=stored.dtype,
        layout=stored.layout,
        library=stored.library,
        distribution="integers",
    )
    return like._over(made.memory, like.layout, like.grid)
