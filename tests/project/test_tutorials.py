"""The tutorials and how-tos, executed as by a reader. C and Fortran: tests/embed. A real Slurm: tests/slurm."""

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from loops import looped
from test_docs import printed
from training_runs import run_here
from tutorial import DOCS, ROOT, follow, quick, read, steps, until
from typer.testing import CliRunner

from pmm3d.layout import part_range
from pmm3d.tools import ranks
from pmm3d.tools.commands import app


def follow_on_ranks(comm, page, folder, monkeypatch, exact: bool = False) -> None:
    """Follow a page on the ranks of `comm`, in `folder`: each command of pmm3d runs on all of them, each other
    Python program on rank 0, and each program after `pmm3d.launcher` in the processes of the ranks. Compare what
    all ranks print, in their order. `NAME=value` before a command sets a variable."""

    monkeypatch.chdir(folder)
    monkeypatch.setattr(ranks, "task_rank", lambda environ: comm.rank)  # the launcher may have started further ranks

    def run(command: str) -> str:
        comm.barrier()
        launched = "pmm3d.launcher" in command
        while found := re.match(r"([A-Z]+)=(\S+) ", command):
            monkeypatch.setenv(*found.groups())
            command = command[found.end() :]
        words = shlex.split(re.sub(r".*pmm3d\.launcher -n \d+ |^python ", "", command).removeprefix("-m "))
        if words[0] == "pmm3d":
            done = run_here(comm, *words[1:])
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr
        if launched:
            monkeypatch.setattr(sys, "argv", words)
            return "".join(comm.allgather(printed(comm, Path(words[0]).read_text())))
        said = ""
        if comm.rank == 0:
            done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
            said = done.stdout + done.stderr
        return comm.bcast(said)

    follow(page, folder, run, exact)
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


@pytest.mark.nightly("starts three jobs, two of which wait")
def test_the_howto_on_hangs(tmp_path):
    """Signals are sent when all ranks have printed their first line."""
    environ = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    output = tmp_path / "outside.out"
    jobs = []

    def run(command: str) -> str:
        if command.endswith(" &"):
            with output.open("w") as file:
                words = shlex.split(command.removesuffix(" &"))
                jobs.append(subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=file, stderr=file))
            until(lambda: read(output).count(" pid ") == 4)
        elif command == "kill -USR2 $!":
            jobs[0].send_signal(signal.SIGUSR2)
            until(lambda: read(output).count(" in <module>") == 4)
            return read(output).replace(f"{tmp_path}/", "")
        elif command == "kill $!":
            jobs[0].terminate()
            assert jobs[0].wait() != 0
        else:
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True)
            assert done.returncode == (124 if "--timeout" in command else 1 if "DEBUG" in command else 70), done
            return (done.stdout + done.stderr).replace(f"{tmp_path}/", "")
        return ""

    try:
        follow(steps("howto/debug-a-hang"), tmp_path, run)
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
    stacks = [line.split()[-3:-2] for line in read(output).splitlines() if line.endswith("in <module>")]
    assert sorted(stacks) == [["8"], ["9"], ["9"], ["9"]]


@pytest.mark.nightly("measures a machine")
def test_the_howto_on_several_nodes_on_one_node(on_ranks, tmp_path, monkeypatch):
    """On two virtual nodes: tests/slurm."""
    environment = {"COLUMNS": "80", "TERM": "dumb", "XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "apps").symlink_to(ROOT / "apps")

    def run(command: str) -> str:
        if found := re.match(r"srun --nodes=(\d) --ntasks-per-node=(\d) pmm3d (.*)", command):
            nodes, tasks, words = found.groups()
            done = on_ranks(int(nodes) * int(tasks), *shlex.split(words), env=environment)
            assert done.returncode in ((0, 1, 2) if "doctor" in words else (0,)), done.stdout + done.stderr
            return done.stdout + done.stderr
        done = CliRunner().invoke(app, shlex.split(command)[1:], env=environment)
        assert done.exit_code == 0, done.output
        return done.output

    follow(quick(steps("howto/several-nodes")), tmp_path, run)


class Lazy(np.ndarray):
    """As much of a dask array as the how-to uses, if dask is not installed."""

    def compute(self, scheduler=None):
        return np.array(self) if self.ndim else self.item()

    def sum(self):
        return np.add.reduce(self, None, keepdims=True).reshape(())


class Mat:
    """As much of a matrix of petsc4py as the how-to uses, if petsc4py is not installed."""

    def createDense(self, shape, comm):
        self.comm, self.range = comm, part_range(shape[0], comm.size, comm.rank)
        self.array = np.zeros((self.range[1] - self.range[0], shape[1]), order="F")
        return self

    def setUp(self):
        pass

    assemble = setUp

    def getDenseArray(self):
        return self.array

    def getOwnershipRange(self):
        return self.range

    def norm(self):
        return np.sqrt(self.comm.allreduce((self.array**2).sum()))


@pytest.mark.parallel([4])
def test_matrices_from_and_to_other_libraries(comm, shared_path, monkeypatch):
    """`make test-versions` installs dask."""
    standins = {
        "dask": {"array": SimpleNamespace(from_array=lambda values, chunks: values[:].view(Lazy))},
        "petsc4py": {"PETSc": SimpleNamespace(Mat=Mat)},
    }
    for name, contents in standins.items():
        if find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
            for part, module in contents.items():
                monkeypatch.setitem(sys.modules, f"{name}.{part}", module)
    follow_on_ranks(comm, steps("howto/other-libraries"), shared_path, monkeypatch, exact=True)


@pytest.mark.parallel([4])
@pytest.mark.deadline(240)
def test_a_moved_torch_script_has_the_weights_of_the_plain_one(comm, shared_path, monkeypatch):
    import torch

    follow_on_ranks(comm, steps("howto/move-a-torch-script"), shared_path, monkeypatch)
    plain, moved = (torch.load(shared_path / f"{name}.pt") for name in ("plain", "moved"))
    assert len(plain) == 6 and all(torch.allclose(plain[name], moved[name], rtol=0, atol=1e-5) for name in plain)
    comm.barrier()


@pytest.mark.parallel([2])
@pytest.mark.deadline(240)
def test_a_reproduced_run_has_the_same_bits(comm, shared_path, monkeypatch):
    """Also after a resume from an earlier checkpoint. The weights are compared by the program of the page."""
    page = steps("howto/reproduce-a-run")
    follow_on_ranks(comm, page, shared_path, monkeypatch)
    [compare] = [step.text for step in page if step.name == "compare.py"]
    assert printed(comm, f"import sys\nsys.argv[1:] = 'once', 'again'\n{compare}").endswith(
        "6 of 6 parameters have equal bits\n"
    )


@pytest.mark.parallel([2])
@pytest.mark.deadline(240)
def test_the_how_to_on_a_gpt(comm, shared_path, monkeypatch):
    """With a smaller network, fewer steps and a shorter text."""
    page = []
    for step in steps("howto/train-a-gpt"):
        text = step.text
        for long, short in (("500", "20"), ("250", "20"), ("hidden = 128", "hidden = 32"), ("length 300", "length 80")):
            text = text.replace(long, short) if step.kind != "output" else text
        page.append(step._replace(text=text))
    follow_on_ranks(comm, page, shared_path, monkeypatch)
    if comm.rank == 0:
        assert {each.name for each in Path("gpt").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    comm.barrier()


def test_the_how_to_on_grids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    printed_here = []

    def run(command: str) -> str:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        printed_here.append(done.stdout)
        return done.stdout

    page = steps("howto/choose-a-grid")
    follow(page, tmp_path, run)
    for got, shown in zip(printed_here, [step.text for step in page if step.kind == "output"], strict=True):
        wanted, found = (
            re.findall(r"^ \d+ +\d+x\d+x\d+(?: \(.*?\))?|^Choice: .*?,", each, re.M) for each in (shown, got)
        )
        assert wanted and {*wanted} <= {*found}
