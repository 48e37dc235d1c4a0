"""Measured or stated figures of a machine, with interpolation: GEMMs, passes over memory, collectives."""

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
    """Rates of GEMMs: flops[i] flop/s for the sizes m[i], n[i], k[i]. Each m is there with each n and each k, once.

    Between the points the logarithm of the rate is interpolated linearly in the logarithms of m, n and k. Beyond them
    the rate is that of the border.
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
        at = (min(max(log2(max(size, 1)), line[0]), line[-1]) for size, line in zip((m, n, k), self._lines))
        corners = product(*map(_around, at, self._lines))
        return exp(sum(of_m * of_n * of_k * self._rates[m, n, k] for (m, of_m), (n, of_n), (k, of_k) in corners))

    @cached_property
    def _lines(self) -> list[list[float]]:
        """The logarithms of the different m, n and k, ascending."""
        return [sorted({log2(size) for size in sizes}) for sizes in (self.m, self.n, self.k)]

    @cached_property
    def _rates(self) -> dict[tuple[float, float, float], float]:
        """Logarithms of m, n, k -> logarithm of the rate."""
        return {(log2(m), log2(n), log2(k)): log(rate) for m, n, k, rate in zip(self.m, self.n, self.k, self.flops)}


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
    """Further seconds of actions in a training step, compared with a loop of one action; below 0: fewer seconds.

    action   a GEMM or a pass, 0 at least;   inside   a collective inside a node;   across   one across nodes
    """

    action: float = 0.0
    inside: float = 0.0
    across: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Seconds of a collective of one kind of group, by bytes that a rank receives (sends, if more), ascending.

    Between two sizes the logarithm of the seconds is interpolated in the logarithm of the bytes. Larger messages have
    the bandwidth of the last size, smaller ones take as long as the first. A size that took longer than a larger one
    was disturbed, and counts as the larger one.

    stride   distance of neighbours in rank numbers; 0: any
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
