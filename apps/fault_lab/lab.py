"""A folder of runs: disturbed ones, the undisturbed ones that they are compared with, and their checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import mpi4py
import numpy as np
from kill_resume import contents

from pmm3d.tools.launcher import end_job

from .jobs import Ending, Job
from .judgement import Expected, Outcome, judged

mpi4py.rc.initialize = False
from pmm3d.io import disk, shards  # noqa: E402

CONFIG = """
[grid]
shape = "{shape}"
data = {data}
[data]
file = "{file}"
batch_size = 50
[network]
hidden = [48, 40]
norm = true
dropout = 0.1
dtype = "float64"
[optimizer]
clip = 1.0
shard_over_data = {sharded}
[training]
folder = "{folder}"
epochs = 3
checkpoint_every = 7
log_every = 1
keep = 3
"""
SHORT, LONG = "5", "30"
"""PMM3D_TIMEOUT of disturbed runs, seconds: where a hang is the fault, and where another error is to come first."""
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Run:
    """One training or loop, its folder and its grid. spec: what it is made of; None for a program of one's own."""

    lab: Lab
    name: str
    shape: str
    data: int
    trains: bool
    spec: dict = field(default_factory=dict)
    file: Path | None = None
    folder: Path | None = None
    starts: int = 0

    def __post_init__(self):
        self.folder = self.folder or self.lab.folder / self.name
        self.file = self.file or self.lab.file

    def start(self, environ=None, ranks: int | None = None, launcher=None, disturbed: bool = False) -> Job:
        """With the fault of the spec, if it is to be disturbed."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.lab.folder / f"{self.name}.{self.starts}.log"
        if self.trains:
            config = self.lab.folder / f"{self.name}.toml"
            config.write_text(CONFIG.format(shape=self.shape, data=self.data, file=self.file, folder=self.folder,
                                            sharded=str(self.data > 1).lower()))
            program = ["-m", "pmm3d", "train", config, "--resume", "auto"]
        else:
            config = self.lab.folder / f"{self.name}.json"
            place = {"folder": str(self.folder), "shape": self.shape, "data": self.data}
            config.write_text(json.dumps(place | (self.spec if disturbed else {})))
            program = [PROGRAM, config]
        self.lab.jobs.append(Job(ranks or self.lab.ranks, program, log, environ, launcher))
        return self.lab.jobs[-1]

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*[0-9]"))

    def lines(self) -> int:
        """Of its metrics: about as many as the steps done."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def last_step(self) -> int:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines()) if self.lines() else ()
        return max((line["step"] for line in lines), default=0)

    def final(self) -> dict[str, bytes]:
        return contents(self.checkpoints()[-1] / shards.MASTER)

    @property
    def mark(self) -> Path:
        return self.folder / "fault"


class Lab:
    """The runs of one call of the program. random: decides the grid, the victim, the moment and the place."""

    def __init__(self, folder: Path, ranks: int, random):
        self.folder, self.ranks, self.random = folder, ranks, random
        self.known: dict = {}
        self.jobs: list[Job] = []
        self.file = folder / "data.h5"
        self.grids = [("2x1x1", ranks // 2), ("2x2x1", ranks // 4)]
        self._references: dict[tuple, tuple[Run, dict, float]] = {}
        self._number = 0
        generator = np.random.default_rng(0)
        x = generator.standard_normal((1111, 20))
        y = (x @ generator.standard_normal((20, 5))).argmax(1)
        with h5py.File(self.file, "w") as plain, h5py.File(folder / "chunked.h5", "w") as chunked:
            for name, values in (("x", x), ("y", y)):
                plain[name] = values
                chunked.create_dataset(name, data=values, chunks=(64, *values.shape[1:]), fletcher32=True)

    def close(self) -> None:
        """End what still runs."""
        for job in self.jobs:
            end_job(job.process)

    def run(self, trains: bool, spec: dict | None = None, **options) -> Run:
        self._number += 1
        shape, data = self.random.choice(self.grids)
        return Run(self, f"run-{self._number:03d}", shape, data, trains, spec or {}, **options)

    def reference(self, run: Run) -> tuple[Run, dict, float]:
        """The undisturbed run of the same kind on the same grid, what it ended with, how long it took; made once."""
        key = run.shape, run.data, run.trains
        if key not in self._references:
            name = f"undisturbed-{run.shape}-{run.data}-{'training' if run.trains else 'loop'}"
            other = Run(self, name, run.shape, run.data, run.trains)
            ending = other.start().end()
            if ending.code != 0:
                raise SystemExit(f"the undisturbed run {name} ended with {ending.code}:\n{ending.said}")
            self._references[key] = other, other.final(), ending.seconds
        return self._references[key]

    def begin_in_the_middle(self, run: Run, how_many: int = 2) -> None:
        """Give a run the checkpoints of the undisturbed one, except the newest."""
        other, _, _ = self.reference(run)
        for path in other.checkpoints()[-1 - how_many : -1]:
            shutil.copytree(path, run.folder / "checkpoints" / path.name)

    def judge(self, kind: str, variant: str, run: Run, ending: Ending, expected: Expected) -> Outcome:
        """What was said and how it ended; no wrong result, no checkpoint lost, and after a resumption the same bits."""
        outcome = judged(kind, f"{variant}, grid {run.shape} data {run.data}", ending, expected)
        if "WRONG RESULT" in ending.said or (not run.trains and re.search("^finished", ending.said, re.M)):
            outcome.note("result", False, "a wrong result, or one in spite of the fault, is given as right")
        whole_checkpoints(run, ending.said, outcome)
        self.resume(run, outcome)
        return outcome

    def resume(self, run: Run, outcome: Outcome) -> None:
        """Go on, to the same bits as without the fault."""
        _, expected, _ = self.reference(run)
        ending = run.start().end()
        if ending.code != 0:
            outcome.note("result", False, f"resumed, it ended with {ending.code}: {ending.said[-1500:]}")
            return
        outcome.note("result", run.final() == expected, "resumed, it ended with other bits than the undisturbed run")


def whole_checkpoints(run: Run, said: str, outcome: Outcome) -> None:
    """Every checkpoint has its checksums, and all are there that the run had said to have written and was to keep."""
    found = run.checkpoints()
    for path in found:
        try:
            manifest = json.loads(shards.read_master(path)[0])
            disk.verify(path, manifest["files"])
        except Exception as error:
            outcome.note("checkpoints", False, f"{path.name}: {error}")
    told = [int(step) for step in re.findall(r"^step (\d+): wrote ", said, re.M)]
    newest = max((int(path.name[5:13]) for path in found), default=0)
    if told and (newest < max(told) or len(found) < min(len(set(told)), 3)):
        outcome.note("checkpoints", False, f"told of {told[-3:]}, found {[path.name for path in found]}")
    outcome.note("checkpoints", True if found or told else None)


def wait_for_checkpoints(run: Run, job: Job, number: int) -> bool:
    return job.until(lambda: len(run.checkpoints()) >= number)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
