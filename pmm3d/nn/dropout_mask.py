"""The mask of dropout: which elements of a matrix are kept, the same on every grid and in every array library."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of, random
from ..layout import Box

KEPT = ("X z = (row * columns + col + X(1)) * golden + start; z = (z ^ (z >> X(30))) * one; "
        "z = (z ^ (z >> X(27))) * other; z = z ^ (z >> X(31)); kept = z >= limit;")
"""`random.bits` of an element, compared with the limit, in C++."""


def fill_kept(out: Array, box: Box, columns: int, p: float, seed: int, stream: int) -> None:
    """Fill `out` with 0, with probability p, or 1, for the elements in a box of a matrix that has that many columns."""
    library, limit = library_of(out), int(p * 2**64)
    if library.name == "cupy":
        rows, cols = library.words(box.r0, box.r1)[:, None], library.words(box.c0, box.c1)[None, :]
        numbers = columns, random.GOLDEN, random.start_of(seed, stream), *random.FACTORS, limit
        _kernel(library)(rows, cols, *map(np.uint64, numbers), out)
    else:
        random.fill_by(lambda index: random.at_least(random.bits(index, seed, stream), limit), out, box, columns)


@cache
def _kernel(library: NumpyLibrary) -> Any:
    names = "row", "col", "columns", "golden", "start", "one", "other", "limit"
    return library.xp.ElementwiseKernel(", ".join(f"X {name}" for name in names), "K kept", KEPT, "pmm3d_kept")
