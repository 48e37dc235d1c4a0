"""Python calls of a training step, which are most of the time of a small one.

Counts, and no times: `calls_of` counts the calls on rank 0. Calls that poll while a message
has not arrived are not compared. `benchmarks/small_step.py` measures the times.
"""

import numpy as np
import pytest
from calls import calls_of
from networks import INPUT

from pmm3d import DistMatrix, Grid, nn
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.numpy_only("the limits are those of numpy arrays")
MLP_LIMITS = {1: 400, 4: 667}
"""Number of ranks -> limit of the calls of a replayed step of the MLP: 3% above 388 and 647. An ordinary step takes
1,561 and 1,864. Other versions of Python and numpy have other counts."""
PIPELINE_LIMIT = 1_738
"""Limit of the calls of a replayed 1F1B step of 4 stages: 3% above 1,687."""
WARM_UP, STEPS = 10, 3


def calls_of_a_step(grid, net, micro_batches, rows, width) -> float:
    """Mean of `STEPS` replayed steps, without polling."""
    optimizer, random = optim.AdamW(net.parameters(), lr=1e-3), np.random.default_rng(0)
    matrix = lambda: DistMatrix.from_global(grid, random.standard_normal((rows, width)).astype("float32"), layout=INPUT)
    batches = [(matrix(), matrix()) for _ in range(micro_batches)]
    step = lambda: train_step(net, optimizer, nn.mse, batches)
    for _ in range(WARM_UP):
        step()
    return calls_of(step, STEPS)


@pytest.mark.parallel([1, 4])
def test_calls_of_a_step_of_an_mlp(comm, nranks):
    shape, data = {1: ((1, 1, 1), 1), 4: ((2, 1, 1), 2)}[nranks]
    with Grid(comm, shape, data) as grid:
        calls = calls_of_a_step(grid, nn.MLP(grid, [8, 8, 8], seed=0), 1, 8, 8)
    assert comm.rank or calls < MLP_LIMITS[nranks], calls


@pytest.mark.parallel([4])
def test_calls_of_a_1f1b_step(comm):
    """16 layers in 4 stages, and 8 micro-batches."""
    with Grid(comm, (1, 1, 1), pipe=4) as grid:
        net = nn.Pipeline(grid, lambda stage: nn.MLP(stage, [32] * 17, seed=0), schedule="1f1b")
        calls = calls_of_a_step(grid.stage, net, 8, 4, 32)
    assert comm.rank or calls < PIPELINE_LIMIT, calls
