"""A pytest plugin that runs tests on N MPI ranks. A test that crashes or hangs does not end the run.

    @pytest.mark.parallel([1, 2, 6])             on a test, a class, or a module (pytestmark)
    def test_sum(comm): ...                      runs on 1, on 2 and on 6 ranks

    @pytest.mark.own_world("reason")             COMM_WORLD has exactly the size of the test; few tests need this
    @pytest.mark.nightly("reason")               too long for each change: runs with -m nightly, and with --all
    @pytest.mark.thorough("reason")              runs with --all only

Fixtures of a parallel test:

    comm         a new communicator of the ranks of the test: consecutive ranks of a larger COMM_WORLD. It is
                 freed after the test if the test passed on every rank
    nranks       its size
    shared_path  a folder, the same on every rank (tmp_path differs from rank to rank)

Fixture of a test of failures, in one process:

    job(ranks, script, *args, timeout=120, env={})   runs the text of a script under mpiexec. The test fails if
                                                     the job takes more than three times `timeout`

The outer pytest never starts MPI. It starts one mpiexec (world.py) with the ranks of the largest test. Each
rank runs pytest on its tests (inside.py), and appends each event to its own file. Blocks of ranks run tests
at the same time (phases.py). The outer pytest reads the files, merges the reports of the ranks (merge.py),
and passes each test to pytest when it has ended. So -v, -x, -k, --durations and junit work as usual.

A crash or a missed deadline ends the mpiexec. The report of the test that caused it contains the stacks of
all ranks. Another mpiexec runs the remaining tests. If several tests were in progress during a crash, each
runs again alone. A test that crashes again is the cause. If none does, the last of them has an error.

A parallel test must end on all ranks within --mpi-deadline seconds (90), or within the time of its mark,
@pytest.mark.deadline(120). The time counts from the moment at which all ranks have begun the test. After
the failure of one rank, the others have 5 s. --ranks 2,4 runs the parallel tests on 2 and on 4 ranks only.

Each run prints its rank-executions (the sum of the ranks of all parallel cases), the number of cases that
start processes, and the number of processes (tally.py). A run of all folders without --all fails above
rank_executions_budget or starting_cases_budget in pytest's configuration file. --record-durations=FILE writes
the time of each case, for mpi_runner.durations. Under pytest-xdist, only tests in one process run.
"""
