"""What was measured, or stated, of a machine, and what is read between it: GEMMs, passes over memory, collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from math import exp, log, log2
from typing import NamedTuple

FORMS = ("nn", "nt", "tn", "tt")
"""Of a GEMM, as in BLAS: whether A and B are transposed."""


@dataclass(frozen=True)
class GemmPoints:
    """Flop/s of GEMMs of some sizes: the i-th of them is m[i], n[i], k[i], with flops[i].

    Between the points the rate is interpolated, its logarithm in those of m, n and k. If each m was measured with each
    n and each k (a grid), linearly along each of the three; else all points count, by one over their squared distance.
    A size outside has the rate of the nearest inside: of the border of the grid, or of the box of scattered points.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    flops: tuple[float, ...]

    def rate(self, m: int, n: int, k: int) -> float:
        """Flop/s.

            >>> round(GemmPoints((64, 256), (64, 64), (64, 64), (1e9, 4e9)).rate(128, 64, 10))
            2000000000
        """
        at = tuple(min(max(log2(max(size, 1)), line[0]), line[-1]) for size, line in zip((m, n, k), self._lines))
        return self._on_grid(at) if self._grid else self._scattered(at)

    @cached_property
    def _points(self) -> list[tuple[float, float, float]]:
        return [(log2(m), log2(n), log2(k)) for m, n, k in zip(self.m, self.n, self.k)]

    @cached_property
    def _lines(self) -> list[list[float]]:
        """The m, n and k that there are, ascending, as logarithms."""
        return [sorted({point[dim] for point in self._points}) for dim in range(3)]

    @cached_property
    def _grid(self) -> dict[tuple[float, ...], float]:
        """Point -> logarithm of its rate; empty if the points are no grid."""
        found: dict[tuple[float, ...], float] = dict(zip(self._points, map(log, self.flops)))
        rows, cols, depths = map(len, self._lines)
        return found if len(found) == rows * cols * depths else {}

    def _on_grid(self, at: tuple[float, ...]) -> float:
        corners = [_around(value, line) for value, line in zip(at, self._lines)]
        total = 0.0
        for (m, of_m), (n, of_n), (k, of_k) in product(*corners):
            total += of_m * of_n * of_k * self._grid[m, n, k]
        return exp(total)

    def _scattered(self, at: tuple[float, ...]) -> float:
        m, n, k = at
        weights = total = 0.0
        for (pm, pn, pk), rate in zip(self._points, self.flops):
            squared = (pm - m) ** 2 + (pn - n) ** 2 + (pk - k) ** 2
            if not squared:
                return rate
            weights += 1 / squared
            total += log(rate) / squared
        return exp(total / weights)


def _around(value: float, line: list[float]) -> list[tuple[float, float]]:
    """The points of a line on both sides of a value, with their weights; one of them, if the value is one."""
    after = bisect_right(line, value)
    if after == len(line) or line[after - 1] == value:
        return [(line[after - 1], 1.0)]
    first, last = line[after - 1], line[after]
    share = (value - first) / (last - first)
    return [(first, 1.0 - share), (last, share)]


class GemmLaw(NamedTuple):
    """seconds = overhead + flop / rate. overhead: seconds of a GEMM; rate: flop/s."""

    rate: float
    overhead: float


@dataclass(frozen=True)
class Gemms:
    """Of one dtype: a law for all forms, or points for each form that was measured ("nn", "nt", "tn", "tt")."""

    law: GemmLaw | None = None
    forms: Mapping[str, GemmPoints] = field(default_factory=dict)

    def seconds(self, m: int, n: int, k: int, flop: float, form: str) -> float:
        """A form without points takes as long as "nn", or, without that, as the first one that has some."""
        if self.law is not None:
            return self.law.overhead + flop / self.law.rate
        if not flop:
            return 0.0
        points = self.forms.get(form) or self.forms.get("nn") or next(iter(self.forms.values()))
        return flop / points.rate(m, n, k)


class Pass(NamedTuple):
    """seconds = overhead + bytes / rate. overhead: seconds of a pass; rate: bytes/s, read and written."""

    overhead: float
    rate: float


class InSteps(NamedTuple):
    """Seconds that these take more in a step of training than in a loop of their own, as between Python, with caches
    that others have used meanwhile; below 0: less.

    action   a GEMM or a pass, 0 at least;   inside   a collective inside a node;   across   one across nodes
    """

    action: float = 0.0
    inside: float = 0.0
    across: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Seconds of a collective of one kind of group, by bytes that a rank receives (sends, if more), ascending.

    Between two sizes the logarithm of the seconds is interpolated in that of the bytes; larger ones have the bandwidth
    of the last, smaller ones take as long as the first. No size counts for more than a larger one took: what took
    longer was disturbed.

    stride   ranks between neighbours of those groups; 0: it holds for all
    """

    operation: str
    inside: int
    nodes: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    stride: int = 0

    def price(self, nbytes: float) -> float:
        """Seconds.

            >>> Measured("all_gather", 4, 1, (100, 10000), (1e-5, 1e-3)).price(1000)
            0.0001
        """
        if nbytes >= self.nbytes[-1]:
            return self.seconds[-1] * (nbytes / self.nbytes[-1])
        after = bisect_right(self.nbytes, nbytes)
        if not after:
            return self._rising[0]
        first, last = self._rising[after - 1], self._rising[after]
        share = log(nbytes / self.nbytes[after - 1]) / log(self.nbytes[after] / self.nbytes[after - 1])
        return min(first * (last / first) ** share, last)

    @cached_property
    def _rising(self) -> list[float]:
        return list(accumulate(reversed(self.seconds), min))[::-1]
