"""Gradients of graphs that share parts, change, are recomputed, or differ between the ranks. They are exact, with
integers, or compared with derivatives by numpy."""

from itertools import product

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    GRIDS,
    INPUT,
    MANY_GRIDS,
    VECTORS,
    assert_replicas_agree,
    batch_of,
    bits,
    gradients_of,
    inner,
    loss_of,
    network_of,
    over_grids,
    spread,
    weights_of,
    whole_numbers,
)
from samples import bits_of, integers

from pmm3d import Pmm3dError, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

pytestmark = pytest.mark.deadline(240)
on_all = pytest.mark.parallel([4], thorough=[1, 2, 8])
ROWS, SIZE, OUT = 11, 7, 5
X, U, V = integers((ROWS, SIZE), seed=1), integers((ROWS, OUT), seed=2), integers((ROWS, OUT), seed=3)


def linear(grid, inputs=SIZE, outputs=OUT, **options):
    """A linear layer with integers as weights."""
    return whole_numbers(nn.Linear(grid, inputs, outputs, dtype="float64", **options))


def leaf_of(grid, whole):
    return nn.Tensor(spread(grid, whole), requires_grad=True)


def synced(grid, now: bool):
    """As a context: whether the gradients of its passes are summed over data."""
    return nn.Tape.of(grid).set(syncing=now)


# Tapes that are shared


def branches(grid):
    """(trunk, two heads, the batch, the two losses)."""
    trunk, heads, x = linear(grid, SIZE, 6), [linear(grid, 6, OUT, cols="x") for _ in "ab"], leaf_of(grid, X)
    shared = trunk(x)
    return trunk, heads, x, [inner(head(shared), towards) for head, towards in zip(heads, (U, V))]


@on_all
@over_grids(MANY_GRIDS)
def test_a_second_pass_over_a_shared_trunk_is_refused_before_anything_changes(grid, fails):
    trunk, heads, x, losses = branches(grid)
    losses[0].backward()
    parameters = [*trunk.parameters(), *heads[0].parameters(), x]
    before = [bits_of(each.grad.gather()) for each in parameters]
    for _ in range(2):
        fails(Pmm3dError, "used already", losses[1].backward)
        assert [bits_of(each.grad.gather()) for each in parameters] == before
        assert all(each.grad is None for each in heads[1].parameters())
    trunk, heads, x, losses = branches(grid)
    (losses[0] + losses[1]).backward()
    weights = [np.asarray(layer.weight.gather()) for layer in (trunk, *heads)]
    through = U @ weights[1].T + V @ weights[2].T
    assert np.array_equal(gradients_of(trunk)["weight"], X.T @ through)
    assert np.array_equal(x.grad.gather(), through @ weights[0].T)


# Penalties on weights

PASSES = [["penalty"], ["penalty layer"], ["penalty layer"] * 2, ["penalty", "layer"], ["layer", "penalty", "layer"]]


@on_all
@over_grids()
@looped("passes", PASSES)
def test_a_penalty_on_the_weights_of_a_layer(grid, passes):
    """In the pass that uses the layer, in another one, and in a pass that is not summed over data; also of the bias."""
    targets = {"weight": 0.25 + integers((SIZE, OUT), seed=4), "bias": 0.25 + integers((1, OUT), seed=5)}
    moves = {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}

    def losses(layer, kinds):
        if "layer" in kinds:
            yield inner(layer(spread(grid, X)), U)
        for name, target in targets.items() if "penalty" in kinds else ():
            yield nn.mse(nn.scale(getattr(layer, name), 1), spread(grid, target, Layout()))

    for cols, flags in product("yx", product((False, True), repeat=len(passes) - 1)):
        if cols == "x" and any(flags) and not all_tests:
            continue
        layer = linear(grid, cols=cols)
        layer(spread(grid, X, Layout(INPUT.rows, cols)))
        for kinds, now in zip(passes, (*flags, True)):
            with synced(grid, now):
                sum(losses(layer, kinds), nn.Tensor(spread(grid, np.zeros((1, 1)), Layout()))).backward()
        found, weights = gradients_of(layer), weights_of(layer)
        for name, target in targets.items():
            away = 2 * (weights[name] - target) / target.size
            expected = sum(("layer" in kinds) * moves[name] + ("penalty" in kinds) * away for kinds in passes)
            assert np.abs(found[name] - expected).max() < 1e-12, (name, cols, flags)
        assert_replicas_agree(grid, {name: getattr(layer, name).grad for name in targets})


# Recomputed parts


class Scaled(nn.Module):
    """Three times the batch in training, and the batch itself otherwise."""

    def __init__(self, grid):
        self.grid = grid

    def forward(self, x):
        return nn.scale(x, 3 if self.training else 1)


@on_all
@over_grids(lambda ranks: GRIDS[ranks][-2:])
def test_a_block_that_is_computed_again_knows_whether_it_trains(grid):
    ones, v = np.ones((ROWS, SIZE)), integers((ROWS, SIZE), seed=7)
    for again in (nn.Recompute, lambda block: nn.Recompute(nn.Recompute(block))):
        net = nn.Sequential(grid, again(Scaled(grid)), again(nn.Dropout(grid, 0.5, seed=1)))
        with net.evaluating():
            assert np.array_equal(net(spread(grid, ones)).gather(), ones)
        out = net(x := leaf_of(grid, ones))
        assert set(np.unique(out.gather())) == {0, 6}
        inner(out, v).backward()
        assert np.array_equal(x.grad.gather(), out.gather() * v)
        net.train(False)
        assert np.array_equal(net(spread(grid, ones)).gather(), ones)


class Beside(nn.Module):
    """tanh(x) + another tensor."""

    def __init__(self, grid):
        self.grid, self.other = grid, None

    def forward(self, x):
        return nn.add(nn.tanh(x), self.other)


@on_all
@over_grids()
@looped("made", [True, False])
@looped("wanted", [True, False])
def test_a_part_that_is_computed_again_may_use_what_was_made_before(grid, made, wanted):
    """The gradient of this tensor is the sum over all its uses: before the part, after it, or none. made: whether an
    operation made the tensor. wanted: whether the input of the part needs a gradient."""
    x, leaf, v = 0.25 * X, 0.5 * integers((ROWS, SIZE), seed=6), integers((ROWS, SIZE), seed=7)
    slope = 1 - np.tanh(leaf) ** 2
    for uses, again in product((0, 1, 2), (True, False)[: 2 if all_tests or (made and wanted) else 1]):
        tensors = nn.Tensor(spread(grid, x), requires_grad=wanted), leaf_of(grid, leaf)
        block = Beside(grid)
        block.other = other = nn.tanh(tensors[1]) if made else tensors[1]
        before = nn.scale(other, 2)
        out = (nn.Recompute(block) if again else block)(tensors[0])
        spare = nn.tanh(tensors[1])
        sum([inner(before, v), inner(nn.scale(other, 3), v)][:uses], inner(out, v)).backward()
        towards = (1, 3, 6)[uses] * v * (slope if made else 1)
        assert np.abs(tensors[1].grad.gather() - towards).max() < 1e-14
        assert not wanted or np.abs(tensors[0].grad.gather() - v * (1 - np.tanh(x) ** 2)).max() < 1e-14
        inner(spare, v).backward()
        assert np.abs(tensors[1].grad.gather() - towards - v * slope).max() < 1e-14


@on_all
@over_grids()
def test_a_part_that_is_computed_again_may_use_a_weight_that_is_not_its_own(grid):
    """Inside a function, with uses outside too, and a batch that needs no gradient. Exact."""

    layer = linear(grid, SIZE, SIZE)
    layer(spread(grid, X))
    again = nn.Recompute(nn.Sequential(grid, lambda x: nn.linear(x, layer.weight, layer.bias)))
    v = integers((ROWS, SIZE), seed=7)
    for uses in (1, 2):
        layer.weight.grad = layer.bias.grad = None
        out = again(spread(grid, X))
        inner(nn.add(out, layer(spread(grid, X))) if uses == 2 else out, v).backward()
        assert np.array_equal(gradients_of(layer)["weight"], uses * X.T @ v)
        assert np.array_equal(gradients_of(layer)["bias"], uses * v.sum(0, keepdims=True))


# Steps


@on_all
@over_grids(lambda ranks: MANY_GRIDS[ranks][::2])
def test_no_step_is_taken_with_gradients_that_are_not_summed(grid, fails):
    """After passes in no_sync only, replicas would become different. Refused on every grid, also of one rank. Weights
    and gradients do not change, and a later pass that sums makes the step possible."""

    for shard in (False, True):
        net = network_of(grid, VECTORS)
        optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data=shard)
        before = bits(weights_of(net))
        with nn.no_sync(grid):
            loss_of(net, VECTORS, *batch_of(VECTORS, 0)).backward()
        fails(Pmm3dError, "no_sync", optimizer.step)
        assert bits(weights_of(net)) == before and optimizer.steps == 0
        loss_of(net, VECTORS, *batch_of(VECTORS, 1)).backward()
        optimizer.step()
        assert_replicas_agree(grid, {name: each.value for name, each in net.named_parameters().items()})


@on_all
@over_grids(lambda ranks: MANY_GRIDS[ranks][::2])
def test_a_write_to_a_shard_is_seen(grid):
    """Between steps and evaluations, also through an array that was taken earlier, with and without kept gathered
    weights."""
    for reshard, early in product((None, False, True), (False, True)):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=reshard)
        layer = linear(grid, bias=False)
        optimizer = optim.SGD(layer.parameters(), 0.0)
        taken, expected = layer.weight.local, np.array(layer.weight.gather())
        with layer.evaluating():
            layer(spread(grid, X))
        for trains in (False, True, True, False):
            local = taken if early else layer.weight.local
            local *= 2
            expected *= 2
            if not trains:
                with layer.evaluating():
                    assert np.array_equal(layer(spread(grid, X)).gather(), X @ expected)
                continue
            out = layer(x := leaf_of(grid, X))
            assert np.array_equal(out.gather(), X @ expected)
            inner(out, U).backward()
            assert np.array_equal(x.grad.gather(), U @ expected.T)
            optimizer.step()


# Several optimizers


@on_all
@over_grids(lambda ranks: MANY_GRIDS[ranks][::2])
def test_a_gradient_is_a_true_matrix_whatever_optimizers_there_are(grid):
    """In its own layout and whole, for one batch or two, before and after its sum over data."""
    layer, expected = linear(grid), {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}
    for shard in (None, True, False, True):
        optimizer = None if shard is None else optim.SGD(layer.parameters(), 0.5, shard_over_data=shard)
        for flags in ([True], [False], [False, True], [True, True], [True, False], [False, False, True]):
            layer.weight.grad = layer.bias.grad = None
            for now in flags:
                with synced(grid, now):
                    inner(layer(spread(grid, X)), U).backward()
            found = {name: getattr(layer, name).grad for name in expected}
            for name, grad in found.items():
                assert np.array_equal(grad.gather(), len(flags) * expected[name]), (name, flags)
                assert tuple(grad.local.shape) == grad.box.shape
            if flags[-1]:
                assert_replicas_agree(grid, found)
        del optimizer


@on_all
@over_grids(lambda ranks: MANY_GRIDS[ranks][::2])
@looped("sharded_first", [True, False])
def test_two_optimizers_of_the_same_parameters(grid, sharded_first):
    """One with its state split over data, one without, in turns. Each has the momentum of its own steps. Exact."""
    moves = {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}
    norm = np.sqrt(sum((move**2).sum() for move in moves.values()))
    layer, kinds = linear(grid), (sharded_first, not sharded_first)
    optimizers = [optim.SGD(layer.parameters(), 0.5, 0.5, shard_over_data=shard) for shard in kinds]
    expected, velocity = weights_of(layer), [0, 0]
    for turn in (0, 1, 1, 0, 1, 0):
        inner(layer(spread(grid, X)), U).backward()
        assert {each.gradient_norm() for each in optimizers} == {norm}
        optimizers[turn].step()
        velocity[turn] = 0.5 * velocity[turn] + 1
        expected = {name: value - 0.5 * velocity[turn] * moves[name] for name, value in expected.items()}
        assert bits(weights_of(layer)) == bits(expected), turn
        assert_replicas_agree(grid, {name: getattr(layer, name).value for name in expected})
