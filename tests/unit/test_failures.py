"""Jobs that go wrong: each ends by itself, non-zero, and says what happened. Run in child jobs with a time limit."""

import os
import subprocess
import sys

import pytest

START = """
    import os, signal, sys, time
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul

    comm = MPI.COMM_WORLD
    with Grid(comm, "auto", timeout=float(sys.argv[1])) as grid:
        a = DistMatrix.random(grid, (40, 30), seed=1)
        b = DistMatrix.random(grid, (30, 20), seed=2, layout=Layout.B)
        c = a @ b
"""


@pytest.fixture
def goes_wrong(job):
    """goes_wrong(ranks, what): the job that makes a grid and a product and then does that. The time limit is 2 s."""

    def run(ranks, what, timeout=2):
        body = "\n".join("        " + line for line in what.strip().splitlines())
        done = job(ranks, START + body + "\n", timeout, timeout=50)
        assert done.returncode != 0
        return done

    return run


def said_by(done, rank):
    """What one rank said of a collective that did not end."""
    found = [line for line in done.stderr.splitlines() if f"CollectiveTimeout: rank {rank} waited" in line]
    assert len(found) == 1, done.stderr
    return found[0]


def test_a_rank_that_never_calls_is_named_by_all_that_wait(goes_wrong):
    done = goes_wrong(4, "if grid.rank == 3: time.sleep(40)\na @ b")
    for rank in range(3):
        assert "in agreement on matmul" in said_by(done, rank)
        assert "Missing: rank 3 (computing, stopped, dead, or never called it)" in said_by(done, rank)
    assert done.seconds < 30


def test_a_stopped_rank_is_named(goes_wrong):
    """Stopped in the middle of its work, as by a debugger or a failing node; it is ended with the job."""
    done = goes_wrong(3, "if grid.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\na @ b")
    for rank in (0, 2):
        assert "Missing: rank 1 " in said_by(done, rank)


def test_a_collective_on_an_axis_names_its_missing_member(goes_wrong):
    what = "axis = max((grid.x, grid.y, grid.z), key=lambda axis: axis.size)\n"
    what += "if grid.rank: axis.all_gather(np.ones(3)).wait()\nelse: time.sleep(40)"
    done = goes_wrong(2, what)
    assert "in all_gather #" in said_by(done, 1) and "Missing: rank 0 " in said_by(done, 1)


def test_ranks_in_different_collectives_are_told_apart(goes_wrong):
    what = "if grid.rank: a @ b\n"
    what += "else: max((grid.x, grid.y, grid.z), key=lambda axis: axis.size).shift(np.ones(3)).wait()"
    done = goes_wrong(2, what)
    assert "Elsewhere: rank 1 waits in agreement on matmul" in said_by(done, 0)
    assert "Elsewhere: rank 0 waits in shift #" in said_by(done, 1)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(goes_wrong, ranks):
    done = goes_wrong(ranks, "if grid.rank == 1: raise ValueError('bad luck')\na @ b", timeout=600)
    assert "pmm3d: rank 1 raised; ending the job." in done.stderr
    assert "ValueError: bad luck" in done.stderr and "Traceback (most recent call last)" in done.stderr
    assert done.seconds < 30


def test_a_rank_that_leaves_ends_the_job(goes_wrong):
    done = goes_wrong(2, "if grid.rank == 1: sys.exit('enough')\na @ b", timeout=600)
    assert "rank 1 raised" in done.stderr and "SystemExit: enough" in done.stderr


def test_a_rank_that_is_killed_ends_the_job(goes_wrong):
    done = goes_wrong(3, "if grid.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\na @ b", timeout=600)
    assert done.seconds < 30


def test_an_error_on_all_ranks_is_an_ordinary_one(goes_wrong):
    done = goes_wrong(3, "raise ValueError('all of us')", timeout=600)
    assert done.stderr.count("ValueError: all of us") >= 1
    assert "ending the job" not in done.stderr and done.seconds < 30


def test_an_error_that_was_agreed_on_can_be_caught(job):
    done = job(3, START + """
        from pmm3d import DisagreementError
        other = DistMatrix.random(grid, (30, 20), seed=2, layout=Layout.B, dtype="float32")
        try:
            a @ (other if grid.rank == 1 else b)
        except DisagreementError as error:
            told = "ranks 0, 2" in str(error) and "rank 1" in str(error) and "float32" in str(error)
            print("caught", told, np.allclose((a @ b).gather(), c.gather()))
    """, 600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught True True") == 3


def test_every_grid_that_does_not_fit_is_answered_with_some_that_do(job):
    done = job(6, """
        from mpi4py import MPI
        from pmm3d import Grid, GridError
        for shape in ((4, 4, 2), (1, 1, 5), "7x1x1"):
            try:
                Grid(MPI.COMM_WORLD, shape)
            except GridError as error:
                assert "the communicator has 6. Grids that fit 6 ranks, by modelled cost: " in str(error), error
            else:
                raise AssertionError(shape)
        print("ok")
    """)
    assert done.returncode == 0 and done.stdout.count("ok") == 6, done.stderr


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_separate_worlds_of_one_rank_are_refused(variable):
    """What the ranks of another MPI's launcher see."""
    known = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    environ = {name: value for name, value in os.environ.items() if name not in known}
    program = f"import os, mpi4py.MPI; os.environ[{variable!r}] = '4'; import pmm3d; pmm3d.Grid()"
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"LauncherError: the launcher started 4 tasks ({variable}=4) but MPI sees a world of 1 rank" in done.stderr


def test_the_log_names_each_collective(job):
    done = job(2, START + "\n        pass\n", 600, env={"PMM3D_LOG": "1"})
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "pmm3d: rank 1: " in line]
    assert any("agreement on matmul #" in line for line in lines)
    assert any("on axis z (gather B): sent 2,400, received 2,400 bytes" in line for line in lines), lines


def test_a_variable_that_is_not_understood_is_named(job):
    done = job(2, "import pmm3d; pmm3d.Grid()", env={"PMM3D_TIMEOUT": "soon"})
    assert done.returncode != 0 and "PMM3D_TIMEOUT='soon' is not understood" in done.stderr


