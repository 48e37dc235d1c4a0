"""Data of `pmm3d train`: held-out rows, classes by name, integers as values."""

import logging

import h5py
import numpy as np
import pytest
from loops import given
from training_runs import RunsHere, fails

from pmm3d import DataError, Pmm3dError
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import checked

two = pytest.mark.parallel([2])
KINDS = ["cat", "dog", "owl"]


@pytest.fixture
def write(comm, shared_path):
    """write(name, y, class_names) writes a file of len(y) samples for all ranks, and returns its path."""

    def write(name, y, names=None, columns=None, **others):
        path = shared_path / f"{name}.h5"
        if comm.rank == 0:
            with h5py.File(path, "w") as file:
                file["x"], file["y"] = np.random.default_rng(0).random((len(y), 4), "float32"), y
                for key, array in others.items():
                    file[key] = array
                if names:
                    file["y"].attrs["class_names"] = names
                if columns:
                    file["x"].attrs["columns"] = columns
        comm.barrier()
        return str(path)

    return write


@pytest.fixture
def warned(comm, caplog, shared_path):
    """warned(data, **training): warnings on all ranks when the trainer of this configuration is made."""

    def warned(data, accept=(), **training):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pmm3d.nn"):
            config = {
                "data": data | {"batch_size": 8},
                "network": {"hidden": [3]},
                "training": {"folder": str(shared_path / "run"), "steps": 5, **training},
            }
            with trainer(checked(config), comm, accept=accept) as run:
                for _ in run.loader:
                    pass
                warned.loss = run.recipe.loss
        return comm.bcast(caplog.text)

    return warned


@two
def test_a_sorted_file_is_validated_on_all_classes(write, warned):
    """Classes without a sample to train on, or to validate on, are named."""
    file = write("sorted", np.repeat([0, 1, 2], 50), KINDS)
    grouped = write("grouped", np.arange(60) % 3, KINDS, g=np.arange(60) % 3)
    assert not warned({"file": file})
    for data, *words in (
        ({"file": file, "hold_out": "last"}, "2 of 3 classes have no sample to validate on: cat, dog. ", "hold_out"),
        ({"file": file, "shuffle": False, "validation": 0.4}, "to train on: owl. ", "to validate on: cat"),
        ({"file": grouped, "groups": "g"}, "have no sample to train on: "),
        ({"file": write("from1", np.arange(60) % 3 + 1)}, "1 of 4 classes have", "on: 0. Labels from 1", "--classes"),
        ({"file": write("unused", np.arange(60) % 2, KINDS)}, "1 of 3 classes have no sample to train on: "),
        ({"file": write("given", np.arange(60) % 2), "classes": 3}, "1 of 3 classes have no sample to train on: "),
    ):
        with given(data=data):
            said = warned(data)
            assert all(word in said for word in words), said


@two
def test_far_labels_are_refused(write, warned):
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
    """If a file does not name its classes, the names are their numbers."""
    named, plain = write("training", np.arange(60) % 3, KINDS), write("plain", np.arange(60) % 3)
    other = lambda file, name, classes, names: warned(
        {"file": file, "validation_file": write(name, np.arange(20) % classes, names)}
    )
    assert "have no sample to validate on: cat. " in other(named, "other", 2, ["dog", "owl"])
    assert "does not name its classes" in other(named, "nameless", 3, None)
    assert not other(named, "turned", 3, KINDS[::-1])
    assert not other(plain, "digits", 3, ["2", "0", "1"])
    with pytest.raises(Pmm3dError, match="the class 'wolf' is none of cat, dog, owl"):
        other(named, "wolf", 2, ["dog", "wolf"])
    with pytest.raises(Pmm3dError, match="the class 'dog' is none of 0, 1, 2"):
        other(plain, "names", 2, ["dog", "owl"])


@two
def test_columns_of_the_validation_file_are_those_of_training_in_their_order(write, warned):
    """Columns that one file does not name are not compared."""
    y = np.arange(40) % 2
    file = write("training", y, columns=[*"abcd"])
    other = {"file": file, "validation_file": write("turned", y, columns=[*"dcba"])}
    with pytest.raises(DataError, match=r"columns was \['a', 'b', 'c', 'd'\], is \['d', .*--accept columns"):
        warned(other)
    assert "is accepted with a difference: columns was ['a', " in warned(other, accept=["columns"])
    for name, columns in (("same", [*"abcd"]), ("nameless", None)):
        assert not warned({"file": file, "validation_file": write(name, y, columns=columns)})


@two
@pytest.mark.parametrize(("data", "attribute", "kind"), [("y", "class_names", "classes"), ("x", "columns", "columns")])
def test_weights_for_other_names_are_refused(shared_path, comm, data, attribute, kind):
    """From a run, and from its exported file; by a resume too."""
    here, letters = RunsHere(shared_path, comm), [*"abcdefghijkl"][: 3 if kind == "classes" else 12]

    def named(names):
        comm.barrier()
        if comm.rank == 0:
            with h5py.File(here.folder / "data.h5", "a") as file:
                file[data].attrs[attribute] = names
        comm.barrier()

    named(letters)
    assert here.train(here.config("first", training="steps = 1")).returncode == 0
    assert here.run("export", str(here.folder / "first"), str(here.folder / "first.safetensors")).returncode == 0
    named(letters[::-1])
    text = f"{kind} was ['a', 'b', 'c'" + ("], is ['c', " if kind == "classes" else ", 'd' and 8 more], is ['l', ")
    for weights in ("first", "first.safetensors"):
        config = here.config("second", training=f"steps = 1\nweights = '{here.folder}/{weights}'")
        fails(here.train(config), text)
    done = here.train(config, "--accept", kind)
    assert done.returncode == 0 and text in done.stderr, done.stderr
    fails(here.train(here.config("first", training="steps = 2"), "--resume", "auto", "--accept", "data"), text)
