"""Trainings in stages: checkpoints and files for any number of stages, and for none."""

import json
import os
from functools import partial

import h5py
import numpy as np
import pytest
from loops import given
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
    net, last = state.network, max(state.network.stages) == state.network.whole.shape.stages - 1
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


def test_a_training_goes_on_in_any_number_of_stages(comm, shared_path):
    """Weights, the optimizer's state split over data, steps, missing gradients and calls of dropout."""
    for number, (*_, _stages) in enumerate(CUTS):
        with cut(comm, number) as grid:
            state = begun(grid)
            learn(state, 3)
            path = state.save(Checkpoints(grid, shared_path / f"{number}"), note="here")
        written, facts = contents(path)
        assert facts["step"] == 3 and set(facts["random"].values()) == {3} and len(facts["random"]) == 3
        assert {"0.weight", "optimizer/0.weight/mean", "9.bias"} <= written.keys() and len(written) == 3 * 14
        assert "9.bias" in facts["optimizer"]["missed"] and set(facts["optimizer"]["missed"].values()) == {2}
        for other in ((number + 1) % 5, (number + 3) % 5)[: 2 if all_tests else 1]:
            with given(number=number, other=other), cut(comm, other) as grid:
                again = begun(grid)
                assert again.resume(Checkpoints(grid, shared_path / f"{number}"))["note"] == "here"
                assert again.step == 3
                found = contents(again.save(Checkpoints(grid, shared_path / f"{number}-{other}"), note="here"))
                assert same(found[0], written) and found[1] == facts


def test_tied_weights_and_copies_are_stored_once(comm, shared_path, fails):
    """DualPipe has a copy of all weights. Copies that differ are not saved."""
    cases = (0, "1f1b"), (1, "dualpipe"), (1, "zb-h1"), (4, "1f1b")
    for case, (number, schedule) in enumerate(cases):
        folder = shared_path / f"{case}"
        with given(schedule=schedule), cut(comm, number) as grid:
            state, keeper = trained(grid, schedule, 2), Checkpoints(grid, folder)
            path = state.save(keeper)
            if grid._has_stages:
                copy = state.network.named_parameters().get("0.weight")
                if grid.coords.pipe == grid.shape.pipe - 1:
                    copy.assign(copy.value * 1.5)
                fails(
                    CheckpointError,
                    "save: two stages have other values under one name: '0.weight'",
                    lambda: state.save(keeper),
                )
            assert os.listdir(folder) == [path.name]
        written, facts = contents(path)
        stored = dict.fromkeys(written, 0)
        for file_name in path.glob("rank-*.h5"):
            with h5py.File(file_name) as file:
                for name in written:
                    stored[name] += file[name].size if name in file else 0
        assert stored == {name: array.size for name, array in written.items()} and len(written) == 3 * 9
        number, schedule = cases[(case + 1) % 4]
        with given(case=case, other=schedule), cut(comm, number) as grid:
            again, keeper = trained(grid, schedule, 0), Checkpoints(grid, folder)
            again.resume(keeper)
            assert same(contents(again.save(keeper))[0], written)
            assert trained(grid, schedule, 2).facts()["optimizer"] == facts["optimizer"] == again.facts()["optimizer"]


def test_master_weights_are_loaded_in_another_precision(comm, shared_path):
    with cut(comm, 0) as grid:
        low = begun(grid, precision="float16")
        learn(low, 2)
        written, _ = contents(low.save(Checkpoints(grid, shared_path)))
    assert {array.dtype.name for array in written.values()} == {"float32"}
    for number in (1, 4):
        with cut(comm, number) as grid:
            full = begun(grid)
            full.resume(Checkpoints(grid, shared_path))
            assert all(
                np.array_equal(full.network.gather(name), written[name])
                for name in written
                if not name.startswith("optimizer/")
            )
            again = begun(grid, precision="float16")
            again.resume(Checkpoints(grid, shared_path))
            assert same(contents(again.save(Checkpoints(grid, shared_path / f"{number}")))[0], written)


def test_weights_in_files_are_the_same_in_any_number_of_stages(comm, shared_path):
    files = []
    for number in (0, 1, 4):
        with cut(comm, number) as grid:
            state = begun(grid)
            if not files:
                learn(state, 1)
                state.save(Checkpoints(grid, shared_path / "run"))
            else:
                load_weights(state.network, shared_path / "run")
            path = shared_path / f"{number}.safetensors"
            export_torch(state.network, path)
            files.append(path.read_bytes())
            net = network_of(grid)
            load_weights(net, shared_path / "0.safetensors")
            whole = load_file(path)
            assert np.array_equal(net.gather("0.weight"), whole["0.weight"].T)
            assert np.array_equal(net.gather("9.bias")[0], whole["9.bias"])
    assert files[0] == files[1] == files[2]


def test_states_by_name(comm, fails):
    """The state of this rank's parameters, and the state of all stages."""
    for number in (0, 1, 4):
        with given(number=number), cut(comm, number) as grid:
            state = begun(grid)
            learn(state, 1)
            net, other = state.network, network_of(grid)
            assert other.load_state_dict(net.state_dict()) == ([], [])
            names = [*net.dry.named_parameters()]
            whole = {name: net.gather(name) for name in names}
            assert all(np.array_equal(other.gather(name), whole[name]) for name in names)
            assert network_of(grid).load_state_dict(whole) == ([], [])
            other.load_state_dict({name: 0 * whole[name] for name in names})
            assert not any(other.gather(name).any() for name in names)
            few = {name: whole[name] for name in names if name != "9.bias"}
            missing, unknown = other.load_state_dict({**few, "more": whole["9.bias"]}, strict=False)
            assert missing == ["9.bias"] * ("9.bias" in other.state_dict()) and unknown == ["more"]
            assert all(np.array_equal(other.gather(name), whole[name]) == (name in few) for name in names)
            fails(LayoutError, "of another network. It lacks '9.bias'", lambda: other.load_state_dict(few))
            fails(
                LayoutError,
                "of another network. It also has 'more'",
                lambda: other.load_state_dict({**whole, "more": whole["9.bias"]}),
            )
            fails(
                Pmm3dError,
                r"gather: no parameter is named '9.bia' \(did you mean 9.bias\?\)",
                lambda: net.gather("9.bia"),
            )
            with Grid(comm, "ddp") as elsewhere:
                if grid._has_stages:
                    away = nn.MLP(elsewhere, (6, 8, 9, 8, 4), nn.gelu, norm=True, dropout=0.2)
                    fails(
                        LayoutError,
                        r"other processes, or in another order: save a checkpoint of it, and load that",
                        lambda: other.load_state_dict(away.state_dict()),
                    )


def test_another_network_or_grid_is_refused_by_all_ranks(comm, shared_path, fails):
    with cut(comm, 0) as grid:
        keeper, state = Checkpoints(grid, shared_path), begun(grid)
        path = state.save(keeper)
        for sizes, text in (
            ((6, 8, 9, 8, 8, 4), "It lacks '10.bias'.* It differs in '9.bias'"),
            ((6, 8, 9, 8, 3), "It differs in '9.bias' .1 x 4 float32 there, 1 x 3 float32 here"),
        ):
            other = begun(grid, sizes=sizes)
            before = {name: other.network.gather(name) for name in other.network.dry.named_parameters()}
            for load, into in ((other.resume, keeper), (partial(load_weights, other.network), path)):
                fails(CheckpointError, f"is the checkpoint of another network. {text}", partial(load, into))
            assert all(np.array_equal(other.network.gather(name), before[name]) for name in before)
        stage = Checkpoints(grid.stage, shared_path)
        for call in (lambda: state.save(stage), lambda: state.resume(stage)):
            fails(
                CheckpointError,
                "not on the 4 ranks of the network; their grid has size 1. Make "
                r"Checkpoints\(network.whole, folder\)",
                call,
            )
        assert os.listdir(shared_path) == [path.name]


def test_all_stages_scale_the_loss_if_one_is_in_half_precision(comm):
    with Grid(comm, (1, 1, 1), data=2, pipe=2) as grid:
        net = nn.Pipeline(
            grid,
            lambda stage: nn.Sequential(
                stage,
                nn.Linear(stage, 3, 3, seed=1, precision="float16"),
                partial(nn.cast, dtype="float32"),
                nn.Linear(stage, 3, 2, seed=2),
            ),
        )
        state = TrainState(net, optim.SGD(net.parameters(), lr=0.1))
        assert comm.allgather(state.scale is not None) == [True] * 4
