"""pmm3d plan train: the ranking, the step of a grid, curves, and a trace compared with that of a run."""

import json
from dataclasses import replace
from functools import partial

import h5py
import numpy as np
import planned as plans
import pytest
from loops import given

from pmm3d import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model.candidates import Candidate, Ranking
from pmm3d.model.machines import as_toml, load
from pmm3d.model.simulation.noise import slowest
from pmm3d.nn.training import planning
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.config import load as config_of
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.tools.plan.curves import AS_IT_IS, VARIANTS, _like, best_grids, curves_of, print_curve, rank_counts
from pmm3d.tools.plan.ranking import as_json
from pmm3d.tools.plan.step import FirstRank, Training
from pmm3d.tools.plan.trace import read_trace, write_trace

pytestmark = pytest.mark.usefixtures("nothing_measured")
CONFIG = """
[data]
file = "nowhere.h5"
batch_size = {batch}
[network]
hidden = [{hidden}]
"""
SAMPLES = ("--features", "64", "--outputs", "32")
TOKENS = """
[data]
file = "none.h5"
batch_size = 64
sequence = 8
[network]
kind = "gpt"
"""


def training(batch=4096, hidden=(512, 256, 512), machine="frontier", noise=0.0, rows=0, **sections):
    config = checked(
        {"data": {"file": "nowhere.h5", "batch_size": batch}, "network": {"hidden": list(hidden)}, **sections}
    )
    return Training.of(config, load(machine), samples=SampleSizes(64, 32, rows=rows), noise=noise)


planned = partial(plans.planned, "train")
refused = partial(plans.refused, "train")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(batch=4096, hidden="512, 256, 512"))
    return path


def test_the_configuration_is_planned_with_the_options(tmp_path, monkeypatch):
    asked = {}

    def ranking(config, ranks, machine, **options):
        asked.update(options, config=config, ranks=ranks, machine=machine)
        best = Candidate(GridShape(1, 1, 1, ranks), 0.25, {"gemm": 0.2, "data": 0.05}, {"weights": 100}, preset="ddp")
        return Ranking("a step of x.toml", ranks, [best], [], 1e9, "float32", 1)

    monkeypatch.setattr("pmm3d.tools.plan.step.rank_training", ranking)
    path = tmp_path / "x.toml"
    path.write_text(TOKENS.replace("[network]", 'documents = "documents"\n[network]'))
    planned(path, "--ranks", 8, "--vocabulary", 50)
    assert tuple(asked["samples"])[:3] == (2, 50, True)
    path.write_text(TOKENS)
    planned(path, "--ranks", 8, "--vocabulary", 50)
    assert tuple(asked["samples"])[:3] == (1, 50, True) and asked["seqs"] == [1, 2, 4] and asked["pipes"] == [1]
    path.write_text(CONFIG.format(batch=64, hidden="32, 32"))
    said = planned(path, "--ranks", 8, "--features", 20, "--classes", 4, "--memory", 10**9, "--top", 3)
    assert asked["config"].network.hidden == [32, 32] and asked["ranks"] == 8 and asked["limit"] == 10**9
    assert tuple(asked["samples"])[:3] == (20, 4, True) and asked["machine"].name == "nominal" and asked["top"] == 12
    assert "Machine nominal (assumed: nothing was measured here" in said and "\n256 rows a second" in said
    assert "Choice: 1x1x1 (data 8) (ddp), 250 ms a step, 100 B on the fullest rank" in said


def test_grids_with_all_axes_are_ranked_and_described(tmp_path, monkeypatch):
    """Also for --grid auto: with the axis pipe, for which no single rank is described, and with seq. Pipelines are
    simulated by as many processes as there are cores, as by this one."""
    monkeypatch.setattr("pmm3d.tools.plan.step.cores", lambda: {0, 1})
    path, figures = tmp_path / "x.toml", tmp_path / "x.json"
    path.write_text(CONFIG.format(batch=64, hidden="64, 64") + "[grid]\nmicro_batches = 4\nschedule = '1f1b'\n")
    said = planned(path, "--ranks", 2, *SAMPLES, "--machine", "nominal", "--grid", "auto", "--json", figures)
    written = json.loads(figures.read_text())
    assert written["grids"][0]["grid"]["pipe"] == 2 and "first_rank" not in written
    here = Training.of(config_of(path), load("nominal"), samples=SampleSizes(64, 32)).ranking(2)
    assert written["grids"] == json.loads(json.dumps(as_json(here)))
    assert "Choice: 1x1x1 (pipe 2) 1f1b" in said and "messages of a pipeline's first rank are not listed" in said
    path.write_text(path.read_text() + "pipe = 2\n")
    assert "is a pipeline, and a single rank of it is not simulated" in refused(
        path, "--ranks", 2, *SAMPLES, "--machine", "nominal", "--grid", "1x1x1", "--trace", tmp_path / "x.trace"
    )
    path.write_text(TOKENS.replace("64", "1") + "layers = 1\n")
    planned(path, "--ranks", 2, "--vocabulary", 64, "--grid", "auto", "--json", figures, "--machine", "nominal")
    written = json.loads(figures.read_text())
    assert any(each["grid"].get("seq") == 2 for each in written["grids"])
    assert written["first_rank"]["grid"] == written["grids"][0]["grid"]


def test_a_named_grid_has_the_further_axes_of_the_configuration(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(TOKENS + "[grid]\nseq = 2\n")
    said = planned(path, "--ranks", 8, "--vocabulary", 64, "--machine", "nominal", "--grid", "2x1x1")
    assert "Choice: 2x1x1 (data 2, seq 2)" in said and "Communication of the first rank" in said


def test_the_rate_counts_the_rows_of_the_batch():
    """6 rows in 4 micro-batches: two of them have 1 row."""
    one = training(batch=6, grid={"micro_batches": 4})
    said = one.in_words(Candidate(GridShape(1, 1, 2), 0.5))
    assert said[0] == "12 rows a second" and said[1].startswith("Grid 1x1x2: a micro-batch of 1 row is split")


def test_a_batch_of_fewer_rows_than_ranks_is_said(config):
    said = planned(config, "--ranks", 8192, *SAMPLES, "--machine", "frontier", "--grid", "ddp")
    assert (
        "Grid 1x1x1 (data 8192): a micro-batch of 4,096 rows is split over data x z = 8,192 ranks, so some "
        "ranks have no row."
    ) in " ".join(said.split())
    assert "have no row" not in planned(config, "--ranks", 8, *SAMPLES, "--machine", "frontier", "--grid", "ddp")


def test_of_large_batches_the_fastest_grids_are_simulated():
    """Activations of 4,194,304 rows fill the small grid of the rough price, and are split on 8,192 ranks."""
    wide = training(batch=2**22, hidden=[16384] * 3)
    wide = replace(wide, samples=SampleSizes(16384, 16384))
    found = wide.ranking(8192, top=8, actions=0).candidates
    other = planning.step_on(GridShape(8, 2, 2, 256), wide.config, wide.machine, samples=wide.samples)
    assert found[0].seconds <= 1.02 * other.seconds


def test_the_first_rank_of_a_grid():
    found = FirstRank.of(training(), GridShape(2, 1, 2, 2))
    shares = found.largest
    assert [share.seconds for share in shares] == sorted((share.seconds for share in shares), reverse=True)
    steps = planning.dry_steps(training().config, load("frontier"), 2**62, SampleSizes(64, 32))
    step = steps.of(GridShape(2, 1, 2, 2), 8)
    gemms = [share for share in shares if share.what.startswith("GEMM")]
    assert sum(share.times for share in gemms) == sum(action.what == "gemm" for action in step.actions)
    assert sum(found.received.values()) == step.received
    assert {*found.alone} == {*found.waits} == {*found.hidden} == {*found.received} == {"x", "z", "data", "all"}


def test_what_is_hidden_and_what_is_waited_for_make_up_a_collective():
    found = FirstRank.of(training(batch=2**16, hidden=(4096, 4096)), GridShape(1, 1, 8))
    assert found.hidden["z"] > 0
    assert found.hidden["z"] + found.waits["z"] == pytest.approx(found.alone["z"])


def test_the_curves():
    told = []
    strong, weak = curves_of(
        training(),
        64,
        [16, 64, 256],
        lambda config, ranks: GridShape(2, 1, 2, ranks // 4),
        lambda done, total: told.append((done, total)),
    )
    assert [point.batch for point in strong.points] == [4096] * 3
    assert [point.batch for point in weak.points] == [1024, 4096, 16384]
    assert told == [(done, 6) for done in range(1, 7)]
    assert strong.points[1].seconds == weak.points[1].seconds
    for curve, more in ((strong, 16), (weak, 1)):
        for point in curve.points:
            assert set(point.seconds) == set(VARIANTS) and point.seconds["none"] >= point.seconds[AS_IT_IS]
        first, *_, last = (point.seconds[AS_IT_IS] for point in curve.points)
        assert curve.efficiency(curve.points[0]) == 1
        assert curve.efficiency(curve.points[2]) == pytest.approx(first / last / more)


def test_grids_like_the_best_one_have_no_axis_of_experts():
    """The ranking chooses it. Ranks along data that share experts are no factor of the others."""
    likes = [*_like(GridShape(1, 1, 2, 4).folded(8), 4, 1), *_like(GridShape(1, 1, 2, 4).folded(4), 16, 2)]
    assert (1, 1, 2, 2) in likes and len(likes) == 5 and {each.expert for each in likes} == {1}


def ddp(config, ranks):
    return GridShape(1, 1, 1, ranks)


def test_a_batch_of_a_curve_is_not_cut_at_the_end_of_the_file():
    """40 rows in batches of up to 64: on 2 ranks 40 rows, on 4 ranks 80."""
    _, weak = curves_of(training(batch=64, rows=40), 2, [2, 4], ddp, lambda done, total: None)
    assert [point.batch for point in weak.points] == [40, 80]


def test_noise_makes_every_step_of_a_curve_longer():
    quiet, noisy = (
        curves_of(training(noise=noise), 8, [8], ddp, lambda done, total: None)[0].points[0].seconds
        for noise in (0.0, 0.1)
    )
    assert {name: seconds * slowest(0.1, 8) for name, seconds in quiet.items()} == pytest.approx(noisy)


def test_what_does_not_fit_is_no_baseline():
    huge = training(batch=64, hidden=(300_000,) * 3)
    strong, _ = curves_of(
        huge,
        1,
        [1, 1024],
        lambda config, ranks: GridShape(1 + ranks // 33, 1 + ranks // 33, 1),
        lambda done, total: None,
    )
    assert "more than 64,000,000,000" in strong.points[0].why_not and strong.points[0].memory > 64e9
    assert strong.points[1].why_not == "" and strong.efficiency(strong.points[1]) == 1


def test_a_point_without_a_grid_is_said(capsys, monkeypatch):
    """Also the first number of ranks at which some ranks have no row."""
    monkeypatch.setenv("COLUMNS", "200")

    def grid_of(config, ranks):
        if ranks == 32:
            raise Pmm3dError("no grid here")
        return ddp(config, ranks)

    few = training(batch=8)
    strong, _ = curves_of(few, 8, [8, 16, 32, 64], grid_of, lambda done, total: None)
    print_curve(strong, few)
    said = capsys.readouterr().out
    assert "32 ranks: no grid here" in said and said.count("have no row") == 1
    assert "Grid 1x1x1 (data 16): a micro-batch of 8 rows" in said


def test_the_numbers_of_ranks_of_a_curve():
    for ranks, asked, counts in (
        (8192, "32768", [512, 1024, 2048, 4096, 8192, 16384, 32768]),
        (48, "16:128", [16, 32, 48, 64, 128]),
        (3, "8", [1, 2, 3, 4, 8]),
        (5, "16:16", [16]),
    ):
        with given(asked=asked):
            assert rank_counts(ranks, asked) == counts
    for asked in ("64:32", "0:8", "many", "8:", "1:2:3", ""):
        with given(asked=asked), pytest.raises(Pmm3dError, match="is not a range of ranks: give the largest number"):
            rank_counts(8, asked)


def test_the_best_grids_of_a_curve_are_like_that_of_the_step(monkeypatch):
    """At each point, few grids are tested: the first by the rough price, and grids like those found before."""
    asked, one = [], training(batch=2**16)

    def ranked(config, ranks, machine, **options):
        asked.append((ranks, options["top"], options["actions"]))
        return planning.rank_training(config, ranks, machine, **options)

    best = one.ranking(64).candidates[0].grid
    monkeypatch.setattr("pmm3d.tools.plan.step.rank_training", ranked)
    grids = [best_grids(one, 64, best)(one.config, ranks) for ranks in (64, 64, 128)]
    assert asked == [(128, 3, 0)] and grids[0] == grids[1] == best and grids[2].size == 128
    like = GridShape(*best[:3], 128 // (best.size // best.data))
    assert one.on(grids[2], one.config).seconds <= one.on(like, one.config).seconds * (1 + planning.NOISE)


@pytest.mark.parametrize(
    "name, data, grids",
    [
        ("megatron", 4, ["8x1x1 (data 4)", "16x1x1 (data 4)"]),
        ("hsdp", None, ["1x1x8 (data 4)", "1x1x8 (data 8)"]),
        ("ddp", None, ["1x1x1 (data 32)", "1x1x1 (data 64)"]),
        ("2x1x2", None, ["2x1x2 (data 8)", "2x1x2 (data 16)"]),
    ],
)
def test_named_grids(name, data, grids):
    assert [str(training().named_grid(name, data, ranks)) for ranks in (32, 64)] == grids


def test_curves_and_the_step_of_a_named_grid(config, tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "curves.png"
    said = planned(
        config,
        "--ranks",
        64,
        "--machine",
        "frontier",
        "--grid",
        "2x1x2",
        *SAMPLES,
        "--curve",
        "32:128",
        "--json",
        figures,
        "--plot",
        picture,
        "--noise",
        0.02,
    )
    for wanted in (
        "2x1x2 (data 16)",
        "Machine frontier (asked for; figures assumed, not measured), 8 ranks a node",
        "With a noise of 0.02",
        "gather W",
        "GEMM nn",
        "ms hidden",
        "Strong scaling",
        "Weak scaling",
        "buckets",
        "100%",
    ):
        assert wanted in said, wanted
    found = json.loads(figures.read_text())
    (one,) = found["grids"]
    assert one["grid"] == {"x": 2, "y": 1, "z": 2, "data": 16} and sum(one["terms"].values()) == pytest.approx(
        one["seconds"]
    )
    assert found["first_rank"]["received"]["z"] > 0 and len(found["first_rank"]["largest"]) == 10
    assert [point["ranks"] for point in found["scaling"]["weak"]] == [32, 64, 128]
    at_64 = found["scaling"]["strong"][1]
    assert at_64["seconds"][AS_IT_IS] == pytest.approx(one["seconds"] * slowest(0.02, 64))
    assert set(at_64["efficiency"]) == set(VARIANTS) and picture.read_bytes().startswith(b"\x89PNG")


def test_the_best_grid_of_each_point_is_found(config, tmp_path):
    figures = tmp_path / "figures.json"
    planned(config, "--ranks", 8, *SAMPLES, "--curve", "4:8", "--json", figures, "--ranks-per-node", 4)
    found = json.loads(figures.read_text())
    four, eight = found["scaling"]["strong"]
    assert eight["grid"] == found["grids"][0]["grid"] and four["ranks"] == 4 and four["seconds"]
    assert "first_rank" not in found


def test_curves_beyond_the_node_that_was_measured_are_of_the_nominal_machine(monkeypatch, config):
    here = replace(load("nominal"), name="here", ranks_per_node=4)
    monkeypatch.setattr("pmm3d.comm.measured_here", lambda ranks_per_node, nodes: here if nodes == 1 else None)
    step = (config, "--ranks", 2, "--grid", "ddp", *SAMPLES)
    assert "Machine here (measured here), 4 ranks a node" in planned(*step, "--curve", 4)
    said = planned(*step, "--curve", 8)
    assert "Machine nominal (assumed: the measured machine is one node with 4 ranks" in said
    assert "Machine alps (named by PMM3D_MACHINE; figures assumed" in planned(*step, PMM3D_MACHINE="alps")


def test_a_type_that_is_priced_as_another_is_said(tmp_path):
    path, machine = tmp_path / "net.toml", tmp_path / "only.toml"
    path.write_text(CONFIG.format(batch=64, hidden="32") + 'dtype = "float64"\n')
    nominal = load("nominal")
    machine.write_text(as_toml(replace(nominal, name="only", gemms={"float32": nominal.gemms["float32"]})))
    said = planned(path, "--ranks", 2, "--grid", "ddp", *SAMPLES, "--machine", machine)
    assert "float64: not known, priced as float32" in said


def test_the_samples_may_come_from_the_file(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 6), np.float32), np.arange(40) % 5
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(batch=16, hidden="8").replace("nowhere.h5", str(tmp_path / "data.h5")))
    said = planned(path, "--ranks", 2, "--grid", "ddp", "--data", 2)
    assert "6-8-5 on a batch of 16 rows" in said and "scaling" not in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--grid", "3x1x1", *SAMPLES), "needs 3 ranks, and there are 8"),
        (("--grid", "auto", "--data", 2, *SAMPLES), "--data needs a named --grid"),
        (("--data", 2, *SAMPLES), "--data needs a named --grid"),
        (("--beside", "real.json", *SAMPLES), "give --trace too"),
        (("--plot", "p.nothing", *SAMPLES), "the name of a picture ends in"),
        (("--machine", "abacus", *SAMPLES), "abacus"),
        (("--curve", "8:4", *SAMPLES), "--curve '8:4' is not a range of ranks"),
        (("--write-seconds", 3, *SAMPLES), "--mtbf and --write-seconds belong together"),
        (("--mtbf", -1, "--write-seconds", 1, *SAMPLES), "--mtbf must be positive, got -1 hours"),
        (("--trace", "both.json", "--beside", "gone.json", *SAMPLES), "cannot read the trace"),
        (("--features", 3), "--features together with either --outputs or --classes"),
        (("--classes", 3, *SAMPLES), "--features together with either --outputs or --classes"),
        (("--vocabulary", 3), "the configuration has no data.sequence"),
        (("--tokens", 1e9, *SAMPLES), "the configuration has no data.sequence: give --samples"),
        (("--samples", "nan", *SAMPLES), "--samples must be at least 1, got nan"),
        (("--grid", "fsdp"), "--features"),
        (("--grid", "wide", *SAMPLES), "wide"),
        (
            ("--memory", 10**6, "--grid", "ddp", *SAMPLES),
            'grid 1x1x1 (data 8) with optimizer.shard_over_data = "gradients", network.recompute = "full", which needs',
        ),
    ],
)
def test_bad_input_is_refused_before_a_step_is_simulated(config, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    if "--memory" not in arguments:
        monkeypatch.setattr(DrySteps, "of", lambda *_: pytest.fail("simulated before"))
    assert said in refused(config, "--ranks", 8, *arguments)


def test_tokens_have_a_vocabulary(tmp_path):
    (tmp_path / "x.toml").write_text(TOKENS)
    for arguments, said in (
        (("--features", 1, "--classes", 9), "give --vocabulary in place of --features"),
        (("--vocabulary", 9, "--samples", 1000), "give --tokens in place of --samples"),
        ((), "cannot open"),
    ):
        assert said in refused(tmp_path / "x.toml", "--ranks", 8, *arguments)
    assert "cannot read the configuration gone.toml" in refused("gone.toml", "--ranks", 8)


def real_trace(path, found, steps=3, shift=0.5):
    """A trace as of a run of the simulated program, whose steps take 2 s each."""
    phases = [(task.axis, task.name) for task in found.timeline.table if task.kind == "collective"]
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0 (here)"}}]

    def add(name, tid, begun, moved=0, **args):
        args |= {"sent": moved, "received": moved} if args else {}
        events.append({"name": name, "ph": "X", "pid": 0, "tid": tid, "ts": begun, "dur": 1.0, "args": args})

    for step in range(steps):
        add("gemm", "compute", 2e6 * step)
        for order, (axis, phase) in enumerate(phases):
            add("all_gather", f"axis {axis}", (2 * step + shift) * 1e6 + order, 4, phase=phase)
        add("all_reduce", "axis y", 2e6 * step + 1.9e6, phase="nothing")
    path.write_text(json.dumps({"traceEvents": events}))
    return events


@pytest.fixture
def beside(tmp_path):
    """beside(simulated, real): (what is said, events of a real trace, events of the simulated one behind these)."""

    def write(simulated, real):
        events = real_trace(tmp_path / "real.json", real)
        said = write_trace(tmp_path / "both.json", simulated, read_trace(tmp_path / "real.json"))
        both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
        assert both[: len(events)] == events
        return said, both[len(events) :]

    return write


def first_collective(simulated):
    return next(event["ts"] for event in simulated if event.get("tid", "").startswith("axis"))


def test_the_trace_beside_a_real_one(beside):
    found = FirstRank.of(training(), GridShape(1, 1, 4, 2))
    said, (named, *simulated) = beside(found, found)
    assert "begins with the last step of rank 0" in said
    assert named["args"]["name"] == "simulated first rank of grid 1x1x4 (data 2)"
    assert first_collective(simulated) == pytest.approx(4.5e6) and {event["pid"] for event in simulated} == {1}
    assert {event["tid"] for event in simulated} >= {"compute", "wait", "axis z", "axis data"}
    spent = {tid: sum(event["dur"] for event in simulated if event["tid"] == tid) for tid in ("compute", "wait")}
    computed = sum(found.timeline.terms.get(kind, 0.0) for kind in ("gemm", "pass", "overhead"))
    assert spent == pytest.approx({"compute": 1e6 * computed, "wait": 1e6 * sum(found.timeline.waits.values())})


def test_a_run_that_gathers_its_weights_again_beside_one_that_keeps_them(beside):
    """Steps are distinguished by the end of one and the begin of the next."""
    sections = {"overlap": {"reshard_after_forward": True}}
    said, simulated = beside(*(FirstRank.of(training(**each), GridShape(1, 1, 4, 2)) for each in ({}, sections)))
    assert "begins with the last step of rank 0, whose collectives differ" in said
    assert first_collective(simulated) == pytest.approx(2.5e6)


def test_another_program_beside_it_begins_with_the_trace(beside):
    other = FirstRank.of(training(hidden=(512,)), GridShape(2, 1, 1))
    said, simulated = beside(FirstRank.of(training(), GridShape(1, 1, 4, 2)), other)
    assert "begins with the trace" in said
    assert min(event["ts"] for event in simulated if "ts" in event) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [{"ph": "X"}]}',
        '{"traceEvents": [{"ph": "X", "pid": 0, "ts": "now", "dur": 1}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(Pmm3dError, match="is not a Chrome trace. Name a file of pmm3d train --trace"):
        read_trace(tmp_path / "real.json")
