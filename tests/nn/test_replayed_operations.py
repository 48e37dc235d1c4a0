"""Operations, layers and losses in replayed steps: the bits are those of ordinary steps."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from loops import looped
from networks import ordinary
from samples import LIBRARIES, bits_of

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim, recorded_steps
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
STEPS, FIRST, ROWS, CLASSES = 9, 5, 12, 8
WEIGHTS = [1, 2, 0, 1, 0.5, 3, 1, 1]
GRIDS = {
    1: [((1, 1, 1), 1)],
    2: [((2, 1, 1), 1), ((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)],
    4: [((2, 1, 2), 1), ((1, 2, 1), 2), ((1, 1, 1), 4)],
}
CROSS_ENTROPY = {
    "plain": nn.cross_entropy,
    "sum": partial(nn.cross_entropy, reduction="sum"),
    "ignored": partial(nn.cross_entropy, ignore_index=3),
    "weighted": partial(nn.cross_entropy, weight=WEIGHTS),
    "both": partial(nn.cross_entropy, ignore_index=3, weight=WEIGHTS),
    "sum of both": partial(nn.cross_entropy, reduction="sum", ignore_index=3, weight=WEIGHTS),
    "own": lambda out, y: nn.cross_entropy(out, y, ignore_index=3) + 0.1 * nn.mean(out * out),
}


class Operations(nn.Module):
    """A function of most operations."""

    def __init__(self, grid, outputs, **options):
        self.grid, self.inner = grid, nn.Linear(grid, outputs, outputs, seed=5, **options)

    def forward(self, x):
        left, right = nn.split(self.inner(x), [1, 1])
        both = nn.multiply(nn.softmax(left), nn.log_softmax(right, 0))
        both = nn.divide(nn.subtract(both, nn.mean(left, 1)), nn.add(2, nn.sum(right * right)))
        narrow = nn.cast(nn.cast(nn.columns(x, 0, 1, 2), "float16"), "float32")
        return nn.add(x, nn.sum(nn.add(both, narrow), 1))


class MoreOperations(nn.Module):
    """A function of the other operations. It chooses rows by values, and by a matrix that is an attribute."""

    def __init__(self, grid, outputs, library):
        self.grid, self.inner = grid, nn.Linear(grid, outputs, outputs, seed=6, library=library)
        index = grid.library(library).from_numpy(np.array([[3], [0], [3], [1]]), "int64")
        self.index = DistMatrix.from_global(grid, index, layout=batch_layout(None))

    def forward(self, x):
        y = self.inner(x)
        scores = nn.exp(nn.clip(y @ y.T, -2, 2)) + nn.sqrt(abs(nn.log(1 + x**2)))[:, :1]
        best = nn.take(y, nn.argmax(scores, 0).T)
        chosen = nn.where(nn.relu(y), nn.maximum(y, best), nn.minimum(y, 0.5)) * nn.max(y, 0)
        few, half = nn.scatter_add(nn.take(chosen, self.index), self.index, 4), chosen.shape[0] // 2
        joined = nn.concat([few, *nn.split(chosen, [half, chosen.shape[0] - half], 0), nn.rows(y, 0, 1)])
        return x + joined[: x.shape[0]] * nn.min(chosen)


def mlp(grid, **options):
    return nn.MLP(grid, [12, 20, 16, CLASSES], "gelu", seed=0, norm=True, **options)


def blocks(grid, **options):
    first, last = nn.Linear(grid, 12, 16, seed=1, **options), nn.Linear(grid, 16, CLASSES, seed=3, **options)
    inner = nn.Sequential(grid, nn.RMSNorm(grid, 16, **options), nn.Dropout(grid, 0.3, seed=4))
    return nn.Sequential(grid, first, nn.Residual(nn.Recompute(inner)), last, Operations(grid, CLASSES, **options))


def more(grid, library):
    first = nn.Linear(grid, 12, CLASSES, seed=1, library=library)
    return nn.Sequential(grid, first, MoreOperations(grid, CLASSES, library))


NETWORKS = {
    "norm": mlp,
    "dropout": partial(mlp, dropout=0.3),
    "recompute": partial(mlp, dropout=0.3, recompute=2),
    "blocks": blocks,
    "more operations": more,
}


def trained(comm, shape, data, library, made, loss, parts, replayed):
    """Return losses, norms, weights and random state after some steps; the number of replayed steps; and the reason why
    the last one was not replayed."""
    with nullcontext() if replayed else ordinary(), Grid(comm, shape, data) as grid:
        net, random, found = nn.replay(made(grid, library=library)), np.random.default_rng(0), []
        optimizer = optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(STEPS):
            batches, last = [], step == STEPS - 1
            if last:  # without labels that count, the weights become NaN
                found += [bits_of(each.value.gather()) for each in net.parameters()]
            for _ in range(parts):
                x = random.standard_normal((ROWS // parts, 12)).astype("float32")
                y = np.full((len(x), 1), 3) if last else random.integers(0, CLASSES, (len(x), 1))
                matrices = (grid.library(library).from_numpy(each, str(each.dtype)) for each in (x, y))
                batches.append([DistMatrix.from_global(grid, each, layout=batch_layout()) for each in matrices])
            found.append(bits_of(np.array(train_step(net, optimizer, loss, batches))))
        replays = recorded_steps.Replays.of(net)
        return [*found, net.random_state()], replays.replayed, replays.problem


def compare(comm, *case):
    usual, *_ = trained(comm, *case, False)
    found, replayed, problem = trained(comm, *case, True)
    assert (replayed, problem) == (STEPS - FIRST, ""), case
    assert found == usual, case


@pytest.mark.parallel([2])
def test_replayed_steps_have_the_bits_of_ordinary_steps(comm):
    both = CROSS_ENTROPY["both"]
    compare(comm, (2, 1, 1), 1, "torch", NETWORKS["recompute"], both, 2)
    compare(comm, (1, 2, 1), 1, "numpy", NETWORKS["blocks"], both, 1)
    compare(comm, (1, 1, 2), 1, "standin", NETWORKS["dropout"], both, 1)
    compare(comm, (1, 1, 1), 2, "numpy", NETWORKS["more operations"], both, 1)


class Chosen(nn.Module):
    """An operation with numbers of the host."""

    def __init__(self, grid, function):
        self.grid, self.layer, self.function = grid, nn.Linear(grid, CLASSES, CLASSES, seed=1), function

    def forward(self, x):
        return self.function(self.layer(x), self.layer.weight)


@pytest.mark.parallel([1])
@looped(
    "function, reason",
    [
        (lambda x, weight: nn.take(x, range(ROWS)), "the indices of take are in a host array"),
        (lambda x, weight: nn.scatter_add(x, [0] * ROWS, ROWS), "the indices of scatter_add are in a host array"),
        (lambda x, weight: nn.grouped_linear(x, [weight, weight], [5, ROWS - 5]), "the sizes of the groups"),
    ],
)
def test_numbers_of_the_host_are_not_replayed(comm, function, reason):
    """They may differ from step to step."""
    with Grid(comm, "ddp") as grid:
        net = nn.replay(Chosen(grid, function))
        optimizer, x = optim.SGD(net.parameters(), lr=0.1), DistMatrix.random(grid, (ROWS, CLASSES), dtype="float32")
        for _ in range(STEPS):
            train_step(net, optimizer, nn.mse, [(x, x)])
        replays = recorded_steps.Replays.of(net)
        assert replays.replayed == 0 and reason in replays.problem and "step to step" in replays.problem


@pytest.mark.nightly
@pytest.mark.parallel([2], thorough=[1, 4])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_layers_on_every_grid(comm, network, library):
    for index, (shape, data) in enumerate(GRIDS[comm.size]):
        compare(comm, shape, data, library, NETWORKS[network], nn.cross_entropy, 1 + 2 * (index % 2))


@pytest.mark.nightly
@pytest.mark.parallel([2], thorough=[1, 4])
@pytest.mark.parametrize("loss", CROSS_ENTROPY)
def test_labels_that_count_change_from_step_to_step(comm, loss):
    for (shape, data), library, parts in zip(GRIDS[comm.size], ["numpy", "torch"] * 2, [1, 2, 2, 1]):
        compare(comm, shape, data, library, mlp, CROSS_ENTROPY[loss], parts)
    compare(comm, *GRIDS[comm.size][0], "standin", mlp, CROSS_ENTROPY[loss], 2)


@pytest.mark.parallel([1])
def test_another_weight_of_a_loss_is_another_step(comm):
    weights = list(WEIGHTS)
    with Grid(comm, "ddp") as grid:
        net, loss = mlp(grid), partial(nn.cross_entropy, weight=weights)
        x = DistMatrix.random(grid, (ROWS, 12), dtype="float32")
        before = recorded_steps.facts_of(net, loss, [(x, x)], 1.0)
        assert before == recorded_steps.facts_of(net, loss, [(x, x)], 1.0)
        weights[0] = 5
        assert before != recorded_steps.facts_of(net, loss, [(x, x)], 1.0)
        assert "of your own" in recorded_steps.facts_of(net, lambda out, y: nn.mse(out, y), [(x, x)], 1.0)
