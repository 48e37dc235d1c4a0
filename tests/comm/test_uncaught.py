"""Output of a job when all ranks leave the program with an error: one traceback. Run in child jobs. One job checks the
output of sys.excepthook for all errors. The end of a job is checked in separate jobs."""

import re

import pytest
from one_job import said_by_ranks

HEAD = """
    import sys, time
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout

    rank = MPI.COMM_WORLD.rank
"""
MISMATCH = (
    HEAD
    + """
    with Grid() as grid:
        a, b = (DistMatrix.random(grid, shape) for shape in ((40, 30), (31, 20)))
        a @ b  # here
"""
)
AS_A_MODULE = (
    HEAD
    + """
    if len(sys.argv) == 1:
        from mpi4py.run import main
        sys.argv = ["mpi4py", __file__, "again"]
        main()
"""
    + MISMATCH.removeprefix(HEAD)
)

SHARED = """
    import sys
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO
    from pmm3d import DistMatrix, Grid

    rank = comm.rank

    def printed(name, program):
        "Say what the program prints as it ends with its error."
        with redirect_stderr(StringIO()) as stderr, redirect_stdout(StringIO()) as stdout:
            try:
                program()
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)
        say(name, stderr.getvalue(), stdout.getvalue())

    def mismatch():
        with Grid(comm) as grid:
            a, b = (DistMatrix.random(grid, shape) for shape in ((40, 30), (31, 20)))
            a @ b  # here

    def no_grid():
        Grid(comm, shape=(7, 1, 1))

    def all_raise():
        with Grid(comm): raise ValueError("all of us")

    def other_texts():
        with Grid(comm): raise ValueError(f"I am {rank}")

    def values(i, j):
        return 1 / (rank - 2) + i + j  # here

    def one_cause():
        with Grid(comm) as grid:
            DistMatrix.from_function(grid, (6, 6), values)

    for program in (mismatch, no_grid, all_raise, other_texts, one_cause):
        printed(program.__name__, program)

    before = sys.excepthook
    for shape in ((7, 1, 1), (9, 1, 1)):
        try:
            Grid(comm, shape=shape)
        except Exception:
            say(f"hook of {shape[0]}", sys.excepthook._before is before)
    def each_for_itself():
        raise KeyError("each for itself")
    printed("each_for_itself", each_for_itself)

    sys.excepthook = lambda *found: print("mine", found[0].__name__)
    printed("own_hook", mismatch)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Name -> values that the ranks of SHARED printed."""
    return said_by_ranks(tmp_path_factory.mktemp("shared"), 4, SHARED)[0]


def assert_once(text, kind, ranks="ranks 0-3"):
    """Assert that the text contains one traceback."""
    assert text.count(f"pmm3d: {ranks} end with this error:") == 1, text
    assert text.count("Traceback (most recent call last)") == 1, text
    assert len(re.findall(rf"^\S*{kind}: ", text, re.MULTILINE)) == 1, text
    assert "During handling" not in text and "direct cause" not in text


def once(printed, kind):
    """Assert that the ranks printed one traceback, of one rank."""
    [text] = [stderr for stderr, _ in printed if stderr]
    assert_once(text, kind)
    return text


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(MISMATCH, marks=pytest.mark.thorough("as a module")),
        MISMATCH.replace("with Grid() as grid:", "grid = Grid()\n    if grid:"),
        AS_A_MODULE,
    ],
)
def test_an_error_that_was_agreed_on_ends_the_job_and_is_printed_once(job, script):
    done = job(4, script)
    assert done.returncode == 1 and "ending the job" not in done.stderr, done.stderr
    assert_once(done.stderr, "pmm3d.errors.LayoutError")
    assert "A is 40 x 30 and B is 31 x 20" in done.stderr and "a @ b  # here" in done.stderr


def test_an_error_of_all_ranks_is_printed_once(shared):
    """An error that was agreed on, a grid that does not fit, and an error that all ranks raise themselves."""
    said = once(shared["mismatch"], "pmm3d.errors.LayoutError")
    assert "A is 40 x 30 and B is 31 x 20" in said and "a @ b  # here" in said
    once(shared["no_grid"], "pmm3d.errors.GridError")
    once(shared["all_raise"], "ValueError")


def test_errors_with_other_texts_are_all_printed(shared):
    for rank, (stderr, _) in enumerate(shared["other_texts"]):
        assert f"ValueError: I am {rank}" in stderr and "end with this error" not in stderr


def test_the_rank_that_has_the_cause_prints_it(shared):
    said = once(shared["one_cause"], "pmm3d.errors.Pmm3dError")
    assert shared["one_cause"][2][0] == said
    assert "failed on 1 of 4 ranks. rank 2: ZeroDivisionError: division by zero" in said
    assert "+ i + j  # here" in said


@pytest.mark.thorough("ranks wait 6 s for the one that caught it")
def test_an_error_that_one_rank_catches_is_printed_by_the_others(job):
    done = job(
        3,
        MISMATCH.replace("with Grid() as grid:", "grid = Grid()\n    try:").replace(
            "here",
            """here
    except Exception:
        if rank: raise
        time.sleep(600)
    """,
        ),
    )
    assert done.returncode != 0 and "end with this error" not in done.stderr
    assert done.stderr.count("LayoutError: A is 40 x 30") >= 1, done.stderr


def test_the_programs_own_hook_is_called_once(shared):
    assert sorted(stdout for _, stdout in shared["own_hook"]) == ["", "", "", "mine LayoutError\n"]
    assert all("Traceback" not in stderr for stderr, _ in shared["own_hook"])


def test_errors_that_are_caught_do_not_add_hooks(shared):
    assert shared["hook of 7"] == shared["hook of 9"] == [[True]] * 4
    assert all("KeyError: 'each for itself'" in stderr for stderr, _ in shared["each_for_itself"])


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.nightly("a job of its own"))])
def test_after_ctrl_c_there_is_one_line(job, alone):
    done = job(
        3,
        HEAD
        + f"""
    import os, signal, threading
    with Grid() as grid:
        a = DistMatrix.random(grid, (200, 200))
        def solve():
            a @ a.redistribute(Layout.B)
            if rank == 1 or not {alone}:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                a @ a.redistribute(Layout.B)
        solve()
    """,
    )
    who, then = ("rank 1 was", "; ending the job.") if alone else ("ranks 0-2 were", "")
    assert done.returncode == 130 and "Traceback" not in done.stderr and done.stderr.count("pmm3d: ") == 1, done.stderr
    assert re.search(rf"pmm3d: {who} interrupted \(Ctrl-C\).* at \S+job1.py:\d+ in solve{then}\n", done.stderr)
