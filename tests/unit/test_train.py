"""`pmm3d train` as a user runs it: what it writes, how it resumes, and what it says of mistakes."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

COMMAND = """
import os, signal, sys, threading, time
from pmm3d.cli import main
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


class Runs:
    """Trainings in one folder."""

    def __init__(self, folder, job):
        self.folder, self.job = folder, job
        random = np.random.default_rng(0)
        x = random.standard_normal((330, 12)).astype("float32")
        with h5py.File(folder / "data.h5", "w") as file:
            file["x"], file["y"] = x, (x[:, :3].argmax(1)).astype("int64")
            file["field"] = x @ random.standard_normal((12, 4)).astype("float32")

    def config(self, name="run", data="", training="", **sections) -> str:
        text = f'[data]\nfile = "{self.folder}/data.h5"\nbatch_size = 50\n{data}\n'
        text += f'[training]\nfolder = "{self.folder}/{name}"\nlog_every = 1\n{training}\n'
        text += "[network]\nhidden = [16, 8]\n" + sections.pop("network", "") + "\n"
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


@pytest.fixture
def runs(tmp_path, job):
    return Runs(tmp_path, job)


def fails(done, text):
    """The job ended with the error that a user sees once."""
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("pmm3d: ") and "Error" in line]
    assert len(said) == 1 and text in said[0], done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


def test_a_run_leaves_metrics_curves_and_checkpoints(runs):
    config = runs.config(training="epochs = 4\nkeep = 2", grid='shape = "2x1x1"\ndata = 2')
    done = runs.train(config, ranks=4)
    assert done.returncode == 0, done.stderr
    lines = [line for line in runs.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert set(lines[0]) >= {"epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"}
    validations = [line["validation"] for line in runs.metrics() if "validation" in line]
    assert len(validations) == 4 and set(validations[0]) == {"loss", "accuracy"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert runs.checkpoints() == ["step-00000018", "step-00000024"]
    assert (runs.folder / "run/curves.png").read_bytes()[1:4] == b"PNG"
    assert runs.weights()["0.weight"].shape == (12, 16)
    assert "validation accuracy" in done.stdout
    fails(runs.train(config, ranks=4), "is there from an earlier run: go on with --resume auto")


def test_an_interrupted_run_goes_on_to_the_same_bits_and_elsewhere_to_the_same_losses(runs):
    options = {"data": "validation = 0.0", "training": "epochs = 3\nmicro_batches = 2", "grid": 'shape = "1x2x1"',
               "network": "dropout = 0.2\nnorm = true\ndtype = 'float64'"}
    whole = runs.train(runs.config("whole", **options))
    assert whole.returncode == 0, whole.stderr
    ended = runs.train(runs.config("ended", **options),
                       before=SIGNAL.format(folder=str(runs.folder / "ended"), after=3, name="SIGTERM"))
    assert ended.returncode == 75, ended.stderr
    assert 3 <= len(runs.metrics("ended")) < 12
    resumed = runs.train(runs.config("ended", **options), "--resume", "auto")
    assert resumed.returncode == 0 and "resumed" in resumed.stderr, resumed.stderr
    expected, found = runs.weights("whole"), runs.weights("ended")
    assert expected.keys() == found.keys() and len(expected) == 30
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert [line["loss"] for line in runs.metrics("ended")] == [line["loss"] for line in runs.metrics("whole")]

    elsewhere = runs.config("ended", **{**options, "training": "epochs = 4\nmicro_batches = 2", "grid": "data = 1"})
    assert runs.train(elsewhere, "--resume", "auto", ranks=3).returncode == 0
    further = runs.config("whole", **{**options, "training": "epochs = 4\nmicro_batches = 2"})
    assert runs.train(further, "--resume", "auto").returncode == 0
    losses = [[line["loss"] for line in runs.metrics(name)] for name in ("ended", "whole")]
    assert len(losses[0]) == 16 and np.allclose(*losses, rtol=1e-12, atol=0)


def test_sigusr1_has_a_checkpoint_written_and_the_run_goes_on(runs):
    config = runs.config(training="epochs = 30\nkeep = 100\ncheckpoint_every = 1000")
    done = runs.train(config, before=SIGNAL.format(folder=str(runs.folder / "run"), after=5, name="SIGUSR1"))
    assert done.returncode == 0, done.stderr
    assert len(runs.checkpoints()) == 2 and runs.checkpoints()[-1] == "step-00000180"


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_layer(runs):
    config = runs.config(training="epochs = 20\nloss = 'mse'", data="targets = 'field'", network="activation = 'relu'",
                         optimizer="kind = 'sgd'\nlr = 1e6", schedule="kind = 'constant'")
    done = runs.train(config)
    fails(done, "NonFiniteLossError: step 3: the loss is inf. The output of layer 2 (Linear) is not finite.")
    assert [line["step"] for line in runs.metrics()] == [1, 2] and not runs.checkpoints()


@pytest.mark.parametrize("changes, text", [
    ({"network": "hiden = [4]"}, "unknown key network.hiden (did you mean hidden?)"),
    ({"optimiser": "lr = 1"}, "unknown key optimiser (did you mean optimizer?)"),
    ({"optimizer": "lr = -1"}, "optimizer.lr = -1"),
    ({"grid": "shape = '2x2x1'"}, "grid 2x2x1 (data 1) needs 4 ranks; the communicator has 2"),
    ({"data": "inputs = 'z'"}, "'z'"),
    ({"training": "loss = 'mse'"}, "training.loss is mse, but the targets 'y'"),
    ({"data": "classes = 2"}, "labels are 0 to 1"),
])
def test_mistakes_in_the_configuration(runs, changes, text):
    fails(runs.train(runs.config(**changes)), text)


def test_a_checkpoint_of_another_network_is_refused_with_names_and_shapes(runs):
    assert runs.train(runs.config(training="epochs = 1")).returncode == 0
    before = runs.checkpoints()
    done = runs.train(runs.config(training="epochs = 2", network="bias = false"), "--resume", "auto")
    fails(done, "0.bias")
    assert runs.checkpoints() == before


def test_epochs_end_where_the_data_does_also_after_a_change_of_micro_batches(runs):
    """Six batches an epoch: six steps, then three and three, each epoch's end validated and logged."""
    assert runs.train(runs.config(training="epochs = 1")).returncode == 0
    done = runs.train(runs.config(training="epochs = 3\nmicro_batches = 2"), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in runs.metrics() if "validation" in line] == [6, 9, 12]
    assert runs.metrics()[-2]["step"] == 12 and "loss" in runs.metrics()[-2]
    again = runs.train(runs.config(training="epochs = 3\nmicro_batches = 2"), "--resume", "auto")
    assert again.returncode == 0 and "nothing left to train" in again.stderr, again.stderr


def test_nothing_to_resume_begins_anew(runs):
    done = runs.train(runs.config(training="epochs = 1"), "--resume", "auto")
    assert done.returncode == 0 and runs.checkpoints() == ["step-00000006"], done.stderr
    fails(runs.train(runs.config(), "--resume", str(runs.folder / "nowhere")), "nowhere")


def test_show_prints_every_default(runs):
    done = runs.train(runs.config(), "--show", ranks=1)
    assert json.loads(done.stdout)["optimizer"]["kind"] == "adamw"


def test_kill_9_at_random_moments(runs):
    """Two of the kills of apps/kill_resume.py, which makes twenty."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMM3D_")}
    done = subprocess.run([sys.executable, "apps/kill_resume.py", "--kills", "2", "--epochs", "10", "--longest", "6"],
                          capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout and "all bitwise" in done.stdout
    differences = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "resumed on" in line]
    assert len(differences) == 3 and max(differences) < 1e-11
