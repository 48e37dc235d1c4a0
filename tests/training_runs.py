"""What tests of `pmm3d train` share: runs in a folder, signals at some moment, how a run fails."""

import json

import h5py
import numpy as np

COMMAND = """
import os, signal, sys, threading, time
from pmm3d.tools.cli import main
{before}
sys.argv = ["pmm3d", "train", *sys.argv[1:]]
main()
"""
SIGNAL = """
def send():
    metrics = {folder!r} + "/metrics.jsonl"
    while not os.path.exists(metrics) or sum(1 for line in open(metrics)) < {after}:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.{name})
import mpi4py.MPI
if mpi4py.MPI.COMM_WORLD.rank == 1:
    threading.Thread(target=send, daemon=True).start()
"""

CALLED = """
import mpi4py.MPI
from pmm3d.{module} import {owner}
done, left = {owner}.{name}, [{number}]
def wrapped(*args, **options):
    left[0] -= 1
    if left[0] == 0 and mpi4py.MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return done(*args, **options)
{owner}.{name} = wrapped
"""
"""SIGTERM to rank 1 at the so-many-th call of a function there."""

class Runs:
    """Trainings in one folder."""

    def __init__(self, folder, job):
        self.folder, self.job = folder, job
        random = np.random.default_rng(0)
        x = random.standard_normal((330, 12)).astype("float32")
        with h5py.File(folder / "data.h5", "w") as file:
            file["x"], file["y"] = x, (x[:, :3].argmax(1)).astype("int64")
            file["field"] = x @ random.standard_normal((12, 4)).astype("float32")

    def config(self, name="run", data="", training="", hidden=(16, 8), **sections) -> str:
        text = f'[data]\nfile = "{self.folder}/data.h5"\nbatch_size = 50\n{data}\n'
        text += f'[training]\nfolder = "{self.folder}/{name}"\nlog_every = 1\n{training}\n'
        text += f"[network]\nhidden = {list(hidden)}\n" + sections.pop("network", "") + "\n"
        text += "\n".join(f"[{section}]\n{lines}" for section, lines in sections.items())
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return str(path)

    def train(self, config, *arguments, ranks=2, before=""):
        return self.job(ranks, COMMAND.format(before=before), config, *arguments, timeout=60)

    def metrics(self, name="run") -> list[dict]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, name="run"):
        return sorted(path.name for path in (self.folder / name / "checkpoints").glob("step-*[0-9]"))

    def weights(self, name="run") -> dict[str, np.ndarray]:
        newest = self.folder / name / "checkpoints" / self.checkpoints(name)[-1] / "checkpoint.h5"
        found = {}
        with h5py.File(newest) as file:
            file.visititems(lambda key, item: found.update({key: item[...]}) if isinstance(item, h5py.Dataset)
                            and item.dtype.kind == "f" else None)
        return found


def fails(done, text):
    """The job ended with the error that a user sees once."""
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("pmm3d: ") and "Error" in line]
    assert len(said) == 1 and text in said[0], done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
