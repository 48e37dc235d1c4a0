"""Trainings in stages: checkpoints and files for any number of stages, and for none."""

import json
import os
from functools import partial

import h5py
import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import Tied, spread
from safetensors.numpy import load_file

from pmm3d import CheckpointError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dense import weight_layout
from pmm3d.nn.exchange import export_torch, load_weights
from pmm3d.nn.layers import parameter
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([4]), pytest.mark.deadline(240)]
CUTS = [((1, 1, 1), 1, 4), ((1, 1, 1), 2, 2), ((1, 2, 1), 1, 2), ((2, 1, 1), 2, 1), ((1, 1, 2), 2, None)]
"""(x, y, z), data, stages. None: without an axis "pipe"."""


def cut(comm, number):
    shape, data, stages = CUTS[number]
    return Grid(comm, shape, data, pipe=stages)


def network_of(grid, sizes=(6, 8, 9, 8, 4), precision="float32"):
    return nn.Pipeline(
        grid, lambda stage: nn.MLP(stage, sizes, nn.gelu, norm=True, dropout=0.2, seed=3, precision=precision)
    )


def begun(grid, **options):
    net = network_of(grid, **options)
    return TrainState(net, optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=True))


def learn(state, steps):
    """Train with different gradients in each stage. Layers of the last stage have no gradient in every second step."""
    net, last = state.network, max(state.network.stages) == state.network.parent_grid.shape.stages - 1
    for step in range(steps):
        for layers in net.stages.values():
            first = layers.parameters()[0]
            x = np.random.default_rng(step).standard_normal((12, first.shape[first.is_vector]))
            out = layers(spread(net.grid, x, batch_layout("y"), dtype=first.dtype))
            if step % 2 or not last:
                nn.mse(out, out.value * 0).backward()
        state.optimizer.step()
    net.set_random_state({name: calls + steps for name, calls in net.random_state().items()})


def tied(grid):
    weight = parameter(grid, (6, 6), weight_layout("y"), seed=9, bound=0.5, dtype="float32")
    return nn.Sequential(grid, Tied(weight), *(nn.Linear(grid, 6, 6, seed=seed) for seed in range(4)), Tied(weight))


def trained(grid, schedule, steps):
    net = nn.Pipeline(grid, tied, schedule=schedule)
    state = TrainState(net, optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=True))
    for step in range(steps):
        x = np.random.default_rng(step).standard_normal((5, 6))
        batch = tuple(spread(net.grid, x, batch_layout(columns), dtype="float32") for columns in ("y", None))
        train_step(net, state.optimizer, nn.mse, [batch] * 4, 0.5)
    return state


def contents(path):
    """(name -> array, meta) of a checkpoint."""
    with h5py.File(path / "checkpoint.h5") as file:
        names = json.loads(file["pmm3d/manifest"][()])["matrices"]
        facts = json.loads(file["pmm3d/meta"][()])
        return {name: file[name][...] for name in names}, {key: facts[key] for key in facts.keys() - {"grid", "blas"}}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@looped("number", range(5))
def test_a_training_goes_on_in_any_number_of_stages(comm, shared_path, number):
    """Weights (also master weights), the optimizer's state split over data, steps, missing gradients and calls of
    dropout."""
    precision = "float16" if number % 2 else "float32"
    with cut(comm, number) as grid:
        state = begun(grid, precision=precision)
        learn(state, 3)
        path = state.save(Checkpoints(grid, shared_path / f"{number}"), note="here")
    written, facts = contents(path)
    assert facts["step"] == 3 and set(facts["random"].values()) == {3} and len(facts["random"]) == 3
    assert {array.dtype.name for array in written.values()} == {"float32"}
    assert {"0.weight", "optimizer/0.weight/mean", "9.bias"} <= written.keys() and len(written) == 3 * 14
    assert "9.bias" in facts["optimizer"]["missed"] and set(facts["optimizer"]["missed"].values()) == {2}
    for other in ((number + 1) % 5, (number + 3) % 5)[: 2 if all_tests else 1]:
        with given(other=other), cut(comm, other) as grid:
            again = begun(grid, precision=precision)
            assert again.resume(Checkpoints(grid, shared_path / f"{number}"))["note"] == "here" and again.step == 3
            found = contents(again.save(Checkpoints(grid, shared_path / f"{number}-{other}"), note="here"))
            assert same(found[0], written) and found[1] == facts


CASES = [((0, "1f1b"), (1, "dualpipe")), ((1, "dualpipe"), (4, "1f1b")), ((4, "1f1b"), (0, "1f1b"))]
"""(number of a cut, schedule) of a training, and of the one that goes on with it."""


@looped("case, other", CASES)
def test_tied_weights_and_copies_are_stored_once(comm, shared_path, fails, case, other):
    """DualPipe has a copy of all weights. Copies that differ are not saved."""
    (number, schedule), folder = case, shared_path / f"{case}"
    with cut(comm, number) as grid:
        state, keeper = trained(grid, schedule, 2), Checkpoints(grid, folder)
        path = state.save(keeper)
        if grid._has_stages:
            copy = state.network.named_parameters().get("0.weight")
            if grid.coords.pipe == grid.shape.pipe - 1:
                copy.assign(copy.value * 1.5)
            text = "save: two stages have other values under one name: '0.weight'"
            fails(CheckpointError, text, lambda: state.save(keeper))
        assert os.listdir(folder) == [path.name]
    written, facts = contents(path)
    stored = dict.fromkeys(written, 0)
    for file_name in path.glob("rank-*.h5"):
        with h5py.File(file_name) as file:
            for name in written:
                stored[name] += file[name].size if name in file else 0
    assert stored == {name: array.size for name, array in written.items()} and len(written) == 3 * 9
    with cut(comm, other[0]) as grid:
        again, keeper = trained(grid, other[1], 0), Checkpoints(grid, folder)
        again.resume(keeper)
        assert same(contents(again.save(keeper))[0], written)
        assert trained(grid, other[1], 2).facts()["optimizer"] == facts["optimizer"] == again.facts()["optimizer"]


@looped("schedule", ["1f1b", "dualpipe-v", "dualpipe"])
def test_the_error_feedback_of_tied_weights_is_stored_once(comm, shared_path, schedule):
    """What was applied and what is stored add up to the plain gradients, also after an earlier checkpoint."""
    applied = {}
    for name in ("", "int8"):
        with cut(comm, 1) as grid:
            nn.Tape.of(grid.stage).parallel.compression = nn.Compression(gradients=name)
            net = nn.Pipeline(grid, tied, schedule=schedule)
            state, keeper = (
                TrainState(net, optim.SGD(net.parameters(), lr=1e-30)),
                Checkpoints(grid, shared_path / f"{schedule}{name}"),
            )
            applied[name] = 0
            for step in range(4):
                x = np.random.default_rng(step).standard_normal((5, 6))
                batch = tuple(spread(net.grid, x, batch_layout(columns), dtype="float32") for columns in ("y", None))
                train_step(net, state.optimizer, nn.mse, [batch] * 4, keep_gradients=True)
                if step == 1:
                    state.save(keeper)
                if "0.weight" in net.named_parameters():
                    gradient = net.named_parameters()["0.weight"].grad
                    applied[name] = applied[name] + np.asarray(gradient.gather(), "float64")
            written, _ = contents(state.save(keeper))
            held = [each for _, buffer in net._gradient_buffers() if (each := buffer.feedback)]
            assert len(held) == (len(net._gradient_buffers()) if name else 0)
            assert grid.stage.ledger.memory["state"] == sum(array.nbytes for each in held for array in each.arrays)
    with cut(comm, 4) as grid:
        nn.Tape.of(grid).parallel.compression = nn.Compression(gradients="int8")
        net = nn.Pipeline(grid, tied)
        state = TrainState(net, optim.SGD(net.parameters(), lr=1e-30))
        state.resume(Checkpoints(grid, shared_path / f"{schedule}int8"))
        assert same(contents(state.save(Checkpoints(grid, shared_path / f"{schedule}2")))[0], written)
    if not isinstance(applied[""], int):
        off = applied[""] - applied["int8"]
        assert np.abs(off - written["feedback/0.weight"]).max() < 1e-6 < 1e-4 < np.abs(off).max()


def test_weights_in_files_are_the_same_in_any_number_of_stages(comm, shared_path):
    files = []
    for number in (0, 1, 4):
        with cut(comm, number) as grid:
            state, path = begun(grid), shared_path / f"{number}.safetensors"
            if files:
                load_weights(state.network, shared_path / "run")
            else:
                learn(state, 1)
                state.save(Checkpoints(grid, shared_path / "run"))
            export_torch(state.network, path)
            files.append(path.read_bytes())
            net, whole = network_of(grid), load_file(path)
            load_weights(net, shared_path / "0.safetensors")
            assert np.array_equal(net.gather("0.weight"), whole["0.weight"].T)
            assert np.array_equal(net.gather("9.bias")[0], whole["9.bias"])
    assert files[0] == files[1] == files[2]


@looped("number", [0, 1, 4])
def test_states_by_name(comm, fails, number):
    """The state of this rank's parameters, and the state of all stages."""
    with cut(comm, number) as grid, Grid(comm, "ddp") as elsewhere:
        net, other = begun(grid).network, network_of(grid)
        names = [*net.dry.named_parameters()]
        whole = {name: net.gather(name) + 1 for name in names}
        few = {name: whole[name] for name in names if name != "9.bias"}
        assert net.load_state_dict(whole) == ([], [])
        assert other.load_state_dict(net.state_dict()) == ([], [])
        assert same({name: other.gather(name) for name in names}, whole)
        other.load_state_dict({name: 0 * whole[name] for name in names})
        missing, unknown = other.load_state_dict({**few, "more": whole["9.bias"]}, strict=False)
        assert missing == ["9.bias"] * ("9.bias" in other.state_dict()) and unknown == ["more"]
        assert same({name: other.gather(name) for name in names}, {**few, "9.bias": 0 * whole["9.bias"]})
        away = nn.MLP(elsewhere, (6, 8, 9, 8, 4), nn.gelu, norm=True, dropout=0.2).state_dict()
        for kind, text, call in (
            (LayoutError, "It lacks '9.bias'", lambda: other.load_state_dict(few)),
            (LayoutError, "It also has 'more'", lambda: other.load_state_dict({**whole, "more": whole["9.bias"]})),
            (Pmm3dError, r"gather: no parameter is named '9.bia' \(did you mean 9.bias", lambda: net.gather("9.bia")),
            (LayoutError, "save a checkpoint of it, and load that", lambda: other.load_state_dict(away)),
        )[: 4 if grid._has_stages else 3]:
            with given(text=text):
                fails(kind, text, call)


def test_another_network_or_grid_is_refused_by_all_ranks(comm, shared_path, fails):
    with cut(comm, 0) as grid:
        keeper, state, stage = Checkpoints(grid, shared_path), begun(grid), Checkpoints(grid.stage, shared_path)
        path = state.save(keeper)
        for sizes, text in (
            ((6, 8, 9, 8, 8, 4), "It lacks '10.bias'.* It differs in '9.bias'"),
            ((6, 8, 9, 8, 3), "It differs in '9.bias' .1 x 4 float32 there, 1 x 3 float32 here"),
        ):
            other = begun(grid, sizes=sizes)
            weights = lambda: {name: other.network.gather(name) for name in other.network.dry.named_parameters()}
            before = weights()
            for load, into in ((other.resume, keeper), (partial(load_weights, other.network), path)):
                fails(CheckpointError, f"is the checkpoint of another network. {text}", partial(load, into))
            assert same(weights(), before)
        text = r"not on the 4 ranks of the network; .* size 1. Make Checkpoints\(network.parent_grid, folder\)"
        for call in (state.save, state.resume):
            fails(CheckpointError, text, partial(call, stage))
        assert os.listdir(shared_path) == [path.name]


def test_all_stages_scale_the_loss_if_one_is_in_half_precision(comm):
    half = lambda stage: nn.Linear(stage, 3, 3, seed=1, precision="float16")
    make = lambda stage: nn.Sequential(
        stage, half(stage), partial(nn.cast, dtype="float32"), nn.Linear(stage, 3, 2, seed=2)
    )
    with Grid(comm, (1, 1, 1), data=2, pipe=2) as grid:
        net = nn.Pipeline(grid, make)
        state = TrainState(net, optim.SGD(net.parameters(), lr=0.1))
        assert comm.allgather(state.scale is not None) == [True] * 4
