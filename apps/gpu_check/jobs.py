"""Cases run on their ranks, in child processes: a case that dies or hangs is told of, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from pmm3d.tools.launcher import OPEN_MPI_ON_ONE_NODE, end_job, environment

from .outcome import FAILED, NOT_RUN, Case, Outcome
from .ranks import BROKEN

START = 120.0
"""Seconds that a job may take longer until its first case is done: MPI, and imports from a cold disk."""
END = 20.0
"""Seconds that the ranks may take to end after the last case."""
HANGS = "45"
"""Seconds after which pmm3d explains a collective that hangs, within the limits of the cases."""
MOST_DEATHS = 3
"""Jobs of the same ranks and library that may die; what is left of them is not run."""
NOT_OURS = ("OMPI_MCA_pml", "OMPI_MCA_btl")
"""Of what the launcher sets for host memory: a device's needs others, which Open MPI finds by itself."""


@dataclass
class Runner:
    """Runs cases in order, those of the same ranks and library in one job.

    mpiexec    the launcher and its arguments, after which the number of ranks comes; empty: one rank without any
    folder     where jobs write
    deadline   of time.monotonic(), at which the job under way is ended, and after which none is begun
    environ    of the ranks
    """

    mpiexec: Sequence[str]
    folder: Path
    deadline: float
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    jobs: int = 0

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        for (ranks, _), group in groupby(cases, lambda case: (case.ranks, case.library)):
            for outcome in self._group(ranks, list(group)):
                self.outcomes[outcome.case.name] = outcome
                yield outcome

    def _group(self, ranks: int, cases: list[Case]) -> Iterator[Outcome]:
        deaths = 0
        while cases:
            if why := self._hindered(ranks, deaths):
                yield from (Outcome(case, NOT_RUN, why) for case in cases)
                return
            done = 0
            for outcome in Job(self, ranks, cases).outcomes():
                yield outcome
                done += 1
                deaths += bool(outcome.output)
            cases = cases[done:]

    def _hindered(self, ranks: int, deaths: int) -> str:
        """Why no more of these is run, if so."""
        if not self.mpiexec and ranks > 1:
            return "there is no launcher of MPI here: GPU_MPIEXEC, or --mpiexec, names one"
        if deaths >= MOST_DEATHS:
            return f"{deaths} cases before it took their job down"
        return "the time was used up" if time.monotonic() > self.deadline else ""

    def start(self, ranks: int, cases: Sequence[Case]) -> tuple[subprocess.Popen, Path]:
        """The job, and the file in which it answers. Beside it, ending in .log, is what it prints."""
        self.jobs += 1
        path = self.folder / f"job-{self.jobs:02d}.json"
        answers, log = path.with_suffix(".answers"), path.with_suffix(".log")
        answers.touch()
        path.write_text(json.dumps({"ranks": ranks, "answers": str(answers),
                                    "states": {name: outcome.state for name, outcome in self.outcomes.items()},
                                    "cases": [asdict(case) for case in cases]}))
        launcher = [*self.mpiexec, str(ranks)] if self.mpiexec else []
        with open(log, "wb") as file:
            process = subprocess.Popen([*launcher, sys.executable, "-m", f"{__package__}.ranks", str(path)],
                                       stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=self._environ(ranks),
                                       preexec_fn=os.setpgrp)
        return process, answers

    def _environ(self, ranks: int) -> dict[str, str]:
        ours = {name: value for name, value in OPEN_MPI_ON_ONE_NODE.items() if name not in NOT_OURS}
        ours["PMM3D_TIMEOUT"] = HANGS
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), self.environ.get("PYTHONPATH", "")]
        return (ours | environment(ranks, self.environ, named="the user's")
                | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


class Job:
    """A job under way, and what its cases came to."""

    def __init__(self, runner: Runner, ranks: int, cases: Sequence[Case]):
        self.cases, self.running, self.ended, self.runner = cases, -1, 0, runner
        self.process, self.answers = runner.start(ranks, cases)
        self.log, self._read = self.answers.with_suffix(".log"), 0
        self._since = time.monotonic()

    def outcomes(self) -> Iterator[Outcome]:
        """Of each case that ended, in order; last that of the one that ended the job, if one did, and not the
        runner's deadline."""
        try:
            while (code := self.process.poll()) is None and time.monotonic() < self._end():
                yield from self._news()
                time.sleep(0.05)
            yield from self._news()
        finally:
            end_job(self.process)
        late = code is None and self._end() == self.runner.deadline
        if self.ended < len(self.cases) and not late and not (code == BROKEN and self.ended and self.running < 0):
            yield self._died(code)

    def _end(self) -> float:
        """Until when it is waited for."""
        return min(self.runner.deadline, self._since + self._patience())

    def _patience(self) -> float:
        if self.running >= 0:
            return self.cases[self.running].limit + (0 if self.ended else START)
        return END if self.ended == len(self.cases) else START

    def _news(self) -> Iterator[Outcome]:
        """What the answers have got since the last look, in whole lines."""
        with open(self.answers, "rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._read += len(line) + 1
            self._since, news = time.monotonic(), json.loads(line)
            if "begun" in news:
                self.running = news["begun"]
                continue
            self.running, self.ended = -1, news["number"] + 1
            yield Outcome(self.cases[news["number"]], news["state"], news["said"], news["figures"], news["seconds"])

    def _died(self, code: int | None) -> Outcome:
        """The case that was under way, or would have been next, when the job ended or was ended."""
        case = self.cases[self.ended]
        if code is None:
            why = f"no answer after {self._patience():g} s, and ended"
        else:
            why = f"its job ended with {_in_words(code)}"
        before = "" if self.running >= 0 else "before it began: "
        printed = self.log.read_text(errors="replace").rpartition(case.heading)[2].strip()
        return Outcome(case, FAILED, before + why, seconds=round(time.monotonic() - self._since, 3),
                       output=printed[-4000:] or "(it printed nothing)")


def _in_words(code: int) -> str:
    """ "SIGSEGV" of -11 and of 139, as a launcher has it; else the exit code."""
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return signal.Signals(number).name if number > 0 else f"exit code {code}"
    return f"exit code {code}"
