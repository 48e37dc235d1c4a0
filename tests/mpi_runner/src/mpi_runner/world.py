"""One mpiexec whose ranks run tests. The outer pytest reads the files that the ranks write."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from mpi_runner.launcher import Launcher, end_job
from mpi_runner.leftovers import remove_leftovers
from mpi_runner.merge import name_ranks

STARTUP = 600.0  # seconds until every rank has imported and collected the tests
IDLE = 60.0  # seconds without a test in progress, while tests remain
AFTER_FAILURE = 5.0  # seconds that the other ranks of a test have after one failed or ended
AT_EXIT = 60.0  # seconds from the last test to the end of mpiexec
LOOK_EVERY = 0.01  # seconds between two reads of the ranks' files


@dataclass
class Planned:
    """A test that a world runs."""

    nodeid: str
    path: str
    ranks: int
    deadline: float
    begun: dict[int, int] = field(default_factory=dict)  # rank within the test -> rank in the world
    results: dict[int, list[dict]] = field(default_factory=dict)  # rank within the test -> its reports
    start: float = 0.0  # time at which the first rank began it (time.time)
    since: float = 0.0  # time at which all ranks had begun it (time.monotonic)
    failed_since: float | None = None  # time at which a rank failed or ended (time.monotonic)
    written_before: int = 0  # bytes of output before it began

    @property
    def complete(self) -> bool:
        return len(self.results) == self.ranks

    def unfinished(self, done: Collection[int]) -> str:
        return name_ranks(set(range(self.ranks)) - set(done), self.ranks)


@dataclass
class Trouble:
    """Reason why a world cannot continue, and the tests that may be the cause (none before all ranks have started)."""

    text: str
    suspects: list[Planned]


class World:
    """A running mpiexec. `wait()` returns the next test that all its ranks have reported, or a Trouble."""

    def __init__(
        self, launcher: Launcher, size: int, tests: list[Planned], phases: list[dict], arguments: list[str], show: bool
    ):
        mpiexec = launcher.command(size, ["-m", "mpi_runner.inside"])  # raises if there is no mpiexec
        self.size = size
        self.tests = tests
        self.folder = Path(tempfile.mkdtemp(prefix=f"mpi-tests-{size}-"))
        self.files = [RankFile(self.folder / f"rank-{rank}.jsonl") for rank in range(size)]
        self.pids: dict[int, int] = {}
        self.ready: set[int] = set()
        self.under_way: list[Planned] = []
        self.completed: list[Planned] = []
        self.output = open(self.folder / "output.txt", "a+", errors="replace")
        plan = dict(
            size=size,
            nodeids=[test.nodeid for test in tests],
            paths=[test.path for test in tests],
            deadlines=[test.deadline for test in tests],
            phases=phases,
            arguments=arguments,
            startup=STARTUP,
        )
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self.started = time.time()
        self.last_event = time.monotonic()
        self.written = 0
        self.process = subprocess.Popen(
            [*mpiexec, str(self.folder)],
            env=launcher.environment(size, _environment()),
            stdin=subprocess.DEVNULL,
            stdout=None if show else self.output,
            stderr=None if show else subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # not a new session: Linux would schedule it as a group that takes whole cores
        )

    def wait(self) -> Planned | Trouble:
        while True:
            ended = self.process.poll() is not None
            self.read()
            if self.completed:
                return self.completed.pop(0)
            if ended:
                when = "before all ranks had finished the test" if self.all_ready() else "before all ranks had started"
                return self.trouble(f"the job ended with status {self.process.returncode} {when}")
            trouble = self.lateness()
            if trouble is not None:
                return trouble
            time.sleep(LOOK_EVERY)

    def trouble(self, text: str) -> Trouble:
        """A Trouble with the tests in progress as possible causes, or else the next test.

        Without a cause, the same tests would be repeated forever.
        """
        next_ones = [test for test in self.tests if not test.complete][:1]
        return Trouble(text, (self.under_way or next_ones) if self.all_ready() else [])

    def lateness(self) -> Trouble | None:
        """A Trouble if a time limit is exceeded; else None."""
        now = time.monotonic()
        if not self.all_ready():
            late = now > self.last_event + STARTUP
            ranks = name_ranks(set(range(self.size)) - self.ready, self.size)
            return self.trouble(f"{ranks} did not start within {STARTUP:g} s") if late else None
        if not self.under_way and now > self.last_event + IDLE:
            return self.trouble(f"no rank began a test within {IDLE:g} s")
        gone = set(self.gone())
        for test in self.under_way:
            if test.failed_since is None and (gone & {*test.begun.values()} or _has_failed(test)):
                test.failed_since = now
            unfinished = test.unfinished(test.results)
            if len(test.begun) == test.ranks and now > test.since + test.deadline:
                return Trouble(f"{unfinished} did not finish the test within {test.deadline:g} s", [test])
            if test.failed_since is not None and now > test.failed_since + AFTER_FAILURE:
                return Trouble(f"the others did not finish the test within {AFTER_FAILURE:g} s of that", [test])
        return None

    def all_ready(self) -> bool:
        """Whether every rank has collected its tests."""
        return len(self.ready) == self.size

    def read(self) -> None:
        """Read the new events of the ranks."""
        written = os.fstat(self.output.fileno()).st_size
        for rank, file in enumerate(self.files):
            for event in file.new_events():
                self.last_event = time.monotonic()
                if "pid" in event:
                    self.pids[rank] = event["pid"]
                elif "ready" in event:
                    self.ready.add(rank)
                elif "begin" in event:
                    self._begin(self.tests[event["begin"]], event["rank"], rank)
                else:
                    test = self.tests[event["test"]]
                    test.results[event["rank"]] = event["reports"]
                    if test.complete:
                        self.under_way.remove(test)
                        self.completed.append(test)
        self.written = written

    def _begin(self, test: Planned, rank: int, rank_in_world: int) -> None:
        if not test.begun:
            self.under_way.append(test)
            test.start = time.time()
            test.written_before = self.written  # at the previous read
        test.begun[rank] = rank_in_world
        test.since = self.last_event

    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, pid in self.pids.items() if not _is_alive(pid)]

    def stacks(self) -> dict[int, str]:
        """Stacks of all threads of each rank, by faulthandler. For an ended rank: the stacks that it wrote before."""
        before = {rank: self._stacks_of(rank) for rank in self.pids}
        asked = [rank for rank in self.pids if self._ask_for_stacks(rank)]
        patience = time.monotonic() + 2.0
        while time.monotonic() < patience and any(self._stacks_of(rank) == before[rank] for rank in asked):
            time.sleep(0.05)
        time.sleep(0.1)
        return {rank: self._stacks_of(rank) for rank in self.pids}

    def _ask_for_stacks(self, rank: int) -> bool:
        """Signal a rank, unless the job has ended, because then its process id may be that of another process."""
        if self.process.poll() is not None or not _is_alive(self.pids[rank]):
            return False
        os.kill(self.pids[rank], signal.SIGUSR1)
        return True

    def _stacks_of(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.stacks").read_text()

    def finish(self) -> str | None:
        """Wait for mpiexec after the last test. Return a description of a failure, or None."""
        try:
            status = self.process.wait(AT_EXIT)
        except subprocess.TimeoutExpired:
            return f"the job did not end within {AT_EXIT:g} s of its last test (MPI_Finalize?)"
        return f"the job ended with status {status} after its last test (MPI_Finalize?)" if status else None

    def said(self, since: int = 0, lines: int = 40) -> str:
        """The last lines of the output of mpiexec and the ranks, without the first `since` bytes."""
        self.output.seek(since)
        return "\n".join(self.output.read().splitlines()[-lines:])

    def end(self) -> None:
        """End the job, and remove its files."""
        end_job(self.process)
        for file in (self.output, *self.files):
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.process.returncode != 0:
            remove_leftovers(self.started)


def _has_failed(test: Planned) -> bool:
    return any(report["outcome"] == "failed" for reports in test.results.values() for report in reports)


class RankFile:
    """Reader of the complete lines that a rank has written since the last read."""

    def __init__(self, path: Path):
        self.path = path
        self.file = None
        self.rest = ""

    def new_events(self) -> list[dict]:
        if self.file is None:
            if not self.path.exists():
                return []
            self.file = open(self.path)
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _environment() -> dict[str, str]:
    """Environment of the ranks: the import path of this pytest, without its options."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
