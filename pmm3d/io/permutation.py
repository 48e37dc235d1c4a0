"""Permutations of 0, 1, ..., n - 1 that are computed, not stored, for the order of an epoch and for held-out rows."""

from __future__ import annotations

from math import isqrt

import numpy as np

ROUNDS = 8
ODD, ODD2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class Permutation:
    """A permutation of `size` numbers by a key, the same on every machine: a Feistel network (Black and Rogaway, 2002).

    Number i is the point (i div b, i mod b) of a rectangle of a x b >= size points. Each round adds a hash of one
    coordinate to the other. Results of at least `size` pass through the rounds again; the rectangle has fewer than
    2 sqrt(size) + 1 such points. The memory is proportional to the numbers in a call.

        >>> Permutation(5, 1, 2)(np.arange(5)).tolist()
        [2, 3, 0, 4, 1]
    """

    def __init__(self, size: int, *key: int):
        self.size = size
        self._b = np.uint64(isqrt(max(0, size - 1)) + 1)
        self._a = np.uint64(-(-max(1, size) // int(self._b)))
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the images of int64 numbers below `size`."""
        return self._walked(numbers, inverse=False)

    def inverse(self, numbers: np.ndarray) -> np.ndarray:
        """Return the preimages of int64 numbers below `size`."""
        return self._walked(numbers, inverse=True)

    def _walked(self, numbers: np.ndarray, inverse: bool) -> np.ndarray:
        images = self._rounds(np.asarray(numbers).astype(np.uint64), inverse)
        while len(outside := np.flatnonzero(images >= self.size)):
            images[outside] = self._rounds(images[outside], inverse)
        return images.astype(np.int64)

    def _rounds(self, numbers: np.ndarray, inverse: bool) -> np.ndarray:
        sides, sizes = list(np.divmod(numbers, self._b)), (self._a, self._b)
        for index in range(ROUNDS)[:: -1 if inverse else 1]:
            side = (index + 1) % 2
            shift = _hash(sides[1 - side], self._keys[index]) % sizes[side]
            sides[side] = (sides[side] + (sizes[side] - shift if inverse else shift)) % sizes[side]
        images: np.ndarray = sides[0] * self._b + sides[1]
        return images


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a 64-bit hash of each value, by multiplications modulo 2^64."""
    mixed: np.ndarray = (values ^ key) * ODD
    mixed ^= mixed >> np.uint64(32)
    mixed *= ODD2
    mixed ^= mixed >> np.uint64(29)
    return mixed
