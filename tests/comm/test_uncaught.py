"""What a job prints when an error leaves the program on all ranks: one traceback. Run in child jobs."""

import re

import pytest

HEAD = """
    import sys, time
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout

    rank = MPI.COMM_WORLD.rank
"""
MISMATCH = HEAD + """
    with Grid() as grid:
        a, b = (DistMatrix.random(grid, shape) for shape in ((40, 30), (31, 20)))
        a @ b  # here
"""
AS_A_MODULE = HEAD + """
    if len(sys.argv) == 1:
        from mpi4py.run import main
        sys.argv = ["mpi4py", __file__, "again"]
        main()
""" + MISMATCH.removeprefix(HEAD)


def once(done, kind, ranks="ranks 0-3"):
    """What was printed, which is one traceback."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"pmm3d: {ranks} end with this error:") == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert len(re.findall(rf"^\S*{kind}: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("script", [
    MISMATCH, MISMATCH.replace("with Grid() as grid:", "grid = Grid()\n    if grid:"), AS_A_MODULE,
])
def test_an_error_that_was_agreed_on_is_printed_once(job, script):
    said = once(job(4, script), "pmm3d.errors.LayoutError")
    assert "A is 40 x 30 and B is 31 x 20" in said and "a @ b  # here" in said


def test_a_grid_that_does_not_fit_is_printed_once(job):
    once(job(4, HEAD + "    Grid(shape=(7, 1, 1))\n"), "pmm3d.errors.GridError")


def test_an_error_that_all_ranks_raise_themselves_is_printed_once(job):
    once(job(4, HEAD + "    with Grid() as grid: raise ValueError('all of us')\n"), "ValueError")


def test_errors_with_other_texts_are_all_printed(job):
    done = job(3, HEAD + "    with Grid() as grid: raise ValueError(f'I am {rank}')\n")
    assert done.returncode == 1 and "end with this error" not in done.stderr
    assert all(f"ValueError: I am {rank}" in done.stderr for rank in range(3)), done.stderr


def test_the_rank_that_has_the_cause_prints_it(job):
    done = job(3, HEAD + """
    def values(i, j):
        return 1 / (rank - 2) + i + j  # here

    with Grid() as grid:
        DistMatrix.from_function(grid, (6, 6), values)
    """)
    said = once(done, "pmm3d.errors.Pmm3dError", "ranks 0-2")
    assert "failed on 1 of 3 ranks. rank 2: ZeroDivisionError: division by zero" in said
    assert "+ i + j  # here" in said


def test_an_error_that_one_rank_catches_is_printed_by_the_others(job):
    done = job(3, MISMATCH.replace("with Grid() as grid:", "grid = Grid()\n    try:").replace("here", """here
    except Exception:
        if rank: raise
        time.sleep(8)
    """))
    assert done.returncode != 0 and "end with this error" not in done.stderr
    assert done.stderr.count("LayoutError: A is 40 x 30") >= 1, done.stderr


def test_the_programs_own_hook_is_called_once(job):
    hook = "    sys.excepthook = lambda *found: print('mine', found[0].__name__)\n"
    done = job(4, MISMATCH.replace("    with Grid", hook + "    with Grid"))
    assert done.returncode == 1 and done.stdout.count("mine LayoutError") == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_errors_that_are_caught_do_not_add_hooks(job):
    done = job(2, HEAD + """
    before = sys.excepthook
    for shape in ((7, 1, 1), (9, 1, 1)):
        try:
            Grid(shape=shape)
        except Exception:
            print("one hook", sys.excepthook._before is before)
    raise KeyError("each for itself")
    """)
    assert done.stdout.count("one hook True") == 4
    assert done.returncode == 1 and done.stderr.count("KeyError: 'each for itself'") >= 1


@pytest.mark.parametrize("alone", [False, True])
def test_after_ctrl_c_there_is_one_line(job, alone):
    done = job(3, HEAD + f"""
    import os, signal, threading
    with Grid() as grid:
        a = DistMatrix.random(grid, (200, 200))
        def solve():
            while True:
                a @ a.redistribute(Layout.B)
        if rank == 1 or not {alone}:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        solve()
    """)
    who, then = ("rank 1 was", "; ending the job.") if alone else ("ranks 0-2 were", "")
    assert done.returncode == 130 and "Traceback" not in done.stderr and done.stderr.count("pmm3d: ") == 1, done.stderr
    assert re.search(rf"pmm3d: {who} interrupted \(Ctrl-C\).* at \S+job1.py:\d+ in solve{then}\n", done.stderr)
