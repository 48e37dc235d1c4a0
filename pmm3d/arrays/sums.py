"""Sums of arrays in a given order, and products of low precision. The bits of a sum are the same on all ranks.

Low precision is summed in float32 and rounded once, because its rounding errors would accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import prod
from typing import Any, Protocol

from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES
from .threads import by_rows, copy_into, parallel_rows


class WorkArrays(Protocol):
    """A Workspace or a Slab, which lends work arrays."""

    def borrow(self, shape: tuple[int, ...], dtype: str, library: Any) -> AbstractContextManager[Any]: ...


@cache
def check_gemm_types(a: str, b: str, c: str) -> None:
    """Raise DTypeError for types of A, B and C that no BLAS multiplies. A BLAS would misread the elements."""
    if a not in MATRIX_DTYPES or a != b or (c != a and (c != "float32" or a not in LOW_PRECISION)):
        raise DTypeError(
            f"gemm: A is {a}, B {b} and C {c}. The three are of one type of {', '.join(MATRIX_DTYPES)}; C "
            "may be float32 where A and B are float16 or bfloat16. Convert first"
        )


def widened_gemm(library: Any, a: Any, b: Any, c: Any, alpha: complex, beta: complex, work: WorkArrays) -> None:
    """Multiply float32 copies of float16 operands. C is float16, or a float32 accumulator."""
    with work.borrow(a.shape, "float32", library) as wide_a, work.borrow(b.shape, "float32", library) as wide_b:
        copy_into(library, a, wide_a)
        copy_into(library, b, wide_b)
        if library.dtype(c) == "float32":
            library.gemm(wide_a, wide_b, c, alpha, beta, work)
            return
        with work.borrow(c.shape, "float32", library) as wide_c:
            if beta != 0:
                copy_into(library, c, wide_c)
            library.gemm(wide_a, wide_b, wide_c, alpha, beta, work)
            copy_into(library, wide_c, c)


def scale(library: Any, c: Any, beta: complex) -> None:
    """Compute C = beta C, rounded once. If beta is 0, C is not read.

    >>> import numpy as np
    >>> from pmm3d.arrays import NumpyLibrary
    >>> c = np.ones((1, 2))
    >>> scale(NumpyLibrary(), c, 3)
    >>> c
    array([[3., 3.]])
    """
    if not library.has_data:
        library.passed("scale", c, *([] if beta == 0 else [c]))
    elif beta == 0:
        c[...] = 0
    elif beta != 1 and library.dtype(c) in LOW_PRECISION:
        by_rows(library, lambda part: library.astype(part, "float32") * beta, c, c)
    elif beta != 1:
        library.xp.multiply(c, beta, out=c)


def sum_in_order(library: Any, parts: Sequence[Any], out: Any, beta: complex = 0) -> None:
    """Compute out = beta out + parts[0] + parts[1] + ..., in this order. Low precision is summed in float32.

    All arrays have one shape; `out` may be strided, and may be one of the first two parts. Parts of low
    precision may have an `out` of float32, and vice versa.

        >>> import numpy as np
        >>> from pmm3d.arrays import NumpyLibrary
        >>> out = np.ones((1, 2))
        >>> sum_in_order(NumpyLibrary(), [np.ones((1, 2)), np.ones((1, 2))], out, beta=3)
        >>> out
        array([[5., 5.]])
    """
    if not library.has_data:
        return
    low = library.dtype(out) in LOW_PRECISION or library.dtype(parts[0]) in LOW_PRECISION
    add = _add_widened if low else _add
    if library.slice_elements is None or prod(out.shape) <= library.slice_elements:
        add(library, parts, out, beta)
    else:
        parallel_rows(library, lambda rows: add(library, [part[rows] for part in parts], out[rows], beta), out.shape)


def add_up(library: Any, parts: Sequence[Any], out: Any, beta: complex = 0) -> None:
    """As `sum_in_order`, for sums outside a collective: a dry run records a pass.

    >>> import numpy as np
    >>> from pmm3d.arrays import NumpyLibrary
    >>> out = np.ones((1, 2))
    >>> add_up(NumpyLibrary(), [out, np.ones((1, 2))], out)
    >>> out
    array([[2., 2.]])
    """
    if library.has_data:
        sum_in_order(library, parts, out, beta)
    else:
        library.passed("add", out, *([] if beta == 0 else [out]), *parts)


def rounded_gemm(library: Any, a: Any, b: Any, c: Any, alpha: complex, beta: complex, work: WorkArrays) -> None:
    """Compute C = alpha A B + beta C for a float32 accumulator C. The product is rounded once to low precision."""
    with work.borrow(tuple(c.shape), library.dtype(a), library) as product:
        library.gemm(a, b, product, alpha, 0, work)
        add_up(library, [product], c, beta)


def _add_widened(library: Any, parts: Sequence[Any], out: Any, beta: complex) -> None:
    total = sum((library.astype(part, "float32") for part in parts[1:]), library.astype(parts[0], "float32"))
    out[...] = total if beta == 0 else beta * library.astype(out, "float32") + total


def _add(library: Any, parts: Sequence[Any], out: Any, beta: complex) -> None:
    add = library.xp.add
    if beta != 0:
        scale(library, out, beta)
        parts = [out, *parts]
    if len(parts) == 1:
        out[...] = parts[0]
        return
    add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        add(out, part, out=out)
