"""One copy of a gathered weight for the ranks of a node: equal bits, nothing sent, and no write during a read."""

import numpy as np
import pytest
from loops import looped
from networks import (
    INPUT,
    Case,
    adamw,
    batch_of,
    bits,
    loss_of,
    network_of,
    on_each_grid,
    over_grids,
    spread,
    weights_of,
)
from samples import TESTED, bits_of

from pmm3d import DistMatrix, Grid, GridError, LayoutError, Pmm3dError, nn
from pmm3d.comm import communicator

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]
on_nodes = pytest.mark.parallel([4], thorough=[8])
CASE = Case((21, 34, 27, 10), 26)
GRIDS = {
    1: [("1x1x1", 1)],
    2: [("fsdp", 1), ("ddp", 1)],
    4: [("fsdp", 1), ("hsdp", 2), ("1x2x2", 1)],
    8: [("fsdp", 1), ("2x2x2", 1), ("2x1x2", 2)],
}
OF_NODES = {4: [("fsdp", 1)], 8: [("fsdp", 1), ("2x1x4", 1)]}


def sharing(grid):
    """Switch on one copy of the weights of this grid."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(shared_weights=True)


def linear(grid, inputs=12, **options):
    return nn.Linear(grid, inputs, 8, **{"bias": False, "dtype": "float64", **options})


def ones(grid, columns=12):
    return spread(grid, np.ones((16, columns)))


def trained(grid, recompute=False, library=TESTED, **options):
    """Three steps, the second with gradients of two passes. Returns (weights, bytes received for the weights)."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(**options)
    net = network_of(grid, CASE, dropout=0.1, recompute=recompute, library=library)
    optimizer = adamw(net.parameters())
    grid.ledger.reset()
    for step in range(3):
        x, y = batch_of(CASE, step)
        if step == 1:
            loss_of(net, CASE, x[:9], y[:9], library).backward()
        loss_of(net, CASE, x, y, library).backward()
        optimizer.step()
        if (step + grid.rank) % 2:
            sum(range(20_000))
    return bits(weights_of(net)), grid.ledger.total(phase="gather W")


@looped("library, recompute, oag", [(TESTED, False, True), (TESTED, True, False), ("torch", False, True)])
@over_grids(GRIDS)
def test_weights_are_those_of_messages_and_none_are_sent(grid, library, recompute, oag):
    wanted, sent = trained(grid, recompute, library, oag=oag)
    found, moved = trained(grid, recompute, library, oag=oag, shared_weights=True)
    assert found == wanted
    assert moved.received == moved.sent == 0
    assert (sent.received > 0) == (moved.calls > 0) == (grid.shape.z > 1)
    assert recompute or trained(grid, library=library, oag=oag)[0] == wanted  # switched off again


@pytest.mark.parallel([4])
@looped("nodes", (1, 2))
def test_ranks_of_a_node_have_one_copy(comm, monkeypatch, nodes):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{nodes * comm.rank // comm.size}")
    with Grid(comm, "fsdp") as grid:
        sharing(grid)
        net, first = linear(grid, 13), grid.z.index - grid.z.index % (comm.size // nodes)
        net(ones(grid, 13))
        block = nn.Tape.of(grid).parallel.weights.gathered(net.weight, "backward")
        before = block * 1
        assert np.array_equal(before, net.weight.gather())
        grid.comm.Barrier()
        if grid.z.index == first:
            block[...] = first
        grid.comm.Barrier()
        assert (block == first).all()
        net(ones(grid, 13))
        assert np.array_equal(block, before)  # each forward pass gathers the shards again


@over_grids(GRIDS)
def test_values_that_were_written_between_passes_are_seen_by_all(grid):
    """Without barriers, a fast rank would write its shard while a slow one still multiplies the old values."""
    sharing(grid)
    net, x = linear(grid), ones(grid)
    for turn in range(12):
        net.weight.local[...] = turn
        if (turn + grid.rank) % 3 == 0:
            sum(range(20_000))
        assert (net(x).local == 12 * turn).all()


@over_grids(GRIDS)
def test_a_weight_that_is_used_twice_and_one_that_is_kept(grid):
    found = []
    for shared in (True, False):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(shared_weights=shared)
        first, second = (nn.Linear(grid, 12, 12, bias=False, dtype="float64", seed=seed) for seed in (1, 2))
        x = spread(grid, np.arange(192.0).reshape(16, 12) / 100)
        with nn.unchanged(grid):
            for _ in range(2):
                out = first(second(first(second(x))))
        nn.mean(out).backward()
        found.append([bits_of(each.weight.grad.gather()) for each in (first, second)])
    assert found[0] == found[1]


@on_nodes
@looped("sums", ("nodes", "ranks"))
def test_on_several_nodes_each_has_one_copy_and_links_carry_each_byte_once(comm, two_nodes, monkeypatch, sums):
    monkeypatch.setenv("PMM3D_SUMS", sums)

    def check(grid):
        wanted, sent = trained(grid)
        found, moved = trained(grid, shared_weights=True)
        assert found == wanted and moved.across == moved.received
        everyones = grid.comm.allreduce(np.array([sent.across, moved.across, moved.sent - moved.received]))
        assert everyones[0] == grid.z.node_map.per_node * everyones[1] and everyones[2] == 0  # small gathers are flat
        assert 0 < moved.received < sent.received

    on_each_grid(comm, check, OF_NODES[comm.size])


def of_a_step(grid):
    """Communication of weights in this rank's second step: calls, bytes sent, received, and from other nodes."""
    sharing(grid)
    net = nn.MLP(grid, [22, 34, 10], dtype="float64")
    optimizer = nn.optim.SGD(net.parameters(), lr=0.1)
    x = DistMatrix.random(grid, (24, 22), layout=INPUT)
    y = DistMatrix.random(grid, (24, 10), layout=net.output_layout)
    for _ in range(2):
        grid.ledger.reset()
        nn.mse(net(x), y).backward()
        optimizer.step()
    moved = grid.ledger.total(phase="gather W")
    return moved.calls, moved.sent, moved.received, moved.across


def moves_as_a_dry_run_says(grid):
    with Grid.dry(grid.shape[:3], grid.shape.data, grid.rank, hosts=grid.hosts) as dry:
        said = of_a_step(dry)
        assert said == of_a_step(grid) and (said[0] > 0) == (grid.shape.z > 1) and (said[2] > 0) == (grid.hosts > 1)


@over_grids(GRIDS)
def test_a_dry_run_moves_the_same(grid):
    moves_as_a_dry_run_says(grid)


@on_nodes
@over_grids(OF_NODES)
def test_a_dry_run_of_two_nodes_moves_the_same(grid, two_nodes):
    moves_as_a_dry_run_says(grid)


@pytest.mark.parallel([1])
def test_what_forbids_it_is_refused_at_once(comm):
    """Other options, arrays of a device, and a dry run of nodes of different sizes."""
    with pytest.raises(Pmm3dError, match="leave one of them out"):
        nn.Overlap(shared_weights=True, reshard_after_forward=True)
    with Grid.dry((1, 1, 2)) as grid:
        sharing(grid)
        x = DistMatrix.random(grid, (16, 12), layout=INPUT, library="cupy")
        with pytest.raises(LayoutError, match="arrays on the host"):
            linear(grid, library="cupy")(x)
    with Grid.dry((1, 1, 5), hosts=2) as grid, pytest.raises(GridError, match="not equally many"):
        sharing(grid)
        linear(grid)(DistMatrix.random(grid, (16, 12), layout=INPUT))


@pytest.mark.parallel([4])
def test_nodes_with_more_ranks_than_others_are_refused(comm, fails, monkeypatch):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: "one" if comm.rank < 3 else "two")
    with Grid(comm, "fsdp") as grid:
        sharing(grid)
        net = linear(grid)
        fails(GridError, "not equally many", lambda: net(ones(grid)))


@pytest.mark.parallel([4], thorough=[2])
@over_grids({2: [("fsdp", 1)], 4: GRIDS[4]})
def test_what_cannot_share_is_refused_on_every_rank(grid, fails, monkeypatch):
    sharing(grid)
    net, x = linear(grid), ones(grid)
    with monkeypatch.context() as patched:
        patched.setattr(type(grid), "_places", lambda self: np.arange(self.size))
        fails(GridError, "are on several nodes", lambda: net(x))
    assert net(x).shape == (16, 8)
