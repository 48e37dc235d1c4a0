"""Gradients of experts that some ranks do not store: no rank waits for a message that others do not send."""

import numpy as np
import pytest
from networks import alike
from samples import to_library

from pmm3d import DistMatrix, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState


class Net(nn.Module):
    """Large dense layers around a mixture, so that buckets of gradients are full at different experts."""

    def __init__(self, grid):
        self.grid, self.first = grid, nn.Linear(grid, 6, 40, seed=1)
        self.mixture, self.last = nn.MoE(grid, 40, 24, 4, seed=2), nn.Linear(grid, 40, 3, seed=3)

    def forward(self, x):
        return self.last(self.mixture(self.first(x)))


def loss_of(grid, net, step=0):
    whole = np.random.default_rng(step).random((16, 6)).astype("float32")
    x = DistMatrix.from_global(grid, to_library(whole), layout=batch_layout())
    return nn.sum(nn.sum(nn.pow(net(x), 2.0), 1), 0)


@pytest.mark.parallel([4])
def test_frozen_experts_of_some_ranks_change_no_message_of_others(comm):
    """Experts 1 and 3 are frozen, which with two ranks along "expert" are all experts of half of the ranks."""
    weights = []
    for expert in (1, 2, 4):
        with Grid(comm, (1, 1, 1), 4, expert=expert) as grid:
            net = Net(grid)
            net.settle(6)
            for number in (1, 3):
                for each in net.mixture.experts[number].parameters():
                    each.requires_grad = False
            tape = nn.Tape.of(grid)
            tape.parallel.overlap = nn.Overlap(bucket_bytes=1 << 13)
            optimizer = optim.AdamW(net.parameters(), 0.01)
            for step in range(2):
                loss_of(grid, net, step).backward()
                optimizer.step()
            weights.append([each.gather() for each in net.parameters()])
    assert all(alike(weights[0], other) for other in weights[1:])


@pytest.mark.parallel([4])
def test_sharded_gradients_are_zero_not_none_and_are_stored(comm, shared_path):
    """ZeRO-2: each rank has a gradient of each expert, also of those that other ranks store, and a checkpoint of P = 2
    continues with P = 4."""
    found = []
    for expert in (2, 4):
        with Grid(comm, (1, 1, 1), 4, expert=expert) as grid:
            net = Net(grid)
            net.settle(6)
            optimizer = optim.AdamW(net.parameters(), 0.01, shard_over_data="gradients")
            state = TrainState(net, optimizer)
            if expert == 4:
                assert state.resume(Checkpoints(grid, shared_path / "kept"))["step"] == 2
            for step in range(2) if expert == 2 else ():
                loss_of(grid, net, step).backward()
                assert all(each.grad is not None for each in net.parameters())
                optimizer.step()
            if expert == 2:
                state.save(Checkpoints(grid, shared_path / "kept"))
            loss_of(grid, net, 9).backward()
            optimizer.step()
            found.append([each.gather() for each in net.parameters()])
    assert alike(*found)
