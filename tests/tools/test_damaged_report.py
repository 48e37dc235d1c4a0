"""`pmm3d report` of damaged files, wrong types, hostile contents, and folders without a run."""

import json
import re
import sys
from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure
from run_pages import Text, record_of, words
from typer.testing import CliRunner

from pmm3d import Pmm3dError
from pmm3d.errors import MissingPackageError
from pmm3d.tools.commands import app
from pmm3d.tools.page import write_page


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """Pictures are made but not written, because the drawings of 100 pages take minutes."""

    @contextmanager
    def picture(drawn, width, height):
        yield Figure(figsize=(width, height))
        drawn.write(b"<svg/>")

    monkeypatch.setattr("pmm3d.tools.page.drawings.picture", picture)


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
    "make, text",
    [
        (lambda folder: folder / "nowhere", "is not there"),
        (lambda folder: folder, "is not the folder of a run: it contains neither metrics.jsonl nor run.json"),
        (lambda folder: _written(folder / "x.json", "{"), "is not JSON"),
        (
            lambda folder: _written(folder / "x.json", '{"gflops": 1}'),
            "x.json contains no figures of pmm3d bench --json",
        ),
        (lambda folder: _written(folder / "x.json", "[1, 2]"), "x.json contains no figures of pmm3d bench --json"),
        (lambda folder: _written(folder / "x.json", "[]"), "x.json contains no figures of pmm3d bench --json"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, text):
    with pytest.raises(Pmm3dError, match=re.escape(text)):
        write_page(make(tmp_path))


def test_without_jinja2_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=re.escape('pip install "pmm3d[report]"')):
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
        done = report("--out", output)
        assert done.exit_code == 2 and text in done.stderr and "Traceback" not in done.stderr
