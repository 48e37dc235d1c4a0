"""Comparison with torch: the same initial weights and batches give the same losses, on every grid."""

from functools import cache, partial

import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    EVEN,
    GRIDS,
    VECTORS,
    adamw,
    batch_of,
    network_of,
    on_each_grid,
    on_grid,
    over_grids,
    train,
    weights_of,
)
from torch_reference import by_rank_0, clipped, torch_loss

from pmm3d import Grid
from pmm3d.nn import optim

STEPS = 30
pytestmark = pytest.mark.deadline(240)


def grouped(options, own):
    """The options of AdamW of the weights of the first layer and of the others, which have options of their own."""
    groups = lambda weights: [{"params": weights[:2]}, {"params": weights[2:], **own}]
    return (
        lambda weights, **further: optim.AdamW(groups(weights), **options, **further),
        lambda torch, weights: torch.optim.AdamW(groups(weights), **options),
    )


OPTIMIZERS = {
    "AdamW": (adamw, lambda torch, weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)),
    "Adam": (
        partial(optim.Adam, lr=5e-3, betas=(0.8, 0.95), weight_decay=0.02),
        lambda torch, weights: torch.optim.Adam(weights, 5e-3, (0.8, 0.95), weight_decay=0.02),
    ),
    "SGD": (partial(optim.SGD, lr=0.1), lambda torch, weights: torch.optim.SGD(weights, 0.1)),
    "momentum": (
        partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda torch, weights: torch.optim.SGD(weights, 0.05, 0.9, weight_decay=0.01),
    ),
    "nesterov": (
        partial(optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        lambda torch, weights: torch.optim.SGD(weights, 0.05, 0.8, nesterov=True, weight_decay=0.01),
    ),
    "groups": grouped(
        {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.7, 0.9), "eps": 1e-4},
        {"lr": 3e-2, "weight_decay": 0.2, "betas": (0.5, 0.8)},
    ),
}
ROOT = 0.5**0.5
COSINE = [0.5, 1, 1, (1 + ROOT) / 2, 0.5, (1 - ROOT) / 2, 0, 0, 0, 0]
STAIRS = [0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
"""Factors of the rate after a warm-up of two steps."""
SCHEDULES = {
    "cosine": (
        lambda optimizer: optim.Cosine(optimizer, 10, floor=0.2),
        lambda rates, optimizer: rates.CosineAnnealingLR(optimizer, 10, optimizer.defaults["lr"] * 0.2),
    ),
    "step": (lambda optimizer: optim.Step(optimizer, 3, 0.5), lambda rates, optimizer: rates.StepLR(optimizer, 3, 0.5)),
    "cosine after a warm-up": (
        lambda optimizer: optim.Cosine(optimizer, 6, 2),
        lambda rates, optimizer: rates.LambdaLR(optimizer, COSINE.__getitem__),
    ),
    "step after a warm-up": (
        lambda optimizer: optim.Step(optimizer, 2, 0.5, 2),
        lambda rates, optimizer: rates.LambdaLR(optimizer, STAIRS.__getitem__),
    ),
    "warm-up": (
        lambda optimizer: optim.Schedule(optimizer, 4),
        lambda rates, optimizer: rates.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4)),
    ),
}


@cache
def torch_losses(case, steps, optimizer="AdamW", schedule=None, clip=None):
    """Losses (and, with clip, norms) of torch with the initial weights of pmm3d. On one rank."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        start = weights_of(network_of(grid, case))
    net = torch_network(torch, case, start)
    chosen = OPTIMIZERS[optimizer][1](torch, list(net.parameters()))
    rates = SCHEDULES[schedule][1](torch.optim.lr_scheduler, chosen) if schedule else None
    losses = []
    for step in range(steps):
        x, y = map(torch.from_numpy, batch_of(case, step))
        loss = torch_loss(torch, case, net(x), y)
        chosen.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if clip:
            losses.append(clipped(torch, list(net.parameters()), clip))
        chosen.step()
        if rates:
            rates.step()
    return np.array(losses)


def torch_network(torch, case, weights):
    """The same layers. Weights have their names in pmm3d, where W is (inputs, outputs)."""
    layers = []
    for inputs, outputs in zip(case.sizes, case.sizes[1:]):
        layers += [torch.nn.Linear(inputs, outputs, dtype=torch.float64)]
        layers += [torch.nn.LayerNorm(outputs, dtype=torch.float64)] * case.norm
        layers += [torch.nn.GELU() if case.activation == "gelu" else torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[: -1 - case.norm])
    state = {
        name.replace("gain", "weight"): value[0] if len(value) == 1 else value.T for name, value in weights.items()
    }
    net.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return net


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
@pytest.mark.parametrize(
    "case, grids",
    [(CLASSES, slice(None)), (EVEN, slice(0, None, 2)), (VECTORS, slice(-1, None, -2))],
    ids=["classes", "even", "vectors"],
)
def test_losses_of_30_steps_are_those_of_torch(comm, case, grids):
    expected = by_rank_0(comm, lambda: torch_losses(case, STEPS))
    assert abs(expected[-1] - expected[0]) > 1e-2

    def check(grid):
        assert np.abs(train(grid, case, STEPS)[0] - expected).max() < 1e-10

    on_each_grid(comm, check, GRIDS[comm.size][grids])


@pytest.mark.parallel([4])
@looped("optimizer", OPTIMIZERS)
@over_grids(lambda ranks: [("2x1x1", 2), ("hsdp", 2)])
def test_each_optimizer_takes_the_steps_of_torch(comm, grid, optimizer):
    """After a warm-up, which scales the rate of each group. On the second grid, the state is split over data."""
    expected = by_rank_0(comm, lambda: torch_losses(CLASSES, 6, optimizer, "warm-up"))
    make = lambda weights: OPTIMIZERS[optimizer][0](weights, shard_over_data=grid.z.size > 1)
    assert np.abs(train(grid, CLASSES, 6, make, SCHEDULES["warm-up"][0])[0] - expected).max() < 1e-11


@pytest.mark.parallel([2])
@looped("schedule", [name for name in SCHEDULES if name != "warm-up"])
@on_grid("ddp")
def test_each_schedule_sets_the_rates_of_torch(comm, grid, schedule):
    expected = by_rank_0(comm, lambda: torch_losses(VECTORS, 9, "SGD", schedule))
    losses, _ = train(grid, VECTORS, 9, OPTIMIZERS["SGD"][0], SCHEDULES[schedule][0])
    assert np.abs(losses - expected).max() < 1e-11


@pytest.mark.parallel([4], thorough=[1, 8])
@over_grids()
def test_clipping_is_that_of_torch(comm, grid):
    """The first norms are above the limit, so that clipping changes the steps. Replicas count once."""
    expected = by_rank_0(comm, lambda: torch_losses(CLASSES, 6, "momentum", clip=0.8))
    assert min(expected[1::2]) < 0.8 < max(expected[1::2])
    for shard in (False, True):
        make = lambda weights: OPTIMIZERS["momentum"][0](weights, shard_over_data=shard)
        assert np.abs(train(grid, CLASSES, 6, make, clip=0.8)[0] - expected).max() < 1e-11
