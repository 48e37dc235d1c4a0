"""The tutorials, executed as by a reader. C and Fortran: tests/embed. A real Slurm: tests/slurm."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import printed
from tutorial import TUTORIALS, follow, follow_under_slurm, steps
from typer.testing import CliRunner

from pmm3d.tools.commands import app

DOCS = TUTORIALS.parent


@pytest.mark.parallel([4])
def test_the_python_programs_of_embed(comm):
    for section in ("Slabs in, slabs out", "The same product in every step"):
        program, command, output = steps("embed", section)
        assert command.text == f"python -m pmm3d.launcher -n {comm.size} {program.name}"
        said = printed(comm, program.text)
        assert said == ("" if comm.rank else output.text)


def test_the_tutorial_on_benchmarks(on_ranks, tmp_path, monkeypatch):
    environment = {"COLUMNS": "80", "TERM": "dumb", "XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        *launch, words = command.partition("pmm3d.launcher -n 2 -m pmm3d ")
        if launch[1]:
            done = on_ranks(2, *shlex.split(words), env=environment)
            assert done.returncode in ((0, 1, 2) if words == "doctor" else (0,)), done.stdout + done.stderr
            return done.stdout + done.stderr
        found = CliRunner().invoke(app, shlex.split(command)[1:], env=environment)
        assert found.exit_code == 0, found.output
        return found.stdout

    follow(steps("benchmark"), tmp_path, run)
    assert (tmp_path / "grids.png").read_bytes().startswith(b"\x89PNG")


class Launched:
    """Jobs without Slurm, as at the end of the page: the launcher in place of sbatch, SIGTERM in place of SIGUSR1."""

    batch = False

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def submit(self, nodes: int, tasks: int) -> str:
        self.ranks = nodes, tasks
        command = f"{sys.executable} -m pmm3d.launcher -n {nodes * tasks} -m pmm3d train digits.toml --resume auto"
        with open(self.folder / "pmm3d-train-1.out", "a") as said:
            self.job = subprocess.Popen(shlex.split(command), cwd=self.folder, stdout=said, stderr=said)
        return "1"

    def stop(self) -> None:
        self.job.send_signal(signal.SIGTERM)
        assert self.job.wait(100) == 75
        self.submit(*self.ranks)

    def wait(self) -> None:
        assert self.job.wait(300) == 0

    def run(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_the_tutorial_on_slurm(tmp_path):
    follow_under_slurm(tmp_path, Launched(tmp_path))


def test_each_picture_of_the_gallery_is_small_and_made_by_its_commands(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(DOCS)
    import gallery

    page, made = (DOCS / "gallery.md").read_text(), gallery.pictures()
    assert len(made) == page.count("![") > 6
    monkeypatch.chdir(tmp_path)
    for picture, commands in made.items():
        assert (DOCS / picture).stat().st_size <= gallery.LARGEST, picture
        if commands[0].startswith("pmm3d plan pipeline"):
            assert CliRunner().invoke(app, shlex.split(commands[0])[1:]).exit_code == 0
            assert (tmp_path / Path(picture).name).exists()
