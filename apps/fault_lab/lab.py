"""A folder of runs: disturbed ones, the undisturbed ones that they are compared with, and their checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np

from pmm3d.io import disk
from pmm3d.tools.launcher import end_job

from .jobs import PATIENCE, Ending, Job
from .judgement import Expected, Outcome, judged

CONFIG = """
[grid]
shape = "{run.shape}"
data = {run.data}
[data]
file = "{run.file}"
batch_size = 50
[network]
hidden = [48, 40]
norm = true
dropout = 0.1
dtype = "float64"
[optimizer]
lr = 3e-3
clip = 1.0
shard_over_data = {sharded}
[training]
folder = "{run.folder}"
epochs = {run.lab.epochs}
checkpoint_every = 7
log_every = 1
keep = {keep}
"""
KEEP = 3
SHORT, LONG = "5", "30"
"""PMM3D_TIMEOUT of disturbed runs, seconds: where a hang is the fault, and where another error is to come first."""
LOOP = Path(__file__).with_name("loop.py")


@dataclass
class Run:
    """One training, by `pmm3d train` or by the loop in loop.py, on a grid, in folder / name of the lab's."""

    lab: Lab
    name: str
    shape: str
    data: int
    own_loop: bool = False
    folder: Path = Path()
    starts: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder = self.lab.folder / self.folder / self.name
        self.file = self.lab.file

    def start(self, environ: Mapping[str, str] = MappingProxyType({}), *, ranks: int | None = None,
              fault: Mapping[str, Any] | None = None, launcher: Sequence[str] = ()) -> Job:
        """From the newest checkpoint, if there is one. fault: what goes wrong in a loop of one's own; launcher: what
        starts the ranks, in place of pmm3d.launcher."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.own_loop:
            settings = {"folder": str(self.folder), "shape": self.shape, "data": self.data, "fault": fault}
            program = [LOOP, json.dumps(settings)]
        else:
            config = self.lab.folder / f"{self.name}.toml"
            config.write_text(CONFIG.format(run=self, sharded=str(self.data > 1).lower(), keep=KEEP))
            program = ["-m", "pmm3d", "train", config, "--resume", "auto"]
        log = self.lab.folder / f"{self.name}.{self.starts}.log"
        self.lab.jobs.append(Job(ranks or self.lab.ranks, program, log, environ, self.folder / "fault", launcher))
        return self.lab.jobs[-1]

    def finish(self, job: Job) -> Ending:
        """Wait for its end; a failure ends this program."""
        ending = job.end(patience=10 * PATIENCE)
        if ending.code != 0:
            raise SystemExit(f"the run {self.name} ended with {ending.code}:\n{ending.output[-3000:]}")
        return ending

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*[0-9]"))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: about as many as the steps done."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def final(self) -> dict[str, bytes]:
        return contents(self.checkpoints()[-1] / "checkpoint.h5")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:13])


def contents(path: Path) -> dict[str, bytes]:
    """Every matrix of a checkpoint, whole, as plain h5py reads it; a missing piece would read as NaN."""
    matrices, names = {}, []
    with h5py.File(path) as file:
        file.visit(names.append)
        for name, item in ((name, file[name]) for name in names):
            if isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
                assert np.isfinite(values := item[...]).all(), f"{path}: {name} is not whole"
                matrices[name] = values.tobytes()
    assert matrices, f"{path} holds nothing"
    return matrices


class Lab:
    """The runs of one call of the program. random: decides the grid, the victim, the moment and where in the loop."""

    def __init__(self, folder: Path, ranks: int, random: Random, epochs: int = 3):
        self.folder, self.ranks, self.random, self.epochs = folder, ranks, random, epochs
        self.jobs: list[Job] = []
        self.file, self.chunked_file = folder / "data.h5", folder / "chunked.h5"
        self._references: dict[str, Run] = {}
        self._numbers = count(1)
        generator = np.random.default_rng(0)
        x = generator.standard_normal((1111, 20))
        y = (x @ generator.standard_normal((20, 5))).argmax(1)
        with h5py.File(self.file, "w") as plain, h5py.File(self.chunked_file, "w") as chunked:
            for name, values in (("x", x), ("y", y)):
                plain[name] = values
                chunked.create_dataset(name, data=values, chunks=(64, *values.shape[1:]), fletcher32=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still runs."""
        for job in self.jobs:
            end_job(job.process)

    def run(self, **options: Any) -> Run:
        """A new one, on a grid by chance."""
        shape, data = self.random.choice([("2x1x1", self.ranks // 2), ("2x2x1", self.ranks // 4)])
        return Run(self, f"run-{next(self._numbers):03d}", shape, data, **options)

    def reference(self, run: Run) -> Run:
        """The undisturbed run of the same kind on the same grid, with the seconds that it took; made once."""
        name = f"undisturbed-{run.shape}-{run.data}-{'loop' if run.own_loop else 'training'}"
        if name not in self._references:
            other = self._references[name] = Run(self, name, run.shape, run.data, run.own_loop)
            other.seconds = other.finish(other.start()).seconds
        return self._references[name]

    def judge(self, kind: str, variant: str, run: Run, ending: Ending, expected: Expected) -> Outcome:
        """What was said and how it ended; no wrong result, no checkpoint lost, and after a resumption the same bits."""
        outcome = judged(kind, f"{variant}, grid {run.shape} data {run.data}", ending, expected)
        if "WRONG RESULT" in ending.output or (
                run.own_loop and 0 not in expected.codes and re.search("^finished", ending.output, re.M)):
            outcome.note("result", False, "a wrong result, or one in spite of the fault, is given as right")
        check_checkpoints(run, ending.output, outcome)
        expected_bits, resumed = self.reference(run).final(), run.start().end()
        if resumed.code != 0:
            outcome.note("result", False, f"resumed, it ended with {resumed.code}: {resumed.output[-1500:]}")
        else:
            outcome.note("result", run.final() == expected_bits, "resumed, it ended with other bits than undisturbed")
        return outcome


def check_checkpoints(run: Run, output: str, outcome: Outcome) -> None:
    """Every checkpoint has its checksums, and all are there that the run had said to have written and was to keep."""
    paths = run.checkpoints()
    for path in paths:
        try:
            disk.verify(path, {"checkpoint.h5": json.loads((path / "checkpoint.crc").read_bytes())})
            with h5py.File(path / "checkpoint.h5") as file:
                disk.verify(path, json.loads(file["pmm3d/manifest"][()])["files"])
        except Exception as error:
            outcome.note("checkpoints", False, f"{path.name}: {error}")
    written = [int(step) for step in re.findall(r"^step (\d+): wrote ", output, re.M)]
    newest = max(map(step_of, paths), default=0)
    if written and (newest < max(written) or len(paths) < min(len(set(written)), KEEP)):
        outcome.note("checkpoints", False, f"wrote {written[-3:]}, there are {[path.name for path in paths]}")
    outcome.note("checkpoints", True if paths or written else None)
