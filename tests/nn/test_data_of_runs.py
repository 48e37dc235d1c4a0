"""Data of `pmm3d train`: held-out rows, classes by name, integers as values."""

import logging

import h5py
import numpy as np
import pytest
from training_runs import RunsHere, fails

from pmm3d import Pmm3dError
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import checked

two = pytest.mark.parallel([2])
KINDS = ["cat", "dog", "owl"]


@pytest.fixture
def write(comm, shared_path):
    """write(name, y, class_names) writes a file of len(y) samples for all ranks, and returns its path."""

    def write(name, y, names=None, **others):
        path = shared_path / f"{name}.h5"
        if comm.rank == 0:
            with h5py.File(path, "w") as file:
                file["x"], file["y"] = np.random.default_rng(0).random((len(y), 4), "float32"), y
                for key, array in others.items():
                    file[key] = array
                if names:
                    file["y"].attrs["class_names"] = names
        comm.barrier()
        return str(path)

    return write


@pytest.fixture
def warned(comm, caplog, shared_path):
    """warned(data, **training): warnings on all ranks when the trainer of this configuration is made."""

    def warned(data, **training):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pmm3d.nn"):
            config = {"data": data | {"batch_size": 8}, "network": {"hidden": [3]},
                      "training": {"folder": str(shared_path / "run"), "steps": 5, **training}}
            with trainer(checked(config), comm) as run:
                for _ in run.loader:
                    pass
                warned.loss = run.recipe.loss
        return comm.bcast(caplog.text)

    return warned


@two
def test_a_sorted_file_is_validated_on_all_classes(write, warned):
    file = write("sorted", np.repeat([0, 1, 2], 50), KINDS)
    assert not warned({"file": file})
    said = warned({"file": file, "hold_out": "last"})
    assert "2 of 3 classes have no sample to validate on: cat, dog. Hold out other rows (data.hold_out, " in said
    said = warned({"file": file, "shuffle": False, "validation": 0.4})
    assert "have no sample to train on: owl. Hold out other rows" in said
    assert "have no sample to validate on: cat" in said
    said = warned({"file": write("grouped", np.arange(60) % 3, KINDS, g=np.arange(60) % 3), "groups": "g"})
    assert "have no sample to train on: " in said


@two
def test_labels_from_one_and_far_labels_are_said(write, warned):
    said = warned({"file": write("from1", np.arange(60) % 3 + 1)})
    assert "1 of 4 classes have no sample to train on: 0. Labels from 1 to K" in said and "--classes" in said
    for data in ({"file": write("unused", np.arange(60) % 2, KINDS)},
                 {"file": write("given", np.arange(60) % 2), "classes": 3}):
        assert "1 of 3 classes have no sample to train on: " in warned(data)
    with pytest.raises(Pmm3dError, match="the label 1000002, which makes 1000003 classes of 24 samples"):
        warned({"file": write("far", np.arange(24) % 3 + 10**6)})


@two
def test_integers_are_taken_as_asked(write, warned):
    ages = write("ages", np.arange(60) * 7 % 100)
    assert warned({"file": ages}, loss="mse") == "" and warned.loss == "mse"
    columns = write("columns", np.ones((60, 2), "int64"))
    with pytest.raises(Pmm3dError, match='are integers in 2 columns, which may be .* Set training.loss = "mse"'):
        warned({"file": columns})
    assert warned({"file": columns}, loss="mae") == ""
    with pytest.raises(Pmm3dError, match="training.loss is mse, but the targets 'y' .* are labels with class names"):
        warned({"file": write("named", np.arange(60) % 3, KINDS)}, loss="mse")


@two
def test_classes_of_the_validation_file_are_those_of_training_by_name(write, warned):
    file = write("training", np.arange(60) % 3, KINDS)
    other = {"file": file, "validation_file": write("other", np.arange(20) % 2, ["dog", "owl"])}
    assert "have no sample to validate on: cat. Hold out other rows" in warned(other)
    assert not warned({"file": file, "validation_file": write("turned", np.arange(20) % 3, KINDS[::-1])})
    with pytest.raises(Pmm3dError, match="the class 'wolf' is none of cat, dog, owl"):
        warned({"file": file, "validation_file": write("wolf", np.arange(20) % 2, ["dog", "wolf"])})
    assert "does not name its classes" in warned({"file": file, "validation_file": write("plain", np.arange(20) % 3)})
    plain = write("plain2", np.arange(60) % 3)
    assert not warned({"file": plain, "validation_file": write("digits", np.arange(20) % 3, ["2", "0", "1"])})
    with pytest.raises(Pmm3dError, match="the class 'dog' is none of 0, 1, 2"):
        warned({"file": plain, "validation_file": write("names", np.arange(20) % 2, ["dog", "owl"])})


@two
def test_weights_of_classes_in_another_order_are_refused(shared_path, comm):
    here = RunsHere(shared_path, comm)

    def named(*names):
        comm.barrier()
        if comm.rank == 0:
            with h5py.File(here.folder / "data.h5", "a") as file:
                file["y"].attrs["class_names"] = names
        comm.barrier()

    named("cat", "dog", "owl")
    assert here.train(here.config("first", training="steps = 1"), ranks=1).returncode == 0
    named("dog", "cat", "owl")
    fails(here.train(here.config("second", training=f"steps = 1\nweights = '{here.folder}/first'")),
          "'dog' is class 1 there and class 0 in this run. Convert the data with --class-names cat,dog,owl")
    named("red", "green", "blue")
    done = here.train(here.config("third", training=f"steps = 1\nweights = '{here.folder}/first'"), ranks=1)
    assert done.returncode == 0 and "was trained on other classes (cat, dog, owl)" in done.stderr, done.stderr
