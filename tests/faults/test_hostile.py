"""Hostile inputs: the checks themselves, one input of each kind, and with --all the whole catalogue."""

import pytest
from loops import given

from faults import inputs
from faults.__main__ import HOSTILE, hostile
from faults.jobs import Ending
from faults.judgement import check_files, fingerprints, refused

PRECIOUS = "precious"
MISSING = "pmm3d: it is missing"
ENDS = [
    (2, MISSING, lambda folder: None, []),
    (None, MISSING, lambda folder: None, ["ended: a silent hang", "code: None, expected (2,)"]),
    (1, MISSING, lambda folder: None, ["code: 1, expected (2,)"]),
    (2, "Traceback (most recent call last): missing", lambda folder: None, ["cause: a bare traceback"]),
    (2, "pmm3d: no", lambda folder: None, ["cause: does not say 'missing'"]),
    (2, f"{MISSING}\n{MISSING}\n", lambda folder: None, ["cause: says it more than once"]),
    (2, MISSING, lambda folder: (folder / PRECIOUS).write_text(""), ["files: changed or lost precious"]),
    (2, MISSING, lambda folder: (folder / PRECIOUS).unlink(), ["files: changed or lost precious"]),
    (2, MISSING, lambda folder: (folder / "x.h5.partial").touch(), ["files: left x.h5.partial"]),
]
"""Exit code, output and effect of an invented command, and what is wrong with them."""


def test_what_counts_as_wrong(tmp_path):
    for number, (code, output, spoil, notes) in enumerate(ENDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / PRECIOUS).write_text(PRECIOUS)
        before = dict(fingerprints(folder))
        spoil(folder)
        outcome = refused("report", "a case", Ending(code, 0.0, output), "missing", 2)
        check_files(outcome, folder, before)
        assert outcome.notes == notes


@pytest.mark.nightly("a training and commands")
def test_an_input_of_each_kind(tmp_path):
    """A bad argument, an output that would overwrite its input, and a folder that does not exist."""
    for name in "lr = inf", "the output is the input", "a folder that is not there":
        case = next(case for case in reversed(inputs.CASES) if case.name == name)
        with given(case=name):
            assert inputs.tried(case, tmp_path / case.command).notes == []


@pytest.mark.thorough("the catalogue of hostile inputs: commands, minutes")
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_catalogue(kind, tmp_path):
    outcomes = list(hostile(tmp_path, [kind]))
    wrong = [(outcome.variant, outcome.notes, outcome.output) for outcome in outcomes if outcome.failed]
    assert outcomes and wrong == []
