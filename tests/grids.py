"""Process grids that tests run on, and errors that all ranks raise. Loaded before MPI may start."""

import pytest

DEEPEST = {1: (1, 1, 1), 2: (1, 2, 1), 3: (3, 1, 1), 4: (2, 1, 2), 6: (1, 2, 3), 8: (2, 2, 2)}


CANONICAL_GRIDS = {4: [(1, 4, 1), (2, 1, 2), (1, 2, 2)], 6: [(1, 2, 3)], 8: [(2, 2, 2), (4, 1, 2)]}
"""On 4 ranks: axes of 4 ranks, and of 2 ranks with stride 1 or 2. On 6 and 8 ranks: all axes of several ranks, axes of
different sizes, and an axis of 4."""


def process_grids(nranks: int) -> list[tuple[int, int, int]]:
    """All (gx, gy, gz) with gx * gy * gz == nranks."""
    divisors = [d for d in range(1, nranks + 1) if nranks % d == 0]
    return [(x, y, nranks // (x * y)) for x in divisors for y in divisors if nranks % (x * y) == 0]


def canonical_grids(nranks: int) -> list[tuple[int, int, int]]:
    """The process grids of a test without --all."""
    return CANONICAL_GRIDS.get(nranks) or process_grids(nranks)


def pytest_mpi_parametrize(metafunc, counts):
    """Make a case for each process grid, if the test has the fixture grid_shape."""
    if "grid_shape" not in metafunc.fixturenames:
        return None
    grids = process_grids if metafunc.config.getoption("all_tests") else canonical_grids
    values = [(n, shape) for n in counts for shape in grids(n)]
    ids = ["n{}-{}x{}x{}".format(n, *shape) for n, shape in values]
    metafunc.parametrize("nranks,grid_shape", values, ids=ids, indirect=True, scope="session")
    return True


@pytest.fixture(scope="session")
def grid_shape(request):
    """(gx, gy, gz) with gx * gy * gz == nranks."""
    return request.param


@pytest.fixture
def grid(comm, grid_shape):
    """Each grid of this number of ranks, for tests whose result depends on the shape."""
    from pmm3d import Grid

    with Grid(comm, grid_shape, device_transport="direct") as grid:
        yield grid


@pytest.fixture
def some_grid(comm, nranks):
    """One grid, with the most axes of several ranks, for tests whose result does not depend on the shape."""
    from pmm3d import Grid

    with Grid(comm, DEEPEST[nranks], device_transport="direct") as grid:
        yield grid


@pytest.fixture
def fails(comm):
    """fails(kind, text, call): Check that every rank raises `kind` with the same text. Return the text."""

    def check(kind, text, call):
        with pytest.raises(kind, match=text) as caught:
            call()
        found = set(comm.allgather((type(caught.value).__name__, str(caught.value))))
        assert len(found) == 1, found
        return str(caught.value)

    return check


@pytest.fixture
def all_fail(fails):
    """all_fail(case, ...): check each case (kind, text, call) by `fails`."""
    from loops import given

    def check(*cases):
        for kind, text, call in cases:
            with given(text=text):
                fails(kind, text, call)

    return check


@pytest.fixture
def here(shared_path, comm):
    """Runs of `pmm3d train` on the ranks of the test."""
    from training_runs import RunsHere

    return RunsHere(shared_path, comm)


@pytest.fixture
def runs(tmp_path, job):
    """Runs of `pmm3d train` in separate jobs."""
    from training_runs import Runs

    return Runs(tmp_path, job)


@pytest.fixture
def storing_grid(comm, nranks):
    """A grid with a data axis on 4 ranks, and with an idle rank on 7."""
    shape, data = {1: ((1, 1, 1), 1), 2: ((1, 2, 1), 1), 4: ((1, 2, 1), 2), 7: ("auto", 1)}[nranks]
    from pmm3d import Grid

    with Grid(comm, shape, data, product=(512, 512, 512), memory=3e6) as grid:
        assert grid.shape.size == (6 if nranks == 7 else nranks)
        yield grid


@pytest.fixture
def two_nodes(comm, monkeypatch):
    """Two virtual nodes: the first has the first half of the ranks."""
    from pmm3d.comm import communicator

    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{2 * comm.rank // comm.size}")


@pytest.fixture
def stages_of_two(monkeypatch):
    """Schedules by recursive halving and doubling. With few ranks, the library would use a direct exchange."""
    from pmm3d.model import schedule, stages

    def forget():
        stages.stages.cache_clear()
        stages.stages_of.cache_clear()
        for table in (schedule.all_gather, schedule.reduce_scatter, schedule.all_reduce):
            table.cache_clear()

    for name, value in (("DIRECT", 1), ("LARGEST_STAGE", 2)):
        monkeypatch.setattr(stages, name, value)
    forget()
    yield
    monkeypatch.undo()
    forget()
