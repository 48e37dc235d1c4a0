"""`pmm3d train --resume` with another configuration, other data, from an earlier checkpoint; and `training.weights`, a
warm start from weights only."""

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from loops import looped
from on_disk import on_rank_0
from training_runs import fails

pytestmark = pytest.mark.deadline(240)

two = pytest.mark.parallel([2])


def change_a_value(path):
    with h5py.File(path, "r+") as file:
        file["x"][0, 0] += 1


@two
def test_what_changes_is_said_and_what_makes_another_run_is_refused(here, comm):
    """Before anything is changed. Accepted if it is requested explicitly."""
    here.finish(here.config(training="epochs = 1"))
    there, weights = here.checkpoints(), here.weights()
    resume = lambda config, *accepted: here.train(config, "--resume", "auto", *accepted)
    narrow = here.config(training="epochs = 2", network="bias = false")
    fails(resume(narrow), "nothing was changed: network.bias was True")
    fails(resume(narrow, "--accept", "network"), "0.bias")
    options = "epochs = 2\nclass_weights = [1, 2, 3]"
    config = here.config(training=options, network="activation = 'relu'", optimizer="lr = 0.5")
    fails(resume(config), "nothing was changed: network.activation was 'gelu', is 'relu'. Restore the settings; or")
    on_rank_0(comm, lambda: change_a_value(here.folder / "data.h5"))
    fails(resume(config, "--accept", "network"), "nothing was changed: the data's fingerprint was ")
    assert here.checkpoints() == there
    assert all((here.weights()[name] == values).all() for name, values in weights.items())
    done = resume(config, "--accept", "network", "--accept", "data")
    assert done.returncode == 0, done.stderr
    for change in (
        "network.activation was 'gelu', is 'relu'",
        "optimizer.lr was 0.001, is 0.5",
        "training.epochs was 1, is 2",
        "training.class_weights was ",
        "the data's fingerprint was ",
        "the learning rate of step 7 is ",
    ):
        assert done.stderr.count(f"resumed with a change: {change}") == 1, done.stderr
    assert "samples.class_weights" not in done.stderr
    assert [line["lr"] for line in here.metrics() if "lr" in line][6] > 0.2


def blas_that_multiplies():
    """SciPy's BLAS, as loaded in a separate process."""
    ask = (
        "import scipy.linalg.blas; from pmm3d.processor import loaded_blas; blas = loaded_blas(); "
        "print(blas.name, blas.version)"
    )
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.nightly("a job of its own")
def test_another_blas_is_said(runs, monkeypatch):
    """Its sums are rounded in another order. The run continues, and its bits differ."""
    runs.finish(runs.config(training="epochs = 1"), ranks=1)
    assert runs.record()["program"]["blas"] == blas_that_multiplies(), "not numpy's, which is another release"
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
    here.finish(here.config(**options))
    assert here.checkpoints() == [f"step-{step:08d}" for step in (3, 6, 9, 12)]
    folder = here.folder / "run/checkpoints"
    back = here.config(training="epochs = 2\ncheckpoint_every = 5\nkeep = 2")
    done = here.finish(back, "--resume", str(folder / "step-00000003"))
    assert "retired: retired-step-00000009, retired-step-00000012" in done.stderr, done.stderr
    assert here.checkpoints() == ["step-00000010", "step-00000012"]
    assert [line["step"] for line in here.metrics() if "loss" in line] == list(range(1, 13))
    assert "the BLAS was" not in done.stderr, done.stderr
    [retired] = [event["text"] for event in here.record()["events"] if event["what"] == "retired"]
    assert "retired-step-00000012" in retired
    again = here.train(here.config(training="epochs = 2\nkeep = 2"), "--resume", "auto")
    assert "nothing left to train" in again.stderr and here.checkpoints()[-1] == "step-00000012"


def retire(folder):
    for path in list(folder.glob("step-*")):
        path.rename(path.with_name(f"retired-{path.name}"))


@two
def test_what_is_retired_alone_is_no_reason_to_begin_anew(here, comm):
    here.finish(here.config(training="epochs = 1"))
    folder, config = here.folder / "run/checkpoints", here.config(training="epochs = 2")
    on_rank_0(comm, lambda: retire(folder))
    fails(here.train(config, "--resume", "auto"), "only retired checkpoints: retired-step-00000006. Continue from one")
    done = here.finish(config, "--resume", str(folder / "retired-step-00000006"))
    assert here.checkpoints() == ["step-00000012"], done.stderr


@two
@looped("kind", ("cosine", "constant"))
def test_epochs_and_the_schedule_end_with_the_run_after_a_change_of_the_batch(here, kind):
    """Six steps, then three and three. With three times three steps in the schedule, the rate would be zero from step 9
    on. The end of each epoch is validated and logged."""
    schedule = f"kind = '{kind}'"
    here.finish(here.config(kind, training="epochs = 1", schedule=schedule))
    config = here.config(kind, training="epochs = 3", schedule=schedule, batch_size=100)
    done = here.finish(config, "--resume", "auto", "--accept", "data")
    rates = [line["lr"] for line in here.metrics(kind) if "lr" in line]
    assert len(rates) == 12 and min(rates) > 0, rates
    if kind == "cosine":
        assert rates[6] == pytest.approx(0.001 * 0.5) and rates[6:] == sorted(rates[6:], reverse=True), rates
    said = "the schedule ends with the run, at step 12" in done.stdout + done.stderr
    assert said == (kind == "cosine")
    assert [line["step"] for line in here.metrics(kind) if "validation" in line] == [6, 9, 12]
    assert here.metrics(kind)[-2]["step"] == 12 and "loss" in here.metrics(kind)[-2]
    assert "nothing left to train" in here.train(config, "--resume", "auto").stderr


# Weights of another run: training.weights

STILL = {"optimizer": "kind = 'sgd'\nlr = 1e-300", "schedule": "kind = 'constant'"}
"""Settings with which weights do not change."""


@pytest.mark.parallel([3])
def test_a_run_begins_with_the_weights_of_another_and_goes_on_with_its_own(here):
    here.finish(here.config("first", training="steps = 3"), ranks=2)
    warm = f"weights = '{here.folder}/first'\n"
    done = here.finish(here.config("second", training=warm + "steps = 2", **STILL))
    assert f"training.weights = {here.folder}/first: loaded" in done.stderr, done.stderr
    first, second = here.weights("first"), here.weights("second")
    names = [name for name in second if "/" not in name and name in first]
    assert len(names) >= 6 and all(np.array_equal(first[name], second[name]) for name in names)
    again = here.finish(here.config("second", training=warm + "steps = 4", **STILL), "--resume", "auto", ranks=2)
    assert "not used, because the run continues from step 2" in again.stderr, again.stderr
    assert [line["step"] for line in here.metrics("second") if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parallel([2])
def test_weights_that_are_not_there_or_of_another_network_are_refused(here):
    fails(here.train(here.config("x", training=f"weights = '{here.folder}/nowhere'")), "nowhere")
    here.finish(here.config("first", training="steps = 1"))
    other = here.config("other", hidden=(5,), training=f"weights = '{here.folder}/first'")
    fails(here.train(other), "is the checkpoint of another network. It also has '4.bias', '4.weight'")
    assert not here.checkpoints("other")
