"""Timings of all ranks, with invented clocks: the slowest rank, the limit of a section, ranks that share cores. Timings
of pmm3d bench on stand-in devices: many products in a timing, the limit of the devices, another library's matmul."""

import io
from itertools import count, product
from statistics import median
from types import SimpleNamespace

import pytest
import standin
from loops import looped
from rich.console import Console

from pmm3d import Grid
from pmm3d.errors import DTypeError, OutOfMemoryError
from pmm3d.layout import GridShape
from pmm3d.model import ProductPlan
from pmm3d.tools import timing
from pmm3d.tools.bench import measure
from pmm3d.tools.bench.result import Case
from pmm3d.tools.bench.tables import print_results
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


@looped("form, dtype", product(FORMS, ("float32", "float64", "bfloat16")))
def test_operands_are_stored_as_their_form_says(form, dtype):
    operands = GemmOperands(library_for(dtype), dtype, [(16, 32, 64), (4, 64, 2)])
    a, b, c = operands.matrices((16, 32, 64), form)
    assert (tuple(a.shape), tuple(b.shape), tuple(c.shape)) == ((16, 64), (64, 32), (16, 32))
    assert [operands.library.is_contiguous(matrix) for matrix in (a, b)] == [flag == "n" for flag in form]
    operands.gemm((16, 32, 64), form)()
    found, wanted = (operands.library.to_numpy(each).astype(float) for each in (c, a @ b))
    assert abs(found - wanted).max() < 0.1


# pmm3d bench


@pytest.mark.parallel([3], thorough=[1])
def test_a_timing_on_a_device_is_of_many_products_after_which_it_is_done(comm, monkeypatch):
    monkeypatch.setattr(measure, "DEVICE_SQUARE", 32)
    monkeypatch.setattr(timing, "DEVICE_SECONDS", 0.02)
    timings, left, in_a_row = [], [], timing.in_a_row

    def watched(work, library, times):
        seconds = in_a_row(work, library, times)
        timings.append(times)
        left.append(standin.get_current_stream().queue.asked() - standin.get_current_stream().queue.ended)
        return seconds

    monkeypatch.setattr(timing, "in_a_row", watched)
    result = measure.run(Case.named(24, 24, 24, "float32", "standin", repeat=3), comm)
    assert result.verified and len(result.seconds) == 3
    assert max(timings) > 1 and set(left) == {0}
    assert (result.unit, result.cores) == ("devices", comm.size)
    assert f"{comm.size} devices x " in shown(result) and " x stand-in" in shown(result)
    assert " cuBLAS 13.1.0" in shown(result) and result.environment.advice is None
    assert result.limit.core_shape == (24, 24, 24) and result.limit.square == 32
    assert result.bytes_sent == result.bytes_model


def shown(result):
    out = io.StringIO()
    print_results([result], Console(file=out, width=120, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("m, shown_twice", [(32, False), (24, True)])
@pytest.mark.parallel([1])
def test_the_rate_of_the_cube_is_measured_and_shown_once(comm, monkeypatch, m, shown_twice):
    rates = iter(range(10, 20))
    monkeypatch.setattr(measure, "SQUARE", 32)
    monkeypatch.setattr(measure, "core_rate", lambda *_: float(next(rates)))
    result = measure.run(Case.named(m, 32, 32, "float32", "numpy", repeat=1), comm)
    assert result.limit.core_gflops == (12 if shown_twice else 11)
    assert result.limit.square_core_gflops == 11
    assert ("32 cubed: 11" in shown(result)) == ("of 32 cubed on all cores" in shown(result)) == shown_twice


def test_memory_of_work_arrays_counts_if_the_product_has_them(monkeypatch):
    plan = ProductPlan(64, 64, 64, "float64", GridShape(1, 1, 2))
    monkeypatch.setattr(measure, "free_memory", lambda grid: (plan.memory - plan.workspace, "n7"))
    with Grid.dry((1, 1, 2)) as grid:
        for options in ({"shared": True}, {"panels": 2}, {"max_workspace": 1}):
            measure._check_memory(Case(64, 64, 64, **options), grid)
        with pytest.raises(OutOfMemoryError, match="host n7"):
            measure._check_memory(Case(64, 64, 64), grid)


@pytest.mark.parallel([1])
def test_a_reference_runs_in_turns_with_the_product(comm, monkeypatch):
    monkeypatch.setattr(measure, "SQUARE", 64)
    turns, seconds = [], timing.Timer.seconds
    monkeypatch.setattr(
        timing.Timer,
        "seconds",
        lambda self, work, times=0: (turns.append(work.__name__), seconds(self, work, times))[1],
    )
    case = Case.named(48, 32, 40, "float32", "numpy", repeat=4, reference="torch")
    result = measure.run(case, comm)
    assert turns == ["multiply", "<lambda>", "<lambda>", "multiply"] * 2
    beside = result.reference
    assert beside.name == "torch.matmul" and len(beside.seconds) == 4
    assert beside.share == pytest.approx(median(beside.seconds) / median(result.seconds))
    assert beside.share == pytest.approx(result.gflops / beside.gflops)
    assert f"{beside.share:.3f} of the rate of torch.matmul" in shown(result)
    assert result.as_json()["reference"]["share"] == beside.share and result.as_json()["tf32"] is False
    alone = measure.run(case._replace(reference=""), comm, limit=result.limit)
    assert alone.reference is None and alone.as_json()["reference"] is None and "beside" not in shown(alone)


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    "dtype, text",
    [
        ("bfloat16", "numpy matrices have the types float16, float32"),
        ("tf32", "--reference numpy: only torch:cuda rounds to tf32"),
    ],
)
def test_a_reference_that_has_not_the_type_is_refused(dtype, text):
    with pytest.raises(DTypeError, match=text):
        measure.reference_of(Case.named(8, 8, 8, dtype, "torch", reference="numpy"))


@pytest.mark.parallel([1])
def test_the_reference_rounds_to_tf32_while_it_runs_alone():
    switch, seen = SimpleNamespace(fp32_precision="ieee"), []
    torch = SimpleNamespace(backends=SimpleNamespace(cuda=SimpleNamespace(matmul=switch)))
    measure._rounded(SimpleNamespace(xp=torch), lambda: seen.append(switch.fp32_precision))()
    assert seen == ["tf32"] and switch.fp32_precision == "ieee"
