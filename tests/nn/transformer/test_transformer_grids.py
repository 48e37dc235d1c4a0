"""Transformers on every grid of x, y, z, data, seq and pipe, compared with torch in one process with the same
weights."""

from functools import partial

import numpy as np
import pytest
from loops import given
from mpi_runner.plugin import all_tests
from networks import assert_replicas_agree
from samples import TESTED, to_numpy
from torch_reference import by_rank_0
from transformer_reference import IGNORED, Case, all_grids, batch_on, fill, of_torch, steps_of_torch

from pmm3d import Grid, nn
from pmm3d.nn import optim
from pmm3d.nn.training.step import step_agreement, train_step

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(600)]

CLOSE = 1e-10
CASES = {
    "gpt": Case(),
    "shared head, window": Case(kv_heads=1, tied=False, window=2),
    "llama": Case("Llama", hidden=24, heads=6, kv_heads=3, mlp=66, tied=False, sequence=5),
    "llama, tied, window": Case("Llama", hidden=16, heads=4, kv_heads=2, window=4, sequence=7, batch=2),
    "encoder": Case("Encoder", heads=2, sequence=9, batch=2),
}
OPTIONS = [{}, {"activations": "sharded"}]
LOSS = partial(nn.cross_entropy, ignore_index=IGNORED)


def on_grids(comm, body, grids=None):
    """body(number, grid) on each grid of this number of ranks."""
    for number, axes in enumerate(all_grids(comm.size) if grids is None else grids):
        sizes = dict(axes)
        shape = tuple(sizes.pop(axis, 1) for axis in "xyz")
        further = {axis: size for axis, size in sizes.items() if axis != "data" and size > 1}
        with given(**axes), Grid(comm, shape, sizes.get("data", 1), device_transport="direct", **further) as grid:
            body(number, grid)


def assert_as_torch(grid, case, expected, library=TESTED, **options):
    loss, logits, gradients = expected
    make = partial(case.make, library=library, **options)
    close = lambda found, wanted: np.abs(to_numpy(found) - wanted).max(initial=0) < CLOSE
    if grid.shape.stages == 1:
        net = fill(make(grid), library)
        tokens, labels = batch_on(grid, case, library=library)
        out = net(tokens)
        assert out.shape == logits.shape and out.dtype == "float64" and close(out.gather(), logits)
        found = LOSS(out, labels)
        found.backward()
        found, slopes = found.item(), gradients_here(net)
    else:
        net = fill(nn.Pipeline(grid, make), library)
        with net.evaluating():
            assert close(net(next(batch_on(net.grid, case, library=library))).gather(), logits)
        found, slopes = train_in_parts(net, case, library)
    assert abs(found - loss) < CLOSE
    assert set().union(*grid.comm.allgather(set(slopes))) == set(gradients)
    for name, slope in slopes.items():
        with given(parameter=name):
            assert slope.shape == gradients[name].shape and close(slope.gather(), gradients[name])
    assert_replicas_agree(net.grid, slopes)


def gradients_here(net):
    """Name -> gradient, for the parameters of this rank's stage."""
    return {name: parameter.grad for name, parameter in net.named_parameters().items()}


def train_in_parts(net, case, library):
    """(loss, `gradients_here`) of a step of two micro-batches of different sizes, before the optimizer clears the
    gradients."""
    parts = [tuple(batch_on(net.grid, case, library=library, part=part)) for part in (slice(0, 1), slice(1, None))]
    slopes = {}

    def agree(loss, square):
        slopes.update(gradients_here(net))
        return step_agreement(net.grid, loss, square, whole=net.whole)

    found, _ = train_step(net, optim.SGD(net.parameters(), lr=0.0), LOSS, parts, agree=agree)
    return found, slopes


def of_case(case, grid):
    """The case, with enough layers for the stages of the grid."""
    return case._replace(layers=max(case.layers, grid.shape.stages - 2))


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_are_those_of_torch(comm, name):
    """In turns with replicated and with sharded activations. With --all, both on each grid."""
    depths = sorted({max(CASES[name].layers, stages - 2) for stages in (1, 4, 8) if comm.size % stages == 0})
    expected = {layers: by_rank_0(comm, lambda: of_torch(CASES[name]._replace(layers=layers))) for layers in depths}

    def check(number, grid):
        case = of_case(CASES[name], grid)
        for options in OPTIONS if all_tests else [OPTIONS[number % 2]]:
            with given(options=options):
                assert_as_torch(grid, case, expected[case.layers], **options)

    grids = all_grids(comm.size)
    on_grids(comm, check, grids if all_tests else grids[[*CASES].index(name) % 2 :: 2])


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_steps_of_adamw_from_the_initial_weights_are_those_of_torch(comm, name):
    case, options = CASES[name], {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    losses, weights = by_rank_0(comm, lambda: steps_of_torch(case, 5, **options))

    def check(number, grid):
        net = case.make(grid)
        optimizer = optim.AdamW(net.parameters(), **options)
        found = [train_step(net, optimizer, LOSS, [tuple(batch_on(grid, case, step))])[0] for step in range(5)]
        assert np.abs(np.subtract(found, losses)).max() < CLOSE
        for name, parameter in net.named_parameters().items():
            with given(parameter=name):
                assert np.abs(to_numpy(parameter.gather()) - weights[name]).max() < 1e-8

    on_grids(comm, check, [{"x": comm.size}, {"z": comm.size}, {"data": comm.size}])
