"""Injected faults: the checks themselves, one case of each kind, and with --all the whole catalogue."""

import json
import random
import shutil
import signal

import pytest
from cluster import cluster
from loops import given

from faults import storage
from faults.__main__ import injected
from faults.injected import KILLED, KINDS, signalled, stopped
from faults.jobs import Ending
from faults.judgement import Expected, Outcome, judged, ranks_in, table, to_json
from faults.lab import Lab, Run, check_checkpoints

HUNG = """pmm3d: the job hangs, and is ended.
  ranks 0, 2-3 wait in agreement on matmul #5 on axis all for 5.1 s, at loop.py:16 in <module>
  rank 1 (host n1, pid 17) never came: stopped by a signal (SIGSTOP, or a debugger)
"""
STOPPED = r"(?P<rank>rank \d+) \(host \S+, pid \d+\) never came: stopped by a signal"


def judged_as(code=70, said=HUNG, seconds=1.0, **expected):
    expected = {"causes": (STOPPED,), "rank": 1, "codes": (70,)} | expected
    return judged("stopped", "by chance", Ending(code, seconds, said), Expected(**expected))


def test_the_ranks_that_a_message_names():
    assert ranks_in("rank 3: all_gather at x.py:7; ranks 0-2, 11: shift") == [[3], [0, 1, 2, 11]]
    assert ranks_in("the ranks' arrays do not fit; needs 4 ranks") == []


def test_what_counts_as_a_failure():
    right = judged_as()
    assert right.failed == [] and right.checks == dict.fromkeys(("ended", "rank", "cause", "code"), True)
    for changes, failed in (
        ({"code": None}, ["ended", "code"]),
        ({"code": 0}, ["code"]),
        ({"code": 0, "codes": ()}, ["code"]),
        ({"code": 75, "codes": ()}, ["code"]),
        ({"rank": 2}, ["rank"]),
        ({"causes": (r"(?P<rank>ranks? [\d, -]+) wait in",), "rank": 2}, ["rank"]),
        ({"said": "rank 1 is dead"}, ["rank", "cause"]),
    ):
        with given(changes=changes):
            assert judged_as(**changes).failed == failed


def test_the_table_counts_and_one_failure_fails_the_row():
    outcomes = [judged_as(seconds=seconds) for seconds in (1.0, 2.0, 9.0)]
    outcomes[0].note("result", True)
    last_row = lambda: table(outcomes).splitlines()[-1]
    assert last_row() == "| stopped | 3 | 2.0 | 9.0 | 3/3 | 3/3 | 3/3 | 3/3 | 1/1 | - | ok |"
    outcomes[1].note("result", False, "other bits")
    outcomes[1].note("result", True)
    assert last_row() == "| stopped | 3 | 2.0 | 9.0 | 3/3 | 3/3 | 3/3 | 3/3 | 1/2 | - | FAILS |"
    assert [outcome["failed"] for outcome in json.loads(to_json(outcomes))] == [[], ["result"], []]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs on 2 ranks. Three of them are undisturbed and serve all tests."""
    with Lab(tmp_path_factory.mktemp("faults"), 2, random.Random(0), epochs=2, short="1.5") as lab:
        yield lab


def right(outcome):
    assert outcome.failed == [], (outcome.notes, outcome.output)
    return outcome


@pytest.mark.nightly("trainings that are disturbed")
def test_a_killed_rank(lab):
    outcome = right(
        signalled(
            lab,
            "killed",
            signal.SIGKILL,
            lambda run, job: run.checkpoints(),
            0.0,
            lambda victim: Expected(KILLED, victim),
        )
    )
    assert [outcome.checks[check] for check in ("rank", "result", "files")] == [True] * 3


@pytest.mark.nightly("trainings that are disturbed")
def test_a_stopped_stage_of_a_pipeline(lab):
    """Nothing of the last checkpoint is lost: the resumed run ends with the bits of an undisturbed one."""
    outcome = right(stopped(lab, pipe=2))
    assert [outcome.checks[check] for check in ("rank", "cause", "result", "files")] == [True] * 4


@pytest.mark.nightly("trainings that are disturbed")
def test_a_full_disk(lab):
    assert "ulimit" in right(storage.files_limited(lab)).variant


@pytest.mark.nightly("trainings that are disturbed")
def test_a_damaged_checkpoint_is_passed_over(lab):
    assert right(storage.damaged_checkpoint(lab)).exit_code == 0


@pytest.mark.nightly("trainings that are disturbed")
def test_a_checkpoint_that_is_lost_or_damaged_is_found(lab, tmp_path):
    """The check itself: complete checkpoints pass; a changed byte or a missing folder does not."""
    undisturbed = lab.reference(Run(lab, "", "2x1x1", 1, own_loop=True))
    run = Run(lab, "copy", "2x1x1", 1, own_loop=True)
    shutil.copytree(undisturbed.folder, run.folder)
    said = (lab.folder / f"{undisturbed.name}.1.log").read_text()
    assert said.count(": wrote ") == 4, said

    def checks():
        outcome = Outcome("kind", "variant")
        check_checkpoints(run, said, outcome)
        return outcome.checks

    assert checks() == {"files": True}
    newest = run.checkpoints()[-1]
    newest.rename(tmp_path / "aside")
    assert checks() == {"files": False}
    (tmp_path / "aside").rename(newest)
    file = newest / "rank-00001.h5"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert checks() == {"files": False}


@pytest.mark.thorough("the catalogue of injected faults: jobs of 4 ranks, minutes")
@pytest.mark.parametrize("kind", KINDS)
def test_the_catalogue(kind, tmp_path):
    if kind == "network":
        try:
            cluster.check_machine()
        except cluster.ClusterError as error:
            pytest.skip(str(error))
    for outcome in injected(tmp_path, [kind]):
        right(outcome)
