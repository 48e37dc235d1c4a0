"""Cost of a run of the tests: rank-executions, processes, and seconds of each case."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}
BUDGETS = {"rank_executions_budget": "rank-executions", "starting_cases_budget": "cases that start processes"}

_started = 0


def _count(event: str, _arguments) -> None:
    global _started
    if event in STARTS:
        _started += 1


class Tally:
    """Count the cases and the children of this pytest and of its pytest-xdist workers. Above a budget, the run fails.

    Children of the children are not counted. A budget is an option of pytest's configuration file. It applies to a run
    of all folders without --all.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.cases: dict[str, dict] = {}
        self.in_workers = 0
        self.attributed = _started
        self.start = time.time()
        sys.addaudithook(_count)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        report.processes, self.attributed = _started - self.attributed, _started
        return report

    def pytest_runtest_logreport(self, report):
        processes = getattr(report, "processes", 0)
        self.in_workers += processes if hasattr(report, "node") else 0
        case = self.cases.setdefault(report.nodeid, {"seconds": 0.0, "ranks": 0, "processes": 0})
        case["seconds"] = round(case["seconds"] + report.duration, 4)
        case["ranks"] = getattr(report, "ranks", 0)
        case["processes"] += processes

    def totals(self) -> dict[str, int]:
        ranks = sum(case["ranks"] for case in self.cases.values())
        starting = sum(case["processes"] > 0 for case in self.cases.values())
        return {"rank_executions_budget": ranks, "starting_cases_budget": starting}

    def processes(self) -> int:
        """Number of processes. It is larger on a busy machine, because some tests start a program until it is ready."""
        return _started + self.in_workers

    def budgets(self) -> dict[str, int]:
        """The budgets of this run."""
        config = self.config
        if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.getoption("all_tests"):
            return {}
        return {name: int(config.getini(name)) for name in BUDGETS if config.getini(name)}

    def pytest_sessionfinish(self, session):
        totals = self.totals()
        if not session.exitstatus and any(totals[name] > budget for name, budget in self.budgets().items()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self.config.getoption("record_durations")
        if path:
            with open(path, "w") as file:
                json.dump(self.record(), file, indent=0)

    def arguments(self) -> list[str]:
        return [word for word in self.config.invocation_params.args if not word.startswith("--record-durations")]

    def record(self) -> dict:
        return {
            "command": " ".join(["pytest", *self.arguments()]),
            "date": time.strftime("%Y-%m-%d", time.gmtime(self.start)),
            "commit": _commit(self.config.rootpath),
            "machine": f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
            "seconds": round(time.time() - self.start, 1),
            "processes": self.processes(),
            "cases": self.cases,
        }

    def pytest_terminal_summary(self, terminalreporter):
        totals, budgets = self.totals(), self.budgets()
        over = any(totals[name] > budget for name, budget in budgets.items())
        text = "; ".join(
            f"{totals[name]:,} {what}" + (f" of at most {budgets[name]:,}" if name in budgets else "")
            for name, what in BUDGETS.items()
        )
        text += f"; {self.processes():,} processes started"
        if over:
            text += ": above the budget. Make tests cheaper, mark them nightly, or raise it in the configuration file."
        terminalreporter.write_line(text, red=over)


def _commit(folder) -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    return platform.machine()
