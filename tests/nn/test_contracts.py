"""Gradients of graphs that share parts, change, are recomputed, or differ between the ranks. They are exact, with
integers, or compared with derivatives by numpy."""

import json
import re
from itertools import count, product

import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import (
    GRIDS,
    INPUT,
    MANY_GRIDS,
    VECTORS,
    alone,
    assert_replicas_agree,
    batch_of,
    bits,
    gradients_of,
    inner,
    largest_difference,
    loss_of,
    network_of,
    on_each_grid,
    on_grid,
    over_grids,
    spread,
    weights_of,
    whole_numbers,
)
from samples import bits_of, integers
from torch_reference import by_rank_0

from pmm3d import DisagreementError, DistMatrix, Grid, MatmulPlan, Pmm3dError, nn
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

SYNCED = [[True], [False], [False, True], [True, True], [True, False], [False, False, True]]
"""For each pass of a step: whether its gradients are summed over data."""


@on_all
@over_grids(lambda ranks: MANY_GRIDS[ranks][::2])
def test_a_gradient_is_a_true_matrix_whatever_optimizers_there_are(grid):
    """In its own layout and whole, for one batch or more, before and after its sum over data, also if the user reads it
    between two passes that add to it."""
    layer, expected = linear(grid), {"weight": X.T @ U, "bias": U.sum(0, keepdims=True)}
    for shard in (None, True, False, True):
        optimizer = None if shard is None else optim.SGD(layer.parameters(), 0.5, shard_over_data=shard)
        for flags, reads in product(SYNCED, (False, True)):
            layer.weight.grad = layer.bias.grad = None
            for done, now in enumerate(flags, 1):
                with synced(grid, now):
                    inner(layer(spread(grid, X)), U).backward()
                if reads:
                    for name in expected:
                        assert np.array_equal(getattr(layer, name).grad.gather(), done * expected[name]), (name, flags)
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


# Graphs that change between steps, or differ between the ranks

SWITCHES = [
    nn.Overlap(),
    nn.Overlap(bucket_bytes=1),
    nn.Overlap(bucket_bytes=1, reshard_after_forward=True),
    nn.Overlap.none(),
]
PATHS = {
    "used twice, once, not at all, twice": [(0, 1, 1), (0, 1), (0,), (1, 0, 1), (2, 2, 2), (0, 1, 1)],
    "stochastic depth": [(0, 1, 3), (3,), (0, 1, 2, 3), (1,), (0, 2), (1, 2)],
}
RATE = 0.125


class Paths(nn.Module):
    """h + tanh(h W + b) for each layer on the path."""

    def __init__(self, grid):
        self.grid = grid
        self.steps = [
            nn.Residual(nn.Sequential(grid, nn.Linear(grid, SIZE, SIZE, seed=seed, dtype="float64"), nn.tanh))
            for seed in range(4)
        ]

    def along(self, x, path):
        for index in path:
            x = self.steps[index](x)
        return x


def paths_of(paths, step):
    """The paths of the first and of the second batch of a step."""
    return paths[step], paths[step - 1]


def batches(step, count):
    return [0.25 * integers((2, ROWS, SIZE), seed=10 * step + index) for index in range(count)]


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@looped("number, paths", enumerate(PATHS.values()))
def test_a_graph_may_change_from_step_to_step(comm, number, paths):
    """With and without overlap, with small buckets, with a state split over data, and with two batches per step on
    different paths. An error in a step changes the weights, which are compared after the last step. Without --all, half
    of the switches are tested on one grid, and the other half on the next."""
    turn = count(number)
    expected = by_rank_0(comm, lambda: [of_torch("SGD", paths, parts) for parts in (1, 2)])

    def check(grid):
        tried = [*enumerate(SWITCHES)]
        for index, overlap in tried if all_tests else tried[next(turn) % 2 :: 2]:
            nn.Tape.of(grid).parallel.overlap, parts = overlap, 1 + index // 2 % 2
            net = Paths(grid)
            optimizer = optim.SGD(net.parameters(), RATE, shard_over_data=index in (1, 2))
            for step in range(len(paths)):
                for part, (path, (x, v)) in enumerate(zip(paths_of(paths, step), batches(step, parts))):
                    with nn.Tape.of(grid).set(syncing=part == parts - 1):
                        inner(net.along(nn.Tensor(spread(grid, x)), path), v).backward()
                optimizer.step()
            assert largest_difference(weights_of(net), expected[parts - 1]) < 1e-12, (grid, overlap)

    on_each_grid(comm, check, GRIDS[comm.size][2:4] if comm.size == 8 else None)


def of_torch(kind, paths, parts=1):
    """Name -> weight after steps on these paths. A layer that is not used has no gradient. parts: batches of a step."""
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        weights = {name: torch.tensor(value, requires_grad=True) for name, value in weights_of(Paths(grid)).items()}
    optimizer = getattr(torch.optim, kind)(weights.values(), RATE)
    for step in range(len(paths)):
        optimizer.zero_grad()
        for path, (x, v) in zip(paths_of(paths, step), batches(step, parts)):
            out = torch.from_numpy(x)
            for index in path:
                weight, bias = (weights[f"steps.{index}.module.0.{name}"] for name in ("weight", "bias"))
                out = out + torch.tanh(out @ weight + bias)
            (out * torch.from_numpy(v)).sum().backward()
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_adam_counts_the_steps_of_each_parameter(comm):
    """As in torch, for a layer that is not used in each step. A loaded state continues the count."""
    paths = PATHS["stochastic depth"]
    expected = by_rank_0(comm, lambda: of_torch("Adam", paths))

    def check(grid):
        net, halves = Paths(grid), []
        for half in (paths[:3], paths[3:]):
            optimizer = optim.Adam(net.parameters(), RATE, shard_over_data=True)
            if halves:
                optimizer.load_state(json.loads(json.dumps(halves[0].state())))
                assert optimizer.steps_without_grad == halves[0].steps_without_grad
                for name, value in optimizer.matrices().items():
                    value.local[...] = halves[0].matrices()[name].local
            for path in half:
                ((x, v),) = batches(optimizer.steps, 1)
                inner(net.along(nn.Tensor(spread(grid, x)), path), v).backward()
                optimizer.step()
            halves.append(optimizer)
        assert optimizer.state()["missed"]["steps.3.module.0.weight"] == 3
        assert largest_difference(weights_of(net), expected) < 1e-12
        optimizer.load_state({"kind": "Adam", "steps": 4, "lr": 0.5})  # of before the steps of a parameter were counted
        assert (optimizer.steps, optimizer.lr, dict(optimizer.steps_without_grad)) == (4, RATE, {})

    on_each_grid(comm, check, GRIDS[comm.size][:2])


def different(grid, layers, bucket_bytes, when, uses, others):
    """Four steps. In step `when`, rank 1 and the other ranks use the middle layer different numbers of times. Returns
    the step and the error."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(bucket_bytes=bucket_bytes)
    pair = lambda seed: nn.Sequential(
        grid, nn.Linear(grid, 6, 8, seed=seed), nn.tanh, nn.Linear(grid, 8, 6, seed=seed, cols="x")
    )
    net = nn.Sequential(grid, *[pair(index) for index in range(layers)])
    optimizer = optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        x = nn.Tensor(target := DistMatrix.random(grid, (8, 6), seed=step, dtype="float32"))
        for index, part in enumerate(net.layers):
            special = index == layers // 2 and step == when
            for _ in range((uses if grid.rank == 1 else others) if special else 1):
                x = part(x)
        try:
            nn.mse(x, target).backward()
            optimizer.step()
        except Pmm3dError as error:
            return step, str(error)


DIFFERENCES = {
    2: [(2, 2**24, 0, 1, 0), (2, 1, 2, 0, 1), (24, 1, 0, 2, 1), (24, 1, 2, 1, 0), (24, 2000, 2, 0, 1)],
    4: [(2, 1, 0, 1, 0), (24, 2000, 2, 2, 1)],
}
"""By number of ranks: layers, bytes of a bucket, the step that differs, uses on rank 1, uses on the others."""


@pytest.mark.parallel([2], thorough=[4])
def test_a_rank_that_uses_a_layer_otherwise_is_named(comm):
    """In the first step or a later one, with one bucket or many. No rank hangs, and all raise the same text."""
    for layers, bucket_bytes, when, uses, others in DIFFERENCES[comm.size]:
        with given(layers=layers, bucket_bytes=bucket_bytes, when=when, uses=uses):
            with Grid(comm, "ddp", timeout=20) as grid:
                said = comm.allgather(different(grid, layers, bucket_bytes, when, uses, others))
            assert len(set(said)) == 1 and said[0][0] == when, said
            difference = r"On rank 1 (\d+)\.[02]\.(weight|bias) \(\d x \d\) is used (\d) times, on rank 0 (\d) times"
            found = re.search(difference, said[0][1])
            assert found is not None, said
            assert (int(found[1]), int(found[3]), int(found[4])) == (layers // 2, uses, others), said


@pytest.mark.parallel([2])
def test_ranks_on_different_paths_are_told_before_a_rule_sends_anything(comm, fails):
    """Paths whose rules have messages: a layer norm, a softmax, a gather of dO, and of the input."""
    x = integers((4, 6))
    with Grid(comm, (2, 1, 1)) as grid:
        norm = nn.LayerNorm(grid, 6, dtype="float64")
        linears = [nn.Linear(grid, 6, 6, dtype="float64", activations="sharded", cols=cols) for cols in "xy"]
        parameters = nn.Sequential(grid, norm, *linears).parameters()
        for paths in ((0, 1), (1, 0), (0, 2), (3, 1), (2, 3)):
            given = nn.Tensor(spread(grid, x, nn.tensor.Layout((), "x")), requires_grad=True)
            ends = [norm(given), nn.softmax(norm.gain * 1 + 0 * norm.bias), *(linear(given) for linear in linears)]
            losses = [nn.mse(end, end.value) for end in ends]
            fails(DisagreementError, "use different parameters", losses[paths[grid.rank]].backward)
            for parameter in parameters:
                parameter.grad = None


@pytest.mark.parallel([2])
@on_grid((2, 1, 1))
def test_a_rule_with_a_plan_of_its_own_sends_nothing_before_the_ranks_agree(grid, fails):
    a, b = (spread(grid, integers((8, 8)), layout) for layout in (nn.tensor.Layout.A, nn.tensor.Layout.B))
    plan, layers = MatmulPlan(a, b), [nn.Linear(grid, 8, 8, dtype="float64") for _ in range(2)]
    plan(), plan(), nn.Sequential(grid, *layers).named_parameters()
    x = spread(grid, integers((4, 8)))
    out = layers[grid.rank](x)
    if grid.rank == 0:
        out = out.from_op(out.shard, (out,), lambda gradient: (plan(), [gradient])[1])
    fails(DisagreementError, "use different parameters", nn.mse(out, out.value).backward)
