"""Trainings that are disturbed, the undisturbed ones they are compared with, and their checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

from pmm3d.io import disk
from pmm3d.tools.launcher import end_job

from .files import Sections, configured, samples
from .jobs import PATIENCE, Ending, Job, command
from .judgement import Expected, Outcome, judged

KEEP = 3
LONG = "30"
"""PMM3D_TIMEOUT in seconds of jobs that must end by another error than a timeout."""
GRIDS = {2: [("2x1x1", 1, 1), ("1x1x1", 1, 2)], 4: [("2x1x1", 2, 1), ("2x2x1", 1, 1), ("2x1x1", 1, 2), ("1x1x1", 2, 2)]}
"""Number of ranks -> grid shapes, each with the sizes of the axes data and pipe."""
LOOP = Path(__file__).with_name("loop.py")


@dataclass
class Run:
    """One training by `pmm3d train`, or by the loop of loop.py, in the folder lab.folder / folder / name."""

    lab: Lab
    name: str
    shape: str
    data: int
    pipe: int = 1
    own_loop: bool = False
    folder: Path = Path()
    starts: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder = self.lab.folder / self.folder / self.name
        self.file = self.lab.file

    def start(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        fault: Mapping[str, Any] | None = None,
        launcher: Sequence[str] = (),
    ) -> Job:
        """Start it from its newest checkpoint, if there is one.

        fault     fault of loop.py
        launcher  command that starts the ranks instead of pmm3d.launcher
        """
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        ranks, mark = self.lab.ranks, self.folder / "fault"
        if self.own_loop:
            settings = {"folder": str(self.folder), "shape": self.shape, "data": self.data, "fault": fault}
            program = [str(LOOP), json.dumps(settings)]
        else:
            config = configured(self.lab.folder / f"{self.name}.toml", self._changes())
            program = ["-m", "pmm3d", "train", str(config), "--resume", "auto"]
        line = [*launcher, *program] if launcher else command(ranks, program)
        log = self.lab.folder / f"{self.name}.{self.starts}.log"
        self.lab.jobs.append(Job(line, log, environ, ranks=ranks, mark=mark))
        return self.lab.jobs[-1]

    def _changes(self) -> Sections:
        pipe = {"pipe": str(self.pipe), "schedule": '"zb-h1"', "micro_batches": "4"} if self.pipe > 1 else {}
        return {
            "grid": {"shape": f'"{self.shape}"', "data": str(self.data), **pipe},
            "data": {"file": f'"{self.file}"', "validation": ""},
            "network": {"hidden": "[48, 40]", "norm": "true", "dropout": "0.1", "dtype": '"float64"'},
            "optimizer": {"shard_over_data": str(self.data > 1).lower()},
            "training": {
                "folder": f'"{self.folder}"',
                "epochs": str(self.lab.epochs),
                "checkpoint_every": "7",
                "keep": str(KEEP),
            },
        }

    def finish(self, job: Job) -> Ending:
        """Wait for the end of a job that must succeed."""
        ending = job.end(patience=10 * PATIENCE)
        if ending.code != 0:
            raise SystemExit(f"the run {self.name} ended with {ending.code}:\n{ending.output[-3000:]}")
        return ending

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*[0-9]"))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each step."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def final(self) -> dict[str, bytes]:
        return contents(self.checkpoints()[-1] / "checkpoint.h5")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:13])


def contents(path: Path) -> dict[str, bytes]:
    """Read every matrix of a checkpoint by plain h5py. A missing piece would be NaN."""
    matrices, names = {}, []
    with h5py.File(path) as file:
        file.visit(names.append)
        for name, item in ((name, file[name]) for name in names):
            if isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
                values = item[...]
                assert np.isfinite(values).all(), f"{path}: {name} is not whole"
                matrices[name] = values.tobytes()
    assert matrices, f"{path} contains no matrix"
    return matrices


class Lab:
    """The runs of one call of the program.

    random  chooses the grid, the victim, the moment and the place
    short   PMM3D_TIMEOUT in seconds of jobs that are to hang
    """

    def __init__(self, folder: Path, ranks: int, random: Random, epochs: int = 3, short: str = "5"):
        self.folder, self.ranks, self.random, self.epochs, self.short = folder, ranks, random, epochs, short
        self.jobs: list[Job] = []
        self.file = samples(folder / "data.h5", 1111, 20, 5)
        self.chunked_file = samples(folder / "chunked.h5", 1111, 20, 5, fletcher32=True)
        self._references: dict[str, Run] = {}
        self._numbers = count(1)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs that still run."""
        for job in self.jobs:
            end_job(job.process)

    def run(self, pipe: int | None = 1, **options: Any) -> Run:
        """Return a new run on a random grid. pipe: ranks along the axis pipe; None: any number."""
        grid = self.random.choice([grid for grid in GRIDS[self.ranks] if pipe in (None, grid[2])])
        return Run(self, f"run-{next(self._numbers):03d}", *grid, **options)

    def reference(self, run: Run) -> Run:
        """Return the undisturbed run of the same kind on the same grid. It runs once; `seconds` is its duration."""
        name = f"undisturbed-{run.shape}-{run.data}-{run.pipe}-{'loop' if run.own_loop else 'training'}"
        if name not in self._references:
            other = self._references[name] = Run(self, name, run.shape, run.data, run.pipe, run.own_loop)
            other.seconds = other.finish(other.start()).seconds
        return self._references[name]

    def judge(self, kind: str, variant: str, run: Run, ending: Ending, expected: Expected) -> Outcome:
        """Check a job's end, its results and its checkpoints. Then resume it: the weights must be those of the
        undisturbed run, bit by bit."""
        outcome = judged(kind, f"{variant}, grid {run.shape} data {run.data} pipe {run.pipe}", ending, expected)
        if "WRONG RESULT" in ending.output or (
            run.own_loop and 0 not in expected.codes and re.search("^finished", ending.output, re.M)
        ):
            outcome.note("result", False, "a wrong result, or success in spite of the fault")
        check_checkpoints(run, ending.output, outcome)
        expected_bits, resumed = self.reference(run).final(), run.start().end(3 * PATIENCE)
        if resumed.code != 0:
            outcome.note("result", False, f"the resumed run ended with {resumed.code}: {resumed.output[-1500:]}")
        else:
            outcome.note("result", run.final() == expected_bits, "the resumed run ended with other bits")
        return outcome


def check_checkpoints(run: Run, output: str, outcome: Outcome) -> None:
    """Check that every checkpoint has its checksums, and that all written checkpoints exist that were to be kept."""
    paths = run.checkpoints()
    for path in paths:
        try:
            disk.verify(path, {"checkpoint.h5": json.loads((path / "checkpoint.crc").read_bytes())})
            with h5py.File(path / "checkpoint.h5") as file:
                disk.verify(path, json.loads(file["pmm3d/manifest"][()])["files"])
        except Exception as error:
            outcome.note("files", False, f"{path.name}: {error}")
    written = [int(step) for step in re.findall(r"^step (\d+): wrote ", output, re.M)]
    newest = max(map(step_of, paths), default=0)
    if written and (newest < max(written) or len(paths) < min(len(set(written)), KEEP)):
        outcome.note("files", False, f"wrote {written[-3:]}, there are {[path.name for path in paths]}")
    outcome.note("files", True if paths or written else None)
