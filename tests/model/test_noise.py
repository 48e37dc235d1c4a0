"""pmm3d.model.simulation.noise: the slowest of many ranks."""

import math
from statistics import NormalDist

import pytest
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.model.simulation.noise import expected_largest, slowest


@looped(
    "count,mean",
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (4, 1.0293753730),
        (5, 1.1629644736),
        (10, 1.5387527308),
        (100, 2.5075936),
    ],
)
def test_known_means(count, mean):
    """Of 2 and 3 in closed form, and of 5: 5/(4 sqrt pi) + 15 asin(1/3)/(2 pi^1.5). The others are from tables."""
    assert expected_largest(count) == pytest.approx(mean, abs=5e-8)
    if count == 5:
        closed = 5 / (4 * math.sqrt(math.pi)) + 15 * math.asin(1 / 3) / (2 * math.pi**1.5)
        assert expected_largest(count) == pytest.approx(closed, abs=1e-12)


def test_very_many_ranks():
    """Compared with the asymptotic mean of Gumbel's law, whose error decreases as 1 / ln P."""
    count = 10**12
    quantile = NormalDist().inv_cdf(1 - 1 / count)
    gumbel = quantile + 0.5772156649 / quantile
    assert expected_largest(count) == pytest.approx(gumbel, rel=2e-3)


def test_no_noise_and_one_rank_change_nothing():
    assert slowest(0.0, 32768) == slowest(0.3, 1) == 1
    assert slowest(0.01, 100) == pytest.approx(1 + 0.025075936)


@looped(
    "call, words",
    [
        *((lambda sigma=sigma: slowest(sigma, 8), "0 or more") for sigma in (-0.1, math.nan, math.inf)),
        *((lambda count=count: expected_largest(count), "from 1 to") for count in (0, -3, 10**12 + 1)),
    ],
)
def test_what_is_no_noise_and_no_number_of_ranks_is_refused(call, words):
    with pytest.raises(Pmm3dError, match=words):
        call()
