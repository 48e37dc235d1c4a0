"""Names and sizes of element types. This needs no array library."""

from __future__ import annotations

import re
from functools import cache

from ..errors import DTypeError

MATRIX_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""Element types of matrices of numbers."""
LABEL_DTYPE = "int64"
"""Element type of a matrix of labels. Labels can be moved, and compared by losses, but not multiplied."""
LOW_PRECISION = ("float16", "bfloat16")
"""Element types whose products and sums are computed in float32."""
CACHE_LINE = 64
"""Bytes of a cache line."""


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element, from the number of bits in the name of its type.

    Raises DTypeError for types that are no numbers ("object", "str96").

        >>> itemsize("bfloat16"), itemsize("complex128"), itemsize("bool")
        (2, 16, 1)
    """
    bits = "8" if dtype == "bool" else next(iter(re.findall(r"\d+", dtype)), "")
    if not bits or dtype.startswith(("str", "bytes", "void")):
        raise DTypeError(f"elements of the type {dtype} are no numbers, so no message can carry them")
    return int(bits) // 8


def aligned(nbytes: int) -> int:
    """Bytes that an array takes in a work array of several arrays, each of which begins on a cache line.

    >>> aligned(1), aligned(64)
    (64, 64)
    """
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def check_same_dtype(a: str, b: str, out: str | None) -> None:
    """Raise DTypeError if the operands have different dtypes.

    >>> check_same_dtype("float32", "float32", None)
    """
    if a != b or (out is not None and out != a):
        names = f"A is {a}, B is {b}" + ("" if out is None else f", out is {out}")
        raise DTypeError(f"{names}: convert them to one type; pmm3d does not mix types")
