"""A pytest plugin that runs tests on N MPI ranks and survives those that crash or hang.

    @pytest.mark.parallel([1, 2, 6])             on a test, a class, or a module (pytestmark)
    def test_sum(comm): ...                      runs on every rank, of 1, 2 and of 6

    @pytest.mark.parallel([6, 8])
    def test_grid(comm, grid_shape): ...         once per process grid: (1, 1, 6), (1, 2, 3), ...

Fixtures of a parallel test:

    comm         a fresh duplicate of COMM_WORLD, freed after the test if it passed on every rank
    nranks       its size
    grid_shape   (gx, gy, gz) with gx * gy * gz == nranks
    shared_path  a folder, the same on every rank (tmp_path differs from rank to rank)

Fixture of a test of failures, in one process:

    job(ranks, script, *args, timeout=120, env={})   runs a script's text under mpiexec; the limit, of
                                                     three times that, is for jobs that hang

The outer pytest never starts MPI. It launches one mpiexec per rank count (world.py), in which
each rank runs pytest on the same tests in the same order (inside.py) and appends what it did to
a file of its own. The outer reads these files while the tests run, merges the ranks' reports
into one per test (merge.py) and hands it to pytest, so -v, -x, -k, --durations and junit work as
always. The tests of one rank count share an mpiexec until one crashes it or misses its deadline;
then every rank's stack goes into the report and the rest runs in a new mpiexec.

A parallel test must end on all ranks within --mpi-deadline seconds (90), or those of its own mark,
@pytest.mark.deadline(120). Once a rank has failed, the others get 5 s. --ranks 2,4 runs the
parallel tests on so many ranks only.
"""
