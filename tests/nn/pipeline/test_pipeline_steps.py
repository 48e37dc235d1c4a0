"""Networks in stages train as the same networks in one process."""

from contextlib import suppress

import numpy as np
import pytest
from loops import given, looped
from mpi_runner import plugin
from networks import INPUT, Fork, Join, Tied, alone, bits, largest_difference, spread, weights_of
from samples import TESTED
from torch_reference import by_rank_0

from pmm3d import Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dense import weight_layout
from pmm3d.nn.layers import parameter
from pmm3d.nn.pipeline import PipelineError, schedule_names, schedule_of
from pmm3d.nn.pipeline.executor import Executor
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(300)
SIZES, ROWS, STEPS = (6, 11, 9, 7, 10, 5), 22, 2
GRIDS = {
    1: [((1, 1, 1), 1, 1)],
    2: [((1, 1, 1), 1, 2)],
    3: [((1, 1, 1), 1, 3)],
    4: [((1, 1, 1), 1, 4), ((1, 1, 2), 1, 2), ((1, 1, 1), 2, 2), ((2, 1, 1), 1, 2)],
    8: [((1, 1, 1), 1, 8), ((2, 1, 1), 1, 4), ((1, 2, 1), 2, 2), ((2, 1, 2), 1, 2)],
}
"""Number of ranks -> (shape, data, pipe)."""


def grids(comm):
    for shape, data, pipe in GRIDS[comm.size]:
        with given(grid=shape, data=data, pipe=pipe), Grid(comm, shape, data, axes={"pipe": pipe}) as grid:
            yield grid


class Labelled(nn.Module):
    """The stages pass on the labels, as integers."""

    def __init__(self, layer, last=False):
        self.grid, self.layer, self.last = layer.grid, layer, last

    def forward(self, x, labels=None):
        labels = x if labels is None else labels
        made = self.layer(x)
        return made + nn.relayout(self.last(labels), made.layout) if self.last else (made, labels)


def linear(grid, seed):
    return nn.Linear(grid, 6, 6, seed=seed, dtype="float64")


def tied(grid):
    weight = parameter(grid, (6, 6), weight_layout("y"), seed=9, bound=0.5, dtype="float64")
    layers = [linear(grid, 1), nn.tanh, linear(grid, 2), nn.gelu, *(linear(grid, 3 + number) for number in range(5))]
    return nn.Sequential(grid, Tied(weight), *layers, Tied(weight))


def forked(grid):
    part = lambda: (Fork(grid, 6), Join(grid, 6), nn.tanh, linear(grid, 1), linear(grid, 3))
    return nn.Sequential(grid, *part(), *part())


def labelled(grid):
    first, last = (nn.Embedding(grid, 6, 6, seed=seed, dtype="float64") for seed in (7, 8))
    layers = (Labelled(linear(grid, seed)) for seed in range(7))
    return nn.Sequential(grid, Labelled(first), *layers, Labelled(linear(grid, 9), last))


def deep(grid, **options):
    return nn.MLP(grid, (6, *[8] * 8, 6), dropout=0.4, seed=3, dtype="float64", **options)


NETWORKS = {
    "plain": lambda grid: nn.MLP(grid, SIZES, "gelu", norm=True, seed=3, dtype="float64"),
    "dropout": deep,
    "recompute": lambda grid: deep(grid, recompute=True, norm=True),
    "tied": tied,
    "forked": forked,
    "labelled": labelled,
}


def batch_of(name, step):
    random = np.random.default_rng(step)
    x = random.integers(0, 6, (ROWS, 1)) if name == "labelled" else random.standard_normal((ROWS, 6))
    return x, random.standard_normal((ROWS, 5 if name == "plain" else 6))


def trained(net, name, micro_batches, dtype="float64", library=TESTED, scale=None, **options):
    """(losses and norms, weights of this rank's stage) after some steps."""
    optimizer, figures, grid = optim.AdamW(net.parameters(), lr=1e-2, **options), [], net.grid
    layout = batch_layout(None) if name == "labelled" else INPUT
    for step in range(STEPS):
        parts = [np.array_split(each, micro_batches) for each in batch_of(name, step)]
        batches = [
            (spread(grid, x, layout, library, dtype), spread(grid, y, batch_layout(None), library, dtype))
            for x, y in zip(*parts)
        ]
        figures += train_step(net, optimizer, nn.mse, batches, 0.5, scale=scale)
    return np.array(figures), weights_of(net)


def of_one_process(comm, make, name, micro_batches, **options):
    """What `trained` returns for the whole network, on rank 0, for all ranks."""

    def train_alone():
        with alone() as single:
            return trained(make(single), name, micro_batches, **options)

    return by_rank_0(comm, train_alone)


def compare(grid, net, expected, name, micro_batches, **options):
    """Train, and compare with one process. Return the bits of losses and of this rank's weights."""
    losses, weights = trained(net, name, micro_batches, **options)
    assert np.abs(losses - expected[0]).max() < 1e-10
    assert largest_difference(weights, {key: expected[1][key] for key in weights}) < 1e-10
    assert set().union(*grid.comm.allgather({*weights})) == expected[1].keys()
    return losses.tobytes(), bits(weights)


def schedules(pipe, micro_batches, layers):
    """Names of the schedules that accept these numbers."""
    for name in schedule_names():
        with suppress(PipelineError):
            if len(schedule_of(name, pipe, micro_batches).chains[0]) <= layers:
                yield name


def turn(comm, number, values):
    """The values that are tested on grid `number`: each value on one grid, with --all on each."""
    return [*values] if plugin.all_tests else [*values][number :: len(GRIDS[comm.size])]


@pytest.mark.parallel([1, 2, 4], thorough=[3, 8])
def test_all_schedules_train_as_one_process_and_give_the_same_bits(comm):
    """With micro-batches of different sizes, and with fewer micro-batches than ranks."""
    for number, grid in enumerate(grids(comm)):
        for micro_batches in (1, 3, 8) if plugin.all_tests else (1, max(2, 2 * grid.shape.stages)):
            expected, found = of_one_process(comm, NETWORKS["plain"], "plain", micro_batches), {}
            for schedule in turn(comm, number, schedules(grid.shape.stages, micro_batches, 9)):
                with given(micro_batches=micro_batches, schedule=schedule):
                    net = nn.Pipeline(grid, NETWORKS["plain"], schedule=schedule)
                    losses, weights = compare(grid, net, expected, "plain", micro_batches)
                    for name, value in [*weights.items(), ("losses", losses)]:
                        assert schedule == "dualpipe" or found.setdefault(name, value) == value


@pytest.mark.parallel([1, 2, 4], thorough=[3, 8])
def test_networks_of_any_kind_train_in_uneven_stages_as_in_one_process(comm):
    for number, grid in enumerate(grids(comm)):
        pipe = grid.shape.stages
        for name in turn(comm, number, NETWORKS):
            with given(name=name):
                layers = 8 if name == "forked" else 9
                options = {"cut": [layers - pipe + 1] + [1] * (pipe - 1)}
                if name in ("dropout", "recompute", "labelled") and 2 * pipe <= layers:
                    options = {"schedule": "interleaved-zero-bubble"}
                net = nn.Pipeline(grid, NETWORKS[name], **options)
                compare(grid, net, of_one_process(comm, NETWORKS[name], name, 4), name, 4)


TIED = [("tied", "1f1b"), ("tied", "zb-v"), ("tied", "dualpipe-v"), ("plain", "dualpipe"), ("tied", "dualpipe")]


@pytest.mark.parallel([2, 4])
def test_tied_weights_and_copies_stay_equal_and_count_once(comm):
    for number, grid in enumerate(grids(comm)):
        pipe, shards, found = grid.shape.stages, ("states", "gradients") if grid.data.size > 1 else (False,), {}
        for name, schedule in turn(comm, number, TIED):
            expected = of_one_process(comm, NETWORKS[name], name, 2 * pipe)
            for shard in shards:
                with given(name=name, schedule=schedule, shard=shard):
                    net = nn.Pipeline(grid, NETWORKS[name], schedule=schedule)
                    _, weights = compare(grid, net, expected, name, 2 * pipe, shard_over_data=shard)
                    held = {} if schedule == "dualpipe" else found.setdefault((name, shard), {})
                    for key, value in (item for each in grid.comm.allgather(weights) for item in each.items()):
                        assert held.setdefault(key, value) == value
                    assert schedule == "dualpipe" or net.tied == {"0.weight": (0, max(net.rank_of))}


@pytest.mark.parallel([2], thorough=[4])
@looped(
    "precision, library, first",
    [("float16", "numpy", 2.0**8), ("float16", "numpy", 2.0**40), ("bfloat16", "torch", 1.0)],
)
def test_mixed_precision_with_one_loss_scale_is_that_of_one_process(comm, precision, library, first):
    """A scale of 2^40 overflows, and all stages skip the step."""
    make = lambda grid: nn.MLP(grid, SIZES, "gelu", seed=3, precision=precision, library=library)
    scales = [optim.LossScale(first, most=2.0**41) for _ in range(2)]
    options = {"dtype": "float32", "library": library}
    with alone() as single:
        expected = trained(make(single), "plain", 3, scale=scales[0], **options)
    with Grid(comm, (1, 1, 1), axes={"pipe": comm.size}) as grid:
        losses, weights = trained(nn.Pipeline(grid, make), "plain", 3, scale=scales[1], **options)
        assert np.array_equal(losses, expected[0], equal_nan=True) and scales[0].value == scales[1].value
        assert bits(weights) == bits({key: expected[1][key] for key in weights})


@pytest.mark.parallel([2])
def test_a_gradient_that_is_not_finite_in_one_stage_is_told_to_all(comm):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        net = nn.Pipeline(grid, lambda stage: nn.MLP(stage, SIZES, seed=3, precision="float16"))
        optimizer, scale = optim.SGD(net.parameters(), lr=1e-2), optim.LossScale()
        x, y = (spread(net.grid, each, batch_layout(None), dtype="float32") for each in batch_of("plain", 0))
        executor = Executor(net, [x], scale.value)
        executor.run((lambda micro, output: nn.mse(output, y)) if executor.has_last_stage else None)
        if net.index == 1:
            optimizer.parameters[0].grad_buffer.local[...] = np.inf
        assert optimizer._non_finite() == "the gradient of 6.weight is not finite"
        before = bits(weights_of(net))
        assert not scale.step(optimizer) and scale.skipped == 1 and bits(weights_of(net)) == before
