"""The fixture `job`: a script under mpiexec, in a child process with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_runner.launcher import TIMED_OUT, Launcher, end_job
from mpi_runner.leftovers import remove_leftovers

# Inserted before each script. Output is written by lines, so that lines of different ranks are not mixed. At SIGUSR1 a
# rank prints its stacks. While it finalizes MPI, the signal has no effect.
WHOLE_LINES = """import faulthandler, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN), faulthandler.register(signal.SIGUSR1)
[stream.reconfigure(line_buffering=True, write_through=False) for stream in (sys.stdout, sys.stderr)]
"""


@dataclass(frozen=True)
class JobResult:
    """Exit code and output of a job."""

    returncode: int
    stdout: str
    stderr: str


class ScriptJobs:
    """Run scripts in a folder, one after the other. If the test ends, the running script is ended."""

    PATIENCE = 3  # factor of time limits, because they are for jobs that hang, and a busy machine is slower
    SPARE = 10.0  # seconds beyond the limit that a launcher which enforces it may take
    STACKS = 3.0  # seconds before the limit at which ranks print their stacks

    def __init__(self, folder: Path, launcher: Launcher):
        self.folder, self.launcher = folder, launcher
        self.number = 0
        self.process = None
        self.started = time.time()

    def run(self, ranks: int, script: str, *args, timeout: float = 120, env=None) -> JobResult:
        """Run the script on this number of ranks. If it does not end within PATIENCE times timeout, the test fails with
        the stacks of the ranks.
        """
        self.number += 1
        timeout *= self.PATIENCE
        name = f"job{self.number}"
        path = self.folder / f"{name}.py"
        path.write_text(WHOLE_LINES + textwrap.dedent(script))
        command, environ = self.launcher.job(ranks, [str(path), *map(str, args)], _environment(env), timeout)
        with (
            open(path.with_suffix(".out"), "w+", errors="replace") as out,
            open(path.with_suffix(".err"), "w+", errors="replace") as err,
        ):
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environ, cwd=self.folder)
            returncode = self._wait(timeout)
            result = JobResult(returncode, _text(out), _text(err))
        if returncode == TIMED_OUT:
            pytest.fail(f"{name} did not end within {timeout:g} s.\nstdout:\n{result.stdout}\nstderr:\n{result.stderr}")
        return result

    def _wait(self, timeout: float) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(timeout - self.STACKS, timeout / 2))
        self.process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self.STACKS + self.SPARE)
        self.end()
        return TIMED_OUT

    def end(self) -> None:
        """End the running job."""
        if self.process is not None:
            end_job(self.process, grace=5.0)
            remove_leftovers(self.started)


def _environment(changes) -> dict[str, str]:
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return environ | {name: str(value) for name, value in (changes or {}).items()}


def _text(file) -> str:
    file.seek(0)
    return file.read()
