"""The pages contain the tables and figures of the results, and all results are complete."""

import json
import re

import pytest
import records
import tables
from loops import given, looped

from pmm3d.model.environment import TASK_COUNTS

VERSIONS = {"3.11", "3.13", "1.17"}  # of Python and SciPy
FIGURE = re.compile(r"(?<![\w.])\d+\.\d{2,}")


@looped("page", tables.PAGES)
def test_the_pages_have_the_tables_of_the_results(page):
    text = page.read_text()
    assert tables.MARKED.search(text) and tables.page(text) == text, "python benchmarks/tables.py --write"


def test_figures_in_the_text_are_those_of_the_results_that_a_section_names():
    results = {path.stem: path.read_text() for path in records.RESULTS.glob("*.json")}
    for page in tables.PAGES:
        for section in re.split(r"^#+ ", page.read_text(), flags=re.M):
            names = {found[1] for found in tables.MARKED.finditer(section)} | {*re.findall(r"`([\w-]+)`", section)}
            text = re.sub(r"```.*?```", "", tables.MARKED.sub("", section), flags=re.S)
            known = {*FIGURE.findall("".join(results.get(name, "") for name in names))}
            with given(page=page.name, section=section.splitlines()[:1]):
                assert {*FIGURE.findall(text)} <= known | VERSIONS


@looped("path", records.RESULTS.glob("*.json"))
def test_every_result_says_where_it_was_measured(path):
    record = json.loads(path.read_text())
    assert {"cpu", "cores", "mpi"} <= {*record["machine"]} and record["machine"]["cpu"]
    assert record["date"].startswith("20") and record["command"] and record["tables"]
    assert record.get("transcribed") or (record["commit"] and record["machine"]["software"])
    for table in record["tables"]:
        assert len({len(row) for row in table["rows"]}) == 1 and len(table["rows"]) > 1


def test_all_results_are_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tables.py"])
    tables.main()
    printed = capsys.readouterr().out
    for path in records.RESULTS.glob("*.json"):
        with given(path=path.name):
            assert f"## {path.stem}\n" in printed
            for table in json.loads(path.read_text())["tables"]:
                rows = [[tables.GOAL.sub("", cell) for cell in row] for row in table["rows"]]
                assert records.markdown(rows) in printed
    assert "goal" not in printed


def test_a_section_is_made_anew_from_its_result(tmp_path, monkeypatch, capsys):
    options = records.parser("").parse_args(["--json", str(tmp_path / "one.json")])
    monkeypatch.setattr("sys.argv", ["benchmarks/one.py", "--json", "one.json"])
    monkeypatch.setattr(records, "software", lambda: {"numpy": "2.4"})
    records.report(options, ("A title", [["a", "b"], ["1", "2"]]))
    assert "| 1 | 2 |" in capsys.readouterr().out
    text = "# Page\n\n<!-- result: one -->\nold\n<!-- end -->\n\nBelow.\n"
    made = tables.page(text, tmp_path)
    assert made.startswith("# Page\n\n<!-- result: one -->\n20") and made.endswith("<!-- end -->\n\nBelow.\n")
    assert ": `python benchmarks/one.py`\n\nA title\n\n| a | b |\n|---|---|\n| 1 | 2 |" in made and "numpy 2.4" in made
    assert "old" not in made and tables.page(made, tmp_path) == made

    options.add = True
    monkeypatch.setattr("sys.argv", ["benchmarks/one.py", "--grid", "2x1x1", "--json=one.json", "--add"])
    records.report(options, ("A title", [["a", "b"], ["3", "**4** (x; goal 3, peer 2)"]]), ("Another", [["c"], ["5"]]))
    made = tables.page(text, tmp_path)
    assert ": `python benchmarks/one.py`, `python benchmarks/one.py --grid 2x1x1`\n" in made
    assert "| 1 | 2 |\n| 3 | **4** (x; peer 2) |\n\nAnother\n\n| c |" in made
    chosen = tables.page(text.replace("one -->", "one tables=1 rows=2 columns=1-2 brief -->"), tmp_path)
    assert "\n\n| a | b |\n|---|---|\n| 3 | **4** (x; peer 2) |\n\n<!--" in chosen
    assert not re.search("title|Another|benchmarks/one|numpy|commit", chosen)
    options.add = False
    records.report(options, ("A title", [["m", "r"], ["8", "**1.15**, 1.12 to 1.16 (676.4 and 775.6 ms)"]]))
    chosen = tables.page(text.replace("one -->", "one brief ratios -->"), tmp_path)
    assert "\n| 8 | 1.15 |\n" in chosen
    for words, error in (("rows=3", IndexError), ("row=1", ValueError), ("brif", ValueError)):
        with given(words=words), pytest.raises(error):
            tables.page(text.replace("one -->", f"one {words} -->"), tmp_path)


def test_the_command_has_its_launcher(monkeypatch):
    for name in TASK_COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["one.py", "--json", "a b.json", "--title", "c d"])
    assert records.command() == "python one.py --title 'c d'"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert records.command() == "srun -n 4 python one.py --title 'c d'"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert records.command() == "python -m pmm3d.launcher -n 8 one.py --title 'c d'"


def test_what_cannot_be_recorded_is_refused_before_the_measurement(tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"commit": ""}')
    made = records.parser("")
    made.add_argument("--size", type=int, default=4)
    moves = lambda words: made.refuse(made.parse_args(words), "--size", "--moves")
    moves(["--size", "4"])
    for call, words, text in (
        (made.parse_args, ["--json", f"{tmp_path}/no/one.json"], "there is no folder"),
        (made.parse_args, ["--add"], "needs --json"),
        (made.parse_args, ["--add", "--json", f"{tmp_path}/new.json"], "Leave --add out in the first run"),
        (made.parse_args, ["--add", "--json", f"{tmp_path}/old.json"], "is of commit unknown"),
        (moves, ["--size", "5"], "--size has no effect on --moves. Leave it out"),
    ):
        with given(words=words), pytest.raises(SystemExit):
            call(words)
        assert text in capsys.readouterr().err
