"""Averages of weights are those of torch on every layout. They leave the weights as they are, continue from a
checkpoint on another grid, and are what validations and the commands use."""

import gc
import logging
import signal

import h5py
import numpy as np
import pytest
from loops import given
from networks import VECTORS, batch_of, bits, ordinary, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0
from training_runs import signal_at

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.exchange import load_weights
from pmm3d.nn.recorded_passes import Passes
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training import Trainer, TrainState, build, evaluate
from pmm3d.nn.training.config import checked, load
from pmm3d.nn.training.dry_step import step_of
from pmm3d.nn.training.evaluation import Evaluation
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
CASE, DECAY, STEPS = VECTORS._replace(sizes=(7, 5, 1, 3)), 0.75, 9
"""With a weight of one row, whose parts along data are empty on some ranks."""
LOW = "bfloat16" if TESTED == "torch" else "float16"
CASES = {
    1: [("1x1x1", None, False), ("1x1x1", LOW, False)],
    2: [
        ("ddp", None, False),
        ("ddp", None, "states"),
        ("ddp", LOW, "gradients"),
        ("fsdp", LOW, False),
        ("megatron", None, False),
    ],
}
"""Number of ranks -> (grid, precision, shard_over_data)."""


def batches_of(grid, step):
    return [
        tuple(spread(grid, whole.astype("float32"), batch_layout(cols)) for whole, cols in zip(pair, ("y", None)))
        for pair in zip(*(np.array_split(whole, 2) for whole in batch_of(CASE, step)))
    ]


def begin(grid, precision=None, shard=False, averaged=True, lr=0.05):
    """State of a training. float16 begins with a scale that overflows, so that steps are skipped."""
    net = nn.MLP(grid, CASE.sizes, nn.relu, seed=5, precision=precision, library=TESTED)
    opt = optim.AdamW(net.parameters(), lr=lr, shard_over_data=shard)
    scale = optim.LossScale(2.0**40, most=2.0**40) if precision == "float16" else None
    return TrainState(net, opt, scale=scale, ema=optim.EMA(net, DECAY) if averaged else None)


def values(matrices):
    return {name: to_numpy(matrix.gather(), matrix.library) for name, matrix in matrices.items()}


def take(state, step):
    """Take a step. Return whether it was not skipped."""
    skipped = 0 if state.scale is None else state.scale.skipped
    batches = batches_of(state.network.grid, step)
    train_step(state.network, state.optimizer, nn.mse, batches, 1.0, scale=state.scale, ema=state.ema)
    return state.scale is None or state.scale.skipped == skipped


def trained(state, evaluates):
    """Return the weights after each step that was not skipped, the last averages, and figures of the averages."""
    weights, figures, steps = [], [], STEPS
    number = 0
    while number < steps:
        if take(state, number):
            weights.append(values(state.network.matrices()))
        else:
            steps += 1
        number += 1
        if evaluates:
            with state.ema.average_parameters() as net:
                figures.append(evaluate(net, batches_of(net.grid, 99), nn.mse)["loss"])
                entries = net.grid.ledger.entries.items()
                sent = [(key, entry.calls) for key, entry in entries if key.axis]
            assert [(key, entry.calls) for key, entry in entries if key.axis] == sent  # an error may be the reason
    return weights, values(state.ema.matrices()), figures


def averages_of_torch(weights):
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    as_model = lambda each: torch.nn.ParameterList([torch.from_numpy(np.array(one)) for one in each.values()])
    model = AveragedModel(as_model(weights[0]), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for each in weights:
        model.update_parameters(as_model(each))
    return [average.detach().numpy() for average in model.parameters()]


@pytest.mark.parallel([1, 2])
def test_averages_are_those_of_torch_and_weights_keep_their_bits(comm):
    for shape, precision, shard in CASES[comm.size]:
        with given(shape=shape, precision=precision, shard=shard), Grid(comm, shape) as grid:
            state = begin(grid, precision, shard)
            weights, averages, figures = trained(state, evaluates=True)
            assert Replays.of(state.network).replayed >= 2
            if grid.shape.z == 1 and grid.library(TESTED).on_host:  # else passes gather weights, or are on a device
                assert Passes.of(state.network).replayed >= 2
            assert len(weights) == STEPS and (precision != "float16" or state.scale.skipped > 1)
            assert all(name == f"ema/{path}" for name, path in zip(averages, weights[0], strict=True))
            expected = by_rank_0(comm, lambda weights=weights: averages_of_torch(weights))
            for name, average in zip(averages, expected, strict=True):
                np.testing.assert_allclose(averages[name], average, rtol=1e-5, atol=1e-6)
            with ordinary():
                state = begin(grid, precision, shard)
                alike, same, _ = trained(state, evaluates=False)
                assert bits(alike[-1]) == bits(weights[-1]) and bits(same) == bits(averages)
                assert trained(begin(grid, precision, shard), evaluates=True)[2] == figures
                with nn.no_grad(grid):
                    state.network.load_state_dict({name[4:]: average for name, average in averages.items()})
                assert evaluate(state.network, batches_of(grid, 99), nn.mse)["loss"] == pytest.approx(figures[-1], 1e-6)


def test_wrong_uses():
    with Grid.dry((1, 1, 1)) as grid:
        net = nn.MLP(grid, [3, 2, 1])
        with pytest.raises(Pmm3dError, match="at least 0 and below 1; got 1.0"):
            optim.EMA(net, 1.0)
        net.layers[0].requires_grad_(False)
        ema = optim.EMA(net)
        ema.update()
        assert [*ema.matrices()] == ["ema/2.weight", "ema/2.bias"]
        for wrong in (ema.update, ema.average_parameters().__enter__):
            with (
                ema.average_parameters(),
                pytest.raises(Pmm3dError, match="the weights of the network are the averages"),
            ):
                wrong()
        with ema.average_parameters():
            for wrong in (ema.load_state, lambda stored: ema.matrices(stored=stored)):
                with pytest.raises(Pmm3dError, match="the weights of the network are the averages"):
                    wrong({})
        ema.load_state({}, {"bias": net.layers[2].bias})
        assert [*ema.matrices()] == ["ema/2.weight"]
        other = nn.MLP(grid, [3, 1])
        with pytest.raises(Pmm3dError, match="are those of another network.*ema=EMA"):
            TrainState(other, optim.SGD(other.parameters(), lr=0.1), ema=ema)


@pytest.mark.parallel([2])
def test_a_checkpoint_continues_on_another_grid(comm, shared_path, caplog):
    with Grid(comm, "ddp") as grid:
        state, checkpoints = begin(grid, shard="states"), Checkpoints(grid, shared_path / "ema")
        for step in range(3):
            take(state, step)
        stored = values(state.matrices())
        with state.ema.average_parameters():
            path = state.save(checkpoints)
            assert bits(values(state.matrices())) == bits(stored)
        for step in range(3, 6):
            take(state, step)
        later = values(state.matrices())
        without = begin(grid, averaged=False)
        with caplog.at_level(logging.WARNING, "pmm3d.nn"):
            without.resume(checkpoints)
        without.save(Checkpoints(grid, shared_path / "none"))
    with Grid(comm, "fsdp") as grid:
        again = begin(grid)
        take(again, 7)
        again.resume(Checkpoints(grid, path.parent))
        assert bits(values(again.matrices())) == bits(stored)
        refused = begin(grid)
        refused.optimizer = optim.SGD(refused.network.parameters(), lr=0.1)
        with pytest.raises(Pmm3dError, match="optimizer is AdamW"):
            refused.resume(Checkpoints(grid, path.parent))
        assert not refused.ema.matrices()
        del refused
        gc.collect()
        for step in range(3, 6):
            take(again, step)
        for name, value in values(again.matrices()).items():
            np.testing.assert_allclose(value, later[name], rtol=1e-4, atol=1e-5)
        held = sum(matrix.local.nbytes for name, matrix in again.matrices().items() if "/" in name)
        assert grid.ledger.memory["state"] == held
        for ema, prefix in ((True, "ema/"), (False, "")):
            net = begin(grid).network
            load_weights(net, path, ema=ema)
            assert bits(values(net.matrices())) == bits({name: stored[prefix + name] for name in net.matrices()})
        with caplog.at_level(logging.WARNING, "pmm3d.nn"):
            again.resume(Checkpoints(grid, shared_path / "none"))
        assert not again.ema.matrices()
    told = "".join(record.getMessage() for record in caplog.records)
    for text in ("has averages of the weights (EMA), and this run has none", "they begin after step 4"):
        assert told.count(text) == (comm.rank == 0)


@pytest.mark.parallel([2])
def test_a_run_validates_and_exports_averages(here, comm):
    from safetensors.numpy import load_file

    options = {"training": "epochs = 2\nema = 0.9\nbest = true", "batch_size": 10}
    done = here.finish(here.config("whole", **options))
    assert "validation loss" in done.stdout and done.stdout.count("(averaged weights)") == 2
    assert [line["ema"] for line in here.metrics("whole") if "validation" in line] == [True, True]
    held = here.weights("whole")
    assert sum(here.record("whole")["memory"]["state"]) == sum(
        array.nbytes for name, array in held.items() if "/" in name for _ in range(2)
    )

    more = here.finish(here.config("more", training=f"steps = 1\nweights = '{here.folder}/whole'"))
    assert "loaded (averaged weights)" in more.stdout + more.stderr
    with signal_at(comm, Evaluation, "add", 2, signal.SIGUSR1), signal_at(comm, Trainer, "_step", 45):
        assert here.train(here.config("ended", **options)).returncode == 75
    here.finish(here.config("ended", **options), "--resume", "auto")
    here.assert_same_weights("whole", "ended")
    folders = [f"{here.folder}/{name}/checkpoints/step-00000030/checkpoint.h5" for name in ("whole", "ended")]
    with h5py.File(folders[0]) as one, h5py.File(folders[1]) as other:
        assert all(np.array_equal(one[name], other[name]) for name in held)

    for arguments, prefix in (((), "ema/"), (("--no-ema",), "")):
        target = here.folder / f"weights{len(arguments)}.safetensors"
        said = here.run("export", f"{here.folder}/whole", str(target), *arguments)
        assert said.returncode == 0 and ("(averaged weights)" in said.stdout + said.stderr) == (not arguments)
        for name, array in load_file(target).items():
            assert np.array_equal(array.T if array.ndim > 1 else array[None], held[prefix + name])
    figures = []
    for arguments in ((), ("--no-ema",)):
        said = here.run("evaluate", f"{here.folder}/whole", f"{here.folder}/data.h5", *arguments)
        assert said.returncode == 0, said.stderr
        figures.append(said.stdout + said.stderr)
    assert "(averaged weights)" in figures[0] and "(averaged" not in figures[1]
    assert figures[0].split("loss")[1] != figures[1].split("loss")[1]


@pytest.mark.parallel([2])
def test_stages_average_their_weights(here, comm):
    options = {"training": "steps = 12\nema = 0.9", "network": "dtype = 'float64'"}
    for name, ranks, grid in (("one", 1, ""), ("stages", 2, "pipe = 2\n")):
        here.finish(here.config(name, grid=f'shape = "1x1x1"\nmicro_batches = 4\n{grid}', **options), ranks=ranks)
    one, stages = here.weights("one"), here.weights("stages")
    assert one.keys() == stages.keys() and any(name.startswith("ema/") for name in one)
    assert all(np.allclose(one[name], stages[name], rtol=0, atol=1e-10) for name in one)
    for key in ("loss", "accuracy"):
        figures = [[line["validation"][key] for line in here.metrics(name) if "validation" in line] for name in
                   ("one", "stages")]  # fmt: skip
        assert np.allclose(*figures, rtol=0, atol=1e-10)
    with build.trainer(load(here.config("kept", grid='shape = "1x1x1"\npipe = 2', training="steps = 1")), comm) as run:
        run.keep_gradients = True
        run.run()
        assert all(parameter.grad is not None for parameter in run.state.network.parameters())


def test_predicted_memory_and_time_include_averages():
    sections = {"data": {"file": "x.h5", "batch_size": 8}, "network": {"hidden": [64]}}
    plain, averaged = (
        step_of(checked({**sections, "training": more}), GridShape(1, 1, 2), 2, samples=(32, 32))
        for more in ({}, {"ema": 0.99})
    )
    weights = plain.memory["weights"]
    assert (
        averaged.memory["state"] - plain.memory["state"]
        == averaged.memory["copies"] - plain.memory["copies"]
        == weights
    )
    [update] = [action for action in averaged.actions if action.operation == "update ema"]
    assert 0.95 * 3 * weights < update.nbytes <= 3 * weights  # passes of less than 4 KiB are left out
