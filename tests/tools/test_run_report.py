"""run.json, and the page of `pmm3d report` for a run or a benchmark."""

import json
import re
import tomllib
from statistics import median
from types import SimpleNamespace

import pytest
from run_pages import Text, record_of, words

from pmm3d.layout import GridShape
from pmm3d.nn.pipeline.measured import described
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.record import device_facts
from pmm3d.nn.training.run_file import RunFile
from pmm3d.text import counted
from pmm3d.tools.page import write_page
from pmm3d.tools.page.drawings import curves, grid_map
from pmm3d.tools.page.facts import settings_section, toml
from pmm3d.tools.page.run_page import _smoothed


def test_the_record_holds_what_each_rank_did(trained):
    record = record_of(trained)
    assert record["state"] == "finished" and record["grid"] == {"x": 1, "y": 2, "z": 2, "data": 2}
    assert record["network"]["sizes"] == [12, 16, 8, 3] and record["hosts"][0]["ranks"] == [[0, 7]]
    assert record["passes"]["steps"] == 6 and record["step"] == 12
    moved = [entry for entry in record["moved"] if any(entry["received"])]
    assert {entry["phase"] for entry in moved} >= {"gather W", "reduce dW", "reduce data", "reduce O", "layer norm"}
    ranks = record["ranks"]
    assert all(len(column) == 8 for column in (ranks["seconds"], ranks["waited"], ranks["computed"]["gemm"]))
    for whole, waited, *computed in zip(ranks["seconds"], ranks["waited"], *ranks["computed"].values()):
        assert 0 < waited + sum(computed) <= whole * 1.01
    for computed, off_core in zip(zip(*ranks["computed"].values()), ranks["off_core"], strict=True):
        assert 0 <= off_core <= sum(computed)
    weights, parameters = record["memory"]["weights"], record["network"]["parameters"]
    assert 4 * parameters / 4 <= max(weights) < 2 * 4 * parameters / 4  # float32 on a replica of 4 ranks


def test_the_file_has_what_the_schema_has(trained):
    record = record_of(trained)
    assert RunFile.model_validate(record).model_dump(exclude_none=True) == record


def test_less_than_a_tenth_of_the_time_is_unnamed(trained):
    """A rank computes, waits, or is in a part of the run. The parts are exclusive, so nothing is counted twice."""
    ranks = record_of(trained)["ranks"]
    assert ranks["other"].keys() >= {"forward", "backward", "optimizer", "batches", "validation", "log", "checkpoint"}
    named = [
        waited + sum(spent)
        for waited, *spent in zip(ranks["waited"], *ranks["computed"].values(), *ranks["other"].values(), strict=True)
    ]
    assert 0.9 * sum(ranks["seconds"]) < sum(named) <= 1.01 * sum(ranks["seconds"])


def test_earlier_starts_are_kept(trained):
    record = record_of(trained)
    assert [(start["from_step"], start["to_step"], start["state"]) for start in record["starts"]] == [
        (0, 6, "finished"),
        (6, 12, "finished"),
    ]
    whats = [event["what"] for event in record["events"]]
    assert whats == ["started", *["checkpoint"] * 2, "finished", "resumed", *["checkpoint"] * 2, "finished"]


def assert_tells_the_run(document):
    said = words(document)
    for wanted in (
        "finished epoch 2 of 2",
        "1x2x2 (data 2): 8 ranks on 1 host",
        "12-16-8-3",
        "the median of 4",
        "reduce dW",
        "batch_size = 50",
        "Time of each rank",
        "rank 7",
        "resumed",
        "waiting: the loader",
        "pmm3d plan train CONFIG --ranks 8 --mtbf HOURS --write-seconds",
    ):
        assert wanted in said, wanted
    assert document.count("<svg") >= 7


def test_the_page_tells_the_run_and_loads_nothing(trained, tmp_path):
    text = write_page(trained, tmp_path / "page.html").read_text()
    assert len(text) < 1e6 and re.sub(r'xmlns(:xlink)?="http://www.w3.org/\d+/\w+"', "", text).count("http") == 1  # CSP
    assert all(value.startswith(("data:", "#")) for value in Text(text).loaded) and "script" not in Text(text).tags
    assert_tells_the_run(text)


def test_a_run_that_goes_on_or_crashed(run):
    """With an incomplete line, NaN, or no run.json. The page contains this."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[2])
    lines[2] = json.dumps({**step, "loss": float("nan")})
    (run / "metrics.jsonl").write_text("\n".join(lines[:5]) + '\n{"step": 6, "lo')
    (run / "run.json").unlink()
    said = words(write_page(run).read_text())
    assert "1 of 6 lines cannot be read and are left out" in said and "run.json is missing" in said
    assert "(1 value not drawn" in said and "Curves" in said and "Collectives" not in said


def test_before_the_first_step_there_is_a_page_too(run):
    (run / "metrics.jsonl").write_text("")
    (run / "run.json").write_text(json.dumps(record_of(run) | {"passes": {"steps": 0}}))
    said = words(write_page(run).read_text())
    assert "contains no step yet" in said and "The busiest rank received" in said and "1 step" not in said
    (run / "run.json").write_text('{"form')
    assert "run.json cannot be used" in words(write_page(run).read_text())


def test_the_devices_of_ranks_and_how_their_memory_travels_are_on_the_page(run):
    record = record_of(run)
    assert "devices" not in record and "transport" not in record  # arrays of numpy
    rows = [
        {
            "host": "n1",
            "rank": rank,
            "local_rank": rank,
            "device": rank // 2,
            "name": "GPU",
            "pci": f"0:{rank // 2}",
            "shared_with": [rank ^ 1],
        }
        for rank in range(7)
    ]
    idle = {**rows[0], "rank": 7, "device": None, "name": "", "pci": ""}
    facts = device_facts(SimpleNamespace(transport=SimpleNamespace(why="staged: as asked for")), [*rows, idle])
    (run / "run.json").write_text(RunFile.model_validate({**record, **facts}).model_dump_json())
    said = words(write_page(run).read_text())
    assert "device memory staged: as asked for" in said
    assert "GPU 0:0 of n1 (ranks 0-1), GPU 0:1 of n1 (ranks 2-3)" in said and "GPU 0:3 of n1 (rank 6)" in said


def test_thousands_of_ranks_make_a_small_page(run):
    record, ranks = record_of(run), 4096
    stretch = lambda column: column * (ranks // 8)
    record["grid"] = {"x": 8, "y": 8, "z": 8, "data": 8}
    record["hosts"] = [
        {"name": f"n{index:03d}", "ranks": [[64 * index, 64 * index + 63]], "cores": 64} for index in range(64)
    ]
    table = record["ranks"]
    for kind in ("computed", "other"):
        table[kind] = {name: stretch(column) for name, column in table[kind].items()}
    for name in ("seconds", "saving", "off_core", "peak_memory", "waited"):
        table[name] = stretch(table[name])
    for entry in record["moved"]:
        entry.update({name: stretch(column) for name, column in entry.items() if isinstance(column, list)})
        entry["waited"] = [10 * max(table["seconds"])] * ranks
        entry["waited"][1234] = 0.0
    record["memory"] = {name: stretch(column) for name, column in record["memory"].items()}
    (run / "run.json").write_text(json.dumps(record))
    page = write_page(run).read_text()
    assert len(page) < 300_000
    said = words(page)
    assert "Uneven load: rank 1234, the busiest" in said
    assert "Drawn of 4,096 ranks" in said and "Too many ranks to draw" in said


def test_a_step_of_a_pipeline_is_drawn_simulated_beside_real(run):
    """Rank 1 was late in the first step of two micro-batches."""
    steps = (
        [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 5.5, 7.5), ("0B1", 8.5, 10.5)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    )
    record = {**record_of(run), "pipeline": described(steps)}
    (run / "run.json").write_text(json.dumps(record))
    text = words(write_page(run).read_text())
    assert "Pipeline of 2 ranks" in text and "real 10.5 s 43%" in text and "simulated 9 s 33%" in text
    assert "rank 0 rank 1 simulated 0 simulated 1" in text and "forward backward" in text
    assert "backward for the weights" not in text


def test_what_others_wait_for_a_slow_rank_is_what_they_waited(run):
    """For any use of its time: here not in computation."""
    record = record_of(run)
    table = record["ranks"]
    table["seconds"] = [28.0] * 8
    table["computed"], table["other"] = {"gemm": [1.0] * 5 + [2.4] + [1.0] * 2}, {}
    for entry in record["moved"]:
        entry["waited"] = [0.0] * 8
    waited = next(entry for entry in record["moved"] if entry["axis"] == "z")["waited"]
    waited[:] = [24.5] * 8
    waited[5] = 0.5
    (run / "run.json").write_text(json.dumps(record))
    said = words(write_page(run).read_text())
    assert "rank 5, the busiest, is busy for 7.86 times the median, and other ranks wait for it for 86" in said, said
    assert "rank 5, the busiest, over the median" in said


def test_the_page_names_the_network(run):
    said = words(write_page(run).read_text())
    assert "12-16-8-3, 419 parameters, float32, numpy" in said
    assert "weight: 12 x 16, rows over y, z, columns over x" in said
    record = record_of(run)
    del record["network"]["sizes"]
    record["network"]["kind"] = "Surrogate"
    (run / "run.json").write_text(json.dumps(record))
    assert "network Surrogate, 419 parameters" in words(write_page(run).read_text())


def test_a_moving_average_of_the_loss(run):
    values = [float(step % 3) for step in range(1, 121)]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": value}) + "\n" for step, value in enumerate(values, 1))
    )
    assert "training, mean of 10 values" in words(write_page(run).read_text())
    [(_name, mean)] = _smoothed([*enumerate(values, 1)]).items()
    assert len(mean) == 111 and mean[0] == (10, pytest.approx(sum(values[:10]) / 10))


def test_a_long_run_keeps_its_extremes(run):
    """A curve is simplified, but keeps a value that only one step has."""
    points = [(step, 77.5 if step == 12345 else 1.0 + step % 3) for step in range(1, 30001)]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "epoch": 0, "loss": loss}) + "\n" for step, loss in points)
    )
    assert len(write_page(run).read_text()) < 200_000
    lines = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke: #4477aa', curves({"loss": points}))
    heights = [float(height) for height in re.findall(r"[ML] \S+ (\S+)", max(lines, key=len))]
    assert 30 < len(heights) < 6000 and max(heights) - min(heights) > 100


@pytest.fixture(scope="module")
def benchmark(command_worlds, tmp_path_factory):
    """Folder of a benchmark of all grids, all.json."""
    folder = tmp_path_factory.mktemp("benchmark")
    done = command_worlds(
        4,
        "bench",
        "--m",
        "64",
        "--n",
        "48",
        "--k",
        "40",
        "--repeat",
        "3",
        "--grid",
        "all",
        "--panels",
        "2",
        "--json",
        "all.json",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_page_of_a_benchmark(benchmark):
    page = write_page(benchmark / "all.json")
    assert page == benchmark / "all.html"
    said = words(page.read_text())
    assert "C = A B, m, n, k = 64, 48, 40" in said and "as modelled" in said
    assert "the fastest of 7" in said  # the grids of 4 ranks, and that of "auto", which has idle ranks
    assert all(grid in said for grid in ("4x1x1", "2x2x1", "1x1x4")) and "right" in said
    best = min(json.loads((benchmark / "all.json").read_text()), key=lambda figure: median(figure["seconds"]))
    assert f"{counted(best['panels'], 'panel')} along k" in said
    assert "whole product" in said and "dashed: the limit" in said


def test_the_configuration_is_toml_that_says_the_same(trained):
    settings = record_of(trained)["settings"]
    settings["data"]["file"] = 'quotes " and \\ and ü\n'
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in settings.items()
    }
    assert tomllib.loads(toml(settings)) == given


def test_the_configuration_of_the_page_can_be_trained_again(trained):
    settings = record_of(trained)["settings"]
    shown = settings_section(settings).text
    expected = {name: settings[name] for name in settings if name != "samples"}
    assert checked(tomllib.loads(shown)).settings() == expected


def test_the_grid_is_drawn_with_a_box_a_rank():
    drawing = grid_map(GridShape(3, 2, 1, 2), [("a", [[0, 5]]), ("b", [[6, 11]])])
    assert drawing.count("fill: #5b9be0") == drawing.count("fill: #e4a35c") == 6 + 1  # with the legend
    found = re.findall(r'x="(\S+)" y="(\S+)"[^>]*>(\d+)</text>', drawing)
    where = {int(rank): (float(x), float(y)) for x, y, rank in found}
    assert sorted(where) == [*range(12)] and {"data 0", "data 1", "z 0", "a", "b"} <= set(Text(drawing).words)
    assert where[7][0] == where[1][0] > where[6][0] and where[7][1] == where[6][1] > where[5][1] > where[1][1]


def test_a_grid_with_named_axes_is_drawn_a_block_for_each_replica(run):
    said = Text(grid_map(GridShape(2, 1, 2, 2, seq=3), [])).words
    assert {"data 1, seq 2", "data 0, seq 1", "z 1", "23"} <= set(said)
    record = {**record_of(run), "grid": {"x": 8, "y": 8, "z": 2, "data": 3}}
    (run / "run.json").write_text(json.dumps(record))
    assert "2 of 3 replicas are drawn." in words(write_page(run).read_text())


def test_a_run_on_named_axes(run):
    record = record_of(run)
    record["grid"] = {"x": 1, "y": 2, "z": 2, "data": 1, "seq": 2}
    first = {"x": 1, "y": 2, "z": 2, "data": 2}
    record["starts"] = [{**record["starts"][0], "grid": grid} for grid in (first, record["grid"])]
    record["moved"] = [
        {**entry, "axis": "seq" if entry["axis"] == "data" else entry["axis"]} for entry in record["moved"]
    ]
    entry = next(entry for entry in record["moved"] if entry["axis"] == "seq")
    entry["waited"] = [1000.0 + wait for wait in entry["waited"]]
    (run / "run.json").write_text(json.dumps(record))
    text = words(write_page(run).read_text())
    assert "1x2x2 (seq 2)" in text and "1x2x2 (data 2)" in text
    assert "most for axis seq" in text and "waiting: axis seq" in text
