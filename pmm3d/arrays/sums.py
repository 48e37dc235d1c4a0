"""Sums of arrays in a given order, and products of wider copies. The bits of a sum are the same on all ranks.

Low precision is summed in float32 and rounded once, because its rounding errors would accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES, WIDENED_DEPTH, WIDER
from .threads import COPIED, by_rows, copy_into, in_tiles, parallel_rows


class WorkArrays(Protocol):
    """A Workspace or a Slab, which lends work arrays."""

    def borrow(self, shape: tuple[int, ...], dtype: str, library: Any) -> AbstractContextManager[Any]: ...


class Factors(NamedTuple):
    """Factors of out = beta out + alpha part.

    beta        if it is 0, `out` is not read
    alpha       if it is 0, the part is not read
    conjugated  whether the conjugate of the part is added

    Examples
    --------
    >>> from pmm3d.arrays import Factors
    >>> Factors(alpha=2)  # out = 2 part
    Factors(beta=0, alpha=2, conjugated=False)
    """

    beta: complex = 0
    alpha: complex = 1
    conjugated: bool = False


@cache
def check_gemm_types(a: str, b: str, c: str) -> None:
    """Raise DTypeError for types of A, B and C that no BLAS multiplies. A BLAS would misread the elements."""
    if a not in MATRIX_DTYPES or a != b or c not in (a, WIDER.get(a)):
        wider = ", ".join(f"{high} for {low}" for low, high in WIDER.items())
        raise DTypeError(
            f"gemm: A is {a}, B {b} and C {c}. The three are of one type of {', '.join(MATRIX_DTYPES)}; C "
            f"may also be of a wider type than A and B: {wider}. Convert first"
        )


def widened_gemm(
    library: Any,
    a: Any,
    b: Any,
    c: Any,
    alpha: complex,
    beta: complex,
    work: WorkArrays,
    wide: str,
    conjugated: tuple[bool, bool] = (False, False),
) -> None:
    """Multiply copies of A and B in a wider type, `WIDENED_DEPTH` columns of A and rows of B at a time.

    C is of the wider type, or of low precision. Then it is copied too, and rounded once.
    """
    if library.dtype(c) != wide:
        with work.borrow(c.shape, wide, library) as wide_c:
            if beta != 0:
                copy_into(library, c, wide_c)
            widened_gemm(library, a, b, wide_c, alpha, beta, work, wide, conjugated)
            copy_into(library, wide_c, c)
        return
    depth = a.shape[1]
    most = min(depth, WIDENED_DEPTH)
    with (
        _room(library, a, (a.shape[0], most), wide, work) as wide_a,
        _room(library, b, (most, b.shape[1]), wide, work) as wide_b,
    ):
        for start in range(0, depth, WIDENED_DEPTH):
            size = min(WIDENED_DEPTH, depth - start)
            left, right = wide_a[:, :size], wide_b[:size]
            copy_into(library, a[:, start : start + size], left)
            copy_into(library, b[start : start + size], right)
            library.gemm(left, right, c, alpha, 1 if start else beta, work, conjugated=conjugated)


@contextmanager
def _room(library: Any, like: Any, shape: tuple[int, int], dtype: str, work: WorkArrays) -> Iterator[Any]:
    """As a context: a work array of this shape. It is stored by columns if `like` is, because the BLAS conjugates only
    what it also transposes."""
    row_stride, col_stride = library.strides(like)
    by_columns = row_stride == 1 != col_stride
    with work.borrow(shape[::-1] if by_columns else shape, dtype, library) as array:
        yield array.T if by_columns else array


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


def add_scaled(library: Any, part: Any, out: Any, factors: Factors) -> None:
    """Compute out = beta out + alpha part, or alpha times the conjugate of the part. Low precision is computed in
    float32 and rounded once. If beta is 0, `out` is not read.

        >>> import numpy as np
        >>> from pmm3d.arrays import NumpyLibrary
        >>> out = np.ones((1, 2), "complex64")
        >>> add_scaled(NumpyLibrary(), np.array([[1, 2j]], "complex64"), out, Factors(3, 2, conjugated=True))
        >>> out
        array([[5.+0.j, 3.-4.j]], dtype=complex64)
    """
    if not library.has_data:
        library.passed("add", out, *([] if factors.beta == 0 else [out]), part)
        return

    def add(part: Any, out: Any) -> None:
        _add_scaled(library, part, out, *factors)

    def add_rows(rows: slice) -> None:
        if library.name == "numpy":
            in_tiles(part[rows], out[rows], add, ordered=True)
        else:
            add(part[rows], out[rows])

    if library.name == "numpy" and out.ndim == 2 and out.strides[0] < out.strides[1]:
        part, out = part.T, out.T
    if library.slice_elements is None:
        add(part, out)
    else:
        parallel_rows(library, add_rows, out.shape, COPIED)


def _add_scaled(library: Any, part: Any, out: Any, beta: complex, alpha: complex, conjugated: bool) -> None:
    if library.dtype(out) in LOW_PRECISION:
        total = library.astype(part, "float32") * alpha
        out[...] = total if beta == 0 else beta * library.astype(out, "float32") + total
        return
    if beta == 0 and (conjugated or alpha != 1) and library.name == "numpy":
        if conjugated:
            library.xp.conj(part, out=out)
            part = out
        if alpha != 1:
            library.xp.multiply(part, alpha, out=out)
        return
    part = library.conjugate(part) if conjugated else part
    part = part if alpha == 1 else part * alpha
    if beta == 0:
        out[...] = part
    else:
        scale(library, out, beta)
        library.xp.add(out, part, out=out)


def rounded_gemm(library: Any, a: Any, b: Any, c: Any, alpha: complex, beta: complex, work: WorkArrays) -> None:
    """Compute C = alpha A B + beta C for a float32 C. The product is rounded once to low precision."""
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
