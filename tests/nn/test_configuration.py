"""The configuration of a training: errors and messages before the training starts."""

import logging
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from loops import given, looped
from training_runs import RunsHere, fails

from pmm3d import CheckpointError, DataError, Grid, Pmm3dError, nn
from pmm3d.nn import optim
from pmm3d.nn.training import build
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import Config, checked, load
from pmm3d.nn.training.described import as_toml, keys_of
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.network import make_network, make_schedule
from pmm3d.nn.training.samples import recalled
from pmm3d.nn.training.sections import DataSection, NetworkSection, OptimizerSection
from pmm3d.nn.transformer.generate import longest_of

pytestmark = pytest.mark.deadline(240)

FILE = {"file": "data.h5"}
HUGE = 10**30


NONSENSE = [
    ({"network": {"hidden": [0]}}, "network.hidden = [0]: needed is a list of whole numbers of at least 1; for a"),
    ({"network": {"hidden": [HUGE]}}, "network.hidden = ["),
    ({"network": {"hidden": [2**53]}}, "network.hidden = [9007199254740992]"),
    ({"network": {"hidden": 4}}, 'hidden = 4 does not fit kind = "mlp", which needs a list of numbers'),
    ({"network": {"heads": 4}}, 'kind = "mlp" has no key heads, which is for gpt, llama: leave it out'),
    ({"network": {"kind": "gpt", "norm": True}}, 'kind = "gpt" has no key norm, which is for mlp'),
    ({"optimizer": {"kind": "adam", "momentum": 0.5}}, 'kind = "adam" has no key momentum, which is for sgd, muon'),
    ({"optimizer": {"kind": "sgd", "betas": [0.5, 0.5]}}, 'kind = "sgd" has no key betas, which is for adam, adamw'),
    ({"optimizer": {"ns_steps": 3}}, 'kind = "adamw" has no key ns_steps, which is for muon'),
    ({"schedule": {"every": 10}}, 'kind = "cosine" has no key every, which is for step: leave it out'),
    ({"schedule": {"kind": "constant", "floor": 0.1}}, 'kind = "constant" has no key floor, which is for cosine'),
    ({"network": {"kind": "gpt"}}, 'network.kind = "gpt" is a network of tokens: set data.sequence'),
    ({"network": {"kind": "gpt", "hidden": [4]}}, 'hidden = [4] does not fit kind = "gpt", which needs a number'),
    ({"data": FILE | {"sequence": 8}}, "data.sequence makes the data tokens, which fully connected layers do not take"),
    ({"network": {"kind": "llama"}, "data": FILE | {"sequence": 8, "targets": "y"}}, "data.targets is not for tokens"),
    ({"network": {"kind": "llama"}, "data": FILE | {"sequence": 8}, "training": {"loss": "mse"}}, "is cross_entropy"),
    ({"network": {"kind": "gpt", "positions": 4}, "data": FILE | {"sequence": 8}}, "longer than network.positions = 4"),
    ({"network": {"kind": "gpt", "qk_norm": True}}, 'kind = "gpt" has no key qk_norm, which is for llama'),
    ({"network": {"kind": "llama", "head_dim": 0}}, "network.head_dim = 0: needed is a whole number of at least 1"),
    ({"network": {"kind": "llama", "rotary_scaling": 4.0}}, "needed is a table, such as {rope_type ="),
    (
        {"network": {"kind": "llama", "rotary_scaling": {"rope_type": "su"}}},
        "network.rotary_scaling = {'rope_type': 'su'}: rotary_scaling.rope_type is 'su'; supported are",
    ),
    ({"network": {"kind": "llama", "rotary_scaling": {"rope_type": "yarn"}}}, "rotary_scaling.factor is missing"),
    *(
        ({"network": {"kind": "gpt", **network}, "data": FILE | {"sequence": 8}}, text)
        for network, text in (
            ({"top_k": 2}, "top_k is 2, but the network has no experts"),
            ({"capacity": 1.0}, "capacity is 1.0, but the network has no experts"),
            ({"experts": 0, "balance": 0.0}, "balance is 0.0, but the network has no experts"),
            ({"experts": 8, "top_k": 9}, "top_k is 9, more than experts = 8"),
            ({"experts": 8, "every": 5}, "every is 5, but the network has 4 blocks"),
            ({"experts": 8, "shared_gate": True}, "shared_gate is for the shared expert: set shared"),
        )
    ),
    ({"grid": {"seq": 2}}, "grid.seq is for tokens: set data.sequence, or leave it out"),
    ({"grid": {"ulysses": 2}}, "grid.ulysses is for tokens: set data.sequence"),
    ({"data": FILE | {"documents": "documents"}}, "data.documents is for tokens: set data.sequence"),
    ({"data": FILE | {"sequence": 1}}, "data.sequence = 1: needed is a whole number of at least 2"),
    ({"grid": {"cut": [1, 0]}}, "grid.cut = [1, 0]: needed is a list of whole numbers of at least 1, or"),
    ({"grid": {"cut": "even"}}, "grid.cut = 'even': needed is a list"),
    ({"network": {"recompute": 0}}, 'network.recompute = 0: needed is "none", "selective", "full", a whole number'),
    ({"network": {"recompute": "some"}}, "network.recompute = 'some': needed is \"none\""),
    ({"network": {"hidden": True}}, "network.hidden = True: needed is a list"),
    ({"data": FILE | {"classes": 10**15}}, "data.classes"),
    ({"optimizer": {"lr": float("inf")}}, "optimizer.lr = inf: needed is a number above 0"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan: needed is a number above 0"),
    ({"optimizer": {"lr": True}}, "optimizer.lr = True: needed is a number above 0"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr = 0: needed is a number above 0"),
    ({"optimizer": {"weight_decay": float("inf")}}, "optimizer.weight_decay"),
    ({"optimizer": {"clip": float("inf")}}, "optimizer.clip"),
    ({"optimizer": {"clip": -1.0}}, "optimizer.clip = -1.0: needed is a number of at least 0"),
    ({"schedule": {"warm_up": "long"}}, "schedule.warm_up = 'long': needed is a whole number of at least 0, or"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas = [0.9, 1.0]: needed is a list"),
    ({"optimizer": {"eps": -1}}, "optimizer.eps = -1"),
    ({"optimizer": {"shard_over_data": "all"}}, "optimizer.shard_over_data = 'all': needed is false, true, \"sta"),
    ({"data": FILE | {"validation": float("nan")}}, "data.validation = nan"),
    ({"data": FILE | {"classes": 1}}, "data.classes = 1"),
    ({"data": FILE | {"inputs": ""}}, "data.inputs = ''"),
    ({"data": FILE | {"prefetch": 10**12}}, "data.prefetch"),
    ({"data": {"file": ""}}, "data.file = '': the path is empty"),
    ({"data": {"file": "a\0b"}}, "the path is empty"),
    ({"data": {"file": "$PMM3D_NO_SUCH/x"}}, "this environment variable is not set"),
    ({"training": {"seed": -1}}, "training.seed = -1"),
    ({"training": {"seed": HUGE}}, "training.seed"),
    ({"training": {"epochs": "3"}}, "training.epochs = '3': needed is a whole number"),
    ({"training": {"epochs": HUGE}}, "training.epochs"),
    ({"training": {"steps": 0}}, "training.steps = 0"),
    ({"training": {"class_weights": [1, -1]}}, "training.class_weights"),
    ({"training": {"class_weights": "even"}}, "class_weights = 'even': needed is \"balanced\", or a list of numbers"),
    (
        {"network": {"kind": "gpt"}, "data": FILE | {"sequence": 8}, "training": {"class_weights": "balanced"}},
        "training.class_weights is for labels, not for tokens",
    ),
    ({"training": {"folder": ""}}, "training.folder = '': the path is empty"),
    ({"schedule": {"kind": "step", "factor": float("nan")}}, "schedule.factor"),
    ({"grid": {"shape": "best"}}, "grid.shape = 'best': needed is three numbers, such as \"2x2x1\""),
    ({"grid": 3}, "grid = 3: it is a section, [grid], with the keys shape, data"),
    ({"network": "model"}, "network.build = 'model': needed is a Python file"),
    ({"network": {"build": "model.py"}}, "network.build = 'model.py': needed is a Python file"),
]


@looped("sections, text", NONSENSE)
def test_values_that_make_no_sense(sections, text):
    with pytest.raises(Pmm3dError) as caught:
        checked({"data": FILE} | sections)
    assert text in str(caught.value) and len(str(caught.value)) < 300


def test_a_budget_in_steps_needs_no_epochs(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/fast")
    training = lambda **given: checked({"data": FILE, "training": given}).training
    assert (training().epochs, training(steps=5).epochs, training(steps=5, epochs=2).epochs) == (10, None, 2)
    assert str(training(folder="$SCRATCH/run").folder) == "/fast/run"
    assert checked({"data": FILE, "network": "model.py:build"}).network.build == "model.py:build"


SHOWN = [
    {},
    {"network": "model.py:build", "training": {"steps": 7}},
    {"schedule": {"kind": "constant", "warm_up": 3}, "optimizer": {"decay_vectors": False}},
    {"data": FILE | {"validation": 0.2, "validation_file": "other.h5", "groups": "runs"}},
    {"network": {"hidden": [], "norm": True}},
    {"overlap": {"buckets": False, "bucket_bytes": 3, "regather_inputs": True, "decomposed": True}},
    {"training": {"evaluate_every": 3}, "data": FILE | {"validation": 0.0}},
    {"network": {"kind": "gpt", "hidden": 8}, "data": FILE | {"sequence": 8}},
    {"network": {"hidden": []}, "data": {"file": 'odd " \\ \n ü.h5', "validation_file": "v.h5", "classes": 3}},
    {"optimizer": {"kind": "sgd", "clip": 1e-9}, "schedule": {"kind": "step"}, "overlap": {"buckets": False}},
    {"optimizer": {"shard_over_data": "gradients"}},
    {"optimizer": {"shard_over_data": True}},
    {"optimizer": {"weight_decay": 0.1, "decay_vectors": False}, "training": {"steps": 7, "epochs": 2, "seed": 2**62}},
]


def test_a_configuration_is_read_from_a_pipe_that_is_open():
    """As of the shell's <(...). Training needs a file, which a resumed run reads again."""
    reading, writing = os.pipe()
    os.write(writing, b'data.file = "x.h5"')
    os.close(writing)
    with os.fdopen(reading):
        with pytest.raises(Pmm3dError, match="it is a named pipe, not a regular file"):
            load(f"/dev/fd/{reading}")
        assert load(f"/dev/fd/{reading}", open_pipe=True).data.file == Path("x.h5")


@looped("sections", SHOWN)
def test_what_is_shown_can_be_read_back(sections):
    config = checked({"data": FILE} | sections)
    shown = as_toml(config)
    assert checked(tomllib.loads(shown)) == config == checked(config.settings())
    for key in keys_of(Config):
        assert re.search(rf"^(# )?{key.name} =", shown, re.M)
        assert key.meaning and key.meaning[:40] in shown and key.values


@pytest.fixture
def made(comm, shared_path):
    """made(section={...}) makes a trainer of this configuration, with a file of 330 rows.

    y has three classes, one has a single class, field has four numbers.
    """
    if comm.rank == 0:
        x = np.random.default_rng(0).standard_normal((330, 12)).astype("float32")
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = x, np.arange(330) % 3
            file["one"], file["field"] = np.zeros(330, int), x[:, :4]
    comm.barrier()

    def make(**sections):
        data = {"file": str(shared_path / "data.h5"), "batch_size": 50} | sections.pop("data", {})
        training = {"folder": str(shared_path / "run")} | sections.pop("training", {})
        with build.trainer(checked({"data": data, "training": training, **sections}), comm) as run:
            return run

    return make


MISFITS = [
    ({"data": {"targets": "one"}}, "the targets 'one' of .* have only one class"),
    ({"data": {"validation": 0.001}}, "data.validation = 0.001 holds out no row of 330: raise it, name a"),
    ({"data": {"validation": 0.999}}, "leaves no row of 330 to train on"),
    ({"grid": {"micro_batches": 51}}, "micro_batches = 51, but a batch has 50 rows: at most 50, or raise batch_size"),
    (
        {"network": {"build": "model.py:build", "dropout": 0.1}},
        "network.build = model.py:build makes its own layers: leave network.dropout out",
    ),
    ({"overlap": {"shared_weights": True, "reshard_after_forward": True}}, "leave one of them out"),
    ({"grid": {"shape": "auto", "data": 2}}, 'grid.data = 2, but grid.shape = "auto" chooses'),
    ({"network": {"library": "foo"}}, "unknown array library 'foo'; there are numpy, torch"),
    ({"network": {"library": "torch:cuda:999"}}, "library 'torch:cuda:999': torch finds .* CUDA devices here"),
    ({"grid": {"data": 5}}, '"ddp" puts all . ranks along data; got data 5. Leave data out'),
]


@pytest.mark.parallel([2], thorough=[1])
@looped("sections, text", MISFITS)
def test_what_does_not_fit_the_data_is_said_before_training(made, fails, sections, text):
    fails(Pmm3dError, text, lambda: made(**sections))


@pytest.mark.parallel([2], thorough=[1])
def test_a_batch_of_all_rows_is_said_once(made, comm, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(made(data={"batch_size": 10**12}).loader) == 1
    told = [record for record in caplog.records if "there are only 297 rows to train on" in record.getMessage()]
    assert len(told) == (comm.rank == 0)


@looped(
    "sections",
    (
        {},
        {"data": FILE | {"sequence": 8}, "network": {"kind": "gpt"}},
        {"optimizer": {"build": "lion.py:Lion", "options": {"beta": 0.5}}},
        {"optimizer": {"kind": "muon"}, "schedule": {"kind": "step"}, "training": {"steps": 5}},
    ),
)
def test_settings_of_another_version_are_read_unless_a_key_that_is_gone_was_set(sections):
    """A key that is gone and was left out is None in the settings of a checkpoint."""
    config = checked({"data": FILE, **sections})
    settings = config.settings() | {"samples": {"features": 3, "outputs": 2, "loss": "mse", "gone": 1}}
    settings["grid"]["gone"] = None
    found = SimpleNamespace(path="run", meta={"settings": settings})
    assert recalled(found).config == config and recalled(found).samples.features == 3
    settings["grid"]["gone"] = 2
    with pytest.raises(CheckpointError, match="settings of another version .* unknown key grid.gone .* Make the"):
        recalled(found)


# Data: held-out rows, classes by name, integers as values

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
def test_targets_that_do_not_fit_are_refused(write, warned):
    named, plain = write("named", np.arange(60) % 3, KINDS), write("plain", np.arange(60) % 3)
    wolf, dog = (write(name, np.arange(20) % 2, [name, "owl"]) for name in ("wolf", "dog"))
    columns = write("columns", np.ones((60, 2), "int64"))
    for data, loss, text in (
        ({"file": write("far", np.arange(24) % 3 + 10**6)}, None, "1000003 classes of 24 samples"),
        ({"file": columns}, None, 'are integers in 2 columns, which may be .* Set training.loss = "mse"'),
        ({"file": named}, "mse", "training.loss is mse, but the targets 'y' .* are labels with class names"),
        ({"file": named, "validation_file": wolf}, None, "the class 'wolf' is none of cat, dog, owl"),
        ({"file": plain, "validation_file": dog}, None, "the class 'dog' is none of 0, 1, 2"),
    ):
        with pytest.raises(Pmm3dError, match=text):
            warned(data, **({"loss": loss} if loss else {}))


@two
def test_integers_are_taken_as_asked(write, warned):
    assert warned({"file": write("ages", np.arange(60) * 7 % 100)}, loss="mse") == "" and warned.loss == "mse"
    assert warned({"file": write("columns", np.ones((60, 2), "int64"))}, loss="mae") == ""


@two
def test_class_weights_that_do_not_fit_the_targets_are_refused(write, warned):
    labels, values = write("labels", np.arange(60) % 3, KINDS), write("values", np.ones((60, 2)))
    for file, weights, text in (
        (labels, [1, 2], r"has 2 numbers, and .* has 3 classes \(cat, dog, owl\)"),
        (labels, [0, 0, 0], "not all 0"),
        (values, "balanced", "the loss is mse: leave it out"),
    ):
        with given(weights=weights), pytest.raises(Pmm3dError, match=text):
            warned({"file": file}, class_weights=weights)


def test_a_plan_refuses_class_weights_as_a_run_does():
    for weights in ([], [0, 0, 0], [1, 2]):
        with given(weights=weights), pytest.raises(Pmm3dError, match="there are 3 classes: give one number for each"):
            DrySteps(checked({"data": FILE, "training": {"class_weights": weights}}), (4, 3, True))


@two
def test_classes_of_the_validation_file_are_those_of_training_by_name(write, warned):
    """If a file does not name its classes, the names are their numbers."""
    named, plain = write("training", np.arange(60) % 3, KINDS), write("plain", np.arange(60) % 3)
    for file, name, classes, names, text in (
        (named, "other", 2, ["dog", "owl"], "have no sample to validate on: cat. "),
        (named, "nameless", 3, None, "does not name its classes"),
        (named, "turned", 3, KINDS[::-1], ""),
        (plain, "digits", 3, ["2", "0", "1"], ""),
    ):
        said = warned({"file": file, "validation_file": write(name, np.arange(20) % classes, names)})
        assert text in said and bool(text) == bool(said)


def test_tokens_have_defaults_of_their_own_and_a_given_key_wins():
    """Clipping, warm-up and batch size, also for a network of ones own; as `--show` prints them."""
    tokens = {"data": FILE | {"sequence": 8}, "network": {"kind": "gpt"}}
    own = tokens | {"network": "net.py:build", "optimizer": "lion.py:Lion"}
    values = lambda found: (found.optimizer.clip, found.schedule.warm_up, found.data.batch_size)
    assert values(checked({"data": FILE})) == (None, 0, 256)
    assert values(checked(tokens)) == values(checked(own)) == (1.0, "auto", 16)
    off = tokens | {"optimizer": {"clip": 0}, "schedule": {"kind": "constant", "warm_up": 0}}
    assert values(checked(off)) == (0, 0, 16) and checked(own).optimizer.build == "lion.py:Lion"
    sections = {"data": DataSection(file="x.h5", sequence=8), "network": NetworkSection(kind="gpt")}
    assert values(Config(**sections, optimizer=OptimizerSection(lr=0.1))) == (1.0, "auto", 16)
    assert values(Config(**sections, optimizer=OptimizerSection(clip=0))) == (0, "auto", 16)
    for each in (tokens, off):
        shown = as_toml(checked(each))
        assert checked(tomllib.loads(shown)) == checked(each)
        shown = shown.replace("\n#", "")
        assert "1.0 if left out" in shown and "a tenth of the steps of the run" in shown


@looped("steps, warm_up", [(9, 0), (200, 20), (5000, 100)])
def test_a_warm_up_of_auto_is_a_tenth_of_the_run(steps, warm_up):
    config = checked({"data": FILE | {"sequence": 8}, "network": {"kind": "gpt"}})
    with Grid.dry((1, 1, 1)) as grid:
        optimizer = optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0)
        assert make_schedule(config, optimizer, steps).warm_up == warm_up


@looped("kind, positions, longest", [("gpt", None, 8), ("llama", None, 8), ("llama", 64, 64)])
def test_a_network_of_tokens_has_the_positions_of_its_sequences_unless_they_are_given(kind, positions, longest):
    network = {"kind": kind, "layers": 1, "hidden": 8, "heads": 2, **({"positions": positions} if positions else {})}
    config = checked({"data": FILE | {"sequence": 8}, "network": network})
    with Grid.dry((1, 1, 1)) as grid:
        assert longest_of(make_network(config, grid, [1, 9], None)[0]) == longest


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
