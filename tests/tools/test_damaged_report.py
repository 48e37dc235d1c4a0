"""`pmm3d report` of what is damaged, of wrong types, hostile, or no run at all."""

import json
import re
import sys
from contextlib import contextmanager
from itertools import cycle, product

import pytest
from loops import given
from matplotlib.figure import Figure
from run_pages import Text, record_of, words
from typer.testing import CliRunner

from pmm3d import Pmm3dError
from pmm3d.errors import MissingPackageError
from pmm3d.tools.commands import app
from pmm3d.tools.page import write_page
from pmm3d.tools.page.inputs import OF_A_BENCHMARK, read_source
from pmm3d.tools.page.run_page import run_page

WRONG = ("x", None, -1, [], {"a": [None]})


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """Pictures are made and not written, because 100 pages of drawings take minutes."""

    @contextmanager
    def picture(drawn, width, height):
        yield Figure(figsize=(width, height))
        drawn.write(b"<svg/>")

    monkeypatch.setattr("pmm3d.tools.page.drawings.picture", picture)


def places(value, path=()):
    """The path of each value in a document; of the elements of a list the first one's."""
    yield path
    below = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in below:
        yield from places(each, (*path, key))


def changed(record, path, value):
    copy = json.loads(json.dumps(record))
    part = copy
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return copy


def test_a_page_is_made_of_a_record_with_any_field_of_a_wrong_type(run, pytestconfig):
    """Each part of each level. The page shows the rest. One wrong value a part, with --all every one."""
    record = record_of(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}')
    found = [path for path in places(record) if path and path[0] not in ("format", "settings")]
    assert len(found) > 80
    for path, wrong in product(found, WRONG) if pytestconfig.getoption("all_tests") else zip(found, cycle(WRONG)):
        with given(path=path, wrong=wrong):
            (run / "run.json").write_text(json.dumps(changed(record, path, wrong)))
            page = run_page(read_source(run))
            assert page.title == "run" and page.tiles


@pytest.mark.parametrize("path, wrong, said, gone, left", [
    (("ranks", "seconds"), 3, "run.json: ranks.seconds is 3: input should be a valid list.", "Time of each", "Grid"),
    (("ranks", "waited", 0), "x", "run.json: ranks.waited.0 is 'x'", "Time of each rank", "Events"),
    (("ranks", "waited"), [1.0], "run.json: ranks is", "Time of each rank", "Events"),
    (("moved", 0, "sent"), [1], "run.json: moved.0 is {", "Ledger", "Memory of each"),
    (("memory", "work"), None, "run.json: memory.work is None", "Memory of each rank", "Waits"),
    (("grid",), {"x": 0}, "run.json: grid.x is 0", "8 ranks on", "Waits"),
    (("grid",), {"x": 1}, "run.json: grid is {'x': 1}: it must name the axes x, y, z, data", "8 ranks on", "Waits"),
    (("hosts", 0, "ranks"), [[0, 9]], "run.json: hosts is not of as many ranks as the rest.", "on 1 host", "Waits"),
    (("starts",), [], "run.json: starts is []", "Starts", "Waits"),
    (("events", 0, "text"), ["y"], "run.json: events.0.text is ['y']: input should be a valid", "anew, on", "Waits"),
    (("program", "blas"), 1, "run.json: program.blas is 1", "kernel", "Waits"),
    (("network",), "MLP", "run.json: network is 'MLP'", "12-16-8-3", "Waits"),
    (("settings",), [1], "run.json: settings is [1]", "Configuration", "Waits"),
])
def test_a_field_of_a_wrong_type_is_named_and_its_part_left_out(run, path, wrong, said, gone, left):
    record = record_of(run)
    assert gone not in said
    (run / "run.json").write_text(json.dumps(changed(record, path, wrong)))
    text = words(write_page(run).read_text())
    assert said in text and gone not in text and left in text


@pytest.mark.parametrize("line, said", [
    (b'{"step": "6", "loss": 1.0}', "1 of 14 lines are left out; line 13: step is '6': input should be a valid"),
    (b'{"step": 6, "loss": [1.0]}', "line 13: loss is [1.0]"),
    (b'{"step": 6, "validation": 3}', "line 13: validation is 3"),
    (b'{"step": 6, "validation": {"loss": "x"}}', "line 13: validation.loss is 'x'"),
    (b'[1, 2]', "line 13: [1, 2]: input should be a valid dictionary"),
    (b'{"loss": 1.0}', "line 13: step is missing"),
    (b'{"step": 6, "l\xff', "line 13: it is not JSON"),
    (b"[" * 100_000, "line 13: it is not JSON"),
])
def test_lines_of_wrong_types_are_left_out_and_told_of(run, line, said):
    lines = (run / "metrics.jsonl").read_bytes().splitlines()[:12]
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines, line, lines[0]]))
    text = words(write_page(run).read_text())
    assert said in text and "Loss" in text


def test_metrics_and_record_that_are_folders(run):
    for name, text in (("metrics.jsonl", "metrics.jsonl cannot be read, so there are no curves: Is a directory"),
                       ("run.json", "run.json cannot be read, so hosts, times, bytes and memory are not known: Is a")):
        (run / name).unlink()
        (run / name).mkdir()
        assert text in words(write_page(run).read_text())


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
    assert page.count("alert(") >= 5 and 'a<b>&"\'run' in words(page)


@pytest.mark.parametrize("make, text", [
    (lambda folder: folder / "nowhere", "is not there"),
    (lambda folder: folder, "is not the folder of a run: it holds neither metrics.jsonl nor run.json"),
    (lambda folder: _written(folder / "x.json", "{"), "is not JSON"),
    (lambda folder: _written(folder / "x.json", '{"gflops": 1}'), "holds no figures of pmm3d bench"),
    (lambda folder: _written(folder / "x.json", json.dumps(dict.fromkeys(OF_A_BENCHMARK, 1))),
     "x.json: its figures are not as pmm3d bench --json writes them"),
])
def test_what_is_no_run_is_refused(tmp_path, make, text):
    with pytest.raises(Pmm3dError, match=re.escape(text)):
        write_page(make(tmp_path))


def test_without_jinja2_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=re.escape('pip install ".[report]"')):
        write_page(run)


def _written(path, text):
    path.write_text(text)
    return path


def test_the_command_says_where_the_page_is_and_ends_with_2_where_it_cannot_be_written(run, tmp_path):
    def report(*options):
        return CliRunner().invoke(app, ["report", str(run), *map(str, options)])

    done = report()
    assert (done.exit_code, done.stdout) == (0, f"wrote {run}/report.html\n")
    (tmp_path / "file").write_text("")
    for output, text in ((tmp_path / "file/x.html", "cannot write"), (tmp_path / "none/x.html", "cannot write")):
        done = report("--output", output)
        assert done.exit_code == 2 and text in done.stderr and "Traceback" not in done.stderr
