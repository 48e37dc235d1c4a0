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
WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "complex64": "complex128"}
"""Element type of A and B -> the wider type that their product may have."""
WIDENED_DEPTH = 512
"""Columns of A and rows of B that a GEMM copies to a wider type at a time.

All rows of A are copied, so each element is copied once, and the BLAS reads C once for each 512 steps of its sums.
"""
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


def multiplied_in(dtype: str, result: str = "", on_host: bool = True, rounded: bool = False) -> str:
    """Element type in which a GEMM multiplies. If it is not `dtype`, the GEMM copies A and B to this type.

    No BLAS on the host multiplies float16. A BLAS on a device writes float32 from low precision.

    dtype, result   types of A and B, and of C (default: the same)
    rounded         whether the product may be rounded to `dtype` before it is added to C

        >>> multiplied_in("float16"), multiplied_in("bfloat16"), multiplied_in("bfloat16", "float32")
        ('float32', 'bfloat16', 'float32')
        >>> multiplied_in("float16", "float32", on_host=False), multiplied_in("float32", "float64", on_host=False)
        ('float16', 'float64')
    """
    if dtype in LOW_PRECISION:
        copied = dtype == "float16" or (result not in ("", dtype) and not rounded)
        return "float32" if on_host and copied else dtype
    return result or dtype


def check_product_dtypes(a: str, b: str, out: str | None, wide: bool = False, name: str = "out") -> None:
    """Raise DTypeError if the operands have different dtypes.

    wide   whether C may have the wider type of `WIDER`
    name   argument that has the type of C

        >>> check_product_dtypes("float32", "float32", "float64", wide=True)
    """
    if a != b or out not in (None, a, WIDER.get(a) if wide else a):
        names = f"A is {a}, B is {b}" + ("" if out is None else f", {name} is {out}")
        narrow = {high: " and ".join(low for low in WIDER if WIDER[low] == high) for high in WIDER.values()}
        wider = ", ".join(f"{high} for {lows}" for high, lows in narrow.items())
        allowed = f". C may also have a wider type: {wider}" if wide else ""
        raise DTypeError(f"{names}: convert them to one type; pmm3d does not mix types{allowed}")
