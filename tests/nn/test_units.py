"""Layers whose columns are split between heads: a fused projection to queries, keys and values, and the layers that use
it."""

import numpy as np
import pytest
from loops import given
from networks import MANY_GRIDS, adamw, alone, assert_replicas_agree, on_each_grid, spread, weights_of
from torch_reference import by_rank_0

from pmm3d import Grid, LayoutError, nn
from pmm3d.layout import Layout, batch_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

HEADS, SIZE, INPUTS, OUTPUTS, SEQUENCES, LENGTH = 5, 2, 7, 3, 5, 3
FUSED, ROWS, STEPS = 3 * SIZE, SEQUENCES * LENGTH, 2
UNITS = Layout(("data", "z"), "y", units=(LENGTH, 1))


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


def batch(step):
    return (np.random.default_rng([step, columns]).standard_normal((ROWS, columns)) for columns in (INPUTS, OUTPUTS))


def of_torch():
    """(outputs and losses of the steps, name -> weight after them)."""
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        given = {name: torch.tensor(value, requires_grad=True) for name, value in weights_of(Heads(grid)).items()}
    optimizer, found = torch.optim.AdamW(given.values(), lr=1e-2, weight_decay=0.1), []
    for step in range(STEPS):
        x, y = map(torch.from_numpy, batch(step))
        fused = (x @ given["project.weight"] + given["project.bias"]).reshape(ROWS, HEADS, 3, SIZE)
        q, k, v = (fused[:, :, part].reshape(ROWS, HEADS * SIZE) for part in range(3))
        mixed = q * torch.softmax(k, 1) * v
        normal = torch.nn.functional.layer_norm(mixed, (HEADS * SIZE,), given["norm.gain"][0], given["norm.bias"][0])
        out = normal @ given["back.weight"] + given["back.bias"]
        loss = torch.nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((out.detach().numpy(), loss.item()))
    return found, {name: value.detach().numpy() for name, value in given.items()}


def test_a_ragged_number_of_heads_gives_what_torch_does(comm):
    """Also with a state that is split over data. Every rank has whole heads of whole sequences."""
    for options in [{}, {"activations": "sharded"}]:
        with given(options=options):
            expected, weights = by_rank_0(comm, of_torch)

            def check(grid):
                net = Heads(grid, **options)
                optimizer = adamw(net.parameters(), shard_over_data=True)
                for step, (out, loss) in enumerate(expected):
                    x, y = (spread(grid, each, UNITS) for each in batch(step))
                    cost = nn.mse(net(x), y)
                    assert np.abs(net.seen[-1].gather() - out).max() < 1e-12
                    assert abs(cost.item() - loss) < 1e-12
                    for tensor, unit in zip(net.seen, (FUSED, SIZE, 1)):
                        assert tensor.layout.units == (LENGTH, unit)
                        assert all(place % size == 0 for place, size in zip(tensor.box, (LENGTH, LENGTH, unit, unit)))
                    cost.backward()
                    optimizer.step()
                found = weights_of(net)
                assert max(np.abs(found[name] - weights[name]).max() for name in weights) < 1e-12
                assert_replicas_agree(grid, {name: each.value for name, each in net.named_parameters().items()})

            on_each_grid(comm, check, MANY_GRIDS[comm.size])


def test_nothing_moves_between_the_layers_but_what_they_say(comm):
    """No relayout is needed, because the next weight's rows are split in the same way as these columns."""

    def check(grid):
        net = Heads(grid)
        net.settle(INPUTS)
        x = spread(grid, next(batch(0)), batch_layout("y"))
        net(x)
        grid.ledger.reset()
        out = net(x)
        out.backward(spread(grid, next(batch(1))[:, :OUTPUTS], out.layout))
        assert grid.ledger.total(phase="relayout").received == 0
        assert grid.ledger.total(phase="redistribute").received == 0
        assert net.project.weight.layout.units == (1, FUSED) and net.back.weight.layout.units == (SIZE, 1)

    on_each_grid(comm, check)


def test_states_keep_units(comm):
    """A state that is split over data has its documented layout."""

    def check(grid):
        net = Heads(grid)
        optimizer = adamw(net.parameters(), shard_over_data=True)
        x, y = (spread(grid, each, batch_layout("y")) for each in batch(0))
        nn.mse(net(x), y).backward()
        expected = {name: each.grad.gather() for name, each in net.named_parameters().items()}
        optimizer.step()
        for name, value in optimizer.matrices().items():
            if name.endswith("mean"):
                parameter = name.split("/")[1]
                assert value.layout.units == net.named_parameters()[parameter].layout.units
                assert np.abs(value.gather() - 0.1 * expected[parameter]).max() < 1e-15

    on_each_grid(comm, check)


@pytest.mark.parallel([2], thorough=[1])
def test_what_does_not_fit_is_refused(comm, fails):
    with Grid(comm, (1, comm.size, 1)) as grid:
        fails(
            LayoutError,
            "the 10 outputs are no multiple of the unit, the 4 columns of one head",
            lambda: nn.Linear(grid, 4, 10, unit=4),
        )
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
        gradients = {name: each.grad.gather() for name, each in net.named_parameters().items()}
        return hidden.box.shape[0], cost.item(), gradients

    with alone() as grid:
        _, cost, gradients = trained(grid)
    with Grid(comm, (1, comm.size, 1)) as grid:
        rows, found, others = trained(grid)
    assert rows == 8 // comm.size and abs(found - cost) < 1e-12
    assert max(np.abs(others[name] - gradients[name]).max() for name in gradients) < 1e-12
