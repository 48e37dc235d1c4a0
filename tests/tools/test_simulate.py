"""The command pmm3d simulate: a step on many ranks, its curves, its trace beside a real one."""

import json
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
from rich.console import Console

from pmm3d import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model.machines import as_toml, load
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.tools import cli
from pmm3d.tools.simulate.beside import read_trace, write_trace
from pmm3d.tools.simulate.printing import print_curve
from pmm3d.tools.simulate.scaling import AS_IT_IS, VARIANTS, Curve, Point, curves, rank_counts
from pmm3d.tools.simulate.steps import Simulator

CONFIG = """
[data]
file = "nowhere.h5"
batch_size = {batch}
[network]
hidden = [{hidden}]
"""
SAMPLES = ("--features", "64", "--outputs", "32")


def simulator(batch=4096, hidden=(512, 256, 512), machine="frontier", noise=0.0, **sections):
    config = checked({"data": {"file": "nowhere.h5", "batch_size": batch}, "network": {"hidden": list(hidden)},
                      **sections})
    known = load(machine)
    return Simulator(config, known, known.ranks_per_node, noise, SampleSizes(64, 32))


def command(monkeypatch, capsys, *arguments):
    """What the command prints, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["pmm3d", "simulate", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("pmm3d.tools.cli.make_streams_safe", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return capsys.readouterr(), ended.value.code


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(batch=4096, hidden="512, 256, 512"))
    return path


def test_where_sizes_divide_one_rank_stands_for_all():
    found = simulator().of(GridShape(2, 2, 4, 8))
    assert found.alike == {0: 128} and len(found.timeline.tables) == 1
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert set(found.terms) <= {"gemm", "passes", "overhead", "x", "y", "z", "data", "all"}
    assert sum(found.received.values()) == found.step.received


def test_where_they_do_not_ranks_that_differ_are_simulated_together():
    """513 columns over x: 257 and 256. The larger ranks decide; the smaller wait for them, so that all end together."""
    found = simulator(hidden=(513,)).of(GridShape(2, 1, 1, 4))
    assert sum(found.alike.values()) == 8 and len(found.alike) > 1
    alone = simulator(hidden=(513,)).of(GridShape(2, 1, 1, 4), alone=True)
    assert alone.alike == {0: 8}
    assert found.seconds >= alone.seconds
    assert found.seconds == pytest.approx(alone.seconds, rel=0.05)


def test_ranks_that_do_the_same_are_one_table():
    """513 rows of the second weight divide by nothing, but y cuts its columns: without biases all ranks do the same."""
    found = simulator(network={"hidden": [513], "bias": False}).of(GridShape(1, 2, 1, 4))
    assert found.alike == {0: 8} and len(found.timeline.tables) == 1


def test_noise_is_a_term_of_its_own():
    quiet, noisy = (simulator(noise=noise).of(GridShape(1, 1, 1, 100)) for noise in (0.0, 0.1))
    assert "noise" not in quiet.terms
    assert noisy.seconds == pytest.approx(quiet.seconds * 1.25075936)
    assert noisy.terms["noise"] == pytest.approx(noisy.seconds - quiet.seconds)
    assert sum(noisy.terms.values()) == pytest.approx(noisy.seconds)


def test_what_is_hidden_and_what_is_waited_for_make_up_a_collective():
    found = simulator(batch=2**16, hidden=(4096, 4096)).of(GridShape(1, 1, 8))
    waits = found.timeline.waits(0)
    assert found.hidden["z"] > 0
    assert found.hidden["z"] + waits["z"] == pytest.approx(found.alone["z"])


def test_the_largest_actions_are_all_of_the_step():
    simulated = simulator()
    found = simulated.of(GridShape(2, 1, 2, 2))
    shares = simulated.largest(found)
    assert [share.seconds for share in shares] == sorted((share.seconds for share in shares), reverse=True)
    gemms = [share for share in shares if share.what.startswith("GEMM")]
    assert sum(share.seconds for share in gemms) == pytest.approx(found.alone["gemm"])
    assert sum(share.times for share in gemms) == sum(action.what == "gemm" for action in found.step.actions)


def test_the_curves():
    told = []
    found = curves(simulator(), ["strong", "weak"], 64, [16, 64, 256],
                   lambda config, ranks: GridShape(2, 1, 2, ranks // 4), lambda done, total: told.append((done, total)))
    strong, weak = found
    assert [point.batch for point in strong.points] == [4096] * 3
    assert [point.batch for point in weak.points] == [1024, 4096, 16384]
    assert told[-1] == (6, 6) and [done for done, _ in told] == [0, 1, 2, 3, 4, 5, 6]
    same = strong.points[1], weak.points[1]
    assert same[0].seconds == same[1].seconds
    for curve in found:
        assert curve.efficiency(curve.points[0]) == 1
        for point in curve.points:
            assert set(point.seconds) == set(VARIANTS)
            assert point.seconds["none"] >= point.seconds[AS_IT_IS]
    first, last = strong.points[0].seconds[AS_IT_IS], strong.points[2].seconds[AS_IT_IS]
    assert strong.efficiency(strong.points[2]) == pytest.approx(first / last * 16 / 256)
    assert weak.efficiency(weak.points[2]) == pytest.approx(
        weak.points[0].seconds[AS_IT_IS] / weak.points[2].seconds[AS_IT_IS])


def test_a_batch_of_a_curve_is_not_cut_at_the_end_of_the_file():
    """40 rows are trained on in batches of up to 64: on 2 ranks 40, on 4 ranks 80."""
    short = replace(simulator(batch=64), samples=SampleSizes(64, 32, rows=40))
    ddp = lambda config, ranks: GridShape(1, 1, 1, ranks)
    strong, weak = curves(short, ["strong", "weak"], 2, [2, 4, 512], ddp, lambda done, total: None)
    assert [point.batch for point in strong.points] == [40] * 3
    assert [point.batch for point in weak.points] == [40, 80, 10240]
    wide, = curves(replace(simulator(batch=40)), ["weak"], 2, [2, 4, 512], ddp, lambda done, total: None)
    assert weak == wide
    assert all(weak.efficiency(point) <= 1 for point in weak.points)


def test_a_point_without_a_grid_says_why():
    def chosen(config, ranks):
        if ranks == 2:
            raise Pmm3dError("no grid of 2")
        return GridShape(1, 1, ranks)

    strong, = curves(simulator(), ["strong"], 4, [2, 4], chosen, lambda done, total: None)
    assert strong.points[0].why_not == "no grid of 2" and not strong.points[0].seconds
    assert strong.efficiency(strong.points[0]) is None and strong.efficiency(strong.points[1]) == 1


def test_a_point_that_does_not_fit_in_memory_says_so():
    strong, = curves(simulator(hidden=(300_000,) * 3, batch=64), ["strong"], 1, [1, 1024],
                     lambda config, ranks: GridShape(1 + ranks // 33, 1 + ranks // 33, 1), lambda done, total: None)
    assert strong.points[0].why_not == "not enough memory" and strong.points[0].memory > 64e9
    assert strong.points[1].why_not == ""
    assert strong.efficiency(strong.points[1]) == 1, "what does not fit is no baseline"


@pytest.mark.parametrize("asked,counts", [
    ((8192, None, None), [512, 1024, 2048, 4096, 8192, 16384, 32768]), ((48, 16, 128), [16, 32, 48, 64, 128]),
    ((3, None, 8), [1, 2, 3, 4, 8]), ((65536, 32768, None), [32768, 65536]), ((5, 16, 16), [16])])
def test_the_numbers_of_ranks_of_a_curve(asked, counts):
    assert rank_counts(*asked) == counts


def test_curves_that_end_before_they_begin_are_refused():
    with pytest.raises(Pmm3dError, match="give --from-ranks below --to-ranks"):
        rank_counts(8, 64, 32)


def test_a_batch_that_leaves_ranks_without_rows_is_said(capsys):
    points = [Point(ranks, 8, GridShape(1, 1, 2, ranks // 2), {"as configured": 1.0}) for ranks in (8, 16, 32)]
    print_curve(Curve("strong", points), Console(width=200))
    said = capsys.readouterr().out
    assert "From 16 ranks on, a batch of 8 leaves ranks along data and z without a row" in said
    assert "no oar, no ors, no oag: all-reduces" in said


def test_the_command_says_all(monkeypatch, capsys, config, tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "curves.png"
    said, code = command(monkeypatch, capsys, config, "--ranks", 64, "--machine", "frontier", "--grid", "2x1x2",
                         *SAMPLES, "--from-ranks", 32, "--to-ranks", 128, "--json", figures, "--plot",
                         picture, "--noise", 0.02)
    assert code == 0
    for wanted in ("grid 2x1x2 (data 16)", "64 ranks on 8 nodes of frontier", "rank 0 for 64", "GEMM", "waiting: data",
                   "noise", "gather W", "weights", "Strong scaling", "Weak scaling", "buckets", "100%"):
        assert wanted in said.out, wanted
    found = json.loads(figures.read_text())
    assert found["grid"] == {"x": 2, "y": 1, "z": 2, "data": 16} and found["noise"] == 0.02
    assert sum(found["terms"].values()) == pytest.approx(found["seconds"])
    assert [point["ranks"] for point in found["scaling"]["weak"]] == [32, 64, 128]
    at_64 = found["scaling"]["strong"][1]
    assert at_64["seconds"][AS_IT_IS] == pytest.approx(found["seconds"]) and set(at_64["efficiency"]) == set(VARIANTS)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_best_grid_is_found(monkeypatch, capsys, config, tmp_path):
    figures = tmp_path / "figures.json"
    _, code = command(monkeypatch, capsys, config, "--ranks", 8, *SAMPLES, "--from-ranks", 4, "--to-ranks", 8,
                      "--scaling", "strong", "--json", figures, "--ranks-per-node", 4)
    found = json.loads(figures.read_text())
    assert code == 0 and found["ranks"] == 8 and found["ranks_per_node"] == 4
    four, eight = found["scaling"]["strong"]
    assert eight["grid"] == found["grid"] and four["ranks"] == 4 and four["seconds"]


def test_the_best_grids_of_a_curve_are_like_that_of_the_step(monkeypatch):
    """Few are tried at a point: what formulas say is best, and what is like the grids that were found before."""
    from pmm3d.nn.training import planning
    from pmm3d.tools.simulate.command import _chooser

    asked, ranking = [], planning.rank_training

    def counted(config, ranks, machine, **options):
        asked.append((ranks, options["top"], options["actions"]))
        return ranking(config, ranks, machine, **options)

    monkeypatch.setattr(planning, "rank_training", counted)
    one = simulator(batch=2**16)
    chosen = _chooser(one, "auto", None)
    grids = [chosen(one.config, ranks, ranks == 64) for ranks in (64, 64, 128)]
    assert asked == [(64, planning.TOP, planning.ACTIONS), (128, 3, 0)]
    assert grids[0] == grids[1] and grids[2].size == 128
    best = one.of(grids[2], alone=True).seconds
    like = GridShape(*grids[0][:3], 128 // (grids[0].size // grids[0].data))
    assert best <= one.of(like, alone=True).seconds * (1 + planning.NOISE)


@pytest.mark.parametrize("name, data, grids", [
    ("megatron", 4, ["8x1x1 (data 4)", "16x1x1 (data 4)"]), ("hsdp", 2, ["1x1x16 (data 2)", "1x1x32 (data 2)"]),
    ("ddp", 64, ["1x1x1 (data 32)", "1x1x1 (data 64)"]), ("2x1x2", 16, ["2x1x2 (data 8)", "2x1x2 (data 16)"])])
def test_data_is_that_of_a_familys_curves_too(name, data, grids):
    from pmm3d.tools.simulate.command import _chooser

    one = simulator()
    chosen = _chooser(one, name, data)
    assert [str(chosen(one.config, 32, False)), str(chosen(one.config, 64, True))] == grids


def test_the_machine_of_the_environment_is_simulated_and_named(monkeypatch, capsys, config):
    monkeypatch.setenv("PMM3D_MACHINE", "alps")
    said, code = command(monkeypatch, capsys, config, "--ranks", 8, "--grid", "ddp", *SAMPLES, "--scaling", "none")
    assert code == 0 and "Machine alps (named by PMM3D_MACHINE)" in said.out and "of alps" in said.out


def test_the_machine_that_was_measured_here_is_simulated_on_its_node(monkeypatch, capsys, config, tmp_path):
    """Nothing is known of more nodes than were measured: curves end there."""
    here = replace(load("nominal"), name="here", ranks_per_node=4)
    monkeypatch.delenv("PMM3D_MACHINE", raising=False)
    monkeypatch.setattr("pmm3d.tools.plan.machines.measured_here",
                        lambda ranks_per_node, nodes: here if nodes == 1 else None)
    figures = tmp_path / "figures.json"
    said, code = command(monkeypatch, capsys, config, "--ranks", 2, "--grid", "ddp", *SAMPLES, "--json", figures)
    assert code == 0 and "Machine here (measured here), 4 ranks a node" in said.out
    assert [point["ranks"] for point in json.loads(figures.read_text())["scaling"]["weak"]] == [1, 2, 4]
    said, code = command(monkeypatch, capsys, config, "--ranks", 8, "--grid", "ddp", *SAMPLES, "--scaling", "none")
    assert code == 0 and "Machine nominal (assumed: what was measured here is of one node" in said.out


def test_a_type_that_is_priced_as_another_is_said(monkeypatch, capsys, tmp_path):
    path, figures, machine = (tmp_path / name for name in ("net.toml", "figures.json", "only.toml"))
    path.write_text(CONFIG.format(batch=64, hidden="32") + 'dtype = "float64"\n')
    nominal = load("nominal")
    machine.write_text(as_toml(replace(nominal, name="only", gemms={"float32": nominal.gemms["float32"]})))
    said, code = command(monkeypatch, capsys, path, "--ranks", 2, "--grid", "ddp", *SAMPLES, "--scaling", "none",
                         "--machine", machine, "--json", figures)
    assert code == 0 and "only has no figures for GEMMs in float64: priced as float32" in said.out
    assert json.loads(figures.read_text())["priced_as"] == {"float64": "float32"}


def test_the_trace_of_the_run_is_read_first(monkeypatch, capsys, config, tmp_path):
    def simulated(*arguments, **options):
        raise AssertionError("simulated before")

    monkeypatch.setattr(Simulator, "of", simulated)
    found, code = command(monkeypatch, capsys, config, "--ranks", 2, "--grid", "ddp", *SAMPLES,
                          "--trace", tmp_path / "both.json", "--beside", tmp_path / "gone.json")
    assert code == 2 and "cannot read the trace" in found.err


def test_the_samples_may_come_from_the_file(monkeypatch, capsys, tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 6), np.float32), np.arange(40) % 5
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(batch=16, hidden="8").replace("nowhere.h5", str(tmp_path / "data.h5")))
    said, code = command(monkeypatch, capsys, path, "--ranks", 2, "--grid", "ddp", "--data", 2, "--scaling", "none")
    assert code == 0 and "grid 1x1x1 (data 2)" in said.out and "scaling" not in said.out


def test_other_ranks_are_silent(monkeypatch, capsys, config):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    said, code = command(monkeypatch, capsys, config, "--ranks", 2, "--grid", "1x1x2", *SAMPLES)
    assert code == 0 and said.out == ""


@pytest.mark.parametrize("arguments,said", [
    (("--grid", "3x1x1"), "takes a multiple of 3 ranks"),
    (("--grid", "auto", "--data", 2), "--data goes with a --grid that is not auto"),
    (("--grid", "1x1x8", "--beside", "real.json"), "give that too"),
    (("--grid", "1x1x8", "--scaling", "none", "--plot", "p.png"), "leave one of them out"),
    (("--grid", "1x1x8", "--plot", "p.nothing"), "the name of a picture ends in"),
    (("--grid", "1x1x8", "--machine", "abacus"), "abacus"),
    (("--grid", "1x1x8", "--to-ranks", 4, "--from-ranks", 8), "below --to-ranks"),
    (("--grid", "1x1x8", "--classes", 3), "either --outputs or --classes"),
    (("--grid", "wide"), "wide")])
def test_bad_input(monkeypatch, capsys, config, arguments, said):
    samples = () if "--classes" in arguments else SAMPLES
    found, code = command(monkeypatch, capsys, config, "--ranks", 8, *arguments, *samples)
    assert code == 2 and said in found.err and "Traceback" not in found.err


def test_a_pipeline_is_refused(monkeypatch, capsys, config):
    config.write_text(config.read_text() + "[grid]\npipe = 2\n")
    found, code = command(monkeypatch, capsys, config, "--ranks", 8, *SAMPLES)
    assert code == 2 and "grid.pipe = 2: the step of a pipeline is not simulated" in found.err


def test_without_the_data_the_sizes_are_asked_for(monkeypatch, capsys, config):
    found, code = command(monkeypatch, capsys, config, "--ranks", 8, "--grid", "1x1x8")
    assert code == 2 and "--features" in found.err


def real_trace(path, found, steps=3, shift=0.5):
    """As of a run of the simulated program, whose steps take 2 s each."""
    collectives = [(task, begun) for task, begun in zip(found.timeline.tables[0], found.timeline.begun[0])
                   if task.kind == "collective"]
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0 (here)"}}]
    for step in range(steps):
        events.append({"name": "gemm", "ph": "X", "pid": 0, "tid": "compute", "ts": 2e6 * step, "dur": 5.0, "args": {}})
        for order, (task, begun) in enumerate(collectives):
            events.append({"name": "all_gather", "ph": "X", "pid": 0, "tid": f"axis {task.meets[0]}", "dur": 1.0,
                           "ts": (2 * step + shift) * 1e6 + order,
                           "args": {"phase": task.name, "sent": 4, "received": 4}})
        events.append({"name": "all_reduce", "ph": "X", "pid": 0, "tid": "axis y", "ts": 2e6 * step + 1.9e6, "dur": 1.0,
                       "args": {"phase": "nothing", "sent": 0, "received": 0}})
    path.write_text(json.dumps({"traceEvents": events}))
    return events


def test_the_trace_beside_a_real_one(tmp_path):
    found = simulator().of(GridShape(1, 1, 4, 2))
    events = real_trace(tmp_path / "real.json", found)
    said = write_trace(tmp_path / "both.json", found, read_trace(tmp_path / "real.json"))
    assert "lies over the last one of rank 0" in said
    both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert both[: len(events)] == events
    simulated = both[len(events):]
    assert {event["pid"] for event in simulated} == {1}
    assert simulated[0]["args"]["name"] == "simulated rank 0 (stands for 8 ranks of grid 1x1x4 (data 2))"
    first = next(event for event in simulated if event.get("tid", "").startswith("axis"))
    assert first["ts"] == pytest.approx(4.5e6)
    tracks = {event["tid"] for event in simulated[1:]}
    assert tracks >= {"compute", "wait", "axis z", "axis data"}
    computed = sum(event["dur"] for event in simulated[1:] if event["tid"] == "compute")
    assert computed == pytest.approx(1e6 * sum(found.terms[name] for name in ("gemm", "passes", "overhead")))
    waited = sum(event["dur"] for event in simulated[1:] if event["tid"] == "wait")
    assert waited == pytest.approx(1e6 * sum(found.timeline.waits(0).values()))


def test_a_run_that_gathers_its_weights_again_beside_one_that_keeps_them(tmp_path):
    """Steps are still told by how one ends and the next begins."""
    sections = {"overlap": {"reshard_after_forward": True}}
    found, again = simulator().of(GridShape(1, 1, 4, 2)), simulator(**sections).of(GridShape(1, 1, 4, 2))
    real_trace(tmp_path / "real.json", again)
    said = write_trace(tmp_path / "both.json", found, read_trace(tmp_path / "real.json"))
    assert "over the last one of rank 0, which does other collectives" in said
    both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    first = next(event for event in both if event["pid"] == 1 and event.get("tid", "").startswith("axis"))
    assert first["ts"] == pytest.approx(2.5e6)


def test_another_program_beside_it_begins_with_the_trace(tmp_path):
    found = simulator().of(GridShape(1, 1, 4, 2))
    real_trace(tmp_path / "real.json", simulator(hidden=(512,)).of(GridShape(2, 1, 1)))
    assert "begins with the trace" in write_trace(tmp_path / "both.json", found, read_trace(tmp_path / "real.json"))
    both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert min(event["ts"] for event in both if event["pid"] == 1 and "ts" in event) == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}',
                                  '{"traceEvents": [{"ph": "X", "pid": 0, "ts": "now", "dur": 1}]}', "[" * 100_000])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(Pmm3dError, match="is no Chrome trace. Name a file of pmm3d train --trace"):
        read_trace(tmp_path / "real.json")
    with pytest.raises(Pmm3dError, match="cannot read the trace"):
        read_trace(tmp_path / "gone.json")
