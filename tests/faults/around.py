"""Faults around a training: of its folder, its data, its terminal. No result may be lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .files import configured, samples
from .jobs import Job, command
from .judgement import FINISHED, NOT_FINISHED, REFUSED, Outcome, refused
from .lab import contents

RANKS, EPOCHS = 2, 12
CHANGES = {"training": {"epochs": str(EPOCHS), "checkpoint_every": "9", "keep": "3"}}
MODEL = '''
import numpy as np
from pmm3d import nn


class Spoiled(nn.Module):
    """The identity. From the 30th backward pass on its gradient is NaN."""

    def __init__(self, grid):
        self.grid, self.passes = grid, 0

    def forward(self, x):
        def rule(gradient):
            self.passes += 1
            return (gradient * (np.nan if self.passes >= 30 else 1),)

        return x.from_op(x.shard.copy(), (x,), rule) if self.training else x


def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 16, seed=1), nn.gelu, Spoiled(grid),
                         nn.Linear(grid, 16, outputs, seed=2, cols="x"))
'''


Strike = Callable[[Path, "Job | None"], object]


@dataclass(frozen=True)
class Fault:
    """A fault around a training.

    name    for the table
    strike  the fault, in the working folder: before the start, or (during) after the first checkpoint
    says    regular expression that the output must match
    code    expected exit code
    same    the run must end with the bits of the undisturbed run, at once or after a restart
    mend    repair before the restart
    """

    name: str
    strike: Strike
    says: str
    code: int = FINISHED
    during: bool = True
    same: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    mend: Callable[[Path], object] = lambda folder: None


def suffered(fault: Fault, folder: Path, expected: dict[str, bytes] | None) -> tuple[Outcome, dict[str, bytes]]:
    """Run a training with the fault, then restart it without. Return the outcome and the final bits."""
    folder.mkdir()
    samples(folder / "data.h5")
    configured(folder / "config.toml", CHANGES)
    if not fault.during:
        fault.strike(folder, None)
    job = started(folder, "first", fault.environ)
    if fault.during and job.until(lambda: any((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))):
        fault.strike(folder, job)
    outcome = refused("around", fault.name, job.end(), fault.says, fault.code)
    final = {}
    if fault.same:
        fault.mend(folder)
        again = started(folder, "again", {}).end()
        outcome.note("result", again.code == FINISHED, f"the restart ended with {again.code}: {again.output[-500:]}")
        final = last_bits(folder)
        outcome.note("result", expected is None or final == expected, "ends with other weights than undisturbed")
    return outcome, final


def started(folder: Path, name: str, environ: Mapping[str, str]) -> Job:
    """Start a training in the working folder."""
    program = ["-m", "pmm3d", "train", "config.toml", "--resume", "auto"]
    return Job(command(RANKS, program), folder / f"{name}.log", environ, folder=folder, ranks=RANKS)


def last_bits(folder: Path) -> dict[str, bytes]:
    """The matrices of the newest checkpoint."""
    paths = sorted((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))
    return contents(paths[-1]) if paths else {}


def in_run(change: Callable[[Path], object]) -> Strike:
    return lambda folder, job: change(folder / "runs/a")


def replaced_by_folder(name: str) -> Strike:
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
    """Overwrite the data in place without HDF5's locks. Restore them after the end of the job."""
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


def signalled(number: signal.Signals) -> Strike:
    return lambda folder, job: job is not None and job.strike(number, 1, 0.0)


def without_master(folder: Path, job: Job | None) -> None:
    """Kill the job and remove the first file of its newest checkpoint."""
    if job is not None and job.strike(signal.SIGKILL, 0, 0.0):
        job.process.wait(60)
    (max((folder / "runs/a/checkpoints").glob("step-*")) / "checkpoint.h5").unlink()


def spoiled_gradient(folder: Path, job: Job | None) -> None:
    (folder / "model.py").write_text(MODEL)
    configured(
        folder / "config.toml",
        {**CHANGES, "network": {"build": '"model.py:build"', "hidden": ""}, "optimizer": {"clip": ""}},
    )


FAULTS = [
    Fault("none: the others are compared with this run", lambda folder, job: None, "loss"),
    Fault(
        "metrics.jsonl becomes a folder",
        replaced_by_folder("metrics.jsonl"),
        "metrics.jsonl",
        mend=lambda folder: (folder / "runs/a/metrics.jsonl").rmdir(),
    ),
    Fault("metrics.jsonl gets a line that is not UTF-8", in_run(not_utf8), "metrics.jsonl"),
    Fault("run.json is a folder", replaced_by_folder("run.json"), "run.json"),
    Fault(
        "an ASCII terminal",
        lambda folder, job: None,
        "loss",
        during=False,
        environ={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    Fault("the folder of checkpoints is removed", in_run(lambda run: shutil.rmtree(run / "checkpoints", True)), "step"),
    Fault(
        "the folder of checkpoints is renamed", in_run(lambda run: (run / "checkpoints").rename(run / "moved")), "step"
    ),
    Fault("killed, and the newest checkpoint loses checkpoint.h5", without_master, "SIGKILL", 128 + signal.SIGKILL),
    Fault("links among the checkpoints", in_run(linked_checkpoint), "step"),
    Fault("the lock is a link to a file", linked_lock, "does not say which", REFUSED, during=False, same=False),
    Fault("the data are overwritten in place", overwritten, "data.h5", REFUSED, same=False),
    Fault("the data are cut short", cut_short, "data.h5", REFUSED, same=False),
    Fault("SIGINT to a rank", signalled(signal.SIGINT), "step", NOT_FINISHED),
    Fault("SIGTERM to a rank", signalled(signal.SIGTERM), "step", NOT_FINISHED),
    Fault(
        "the gradient becomes NaN, the loss does not", spoiled_gradient, "gradient", REFUSED, during=False, same=False
    ),
]
