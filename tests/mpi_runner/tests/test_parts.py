"""The plugin: one run of each kind, and its parts in one process."""

import pytest
from inner import run_pytest
from mpi_runner import merge
from mpi_runner.launcher import Launcher
from mpi_runner.phases import blocks, phases
from mpi_runner.plugin import rank_counts

SMOKE = """
import pytest

@pytest.mark.parallel([1, 2])
def test_sum(comm, nranks):
    assert comm.allreduce(1) == nranks

@pytest.mark.parallel(2)
def test_one_rank_fails(comm):
    assert comm.rank == 0, "not me"

def test_in_one_process():
    pass
"""


def test_ranks_run_the_tests_and_a_failure_names_its_rank(tmp_path):
    outcomes = run_pytest(tmp_path, test_smoke=SMOKE)
    passed = {"test_sum[n1]": "passed", "test_sum[n2]": "passed", "test_in_one_process": "passed"}
    assert outcomes.of == passed | {"test_one_rank_fails[n2]": "failure"} and outcomes.returncode == 1
    assert "failed on rank 1 of 2" in outcomes.text["test_one_rank_fails[n2]"]


def test_a_launcher_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-mpiexec: set the option `mpiexec`"):
        Launcher("no-such-mpiexec --some-option").words()


def test_malformed_mark_is_refused():
    parallel = pytest.mark.parallel
    for wrong in (parallel(1, 2), parallel([]), parallel([0]), parallel([2], all=[4]), parallel([2], thorough=["4"])):
        with pytest.raises(pytest.UsageError, match=r"test_a: write @pytest.mark.parallel\(\[1, 2, 6\]\)"):
            rank_counts(wrong.mark, "test_a")
    assert rank_counts(parallel(2, thorough=[1]).mark, "test_a") == [2]
    assert rank_counts(parallel(2, thorough=[1]).mark, "test_a", all_tests=True) == [1, 2]


def test_blocks_are_at_least_two_and_as_many_ranks_as_cores():
    assert [blocks(ranks, 8, cores=2) for ranks in (1, 2, 3, 4, 5, 8)] == [2, 2, 2, 2, 1, 1]
    assert [blocks(ranks, 8, cores=16) for ranks in (1, 2, 3, 4, 5, 8)] == [8, 4, 2, 2, 1, 1]
    assert phases([4, 1, 4], size=8, cores=2) == [
        {"ranks": 1, "blocks": 2, "tests": [1]}, {"ranks": 4, "blocks": 2, "tests": [0, 2]}
    ]  # fmt: skip


def test_equal_texts_are_grouped_whatever_their_addresses():
    texts = {0: "at 0x12ab", 1: "FailedElsewhere", 2: "at 0xff"}
    assert merge.group(texts, 3) == [("ranks 0, 2 of 3", "at 0x12ab"), ("rank 1 of 3", "FailedElsewhere")]
