"""The tutorials and how-tos, executed as by a reader. C and Fortran: tests/embed. A real Slurm: tests/slurm."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from loops import looped
from test_docs import printed
from training_runs import run_here
from tutorial import DOCS, follow, steps
from typer.testing import CliRunner

from pmm3d.tools import ranks
from pmm3d.tools.commands import app


def follow_on_ranks(comm, page, folder, monkeypatch) -> None:
    """Follow a page on the ranks of `comm`, in `folder`: each command of pmm3d runs on all of them, each other
    Python program on rank 0, and each program after `pmm3d.launcher` in the processes of the ranks."""

    monkeypatch.chdir(folder)
    monkeypatch.setattr(ranks, "task_rank", lambda environ: comm.rank)  # the launcher may have started further ranks

    def run(command: str) -> str:
        comm.barrier()
        launched = "pmm3d.launcher" in command
        words = shlex.split(re.sub(r".*pmm3d\.launcher -n \d+ |^python ", "", command).removeprefix("-m "))
        if words[0] == "pmm3d":
            done = run_here(comm, *words[1:])
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr
        if launched:
            return printed(comm, Path(words[0]).read_text())
        said = ""
        if comm.rank == 0:
            done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
            said = done.stdout + done.stderr
        comm.barrier()
        return said

    follow(page, folder, run)
    comm.barrier()


@pytest.mark.parallel([4])
@looped("section", ("Slabs in, slabs out", "The same product in every step"))
def test_the_python_programs_of_embed(comm, section):
    program, command, output = steps("tutorials/embed", section)
    assert command.text == f"python -m pmm3d.launcher -n {comm.size} {program.name}"
    said = printed(comm, program.text)
    assert said == ("" if comm.rank else output.text)


@pytest.mark.nightly
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

    follow(steps("tutorials/benchmark"), tmp_path, run)
    assert (tmp_path / "grids.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parallel([2])
@pytest.mark.deadline(240)
def test_the_tutorial_on_tables(comm, shared_path, monkeypatch):
    """And its predictions, in the units of the targets, have an r2 above 0.95."""
    follow_on_ranks(comm, steps("tutorials/table"), shared_path, monkeypatch)
    if comm.rank == 0:
        tables = [np.genfromtxt(name, delimiter=",", names=True) for name in ("new.csv", "predicted.csv")]
        for name in ("flux", "yield"):
            right, predicted = (table[name] for table in tables)
            assert 1 - ((predicted - right) ** 2).mean() / right.var() > 0.95
    comm.barrier()


def test_each_picture_of_a_page_is_small_and_what_its_commands_draw(monkeypatch, tmp_path):
    """The bytes depend on the version of matplotlib, which the file contains: only its own version is compared."""
    monkeypatch.syspath_prepend(DOCS)
    import pictures

    shown = pictures.shown()
    assert {*shown} == {path.name for path in pictures.PICTURES.iterdir()} and {*pictures.DRAWN} < {*shown}
    monkeypatch.chdir(tmp_path)
    for name, commands in shown.items():
        assert bool(commands) == (name not in pictures.DRAWN), name
        assert (pictures.PICTURES / name).stat().st_size <= pictures.LARGEST, name
        if name in pictures.DRAWN:
            pictures.DRAWN[name](tmp_path / name)
        elif commands[0].startswith("pmm3d plan pipeline"):
            assert CliRunner().invoke(app, shlex.split(commands[0])[1:]).exit_code == 0
        else:
            continue
        stored, made = ((folder / name).read_bytes() for folder in (pictures.PICTURES, tmp_path))
        version_of_stored, version = (re.search(rb"Matplotlib v\D*([\d.]+)", each)[1] for each in (stored, made))
        if version_of_stored == version:
            assert made == stored, f"python docs/pictures.py {name}"


def test_the_pictures_that_are_named_are_made(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import pictures

    with pytest.raises(SystemExit, match="nothere.svg.*1f1b.svg"):
        pictures.main(["nothere.svg"])


def test_the_how_to_on_grids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(command: str) -> str:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        return done.stdout

    follow(steps("howto/choose-a-grid"), tmp_path, run)
