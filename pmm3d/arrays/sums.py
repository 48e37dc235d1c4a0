"""Sums of arrays in a given order, so that they are bitwise the same wherever they are formed."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import LOW_PRECISION
from .low_precision import scale
from .numpy_library import Array, NumpyLibrary

CACHED_ELEMENTS = 2**15
"""Elements of the slices that sums work through on the host: they stay in the cache of a core."""


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
    rows, cols = out.shape
    step = max(1, CACHED_ELEMENTS // max(1, cols)) if library.on_host else max(1, rows)
    low = library.dtype(out) in LOW_PRECISION or library.dtype(parts[0]) in LOW_PRECISION
    add = _add_widened if low else _add
    if rows <= step:
        add(library, parts, out, beta)
        return
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        add(library, [part[chunk] for part in parts], out[chunk], beta)


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
