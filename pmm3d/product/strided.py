"""Copies between evenly repeated pieces of two matrices: packing, unpacking and local copies of a tile move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, NumpyLibrary, by_rows
from ..layout import LOW_PRECISION
from ..layout.distribution import Strided

RUN_BYTES = 32
"""numpy copies a run of at least so many bytes as one element: 64 x 64 blocks of float64 in two thirds of the time."""
MOST_BYTES = 2**31
"""Largest element of numpy."""
ACROSS, ALONG = 256, 32
"""Elements of a block of a transposition, in the direction of the reads and of the writes: a third of the time of one
assignment."""


def copy_strided(library: NumpyLibrary, source: Array, target: Array, rows: Sequence[Strided],
                 cols: Sequence[Strided], beta: complex = 0) -> None:
    """target = beta target + source, in these rows and columns: `here` in the source, `there` in the target.

    Low precision is computed in float32 and rounded once. If beta is 0, the target is not read.
    """
    def scaled_sum(part: Array, added: Array) -> Array:
        return library.astype(part, "float32") * beta + library.astype(added, "float32")

    low = library.dtype(target) in LOW_PRECISION
    for of_rows in rows:
        for of_cols in cols:
            piece = _view(library, source, of_rows, of_cols, there=False)
            place = _view(library, target, of_rows, of_cols, there=True)
            if beta == 0:
                _copy(piece, place)
            elif low:
                for part, added in [(place, piece)] if place.ndim == 2 else zip(place, piece):
                    by_rows(library, scaled_sum, part, part, added)
            else:
                if beta != 1:
                    place *= beta
                place += piece


def _view(library: NumpyLibrary, array: Array, rows: Strided, cols: Strided, there: bool) -> Array:
    """A view (times, rows, times, columns), or (rows, columns) if nothing repeats."""
    row, col = (rows.there, cols.there) if there else (rows.here, cols.here)
    if rows.times == cols.times == 1:
        return array[row : row + rows.length, col : col + cols.length]
    down, right = library.strides(array)
    row_step, col_step = (rows.step_there, cols.step_there) if there else (rows.step_here, cols.step_here)
    return library.as_strided(array[row:, col:], (rows.times, rows.length, cols.times, cols.length),
                              (row_step * down, down, col_step * right, right))


def _copy(piece: Array, place: Array) -> None:
    if not isinstance(piece, np.ndarray) or not isinstance(place, np.ndarray):  # a dry run scatters an array of numpy
        place[...] = piece
        return
    size, run = piece.itemsize, piece.shape[-1]
    lies_so, goes_so = (run == 1 or array.strides[-1] == size for array in (piece, place))
    if lies_so and goes_so and RUN_BYTES <= run * size < MOST_BYTES and piece.ndim == 4:
        kind = f"V{run * size}"
        piece, place = piece.view(kind), place.view(kind)
    elif piece.ndim == 2 and not (lies_so and goes_so) and min(piece.shape) > ALONG:
        _transpose(piece, place)
        return
    place[...] = piece


def _transpose(piece: np.ndarray, place: np.ndarray) -> None:
    rows, cols = piece.shape
    across, along = (ACROSS, ALONG) if piece.strides[0] < piece.strides[1] else (ALONG, ACROSS)
    for row in range(0, rows, across):
        for col in range(0, cols, along):
            within = slice(row, row + across), slice(col, col + along)
            place[within] = piece[within]
