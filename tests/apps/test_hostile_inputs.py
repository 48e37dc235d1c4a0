"""apps/hostile.py: what it counts as wrong, and a case of each kind end to end."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "apps"))

from hostile_lab import faults, inputs, trial  # noqa: E402
from hostile_lab.files import forget_trained  # noqa: E402


def verdict(folder, output="pmm3d: it is missing", code=2, spoil=lambda folder: None, monkeypatch=None):
    """Of a case in which the command did and said that."""

    def run(arguments, place, ranks, environ):
        spoil(place)
        return code, output

    monkeypatch.setattr(trial, "run", run)

    def prepare(place):
        (place / "precious").write_text("precious")
        return ("report",)

    return trial.tried(trial.Case("report", "a case", prepare, "missing"), folder / "case").wrong


@pytest.mark.parametrize(
    "what,wrong",
    [
        ({}, []),
        ({"code": None}, ["a silent hang"]),
        ({"code": 1}, ["exit code 1 in place of 2"]),
        ({"output": "Traceback (most recent call last): missing"}, ["a bare traceback"]),
        ({"output": "pmm3d: no"}, ["does not say 'missing'"]),
        ({"output": "pmm3d: missing\npmm3d: missing\n"}, ["says it more than once"]),
        ({"spoil": lambda place: (place / "precious").write_text("")}, ["changed or lost precious"]),
        ({"spoil": lambda place: (place / "precious").unlink()}, ["changed or lost precious"]),
        ({"spoil": lambda place: (place / "x.h5.partial").touch()}, ["left x.h5.partial"]),
    ],
)
def test_what_counts_as_wrong(tmp_path, monkeypatch, what, wrong):
    assert verdict(tmp_path, monkeypatch=monkeypatch, **what) == wrong


def test_there_are_as_many_cases_as_are_promised():
    assert len(inputs.CASES) >= 60 and len(faults.FAULTS) > 15
    assert {"train", "convert", "export", "report"} <= {case.command for case in inputs.CASES}
    assert len({(case.command, case.name) for case in inputs.CASES}) == len(inputs.CASES)


@pytest.mark.parametrize("name", ["lr = inf", "the table is its own target", "metrics.jsonl is a folder"])
def test_an_input_is_tried(tmp_path, name):
    case = next(case for case in inputs.CASES if case.name == name)
    try:
        assert trial.tried(case, tmp_path / "case").wrong == []
    finally:
        forget_trained()


def test_a_fault_is_suffered(tmp_path):
    fault = next(fault for fault in faults.FAULTS if fault.name == "the lock is a link to a file")
    outcome, _ = faults.suffered(fault, tmp_path / "fault", None)
    assert outcome.wrong == []
    assert (tmp_path / "fault/precious").read_text() == "precious"
