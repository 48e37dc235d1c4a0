"""Runs of `pmm3d train` in low precision: configuration, checkpoints, skipped steps, results."""

import json
import sys

import numpy as np
import pytest
from loops import looped
from on_disk import on_rank_0, write_arrays
from safetensors.numpy import load_file

from pmm3d import CheckpointError, DistMatrix, Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import Precision, optim
from pmm3d.nn.exchange import export_torch, fill_weights, find_checkpoint, load_weights
from pmm3d.nn.training import Recipe, Trainer, TrainState, build
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.export import export_checkpoint
from pmm3d.nn.training.network import OwnNetwork, network_of
from pmm3d.nn.training.samples import Samples

pytestmark = pytest.mark.deadline(240)
WEIGHT, MEAN = "2.weight", "optimizer/2.weight/mean"


@pytest.fixture
def data(shared_path, comm):
    path, x = shared_path / "data.h5", np.random.default_rng(0).standard_normal((600, 12)).astype("float32")
    on_rank_0(comm, lambda: write_arrays(path, x=x, y=x[:, :3].argmax(1), large=200 * x[:, :4]))
    return path


def config(data, precision, library="torch", epochs=1, targets="y", name="run", network=None, optimizer=(), **sections):
    training = {"folder": str(data.with_name(name)), "epochs": epochs, "log_every": 1, "precision": precision}
    return checked(
        {
            "data": {"file": str(data), "batch_size": 60, "targets": targets},
            "network": (network or {"hidden": [24]}) | {"library": library},
            "optimizer": {"lr": 1e-2, "shard_over_data": True, "clip": 1.0, **dict(optimizer)},
            "training": training,
            **sections,
        }
    )


def trained(comm, made, resume=True):
    """(figures of the validation, contents of the last checkpoint) of a run."""
    with build.trainer(made, comm) as trainer:
        with trainer.owning():
            if resume:
                trainer.resume()
            trainer.run()
        values = trainer.state.matrices().items()
        matrices = {name: np.array(matrix.library.to_numpy(matrix.gather())) for name, matrix in values}
        return trainer.figures, matrices, trainer.state


@pytest.mark.parallel([2])
def test_a_run_of_which_each_rank_keeps_a_part_of_the_gradients(comm, data):
    """ZeRO-2 by the configuration, with two batches per step: the weights of ZeRO-1, except for rounding."""
    found = []
    for kind in ("states", "gradients"):
        options = {"grid": {"micro_batches": 2}, "optimizer": {"shard_over_data": kind}}
        _, matrices, state = trained(comm, config(data, "float32", name=kind, **options), resume=False)
        assert {each.grad_buffer.scattered for each in state.network.parameters()} == {kind == "gradients"}
        found.append(matrices)
    assert state.scale is None
    assert all(np.allclose(found[1][name], value, rtol=0, atol=1e-3) for name, value in found[0].items())


@pytest.mark.parallel([2])
def test_a_run_goes_on_in_another_precision(comm, data):
    """On other grids, with all digits of the master weights; and back."""
    made = lambda precision, shape, epochs=1: config(data, precision, epochs=epochs, grid={"shape": shape})
    _, low, _ = trained(comm, made("bfloat16", "ddp"))
    assert low[WEIGHT].dtype == np.float32 and (low[WEIGHT] != as_bfloat16(low[WEIGHT])).any()
    _, full, _ = trained(comm, made("float32", "fsdp"))  # the epoch is complete, so nothing is trained
    assert full.keys() == low.keys() and all(np.array_equal(full[name], low[name]) for name in low)
    _, more, _ = trained(comm, made("float32", "fsdp", 2))
    assert (more[WEIGHT] != low[WEIGHT]).any()
    for precision, shape, to in (("bfloat16", "1x2x1", as_bfloat16), ("float16", "ddp", np.float16)):
        _, again, state = trained(comm, made(precision, shape, 2))
        assert all(np.array_equal(again[name], more[name]) for name in more)
        weight = state.network.named_parameters()[WEIGHT]._stored
        r0, r1, c0, c1 = weight.box
        assert np.array_equal(weight.library.to_numpy(weight.local), to(more[WEIGHT])[r0:r1, c0:c1])
    _, last, _ = trained(comm, made("float16", "fsdp", 3))
    assert (last[WEIGHT] != more[WEIGHT]).any() and last[MEAN].dtype == np.float32


def as_bfloat16(values):
    """The values, rounded to bfloat16."""
    import torch

    return torch.from_numpy(values).bfloat16().float().numpy()


@pytest.mark.parallel([2])
def test_what_is_predicted_and_exported_is_all_that_was_learned(comm, data, shared_path):
    made = config(data, "bfloat16")
    _, low, _ = trained(comm, made, resume=False)
    weight = low[WEIGHT]
    run, target = shared_path / "run", shared_path / "net.safetensors"
    with Grid(comm, "ddp") as grid:
        checkpoints = Checkpoints(grid, run / "checkpoints")
        found = checkpoints.newest_undamaged()
        net = network_of(made, grid, Samples(features=12, outputs=3, loss="cross_entropy"))
        fill_weights(net, found, checkpoints)
        filled = net.state_dict()[WEIGHT]
        assert filled.dtype == "float32" and (filled.gather().numpy() == weight).all()
        half = nn.MLP(grid, [12, 24, 3], nn.gelu, precision="float16")
        fill_weights(half, found, checkpoints)
        assert (half.named_parameters()[WEIGHT].gather() == weight.astype("float16")).all()
        assert (half.state_dict()[WEIGHT].gather() == weight).all()
    export_checkpoint(comm, run, target)
    assert (weight == load_file(target)[WEIGHT].T).all()


@pytest.mark.parallel([2])
def test_a_run_that_is_interrupted_has_the_same_bits(comm, data):
    """Also of the master weights."""
    made = lambda epochs, name: config(data, "float16", epochs=epochs, name=name, schedule={"kind": "constant"})
    whole = trained(comm, made(2, "whole"))[1]
    trained(comm, made(1, "parted"))
    parted = trained(comm, made(2, "parted"))[1]
    assert whole.keys() == parted.keys() and all(np.array_equal(whole[name], parted[name]) for name in whole)


@pytest.mark.parallel([2], thorough=[1])
def test_a_checkpoint_with_remainders_is_refused(comm, shared_path, fails):
    with Grid(comm, "fsdp") as grid:
        low, full = nn.Linear(grid, 70, 96, bias=False, precision="float16"), nn.Linear(grid, 70, 96, bias=False)
        older = {**full.matrices(), "optimizer/weight/remainder": DistMatrix.empty(grid, (70, 96), dtype="float32")}
        Checkpoints(grid, shared_path).save(1, older)
        for network in low, full:
            text = "contains 16-bit weights with remainders"
            fails(CheckpointError, text, lambda network=network: load_weights(network, shared_path))


@pytest.mark.numpy_only("takes torch away from one rank")
@pytest.mark.parallel([2], thorough=[1])
def test_weights_of_bfloat16_without_torch_are_refused_by_all_ranks(comm, shared_path, monkeypatch, fails):
    with Grid(comm, "ddp") as grid:
        low, full = nn.Linear(grid, 4, 6, precision="bfloat16", library="torch"), nn.Linear(grid, 4, 6)
        Checkpoints(grid, shared_path).save(1, low.matrices())
        before = full.weight.gather()
        if grid.rank == comm.size - 1:
            monkeypatch.setitem(sys.modules, "torch", None)
        fails(CheckpointError, "bfloat16 .*torch.*pip install", lambda: load_weights(full, shared_path))
        monkeypatch.undo()
        assert np.array_equal(full.weight.gather(), before)


@pytest.mark.parallel([2], thorough=[1])
def test_steps_that_overflow_are_counted_and_the_scale_goes_on(comm, data):
    """Large targets make the scale decrease."""
    _, _, state = trained(comm, config(data, "float16", "numpy", targets="large"))
    scale, folder = state.scale, data.with_name("run")
    assert 0 < scale.skipped < 9 and scale.value == 2.0 ** (16 - scale.skipped) and state.step == 9
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines if "skipped" in line][-1] == scale.skipped
    record = json.loads((folder / "run.json").read_text())
    assert (record["loss_scale"]["skipped"], record["passes"]["skipped"]) == (scale.skipped, scale.skipped)
    assert record["passes"]["steps"] == record["starts"][-1]["steps"] == 9
    before = scale.state()
    with build.trainer(config(data, "float16", "numpy", targets="large", epochs=2), comm) as again:
        assert again.state.scale.state() != before and again.resume()
        assert again.state.scale.state() == before
        again.run()
        assert again.state.scale.good == before["good"] + 9


@pytest.mark.nightly
@pytest.mark.parallel([4])
def test_as_much_is_learned_as_in_float32(comm, data):
    """With the state sharded over data, and weights over z."""
    options = {"epochs": 8, "grid": {"shape": "hsdp", "data": 2}}
    full, *low = (
        trained(comm, config(data, each, kind, name=each, **options))[0]
        for each, kind in (("float32", "numpy"), ("bfloat16", "torch"), ("float16", "numpy"))
    )
    assert full["accuracy"] > 0.9
    for each, unit in zip(low, (2.0**-8, 2.0**-11)):
        assert abs(each["accuracy"] - full["accuracy"]) < 1.5 / 60  # one of the held-out samples
        assert abs(each["loss"] - full["loss"]) < unit * full["loss"]


MODEL = """
from pmm3d import nn

class Net(nn.Module):
    def __init__(self, grid, features, outputs, to):
        self.grid, self.to = grid, to
        self.first = nn.Linear(grid, features, 8, seed=1, precision="float16")
        self.last = nn.Linear(grid, 8, outputs, seed=2, cols="x", precision="float16")

    def forward(self, x):
        return self.last(nn.relu(self.first(nn.cast(x, self.to or self.first.weight.dtype))))

def build(grid, features, outputs):
    return Net(grid, features, outputs, "")

def named(grid, features, outputs):
    return Net(grid, features, outputs, "float16")
"""


@pytest.mark.numpy_only("its configuration names no library")
@pytest.mark.parallel([2], thorough=[1])
def test_a_network_of_ones_own_predicts_in_its_precision(comm, data, shared_path, fails):
    """Its layers have dtype float16. The exported file has all digits."""
    on_rank_0(comm, lambda: (shared_path / "model.py").write_text(MODEL))
    samples = Samples(features=12, outputs=3, loss="mse")
    for function in ("named", "build"):
        made = config(data, "float16", "numpy", name=function, network={"build": f"{shared_path}/model.py:{function}"})
        _, low, _ = trained(comm, made, resume=False)
        with Grid(comm, "ddp") as grid:
            net = network_of(made, grid, samples)
            fill_weights(net, *find_checkpoint(grid, shared_path / function))
            for name, weight in net.matrices().items():
                assert weight.dtype == "float16" and (weight.gather() == low[name].astype("float16")).all()
            assert net(DistMatrix.random(grid, (4, 12), dtype="float32")).dtype == "float16"
        export_checkpoint(comm, shared_path / function, shared_path / "net.safetensors")
        assert (low["first.weight"] == load_file(shared_path / "net.safetensors")["first.weight"].T).all()
    with Grid(comm, "ddp") as grid:
        own = OwnNetwork(grid, made.network, Precision(tf32=True), 0)
        fails(Pmm3dError, "first.weight .* float16, and training.precision is tf32", lambda: own.made(grid, 12, 3))


@pytest.mark.numpy_only("reads arrays of numpy")
@pytest.mark.parallel([2])
def test_a_warm_start_has_all_digits(comm, shared_path):
    """The optimizer starts with master weights from the file."""
    with Grid(comm, "ddp") as grid:
        full = nn.Linear(grid, 8, 6)
        Checkpoints(grid, shared_path).save(1, full.matrices())
        export_torch(full, shared_path / "net.safetensors")
        wanted = full.weight.gather()
        for path in (shared_path, shared_path / "net.safetensors"):
            low = nn.Linear(grid, 8, 6, precision="float16", seed=2)
            optimizer = optim.AdamW(low.parameters(), shard_over_data=True)
            load_weights(low, path, optimizer)
            assert (optimizer.matrices()["weight"].gather() == wanted).all()
            assert (low.weight.gather() == wanted.astype("float16")).all()
        alone = nn.Linear(grid, 8, 6, precision="float16").requires_grad_(False)
        alone.load_state_dict(low.state_dict())
        assert Checkpoints(grid, shared_path / "alone").save(1, alone.matrices())
        for network, masters in (low, optimizer), (full, None):
            load_weights(network, shared_path / "alone", masters)
            assert network.matrices()["weight"].dtype == "float32"
            assert (network.matrices()["weight"].gather() == wanted.astype("float16")).all()


@pytest.mark.parallel([2], thorough=[1])
def test_the_first_layer_that_overflows_is_named(comm, data, fails):
    """After fifty skipped steps. Every trainer with float16 has a scale."""
    made = config(data, "float16", "numpy", epochs=6)
    with build.trainer(made, comm) as first:
        state = TrainState(first.state.network, first.state.optimizer, loader=first.loader)
        trainer = Trainer(state, Recipe("cross_entropy", epochs=6))
        state.network.matrices()["2.weight"].local[...] = 6e4
        state.network.loaded()
        fails(optim.NonFiniteGradientError, "50 steps .*The output of layer 2", trainer.run)
        assert (state.scale.skipped, state.step, trainer.counts["steps"]) == (50, 50, 50)


REFUSED = [
    ({}, "bfloat16", 'network.library is numpy.*library = "torch"'),
    ({"library": "cupy"}, "bfloat16", "network.library is cupy"),
    ({"library": "torch"}, "tf32", "needs a GPU"),
    ({"dtype": "float64"}, "float16", 'network.dtype = "float32"'),
    ({}, "fp8", "precision"),
]


@looped("network, precision, text", REFUSED)
def test_a_precision_that_cannot_be_had_is_refused(network, precision, text):
    with pytest.raises(Pmm3dError, match=text):
        checked({"data": {"file": "a.h5"}, "network": network, "training": {"precision": precision}})
