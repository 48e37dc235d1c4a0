"""Faults around a training that is under way: of its folder, its data, its terminal. Nothing may be lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fault_lab.jobs import Job
from fault_lab.lab import contents

from .files import configured, samples
from .trial import FINISHED, NOT_FINISHED, REFUSED, Verdict, said_wrongly

RANKS, EPOCHS = 2, 12
CHANGES = {"training": {"epochs": str(EPOCHS), "checkpoint_every": "9", "keep": "3"}}
MODEL = '''
import numpy as np
from pmm3d import nn


class Spoiled(nn.Module):
    """The identity, whose gradient is not a number from the 30th backward pass on."""

    def __init__(self, grid):
        self.grid, self.passes = grid, 0

    def forward(self, x):
        def rule(gradient):
            self.passes += 1
            return (gradient * (np.nan if self.passes >= 30 else 1),)

        return x.made(x.shard.copy(), (x,), rule) if self.training else x


def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 16, seed=1), nn.gelu, Spoiled(grid),
                         nn.Linear(grid, 16, outputs, seed=2, cols="x"))
'''


@dataclass(frozen=True)
class Fault:
    """name     for the table
    strike   what happens, in the working folder: before the start, or (during) once there is a checkpoint
    says     regular expression, some of what must be said;   code: the exit code that is right
    same     whether it ends with the bits of a run that is not disturbed, at once or when it is started again
    mend     what people do before they start it again
    """

    name: str
    strike: Callable[[Path, Job | None], object]
    says: str
    code: int = FINISHED
    during: bool = True
    same: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    mend: Callable[[Path], object] = lambda folder: None


def suffered(fault: Fault, folder: Path, expected: dict[str, bytes] | None) -> tuple[Verdict, dict[str, bytes]]:
    """A training with the fault, and the bits that it ended with. Started again without it, it must end well."""
    folder.mkdir()
    samples(folder / "data.h5")
    configured(folder, CHANGES)
    if not fault.during:
        fault.strike(folder, None)
    job = started(folder, "first", fault.environ, "--resume", "auto")
    if fault.during and job.until(lambda: any((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))):
        fault.strike(folder, job)
    ending = job.end()
    verdict = Verdict("train", fault.name, ending.code, output=ending.output[-3000:])
    if ending.code != fault.code:
        verdict.wrong.append("a silent hang" if ending.code is None else f"exit code {ending.code}")
    verdict.wrong += said_wrongly(ending.output, fault.says)
    final = {}
    if fault.same:
        fault.mend(folder)
        again = started(folder, "again", {}, "--resume", "auto").end()
        if again.code != FINISHED:
            verdict.wrong.append(f"started again, it ended with {again.code}: {again.output[-500:]}")
        final = last_bits(folder)
        if expected is not None and final != expected:
            verdict.wrong.append("ends with other weights than undisturbed")
    return verdict, final


def started(folder: Path, name: str, environ: Mapping[str, str], *arguments: str) -> Job:
    """A training, in the working folder."""
    program = ["-m", "pmm3d", "train", "config.toml", *arguments]
    launcher = ["env", "-C", str(folder), sys.executable, "-m", "pmm3d.launcher", "-n", str(RANKS)]
    return Job(RANKS, program, folder / f"{name}.log", environ, folder / "no-mark", launcher)


def last_bits(folder: Path) -> dict[str, bytes]:
    """Of the newest checkpoint."""
    paths = sorted((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))
    return contents(paths[-1]) if paths else {}


def in_run(change: Callable[[Path], object]) -> Callable[[Path, Job | None], object]:
    return lambda folder, job: change(folder / "runs/a")


def replaced_by_folder(name: str) -> Callable[[Path, Job | None], object]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir(parents=True)

    return in_run(change)


def not_utf8(run: Path) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1, "said": "\xff\xfe"}\n')


def linked_lock(folder: Path, job: Job | None) -> None:
    (folder / "runs/a").mkdir(parents=True)
    (folder / "precious").write_text("precious")
    (folder / "runs/a/lock").symlink_to(folder / "precious")


def linked_checkpoint(run: Path) -> None:
    (run / "checkpoints/step-99999999").symlink_to("/tmp")
    (run / "checkpoints/writing-step-00000018").symlink_to("/tmp")


def overwritten(folder: Path, job: Job | None) -> None:
    """In place, of the same size, by what knows nothing of HDF5's locks; put right again once the job has ended."""
    shutil.copy(folder / "data.h5", folder / "good.h5")
    samples(folder / "other.h5", seed=1)
    with open(folder / "data.h5", "r+b") as file:
        file.write((folder / "other.h5").read_bytes())
    if job is not None:
        job.process.wait(120)
    os.replace(folder / "good.h5", folder / "data.h5")


def cut_short(folder: Path, job: Job | None) -> None:
    shutil.copy(folder / "data.h5", folder / "good.h5")
    os.truncate(folder / "data.h5", 4000)
    if job is not None:
        job.process.wait(120)
    os.replace(folder / "good.h5", folder / "data.h5")


def signalled(number: signal.Signals) -> Callable[[Path, Job | None], object]:
    return lambda folder, job: job is not None and job.strike(number, 1, 0.0)


def broken(package: str, text: str) -> tuple[Callable[[Path, Job | None], object], Mapping[str, str]]:
    """A package that does something else when it is imported, in front of all others."""
    return lambda folder, job: (folder / f"shims/{package}").mkdir(parents=True) or (
        folder / f"shims/{package}/__init__.py").write_text(text), {"PYTHONPATH": "shims"}


def without_master(folder: Path, job: Job | None) -> None:
    """The job is killed, and the newest checkpoint loses its first file."""
    if job is not None and job.strike(signal.SIGKILL, 0, 0.0):
        job.process.wait(60)
    (max((folder / "runs/a/checkpoints").glob("step-*")) / "checkpoint.h5").unlink()


def spoiled_gradient(folder: Path, job: Job | None) -> None:
    (folder / "model.py").write_text(MODEL)
    configured(folder, {**CHANGES, "network": {"build": '"model.py:build"', "hidden": ""},
                        "optimizer": {"clip": ""}})


NO_PICTURES, NO_MATPLOTLIB = broken("matplotlib", 'raise ImportError("no room for it")\n')
SLOW_PICTURES, SLOW_MATPLOTLIB = broken("matplotlib", 'import time\ntime.sleep(12)\nraise ImportError("too slow")\n')
FAULTS = [
    Fault("none: the run that the others are compared with", lambda folder, job: None, "loss"),
    Fault("metrics.jsonl becomes a folder", replaced_by_folder("metrics.jsonl"), "metrics.jsonl",
          mend=lambda folder: (folder / "runs/a/metrics.jsonl").rmdir()),
    Fault("metrics.jsonl gets a line that is not UTF-8", in_run(not_utf8), "metrics.jsonl"),
    Fault("curves.png is a folder", replaced_by_folder("curves.png"), "curves.png"),
    Fault("run.json is a folder", replaced_by_folder("run.json"), "run.json"),
    Fault("curves cannot be drawn: an ImportError", NO_PICTURES, "curves.png", during=False, environ=NO_MATPLOTLIB),
    Fault("drawing takes longer than the time limit", SLOW_PICTURES, "curves.png", during=False,
          environ={**SLOW_MATPLOTLIB, "PMM3D_TIMEOUT": "5"}),
    Fault("an ASCII terminal", lambda folder, job: None, "loss", during=False,
          environ={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Fault("the folder of checkpoints is removed", in_run(lambda run: shutil.rmtree(run / "checkpoints", True)),
          "not the folder that it was"),
    Fault("the folder of checkpoints is renamed", in_run(lambda run: (run / "checkpoints").rename(run / "moved")),
          "not the folder that it was"),
    Fault("killed, and the newest checkpoint loses checkpoint.h5", without_master, "SIGKILL", 128 + signal.SIGKILL),
    Fault("links among the checkpoints", in_run(linked_checkpoint), "link"),
    Fault("the lock is a link to a file", linked_lock, "link", REFUSED, during=False, same=False),
    Fault("the data are overwritten in place", overwritten, "data.h5", REFUSED, same=False),
    Fault("the data are cut short", cut_short, "data.h5", REFUSED, same=False),
    Fault("SIGINT to a rank", signalled(signal.SIGINT), "step", NOT_FINISHED),
    Fault("SIGTERM to a rank", signalled(signal.SIGTERM), "step", NOT_FINISHED),
    Fault("the gradient becomes NaN, the loss does not", spoiled_gradient, "gradient", REFUSED, during=False,
          same=False),
]
