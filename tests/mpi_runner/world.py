"""One mpiexec whose ranks run a list of tests, watched through the files they write."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpi_runner.leftovers import remove_leftovers
from mpi_runner.merge import name_ranks
from pmm3d.tools import launcher

STARTUP = 180.0  # seconds until every rank has imported and collected the tests
AFTER_FAILURE = 5.0  # seconds left to the other ranks once one has failed or is gone
AT_EXIT = 60.0  # seconds from the last test to the end of mpiexec
LOOK_EVERY = 0.01  # seconds between two looks at the ranks' files


class World:
    """A running mpiexec.

    results[i][r] is what rank r reported of test i; `wait(i)` returns once all ranks have, or
    says what went wrong.
    """

    def __init__(self, nranks: int, nodeids: list[str], deadlines: list[float], arguments: list[str], show: bool):
        mpiexec = launcher.command(nranks, ["-m", "mpi_runner.inside"])  # raises if there is none
        self.nranks = nranks
        self.deadlines = deadlines
        self.folder = Path(tempfile.mkdtemp(prefix=f"pmm3d-tests-{nranks}-"))
        self.files = [RankFile(self.folder / f"rank-{rank}.jsonl") for rank in range(nranks)]
        self.pids: dict[int, int] = {}
        self.ready: set[int] = set()
        self.results: list[dict[int, list[dict]]] = [{} for _ in nodeids]
        self.output = open(self.folder / "output.txt", "a+")
        plan = dict(nranks=nranks, nodeids=nodeids, deadlines=deadlines, arguments=arguments, startup=STARTUP)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self.started = time.time()
        self.since = time.monotonic()
        self.written_before = 0
        self.process = subprocess.Popen(
            [*mpiexec, str(self.folder)],
            env=launcher.environment(nranks, _environment()),
            stdin=subprocess.DEVNULL,
            stdout=None if show else self.output,
            stderr=None if show else subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # in a session of its own it would keep the cores from what runs beside it
        )

    def wait(self, index: int) -> str | None:
        """Wait for test `index` on all ranks. None if each has reported, else what went wrong."""
        failed_since = None
        # What was written before a look that finds this test unfinished cannot come from the next one.
        unfinished = self.written_before
        while True:
            ended = self.process.poll() is not None
            written = os.fstat(self.output.fileno()).st_size
            self.read()
            if len(self.results[index]) == self.nranks:
                self.since, self.written_before = time.monotonic(), unfinished
                return None
            unfinished = written
            if ended:
                when = "before all ranks had finished the test" if self.all_ready() else "before all ranks had started"
                return f"the job ended with status {self.process.returncode} {when}"
            if failed_since is None and self.some_rank_failed(index):
                failed_since = time.monotonic()
            late = self.lateness(index, failed_since)
            if late is not None:
                return late
            time.sleep(LOOK_EVERY)

    def lateness(self, index: int, failed_since: float | None) -> str | None:
        """Which ranks have taken too long by now, if any have."""
        if self.all_ready():
            limit, what, done = self.deadlines[index], "finish the test", self.results[index].keys()
        else:
            limit, what, done = STARTUP, "start", self.ready
        now = time.monotonic()
        if now > self.since + limit:
            return f"{name_ranks(set(range(self.nranks)) - done, self.nranks)} did not {what} within {limit:g} s"
        if failed_since is not None and now > failed_since + AFTER_FAILURE:
            return f"the others did not {what} within {AFTER_FAILURE:g} s of that"
        return None

    def all_ready(self) -> bool:
        """Whether every rank has collected the tests."""
        return len(self.ready) == self.nranks

    def read(self) -> None:
        """Take in what the ranks have written since."""
        for rank, file in enumerate(self.files):
            for event in file.new_events():
                if "pid" in event:
                    self.pids[rank] = event["pid"]
                elif "ready" in event:
                    self.ready.add(rank)
                    self.since = time.monotonic()
                else:
                    self.results[event["test"]][rank] = event["reports"]

    def some_rank_failed(self, index: int) -> bool:
        reports = [report for reports in self.results[index].values() for report in reports]
        return any(report["outcome"] == "failed" for report in reports) or bool(self.gone())

    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, pid in self.pids.items() if not _is_alive(pid)]

    def stacks(self) -> dict[int, str]:
        """Where every rank is: all its threads' stacks, written by faulthandler; what it wrote before if it is gone."""
        before = {rank: self._stacks_of(rank) for rank in self.pids}
        asked = [rank for rank in self.pids if self._ask_for_stacks(rank)]
        patience = time.monotonic() + 2.0
        while time.monotonic() < patience and any(self._stacks_of(rank) == before[rank] for rank in asked):
            time.sleep(0.05)
        time.sleep(0.1)
        return {rank: self._stacks_of(rank) for rank in self.pids}

    def _ask_for_stacks(self, rank: int) -> bool:
        """Signal a rank, unless the job has ended: then its process id may be somebody else's."""
        if self.process.poll() is not None or not _is_alive(self.pids[rank]):
            return False
        os.kill(self.pids[rank], signal.SIGUSR1)
        return True

    def _stacks_of(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.stacks").read_text()

    def finish(self) -> str | None:
        """Wait for mpiexec after the last test. None if it ended well, else what went wrong."""
        try:
            status = self.process.wait(AT_EXIT)
        except subprocess.TimeoutExpired:
            return f"the job did not end within {AT_EXIT:g} s of its last test (MPI_Finalize?)"
        return f"the job ended with status {status} after its last test (MPI_Finalize?)" if status else None

    def said(self, lines: int = 40) -> str:
        """The end of what mpiexec and the ranks have written since shortly before the test began."""
        self.output.seek(self.written_before)
        return "\n".join(self.output.read().splitlines()[-lines:])

    def end(self) -> None:
        """Leave no process and no file behind."""
        launcher.end_job(self.process)
        for file in (self.output, *self.files):
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.process.returncode != 0:
            remove_leftovers(self.started)


class RankFile:
    """Reads the lines that a rank has completed since the last look."""

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
    """For the ranks: this pytest's import path, and not the selection it was given."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
