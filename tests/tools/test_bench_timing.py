"""pmm3d bench on stand-in devices: many products in a timing, the limit of the devices, and another library's
matmul."""

import io
from statistics import median
from types import SimpleNamespace

import pytest
import standin
from rich.console import Console

from pmm3d import Grid
from pmm3d.errors import DTypeError, OutOfMemoryError
from pmm3d.layout import GridShape
from pmm3d.model import ProductPlan
from pmm3d.tools import timing
from pmm3d.tools.bench import measure
from pmm3d.tools.bench.result import Case
from pmm3d.tools.bench.tables import print_results


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
