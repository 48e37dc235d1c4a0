"""pmm3d.model.interval: the best interval between checkpoints."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped
from scipy.optimize import minimize_scalar

from pmm3d import Pmm3dError
from pmm3d.model.interval import advice, daly, lost_share, young

writes = st.floats(0.01, 1000)
failures = st.floats(100, 1e7)


@given(writes, failures)
def test_daly_is_close_to_the_best_there_is(write, mtbf):
    least = minimize_scalar(lost_share, bounds=(1e-6, 50 * mtbf), args=(write, mtbf), method="bounded").fun
    assert lost_share(daly(write, mtbf), write, mtbf) <= least + 0.004


def test_values():
    assert young(300.0, 24 * 3600.0) == 7200
    assert daly(300.0, 24 * 3600.0) == pytest.approx(7200 * (1 + math.sqrt(1 / 576) / 3 + 1 / 5184) - 300)
    assert daly(2 * (1 - 1e-9), 1.0) == pytest.approx(2 * (1 + 1 / 3 + 1 / 9) - 2, abs=1e-6)
    assert daly(2.0, 1.0) == daly(5.0, 1.0) == 1.0


def test_the_lost_share_is_that_of_jobs_with_random_failures():
    """200,000 intervals. Each is repeated until it has no failure."""
    interval, write, mtbf, restart = 400.0, 30.0, 2000.0, 60.0
    draws = np.random.default_rng(14)
    seconds = 0.0
    for _ in range(200_000):
        left = interval + write
        while (failure := draws.exponential(mtbf)) < left:
            seconds += failure
            left = restart + interval + write
        seconds += left
    assert 1 - 200_000 * interval / seconds == pytest.approx(lost_share(interval, write, mtbf, restart), rel=0.02)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-3, 1e9), st.floats(0, 1e9))
def test_a_share_is_a_share(interval, write, mtbf, restart):
    assert 0 <= lost_share(interval, write, mtbf, restart) <= 1


@given(writes, failures, st.floats(1e-4, 1e4))
def test_advice_is_in_whole_steps_near_dalys(write, mtbf, step):
    found = advice(write, mtbf, step)
    assert found.steps >= 1 and found.seconds == found.steps * step
    assert found.steps == 1 or abs(found.seconds - daly(write, mtbf)) <= step / 2 * (1 + 1e-9)
    assert found.lost == lost_share(found.seconds, write, mtbf)


@looped(
    "times, steps, words",
    [
        ((3.1, 86400.0, 2.15), 339, ["24 h", "12 min 9 s (Daly)", "every 339 steps", "0.84%"]),
        ((1.0, 100.0, 500.0), 1, ["every step"]),
        ((4000.0, 3600.0, 1.0), 3031, ["the job makes little progress"]),
        ((0.0, 3600.0, 1.0), 1, [f"{0.5 / 36:.2g}%"]),
    ],
)
def test_the_sentence_says_all(times, steps, words):
    found = advice(*times)
    assert found.steps == steps and all(word in found.sentence for word in words)


@looped(
    "times, said",
    [
        ((-1.0, 1.0, 1.0), "write a checkpoint must be 0 or more"),
        ((1.0, 0.0, 1.0), "--mtbf must be positive, got 0.0"),
        ((1.0, math.nan, 1.0), "--mtbf"),
        ((1.0, 1.0, math.inf), "time of a step"),
        ((3.0, 1e308, 1.0), "cannot be counted: give times"),
        ((3.0, 86400.0, 1e-320), "cannot be counted: give times"),
    ],
)
def test_invalid_times_are_refused(times, said):
    with pytest.raises(Pmm3dError, match=said):
        advice(*times)
