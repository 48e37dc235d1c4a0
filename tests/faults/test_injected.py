"""Injected faults: the checks themselves, one case of each kind, and with --all the whole catalogue."""

import random
import shutil
import signal
from functools import partial

import pytest
from cluster import cluster

from faults import storage
from faults.__main__ import injected
from faults.injected import KILLED, KINDS, signalled, stopped
from faults.jobs import Ending
from faults.judgement import Expected, Outcome, judged, ranks_in, table
from faults.lab import Lab, Run, check_checkpoints

HUNG = """pmm3d: the job hangs, and is ended.
  ranks 0, 2-3 wait in agreement on matmul #5 on axis all for 5.1 s, at loop.py:16 in <module>
  rank 1 (host n1, pid 17) never came: stopped by a signal (SIGSTOP, or a debugger)
"""
STOPPED = r"(?P<rank>rank \d+) \(host \S+, pid \d+\) never came: stopped by a signal"


def judged_as(code=70, said=HUNG, **expected):
    expected = {"causes": (STOPPED,), "rank": 1, "codes": (70,)} | expected
    return judged("stopped", "by chance", Ending(code, 2.0, said), Expected(**expected))


def test_the_ranks_that_a_message_names():
    assert ranks_in("rank 3: all_gather at x.py:7; ranks 0-2, 11: shift") == [[3], [0, 1, 2, 11]]
    assert ranks_in("the ranks' arrays do not fit; needs 4 ranks") == []


def test_what_counts_as_a_failure():
    assert judged_as().checks == dict.fromkeys(("ended", "rank", "cause", "code"), True)
    for changes, failed in (
        ({"code": None}, ["ended", "code"]),
        ({"code": 0}, ["code"]),
        ({"code": 0, "codes": ()}, ["code"]),
        ({"code": 75, "codes": ()}, ["code"]),
        ({"rank": 2}, ["rank"]),
        ({"causes": (r"(?P<rank>ranks? [\d, -]+) wait in",), "rank": 2}, ["rank"]),
        ({"said": "rank 1 is dead"}, ["rank", "cause"]),
    ):
        assert judged_as(**changes).failed == failed


def test_the_table_counts_and_one_failure_fails_the_row():
    outcomes = [judged_as() for _ in range(3)]
    outcomes[0].note("result", True)
    assert table(outcomes).endswith("| stopped | 3 | 2.0 | 2.0 | 3/3 | 3/3 | 3/3 | 3/3 | 1/1 | - | ok |")
    for good in (False, True):
        outcomes[1].note("result", good)
    assert table(outcomes).endswith("| 1/2 | - | FAILS |")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Runs on 2 ranks. Three of them are undisturbed and serve all tests."""
    with Lab(tmp_path_factory.mktemp("faults"), 2, random.Random(0), epochs=2, short="1.5") as lab:
        yield lab


def right(outcome):
    assert outcome.failed == [], (outcome.notes, outcome.output)
    return outcome


@pytest.mark.nightly("trainings that are disturbed")
def test_one_case_of_four_kinds(lab):
    """A killed rank, a stopped stage of a pipeline, a full disk, and a damaged checkpoint. Nothing of the last
    checkpoint is lost: the resumed run ends with the bits of an undisturbed one."""
    kill = partial(signalled, kind="killed", number=signal.SIGKILL, ready=lambda run, job: run.checkpoints())
    for case in (
        partial(kill, share=0.0, expected=lambda victim: Expected(KILLED, victim)),
        partial(stopped, pipe=2),
        storage.files_limited,
        storage.damaged_checkpoint,
    ):
        outcome = right(case(lab))
        assert [outcome.checks[check] for check in ("cause", "result", "files")] == [True] * 3, outcome


@pytest.mark.nightly("trainings that are disturbed")
def test_a_checkpoint_that_is_lost_or_damaged_is_found(lab, tmp_path):
    """The check itself: complete checkpoints pass; a changed byte or a missing folder does not."""
    undisturbed = lab.reference(Run(lab, "", "2x1x1", 1, own_loop=True))
    run = Run(lab, "copy", "2x1x1", 1, own_loop=True)
    shutil.copytree(undisturbed.folder, run.folder)
    said = (lab.folder / f"{undisturbed.name}.1.log").read_text()

    def whole():
        outcome = Outcome("kind", "variant")
        check_checkpoints(run, said, outcome)
        return outcome.checks["files"]

    assert whole()
    newest = run.checkpoints()[-1].rename(tmp_path / "aside")
    assert not whole()
    file = newest.rename(run.folder / "checkpoints" / undisturbed.checkpoints()[-1].name) / "rank-00001.h5"
    storage.change_byte(file, file.stat().st_size - 1, lab)
    assert not whole()


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
