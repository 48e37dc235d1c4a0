"""run.json, and the page of `pmm3d report` for a run or a benchmark; damaged and hostile files of a run."""

import json
import re
import sys
import tomllib
from contextlib import contextmanager
from itertools import product
from statistics import median
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from run_pages import Text, record_of, words
from typer.testing import CliRunner

from pmm3d import Pmm3dError
from pmm3d.errors import MissingPackageError
from pmm3d.layout import GridShape
from pmm3d.nn.pipeline.measured import described
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.record import _earlier, device_facts
from pmm3d.nn.training.run_file import RunFile
from pmm3d.text import counted
from pmm3d.tools import plots
from pmm3d.tools.commands import app
from pmm3d.tools.page import drawings, write_page
from pmm3d.tools.page.drawings import curves, expert_map, grid_map
from pmm3d.tools.page.facts import settings_section
from pmm3d.tools.page.run_page import _smoothed
from pmm3d.tools.plots import Part


@pytest.fixture
def told(run):
    """told(key=value, ...): the words of the page of the run, with these changes of its record."""

    def words_of_page(**changes):
        (run / "run.json").write_text(json.dumps(record_of(run) | changes))
        return words(write_page(run).read_text())

    return words_of_page


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


def test_a_killed_run_is_not_finished_and_its_start_broke_off(run, told):
    """After kill -9 the record says "running", and the lock is still in the folder."""
    (run / "lock").write_text(json.dumps({"host": "n1", "pid": 4711}))
    starts = record_of(run)["starts"]
    said = told(state="running", starts=[*starts[:-1], starts[-1] | {"state": "running"}])
    assert "not finished" in said and "the lock names process 4711 on n1" in said
    earlier, *_ = _earlier(run / "run.json")
    assert [start.state for start in earlier] == ["finished", "broke off"]


def test_before_the_first_step_there_is_a_page_too(run, told):
    (run / "metrics.jsonl").write_text("")
    said = told(passes={"steps": 0})
    assert "contains no step yet" in said and "The busiest rank received" in said and "1 step" not in said
    (run / "run.json").write_text('{"form')
    assert "run.json cannot be used" in words(write_page(run).read_text())


def test_the_devices_of_ranks_and_how_their_memory_travels_are_on_the_page(run, told):
    record = record_of(run)
    assert "devices" not in record and "transport" not in record  # arrays of numpy
    used = [(rank, rank // 2, "GPU", f"0:{rank // 2}") for rank in range(7)]
    rows = [
        {"host": "n1", "rank": rank, "local_rank": rank, "device": device, "name": name, "pci": pci, "shared_with": []}
        for rank, device, name, pci in [*used, (7, None, "", "")]
    ]
    facts = device_facts(SimpleNamespace(transport=SimpleNamespace(why="staged: as asked for")), rows)
    said = told(**json.loads(RunFile.model_validate({**record, **facts}).model_dump_json()))
    assert "device memory staged: as asked for" in said
    assert "GPU 0:0 of n1 (ranks 0-1), GPU 0:1 of n1 (ranks 2-3)" in said and "GPU 0:3 of n1 (rank 6)" in said


def test_thousands_of_ranks_make_a_small_page(run, told):
    ranks = 4096

    def stretched(value):
        """The same for more ranks: 512 copies of the column of each rank."""
        if isinstance(value, dict):
            return {name: stretched(inner) for name, inner in value.items()}
        return value * (ranks // 8) if isinstance(value, list) else value

    record = record_of(run)
    table, memory, moved = (
        stretched(record["ranks"]),
        stretched(record["memory"]),
        list(map(stretched, record["moved"])),
    )
    for entry in moved:
        entry["waited"] = [10 * max(table["seconds"])] * ranks
        entry["waited"][1234] = 0.0
    hosts = [{"name": f"n{index:03d}", "ranks": [[64 * index, 64 * index + 63]], "cores": 64} for index in range(64)]
    grid = {"x": 8, "y": 8, "z": 8, "data": 8}
    said = told(grid=grid, hosts=hosts, ranks=table, memory=memory, moved=moved)
    assert (run / "report.html").stat().st_size < 300_000
    assert "Uneven load: rank 1234, the busiest" in said
    assert "Drawn of 4,096 ranks" in said and "Too many ranks to draw" in said


def test_a_step_of_a_pipeline_is_drawn_simulated_beside_real(told):
    """Rank 1 was late in the first step of two micro-batches."""
    steps = (
        [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 5.5, 7.5), ("0B1", 8.5, 10.5)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    )
    text = told(pipeline=described(steps))
    assert "Pipeline of 2 ranks" in text and "real 10.5 s 43%" in text and "simulated 9 s 33%" in text
    assert "rank 0 rank 1 simulated 0 simulated 1" in text and "forward backward" in text
    assert "backward for the weights" not in text


def test_what_others_wait_for_a_slow_rank_is_what_they_waited(run, told):
    """For any use of its time: here not in computation."""
    record = record_of(run)
    computed = {"computed": {"gemm": [1.0] * 5 + [2.4] + [1.0] * 2}, "other": {}}
    moved = [entry | {"waited": [0.0] * 8} for entry in record["moved"]]
    next(entry for entry in moved if entry["axis"] == "z")["waited"] = [24.5] * 5 + [0.5] + [24.5] * 2
    said = told(ranks=record["ranks"] | {"seconds": [28.0] * 8} | computed, moved=moved)
    assert "rank 5, the busiest, is busy for 7.86 times the median, and other ranks wait for it for 86" in said, said
    assert "rank 5, the busiest, over the median" in said


def test_the_page_names_the_network(run, told):
    said, network = told(), record_of(run)["network"]
    assert "12-16-8-3, 419 parameters, float32, numpy" in said
    assert "weight: 12 x 16, rows over y, z, columns over x" in said
    del network["sizes"]
    assert "network Surrogate, 419 parameters" in told(network=network | {"kind": "Surrogate"})


def write_losses(run, losses):
    lines = [json.dumps({"step": step, "epoch": 0, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_moving_average_of_the_loss(run, told):
    values = [float(step % 3) for step in range(1, 121)]
    write_losses(run, values)
    assert "training, mean of 10 values" in told()
    [(_name, mean)] = _smoothed([*enumerate(values, 1)]).items()
    assert len(mean) == 111 and mean[0] == (10, pytest.approx(sum(values[:10]) / 10))


def test_a_long_run_keeps_its_extremes(run):
    """A curve is simplified, but keeps a value that only one step has."""
    values = [77.5 if step == 12345 else 1.0 + step % 3 for step in range(1, 30001)]
    write_losses(run, values)
    assert len(write_page(run).read_text()) < 200_000
    drawn = curves({"loss": [*enumerate(values, 1)]})
    lines = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke: #4477aa', drawn)
    heights = [float(height) for height in re.findall(r"[ML] \S+ (\S+)", max(lines, key=len))]
    assert 30 < len(heights) < 6000 and max(heights) - min(heights) > 100


def test_the_page_draws_the_load_of_experts(run):
    """A map of colours of each router, and curves. Without experts there is none."""
    caption = "Tokens of each expert over the mean"
    assert caption not in write_page(run).read_text()
    lines = [
        {"step": step, "loss": 1.0, "imbalance": 1.5, "dropped": 0.1, "router_loss": 0.02,
         "experts": {"1.mlp.router": [step, 3, 0], "2.mlp.router": [1, 1, 2]}}
        for step in range(1, 40)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_page(run).read_text()
    assert caption in text and "2.mlp.router" in text and "Losses of the routers" in text
    assert "before capacity" in text and "capacity dropped" in text


def test_a_map_of_experts_shows_the_steps_that_are_alike():
    """A resumed run may have other experts. Steps without tokens are left out."""
    one, other = {"a": [1, 3], "b": [2, 2]}, {"a": [1, 2, 3], "b": [2, 2]}
    drawn = expert_map([(1, other), (2, one), (3, {"a": [0, 0], "b": [1, 1]}), (1234, one)])
    assert drawn.startswith("<svg") and "1,234" in drawn and ">a<" in drawn
    assert expert_map([]) == expert_map([(1, {})]) == expert_map([(1, {"a": [0]})]) == ""


@pytest.fixture(scope="module")
def benchmark(command_worlds, tmp_path_factory):
    """Folder of a benchmark of all grids, all.json."""
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = "--m 64 --n 48 --k 40 --repeat 3 --grid all --panels 2 --json all.json".split()
    done = command_worlds(4, "bench", *sizes, cwd=folder)
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


def test_the_configuration_of_the_page_can_be_trained_again(trained):
    settings = record_of(trained)["settings"]
    settings["data"]["file"] = 'quotes " and \\ and ü\n'
    shown = settings_section(settings).text
    assert checked(tomllib.loads(shown)).settings() == {name: settings[name] for name in settings if name != "samples"}


def test_the_grid_is_drawn_with_a_box_a_rank():
    drawing = grid_map(GridShape(3, 2, 1, 2), [("a", [[0, 5]]), ("b", [[6, 11]])])
    assert drawing.count("fill: #5b9be0") == drawing.count("fill: #e4a35c") == 6 + 1  # with the legend
    found = re.findall(r'x="(\S+)" y="(\S+)"[^>]*>(\d+)</text>', drawing)
    where = {int(rank): (float(x), float(y)) for x, y, rank in found}
    assert sorted(where) == [*range(12)] and {"data 0", "data 1", "z 0", "a", "b"} <= set(Text(drawing).words)
    assert where[7][0] == where[1][0] > where[6][0] and where[7][1] == where[6][1] > where[5][1] > where[1][1]


def test_the_labels_of_few_bars_do_not_overlap(monkeypatch):
    """Whatever the size of the legend below them. Each bar is as high as its label at least."""
    heights = []

    @contextmanager
    def picture(drawn, width, height):
        with plots.picture(drawn, width, height) as figure:
            yield figure
            FigureCanvasAgg(figure).draw()
            axes = figure.axes[0]
            label = axes.get_yticklabels()[0].get_window_extent().height
            heights.append(axes.get_window_extent().height / (len(axes.get_yticks()) * label))

    monkeypatch.setattr(drawings, "picture", picture)
    for rows, kinds in product((1, 2, 8), (1, 19, 40)):
        bars = [(f"rank {rank}", [Part(f"waiting: {kind}", 1.0) for kind in range(kinds)]) for rank in range(rows)]
        drawings.time_bars(bars, {})
    assert min(heights) > 1.5


def test_a_grid_with_named_axes_is_drawn_a_block_for_each_replica(told):
    said = Text(grid_map(GridShape(2, 1, 2, 2, seq=3), [])).words
    assert {"data 1, seq 2", "data 0, seq 1", "z 1", "23"} <= set(said)
    assert "2 of 3 replicas are drawn." in told(grid={"x": 8, "y": 8, "z": 2, "data": 3})


def test_a_run_on_named_axes(run, told):
    record = record_of(run)
    grid, first = {"x": 1, "y": 2, "z": 2, "data": 1, "seq": 2}, {"x": 1, "y": 2, "z": 2, "data": 2}
    starts = [record["starts"][0] | {"grid": each} for each in (first, grid)]
    moved = [entry | ({"axis": "seq"} if entry["axis"] == "data" else {}) for entry in record["moved"]]
    entry = next(entry for entry in moved if entry["axis"] == "seq")
    entry["waited"] = [1000.0 + wait for wait in entry["waited"]]
    text = told(grid=grid, starts=starts, moved=moved)
    assert "1x2x2 (seq 2)" in text and "1x2x2 (data 2)" in text
    assert "most for axis seq" in text and "waiting: axis seq" in text


@pytest.fixture
def unwritten(monkeypatch):
    """Pictures are made but not written, because the drawings of 100 pages take minutes."""

    @contextmanager
    def picture(drawn, width, height):
        yield Figure(figsize=(width, height))
        drawn.write(b"<svg/>")

    monkeypatch.setattr("pmm3d.tools.page.drawings.picture", picture)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    "change, said",
    [
        ({"grid": {"x": 0}}, "(grid.x: Input should be"),
        ({"starts": []}, "(starts: "),
        ({"network": "MLP"}, "(network: "),
        ({"format": 2}, "(format: Input should be 1"),
        (
            {
                "moved": [
                    {
                        "axis": "x",
                        "phase": "",
                        "operation": "shift",
                        "calls": [1],
                        "sent": [1],
                        "received": [1],
                        "waited": [0.5],
                    }
                ]
            },
            "ranks, moved and memory have different numbers of ranks",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_left_out_and_its_first_problem_is_named(run, change, said):
    (run / "run.json").write_text(json.dumps(record_of(run) | change))
    text = words(write_page(run).read_text())
    assert f"{run / 'run.json'} cannot be used (" in text and said in text and "--resume auto" in text
    assert "Loss" in text and "Collectives" not in text


@pytest.mark.usefixtures("unwritten")
def test_lines_that_do_not_fit_are_left_out_and_counted(run):
    lines = (run / "metrics.jsonl").read_bytes().splitlines()[:12]
    wrong = [
        b'{"step": "6", "loss": 1.0}',
        b'{"step": 6, "validation": {"loss": "x"}}',
        b"[1, 2]",
        b'{"loss": 1.0}',
        b'{"step": 6, "l\xff',
        b"[" * 100_000,
    ]
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines, *wrong, lines[0]]))
    text = words(write_page(run).read_text())
    assert "metrics.jsonl: 6 of 19 lines cannot be read and are left out" in text and "Loss" in text


@pytest.mark.usefixtures("unwritten")
def test_what_users_wrote_is_escaped(run, tmp_path):
    record = record_of(run)
    bad = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    record["command"], record["hosts"][0]["name"], record["job"] = ["pmm3d", bad], bad, bad
    record["settings"]["data"]["file"] = record["events"][0]["text"] = record["program"]["cpu"] = bad
    (run / "run.json").write_text(json.dumps(record))
    evil = tmp_path / "a<b>&\"'run"
    run.rename(evil)
    page = write_page(evil).read_text()
    assert not {"script", "img"} & set(Text(page).tags)
    assert page.count("alert(") >= 5 and "a<b>&\"'run" in words(page)


@pytest.mark.parametrize(
    "name, contents, text",
    [
        ("nowhere", "", "is not there"),
        ("", "", "is not the folder of a run: it contains neither metrics.jsonl nor run.json"),
        ("x.json", "{", "is not JSON"),
        ("x.json", '{"gflops": 1}', "x.json contains no figures of pmm3d bench --json"),
        ("x.json", "[1, 2]", "x.json contains no figures of pmm3d bench --json"),
        ("x.json", "[]", "x.json contains no figures of pmm3d bench --json"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, name, contents, text):
    (tmp_path / "x.json").write_text(contents)
    with pytest.raises(Pmm3dError, match=re.escape(text)):
        write_page(tmp_path / name)


@pytest.mark.usefixtures("unwritten")
def test_without_jinja2_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=re.escape('pip install "pmm3d[report]"')):
        write_page(run)


@pytest.mark.usefixtures("unwritten")
def test_the_command_says_where_the_page_is_and_ends_with_2_where_it_cannot_be_written(run, tmp_path):
    report = lambda *options: CliRunner().invoke(app, ["report", str(run), *map(str, options)])
    done = report()
    assert (done.exit_code, done.stdout) == (0, f"wrote {run}/report.html\n")
    (tmp_path / "file").touch()
    for output in (tmp_path / "file/x.html", tmp_path / "none/x.html"):
        done = report("--out", output)
        assert done.exit_code == 2 and "cannot write" in done.stderr and "Traceback" not in done.stderr
