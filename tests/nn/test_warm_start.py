"""`training.weights`, a warm start from weights alone, and `training.steps`, a budget, as `pmm3d train` takes them."""

import numpy as np
import pytest
from training_runs import Runs, fails

STILL = {"optimizer": "kind = 'sgd'\nlr = 1e-300", "schedule": "kind = 'constant'"}
"""Weights stay as they are."""


@pytest.fixture
def runs(tmp_path, job):
    return Runs(tmp_path, job)


def test_a_run_begins_with_the_weights_of_another_and_goes_on_with_its_own(runs):
    assert runs.train(runs.config("first", training="steps = 3")).returncode == 0
    warm = f"weights = '{runs.folder}/first'\n"
    done = runs.train(runs.config("second", training=warm + "steps = 2", **STILL), ranks=3)
    assert done.returncode == 0, done.stderr
    assert f"training.weights = {runs.folder}/first: loaded" in done.stderr
    first, second = runs.weights("first"), runs.weights("second")
    names = [name for name in second if "/" not in name and name in first]
    assert len(names) >= 6 and all(np.array_equal(first[name], second[name]) for name in names)
    assert [line["step"] for line in runs.metrics("second") if "loss" in line] == [1, 2]
    again = runs.train(runs.config("second", training=warm + "steps = 4", **STILL), "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert "not used: the run goes on from step 2" in again.stderr
    assert [line["step"] for line in runs.metrics("second") if "loss" in line] == [1, 2, 3, 4]


def test_weights_that_are_not_there_or_of_another_network_are_refused(runs):
    fails(runs.train(runs.config("x", training=f"weights = '{runs.folder}/nowhere'")), "nowhere")
    assert runs.train(runs.config("first", training="steps = 1")).returncode == 0
    other = runs.config("other", hidden=(5,), training=f"weights = '{runs.folder}/first'")
    fails(runs.train(other), "is the checkpoint of another network. It also has '4.bias', '4.weight'")
    assert not runs.checkpoints("other")
