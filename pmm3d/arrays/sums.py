"""Sums of arrays in a given order, so that they are bitwise the same wherever they are formed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..layout import LOW_PRECISION
from .low_precision import WorkArrays, scale
from .numpy_library import Array, NumpyLibrary
from .threads import parallel_rows


def sum_in_order(library: NumpyLibrary, parts: Sequence[Array], out: Array, beta: complex = 0) -> None:
    """out = beta out + parts[0] + parts[1] + ..., in that order; low precision is added up in float32.

    All arrays are 2D and of one shape; `out` may be strided, and may be one of the first two parts. Parts of low
    precision may have an `out` of float32, and the other way round.

        >>> import numpy as np
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


def add_up(library: NumpyLibrary, parts: Sequence[Array], out: Array, beta: complex = 0) -> None:
    """As `sum_in_order`, beside a collective and not as a part of it: of its own in a dry run.

        >>> import numpy as np
        >>> out = np.ones((1, 2))
        >>> add_up(NumpyLibrary(), [out, np.ones((1, 2))], out)
        >>> out
        array([[2., 2.]])
    """
    if library.has_data:
        sum_in_order(library, parts, out, beta)
    else:
        library.passed("add", out, *([] if beta == 0 else [out]), *parts)


def rounded_gemm(library: NumpyLibrary, a: Array, b: Array, c: Array, alpha: complex, beta: complex,
                 work: WorkArrays) -> None:
    """C = alpha A B + beta C with a low-precision product, rounded once, and a float32 accumulator C."""
    with work.borrow(tuple(c.shape), library.dtype(a), library) as product:
        library.gemm(a, b, product, alpha, 0, work)
        add_up(library, [product], c, beta)


def _add_widened(library: NumpyLibrary, parts: Sequence[Array], out: Array, beta: complex) -> None:
    total = sum((library.astype(part, "float32") for part in parts[1:]), library.astype(parts[0], "float32"))
    out[...] = total if beta == 0 else beta * library.astype(out, "float32") + total


def _add(library: NumpyLibrary, parts: Sequence[Array], out: Array, beta: complex) -> None:
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
