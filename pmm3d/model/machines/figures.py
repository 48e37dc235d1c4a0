"""Measured or published figures of a machine, with interpolation: GEMMs, passes over memory, collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from math import exp, log, log2
from typing import NamedTuple

FORMS = ("nn", "nt", "tn", "tt")
"""Forms of a GEMM as in BLAS: whether A and B are transposed."""


@dataclass(frozen=True)
class GemmPoints:
    """Rates of GEMMs: flops[i] flop/s for the sizes m[i], n[i], k[i]. Each m occurs once with each n and each k.

    Between the points, the logarithm of the rate is interpolated linearly in the logarithms of m, n and k. Outside of
    the points, the rate is that of the border.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    flops: tuple[float, ...]

    def rate(self, m: int, n: int, k: int) -> float:
        """Return the flop/s of a GEMM.

        >>> round(GemmPoints((64, 256), (64, 64), (64, 64), (1e9, 4e9)).rate(128, 64, 10))
        2000000000
        """
        at = (min(max(log2(max(size, 1)), line[0]), line[-1]) for size, line in zip((m, n, k), self._lines))
        corners = product(*map(_around, at, self._lines))
        return exp(sum(of_m * of_n * of_k * self._rates[m, n, k] for (m, of_m), (n, of_n), (k, of_k) in corners))

    @cached_property
    def _lines(self) -> list[list[float]]:
        """Logarithms of the different m, n and k, ascending."""
        return [sorted({log2(size) for size in sizes}) for sizes in (self.m, self.n, self.k)]

    @cached_property
    def _rates(self) -> dict[tuple[float, float, float], float]:
        """Logarithm of the rate by the logarithms of m, n, k."""
        return {(log2(m), log2(n), log2(k)): log(rate) for m, n, k, rate in zip(self.m, self.n, self.k, self.flops)}


def _around(value: float, line: list[float]) -> list[tuple[float, float]]:
    """Return the two points around a value on a line, with their weights, or the one point that equals the value."""
    after = bisect_right(line, value)
    if after == len(line) or line[after - 1] == value:
        return [(line[after - 1], 1.0)]
    first, last = line[after - 1], line[after]
    share = (value - first) / (last - first)
    return [(first, 1.0 - share), (last, share)]


class GemmLaw(NamedTuple):
    """seconds = overhead + flop / rate, with the overhead in seconds and the rate in flop/s."""

    rate: float
    overhead: float


@dataclass(frozen=True)
class Gemms:
    """Times of GEMMs of one dtype: a law for all forms, or points for each measured form ("nn", "nt", "tn", "tt")."""

    law: GemmLaw | None = None
    forms: Mapping[str, GemmPoints] = field(default_factory=dict)

    def seconds(self, m: int, n: int, k: int, flop: float, form: str) -> float:
        """Return the seconds of a GEMM. A form without points has those of "nn", or else those of the first form."""
        if self.law is not None:
            return self.law.overhead + flop / self.law.rate
        if not flop:
            return 0.0
        points = self.forms.get(form) or self.forms.get("nn") or next(iter(self.forms.values()))
        return flop / points.rate(m, n, k)


class Pass(NamedTuple):
    """seconds = overhead + bytes / rate, with the overhead in seconds. The bytes are those read and written."""

    overhead: float
    rate: float


class InSteps(NamedTuple):
    """Additional seconds of an action in a training step, compared with a loop of this action; negative: fewer seconds.

    action   of a GEMM or a pass, at least 0
    inside   of a collective within a node
    across   of a collective between nodes
    """

    action: float = 0.0
    inside: float = 0.0
    across: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Seconds of a collective of one kind of group, by the larger of the bytes that a rank receives and sends.

    The sizes ascend. Between two sizes, the logarithm of the seconds is interpolated in the logarithm of the bytes.
    Larger messages have the bandwidth of the last size. Smaller messages take as long as the first size. If a size took
    longer than a larger size, its measurement was disturbed, and the seconds of the larger size replace it.

    stride   distance of neighbours in rank numbers; 0: any
    """

    operation: str
    inside: int
    nodes: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    stride: int = 0

    def price(self, nbytes: float) -> float:
        """Return the seconds for this number of bytes.

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
