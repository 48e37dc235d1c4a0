"""Sums of gradients: their begin and wait in a step, ZeRO-0, 1 and 2, and comparisons among ranks."""

import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    batch_of,
    bits,
    failing,
    gradients_of,
    largest_difference,
    loss_of,
    network_of,
    on_grid,
    over_grids,
    spread,
    weights_of,
)

from pmm3d import DisagreementError, DistMatrix, Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import memory

pytestmark = pytest.mark.deadline(240)
SUMS = {"reduce dW", "reduce vectors", "reduce data"}
KINDS = (False, "states", "gradients")
CUTS = (0, 9, 14, 23)
DATA_GRIDS = {4: [("2x1x1", 2), ("1x1x2", 2), ("1x1x1", 4)], 8: [("2x1x2", 2), ("1x2x2", 2)]}
FIRST_TWO = {4: DATA_GRIDS[4][:2]}


# Begins of sums, in a dry run


def pair_of(net):
    """(x, y): a batch without data."""
    sizes = net.layers[0].weight.shape[0], net.layers[-1].weight.shape[1]
    return tuple(
        DistMatrix.empty(net.grid, (64, size), dtype="float32", layout=layout)
        for size, layout in zip(sizes, (batch_layout("y"), net.output_layout))
    )


def dry_step(grid, m, sizes=(64, 64)):
    """(index, x, actions) after each micro-batch of two steps, and (None, x, actions) after each step."""
    net = nn.MLP(grid, sizes, nn.relu)
    optimizer, (x, y) = optim.AdamW(net.parameters()), pair_of(net)
    x = nn.Tensor(x, requires_grad=True)
    for _ in range(2):
        grid.dry_run.actions.clear()
        with nn.unchanged(grid):
            for index in range(m):
                with nn.Tape.of(grid).set(syncing=index == m - 1):
                    nn.mse(net(x), y).backward()
                    yield index, x, grid.dry_run.actions
        optimizer.clip(1.0)
        optimizer.step()
        yield None, x, grid.dry_run.actions


def numbers(actions, what, phases):
    """Numbers of the collectives of these phases that are begun, or awaited, in the order of the actions."""
    of = {action.number: action.phase for action in actions if action.what == "begin"}
    return [action.number for action in actions if action.what == what and of.get(action.number) in phases]


def test_a_pass_waits_for_no_sum_of_its_gradients():
    """dI of the layer is complete and sent before the sums of its dW are awaited. The optimizer waits for them."""
    with Grid.dry((2, 2, 2), 2) as grid:
        for index, x, actions in dry_step(grid, 1):
            begun, awaited = (numbers(actions, what, SUMS) for what in ("begin", "wait"))
            if index is not None:
                assert len(begun) >= 3 and awaited == []
                assert len(numbers(actions, "wait", {"reduce dI"})) == 1
                grid.y.send(x.grad.local, 0 if grid.y.index else 1, agreed=True)
                sent = max(at for at, action in enumerate(actions) if action.what == "begin")
                assert actions[sent].operation == "send" and numbers(actions[: sent + 1], "wait", SUMS) == []
            else:
                assert awaited and set(awaited) <= set(begun)


def test_micro_batches_wait_for_no_sum_of_the_one_before():
    """Except for memory: two arrays, in turn, contain the weight gradients before their sums."""
    with Grid.dry((1, 2, 2), 2) as grid:
        for index, _, actions in dry_step(grid, 2):
            if index is not None:
                assert numbers(actions, "wait", SUMS) == []
                assert len(numbers(actions, "begin", {"reduce dW"})) == index + 1
                assert bool(numbers(actions, "begin", {"reduce data"})) == (index == 1)


@looped("m", [1, 3])
def test_the_first_weight_of_the_next_micro_batch_is_gathered_ahead(m):
    """The number of gathers is the same. None begins after the last micro-batch, or without `unchanged`."""
    with Grid.dry((1, 1, 2)) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        counts = []
        for index, _, actions in dry_step(grid, m, (64, 32, 16)):
            begun, awaited = (len(numbers(actions, what, {"gather W"})) for what in ("begin", "wait"))
            counts.append((index, begun - awaited))
            assert index is not None or begun == awaited == 4 * m
        assert counts[m + 1 :] == [(index, int(index < m - 1)) for index in range(m)] + [(None, 0)]


# ZeRO


def stepped(grid, kind, synced, clip=None):
    """Two steps of AdamW on micro-batches. Returns the weights and the norms."""
    net, norms = network_of(grid, CLASSES), []
    optimizer = optim.AdamW(net.parameters(), 0.05, shard_over_data=kind)
    for step in range(2):
        x, y = batch_of(CLASSES, step)
        for start, stop, now in zip(CUTS, CUTS[1:], synced):
            with nn.Tape.of(grid).set(syncing=now):
                loss_of(net, CLASSES, x[start:stop], y[start:stop]).backward(scale=(stop - start) / len(x))
        norms.append(optimizer.clip(clip) if clip else optimizer.gradient_norm())
        if kind == "gradients":
            for parameter in net.parameters():
                assert parameter.grad.local.size == parameter.grad_buffer.array.size
        optimizer.step()
    return weights_of(net), norms


@pytest.mark.parallel([4], thorough=[8])
@over_grids(DATA_GRIDS)
@looped("synced", [(False, False, True), (True, False, True)])
@looped("clip", [None, 0.1])
def test_zero_0_1_and_2_are_the_same_training(grid, synced, clip):
    """With one sum per step, or several; clipped or not. ZeRO-1 with one sum has equal bits, except for a norm in
    another order."""
    (whole, norm), (one, norm_1), (two, norm_2) = (stepped(grid, kind, synced, clip) for kind in KINDS)
    assert bits(one) == bits(whole) or clip or synced[0]
    assert largest_difference(one, whole) < 1e-12 and np.allclose(norm_1, norm, rtol=1e-12)
    assert largest_difference(two, whole) < 1e-12 and np.allclose(norm_2, norm, rtol=1e-12)


@looped("kind, parts", [(False, 1), ("states", 1), ("gradients", 4)])
def test_a_rank_holds_its_part_of_a_gradient_only(kind, parts):
    with Grid.dry((2, 1, 2), 4) as grid:
        net = nn.MLP(grid, (256, 128, 64), nn.relu)
        optimizer, (x, y) = optim.AdamW(net.parameters(), shard_over_data=kind), pair_of(net)
        for index in range(4):
            with nn.Tape.of(grid).set(syncing=index == 3):
                nn.mse(net(x), y).backward()
        held = sum(parameter.grad_buffer.array.nbytes for parameter in net.parameters())
        assert held == memory(grid)["gradients"]
        assert held * parts == sum(parameter._stored.local.nbytes for parameter in net.parameters())
        optimizer.step()


@pytest.mark.parallel([2])
def test_of_what_a_part_is_kept_is_named(some_grid, fails):
    parameters = nn.Linear(some_grid, 3, 2).parameters()
    fails(Pmm3dError, '"states".*"gradients"; got \'all\'', lambda: optim.SGD(parameters, 0.1, shard_over_data="all"))


@pytest.mark.parallel([4])
@over_grids(FIRST_TWO)
def test_an_optimizer_takes_a_gradient_that_another_one_had_scattered(grid):
    """If ZeRO-2 was made last, gradients are scattered, and the other optimizer gathers. And the other way round."""
    found = []
    for kinds in ((False,), (False, "gradients"), ("gradients", False), ("states", "gradients")):
        net = network_of(grid, CLASSES)
        first, *_ = [optim.SGD(net.parameters(), 0.5, shard_over_data=kind) for kind in kinds]
        for step in range(2):
            loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
            first.clip(0.2)
            first.step()
        found.append(weights_of(net))
        assert largest_difference(found[-1], found[0]) < 1e-13


@pytest.mark.parallel([4])
@over_grids(FIRST_TWO)
@looped("alone", [False, True])
def test_a_contribution_that_is_whole_along_data_is_scattered_too(grid, alone):
    """A penalty on the weights, which is the same on all ranks, with a loss and alone."""
    found = []
    for kind in KINDS:
        net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0)
        optim.SGD(net.parameters(), 0.5, shard_over_data=kind)
        for _ in range(2):
            penalties = (nn.sum(each * each) for each in net.parameters())
            sum(penalties, 0 if alone else loss_of(net, CLASSES, x, y)).backward()
        found.append(gradients_of(net))
        assert largest_difference(found[-1], found[0]) < 1e-13


@pytest.mark.parallel([4])
def test_a_whole_contribution_waits_for_the_sum_of_the_pass_before(comm):
    """Of a scattered gradient, because this sum writes to its array."""
    found = []
    with Grid(comm, (1, 1, 1), 4) as grid:
        for kind in (False, "gradients"):
            net = nn.Linear(grid, 512, 512, dtype="float64", seed=1)
            optim.SGD(net.parameters(), 0.5, shard_over_data=kind)
            x = DistMatrix.random(grid, (8, 512), seed=1, layout=batch_layout("y"))
            for _ in range(3):
                penalty = nn.sum(net.weight * net.weight)
                nn.mse(net(x), x).backward()
                penalty.backward()
            found.append(gradients_of(net))
    assert largest_difference(*found) < 1e-12


@pytest.mark.parallel([2])
@on_grid((1, 1, 1), 2)
def test_an_optimizer_made_between_the_passes_of_a_step(grid, fails):
    """If some of its passes were not scattered, a gradient is whole, or refused if no later pass adds to it."""
    net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0)
    for _ in range(2):
        loss_of(net, CLASSES, x, y).backward()
    expected = gradients_of(net)
    optimizer = optim.SGD(net.parameters(), 0.5)
    for again in (True, False):
        optimizer.zero_grad()
        optim.SGD(net.parameters(), 0.5)
        with nn.no_sync(grid):
            loss_of(net, CLASSES, x, y).backward()
        optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data="gradients")
        if again:
            loss_of(net, CLASSES, x, y).backward()
            assert largest_difference(gradients_of(net), expected) < 1e-13
        else:
            other = nn.Linear(grid, 3, 2, dtype="float64")
            nn.sum(other.weight).backward()
            fails(Pmm3dError, "is not summed over the ranks", optimizer.step)


# Passes that fail, and ranks that differ


@pytest.mark.parallel([4])
@looped("kind", KINDS)
@on_grid((1, 1, 2), 2)
def test_a_micro_batch_that_fails_while_sums_are_under_way(grid, kind, fails):
    net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0)
    optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data=kind)
    loss_of(net, CLASSES, x, y).backward()
    expected = gradients_of(net)
    loss = loss_of(net, CLASSES, x, y)
    with pytest.raises(ZeroDivisionError):
        (failing(loss) + loss).backward()
    fails(Pmm3dError, "zero_grad", optimizer.step)
    assert all(parameter.grad is None for parameter in net.parameters())
    optimizer.zero_grad()
    loss_of(net, CLASSES, x, y).backward()
    assert bits(gradients_of(net)) == bits(expected)


@pytest.mark.parallel([2])
@on_grid("ddp", timeout=20)
def test_ranks_that_differ_in_a_pass_without_sync_are_told_before_the_step(grid, comm, fails):
    net = nn.Sequential(grid, *[nn.Linear(grid, 6, 6, seed=seed) for seed in range(2)])
    optimizer, x = optim.SGD(net.parameters(), 0.1), DistMatrix.random(grid, (4, 6), dtype="float32")

    def loss(*path):
        out = nn.Tensor(x)
        for index in path:
            out = net.layers[index](out)
        return nn.mse(out, x)

    for path in ((0,), (1,)):
        loss(*path).backward()
    optimizer.zero_grad()
    before = weights_of(net)
    with nn.no_sync(grid):
        loss(grid.rank).backward()
    text = fails(DisagreementError, "use different parameters", loss(0).backward)
    assert comm.rank == 0 or "1.weight (6 x 6) is used 1 times, on rank 0 0 times" in text
    fails(Pmm3dError, "zero_grad", optimizer.step)
    assert bits(weights_of(net)) == bits(before)
    optimizer.zero_grad()
    loss(0, 1).backward()
    optimizer.step()


# Deferred products


@pytest.mark.parallel([4])
@over_grids(lambda ranks: [("2x1x1", 2), ("1x1x2", 2)])
def test_products_are_drained_one_by_one(grid, monkeypatch):
    """The sum over data begins when no queue contains a part of a gradient. Ranks compare nothing."""
    net, queues = network_of(grid, CLASSES), []
    for index in range(2):
        with nn.defer_weights(grid) as queue:
            loss_of(net, CLASSES, *batch_of(CLASSES, index)).backward()
        queues.append(queue)
    with monkeypatch.context() as patched:
        patched.setattr(grid, "_compared", None)
        for queue in queues:
            for left in reversed(range(len(queue))):
                queue.drain(1)
                assert len(queue) == left
                assert queue is queues[1] or grid.ledger.total(phase="reduce data").calls == 0
        found = bits(gradients_of(net))
    for parameter in net.parameters():
        parameter.grad = None
    for index in range(2):
        with nn.Tape.of(grid).set(syncing=index == 1):
            loss_of(net, CLASSES, *batch_of(CLASSES, index)).backward()
    assert found == bits(gradients_of(net))


@pytest.mark.parallel([4])
@on_grid((2, 1, 1), 2)
def test_products_of_a_gradient_that_is_forgotten_are_not_added(grid):
    """Products of an abandoned step, and of a failed pass."""
    net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0)
    loss_of(net, CLASSES, x, y).backward()
    expected, optimizer = bits(gradients_of(net)), optim.SGD(net.parameters(), 0.1)
    optimizer.zero_grad()
    with nn.defer_weights(grid) as queue:
        loss_of(net, CLASSES, x, y).backward()
        optimizer.zero_grad()
        hidden = failing(net.layers[0](nn.Tensor(spread(grid, x))))
        for layer in net.layers[1:]:
            hidden = layer(hidden)
        with pytest.raises(ZeroDivisionError):
            nn.cross_entropy(hidden, spread(grid, y, batch_layout(None))).backward()
        optimizer.zero_grad()
        loss_of(net, CLASSES, x, y).backward()
    queue.drain()
    assert bits(gradients_of(net)) == expected and len(queue) == 0
    optimizer.step()
