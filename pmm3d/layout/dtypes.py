"""Element types by their names, and their bytes. Known without any array library."""

from __future__ import annotations

import re
from functools import cache

from ..errors import DTypeError

MATRIX_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""What a matrix can hold."""
LABEL_DTYPE = "int64"
"""What a matrix of labels holds, which is moved, and compared by losses, and never multiplied."""
LOW_PRECISION = ("float16", "bfloat16")
"""What is multiplied and added up in float32."""
CACHE_LINE = 64
"""Bytes."""


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element, by the bits in its name.

    Raises DTypeError for other types ("object").

        >>> itemsize("bfloat16"), itemsize("complex128"), itemsize("bool")
        (2, 16, 1)
    """
    bits = "8" if dtype == "bool" else next(iter(re.findall(r"\d+", dtype)), "")
    if not bits:
        raise DTypeError(f"elements of the type {dtype} have no size, so no message can carry them")
    return int(bits) // 8


def aligned(nbytes: int) -> int:
    """Bytes that an array takes of a work array that holds several: each begins on a cache line.

        >>> aligned(1), aligned(64)
        (64, 64)
    """
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def check_same_dtype(a: str, b: str, out: str | None) -> None:
    """Raises DTypeError unless all operands have one dtype.

        >>> check_same_dtype("float32", "float32", None)
    """
    if a != b or (out is not None and out != a):
        names = f"A is {a}, B is {b}" + ("" if out is None else f", out is {out}")
        raise DTypeError(f"{names}: convert them to one type; pmm3d does not mix types")
