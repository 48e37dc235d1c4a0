"""Timings freed of jumps of a clock, the slowest rank's; ranks that are slow are named. With made-up clocks."""

from itertools import count

import pytest

from pmm3d.errors import Pmm3dError
from pmm3d.tools.tune.sampling import LEAST_POINTS, Sampler, Share, plausible, slow_ranks


class Clock:
    """Each call of `work` takes so many seconds; `jumps`: what the clock does besides, by the number of the call."""

    def __init__(self, seconds, jumps=None):
        self.now, self.seconds, self.calls, self.jumps = 1e3, seconds, count(), jumps or {}

    def __call__(self):
        return self.now

    def work(self):
        self.now += self.seconds + self.jumps.get(next(self.calls), 0.0)


def sampler_of(comm, clock, **options):
    sampler = Sampler(comm, clock=clock, **options)
    sampler.meet = lambda idle=False: comm.Barrier()
    return sampler


@pytest.mark.parametrize("samples, kept", [
    ([1.0, 1.1, 0.9], [1.0, 1.1, 0.9]), ([1.0, -5.0, 1.2], [1.0, 1.2]), ([0.0, 2.0], [2.0]),
    ([1.0, 1.0, 101.0], [1.0, 1.0]), ([1.0, 1.0, 99.0], [1.0, 1.0, 99.0]), ([1.0, 500.0], [1.0]),
    ([float("inf"), 1.0, float("nan")], [1.0]), ([-1.0, 0.0], []), ([], []), ([3.0], [3.0]),
])
def test_what_a_clock_that_jumps_gives_is_thrown_away(samples, kept):
    assert plausible(samples) == kept


@pytest.mark.parallel([3], thorough=[1])
def test_the_slowest_rank_counts(comm):
    clock = Clock(1e-2 * (1 + comm.rank))
    sampler = sampler_of(comm, clock)
    with sampler.section("gemm", 1e3):
        assert sampler.measure(clock.work) == pytest.approx(1e-2 * comm.size)
    assert sampler.medians == {"gemm": [pytest.approx(clock.seconds)]} and sampler.thrown == 0


@pytest.mark.parallel([3])
def test_a_rank_that_waits_has_no_figure_of_its_own(comm):
    clock = Clock(1e-2)
    sampler = sampler_of(comm, clock, share=Share(3.0, comm.rank == 0))
    assert sampler.measure_busy(clock.work) == pytest.approx(3e-2)
    assert sampler.medians[""] == [pytest.approx(1e-2 if comm.rank == 0 else float("nan"), nan_ok=True)]


@pytest.mark.parallel([1])
def test_a_section_has_what_earlier_ones_left_and_no_more(comm):
    clock = Clock(1.0)
    sampler = sampler_of(comm, clock)
    with sampler.section("gemm", 20.0):
        sampler.measure(clock.work)
    with sampler.section("passes", 20.0):
        assert sum(sampler.measure(clock.work) is not None for _ in range(9)) == 7
    assert clock.now - 1e3 <= 2 * 20.0 + 5


@pytest.mark.parallel([3], thorough=[1])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_jump_on_one_rank_is_thrown_away_there(comm, jump):
    clock = Clock(1e-2, {3: jump} if comm.rank == 0 else {})
    sampler = sampler_of(comm, clock)
    assert sampler.measure(clock.work) == pytest.approx(1e-2)
    assert sampler.thrown == (comm.rank == 0)


@pytest.mark.parallel([3], thorough=[1])
def test_a_clock_that_stands_still_on_one_rank_is_an_error_on_all(comm):
    clock = Clock(1e-2 if comm.rank else 0.0)
    with pytest.raises(Pmm3dError, match="9 timings in a row were not positive"):
        sampler_of(comm, clock).measure(clock.work)


@pytest.mark.parallel([3], thorough=[1])
def test_the_fastest_rank_says_how_often_work_is_repeated(comm):
    """Whose core is its own: what another one was kept waiting is not the work's."""
    clock = Clock(1e-3, {1: 50.0} if comm.rank == 1 else {})
    sampler_of(comm, clock).measure(clock.work, sample_seconds=1e-2)
    assert next(clock.calls) == 2 + 3 * 10


@pytest.mark.parallel([3], thorough=[1])
def test_all_ranks_leave_off_when_the_time_of_one_is_up(comm):
    clock = Clock(1.0 if comm.rank == 0 else 0.1)
    sampler = sampler_of(comm, clock, budget=0.5)
    with sampler.section("gemm", 20.0):
        found = [sampler.measure(clock.work) for _ in range(4)]
    assert found == [pytest.approx(1.0), pytest.approx(1.0), None, None] and sampler.left_out == 2
    assert len(sampler.medians["gemm"]) == 2
    with sampler.section("passes", 20.0):
        assert sampler.measure(clock.work) is not None


@pytest.mark.parallel([1])
def test_what_is_done_before_is_not_in_the_time_and_short_work_is_repeated(comm):
    clock, before = Clock(1e-4), Clock(0.0)
    sampler = sampler_of(comm, clock)

    def prepare():
        clock.now += 5.0
        before.work()

    assert sampler.measure(clock.work, prepare, sample_seconds=1e-3) == pytest.approx(1e-4)
    assert next(before.calls) == next(clock.calls) == 2 + 3 * 10


@pytest.mark.parallel([4])
def test_ranks_that_share_a_core_compute_one_on_each_and_the_others_are_not_slow(comm):
    """Ranks 1 and 3 have nothing to do: what ranks 0 and 2 take is stretched, and rank 2 alone is slow."""
    clock = Clock({0: 1.0, 2: 3.0}.get(comm.rank, 50.0))
    sampler = Sampler(comm, clock=clock, share=Share(2.0, comm.rank % 2 == 0))
    with sampler.section("gemm", 1e9):
        assert [sampler.measure_busy(clock.work) for _ in range(LEAST_POINTS)] == [6.0] * LEAST_POINTS
    assert (next(clock.calls) > 0) == (comm.rank % 2 == 0)
    medians = [each["gemm"] for each in comm.allgather(sampler.medians)]
    assert [slow.rank for slow in slow_ranks("gemm", [*medians, medians[0], medians[0]])] == [2]


def test_a_rank_is_slow_if_it_is_on_most_points():
    even = [1.0, 2.0, 3.0]
    assert slow_ranks("gemm", [even, even, even, even]) == []
    assert slow_ranks("gemm", [even, even, [9.0, 2.0, 3.0], even]) == []
    [slow] = slow_ranks("gemm", [even, [3.0, 6.0, 3.0], even, even])
    assert (slow.rank, slow.section, slow.ratio) == (1, "gemm", 3.0)
    none = [float("nan")] * 3
    assert [one.rank for one in slow_ranks("gemm", [even, none, [9.0, 9.0, 9.0], none, even])] == [2]
    assert slow_ranks("gemm", []) == slow_ranks("gemm", [[], []]) == []
