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


def test_a_test_runs_once_per_rank_count(good):
    names = [name for name in good.of if name.startswith(("test_sum", "test_nearest"))]
    assert sorted(names) == ["test_nearest_mark_wins[n2]", "test_sum[n1]", "test_sum[n3]", "test_sum[n4]"]
    assert {good.of[name] for name in names} == {"passed"}


def test_a_hook_parametrizes_over_more_than_the_ranks(good):
    names = [name for name in good.of if name.startswith("test_more")]
    assert sorted(names) == ["test_more_than_the_ranks[1-0.5]", "test_more_than_the_ranks[3-1.5]"]
    assert {good.of[name] for name in names} == {"passed"}


def test_folders_and_drawn_examples(good):
    assert good.of["test_shared_path_is_shared_and_tmp_path_is_not[n3]"] == "passed"
    assert good.of["test_ranks_draw_the_same[n3]"] == "passed"


def test_tests_of_few_ranks_run_beside_each_other(good):
    assert {good.of[f"test_two_meet[n2-{number}]"] for number in range(4)} == {"passed"}


def test_a_world_of_its_own_and_fixtures_of_modules(good):
    assert good.of["test_own_world[n2]"] == "passed"
    assert [good.of[f"test_module_fixture[n2-{number}]"] for number in (1, 2)] == ["passed", "passed"]


def test_skip_and_xfail_are_reported_as_such(good):
    assert good.of["test_skipped[n3]"] == "skipped"
    assert "SKIPPED (for a reason)" in good.output
    assert re.search(r"test_known_bug\[n3\] XFAIL", good.output)


def test_tests_in_one_process_do_not_start_mpi(good):
    assert good.of["test_mpi_is_not_started"] == "passed"
    assert "the fixture 'comm' needs @pytest.mark.parallel" in good.text["test_comm_needs_the_mark"]


def test_failure_on_one_rank_names_it(bad):
    text = bad.text["test_one_rank_fails[n3]"]
    assert "failed on rank 1 of 3" in text and "not me" in text
    assert text.count('assert comm.rank != 1, "not me"') == 1
    assert "rank 2 was here" in text


def test_same_failure_on_all_ranks_is_shown_once(bad):
    text = bad.text["test_all_ranks_fail[n3]"]
    assert "failed on all 3 ranks" in text
    assert text.count("assert comm.size == 0") == 1


def test_skip_on_some_ranks_is_a_failure(bad):
    assert "skipped on rank 0 of 3 but not on the others" in bad.text["test_skipped_on_one_rank[n3]"]


def test_hypothesis_failure_on_one_rank_does_not_hang(bad):
    text = bad.text["test_hypothesis_fails_on_one_rank[n3]"]
    assert "failed on all 3 ranks" in text and "assert (1 != 1 or" in text


def test_hang_shows_traceback_and_stacks_and_output(bad):
    text = bad.text["test_one_rank_raises_while_others_wait[n3]"]
    assert "rank 1 of 3 failed, and ranks 0, 2 of 3 did not finish the test within 1 s" in text
    assert "traceback, rank 1 of 3" in text and "raised on one rank" in text
    assert "stack, ranks 0, 2 of 3" in text and "in test_one_rank_raises_while_others_wait" in text
    assert "about to wait" in text


def test_hang_ends_at_the_mark_and_not_its_neighbour(bad):
    text = bad.text["test_hangs[n1]"]
    assert "rank 0 of 1 did not finish the test within 3 s" in text
    assert "stack, rank 0 of 1" in text and "in test_hangs" in text
    assert {bad.of[f"test_beside_the_hang[n1-{number}]"] for number in range(3)} == {"passed"}


def test_hang_of_all_ranks_ends_at_the_mark(bad):
    text = bad.text["test_all_ranks_hang[n3]"]
    assert "all 3 ranks did not finish the test within 1 s" in text
    assert "in test_all_ranks_hang" in text


def test_crash_fails_its_test_and_not_its_neighbour(bad):
    assert "the job ended with status" in bad.text["test_exits[n1]"]
    assert {bad.of[f"test_beside_the_exit[n1-{number}]"] for number in range(3)} == {"passed"}


def test_dead_rank_fails_its_test_only(bad):
    assert "the job ended with status" in bad.text["test_killed[n3]"]
    assert re.search(r"(?i)killed|signal 9", bad.text["test_killed[n3]"])


def test_the_rest_runs_after_hang_and_crash(bad):
    assert bad.of["test_next_after_hang[n3]"] == "passed"
    assert bad.of["test_next_after_crash[n3]"] == "passed"


def test_a_job_that_breaks_after_its_last_test_is_noticed(bad):
    assert "after its last test" in bad.text["test_breaks_the_end_of_the_job[n3]"]


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
