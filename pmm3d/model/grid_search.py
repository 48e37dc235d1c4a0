"""The grids of a number of ranks, and an estimate that selects the grids to price."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from math import isqrt

from ..layout import WIDENED_DEPTH, GridShape, itemsize, multiplied_in
from .machines import Group
from .machines.laws import counted
from .planning import AUTO
from .product_costs import Product, ProductCosts, Sizes3

ALL_SHAPES = 128
"""Number of ranks up to which `shapes_up_to` returns every grid."""
EVERY = 32
"""With more ranks: every size of an axis up to this one, and larger sizes whose prime factors are in `PRIMES`."""
PRIMES = (2, 3, 5)
LEAST = 5
"""Number of grids that `least_bytes` returns."""
NO_LIMIT = 2**63
"""Bytes of a memory limit that no grid exceeds."""


def shapes_of(ranks: int) -> list[Sizes3]:
    """Return every (x, y, z) of exactly this number of ranks.

    >>> len(shapes_of(8)), shapes_of(3)
    (10, [(1, 1, 3), (1, 3, 1), (3, 1, 1)])
    """
    shapes = []
    for x in _divisors(ranks):
        shapes += [(x, y, ranks // (x * y)) for y in _divisors(ranks // x)]
    return shapes


def grids_4d(ranks: int) -> list[GridShape]:
    """Return every grid with the axes x, y, z and data of exactly this number of ranks.

    >>> len(grids_4d(1024)), len(grids_4d(12))
    (286, 40)
    """
    return sorted(GridShape(*shape, data) for data in _divisors(ranks) for shape in shapes_of(ranks // data))


def shapes_up_to(ranks: int) -> list[Sizes3]:
    """Return grids of more than half of the ranks. Up to `ALL_SHAPES` ranks these are all grids. With more ranks they
    are all grids of exactly this number, and grids with two sizes without large prime factors and the largest third
    size that fits.
    """
    if ranks <= ALL_SHAPES:
        return [shape for number in range(ranks // 2 + 1, ranks + 1) for shape in shapes_of(number)]
    even, shapes = sorted({*range(1, EVERY + 1), *_smooth(ranks)}), {*shapes_of(ranks)}
    for one in even:
        for two in even:
            rest = ranks // (one * two)
            if not rest:
                break
            if 2 * one * two * rest > ranks:
                shapes |= {(one, two, rest), (one, rest, two), (rest, one, two)}
    return list(shapes)


class Estimate:
    """Estimates the seconds of a product on a grid by linear laws. All GEMMs have the rate of a typical block.
    Collectives are interpolated between two prices of the machine. In a decomposed product the messages of A and C run
    during the GEMMs. Each message adds the fixed time of a GEMM and of two actions."""

    def __init__(self, costs: ProductCosts):
        self._costs, (m, n, k), self._size = costs, costs.product, itemsize(costs.dtype)
        side = max(1, round((m * n * k / costs.ranks) ** (1 / 3)))
        self._points = max(1, self._size * side * side // 4), max(1, self._size * side * side * 4)
        block = min(m, side), min(n, side), min(k, side)
        dtype = multiplied_in(costs.dtype)
        self._rate = costs.machine.gemm_seconds(*block, dtype) / max(1, block[0] * block[1] * block[2])
        self._message = 2 * costs.machine.overhead + costs.machine.gemm_seconds(1, 1, 1, dtype)
        self._lines: dict[tuple[str, int, int], tuple[float, float, float, int]] = {}
        self._decomposed = costs.overlap == AUTO and costs.everyone.nodes > 1

    def __call__(self, shape: Sizes3) -> float:
        (x, y, z), (m, n, k) = shape, self._costs.product
        rows, cols, depth = -(-m // z), -(-n // x), -(-k // y)
        a, a_hidden, arriving = self._collective("all_gather", x, 1, rows * depth)
        c, c_hidden, leaving = self._collective("reduce_scatter", y, x, rows * cols)
        b, _, _ = self._collective("all_gather", z, x * y, depth * cols)
        gemm = self._rate * rows * cols * depth
        if self._decomposed:
            gemm += (arriving + leaving) * self._message
            gemm -= min(gemm, a_hidden + c_hidden)
        return a + b + c + gemm

    def _collective(self, operation: str, ranks: int, stride: int, block: int) -> tuple[float, float, int]:
        """Return (seconds, the part of these seconds that can run during a GEMM, number of messages)."""
        if ranks == 1:
            return 0.0, 0.0, 0
        start, slope, hidden, messages = self._line(operation, ranks, stride)
        seconds = start + slope * self._size * block * (ranks - 1) / ranks
        return seconds, hidden * seconds, messages

    def _line(self, operation: str, ranks: int, stride: int) -> tuple[float, float, float, int]:
        """Return (seconds without bytes, seconds of a byte, share that can run during a GEMM, number of messages)."""
        costs, machine = self._costs, self._costs.machine
        key = operation, ranks, min(stride, costs.run)
        if key not in self._lines:
            inside = min(ranks, max(1, costs.run // stride))
            group = Group(ranks, inside, -(-ranks // inside), max(1, machine.ranks_per_node // inside), stride)
            few, many = self._points
            short, long = (machine.collective_seconds(operation, group, nbytes + 1) for nbytes in (few, many))
            slope = max(0.0, (long - short) / (many - few))
            self._lines[key] = (
                max(0.0, short - slope * few),
                slope,
                machine.hidden_share(group),
                counted(operation, ranks, ranks).messages,
            )
        return self._lines[key]


def estimated_bytes(product: Product, dtype: str, shape: Sizes3) -> float:
    """Estimate the bytes on the fullest rank: shards, gathered blocks, partial sums and their messages."""
    (m, n, k), (x, y, z), size = product, shape, itemsize(dtype)
    a, b, c = (m / z) * (k / y), (k / y) * (n / x), (m / z) * (n / x)
    copies = 4 * (c + (m / z + n / x) * min(k / y, WIDENED_DEPTH)) if multiplied_in(dtype) != dtype else 0
    return size * (a * (1 / x + (x > 1)) + b * (1 / z + (z > 1)) + c * (1 / y + 2 * (y > 1))) + copies


def least_bytes(product: Product, dtype: str, shapes: Iterable[Sizes3]) -> list[Sizes3]:
    """Return the `LEAST` grids with the least `estimated_bytes`."""
    return nsmallest(LEAST, shapes, key=lambda shape: estimated_bytes(product, dtype, shape))


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _smooth(most: int) -> list[int]:
    """Return the numbers up to `most` whose prime factors are in `PRIMES`."""
    numbers = [1]
    for prime in PRIMES:
        for number in numbers:  # includes numbers that the loop appends
            if number * prime <= most:
                numbers.append(number * prime)
    return numbers
