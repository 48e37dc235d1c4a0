"""The time of a step that ends with the slowest of many ranks. The times of ranks vary from step to step."""

from __future__ import annotations

from functools import cache
from math import erfc, exp, inf, log, log1p, pi, sqrt

from ...errors import Pmm3dError

REACH, PIECES = 12.0, 64
"""Range of the numerical integral in standard deviations to both sides, and number of points in each. This is enough,
because the integrand is smooth."""
MOST_RANKS = 10**12


@cache
def expected_largest(ranks: int) -> float:
    """Return the mean of the largest of this number of draws from the standard normal distribution.

        E = integral of x P phi(x) Phi(x)^(P-1) dx

    phi and Phi are the density and the distribution function. The value approaches sqrt(2 ln P) only for very large P:
    for P = 100, sqrt(2 ln P) is 3.0.

        >>> [round(expected_largest(ranks), 4) for ranks in (1, 2, 100, 32768)]
        [0.0, 0.5642, 2.5076, 4.1341]

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, 2003, chapter 3.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise Pmm3dError(f"the number of ranks must be from 1 to {MOST_RANKS:,}, got {ranks}")
    if ranks == 1:
        return 0.0
    total, count = 0.0, int(REACH * PIECES)
    for number in range(-count, count + 1):
        x = number / PIECES
        tail = erfc(abs(x) / sqrt(2)) / 2
        total += x * exp((ranks - 1) * (log1p(-tail) if x > 0 else log(tail)) - x * x / 2)
    return ranks * total / (PIECES * sqrt(2 * pi))


def slowest(sigma: float, ranks: int) -> float:
    """Return the time of a step of this number of ranks, divided by the mean time of one rank.

        1 + sigma E(ranks)

    `sigma` is the standard deviation of a rank's time for a step, as a share of its mean.

        >>> slowest(0.02, 1), round(slowest(0.02, 8192), 4)
        (1.0, 1.076)
    """
    if not 0 <= sigma < inf:
        raise Pmm3dError(f"the noise must be a share of a step's time, 0 or more, such as 0.02; got {sigma}")
    return 1 + sigma * expected_largest(ranks)
