"""Faults around a training: of its checkpoints and its data. No result may be lost. tests/nn/test_run_ends.py and
test_run_links.py have those of its other files, its terminal and its signals."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .files import configured, samples
from .jobs import Job, command
from .judgement import FINISHED, REFUSED, Outcome, refused
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

        return x.made(x.shard.copy(), (x,), rule) if self.training else x


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
    """

    name: str
    strike: Strike
    says: str
    code: int = FINISHED
    during: bool = True
    same: bool = True


def suffered(fault: Fault, folder: Path, expected: dict[str, bytes] | None) -> tuple[Outcome, dict[str, bytes]]:
    """Run a training with the fault, then restart it without. Return the outcome and the final bits."""
    folder.mkdir()
    samples(folder / "data.h5")
    configured(folder / "config.toml", CHANGES)
    if not fault.during:
        fault.strike(folder, None)
    job = started(folder, "first")
    if fault.during and job.until(lambda: any((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))):
        fault.strike(folder, job)
    outcome = refused("around", fault.name, job.end(), fault.says, fault.code)
    final = {}
    if fault.same:
        again = started(folder, "again").end()
        outcome.note("result", again.code == FINISHED, f"the restart ended with {again.code}: {again.output[-500:]}")
        final = last_bits(folder)
        outcome.note("result", expected is None or final == expected, "ends with other weights than undisturbed")
    return outcome, final


def started(folder: Path, name: str) -> Job:
    """Start a training in the working folder."""
    program = ["-m", "pmm3d", "train", "config.toml", "--resume", "auto"]
    return Job(command(RANKS, program), folder / f"{name}.log", folder=folder, ranks=RANKS)


def last_bits(folder: Path) -> dict[str, bytes]:
    """The matrices of the newest checkpoint."""
    paths = sorted((folder / "runs/a/checkpoints").glob("step-*/checkpoint.h5"))
    return contents(paths[-1]) if paths else {}


def in_run(change: Callable[[Path], object]) -> Strike:
    return lambda folder, job: change(folder / "runs/a")


def linked_checkpoint(run: Path) -> None:
    (run / "checkpoints/step-99999999").symlink_to("/tmp")
    (run / "checkpoints/writing-step-00000018").symlink_to("/tmp")


def spoiled(spoil: Callable[[Path], object]) -> Strike:
    """Spoil the data in place, without HDF5's locks. Restore them after the end of the job."""

    def strike(folder: Path, job: Job | None) -> None:
        shutil.copy(folder / "data.h5", folder / "good.h5")
        spoil(folder / "data.h5")
        if job is not None:
            job.process.wait(120)
        os.replace(folder / "good.h5", folder / "data.h5")

    return strike


def overwrite(data: Path) -> None:
    other = samples(data.with_name("other.h5"), seed=1)
    with open(data, "r+b") as file:
        file.write(other.read_bytes())


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
    Fault("the folder of checkpoints is removed", in_run(lambda run: shutil.rmtree(run / "checkpoints", True)), "step"),
    Fault(
        "the folder of checkpoints is renamed", in_run(lambda run: (run / "checkpoints").rename(run / "moved")), "step"
    ),
    Fault("killed, and the newest checkpoint loses checkpoint.h5", without_master, "SIGKILL", 128 + signal.SIGKILL),
    Fault("links among the checkpoints", in_run(linked_checkpoint), "step"),
    Fault("the data are overwritten in place", spoiled(overwrite), "data.h5", REFUSED, same=False),
    Fault("the data are cut short", spoiled(lambda data: os.truncate(data, 4000)), "data.h5", REFUSED, same=False),
    Fault(
        "the gradient becomes NaN, the loss does not", spoiled_gradient, "gradient", REFUSED, during=False, same=False
    ),
]
