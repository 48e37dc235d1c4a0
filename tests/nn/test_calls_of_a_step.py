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
from pmm3d.nn.contexts import unchanged
from pmm3d.nn.recorded_passes import Passes
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.numpy_only("the limits are those of numpy arrays")
MLP_LIMITS = {1: 268, 4: 462}
"""Number of ranks -> limit of the calls of a replayed step of the MLP: 3% above 260 and 449. An ordinary step takes
1,582 and 1,825. Other versions of Python and numpy have other counts."""
PIPELINE_LIMIT = 1_323
"""Limit of the calls of a replayed 1F1B step of 4 stages: 3% above 1,285."""
GPT_LIMIT = 3_976
"""Limit of the calls of a replayed step of a GPT of 4 layers on one rank: 3% above 3,860."""
EVALUATION_LIMIT = 76
"""Limit of the calls of a replayed forward pass of the MLP: 3% above 73. An ordinary pass takes 321."""
GENERATION_LIMIT = 898
"""Limit of the calls of a token of a GPT of 2 layers: 3% above 872. An ordinary token takes 4,093. Of the calls, 746
are of the program, which offers the candidates too."""
WARM_UP, STEPS = 10, 3


def calls_of_a_step(grid, net, micro_batches, rows, width) -> float:
    """Mean of `STEPS` replayed steps, without polling."""
    random = np.random.default_rng(0)
    matrix = lambda: DistMatrix.from_global(grid, random.standard_normal((rows, width)).astype("float32"), layout=INPUT)
    return calls_of_batches(net, nn.mse, [(matrix(), matrix()) for _ in range(micro_batches)])


def calls_of_batches(net, loss, batches) -> float:
    optimizer = optim.AdamW(net.parameters(), lr=1e-3)
    step = lambda: train_step(net, optimizer, loss, batches)
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


@pytest.mark.parallel([1])
def test_calls_of_a_step_of_a_gpt(comm):
    with Grid(comm) as grid:
        net = nn.GPT(grid, vocabulary=32, positions=16, layers=4, hidden=16, heads=4, seed=0)
        tokens, layout = np.random.default_rng(0).integers(0, 32, (2, 17)), token_layout(grid, 16)
        spread = lambda part: DistMatrix.from_global(grid, part.reshape(-1, 1).copy(), layout=layout)
        calls = calls_of_batches(net, nn.cross_entropy, [(spread(tokens[:, :-1]), spread(tokens[:, 1:]))])
    assert comm.rank or calls < GPT_LIMIT, calls


@pytest.mark.parallel([1])
def test_calls_of_a_pass_of_an_evaluation(comm):
    with Grid(comm, (1, 1, 1)) as grid:
        net = nn.MLP(grid, [8, 8, 8], seed=0)
        x = DistMatrix.from_global(grid, np.ones((8, 8), "float32"), layout=INPUT)
        with net.evaluating(), unchanged(grid):
            for _ in range(WARM_UP):
                Passes.of(net).output(net, x)
            calls = calls_of(lambda: Passes.of(net).output(net, x), STEPS)
    assert calls < EVALUATION_LIMIT, calls


@pytest.mark.parallel([1])
def test_calls_of_a_generated_token(comm):
    """Calls of 8 more tokens, whose passes are replayed."""
    with Grid(comm, (1, 1, 1)) as grid:
        net = nn.GPT(grid, vocabulary=16, positions=64, layers=2, hidden=16, heads=2, seed=0)
        nn.generate(net, [[1, 2]], 24)
        few, many = (calls_of(lambda size=size: nn.generate(net, [[1, 2]], size)) for size in (16, 24))
    assert (many - few) / 8 < GENERATION_LIMIT, (many - few) / 8
