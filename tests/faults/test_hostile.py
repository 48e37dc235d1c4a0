"""Hostile inputs: the checks themselves, one input of each kind, and with --all the whole catalogue."""

import pytest
from loops import given

from faults import around, inputs
from faults.__main__ import HOSTILE, hostile, main
from faults.jobs import Ending


def wrong(folder, monkeypatch, output="pmm3d: it is missing", code=2, spoil=lambda folder: None):
    """Judge an invented command with this output, exit code and effect on the files."""

    class Job:
        def __init__(self, command, log, environ, *, folder):
            spoil(folder)

        def end(self):
            return Ending(code, 0.0, output)

    monkeypatch.setattr(inputs, "Job", Job)

    def prepare(place):
        (place / "precious").write_text("precious")
        return ("report",)

    return inputs.tried(inputs.Case("report", "a case", prepare, "missing"), folder).notes


def test_what_counts_as_wrong(tmp_path, monkeypatch):
    for number, (what, notes) in enumerate(
        (
            ({}, []),
            ({"code": None}, ["ended: a silent hang", "code: None, expected (2,)"]),
            ({"code": 1}, ["code: 1, expected (2,)"]),
            ({"output": "Traceback (most recent call last): missing"}, ["cause: a bare traceback"]),
            ({"output": "pmm3d: no"}, ["cause: does not say 'missing'"]),
            ({"output": "pmm3d: missing\npmm3d: missing\n"}, ["cause: says it more than once"]),
            ({"spoil": lambda place: (place / "precious").write_text("")}, ["files: changed or lost precious"]),
            ({"spoil": lambda place: (place / "precious").unlink()}, ["files: changed or lost precious"]),
            ({"spoil": lambda place: (place / "x.h5.partial").touch()}, ["files: left x.h5.partial"]),
        )
    ):
        with given(what=what):
            assert wrong(tmp_path / f"case-{number}", monkeypatch, **what) == notes


def test_the_catalogue_has_all_commands():
    assert len(inputs.CASES) >= 60 and len(around.FAULTS) >= 15
    assert {"train", "convert", "export", "predict", "report"} == {case.command for case in inputs.CASES}
    assert len({(case.command, case.name) for case in inputs.CASES}) == len(inputs.CASES)


def test_options_of_the_other_catalogue_are_refused(monkeypatch, capsys):
    for option in "--times", "--seed":
        with given(option=option):
            monkeypatch.setattr("sys.argv", ["faults", "hostile", option, "3"])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 2 and f"unrecognized arguments: {option} 3" in capsys.readouterr().err


@pytest.mark.nightly("a training and commands")
def test_an_input_of_each_kind(tmp_path):
    """A bad argument, an output that would overwrite its input, and a folder that does not exist."""
    for name in "lr = inf", "the table is its own target", "a folder that is not there":
        case = next(case for case in reversed(inputs.CASES) if case.name == name)
        with given(case=name):
            assert inputs.tried(case, tmp_path / case.command).notes == []


def test_a_fault_around_a_training(tmp_path):
    fault = next(fault for fault in around.FAULTS if fault.name == "the lock is a link to a file")
    outcome, _ = around.suffered(fault, tmp_path / "fault", None)
    assert outcome.notes == []
    assert (tmp_path / "fault/precious").read_text() == "precious"


@pytest.mark.thorough("the catalogue of hostile inputs: 80 commands and 18 disturbed trainings, minutes")
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_catalogue(kind, tmp_path):
    outcomes = list(hostile(tmp_path, [kind]))
    wrong = [(outcome.variant, outcome.notes, outcome.output) for outcome in outcomes if outcome.failed]
    assert outcomes and wrong == []
