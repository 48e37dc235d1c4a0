"""docs/benchmarks.md has the tables that benchmarks/tables.py makes of the results, and all results are complete."""

import json

import records
import tables
from loops import given


def test_the_page_has_the_tables_of_the_results():
    text = tables.PAGE.read_text()
    assert tables.page(text) == text, "python benchmarks/tables.py --write docs/benchmarks.md"


def test_every_result_is_shown_and_says_where_it_was_measured():
    shown = {found[1] for found in tables.MARKED.finditer(tables.PAGE.read_text())}
    assert shown == {path.stem for path in records.RESULTS.glob("*.json")} and len(shown) > 25
    for path in records.RESULTS.glob("*.json"):
        with given(path=path.name):
            record = json.loads(path.read_text())
            assert {"cpu", "cores", "mpi"} == {*record["machine"]} and record["machine"]["cpu"]
            assert record["date"].startswith("20") and record["command"] and record["tables"]
            assert record.get("transcribed") or record["commit"]
            for table in record["tables"]:
                assert len({len(row) for row in table["rows"]}) == 1 and len(table["rows"]) > 1


def test_a_section_is_made_anew_from_its_result(tmp_path, monkeypatch, capsys):
    options = records.parser("").parse_args(["--json", str(tmp_path / "one.json")])
    monkeypatch.setattr("sys.argv", ["benchmarks/one.py", "--json", "one.json"])
    records.report(options, ("A title", [["a", "b"], ["1", "2"]]))
    assert "| 1 | 2 |" in capsys.readouterr().out
    text = "# Page\n\n<!-- result: one -->\nold\n<!-- end -->\n\nBelow.\n"
    made = tables.page(text, tmp_path)
    assert made.startswith("# Page\n\n<!-- result: one -->\n\n20") and made.endswith("<!-- end -->\n\nBelow.\n")
    assert "    python benchmarks/one.py --json one.json\n\nA title\n\n| a | b |\n|---|---|\n| 1 | 2 |" in made
    assert "old" not in made and tables.page(made, tmp_path) == made
