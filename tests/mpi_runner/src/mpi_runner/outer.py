"""The part of the plugin in the outer pytest: run the parallel tests under mpiexec, and report the results."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from _pytest.reports import TestReport

from mpi_runner import merge, post_mortem
from mpi_runner.launcher import Launcher
from mpi_runner.phases import one_by_one, phases
from mpi_runner.post_mortem import failure
from mpi_runner.world import Planned, Trouble, World


def rank_count(item) -> int:
    """Number of ranks of a test; 0 for a test in one process."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("nranks", 0) if callspec else 0


@dataclass
class Batch:
    """Tests for one mpiexec."""

    items: list[pytest.Item]
    alone: bool = False  # one test at a time
    crash: merge.RankFailures | None = None  # a crash during which these tests were in progress
    rest: Batch | None = None  # the other tests of the mpiexec that crashed


def failures(items, text: str) -> Iterator[tuple[pytest.Item, list[TestReport]]]:
    """Yield each test with reports of a failure for the same reason."""
    for item in items:
        yield item, failure(item, time.time(), merge.RankFailures(text, []))


def launcher_of(config: pytest.Config) -> Launcher:
    """The launcher of the project, or else of this plugin."""
    return config.hook.pytest_mpi_launcher(config=config) or Launcher(config.getini("mpiexec"))


class OuterPlugin:
    """Run the parallel tests in worlds of ranks, and report each test when it has ended."""

    def __init__(self, config):
        self.config = config
        self.launcher: Launcher = launcher_of(config)
        self.world: World | None = None
        self.results: Iterator[tuple[pytest.Item, list[TestReport]]] | None = None

    def pytest_sessionstart(self):
        # If pytest is terminated, it ends its jobs as after Ctrl-C.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)

    def pytest_report_header(self):
        try:
            return f"mpi: {self.launcher.describe()}"
        except Exception as error:
            return f"mpi: {error}"

    def pytest_unconfigure(self):
        self.end_world()

    def end_world(self):
        if self.world is not None:
            self.world.end()
            self.world = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Report the next parallel test that ends. It may be another test than `item`; each is reported once."""
        if rank_count(item) == 0:
            return None
        self.results = self.results or self.run(item.session.items)
        item, reports = next(self.results)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            report.ranks = rank_count(item)
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def run(self, items) -> Iterator[tuple[pytest.Item, list[TestReport]]]:
        """Yield each parallel test with its reports, in the order in which the tests end."""
        own = [item for item in items if item.get_closest_marker("own_world")]
        shared = [item for item in items if rank_count(item) and item not in own]
        of_size = [[item for item in own if rank_count(item) == n] for n in sorted({*map(rank_count, own)})]
        batches = deque([Batch(shared), *(Batch(group, alone=True) for group in of_size)])
        while batches:
            batch = batches.popleft()
            if batch.items:
                batches.extendleft((yield from self.run_batch(batch)))

    def run_batch(self, batch: Batch):
        """Yield each test with its reports. Return the remaining batches, for another mpiexec, in reverse order."""
        left = {item.nodeid: item for item in batch.items}
        try:
            world = self.world = self.launch(batch)
        except Exception as error:
            yield from failures(batch.items, f"no parallel test can run: {error}")
            return []
        while left:
            outcome = world.wait()
            if isinstance(outcome, Trouble):
                return (yield from self.after_trouble(batch, world, outcome, left))
            item, reports = left.pop(outcome.nodeid), self.merged(outcome)
            if any(report.failed for report in reports):
                batch.crash = None  # this test is probably the cause of the crash
            if left:
                yield item, reports
        # A failure at the end of the job, and a crash that was not repeated, are reported with its last test.
        trouble = world.finish()
        end = post_mortem.last_words(world, trouble) if trouble else batch.crash
        self.end_world()
        if end is not None:
            reports = [*reports[:-1], failure(item, time.time(), end, "teardown")[-1]]
        yield item, reports
        return []

    def after_trouble(self, batch: Batch, world: World, trouble: Trouble, left: dict[str, pytest.Item]):
        """Yield the test that crashed or hung, if it is known. Return batches of all others, in reverse order."""
        suspects = [left.pop(test.nodeid) for test in trouble.suspects]
        others = [*left.values()]
        if not suspects:
            first, *others = others
            longrepr = post_mortem.last_words(world, trouble.text)
            self.end_world()
            yield first, failure(first, time.time(), longrepr)
            text = f"no test can run in a world of {world.size} ranks, see the first: {trouble.text}"
            yield from failures(others, text)
            return []
        if len(suspects) > 1:
            names = ", ".join(item.nodeid for item in suspects)
            text = f"{trouble.text}; each of these tests passed when it ran again alone: {names}"
            crash = post_mortem.last_words(world, text)
            self.end_world()
            rest = Batch(others, batch.alone)
            return [rest, Batch(suspects, alone=True, crash=crash, rest=rest)]
        (test,) = trouble.suspects
        longrepr = self.failure_of(world, test, trouble.text)
        self.end_world()
        yield suspects[0], failure(suspects[0], test.start or time.time(), longrepr)
        if batch.rest is None:
            return [Batch(others, batch.alone)]
        batch.rest.items[:0] = others
        return []

    def launch(self, batch: Batch) -> World:
        """Start a world for these tests, with the ranks of the largest test."""
        counts = [rank_count(item) for item in batch.items]
        size = max(counts)
        return World(
            self.launcher,
            size,
            tests=[self.planned(item) for item in batch.items],
            phases=one_by_one(counts) if batch.alone else phases(counts, size),
            arguments=self.arguments(),
            show=self.config.option.capture == "no",
        )

    def planned(self, item) -> Planned:
        mark = item.get_closest_marker("deadline")
        deadline = float(mark.args[0]) if mark else self.config.getoption("mpi_deadline")
        return Planned(item.nodeid, str(item.path), rank_count(item), deadline)

    def arguments(self) -> list[str]:
        """Arguments of pytest on the ranks, without files. Results have the format that was requested here."""
        option = self.config.option
        inifile = ["-c", str(self.config.inipath)] if self.config.inipath else []
        arguments = [
            *inifile, f"--rootdir={self.config.rootpath}", "-p", "no:cacheprovider", "-p", "no:faulthandler",
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

    def merged(self, test: Planned) -> list[TestReport]:
        return merge.merge({rank: self.decoded(reports) for rank, reports in sorted(test.results.items())})

    def decoded(self, reports: list[dict]) -> list[TestReport]:
        from_json = self.config.hook.pytest_report_from_serializable
        return [from_json(config=self.config, data=data) for data in reports]

    def failure_of(self, world: World, test: Planned, trouble: str) -> merge.RankFailures:
        """The report of a test that crashed or hung."""
        reports = {rank: self.decoded(reports) for rank, reports in test.results.items()}
        failed = {rank: report for rank in reports for report in reports[rank] if report.failed}
        return post_mortem.last_words(world, trouble, test, failed)
