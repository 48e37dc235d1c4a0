"""Memory of training: repeated steps allocate nothing large, and activations are freed during the backward pass."""

import tracemalloc

import pytest
from gates import move_what_is_waited_for
from loops import looped
from networks import INPUT, Case, batch_of, network_of, over_grids, spread

from pmm3d import nn
from pmm3d.arrays import NumpyLibrary
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

MEBIBYTE = 2**20
CASE = Case((800, 750, 800, 300), 800, "gelu", True, "mse")
"""On up to four ranks, shards of matrices and of activations have more than 1 MiB."""
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1)], 4: [("2x2x1", 1), ("1x1x2", 2), ("2x1x2", 1)]}

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2]), pytest.mark.deadline(240)]


def trainer(grid, case, **options):
    """(a function that trains a step, always on the same arrays, so that only the step is measured; the network)."""
    net = network_of(grid, case, **options)
    optimizer = optim.AdamW(net.parameters(), 1e-4, shard_over_data=True)
    x, y = batch_of(case, 0)
    target = batch_layout(None if case.loss == "cross_entropy" else net.output_layout.cols[0])
    x, y = spread(grid, x, INPUT), spread(grid, y, target)

    def step():
        loss = getattr(nn, case.loss)(net(x), y)
        loss.backward()
        optimizer.clip(1.0)
        optimizer.step()
        return loss.item()

    return step, net


def assert_steady(grid, case, **options):
    step, net = trainer(grid, case, **options)
    move_what_is_waited_for(grid.engine)  # so that work memory for the largest number of collectives is allocated
    found = [(step(), grid.workspace.in_use()) for _ in range(3)]
    held, grid.engine.wrap = grid.workspace.allocated, None
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    found += [(step(), grid.workspace.in_use()) for _ in range(3)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(grid.comm.allgather(peak - before)) < MEBIBYTE
    assert set(grid.comm.allgather(grid.workspace.allocated - held)) == {0}
    assert len({in_use for _, in_use in found}) == 1
    assert found[-1][0] < found[0][0]
    assert max(parameter.local.nbytes for parameter in net.parameters()) > MEBIBYTE


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Smaller slices of elementwise operations than 256 KiB, so that the peak shows the other memory."""
    monkeypatch.setattr(NumpyLibrary, "slice_elements", 2**12)


RELU = CASE._replace(activation="relu", norm=False, loss="cross_entropy")
LAST = over_grids(lambda ranks: GRIDS[ranks][-1:])


@pytest.mark.nightly
@over_grids(lambda ranks: GRIDS[ranks][:2])
def test_the_steady_state_of_training_allocates_nothing_large(grid):
    """For vectors, with a state sharded over data, and with clipping."""
    assert_steady(grid, CASE)


@pytest.mark.nightly
@looped("case, options", [(RELU, {}), (CASE, {"dropout": 0.1, "recompute": True})])
@LAST
def test_other_networks_allocate_nothing_large_either(grid, case, options):
    """With relu and classes; with dropout and recomputation."""
    assert_steady(grid, case, **options)


def deep(grid, overlap):
    """(a network of eight layers, an input, a target, bytes of an activation of all columns)."""
    nn.Tape.of(grid).parallel.overlap = overlap
    case = Case((256,) * 9, 512, "gelu", False, "mse")
    return network_of(grid, case), *(spread(grid, each, INPUT) for each in batch_of(case, 0)), 512 * 256 * 8


@LAST
def test_activations_go_while_the_backward_pass_comes(grid):
    """Memory in use grows by less than three activations over that at the end of the forward pass, although there are
    eight layers."""
    net, x, y, size = deep(grid, nn.Overlap(reshard_after_forward=True, ors=False))
    for _ in range(2):
        before = grid.workspace.in_use()
        loss = nn.mse(net(x), y)
        forward = grid.workspace.in_use() - before
        grid.workspace.most_lent = grid.workspace.in_use()
        loss.backward()
        most = grid.workspace.most_lent - before
        assert grid.workspace.in_use() == before
    activation = size // grid.z.size // min(grid.x.size, grid.y.size)
    assert forward > 12 * activation / max(grid.x.size, grid.y.size)
    assert most - forward < 3 * activation + 256 * 256 * 8


@LAST
def test_evaluation_holds_two_layers_at_most(grid):
    net, x, _, size = deep(grid, nn.Overlap(reshard_after_forward=True, oag=False))
    before = grid.workspace.most_lent = grid.workspace.in_use()
    with net.evaluating():
        out = net(x)
    assert grid.workspace.most_lent - before <= size // grid.z.size * 3 + 256 * 256 * 8
    assert not out.requires_grad
    del out
    assert grid.workspace.in_use() == before
