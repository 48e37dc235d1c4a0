"""The outer pytest's half: hands the parallel tests to mpiexec and reports what comes back."""

from __future__ import annotations

import shlex
import signal
import time

import pytest
from _pytest.reports import TestReport

from mpi_runner import merge, post_mortem
from mpi_runner.post_mortem import failure
from mpi_runner.world import World
from pmm3d.tools import launcher


def rank_count(item) -> int:
    """The number of ranks a test needs; 0 for a test in one process."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("nranks", 0) if callspec else 0


class OuterPlugin:
    """Runs each parallel test by waiting for its result from the mpiexec of its rank count."""

    def __init__(self, config):
        self.config = config
        self.world: World | None = None
        self.indices: dict[str, int] = {}
        self.cannot_start: dict[int, str] = {}  # rank count -> why no mpiexec of that size starts

    def pytest_sessionstart(self):
        # Ended from outside, pytest is to end its jobs as after Ctrl-C.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)

    def pytest_report_header(self):
        try:
            return f"mpi: {shlex.join(launcher.mpiexec_command())} ({launcher.installed_wheel() or 'not from a wheel'})"
        except launcher.LauncherError as error:
            return f"mpi: {error}"

    def pytest_unconfigure(self):
        self.end_world()

    def end_world(self):
        if self.world is not None:
            self.world.end()
            self.world = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if rank_count(item) == 0:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports_of(item, is_last=nextitem is None or rank_count(nextitem) != rank_count(item)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def reports_of(self, item, is_last: bool) -> list[TestReport]:
        """Run a test, launching mpiexec for it and those after it if none is running."""
        nranks = rank_count(item)
        start = time.time()
        if nranks in self.cannot_start:
            return failure(item, start, merge.RankFailures(self.cannot_start[nranks], []))
        try:
            world = self.world = self.world or self.launch(item)
        except Exception as error:
            self.cannot_start[nranks] = f"no parallel test can run: {error}"
            return failure(item, start, merge.RankFailures(self.cannot_start[nranks], []))
        trouble = world.wait(self.indices[item.nodeid])
        if trouble is not None:
            return self.failure_of(item, start, trouble)
        reports = self.merged(world, self.indices[item.nodeid])
        if is_last:
            trouble = world.finish()
            if trouble is not None:
                reports[-1] = failure(item, start, post_mortem.last_words(world, trouble), "teardown")[-1]
            self.end_world()
        return reports

    def launch(self, item) -> World:
        """Start the ranks on this test and on those that follow it with as many ranks."""
        items = [other for other in item.session.items if rank_count(other) == rank_count(item)]
        items = items[items.index(item) :]
        self.indices = {other.nodeid: index for index, other in enumerate(items)}
        return World(
            nranks=rank_count(item),
            nodeids=[other.nodeid for other in items],
            deadlines=[self.deadline(other) for other in items],
            arguments=self.arguments(items),
            show=self.config.option.capture == "no",
        )

    def deadline(self, item) -> float:
        mark = item.get_closest_marker("deadline")
        return float(mark.args[0]) if mark else self.config.getoption("mpi_deadline")

    def arguments(self, items) -> list[str]:
        """The ranks' pytest command line: these files whole, shown as this pytest was asked to show them."""
        option = self.config.option
        paths = dict.fromkeys(str(item.path) for item in items)
        inifile = ["-c", str(self.config.inipath)] if self.config.inipath else []
        arguments = [
            *paths, *inifile, f"--rootdir={self.config.rootpath}", "-p", "no:cacheprovider", "-p", "no:faulthandler",
            "-qq", "--color=no", "-o", "addopts=", "-o", f"verbosity_assertions={max(option.verbose, 0)}",
            f"--tb={option.tbstyle}", "--capture=no" if option.capture == "no" else "--capture=tee-sys",
        ]  # fmt: skip
        if option.all_tests:
            arguments.append("--all")
        if option.showlocals:
            arguments.append("--showlocals")
        for setting in option.override_ini or ():
            arguments += ["-o", setting]
        for warning in self.config.known_args_namespace.pythonwarnings or ():
            arguments += ["-W", warning]
        return arguments

    def merged(self, world: World, index: int) -> list[TestReport]:
        return merge.merge({rank: self.decoded(reports) for rank, reports in sorted(world.results[index].items())})

    def decoded(self, reports: list[dict]) -> list[TestReport]:
        from_json = self.config.hook.pytest_report_from_serializable
        return [from_json(config=self.config, data=data) for data in reports]

    def failure_of(self, item, start: float, trouble: str) -> list[TestReport]:
        """The report of a test that crashed or hung; the tests after it get a new mpiexec."""
        world = self.world
        index = self.indices[item.nodeid]
        reports = {rank: self.decoded(reports) for rank, reports in world.results[index].items()}
        failed = {rank: report for rank in reports for report in reports[rank] if report.failed}
        longrepr = post_mortem.last_words(world, trouble, failed, finished=world.results[index].keys())
        if not world.all_ready():
            self.cannot_start[world.nranks] = f"no test on {world.nranks} ranks can run, see the first: {trouble}"
        self.end_world()
        return failure(item, start, longrepr)
