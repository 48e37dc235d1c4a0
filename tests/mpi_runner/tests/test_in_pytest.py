"""The plugin in an inner pytest, on folders of tests that pass, fail, hang and crash."""

import json
import re

import pytest
from inner import run_pytest
from mpi_runner import durations

pytestmark = pytest.mark.nightly("each starts a pytest that starts ranks")

GOOD = """
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from mpi4py import MPI

HERE = Path(__file__).parent
pytestmark = pytest.mark.parallel([1, 3])

@pytest.mark.parallel([1, 3, 4])
def test_sum(comm, nranks):
    assert comm.allreduce(1) == nranks == comm.size

def test_more_than_the_ranks(comm, half):
    assert 2 * half == comm.size

def test_shared_path_is_shared_and_tmp_path_is_not(comm, shared_path, tmp_path):
    (shared_path / str(comm.rank)).touch()
    comm.barrier()
    assert len(os.listdir(shared_path)) == comm.size == len(set(comm.allgather(tmp_path)))

@given(n=st.integers(), x=st.floats(allow_nan=False))
def test_ranks_draw_the_same(comm, n, x):
    assert comm.allgather((n, x)) == comm.size * [(n, x)]

def test_skipped(comm):
    pytest.skip("for a reason")

@pytest.mark.xfail
def test_known_bug(comm):
    assert comm.size == 0

@pytest.mark.parallel([2])
class TestOfAClass:
    def test_nearest_mark_wins(self, comm):
        assert comm.size == 2

@pytest.mark.parallel([2])
@pytest.mark.own_world("reads COMM_WORLD")
def test_own_world(comm):
    assert MPI.COMM_WORLD.Get_size() == 2

@pytest.fixture(scope="module")
def made_once():
    return []

RAN = []  # both cases, or one of them if another block of ranks was faster

@pytest.mark.parallel([2])
@pytest.mark.parametrize("number", [1, 2])
def test_module_fixture(comm, made_once, number):
    RAN.append(number)
    made_once.append(number)
    assert made_once == RAN and MPI.COMM_WORLD.Get_size() == 4

@pytest.mark.parallel([2])
@pytest.mark.parametrize("number", range(4))
def test_two_meet(comm, number):
    # A block runs at most two of four tests before it waits for the other block.
    (HERE / f"met-{number}").touch()
    while len(list(HERE.glob("met-*"))) == 1:
        time.sleep(0.01)
"""

ONE_PROCESS = """
import subprocess, sys

def test_mpi_is_not_started():
    from mpi4py import MPI
    assert not MPI.Is_initialized()

def test_comm_needs_the_mark(comm):
    pass

def test_starts_two_processes():
    for _ in range(2):
        subprocess.run(["true"], check=True)
"""

BAD = """
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

HERE = Path(__file__).parent
EXITED, HUNG = (HERE / "exited").exists(), (HERE / "hung").exists()
pytestmark = pytest.mark.parallel([3])

# Four tests. While the first block is in the first test and has claimed one more, the second block is in another.

@pytest.mark.parallel([1])
def test_exits(comm):
    while not (HERE / "beside the exit").exists():
        time.sleep(0.01)
    (HERE / "exited").touch()
    os._exit(3)

@pytest.mark.parallel([1])
@pytest.mark.parametrize("number", range(3))
def test_beside_the_exit(comm, number):
    if not EXITED:
        (HERE / "beside the exit").touch()
        time.sleep(60)

@pytest.mark.parallel([1])
@pytest.mark.deadline(3)
def test_hangs(comm):
    while not (HERE / "beside the hang").exists():
        time.sleep(0.01)
    (HERE / "hung").touch()
    time.sleep(60)

@pytest.mark.parallel([1])
@pytest.mark.parametrize("number", range(3))
def test_beside_the_hang(comm, number):
    if not HUNG:
        (HERE / "beside the hang").touch()
        time.sleep(60)

def test_one_rank_fails(comm):
    print("rank", comm.rank, "was here")
    assert comm.rank != 1, "not me"

def test_all_ranks_fail(comm):
    assert comm.size == 0

def test_skipped_on_one_rank(comm):
    if comm.rank == 0:
        pytest.skip("only here")

@given(st.integers(0, 1000))
def test_hypothesis_fails_on_one_rank(comm, n):
    comm.barrier()
    assert comm.rank != 1 or n < 100

@pytest.mark.deadline(1)
def test_one_rank_raises_while_others_wait(comm):
    print("about to wait")
    if comm.rank == 1:
        raise ValueError("raised on one rank")
    comm.barrier()

@pytest.mark.deadline(1)
def test_all_ranks_hang(comm):
    time.sleep(60)

def test_next_after_hang(comm):
    comm.barrier()

def test_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()

def test_next_after_crash(comm):
    comm.barrier()

def test_breaks_the_end_of_the_job(comm):
    if comm.rank == 1:
        import atexit
        atexit.register(os._exit, 5)
"""

MARKS = """
import pytest

@pytest.mark.parallel(2)
@pytest.mark.nightly("long")
def test_long(comm):
    pass

@pytest.mark.thorough("longer")
def test_longer():
    pass

def test_short():
    pass
"""

JOBS = """
SCRIPT = '''
    import sys
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
    print("rank", rank, *sys.argv[1:])
    print("error", rank, file=sys.stderr)
    sys.exit(3)
'''
HANGS = '''
    from mpi4py import MPI
    print("before")
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.recv(source=1)
'''

def test_a_script_runs_on_every_rank(job):
    result = job(2, SCRIPT, "argument", env={"SOME": 1})
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))[:2] == [
        "rank 0 argument", "rank 1 argument"
    ]
    assert "error 0" in result.stderr and "error 1" in result.stderr
    assert result.returncode != 0

def test_hangs(job):
    job(2, HANGS, timeout=6)
"""

CRASHES_ONCE = """
import os
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AGAIN = (HERE / "0").exists()

@pytest.mark.parallel([1])
@pytest.mark.parametrize("number", range(4))
def test_crashes_beside_another(comm, number):
    if AGAIN:
        return
    if number == 0:
        while not list(HERE.glob("[123]")):
            time.sleep(0.01)
    (HERE / str(number)).touch()
    if number == 0:
        os._exit(3)
    time.sleep(60)

@pytest.mark.parallel([2])
def test_not_reached(comm):
    pass
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return run_pytest(
        tmp_path_factory.mktemp("good"),
        "-v",
        "--record-durations=durations.json",
        test_good=GOOD,
        test_one_process=ONE_PROCESS,
    )


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return run_pytest(tmp_path_factory.mktemp("bad"), test_bad=BAD)


def test_each_test_runs_once_on_each_number_of_ranks_with_its_outcome(good):
    """Also with more parameters by a hook, with a world and fixtures of its own, and beside others of few ranks."""
    once_and_thrice = "shared_path_is_shared_and_tmp_path_is_not", "ranks_draw_the_same", "skipped", "known_bug"
    expected = {f"test_sum[n{ranks}]" for ranks in (1, 3, 4)} | {
        f"test_{each}[n{n}]" for each in once_and_thrice for n in (1, 3)
    }
    expected |= {"test_more_than_the_ranks[1-0.5]", "test_more_than_the_ranks[3-1.5]", "test_nearest_mark_wins[n2]"}
    expected |= {"test_own_world[n2]", *(f"test_module_fixture[n2-{number}]" for number in (1, 2))}
    expected |= {f"test_two_meet[n2-{number}]" for number in range(4)}
    expected |= {"test_mpi_is_not_started", "test_comm_needs_the_mark", "test_starts_two_processes"}
    others = {"test_skipped": "skipped", "test_known_bug": "skipped", "test_comm_needs_the_mark": "error"}
    assert good.of == {name: others.get(name.partition("[")[0], "passed") for name in expected}
    assert "SKIPPED (for a reason)" in good.output and re.search(r"test_known_bug\[n3\] XFAIL", good.output)
    assert "the fixture 'comm' needs @pytest.mark.parallel" in good.text["test_comm_needs_the_mark"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("test_one_rank_fails[n3]", ["failed on rank 1 of 3", "not me", "rank 2 was here"]),
        ("test_all_ranks_fail[n3]", ["failed on all 3 ranks"]),
        ("test_skipped_on_one_rank[n3]", ["skipped on rank 0 of 3 but not on the others"]),
        ("test_hypothesis_fails_on_one_rank[n3]", ["failed on all 3 ranks", "assert (1 != 1 or"]),
        (
            "test_one_rank_raises_while_others_wait[n3]",
            [
                "rank 1 of 3 failed, and ranks 0, 2 of 3 did not finish the test within 1 s",
                *("traceback, rank 1 of 3", "raised on one rank", "stack, ranks 0, 2 of 3", "about to wait"),
                "in test_one_rank_raises_while_others_wait",
            ],
        ),
        ("test_hangs[n1]", ["rank 0 of 1 did not finish the test within 3 s", "stack, rank 0 of 1", "in test_hangs"]),
        ("test_all_ranks_hang[n3]", ["all 3 ranks did not finish the test within 1 s", "in test_all_ranks_hang"]),
        ("test_exits[n1]", ["the job ended with status"]),
        ("test_killed[n3]", ["the job ended with status"]),
        ("test_breaks_the_end_of_the_job[n3]", ["after its last test"]),
    ],
)
def test_a_failure_names_its_ranks_and_what_they_did(bad, name, words):
    assert bad.of[name] in ("failure", "error") and all(each in bad.text[name] for each in words), bad.text[name]


def test_equal_tracebacks_are_shown_once_and_a_signal_is_named(bad):
    assert bad.text["test_one_rank_fails[n3]"].count('assert comm.rank != 1, "not me"') == 1
    assert bad.text["test_all_ranks_fail[n3]"].count("assert comm.size == 0") == 1
    assert re.search(r"(?i)killed|signal 9", bad.text["test_killed[n3]"])


def test_the_neighbours_of_a_hang_and_of_a_crash_and_the_next_tests_pass(bad):
    names = [f"test_beside_the_{kind}[n1-{number}]" for kind in ("exit", "hang") for number in range(3)]
    assert {bad.of[name] for name in [*names, "test_next_after_hang[n3]", "test_next_after_crash[n3]"]} == {"passed"}


def test_a_crash_that_no_test_repeats_alone_is_an_error_and_ends_x(tmp_path):
    outcomes = run_pytest(tmp_path, "-x", test_crashes_once=CRASHES_ONCE)
    assert sorted(outcomes.of.values()) == ["error", "passed"]
    (text,) = [outcomes.text[name] for name, outcome in outcomes.of.items() if outcome == "error"]
    assert "each of these tests passed when it ran again alone" in text
    assert all(f"test_crashes_once.py::{name}" in text for name in outcomes.of)
    assert outcomes.returncode == 1


def test_x_ends_at_the_first_failure_and_node_ids_select(tmp_path):
    names = "test_all_ranks_fail", "test_next_after_crash"
    outcomes = run_pytest(tmp_path, "-x", *(f"test_bad.py::{name}[n3]" for name in names), test_bad=BAD)
    assert outcomes.of == {"test_all_ranks_fail[n3]": "failure"} and outcomes.returncode == 1


def test_selection_works_as_usual_and_no_mpiexec_is_one_clear_error_per_test(tmp_path):
    arguments = "-k", "sum or more", "--ranks=2,3", "-o", "mpiexec=no-such-mpiexec"
    outcomes = run_pytest(tmp_path, *arguments, test_good=GOOD)
    assert outcomes.of == {"test_sum[n3]": "failure", "test_more_than_the_ranks[3-1.5]": "failure"}
    assert "no-such-mpiexec" in outcomes.text["test_sum[n3]"]


def test_nightly_and_thorough_tests_run_when_asked(tmp_path):
    for arguments, ran in (((), 1), (("-m", "nightly"), 1), (("-m", "not nightly"), 1), (("--all",), 3)):
        folder = tmp_path / f"{len(arguments)}-{'-'.join(arguments).replace(' ', '-')}"
        folder.mkdir()
        outcomes = run_pytest(folder, *arguments, test_marks=MARKS)
        assert len(outcomes.of) == ran, (arguments, outcomes.of)
        assert {*outcomes.of.values()} == {"passed"}
        assert ("test_long[n2]" in outcomes.of) == (arguments in (("-m", "nightly"), ("--all",)))


def test_durations_are_recorded_and_become_a_page(good):
    cases = json.loads(good.durations.read_text())["cases"]
    assert cases["test_good.py::test_sum[n3]"]["ranks"] == 3
    assert cases["test_one_process.py::test_starts_two_processes"] | {"seconds": 0} == {
        "seconds": 0, "ranks": 0, "processes": 2
    }  # fmt: skip
    page = durations.page([json.loads(good.durations.read_text())])
    assert f"| all | {len(good.of)} | {sum(case['ranks'] for case in cases.values())} | 2 |" in page


def test_budgets_are_kept_in_one_place_and_count_workers(tmp_path):
    settings = "testpaths=test_one_process.py", "rank_executions_budget=5", "starting_cases_budget=0"
    arguments = "-n2", "-m", "not parallel", "-k", "not comm", *(f"-o{setting}" for setting in settings)
    outcomes = run_pytest(tmp_path, *arguments, test_one_process=ONE_PROCESS)
    assert {*outcomes.of.values()} == {"passed"} and outcomes.returncode == 1
    said = r"0 rank-executions of at most 5; [12] cases that start processes of at most 0; \d processes started: above"
    assert re.search(said, outcomes.output)


def test_xdist_is_refused_for_parallel_tests(tmp_path):
    outcomes = run_pytest(tmp_path, "-n2", test_good=GOOD)
    assert 'Leave -n out, or add -m "not parallel"' in outcomes.output and outcomes.of == {}


def test_jobs_run_scripts_and_one_that_hangs_fails_with_what_it_said(tmp_path):
    outcomes = run_pytest(tmp_path, test_jobs=JOBS)
    assert outcomes.of == {"test_a_script_runs_on_every_rank": "passed", "test_hangs": "failure"}
    assert re.search("(?s)did not end within 18 s.*before.*line 8 in <module>", outcomes.text["test_hangs"])
