"""The part of the plugin on the ranks and in the outer pytest: marks, options, parametrisation, order, fixtures."""

from __future__ import annotations

import gc

import mpi4py
import pytest

# Test modules import mpi4py.MPI also in the outer pytest, which must not start MPI. On a rank, MPI is started already.
mpi4py.rc(initialize=False, finalize=False)

from mpi_runner import hooks, outer  # noqa: E402
from mpi_runner.script_job import ScriptJobs  # noqa: E402
from mpi_runner.tally import Tally  # noqa: E402

RANK_PLUGIN = "mpi-rank"  # inside.RankPlugin.__name__
NO_RANKS = "the fixture {!r} needs @pytest.mark.parallel([1, 2, ...]) on the test, its class or its module"


def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser):
    group = parser.getgroup("mpi", "tests on several MPI ranks")
    group.addoption(
        "--mpi-deadline", type=float, default=90.0, metavar="S", help="seconds a parallel test may take (default 90)"
    )
    group.addoption(
        "--all", action="store_true", dest="all_tests",
        help="the thorough rank counts, the tests marked thorough or nightly, and longer loops",
    )  # fmt: skip
    group.addoption("--ranks", type=_counts, metavar="N,M", help="run only the parallel tests, and only on N, M ranks")
    group.addoption(
        "--record-durations", metavar="FILE", help="write seconds, ranks and processes of each case as JSON"
    )
    parser.addini("mpiexec", "launcher of the ranks and its arguments", default="mpiexec")
    parser.addini("rank_executions_budget", "sum of the ranks of all parallel cases above which a run fails")
    parser.addini("starting_cases_budget", "number of cases that start processes above which a run fails")


def _counts(text: str) -> set[int]:
    return {int(count) for count in text.split(",")}


all_tests = False
"""Whether the run has --all. Test modules, which are imported later, shorten their loops if it is False."""


def pytest_configure(config):
    global all_tests
    all_tests = config.getoption("all_tests")
    config.addinivalue_line("markers", "parallel(counts, thorough=()): on these numbers of ranks; with --all on both")
    config.addinivalue_line("markers", "deadline(seconds): the time this parallel test may take on all ranks")
    config.addinivalue_line(
        "markers", "own_world(reason): in an mpiexec of its own, whose COMM_WORLD has the size of the test"
    )
    config.addinivalue_line("markers", "thorough(reason): only with --all")
    config.addinivalue_line("markers", "nightly(reason): only with --all, or with -m nightly")
    _configure_hypothesis(inside=_rank_plugin(config) is not None)
    if config.getoption("numprocesses", None) and "not parallel" not in config.option.markexpr:
        raise pytest.UsageError(
            "pytest-xdist (-n) cannot run the parallel tests, which start ranks of their own. "
            'Leave -n out, or add -m "not parallel".'
        )
    if _rank_plugin(config) is None:
        config.pluginmanager.register(outer.OuterPlugin(config), "mpi-outer")
        config.pluginmanager.register(Tally(config), "mpi-tally")


def _rank_plugin(config):
    """The RankPlugin of this rank; None in the outer pytest."""
    return config.pluginmanager.get_plugin(RANK_PLUGIN)


def _configure_hypothesis(inside):
    """Set profiles in which all ranks draw the same examples, independently of chance, time and a database.

    Ranks do not shrink a failed example, because it may have failed on only some of them.
    """
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        return
    settings.register_profile(
        "one-process",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.register_profile(
        "ranks",
        settings.get_profile("one-process"),
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    settings.load_profile("ranks" if inside else "one-process")


def pytest_generate_tests(metafunc):
    """Make one item for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("parallel")
    if mark is None:
        return
    counts = rank_counts(mark, metafunc.definition.nodeid, metafunc.config.getoption("all_tests"))
    if "nranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("nranks")
    if not metafunc.config.hook.pytest_mpi_parametrize(metafunc=metafunc, counts=counts):
        metafunc.parametrize("nranks", counts, ids=[f"n{n}" for n in counts], indirect=True, scope="session")


def rank_counts(mark: pytest.Mark, test: str, all_tests: bool = False) -> list[int]:
    """Numbers of ranks in a mark `parallel`. Raises UsageError for an invalid mark."""
    listed = mark.args[0] if len(mark.args) == 1 else (), mark.kwargs.get("thorough", ())
    counts, thorough = ([each] if isinstance(each, int) else list(each) for each in listed)
    wrong = set(mark.kwargs) - {"thorough"} or [n for n in (*counts, *thorough) if not isinstance(n, int) or n < 1]
    if not counts or wrong:
        given = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
        raise pytest.UsageError(
            f"{test}: write @pytest.mark.parallel([1, 2, 6]) or parallel([1, 2], thorough=[6]), not parallel({given})"
        )
    return sorted({*counts, *thorough}) if all_tests else counts


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep imported modules out of garbage collection: it takes a fifth of the time of imports, and of many tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Sort the tests by number of ranks, first the tests in one process, and otherwise in the order of the files."""
    if not config.getoption("all_tests") and _rank_plugin(config) is None:
        later = ["thorough"] + ["nightly"] * ("nightly" not in config.option.markexpr)
        left = [item for item in items if any(map(item.get_closest_marker, later))]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    only = config.getoption("ranks")
    if only is not None:
        config.hook.pytest_deselected(items=[item for item in items if outer.rank_count(item) not in only])
        items[:] = [item for item in items if outer.rank_count(item) in only]
    items.sort(key=outer.rank_count)


@pytest.fixture(scope="session")
def nranks(request):
    """Number of ranks of the test."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(NO_RANKS.format("nranks"))
    return request.param


@pytest.fixture
def comm(request):
    """A communicator of all ranks, new for each test, so that messages of different tests cannot mix."""
    rank = _rank_plugin(request.config)
    if rank is None:
        raise pytest.UsageError(NO_RANKS.format("comm"))
    return rank.comm


@pytest.fixture
def shared_path(request):
    """An empty folder, the same on every rank."""
    rank = _rank_plugin(request.config)
    if rank is None:
        raise pytest.UsageError(NO_RANKS.format("shared_path"))
    return rank.shared_path()


@pytest.fixture
def job(tmp_path, pytestconfig):
    """job(4, text, "argument", timeout=120, env={}) runs the text of a script on four ranks."""
    jobs = ScriptJobs(tmp_path, outer.launcher_of(pytestconfig))
    yield jobs.run
    jobs.end()
