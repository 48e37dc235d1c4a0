"""Random numbers that depend only on the seed and the global index, so a matrix is the same on every grid.

Each element is a hash of its index by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Each rank computes its block
without communication, on the host or on a device. Bits, uniform numbers and integers are the same in all libraries.
Normal numbers agree to rounding, because each library has its own inverse of the distribution function.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import Pmm3dError
from ..layout import LOW_PRECISION, Box
from .libraries import library_of
from .numpy_library import DEVICE_ELEMENTS, Array, NumpyLibrary
from .threads import parallel_rows

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The factors of SplitMix64."""
DISTRIBUTIONS = ("uniform", "normal", "integers")


def _word(words: Array, value: int) -> np.uint64 | int:
    """Return 64 bits as a number for arithmetic with these words. Words of torch are signed."""
    return np.uint64(value) if _unsigned(words) else value - 2**64 * (value >= 2**63)


def at_least(words: Array, limit: int) -> Array:
    """Whether each word, as an unsigned number, is at least the limit."""
    return words >= np.uint64(limit) if _unsigned(words) else (words ^ -(2**63)) >= limit - 2**63


def _unsigned(words: Array) -> bool:
    return isinstance(words.dtype, np.dtype)


def _right(words: Array, count: int) -> Array:
    """Logical right shift: vacated bits are zero."""
    if _unsigned(words):
        return words >> np.uint64(count)
    return (words >> count) & (2 ** (64 - count) - 1)


def _mix(words: Array) -> Array:
    words = (words ^ _right(words, 30)) * _word(words, FACTORS[0])
    words = (words ^ _right(words, 27)) * _word(words, FACTORS[1])
    return words ^ _right(words, 31)


def bits(index: Array, seed: int, stream: int = 0) -> Array:
    """Return 64 random bits for each index. Streams of one seed are independent.

    index   uint64, or int64 of torch, from `NumpyLibrary.words`
    """
    return _mix((index + _word(index, 1)) * _word(index, GOLDEN) + _word(index, start_of(seed, stream)))


def start_of(seed: int, stream: int) -> int:
    """Return the initial state of a stream, 64 bits. Each number advances the state by GOLDEN."""
    streams = _mix(np.array([stream + 1], np.uint64) * np.uint64(GOLDEN))
    return int(_mix(np.array([int(seed) % 2**64], np.uint64) ^ streams)[0])


def indices(library: NumpyLibrary, rows: Array, columns: int, c0: int, c1: int) -> Array:
    """Return row * columns + column, for words of rows, and the columns from c0 to c1 - 1."""
    return rows[:, None] * _word(rows, columns) + library.words(c0, c1)


def sixteen(library: NumpyLibrary, words: Array, number: int) -> Array:
    """Return 16 of the bits of each word, as int32 from 0 to 65535. number: 0 to 3, of independent bits."""
    return library.astype(_right(words, 16 * number) if number else words, "int32") & 0xFFFF


def uniform(library: NumpyLibrary, index: Array, seed: int, stream: int = 0) -> Array:
    """Return a uniform number from 0 to 1 for each index, as float64. Arguments as in `bits`."""
    return (library.astype(_right(bits(index, seed, stream), 11), "float64") + 0.5) * 2.0**-53


def _real(library: NumpyLibrary, index: Array, seed: int, stream: int, distribution: str) -> Array:
    if distribution == "integers":
        drawn = bits(index, seed, stream)
        halves = _right(drawn, 32) * _word(drawn, 4) + (drawn & _word(drawn, 2**32 - 1))  # 2^32 is 4 modulo 9
        return library.astype(halves % _word(drawn, 9), "float64") - 4
    unit = uniform(library, index, seed, stream)
    return 2 * unit - 1 if distribution == "uniform" else library.special("ndtri")(unit)


def fill_by(values: Callable[[Array], Array], out: Array, box: Box, columns: int, rows: Array | None = None) -> None:
    """Fill `out` with values(indices) for a box of a matrix.

    columns   columns of the whole matrix; the index of an element is row * columns + column
    rows      number of each row, from `NumpyLibrary.words`; default: the rows of the box

    Blocks of rows are filled by several threads.
    """
    library = library_of(out)

    def draw(part: slice) -> None:
        own = library.words(box.r0 + part.start, box.r0 + part.stop) if rows is None else rows[part]
        out[part] = values(indices(library, own, columns, box.c0, box.c1))

    parallel_rows(library, draw, out.shape, library.slice_elements or DEVICE_ELEMENTS)


def fill(out: Array, box: Box, columns: int, seed: int, distribution: str) -> None:
    """Fill `out` with the elements in a box of a random matrix.

    Parameters
    ----------
    columns
        Number of columns of the whole matrix.
    distribution
        "uniform" in (-1, 1), "normal" (mean 0, variance 1), or "integers" from -4 to 4. Both parts of complex elements
        are drawn. Low precision is rounded to float32 first.

    Examples
    --------
    >>> out = np.empty((2, 3))
    >>> fill(out, Box(4, 6, 0, 3), 3, seed=1, distribution="integers")
    >>> out
    array([[-1.,  3., -2.],
           [-1.,  3.,  4.]])
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise Pmm3dError(f"a seed is a whole number; got {seed!r}")
    if distribution not in DISTRIBUTIONS:
        raise Pmm3dError(f"unknown distribution {distribution!r}; there are {', '.join(DISTRIBUTIONS)}")
    library = library_of(out)
    dtype = library.dtype(out)

    def draw(index: Array) -> Array:
        values = _real(library, index, seed, 0, distribution)
        if dtype.startswith("complex"):
            values = values + 1j * _real(library, index, seed, 1, distribution)
        return library.astype(values, "float32") if dtype in LOW_PRECISION else values

    fill_by(draw, out, box, columns)


def drawn(library: NumpyLibrary, box: Box, dtype: str, columns: int, seed: int, distribution: str) -> Array:
    """Return a new array, filled by `fill`. An array of a device is filled on the device."""

    def on_host() -> np.ndarray:
        out = NumpyLibrary().empty(box.shape, "float32" if dtype == "bfloat16" else dtype)
        fill(out, box, columns, seed, distribution)
        return out

    if library.on_host:
        return library.made(box.shape, dtype, on_host)
    out = library.empty(box.shape, dtype)
    fill(out, box, columns, seed, distribution)
    return out
