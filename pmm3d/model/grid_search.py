"""Which grids are worth a price: all of a number of ranks, or those of up to so many, by an estimate where they are too
many to be priced one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest
from math import isqrt

from .product_costs import ProductCosts

Sizes3 = tuple[int, int, int]

ALL_PRICED = 128
"""Ranks up to which every grid of more than half of them is priced."""
PRICED = 400
"""Grids of more ranks that are priced, besides those of exactly that many: the best by the estimate."""
EVERY = 32
"""Sizes of an axis up to which all are looked at; of larger ones those without prime factors above `PRIMES`."""
PRIMES = (2, 3, 5)
NO_LIMIT = 2**63
"""Bytes of memory that nothing exceeds."""


def shapes_of(ranks: int) -> list[Sizes3]:
    """Every (x, y, z) of exactly that many ranks.

        >>> len(shapes_of(8)), shapes_of(3)
        (10, [(1, 1, 3), (1, 3, 1), (3, 1, 1)])
    """
    found = []
    for x in _divisors(ranks):
        found += [(x, y, ranks // (x * y)) for y in _divisors(ranks // x)]
    return found


def shapes_up_to(costs: ProductCosts, ranks: int, limit: int) -> list[Sizes3]:
    """Grids of more than half of the ranks, one of which is the best of all, or within 3% of it.

    Up to 128 ranks these are all of them. Beyond, all grids of exactly that many, and of the others the 400 that are
    best by an estimate. An estimate is made for those in which no axis but one of even sizes could be longer: it has
    sizes without large prime factors along two axes, and as much as fits along the third.

    limit   bytes that a rank may hold: what the 400 are chosen from keeps it
    """
    if ranks <= ALL_PRICED:
        return [shape for number in range(ranks // 2 + 1, ranks + 1) for shape in shapes_of(number)]
    estimate, others = Estimate(costs), _longest(ranks)
    if limit < NO_LIMIT:
        others = {shape for shape in others if sum(costs.held(*shape).values()) <= limit}
    return list({*shapes_of(ranks), *nsmallest(PRICED, others, key=lambda shape: estimate.seconds(*shape))})


def _longest(ranks: int) -> set[Sizes3]:
    """Grids with two smooth sizes, and as much as fits along the third axis."""
    even = [size for size in range(1, ranks + 1) if size <= EVERY or _smooth(size)]
    found = set()
    for one in even:
        for two in even:
            rest = ranks // (one * two)
            if not rest:
                break
            if 2 * one * two * rest > ranks:
                found.add((one, two, rest))
                found.add((one, rest, two))
    return found


class Estimate:
    """Seconds of a product on a grid, from straight lines: GEMMs at the rate of a typical block, and the collectives of
    an axis from two prices of the machine."""

    def __init__(self, costs: ProductCosts):
        self._costs, (m, n, k) = costs, costs.product
        side = max(1, round((m * n * k / costs.ranks) ** (1 / 3)))
        self._points = max(1, costs.size * side * side // 4), max(1, costs.size * side * side * 4)
        block = min(m, side), min(n, side), min(k, side)
        self._rate = costs.gemm(*block) / max(1, block[0] * block[1] * block[2])
        self._lines: dict[tuple[str, int, int], tuple[float, float]] = {}

    def seconds(self, x: int, y: int, z: int) -> float:
        m, n, k = self._costs.product
        rows, cols, depth = -(-m // z), -(-n // x), -(-k // y)
        size, found = self._costs.size, self._rate * rows * cols * depth
        along = (("all_gather", x, 1, rows * depth), ("reduce_scatter", y, x, rows * cols),
                 ("all_gather", z, x * y, depth * cols))
        for operation, ranks, stride, block in along:
            if ranks > 1:
                start, slope = self._line(operation, ranks, stride)
                found += start + slope * size * block * (ranks - 1) / ranks
        return found

    def _line(self, operation: str, ranks: int, stride: int) -> tuple[float, float]:
        """(seconds of no bytes, of each byte)."""
        key = operation, ranks, min(stride, self._costs.run)
        if key not in self._lines:
            group, price = self._costs.group(ranks, stride), self._costs.machine.collective_seconds
            few, many = self._points
            short, long = (price(operation, group, nbytes + 1) for nbytes in (few, many))
            slope = max(0.0, (long - short) / (many - few))
            self._lines[key] = max(0.0, short - slope * few), slope
        return self._lines[key]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _smooth(number: int) -> bool:
    for prime in PRIMES:
        while number % prime == 0:
            number //= prime
    return number == 1


def fewest_ranks(held_of: Callable[[int], Callable[[Sizes3], int]], ranks: int, limit: int) -> int | None:
    """The least number of ranks above that of which a grid of at most so many holds no more than the limit; None if
    none does up to a thousand times as many. Exact up to some hundreds, within 2% above.

    held_of   of a number of ranks: the bytes that a grid's fullest rank holds
    """
    over, fits = ranks, ranks
    while not _fits(held_of(fits), fits, limit):
        over, fits = fits, 2 * fits
        if fits > 1024 * ranks:
            return None
    while fits - over > 1:
        middle = (over + fits) // 2
        if _fits(held_of(middle), middle, limit):
            fits = middle
        else:
            over = middle
    return fits


def _fits(held: Callable[[Sizes3], int], ranks: int, limit: int) -> bool:
    return any(held((x, y, ranks // (x * y))) <= limit for x, y in _pairs(ranks))


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    sizes = [size for size in range(1, ranks + 1) if size <= EVERY or _smooth(size)]
    for x in sizes:
        for y in sizes:
            if x * y > ranks:
                break
            yield x, y
