"""`pmm3d train --resume` with another configuration, other data, from an earlier checkpoint."""

import json
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import given
from training_runs import Runs, RunsHere, fails

pytestmark = pytest.mark.deadline(240)

two = pytest.mark.parallel([2])


@pytest.fixture
def here(shared_path, comm):
    """Runs on the ranks of the test."""
    return RunsHere(shared_path, comm)


@two
def test_what_changes_is_said_and_what_makes_another_run_is_refused(here, comm):
    """Before anything is changed. Accepted if it is requested explicitly."""
    assert here.train(here.config(training="epochs = 1")).returncode == 0
    there, weights = here.checkpoints(), here.weights()
    config = here.config(training="epochs = 2", network="activation = 'relu'", optimizer="lr = 0.5")
    fails(
        here.train(config, "--resume", "auto"),
        "the network of the checkpoint differs, and nothing was changed: "
        "network.activation was 'gelu', is 'relu'. Restore the settings; or start a new run in another folder",
    )
    if comm.rank == 0:
        with h5py.File(here.folder / "data.h5", "r+") as file:
            file["x"][0, 0] += 1
    fails(
        here.train(config, "--resume", "auto", "--accept", "network"),
        "the data of the checkpoint differs, and nothing was changed: the data's fingerprint was ",
    )
    assert here.checkpoints() == there
    assert all((here.weights()[name] == values).all() for name, values in weights.items())
    done = here.train(config, "--resume", "auto", "--accept", "network", "--accept", "data")
    assert done.returncode == 0, done.stderr
    for change in (
        "network.activation was 'gelu', is 'relu'",
        "optimizer.lr was 0.001, is 0.5",
        "training.epochs was 1, is 2",
        "the data's fingerprint was ",
        "the learning rate of step 7 is ",
    ):
        assert done.stderr.count(f"resumed with a change: {change}") == 1, done.stderr
    assert [line["lr"] for line in here.metrics() if "lr" in line][6] > 0.2


def blas_that_multiplies():
    """SciPy's BLAS, as loaded in a separate process."""
    ask = (
        "import scipy.linalg.blas; from pmm3d.processor import loaded_blas; blas = loaded_blas(); "
        "print(blas.name, blas.version)"
    )
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.nightly("a job of its own")
def test_another_blas_is_said(tmp_path, job, monkeypatch):
    """Its sums are rounded in another order. The run continues, and its bits differ."""
    runs = Runs(tmp_path, job)
    assert runs.train(runs.config(training="epochs = 1"), ranks=1).returncode == 0
    record = json.loads((runs.folder / "run/run.json").read_text())
    assert record["program"]["blas"] == blas_that_multiplies(), "not numpy's, which is another release"
    [numpys] = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_-*.so")
    monkeypatch.setenv("PMM3D_BLAS", str(numpys))
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    done = runs.train(runs.config(training="epochs = 2"), "--resume", "auto", ranks=1)
    [(before, now)] = re.findall(r"a change: the BLAS was (.*), is (.*), which rounds differently", done.stderr)
    assert done.returncode == 0 and before.startswith("openblas 0.") and before != now
    assert now.endswith(", kernel Haswell")


@two
def test_going_back_to_an_earlier_checkpoint(here):
    """Later checkpoints are retired: they are not loaded, and new ones are kept."""
    options = {"training": "epochs = 2\ncheckpoint_every = 3\nkeep = 9"}
    assert here.train(here.config(**options)).returncode == 0
    assert here.checkpoints() == [f"step-{step:08d}" for step in (3, 6, 9, 12)]
    folder = here.folder / "run/checkpoints"
    back = here.config(training="epochs = 2\ncheckpoint_every = 5\nkeep = 2")
    done = here.train(back, "--resume", str(folder / "step-00000003"))
    assert done.returncode == 0, done.stderr
    said = "from step 3, so later checkpoints are retired: retired-step-00000009, retired-step-00000012"
    assert said in done.stderr, done.stderr
    assert here.checkpoints() == ["step-00000010", "step-00000012"]
    assert [line["step"] for line in here.metrics() if "loss" in line] == list(range(1, 13))
    assert "the BLAS was" not in done.stderr, done.stderr
    record = json.loads((here.folder / "run/run.json").read_text())
    retired = [event for event in record["events"] if event["what"] == "retired"]
    assert len(retired) == 1 and "retired-step-00000012" in retired[0]["text"]
    again = here.train(here.config(training="epochs = 2\nkeep = 2"), "--resume", "auto")
    assert "nothing left to train" in again.stderr and here.checkpoints()[-1] == "step-00000012"


@two
def test_what_is_retired_alone_is_no_reason_to_begin_anew(here, comm):
    assert here.train(here.config(training="epochs = 1")).returncode == 0
    folder = here.folder / "run/checkpoints"
    if comm.rank == 0:
        for name in here.checkpoints():
            (folder / name).rename(folder / f"retired-{name}")
    comm.barrier()
    done = here.train(here.config(training="epochs = 2"), "--resume", "auto")
    fails(
        done,
        "run/checkpoints contains only retired checkpoints: retired-step-00000006. Continue from one with --resume ",
    )
    done = here.train(here.config(training="epochs = 2"), "--resume", str(folder / "retired-step-00000006"))
    assert done.returncode == 0 and here.checkpoints() == ["step-00000012"], done.stderr


@two
def test_the_schedule_ends_with_the_run_where_epochs_have_other_steps_than_before(here):
    """Six steps, then three and three. With three times three steps in the schedule, the rate would be zero from step 9
    on."""
    for kind in ("cosine", "constant"):
        with given(kind=kind):
            schedule = f"kind = '{kind}'"
            assert here.train(here.config(kind, training="epochs = 1", schedule=schedule)).returncode == 0
            config = here.config(kind, training="epochs = 3", schedule=schedule, batch_size=100)
            done = here.train(config, "--resume", "auto", "--accept", "data")
            assert done.returncode == 0, done.stderr
            rates = [line["lr"] for line in here.metrics(kind) if "lr" in line]
            assert len(rates) == 12 and min(rates) > 0, rates
            if kind == "cosine":
                assert rates[6] == pytest.approx(0.001 * 0.5) and rates[6:] == sorted(rates[6:], reverse=True), rates
            said = "the schedule ends with the run, at step 12" in done.stdout + done.stderr
            assert said == (kind == "cosine")
