"""Activations that are replicated over the summed axis, or sharded over it (Megatron's sequence parallelism)."""

import math
from functools import cache, partial

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    GRIDS,
    MANY_GRIDS,
    Case,
    adamw,
    assert_replicas_agree,
    batch_of,
    bits,
    largest_difference,
    network_of,
    over_grids,
    spread,
    train,
    weights_of,
)
from torch_reference import by_rank_0, torch_steps

from pmm3d import nn
from pmm3d.layout import batch_layout

pytestmark = [pytest.mark.parallel([4], thorough=[2, 8]), pytest.mark.deadline(240)]

STEPS, NORM = 5, 0.5
WHOLE, SHARDED = {}, {"activations": "sharded"}
PRESETS = [("ddp", 1), ("fsdp", 1), ("hsdp", 2), ("megatron", 1), ("megatron", 2)]
RAGGED = Case((7, 13, 5), 23)
PLAIN = Case((40, 32, 48, 24), 96)
"""Without vectors and norms, each element of a gradient is the sum of the same numbers in the same order."""
LARGE = Case((64, 128, 64, 128, 64), 256, "relu", loss="mse")
"""All sizes divide by 8, and all-reduced arrays are large enough for two stages."""


def every_grid(size):
    """Every grid, by the name of its family if it has one."""
    half = size // 2
    named = [((1, 1, 1), size), ((1, 1, size), 1), ((1, 1, half), 2), ((size, 1, 1), 1), ((half, 1, 1), 2)]
    presets = PRESETS if all_tests or size < 4 else PRESETS[2::2]
    return presets + [grid for grid in MANY_GRIDS[size] if grid not in named]


EVERY_GRID = {size: every_grid(size) for size in (2, 4, 8)}


def deep(grid, kind=WHOLE):
    """Every kind of layer, with uneven sizes; a recomputed block, and a residual layer."""
    inputs, size, classes = RAGGED.sizes
    make = lambda inputs, outputs, seed: nn.Linear(grid, inputs, outputs, dtype="float64", seed=seed, **kind)
    norm = nn.LayerNorm(grid, size, dtype="float64")
    block = nn.Sequential(grid, norm, make(size, 17, 2), nn.gelu, nn.Dropout(grid, 0.2, 3), make(17, size, 4))
    return nn.Sequential(
        grid,
        make(inputs, size, 1),
        nn.tanh,
        nn.Recompute(nn.Residual(block)),
        nn.Dropout(grid, 0.1, 0),
        nn.Residual(make(size, size, 5)),
        make(size, classes, 6),
    )


@cache
def of_torch():
    return torch_steps(deep, RAGGED, STEPS, NORM)


@looped("kind", [WHOLE, SHARDED])
@over_grids(EVERY_GRID)
def test_losses_norms_and_weights_are_those_of_torch(grid, kind):
    """AdamW with its state split over data. The norms are above the limit, so that clipping has an effect."""
    losses, weights = by_rank_0(grid.comm, of_torch)
    assert losses[1::2].max() > NORM
    values, net = train(grid, RAGGED, STEPS, partial(adamw, shard_over_data=True), clip=NORM, net=deep(grid, kind))
    assert np.abs(values - losses).max() < 1e-10 and largest_difference(weights_of(net), weights) < 1e-10
    assert_replicas_agree(grid, {name: each.value for name, each in net.named_parameters().items()})


@looped("recompute", (False, True))
@over_grids(GRIDS)
def test_no_bit_of_the_weights_depends_on_it(grid, recompute):
    """With dropout, a recomputed part, and ZeRO-1."""
    options = {"norm": False, "bias": False, "dropout": 0.2, "recompute": recompute}
    make = partial(adamw, shard_over_data=recompute)
    trained = lambda kind: train(grid, PLAIN, 3, make, **options, **kind)[1]
    assert bits(weights_of(trained(WHOLE))) == bits(weights_of(trained(SHARDED)))


def moved(grid, kind, wanted):
    """Operation -> bytes that this rank receives along x and y in the second step, without the loss."""
    net = network_of(grid, LARGE, norm=False, bias=False, **kind)
    optimizer = adamw(net.parameters())
    for step in range(2):
        x, y = batch_of(LARGE, step)
        x = nn.Tensor(spread(grid, x), requires_grad=wanted)
        grid.ledger.reset()
        loss = nn.mse(net(x), spread(grid, y, batch_layout(None)))
        loss.backward()
        loss.item()
        optimizer.step()
    assert grid.ledger.total(phase="redistribute").calls == 0
    received = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), 0)
    for key, entry in grid.ledger.entries.items():
        if key.axis in ("x", "y") and key.phase != "loss" and key.operation in received:
            received[key.operation] += entry.received
    return received


@looped("wanted", [False, True])
@over_grids(EVERY_GRID)
def test_all_reduces_become_reduce_scatters_and_gathers_of_the_same_bytes(grid, wanted):
    """The gradient of a batch is replicated, as is the batch."""
    whole, sharded = (moved(grid, kind, wanted) for kind in (WHOLE, SHARDED))
    assert whole["reduce_scatter"] == whole["all_gather"] == 0
    assert (whole["all_reduce"] > 0) == (grid.x.size * grid.y.size > 1)
    assert sum(sharded.values()) == whole["all_reduce"]
    assert (sharded["all_reduce"] > 0) == (wanted and grid.x.size > 1)
    assert sharded["all_to_all"] == whole["all_to_all"] == 0


def between_layers(grid, kind):
    """(elements on this rank, layout) of the result of each layer but the last."""
    net, found = network_of(grid, LARGE, norm=False, dropout=0.5, **kind), []
    with nn.Tape.of(grid).set(inspect=lambda layer, out: found.append((layer, math.prod(out.local.shape), out.layout))):
        out = net(spread(grid, batch_of(LARGE, 0)[0]))
    assert out.layout.on(grid.shape) == net.output_layout.on(grid.shape)
    return [(size, layout) for layer, size, layout in found if layer is not net][:-1]


@over_grids(EVERY_GRID)
def test_tensors_between_layers_hold_one_part_for_each_rank_of_the_summed_axis(grid):
    whole, sharded = between_layers(grid, WHOLE), between_layers(grid, SHARDED)
    assert len(whole) == len(sharded) == 6
    for index, ((all_of_it, _), (part, layout)) in enumerate(zip(whole, sharded)):
        summed = "yx"[index // 2 % 2]
        assert part * grid.axis(summed).size == all_of_it
        assert grid.axis(summed).size == 1 or summed in layout.rows


@over_grids(EVERY_GRID)
def test_what_is_kept_and_what_moves_when_inputs_are_gathered_again(grid):
    """If it is kept gathered: the bytes of an all-reduce. If it is kept as a shard, which relu keeps in any case: one
    more gather."""
    kept, received, (x, y) = {}, {}, batch_of(LARGE, 0)
    for again in (False, True):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(regather_inputs=again, reshard_after_forward=False)
        net = network_of(grid, LARGE, norm=False, bias=False, **SHARDED)
        loss = nn.mse(net(spread(grid, x)), spread(grid, y, batch_layout(None)))
        loss.item()
        kept[again] = sum(array.nbytes for array in loss.kept())
        grid.ledger.reset()
        loss.backward()
        received[again] = {kind: grid.ledger.total(phase=kind).received for kind in ("gather I", "gather dO")}
    gathered = [
        8 * x.shape[0] * size // (grid.data.size * grid.z.size * axis.size)
        for size, axis in zip(LARGE.sizes[1:-1], (grid.x, grid.y, grid.x))
    ]
    along = list(zip(gathered, (grid.y, grid.x, grid.y)))
    assert kept[False] - kept[True] == sum(size for size, axis in along if axis.size > 1)
    assert received[False]["gather I"] == 0
    assert received[True]["gather I"] == sum(size - size // axis.size for size, axis in along)
    assert received[False]["gather dO"] == received[True]["gather dO"]
