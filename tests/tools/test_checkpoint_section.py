"""What the page of a run says of its checkpoints."""

import json

import pytest

from pmm3d import Pmm3dError
from pmm3d.nn.training.run_file import RunFile
from pmm3d.tools.page import write_page
from pmm3d.tools.page.run_page import checkpoint_section

RECORD = {
    "events": [{"when": "then", "step": 0, "what": "started", "text": ""},
               *({"when": "then", "step": 1000 * number, "what": "checkpoint", "text": "step", "seconds": seconds}
                 for number, seconds in ((1, 9.0), (2, 3.1), (3, 3.0)))],
    "starts": [{"began": "then", "state": "running", "ranks": 2, "grid": {"x": 1, "y": 1, "z": 1, "data": 2},
                "steps": 3000, "seconds": 6465.1}],
    "ranks": {"seconds": [6465.1] * 2, "saving": [15.1, 15.0], "peak_memory": [1, 1], "waited": [0.0, 0.0],
              "off_core": [0.0, 0.0], "computed": {}},
}


def record(**changes):
    return RunFile.model_validate({**RECORD, **changes})


def test_it_says_how_often_and_how_often_now():
    section = checkpoint_section(record())
    assert section.lead == (
        "The run waited 3.1 s for a checkpoint, the median of 3. With a failure every 24 h on this job, write a "
        "checkpoint every 12 min 9 s (Daly), every 339 steps: 0.84% of the time is lost. The failures are assumed: "
        "pmm3d report --mtbf HOURS says others.")
    assert section.tables[0].rows == [("best, by Daly", "339", "12 min 9 s", "0.84%"),
                                      ("now", "1,000", "35 min 50 s", "1.38%")]


def test_failures_that_are_given():
    section = checkpoint_section(record(), 6)
    assert "a failure every 6 h" in section.lead and "assumed" not in section.lead


def test_one_checkpoint_says_nothing_of_how_often_they_are():
    events = RECORD["events"][:2]
    section = checkpoint_section(record(events=events))
    assert section.lead.startswith("The run waited 9 s for a checkpoint. With") and len(section.tables[0].rows) == 1


@pytest.mark.parametrize("changes", [
    {"events": []}, {"events": [{"when": "", "step": 1, "what": "checkpoint", "text": ""}]},
    {"starts": [{**RECORD["starts"][0], "steps": 0}]}, {"starts": [{**RECORD["starts"][0], "steps": None}]},
    {"ranks": {**RECORD["ranks"], "saving": [7000.0, 0.0]}}])
def test_where_nothing_is_known(changes):
    assert checkpoint_section(record(**changes)) is None
    assert "cannot be said" in checkpoint_section(record(**changes), 5.0).lead


@pytest.mark.parametrize("mtbf", [0.0, -1.0, float("nan"), float("inf")])
def test_failures_that_are_none_are_refused(mtbf):
    with pytest.raises(Pmm3dError, match="--mtbf"):
        checkpoint_section(record(), mtbf)


def test_a_benchmark_has_no_checkpoints(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    path.write_text("[]")
    monkeypatch.setattr("pmm3d.tools.page.inputs.read_source", lambda path: [{}])
    with pytest.raises(Pmm3dError, match="leave --mtbf out"):
        write_page(path, mtbf=5)


def test_the_page_has_it(tmp_path):
    (tmp_path / "run.json").write_text(record().model_dump_json())
    page = write_page(tmp_path, mtbf=24).read_text()
    assert "Checkpoints" in page and "every 339 steps" in page and "35 min 50 s" in page


def test_the_page_says_what_it_cannot(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}))
    assert "how often to write them (--mtbf) cannot be said" in write_page(tmp_path, mtbf=24).read_text()
    assert "--mtbf" not in write_page(tmp_path).read_text()
