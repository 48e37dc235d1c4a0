"""apps/faults.py: how it reads what jobs say, what it counts as a failure, and a fault or two end to end."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

APPS = Path(__file__).parents[2] / "apps"
HUNG = """pmm3d: the job hangs, and is ended.
  ranks 0, 2-3 wait in agreement on matmul #5 on axis all for 5.1 s, at loop.py:16 in <module>
  rank 1 (host n1, pid 17) never came: stopped by a signal (SIGSTOP, or a debugger)
"""
STOPPED = r"(?P<rank>rank \d+) \(host \S+, pid \d+\) never came: stopped by a signal"


@pytest.fixture
def judgement(monkeypatch):
    monkeypatch.syspath_prepend(str(APPS))
    from fault_lab import jobs, judgement

    judgement.Ending = jobs.Ending
    return judgement


def judged(judgement, code=70, said=HUNG, seconds=1.0, **expected):
    expected = {"causes": (STOPPED,), "rank": 1, "codes": (70,)} | expected
    ending = judgement.Ending(code, seconds, said)
    return judgement.judged("stopped", "by chance", ending, judgement.Expected(**expected))


@pytest.mark.parametrize("text, ranks", [
    ("rank 3: all_gather at x.py:7; ranks 0-2, 11: shift", [[3], [0, 1, 2, 11]]),
    ("the ranks' arrays do not fit; needs 4 ranks", []),
])
def test_the_ranks_that_a_message_names(judgement, text, ranks):
    assert judgement.ranks_in(text) == ranks


def test_a_job_that_says_and_does_what_it_should(judgement):
    outcome = judged(judgement)
    assert outcome.failed == [] and outcome.checks == dict.fromkeys(("ended", "rank", "cause", "code"), True)


@pytest.mark.parametrize("changes, failed", [
    ({"code": None}, ["ended", "code"]),
    ({"code": 0}, ["code"]),
    ({"code": 0, "codes": ()}, ["code"]),
    ({"code": 75, "codes": ()}, ["code"]),
    ({"rank": 2}, ["rank"]),
    ({"causes": (r"(?P<rank>ranks? [\d, -]+) wait in",), "rank": 2}, ["rank"]),
    ({"said": "rank 1 is dead"}, ["rank", "cause"]),
])
def test_what_counts_as_a_failure(judgement, changes, failed):
    assert judged(judgement, **changes).failed == failed


def test_the_table_counts_and_one_failure_fails_the_row(judgement):
    outcomes = [judged(judgement, seconds=seconds) for seconds in (1.0, 2.0, 9.0)]
    outcomes[0].note("result", True)
    last_row = lambda: judgement.table(outcomes).splitlines()[-1]
    assert last_row() == "| stopped | 3 | 2.0 | 9.0 | 3/3 | 3/3 | 3/3 | 3/3 | 1/1 | - | ok |"
    outcomes[1].note("result", False, "other bits")
    outcomes[1].note("result", True)
    assert last_row() == "| stopped | 3 | 2.0 | 9.0 | 3/3 | 3/3 | 3/3 | 3/3 | 1/2 | - | FAILS |"
    assert [outcome["failed"] for outcome in json.loads(judgement.to_json(outcomes))] == [[], ["result"], []]


def test_faults_end_to_end(tmp_path):
    """One of a rank that raises, one of a launcher with too few ranks."""
    found = tmp_path / "found.json"
    command = [sys.executable, str(APPS / "faults.py"), "--times", "1", "--only", "raising,ranks"]
    path = os.pathsep.join(filter(None, (str(APPS.parent), *sys.path)))
    done = subprocess.run([*command, "--json", str(found)], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| raising | 1 |" in done.stdout and done.stdout.count("| ok |") == 2
    raising, ranks = json.loads(found.read_text())
    assert raising["exit_code"] == 1 and set(raising["checks"]) >= {"ended", "rank", "cause", "code", "result"}
    assert ranks["exit_code"] in (1, 2) and ranks["checks"]["cause"] is True


def test_a_checkpoint_that_is_lost_or_damaged_is_found(judgement, tmp_path):
    """The judge's own eyes: whole checkpoints pass; a byte that is another, or a folder that is gone, does not."""
    from fault_lab.lab import Lab, Run, check_checkpoints

    lab = Lab(tmp_path, 4, random.Random(0))
    run = Run(lab, "run", "2x1x1", 2, own_loop=True)
    ending = run.start().end()
    assert ending.code == 0 and ending.output.count(": wrote ") == 4, ending.output

    def checks():
        outcome = judgement.Outcome("kind", "variant")
        check_checkpoints(run, ending.output, outcome)
        return outcome.checks

    assert checks() == {"checkpoints": True}
    newest = run.checkpoints()[-1]
    newest.rename(tmp_path / "aside")
    assert checks() == {"checkpoints": False}
    (tmp_path / "aside").rename(newest)
    file = newest / "rank-00001.h5"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert checks() == {"checkpoints": False}
