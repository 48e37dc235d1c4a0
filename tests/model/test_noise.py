"""pmm3d.model.simulation.noise: the slowest of many ranks."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.model.simulation.noise import expected_largest, slowest

ranks = st.integers(1, 10**6)


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


@looped("count", [7, 64, 1000])
def test_the_mean_of_the_largest_of_random_draws(count):
    draws = np.random.default_rng(14).standard_normal((20_000, count)).max(axis=1)
    assert abs(draws.mean() - expected_largest(count)) < 4 * draws.std() / math.sqrt(len(draws))


@given(ranks)
def test_between_the_median_and_the_bound_for_large_numbers(count):
    """The largest value has a distribution skewed to the right, so its mean is above its median. It is below sqrt(2 ln
    P)."""
    median = NormalDist().inv_cdf(0.5 ** (1 / count))
    assert median - 1e-9 <= expected_largest(count) <= math.sqrt(2 * math.log(count)) + 1e-9


@given(ranks, ranks)
def test_more_ranks_are_slower(one, other):
    few, many = sorted((one, other))
    assert expected_largest(few) <= expected_largest(many)


def test_very_many_ranks():
    """Compared with the asymptotic mean of Gumbel's law, whose error decreases as 1 / ln P."""
    count = 10**12
    quantile = NormalDist().inv_cdf(1 - 1 / count)
    gumbel = quantile + 0.5772156649 / quantile
    assert expected_largest(count) == pytest.approx(gumbel, rel=2e-3)


def test_no_noise_and_one_rank_change_nothing():
    assert slowest(0.0, 32768) == slowest(0.3, 1) == 1
    assert slowest(0.01, 100) == pytest.approx(1 + 0.025075936)


@looped("sigma", [-0.1, float("nan"), float("inf")])
def test_a_noise_that_is_none_is_refused(sigma):
    with pytest.raises(Pmm3dError, match="0 or more"):
        slowest(sigma, 8)


@looped("count", [0, -3, 10**12 + 1])
def test_ranks_that_are_none_are_refused(count):
    with pytest.raises(Pmm3dError, match="must be from 1 to"):
        expected_largest(count)
