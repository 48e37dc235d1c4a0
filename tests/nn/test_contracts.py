"""Gradients of graphs that share parts, change, are recomputed, or differ between the ranks. They are exact, with
integers, or compared with derivatives by numpy."""

from itertools import product

import numpy as np
import pytest
from loops import given
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
    on_each_grid,
    spread,
    weights_of,
    whole_numbers,
)
from samples import bits_of, integers

from pmm3d import Grid, Pmm3dError, nn
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
def test_a_second_pass_over_a_shared_trunk_is_refused_before_anything_changes(comm, fails):
    def check(grid):
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

    on_each_grid(comm, check, MANY_GRIDS[comm.size])


@on_all
def test_passes_may_share_what_no_operation_made(comm):
    """They may share a batch and a weight, but no result of an operation. The gradients add up."""

    def check(grid):
        layer, x = linear(grid), leaf_of(grid, X)
        losses = [inner(layer(x), towards) for towards in (U, V)]
        for loss in losses:
            loss.backward()
        assert np.array_equal(gradients_of(layer)["weight"], X.T @ (U + V))
        assert np.array_equal(x.grad.gather(), (U + V) @ np.asarray(layer.weight.gather()).T)

    on_each_grid(comm, check)


# Penalties on weights

PASSES = [["penalty"], ["penalty layer"], ["penalty layer"] * 2, ["penalty", "layer"], ["layer", "penalty", "layer"]]


@on_all
def test_a_penalty_on_the_weights_of_a_layer(comm):
    """In the pass that uses the layer, in another one, and in a pass that is not summed over data; also of the bias."""
    for passes in PASSES:
        with given(passes=passes):
            targets = {"weight": 0.25 + integers((SIZE, OUT), seed=4), "bias": 0.25 + integers((1, OUT), seed=5)}
            moves = {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}

            def losses(grid, layer, kinds):
                if "layer" in kinds:
                    yield inner(layer(spread(grid, X)), U)
                for name, target in targets.items() if "penalty" in kinds else ():
                    yield nn.mse(nn.scale(getattr(layer, name), 1), spread(grid, target, Layout()))

            def check(grid):
                for cols, flags in product("yx", product((False, True), repeat=len(passes) - 1)):
                    if cols == "x" and any(flags) and not all_tests:
                        continue
                    layer = linear(grid, cols=cols)
                    layer(spread(grid, X, Layout(INPUT.rows, cols)))
                    for kinds, now in zip(passes, (*flags, True)):
                        with synced(grid, now):
                            total = sum(losses(grid, layer, kinds), nn.Tensor(spread(grid, np.zeros((1, 1)), Layout())))
                            total.backward()
                    found, weights = gradients_of(layer), weights_of(layer)
                    for name, target in targets.items():
                        away = 2 * (weights[name] - target) / target.size
                        expected = sum(
                            ("layer" in kinds) * moves[name] + ("penalty" in kinds) * away for kinds in passes
                        )
                        assert np.abs(found[name] - expected).max() < 1e-12, (grid, name, cols, flags)
                    assert_replicas_agree(grid, {name: getattr(layer, name).grad for name in targets})

            on_each_grid(comm, check)


# Recomputed parts


class Scaled(nn.Module):
    """Three times the batch in training, and the batch itself otherwise."""

    def __init__(self, grid):
        self.grid = grid

    def forward(self, x):
        return nn.scale(x, 3 if self.training else 1)


@on_all
def test_a_block_that_is_computed_again_knows_whether_it_trains(comm):
    ones, v = np.ones((ROWS, SIZE)), integers((ROWS, SIZE), seed=7)

    def check(grid):
        for again in (nn.Recompute, lambda block: nn.Recompute(nn.Recompute(block))):
            net = nn.Sequential(grid, again(Scaled(grid)), again(nn.Dropout(grid, 0.5, seed=1)))
            with net.evaluating():
                assert np.array_equal(net(spread(grid, ones)).gather(), ones)
            x = leaf_of(grid, ones)
            out = net(x)
            assert set(np.unique(out.gather())) == {0, 6}
            inner(out, v).backward()
            assert np.array_equal(x.grad.gather(), out.gather() * v)
            net.train(False)
            assert np.array_equal(net(spread(grid, ones)).gather(), ones)

    on_each_grid(comm, check, GRIDS[comm.size][-2:])


@on_all
def test_the_random_state_has_dropout_that_is_computed_again(comm):
    def check(grid):
        net = nn.Sequential(grid, nn.Recompute(nn.Dropout(grid, 0.5)), nn.Recompute(Scaled(grid)))
        start = net.random_state()
        assert list(start.values()) == [0]
        outs = [bits_of(net(spread(grid, X)).gather()) for _ in range(3)]
        assert list(net.random_state().values()) == [3] and len(set(outs)) == 3
        net.set_random_state(start)
        assert bits_of(net(spread(grid, X)).gather()) == outs[0]

    on_each_grid(comm, check, GRIDS[comm.size][-2:])


@pytest.mark.parallel([1])
def test_names_of_a_part_that_is_computed_again(comm):
    """They are the same as without recomputation, so a checkpoint fits both."""
    with Grid(comm) as grid:
        make = lambda again: nn.Sequential(
            grid,
            again(
                nn.Sequential(grid, nn.Linear(grid, 3, 3), nn.Dropout(grid), nn.Residual(again(nn.Linear(grid, 3, 3))))
            ),
        )
        names = [(list(net.named_parameters()), net.random_state()) for net in map(make, (lambda x: x, nn.Recompute))]
        assert names[0] == names[1]
        assert names[1] == (["0.0.weight", "0.0.bias", "0.2.module.weight", "0.2.module.bias"], {"0.1": 0})


class Beside(nn.Module):
    """tanh(x) + another tensor."""

    def __init__(self, grid):
        self.grid, self.other = grid, None

    def forward(self, x):
        return nn.add(nn.tanh(x), self.other)


OTHERS = {"made": lambda leaf: nn.tanh(leaf), "a leaf": lambda leaf: leaf}


@on_all
def test_a_part_that_is_computed_again_may_use_what_was_made_before(comm):
    """The gradient of this tensor is the sum over all its uses: before the part, after it, or none."""
    for kind in OTHERS:
        for wanted in [True, False]:
            every = all_tests or (kind == "made" and wanted)
            with given(kind=kind, wanted=wanted):
                x, leaf, v = 0.25 * X, 0.5 * integers((ROWS, SIZE), seed=6), integers((ROWS, SIZE), seed=7)

                def check(grid):
                    for uses, again in product((0, 1, 2), (True, False)[: 2 if every else 1]):
                        tensors = nn.Tensor(spread(grid, x), requires_grad=wanted), leaf_of(grid, leaf)
                        block, other = Beside(grid), OTHERS[kind](tensors[1])
                        block.other = other
                        before = nn.scale(other, 2)
                        out = (nn.Recompute(block) if again else block)(tensors[0])
                        spare = nn.tanh(tensors[1])
                        total = inner(out, v)
                        total = sum([inner(before, v), inner(nn.scale(other, 3), v)][:uses], total)
                        total.backward()
                        slope = 1 - np.tanh(leaf) ** 2
                        towards = (1, 3, 6)[uses] * v * (slope if kind == "made" else 1)
                        assert np.abs(tensors[1].grad.gather() - towards).max() < 1e-14
                        assert not wanted or np.abs(tensors[0].grad.gather() - v * (1 - np.tanh(x) ** 2)).max() < 1e-14
                        inner(spare, v).backward()
                        assert np.abs(tensors[1].grad.gather() - towards - v * slope).max() < 1e-14

                on_each_grid(comm, check)


@on_all
def test_a_part_that_is_computed_again_may_use_a_weight_that_is_not_its_own(comm):
    """Inside a function, with uses outside too, and a batch that needs no gradient. Exact."""

    def check(grid):
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

    on_each_grid(comm, check)


# Steps


@on_all
def test_no_step_is_taken_with_gradients_that_are_not_summed(comm, fails):
    """After passes in no_sync only, replicas would become different. Refused on every grid, also of one rank. Weights
    and gradients do not change, and a later pass that sums makes the step possible."""

    def check(grid):
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

    on_each_grid(comm, check, MANY_GRIDS[comm.size][::2])


@on_all
def test_a_write_to_a_shard_is_seen(comm):
    """Between steps and evaluations, also through an array that was taken earlier, with and without kept gathered
    weights."""

    def check(grid):
        for reshard, early in product((None, False, True), (False, True)):
            nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=reshard)
            layer = linear(grid, bias=False)
            optimizer = optim.SGD(layer.parameters(), 0.0)
            taken, expected = layer.weight.local, np.array(layer.weight.gather())

            def evaluated():
                with layer.evaluating():
                    return np.array_equal(layer(spread(grid, X)).gather(), X @ expected)

            assert evaluated()
            for trains in (False, True, True, False):
                local = taken if early else layer.weight.local
                local *= 2
                expected *= 2
                if not trains:
                    assert evaluated()
                    continue
                x = leaf_of(grid, X)
                out = layer(x)
                assert np.array_equal(out.gather(), X @ expected)
                inner(out, U).backward()
                assert np.array_equal(x.grad.gather(), U @ expected.T)
                optimizer.step()

    on_each_grid(comm, check, MANY_GRIDS[comm.size][::2])


# Several optimizers


@on_all
def test_a_gradient_is_a_true_matrix_whatever_optimizers_there_are(comm):
    """In its own layout and whole, for one batch or two, before and after its sum over data."""

    def check(grid):
        layer, expected = linear(grid), {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}
        for make in (
            lambda: None,
            *(
                lambda shard=shard: optim.SGD(layer.parameters(), 0.5, shard_over_data=shard)
                for shard in (True, False, True)
            ),
        ):
            optimizer = make()
            for flags in ([True], [False], [False, True], [True, True], [True, False], [False, False, True]):
                layer.weight.grad = layer.bias.grad = None
                for now in flags:
                    with synced(grid, now):
                        inner(layer(spread(grid, X)), U).backward()
                found = {name: getattr(layer, name).grad for name in expected}
                for name, grad in found.items():
                    assert np.array_equal(grad.gather(), len(flags) * expected[name]), (grid, name, flags)
                    assert tuple(grad.local.shape) == grad.box.shape
                if flags[-1]:
                    assert_replicas_agree(grid, found)
            del optimizer

    on_each_grid(comm, check, MANY_GRIDS[comm.size][::2])


@on_all
def test_two_optimizers_of_the_same_parameters(comm):
    """One with its state split over data, one without, in turns. Each has the momentum of its own steps. Exact."""
    for sharded_first in [True, False]:
        with given(sharded_first=sharded_first):
            moves = {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}
            norm = np.sqrt(sum((move**2).sum() for move in moves.values()))

            def check(grid):
                layer, kinds = linear(grid), (sharded_first, not sharded_first)
                optimizers = [optim.SGD(layer.parameters(), 0.5, 0.5, shard_over_data=shard) for shard in kinds]
                expected, velocity = weights_of(layer), [0, 0]
                for turn in (0, 1, 1, 0, 1, 0):
                    inner(layer(spread(grid, X)), U).backward()
                    assert {each.gradient_norm() for each in optimizers} == {norm}
                    optimizers[turn].step()
                    velocity[turn] = 0.5 * velocity[turn] + 1
                    expected = {name: value - 0.5 * velocity[turn] * moves[name] for name, value in expected.items()}
                    assert bits(weights_of(layer)) == bits(expected), (grid, turn)
                    assert_replicas_agree(grid, {name: getattr(layer, name).value for name in expected})

            on_each_grid(comm, check, MANY_GRIDS[comm.size][::2])
