"""Gradients that are readable after a step: summed, clipped and without the scale of the loss, as in torch."""

from contextlib import nullcontext

import numpy as np
import pytest
from loops import given
from networks import VECTORS, batch_of, bits, gradients_of, network_of, ordinary, spread, weights_of
from samples import TESTED
from torch_reference import by_rank_0, clipped, torch_loss

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
CASE, CLIP, STEPS = VECTORS._replace(sizes=(7, 5, 1, 3), activation="tanh"), 0.5, 8


class Direct(optim.Optimizer):
    """An optimizer that overwrites the gradient of a shard."""

    def update_shard(self, shard):
        shard.gradient[...] *= shard.options["lr"]
        shard.weight[...] -= shard.gradient


def adamw(parameters, **options):
    return optim.AdamW(parameters, lr=0.01, **options)


def muon(parameters, **options):
    return optim.Muon(parameters, lr=0.01, **options)


def direct(parameters, **options):
    return Direct(parameters, 0.01, **options)


CASES = {
    1: [("1x1x1", adamw, {}), ("1x1x1", direct, {})],
    2: [
        ("ddp", adamw, {"shard_over_data": "states"}),
        ("ddp", direct, {"shard_over_data": "gradients"}),
        ("fsdp", muon, {}),
        ("megatron", adamw, {}),
    ],
}
"""Number of ranks -> (grid, optimizer, options)."""


def batches_of(grid, step):
    x, y = batch_of(CASE, step)
    make = lambda whole, cols: spread(grid, whole, batch_layout(cols))
    return [(make(own, "y"), make(of_own, None)) for own, of_own in zip(np.array_split(x, 2), np.array_split(y, 2))]


def trained(grid, make, keep=False, scale=None, **options):
    """Return [(weights before, gradients after)] of each step, and the bits of the last weights."""
    net = network_of(grid, CASE, library=TESTED)
    opt, told = make(net.parameters(), **options), []
    for step in range(STEPS):
        before = weights_of(net)
        train_step(net, opt, nn.mse, batches_of(grid, step), CLIP, scale=scale and scale(), keep_gradients=keep)
        assert keep or all(each.grad is None for each in net.parameters())
        told.append((before, gradients_of(net) if keep else {}))
    return told, bits(weights_of(net)), Replays.of(net).replayed


def gradients_of_torch(step, weights):
    import torch

    torch.set_num_threads(1)
    leaves = {name: torch.tensor(np.array(weight), requires_grad=True) for name, weight in weights.items()}
    x, y = map(torch.from_numpy, batch_of(CASE, step))
    for layer in (0, 2, 4):
        x = x @ leaves[f"{layer}.weight"] + leaves[f"{layer}.bias"]
        x = torch.tanh(x) if layer < 4 else x
    torch_loss(torch, CASE, x, y).backward()
    if clipped(torch, [*leaves.values()], float("inf")) > CLIP:
        clipped(torch, [*leaves.values()], CLIP)
    return {name: leaf.grad.numpy() for name, leaf in leaves.items()}


@pytest.mark.parallel([1, 2])
def test_gradients_after_a_step_are_the_clipped_ones_of_torch(comm):
    for shape, make, options in CASES[comm.size]:
        with given(shape=shape, make=make.__name__, options=options), Grid(comm, shape) as grid:
            told, weights, replayed = trained(grid, make, keep=True, **options)
            expected = by_rank_0(
                comm, lambda told=told: [gradients_of_torch(step, before) for step, (before, _) in enumerate(told)]
            )
            for (_, found), gradients in zip(told, expected, strict=True):
                for name, gradient in gradients.items():
                    np.testing.assert_allclose(found[name], gradient, rtol=1e-7, atol=1e-9, err_msg=name)
            assert replayed >= 2
            assert trained(grid, make, **options)[1] == weights
            with ordinary():
                scaled, same, _ = trained(grid, make, True, lambda: optim.LossScale(2.0**10), **options)
            assert same == weights
            assert [bits(found) for _, found in scaled] == [bits(found) for _, found in told]


@pytest.mark.parallel([2])
def test_a_later_pass_of_an_own_loop_adds_as_in_torch(comm):
    """Until `zero_grad`, also with gradients that are split over data."""
    for shard in (False, "states", "gradients"):
        with given(shard=shard), Grid(comm, "ddp") as grid:
            net = network_of(grid, CASE, library=TESTED)
            opt = optim.SGD(net.parameters(), lr=0.0, shard_over_data=shard)
            [(x, y), _] = batches_of(grid, 0)

            def gradients(passes, keep, net=net, opt=opt, x=x, y=y):
                for _ in range(passes):
                    nn.mse(net(x), y).backward()
                opt.step(factor=0.5, keep_gradients=keep)
                return gradients_of(net) if keep else None

            first = gradients(1, True)
            again = gradients(1, True)
            for name in first:
                np.testing.assert_allclose(again[name], (first[name] + 2 * first[name]) / 2, rtol=1e-12)
            opt.zero_grad()
            assert all(each.grad is None for each in net.parameters())
            assert bits(gradients(1, True)) == bits(first)
            opt.zero_grad()
            gradients(1, False)
            assert all(each.grad is None for each in net.parameters())
            scale, again = optim.LossScale(4.0), pytest.raises(Pmm3dError, match=r"zero_grad\(\) of the optimizer if")
            for context in (nullcontext(), again):
                nn.mse(net(x), y).backward(scale=scale.value)
                with context:
                    scale.step(opt, keep_gradients=True)
