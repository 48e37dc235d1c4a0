"""A pytest plugin that runs tests on N MPI ranks and survives those that crash or hang.

    @pytest.mark.parallel([1, 2, 6])             on a test, a class, or a module (pytestmark)
    def test_sum(comm): ...                      runs on every rank, of 1, 2 and of 6

    @pytest.mark.parallel([6, 8])
    def test_grid(comm, grid_shape): ...         once per process grid: (1, 1, 6), (1, 2, 3), ...

    @pytest.mark.own_world("reason")             COMM_WORLD has exactly the test's size; few tests need this

Fixtures of a parallel test:

    comm         a fresh communicator of the test's ranks, freed after the test if it passed on every rank;
                 these are consecutive ranks of COMM_WORLD, which has more of them
    nranks       its size
    grid_shape   (gx, gy, gz) with gx * gy * gz == nranks
    shared_path  a folder, the same on every rank (tmp_path differs from rank to rank)

Fixture of a test of failures, in one process:

    job(ranks, script, *args, timeout=120, env={})   runs a script's text under mpiexec
                                                     A job that takes more than three times `timeout`
                                                     fails the test.

The outer pytest never starts MPI. It launches one mpiexec (world.py) with as many ranks as the largest
test has. Each rank runs pytest on the tests that it may have a part in (inside.py), and appends each
event to a file of its own. Blocks of ranks run tests beside each other (phases.py). The outer pytest
reads the ranks' files, merges the ranks' reports into one per test (merge.py) and hands each test to
pytest as soon as it has ended, so -v, -x, -k, --durations and junit work as always.

A crash or a missed deadline ends the mpiexec. Every rank's stack goes into the report of the test that
caused it, and another mpiexec runs the rest. If several tests were under way in a crash, each runs again
alone, and the one that crashes again is the cause. If none does, the last of them has an error.

A parallel test must end on all ranks within --mpi-deadline seconds (90), or those of its own mark,
@pytest.mark.deadline(120). The time counts from when all ranks have begun the test. Once a rank has
failed, the others get 5 s. --ranks 2,4 runs the parallel tests on 2 and 4 ranks only.

Each run prints its rank-executions (the sum of the ranks of all parallel cases), the number of cases that
start processes, and the processes (tally.py). A run of all folders without --all fails above
rank_executions_budget or starting_cases_budget in pyproject.toml. --record-durations=FILE keeps what each
case took, for durations.py.
Under pytest-xdist only tests of one process run.
"""
