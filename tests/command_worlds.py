"""Run commands of pmm3d on ranks that are started once: one mpiexec per number of ranks serves all tests.

To start ranks takes longer than most commands. Tests use the fixture `on_ranks`, or `command_worlds` in a fixture of a
wider scope. A test that patches pmm3d, kills ranks, or is about the start and end of processes, uses the fixture `job`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from mpi_runner.script_job import JobResult, ScriptJobs

from pmm3d.tools import launcher

RANK = Path(__file__).with_name("serve_commands.py")


class CommandWorlds:
    """Worlds of ranks. Each is started when a command first needs this number of ranks. All end together.

    `worlds(4, "bench", "--m", "64", cwd=folder, env={"COLUMNS": "80"})` runs a command on four ranks. The result has
    the largest exit code of the ranks, and what they printed in the order of the ranks.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._worlds: dict[int, _World] = {}

    def __call__(self, ranks: int, *words: object, cwd: Path, env=None, timeout: float = 100) -> JobResult:
        if ranks not in self._worlds or not self._worlds[ranks].alive():
            folder = self.folder / f"{ranks}-{time.monotonic_ns()}"
            folder.mkdir()
            self._worlds[ranks] = _World(ranks, folder)
        env = {name: str(value) for name, value in (env or {}).items()}
        return self._worlds[ranks].run(list(map(str, words)), cwd, env, timeout * ScriptJobs.PATIENCE)

    def end(self) -> None:
        for world in self._worlds.values():
            world.end()


class _World:
    def __init__(self, ranks: int, folder: Path):
        self.ranks, self.folder, self.commands = ranks, folder, 0
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with open(folder / "said", "w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pmm3d.launcher", "-n", str(ranks), str(RANK), str(folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                cwd=folder,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, words: list[str], cwd: Path, env: dict[str, str], timeout: float) -> JobResult:
        number, self.commands = self.commands, self.commands + 1
        files = {
            kind: [self.folder / f"{number}-{rank}.{kind}" for rank in range(self.ranks)]
            for kind in ("out", "err", "code")
        }
        asked = self.folder / "asked"
        asked.write_text(json.dumps({"words": words, "cwd": str(cwd), "env": env}))
        asked.rename(self.folder / f"{number}.json")
        deadline = time.monotonic() + timeout
        while not all(path.exists() for path in files["code"]):
            if not self.alive() or time.monotonic() > deadline:
                self.end(grace=0.0)
                pytest.fail(
                    f"{words} on {self.ranks} ranks ended the ranks or took more than {timeout:g} s.\n"
                    + "".join(
                        path.read_text(errors="replace") for path in (*files["out"], *files["err"]) if path.exists()
                    )
                    + (self.folder / "said").read_text(errors="replace")
                )
            time.sleep(0.01)
        said = {kind: "".join(path.read_text(errors="replace") for path in files[kind]) for kind in ("out", "err")}
        return JobResult(max(int(path.read_text()) for path in files["code"]), said["out"], said["err"])

    def end(self, grace: float = 10.0) -> None:
        (self.folder / "end").touch()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            launcher.end_job(self.process, grace=2.0)


@pytest.fixture(scope="session")
def command_worlds(tmp_path_factory):
    """command_worlds(4, "bench", "--m", "64", cwd=folder) runs the command on four ranks, which then wait for more."""
    worlds = CommandWorlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.end()


@pytest.fixture
def on_ranks(command_worlds, tmp_path):
    """on_ranks(4, "bench", "--m", "64") runs the command on four ranks, in the folder of this test."""
    return partial(command_worlds, cwd=tmp_path)
