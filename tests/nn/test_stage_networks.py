"""Networks on the stages of one grid train independently: nothing is sent between the stages."""

import numpy as np
import pytest
from networks import CLASSES, VECTORS, alone, bits, largest_difference, loss_of, network_of
from networks import batch_of as whole_batch
from networks import weights_of as weights
from on_disk import on_rank_0, write_arrays

from pmm3d import CheckpointError, Grid, nn
from pmm3d.io import Checkpoints, DataSet
from pmm3d.nn import optim
from pmm3d.nn.training import Recipe, Trainer, TrainState

pytestmark = [pytest.mark.parallel([2, 4, 8]), pytest.mark.deadline(240)]
GRIDS = {2: [((1, 1, 1), 1)], 4: [((2, 1, 1), 1), ((1, 1, 1), 2)], 8: [((2, 1, 1), 2), ((1, 2, 2), 1)]}
CASES, STEPS = (CLASSES, VECTORS), (2, 5)
"""By stage: the network, and the number of steps."""


def begun(grid, case):
    net = network_of(grid, case)
    return TrainState(net, optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=True))


def trained(state, case, steps):
    """Train up to this number of steps. Returns the losses."""
    losses = []
    while state.step < steps:
        loss = loss_of(state.network, case, *whole_batch(case, state.step))
        loss.backward()
        losses.append(loss.item())
        state.optimizer.clip(1.0)
        state.optimizer.step()
    return losses


@pytest.fixture
def grid(comm):
    (shape, data), *_ = GRIDS[comm.size]
    with Grid(comm, shape, data, axes={"pipe": 2}) as grid:
        yield grid


def test_stages_train_and_go_on_from_checkpoints_of_their_own(comm, shared_path):
    for shape, data in GRIDS[comm.size]:
        with Grid(comm, shape, data, axes={"pipe": 2}) as grid:
            stage, number = grid.stage, grid.coords.pipe
            case, steps, folder = CASES[number], STEPS[number], shared_path / f"{shape}-{data}-{number}"
            grid.ledger.reset()
            state, checkpoints = begun(stage, case), Checkpoints(stage, folder)
            losses = trained(state, case, steps)
            state.save(checkpoints)
            losses += trained(state, case, steps + 2)

            again = begun(stage, case)
            again.resume(checkpoints)
            assert again.step == steps and trained(again, case, steps + 2) == losses[-2:]
            mine = weights(state.network)
            assert bits(mine) == bits(weights(again.network))
            axes = {key.axis for key in grid.ledger.entries}
            assert axes <= {"", "x", "y", "z", "data", "stage"} and ("stage" in axes or stage.size == 1)
        with alone() as single:
            expected = begun(single, case)
            assert np.abs(np.subtract(trained(expected, case, steps + 2), losses)).max() < 1e-12
            assert largest_difference(weights(expected.network), mine) < 1e-11


def test_an_error_that_one_stage_catches_leaves_the_other_untouched(grid, shared_path):
    number = grid.coords.pipe
    state, case = begun(grid.stage, CASES[number]), CASES[number]
    if number:
        trained(state, case, 1)
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            Checkpoints(grid.stage, shared_path).load(shared_path / "none", state.matrices())
    losses = trained(state, case, 3)
    with alone() as single:
        expected = trained(begun(single, case), case, 3)[-len(losses) :]
    assert np.abs(np.subtract(losses, expected)).max() < 1e-12


@pytest.mark.parallel([4])
def test_a_trainer_runs_on_each_stage(comm, shared_path):
    with Grid(comm, (1, 1, 1), 2, axes={"pipe": 2}) as grid:
        stage, number = grid.stage, grid.coords.pipe
        path, steps = shared_path / f"data{number}.h5", 4 + 3 * number
        x, y = np.random.default_rng(number).standard_normal((2, 44, 3))
        on_rank_0(stage, lambda: write_arrays(path, x=x, y=y))
        grid.ledger.reset()
        net = nn.MLP(stage, [3, 8 + number, 3])
        with DataSet(stage, path) as data:
            state = TrainState(net, optim.SGD(net.parameters(), lr=0.1), loader=data.loader(8))
            checkpoints = Checkpoints(stage, shared_path / f"checkpoints{number}")
            assert Trainer(state, Recipe("mse", steps=steps), checkpoints=checkpoints).run()
        assert state.step == steps and checkpoints.latest().name == f"step-{steps:08d}"
        assert {key.axis for key in grid.ledger.entries} <= {"", "data", "stage"}


def test_a_matrix_of_another_stage_or_of_the_whole_grid_is_no_matrix_of_the_stage(grid, shared_path):
    weight = network_of(grid, VECTORS).parameters()[0]
    with pytest.raises(CheckpointError, match="lives on a grid over other processes"):
        Checkpoints(grid.stage, shared_path).save(1, {"weight": weight._stored})
