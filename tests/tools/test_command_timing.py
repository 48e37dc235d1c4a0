"""Timings of all ranks, with invented clocks: the slowest rank, the limit of a section, ranks that share cores."""

from itertools import count, product

import pytest
from loops import given

from pmm3d.tools.timing import CoreShare, GemmOperands, Sampler, one_a_core
from pmm3d.tools.tune.rates import FORMS, library_for


class Clock:
    """A clock on which each call of `work` takes `seconds`. extra: more seconds, by the number of the call."""

    def __init__(self, seconds, extra=None):
        self.now, self.seconds, self.calls, self.extra = 1e3, seconds, count(), extra or {}

    def __call__(self):
        return self.now

    def work(self):
        self.now += self.seconds + self.extra.get(next(self.calls), 0.0)


def sampler_of(comm, clock, **options):
    sampler = Sampler(comm, clock=clock, **options)
    sampler.meet = lambda idle=False: comm.Barrier()
    return sampler


@pytest.mark.parallel([3], thorough=[1])
def test_the_slowest_rank_counts(comm):
    clock = Clock(1e-2 * (1 + comm.rank))
    assert sampler_of(comm, clock).measure(clock.work) == pytest.approx(1e-2 * comm.size)


@pytest.mark.parallel([3], thorough=[1])
def test_the_median_of_the_samples_counts(comm):
    clock = Clock(1e-2, {3: 3600.0} if comm.rank == 0 else {})
    assert sampler_of(comm, clock).measure(clock.work) == pytest.approx(1e-2)


@pytest.mark.parallel([1])
def test_a_section_has_what_earlier_ones_left_and_no_more(comm):
    clock = Clock(1.0)
    sampler = sampler_of(comm, clock)
    with sampler.section(20.0):
        sampler.measure(clock.work)
    with sampler.section(20.0):
        assert sum(sampler.measure(clock.work) is not None for _ in range(9)) == 7
    assert clock.now - 1e3 <= 2 * 20.0 + 5


@pytest.mark.parallel([3], thorough=[1])
def test_the_fastest_rank_says_how_often_work_is_repeated(comm):
    """The rank has its own core. Waits of another rank for a core do not count as work."""
    clock = Clock(1e-3, {1: 50.0} if comm.rank == 1 else {})
    sampler_of(comm, clock).measure(clock.work, sample_seconds=1e-2)
    assert next(clock.calls) == 2 + 3 * 10


@pytest.mark.parallel([3], thorough=[1])
def test_all_ranks_stop_if_the_time_of_one_is_up(comm):
    clock = Clock(1.0 if comm.rank == 0 else 0.1)
    sampler = sampler_of(comm, clock, budget=0.5)
    with sampler.section(20.0):
        found = [sampler.measure(clock.work) for _ in range(4)]
    assert found == [pytest.approx(1.0), pytest.approx(1.0), None, None] and sampler.left_out == 2
    with sampler.section(20.0):
        assert sampler.measure(clock.work) is not None


@pytest.mark.parallel([1])
def test_a_point_that_is_needed_is_measured_although_the_time_is_up(comm):
    """With samples of one call each."""
    clock = Clock(1e-3)
    sampler = sampler_of(comm, clock, budget=1e-9)
    with sampler.section(1.0):
        assert [sampler.measure(clock.work, always=always) for always in (False, True, False)] == [
            None,
            pytest.approx(1e-3),
            None,
        ]
    assert sampler.left_out == 2 and next(clock.calls) == 2 + 2 + 3


@pytest.mark.parallel([4])
def test_of_ranks_that_share_a_core_one_works(comm):
    """Ranks 1 and 3 do nothing. The time of the slower of the other two counts for two ranks."""
    clock = Clock({0: 1.0, 2: 3.0}.get(comm.rank, 50.0))
    sampler = Sampler(comm, clock=clock, share=CoreShare(2.0, comm.rank % 2 == 0))
    assert sampler.measure_busy(clock.work) == 6.0
    assert (next(clock.calls) > 0) == (comm.rank % 2 == 0)


def test_ranks_with_cores_of_their_own():
    assert one_a_core([("a", {0, 1, 2})] * 3, 2) == {0, 1}
    assert one_a_core([("a", {0, 1, 2, 3})] * 4, 2) == {0, 1}
    assert one_a_core([("a", {0}), ("b", {0})], 4) == {0, 1}


def test_operands_are_stored_as_their_form_says():
    for form, dtype in product(FORMS, ("float32", "float64", "bfloat16")):
        with given(form=form, dtype=dtype):
            operands = GemmOperands(library_for(dtype), dtype, [(16, 32, 64), (4, 64, 2)])
            a, b, c = operands.matrices((16, 32, 64), form)
            assert (tuple(a.shape), tuple(b.shape), tuple(c.shape)) == ((16, 64), (64, 32), (16, 32))
            assert [operands.library.is_contiguous(matrix) for matrix in (a, b)] == [flag == "n" for flag in form]
            operands.gemm((16, 32, 64), form)()
            found, wanted = (operands.library.to_numpy(each).astype(float) for each in (c, a @ b))
            assert abs(found - wanted).max() < 0.1
