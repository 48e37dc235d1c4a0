"""Settings that must not change a bit: overlaps, recomputation, the grid on which numbers are drawn."""

import gc
import time
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    GRIDS,
    Case,
    adamw,
    alone,
    batch_of,
    bits,
    gradients_of,
    loss_of,
    network_of,
    on_each_grid,
    on_grid,
    over_grids,
    spread,
    train,
    weights_of,
)
from samples import bits_of, to_numpy

from pmm3d import nn
from pmm3d.comm import engine as progress
from pmm3d.layout import batch_layout
from pmm3d.nn import data_parallel

pytestmark = pytest.mark.deadline(240)

CASE = Case((40, 160, 150, 10), 130)
"""On 2x2x2, all-reduces have more than 64 KiB for two ranks, so that some have two stages."""
SWITCHES = list(product((False, True), repeat=4))
GRIDS_OF_SWITCHES = {2: [("ddp", 1), ("fsdp", 1)], 4: [("2x1x1", 2), ("1x2x2", 1)], 8: [("2x2x2", 1), ("2x1x2", 2)]}


def choices(parities=(0, 1)):
    """(overlap, whether the optimizer's state is sharded): all 16 combinations of switches, and each value of one
    switch with each of the others. The combinations with an even number of switches, and those with an odd number,
    contain all combinations of any three switches."""
    for index, (oar, ors, oag, buckets) in enumerate(SWITCHES):
        if sum(SWITCHES[index]) % 2 not in parities:
            continue
        reshard, budget = ((True, None), (False, None), (None, 30_000), (None, None))[(oar ^ buckets) + 2 * (ors ^ oag)]
        yield (
            nn.Overlap(
                oar,
                ors,
                oag,
                buckets,
                keep_bytes=budget,
                bucket_bytes=(1, 40_000, 2**24)[index % 3],
                reshard_after_forward=reshard,
            ),
            index % 5 == 0,
        )


def trained(grid, overlap, shard=False, recompute=True):
    """Three steps. The gradient of the second step is the sum of two passes, one of them not summed over data."""
    nn.Tape.of(grid).parallel.overlap = overlap
    net = network_of(grid, CASE, dropout=0.1, recompute=recompute)
    optimizer = adamw(net.parameters(), shard_over_data=shard)
    for step in range(3):
        x, y = batch_of(CASE, step)
        if step == 1:
            with nn.no_sync(grid):
                loss_of(net, CASE, x[:50], y[:50]).backward()
        loss_of(net, CASE, x, y).backward()
        optimizer.step()
    return list(bits(weights_of(net)).values())


def assert_all_alike(grid, recompute=True):
    """Without --all, the even combinations on the first grid, and the odd ones on the other."""
    parities = (0, 1) if all_tests else (int(grid.data.size == 1),)
    expected = trained(grid, nn.Overlap.none())
    for overlap, shard in choices(parities):
        assert trained(grid, overlap, shard, recompute) == expected, overlap


@pytest.mark.parallel([4], thorough=[2, 8])
@over_grids(GRIDS_OF_SWITCHES)
def test_any_combination_of_switches_gives_bitwise_the_same_weights(grid):
    assert_all_alike(grid)


@pytest.mark.parallel([4], thorough=[2, 8])
def test_what_is_under_way_is_waited_for(comm, monkeypatch):
    """Collectives make no progress during computation, so a result that is used before its wait is wrong."""
    monkeypatch.setattr(progress.Engine, "background", lambda engine: nullcontext())
    on_each_grid(comm, lambda grid: assert_all_alike(grid, False), GRIDS_OF_SWITCHES[comm.size][:1])


@pytest.mark.parallel([4], thorough=[2])
@on_grid("fsdp")
def test_what_is_kept_does_not_depend_on_the_collection_of_garbage(comm, grid):
    """Earlier networks do not count for keep_bytes on any rank, whether their memory was collected or not."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(keep_bytes=8 * 40 * 30 * 2)
    gc.disable()
    try:
        for _ in range(3):
            train(grid, CASE._replace(sizes=(40, 30, 20, 10)), 2)
            grid.rank or gc.collect()
            assert len(set(comm.allgather(grid.ledger.total(phase="gather W").calls))) == 1
    finally:
        gc.enable()


@pytest.mark.parallel([6], thorough=[2, 4, 8])
def test_a_seed_gives_one_network_and_one_mask_on_every_grid(comm):
    case = CASE._replace(sizes=(7, 13, 11, 5))
    ones = np.ones((19, 9))
    with alone() as grid:
        expected = bits(weights_of(network_of(grid, case)))
        other = bits(weights_of(network_of(grid, case, seed=6)))
        masked = [nn.dropout(nn.Tensor(spread(grid, ones)), 0.3, 4, stream) for stream in (1, 2)]
        masks = [to_numpy(each.gather()) for each in masked]
    assert not set(expected.values()) & {value for name, value in other.items() if "weight" in name}
    weights = [value for name, value in expected.items() if "weight" in name]
    assert len(set(weights)) == len(weights)
    assert set(masks[0].flat) == {0, 1 / 0.7} and 0.2 < np.mean(masks[0] == 0) < 0.4
    assert not np.array_equal(*masks)

    def check(grid):
        drop = nn.Dropout(grid, 0.3, 4)
        assert bits(weights_of(network_of(grid, case))) == expected
        for mask, cols in zip(masks, ("y", None)):
            assert bits_of(drop(spread(grid, ones, batch_layout(cols))).gather()) == mask.tobytes()
        layer = lambda *size: nn.Linear(grid, *size, cols="x", seed=3, dtype="float64")
        settled = nn.Sequential(grid, layer(4, 5), layer(5, 3))
        before = bits(weights_of(settled))
        settled.settle(4, "float64")
        assert bits(weights_of(settled)) == before

    on_each_grid(comm, check)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@over_grids(lambda ranks: GRIDS[ranks][-3:])
def test_recomputing_changes_no_bit(grid):
    """Neither a gradient, nor the masks of this call and the next."""
    found = []
    for recompute in (False, True):
        net = network_of(grid, CASE, dropout=0.2, recompute=recompute)
        for step in range(2):
            x, y = batch_of(CASE, step)
            given = nn.Tensor(spread(grid, x), requires_grad=True)
            loss = nn.cross_entropy(net(given), spread(grid, y, batch_layout(None)))
            loss.backward()
        values = [*gradients_of(net).values(), given.grad.gather(), np.array(loss.item())]
        found.append(([bits_of(value) for value in values], list(net.random_state().values())))
    assert found[0] == found[1]


def held_after_forward(grid, recompute, activation):
    """Bytes that the tape holds after a forward pass, and bytes that recomputation saves by the ledger."""
    case = CASE._replace(activation=activation, norm=False, sizes=(64, 256, 128, 16), batch=256)
    net, before = network_of(grid, case, recompute=recompute), grid.workspace.in_use()
    loss = loss_of(net, case, *batch_of(case, 0))
    held = grid.workspace.in_use() - before
    loss.backward()
    assert grid.workspace.in_use() == before
    return held, grid.ledger.memory["recompute saves"]


@pytest.mark.parallel([4], thorough=[1])
@looped("activation", ["gelu", "relu"])
@over_grids(lambda ranks: [("1x1x1" if ranks == 1 else "2x2x1", 1)])
def test_what_recomputing_saves_is_what_is_held_without_it(grid, activation):
    """For each hidden layer, the input of the activation. Its output is the next layer's input, which is kept in both
    cases. relu keeps only its output, so nothing is saved."""
    inputs = 256 * 8 * (256 // grid.x.size + 128 // grid.y.size)
    plain, none = held_after_forward(grid, False, activation)
    short, saved = held_after_forward(grid, True, activation)
    assert none == 0 and saved == plain - short == (inputs if activation == "gelu" else 0)


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_no_more_sums_of_gradients_are_under_way_than_memory_was_planned_for(comm, grid, monkeypatch):
    """Rank 0 is late with each sum, so on rank 1 none has ended when the next ones begin."""
    begun, most, begin = [], [0], data_parallel.GradientSums._start

    def late(self, axis, bucket, *options):
        if comm.rank == 0:
            time.sleep(0.02)
        begin(self, axis, bucket, *options)
        begun.append(bucket[0].pending)
        most[0] = max(most[0], sum(not pending.done for pending in begun))

    monkeypatch.setattr(data_parallel.GradientSums, "_start", late)
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(bucket_bytes=1)
    loss_of(network_of(grid, CASE), CASE, *batch_of(CASE, 0)).backward()
    assert max(comm.allgather(most[0])) == data_parallel.IN_FLIGHT and len(begun) > 4
