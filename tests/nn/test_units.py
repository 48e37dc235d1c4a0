"""Layers whose columns are split between heads: a fused projection to queries, keys and values, and the layers that use
it."""

import numpy as np
import pytest
from loops import looped
from networks import (
    MANY_GRIDS,
    adamw,
    alone,
    assert_replicas_agree,
    gradients_of,
    largest_difference,
    over_grids,
    spread,
    weights_of,
)
from samples import to_numpy
from scipy.special import softmax

from pmm3d import Grid, LayoutError, nn
from pmm3d.layout import Layout, batch_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

HEADS, SIZE, INPUTS, OUTPUTS, SEQUENCES, LENGTH = 5, 2, 7, 3, 5, 3
FUSED, STEPS = 3 * SIZE, 2
UNITS = Layout(("data", "z"), "y", units=(LENGTH, 1))
SHARDED = {"activations": "sharded"}


class Heads(nn.Module):
    """For each head q softmax(k) v, element by element; a norm; a projection back. Rows are whole sequences."""

    def __init__(self, grid, **options):
        self.grid = grid
        make = lambda inputs, outputs, **more: nn.Linear(grid, inputs, outputs, dtype="float64", **more, **options)
        self.project = make(INPUTS, HEADS * FUSED, unit=FUSED, seed=1)
        self.norm = nn.LayerNorm(grid, HEADS * SIZE, dtype="float64", cols="x")
        self.back = make(HEADS * SIZE, OUTPUTS, seed=2, cols="x")
        self.seen = []

    def forward(self, x):
        fused = self.project(x)
        q, k, v = nn.split(fused, [SIZE] * 3)
        mixed = q * nn.softmax(k) * v
        out = self.back(self.norm(mixed))
        self.seen = [fused, mixed, out]
        return out


def batch(step, sequences=SEQUENCES):
    random = (np.random.default_rng([step, columns]) for columns in (INPUTS, OUTPUTS))
    return (each.standard_normal((sequences * LENGTH, columns)) for each, columns in zip(random, (INPUTS, OUTPUTS)))


def trained(grid, sequences, **options):
    """(network, losses) of some steps, with a state that is split over data."""
    net, losses = Heads(grid, **options), []
    optimizer = adamw(net.parameters(), shard_over_data=True)
    for step in range(STEPS):
        x, y = (spread(grid, each, UNITS) for each in batch(step, sequences))
        loss = nn.mse(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


@looped("sequences, options", [(SEQUENCES, {}), (SEQUENCES, SHARDED), (3, SHARDED)])
@over_grids(MANY_GRIDS)
def test_a_ragged_number_of_heads_gives_what_one_rank_does(grid, sequences, options):
    """Every rank has whole heads of whole sequences. With fewer sequences than ranks, sharded activations cut inside
    the sequences of data and z, and each rank has rows while there are enough."""
    with alone() as single:
        expected, costs = trained(single, sequences)
        weights = weights_of(expected)
    net, losses = trained(grid, sequences, **options)
    assert np.abs(np.subtract(losses, costs)).max() < 1e-12 and largest_difference(weights_of(net), weights) < 1e-12
    assert_replicas_agree(grid, {name: each.value for name, each in net.named_parameters().items()})
    shape, row_unit = grid.shape, LENGTH
    batches = shape.data * shape.z
    for tensor, unit, axis in zip(net.seen, (FUSED, SIZE, 1), "yyx"):
        ranks = getattr(shape, axis)
        if options and ranks > 1 and batches * ranks > sequences:
            row_unit = ("data", LENGTH), ("z", LENGTH)
        assert tensor.layout.units == (row_unit, unit)
        assert all(place % unit == 0 for place in tensor.box[2:])
        if row_unit == LENGTH:
            assert all(place % LENGTH == 0 for place in tensor.box[:2])
        else:
            assert tensor.box.shape[0] or sequences // batches * LENGTH < ranks
    fused, mixed, _ = (to_numpy(each.gather()) for each in net.seen)
    q, k, v = np.moveaxis(fused.reshape(-1, HEADS, 3, SIZE), 2, 0).reshape(3, -1, HEADS * SIZE)
    assert np.abs(q * softmax(k, 1) * v - mixed).max() < 1e-12


@over_grids()
def test_nothing_moves_between_the_layers_but_what_they_say(grid):
    """No relayout is needed, because the next weight's rows are split in the same way as these columns."""
    net = Heads(grid)
    net.settle(INPUTS)
    x = spread(grid, next(batch(0)), batch_layout("y"))
    net(x)
    grid.ledger.reset()
    out = net(x)
    out.backward(spread(grid, next(batch(1))[:, :OUTPUTS], out.layout))
    assert all(grid.ledger.total(phase=phase).received == 0 for phase in ("relayout", "redistribute"))
    assert net.project.weight.layout.units == (1, FUSED) and net.back.weight.layout.units == (SIZE, 1)


@pytest.mark.parallel([2], thorough=[1])
def test_what_does_not_fit_is_refused(comm, fails):
    with Grid(comm, (1, comm.size, 1)) as grid:
        fails(LayoutError, "10 outputs are no multiple of the unit", lambda: nn.Linear(grid, 4, 10, unit=4))
        fails(LayoutError, "unit is a whole number", lambda: nn.Linear(grid, 4, 10, unit=0))


def test_one_sequence_is_cut_inside_by_sharded_activations(comm):
    """All ranks along y have rows, and the gradients equal those of one rank."""
    x, y = (np.random.default_rng(seed).standard_normal((8, 6)) for seed in (1, 2))

    def trained(grid):
        first = nn.Linear(grid, 6, 10, dtype="float64", seed=1, activations="sharded")
        norm = nn.LayerNorm(grid, 10, dtype="float64", cols="x")
        net = nn.Sequential(grid, first, norm, nn.Linear(grid, 10, 6, dtype="float64", seed=2, cols="x"))
        hidden = first(spread(grid, x, Layout(("data", "z"), "y", units=(8, 1))))
        cost = nn.mse(net.layers[2](norm(hidden)), spread(grid, y, Layout(("data", "z"), "y", units=(8, 1))))
        cost.backward()
        return hidden.box.shape[0], cost.item(), gradients_of(net)

    with alone() as grid:
        _, cost, gradients = trained(grid)
    with Grid(comm, (1, comm.size, 1)) as grid:
        rows, found, others = trained(grid)
    assert rows == 8 // comm.size and abs(found - cost) < 1e-12
    assert largest_difference(others, gradients) < 1e-12
