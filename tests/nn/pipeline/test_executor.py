"""Steps of pipelines: all schedules give the bits of one another and the weights of one process; what is sent, and how
many micro-batches a rank holds; how a rank that waits is reported."""

import numpy as np
import pytest
from loops import given
from mpi4py import MPI
from networks import spread

from pmm3d import Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.pipeline.schedules import BY_NAME
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)

SIZES = (5, *(4 + number**2 % 7 for number in range(8)), 3)
"""Nine layers: of the numbers of stages tested, only 3 cuts them evenly."""
NAMES = [name for name in BY_NAME if name != "dualpipe"]


def make(grid):
    return nn.MLP(grid, SIZES, nn.gelu, seed=3, dtype="float64")


def micro_batches(grid, number, step):
    """Of 6 rows each, but the last one, which has 5."""
    random, batches = np.random.default_rng([number, step]), []
    for micro in range(number):
        rows = 6 - (micro == number - 1)
        x, y = random.standard_normal((rows, SIZES[0])), random.integers(0, SIZES[-1], (rows, 1))
        batches.append((spread(grid, x), spread(grid, y, batch_layout(None))))
    return batches


def trained(net, number, steps=2, loss=nn.cross_entropy, **options):
    """(losses and norms, weights of this rank's stages) after some steps."""
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, **options)
    figures = [train_step(net, optimizer, loss, micro_batches(net.grid, number, step), 0.5) for step in range(steps)]
    return figures, {name: each.gather() for name, each in net.named_parameters().items()}


def staged(comm, pipe, shape=(1, 1, 1), data=1):
    return Grid(comm, shape, data, axes={"pipe": pipe})


def alone(number, **options):
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
        return trained(make(grid), number, **options)


def refused(name, ranks, number):
    """Whether the schedule takes no such number of micro-batches."""
    return name == "dualpipe-v" and number < 2 * ranks


def same_as(expected, found, comm):
    """Compare figures, and the weights of all stages, with those of one process; return them, bit by bit."""
    figures, own = found
    assert np.abs(np.subtract(figures, expected[0])).max() < 1e-10
    everyones = {name: value for each in comm.allgather(own) for name, value in each.items()}
    assert everyones.keys() == expected[1].keys()
    assert max(np.abs(everyones[name] - value).max() for name, value in expected[1].items()) < 1e-10
    return figures, {name: value.tobytes() for name, value in sorted(everyones.items())}


@pytest.mark.parallel([2, 4], thorough=[3])
def test_all_schedules_give_the_same_bits_and_the_weights_of_one_process(comm):
    with staged(comm, comm.size) as grid:
        for number in (1, 2 * comm.size + 1):
            expected, first = alone(number), None
            for name in NAMES:
                if refused(name, comm.size, number):
                    continue
                with given(micro_batches=number, schedule=name):
                    found = same_as(expected, trained(nn.Pipeline(grid, make, schedule=name), number), comm)
                    first = first or found
                    assert found == first
