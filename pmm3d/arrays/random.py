"""Random numbers that depend on the seed and the global index only: the same matrix on every grid and rank count.

Each element hashes its own index with SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), so any block is made alone.
"""

from __future__ import annotations

import numpy as np

from ..errors import Pmm3dError
from ..layout import Box
from .numpy_library import NumpyLibrary

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
CHUNK = 2**16
"""Numbers that are made at a time: what they take on their way stays in a core's cache."""
DISTRIBUTIONS = ("uniform", "normal", "integers")


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def bits(index: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """64 random bits for each index (uint64). Streams of one seed are independent."""
    start = _mix(np.array([int(seed) % 2**64], np.uint64) ^ _mix(np.array([stream + 1], np.uint64) * GOLDEN))
    return _mix(start + (index + np.uint64(1)) * GOLDEN)


def _real(index: np.ndarray, seed: int, stream: int, distribution: str) -> np.ndarray:
    drawn = bits(index, seed, stream)
    if distribution == "integers":
        return (drawn % np.uint64(9)).astype(np.float64) - 4
    unit = ((drawn >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    if distribution == "uniform":
        return 2 * unit - 1
    from scipy.special import ndtri

    return ndtri(unit)


def fill(out: np.ndarray, box: Box, columns: int, seed: int, distribution: str) -> None:
    """Fill `out` with the elements in a box of a random matrix that has that many columns.

    distribution   "uniform" in (-1, 1), "normal" (mean 0, variance 1), or "integers" from -4 to 4.
                   Complex elements draw both parts.

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
    cols = np.arange(box.c0, box.c1, dtype=np.uint64)
    step = max(1, CHUNK // max(1, len(cols)))
    for start in range(0, out.shape[0], step):
        part = out[start : start + step]
        rows = np.arange(box.r0 + start, box.r0 + start + len(part), dtype=np.uint64)
        index = rows[:, None] * np.uint64(columns) + cols
        if np.iscomplexobj(out):
            part.real = _real(index, seed, 0, distribution)
            part.imag = _real(index, seed, 1, distribution)
        else:
            part[...] = _real(index, seed, 0, distribution)


def drawn(box: Box, dtype: str, columns: int, seed: int, distribution: str) -> np.ndarray:
    """The same as a new array; of float32 where numpy has no such type."""
    out = NumpyLibrary().empty(box.shape, "float32" if dtype == "bfloat16" else dtype)
    fill(out, box, columns, seed, distribution)
    return out
