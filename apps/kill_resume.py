"""Kill -9 a rank of a training run at random moments, resume, and compare with a run that nobody disturbed.

    python apps/kill_resume.py --kills 20 --ranks 4

Every time a disturbed run comes to its end, its weights and optimizer state must be bitwise those of the undisturbed
run; after every kill, each checkpoint must be readable and whole. At the end a checkpoint of the undisturbed run is
resumed on other grids: the losses must agree to rounding. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

from pmm3d.tools.launcher import descendants, end_job

CONFIG = """
[grid]
shape = "{shape}"
data = {data}
[data]
file = "{folder}/data.h5"
batch_size = 50
validation = 0.1
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
folder = "{folder}/{name}"
epochs = {epochs}
checkpoint_every = 7
log_every = 1
"""
PATIENCE = 180


class Study:
    """Runs of one configuration in one folder, each under a name of its own."""

    def __init__(self, folder: Path, ranks: int, epochs: int):
        self.folder, self.ranks, self.epochs = folder, ranks, epochs
        generator = np.random.default_rng(0)
        with h5py.File(folder / "data.h5", "w") as file:
            x = generator.standard_normal((1111, 20))
            file["x"], file["y"] = x, (x @ generator.standard_normal((20, 5))).argmax(1)

    def start(self, name: str, shape: str, data: int, ranks: int | None = None) -> subprocess.Popen:
        config = self.folder / f"{name}.toml"
        sharded = str(data > 1).lower()
        config.write_text(CONFIG.format(folder=self.folder, name=name, shape=shape, data=data, epochs=self.epochs,
                                        sharded=sharded))
        command = [sys.executable, "-m", "pmm3d.launcher", "-n", str(ranks or self.ranks), "-m", "pmm3d", "train",
                   str(config), "--resume", "auto"]
        log = open(self.folder / f"{name}.log", "a")
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def finish(self, process: subprocess.Popen, name: str) -> None:
        try:
            code = process.wait(PATIENCE)
        finally:
            end_job(process)
        if code:
            raise SystemExit(f"run {name} ended with {code}: {(self.folder / f'{name}.log').read_text()[-3000:]}")

    def checkpoints(self, name: str) -> list[Path]:
        return sorted((self.folder / name / "checkpoints").glob("step-*[0-9]/checkpoint.h5"))

    def losses(self, name: str) -> dict[int, float]:
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def contents(path: Path) -> dict[str, bytes]:
    """Every matrix of a checkpoint, whole, as plain h5py reads it; a missing piece would read as NaN."""
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
            values = item[...]
            assert np.isfinite(values).all(), f"{path}: {name} is not whole"
            found[name] = values.tobytes()

    with h5py.File(path) as file:
        file.visititems(visit)
    assert found, f"{path} holds nothing"
    return found


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that train."""
    found = []
    for pid in descendants(process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and b"-n" not in words and b"-np" not in words:
            found.append(pid)
    return found


def kill_one(process: subprocess.Popen, delay: float) -> bool:
    """Kill a rank `delay` seconds after all are there; False if the run was over before."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and not ranks_of(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(delay)
    ranks = ranks_of(process)
    if process.poll() is not None or not ranks:
        return False
    os.kill(random.choice(ranks), signal.SIGKILL)
    return True


def disturbed(study: Study, kills: int, longest: float, expected: dict[str, bytes], tell) -> dict[str, int]:
    """Kill that often; whenever a run ends by itself, compare it and begin a new one."""
    figures = {"kills": 0, "runs ended": 0, "checkpoints read": 0}
    name = "disturbed-0"
    while figures["kills"] < kills or not figures["runs ended"]:
        process = study.start(name, "2x1x1", 2)
        killed = figures["kills"] < kills and kill_one(process, random.uniform(0, longest))
        if killed:
            process.wait(PATIENCE)
            end_job(process)
            figures["kills"] += 1
        else:
            study.finish(process, name)
        written = study.checkpoints(name)
        read = [contents(path) for path in written]
        figures["checkpoints read"] += len(read)
        steps = [int(path.parent.name[5:13]) for path in written]
        tell(f"{name}, {figures['kills']} kills: newest checkpoint {max(steps, default='none')}")
        if not killed:
            assert read[-1] == expected, f"{name}: the weights differ from the undisturbed run's"
            figures["runs ended"] += 1
            name = f"disturbed-{figures['runs ended']}"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="of the disturbed runs, a multiple of 4 (4)")
    parser.add_argument("--epochs", type=int, default=60, help="of 20 steps each (60)")
    parser.add_argument("--longest", type=float, default=15.0, help="kills come within so many seconds of the start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    tell = lambda text: print(text, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder), options.ranks, options.epochs)
        study.finish(study.start("undisturbed", "2x1x1", 2), "undisturbed")
        last = study.checkpoints("undisturbed")[-1]
        figures = disturbed(study, options.kills, options.longest, contents(last), tell)
        print(f"{figures['kills']} kills, {figures['runs ended']} disturbed runs came to their end, all bitwise as the "
              f"undisturbed one; {figures['checkpoints read']} checkpoints read, none broken")
        for shape, data, ranks in (("1x1x1", 1, 1), ("1x2x2", 1, 4), ("2x2x1", 2, 8)):
            print(f"resumed on {shape} data {data}: largest relative difference of a loss "
                  f"{other_grid(study, shape, data, ranks):.1e}")


def other_grid(study: Study, shape: str, data: int, ranks: int) -> float:
    """Resume the undisturbed run's oldest kept checkpoint on another grid; compare the losses from there on."""
    name = f"on-{shape}-{data}"
    oldest = study.checkpoints("undisturbed")[0].parent
    folder = study.folder / name / "checkpoints"
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(oldest), str(folder)], check=True)
    study.finish(study.start(name, shape, data, ranks), name)
    expected, found = study.losses("undisturbed"), study.losses(name)
    assert found and min(found) == int(oldest.name[5:13]) + 1 and max(found) == max(expected)
    return max(abs(found[step] / expected[step] - 1) for step in found)


if __name__ == "__main__":
    main()
