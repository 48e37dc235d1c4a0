"""Memory of training: repeated steps allocate nothing large, and activations are freed during the backward pass."""

import tracemalloc

import pytest
from gates import move_what_is_waited_for
from mpi_runner.plugin import all_tests
from networks import INPUT, Case, batch_of, network_of, on_each_grid, spread

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
    in_use, losses = set(), []
    move_what_is_waited_for(grid.engine)  # so that work memory for the largest number of collectives is allocated
    for _ in range(3):
        losses.append(step())
        in_use.add(grid.workspace.in_use())
    held, grid.engine.wrap = grid.workspace.allocated, None
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(3):
        losses.append(step())
        in_use.add(grid.workspace.in_use())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(grid.comm.allgather(peak - before)) < MEBIBYTE
    assert set(grid.comm.allgather(grid.workspace.allocated - held)) == {0}
    assert set(grid.comm.allgather(len(in_use))) == {1}
    assert losses[-1] < losses[0]
    assert largest_block(net) > MEBIBYTE


def largest_block(net) -> int:
    return max(parameter.local.nbytes for parameter in net.parameters())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Smaller slices of elementwise operations than 256 KiB, so that the peak shows the other memory."""
    monkeypatch.setattr(NumpyLibrary, "slice_elements", 2**12)


def test_the_steady_state_of_training_allocates_nothing_large(comm):
    """With gelu and layer norm, and with relu; for vectors and classes; with a state sharded over data, and with
    clipping."""
    relu = CASE._replace(activation="relu", norm=False, loss="cross_entropy")
    on_each_grid(comm, lambda grid: assert_steady(grid, CASE))
    on_each_grid(comm, lambda grid: assert_steady(grid, relu), GRIDS[comm.size][0 if all_tests else -1 :])


def test_dropout_and_recomputing_allocate_nothing_large_either(comm):
    on_each_grid(comm, lambda grid: assert_steady(grid, CASE, dropout=0.1, recompute=True), GRIDS[comm.size][-1:])


def test_activations_go_while_the_backward_pass_comes(comm):
    """Memory in use grows by less than three activations over that at the end of the forward pass, although there are
    eight layers."""

    def check(grid):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True, ors=False)
        case = Case((256,) * 9, 512, "gelu", False, "mse")
        net = network_of(grid, case)
        x, y = (spread(grid, array, INPUT) for array in batch_of(case, 0))
        for _ in range(2):
            before = grid.workspace.in_use()
            loss = nn.mse(net(x), y)
            forward = grid.workspace.in_use() - before
            grid.workspace.most_lent = grid.workspace.in_use()
            loss.backward()
            most = grid.workspace.most_lent - before
            assert grid.workspace.in_use() == before
        activation = 512 * 256 * 8 // grid.z.size // min(grid.x.size, grid.y.size)
        assert forward > 12 * activation / max(grid.x.size, grid.y.size)
        assert most - forward < 3 * activation + 256 * 256 * 8

    on_each_grid(comm, check, GRIDS[comm.size][-1:])


def test_evaluation_holds_two_layers_at_most(comm):
    def check(grid):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True, oag=False)
        case = Case((256,) * 9, 512, "gelu", False, "mse")
        net = network_of(grid, case)
        x = spread(grid, batch_of(case, 0)[0], INPUT)
        before = grid.workspace.most_lent = grid.workspace.in_use()
        with net.evaluating():
            out = net(x)
        assert grid.workspace.most_lent - before <= 512 * 256 * 8 // grid.z.size * 3 + 256 * 256 * 8
        assert not out.requires_grad
        del out
        assert grid.workspace.in_use() == before

    on_each_grid(comm, check, GRIDS[comm.size][-1:])
