"""Overlap inside layers, and networks on ranks with invented nodes.

Layers with overlap="decomposed": received rows are multiplied when they arrive, and rows of sums are sent when they
are computed. Bytes and numbers are equal; there are more GEMMs.

On nodes: bytes as in a dry run, weights that do not depend on overlap, hierarchical sums over data.
"""

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    CLASSES,
    EVEN,
    GRIDS,
    Case,
    adamw,
    batch_of,
    bits,
    network_of,
    over_grids,
    spread,
    train,
    weights_of,
)
from test_nn_volume import assert_moved_as_dry

from pmm3d import Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn.training.record import drain

pytestmark = [pytest.mark.parallel([4], thorough=[2, 8]), pytest.mark.deadline(240)]

CASES = {
    "even": Case((64, 128, 64, 128), 64, "relu", loss="mse"),
    "ragged": Case((7, 13, 5, 6), 23, "relu", loss="mse"),
    "few rows": Case((6, 8, 5), 3, "relu", loss="mse"),
}


def passed(grid, case, wanted=True, **overlap):
    """Result and gradients, bytes by axis and phase, and the number of GEMMs of a pass with sharded activations."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=False, **overlap)
    net = network_of(grid, case, norm=False, activations="sharded")
    x, y = batch_of(case, 0)
    x = nn.Tensor(spread(grid, x), requires_grad=wanted)
    grid.ledger.reset()
    out = net(x)
    nn.mse(out, spread(grid, y, batch_layout(None))).backward()
    found = [out.gather(), *(each.grad.gather() for each in (*([x] if wanted else []), *net.parameters()))]
    moved = {
        (key.axis, key.phase): (entry.sent, entry.received)
        for key, entry in grid.ledger.entries.items()
        if key.phase in ("gather I", "gather dO", "reduce O", "reduce dI", "reduce dW")
    }
    return found, moved, grid.ledger.total(operation="gemm").calls


@over_grids(GRIDS)
@looped("again", [False, True])
@looped("case", CASES.values())
def test_result_gradients_and_bytes_are_the_same(grid, comm, again, case):
    (plain, moved, _), (found, also_moved, _) = (
        passed(grid, case, decomposed=wanted, regather_inputs=again, oar=not again) for wanted in (False, True)
    )
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    one, other = (comm.allreduce(sum(map(np.array, each.values()), np.zeros(2))) for each in (moved, also_moved))
    assert np.array_equal(one, other) and moved.keys() == also_moved.keys()


@over_grids(GRIDS)
def test_each_ranks_rows_have_a_gemm(grid):
    """A product has one GEMM for each rank whose rows it receives or keeps. The first of three layers has a whole
    input, and reduces along y. The forward products of the others, and their dI, gather along one axis and reduce along
    the other."""
    case = CASES["even"]
    plain, decomposed = (passed(grid, case, wanted=False, decomposed=wanted)[2] for wanted in (False, True))
    assert decomposed - plain == (grid.y.size - 1) + 4 * (max(grid.x.size, grid.y.size) - 1)


@over_grids(GRIDS)
def test_left_open_it_is_done_across_nodes(grid, monkeypatch):
    counts = []
    for hosts in (1, 2):
        monkeypatch.setattr(grid, "hosts", hosts)
        counts.append(passed(grid, CASES["even"])[2])
    monkeypatch.setattr(grid, "hosts", 1)
    assert counts[0] == passed(grid, CASES["even"], decomposed=False)[2]
    assert (counts[1] > counts[0]) == (grid.x.size * grid.y.size > 1)
    assert nn.Overlap.none().decomposed is False


# On ranks with invented nodes

on_nodes = pytest.mark.usefixtures("two_nodes")
NODE_GRIDS = {
    4: [("ddp", 1), ("fsdp", 1), ("1x4x1", 1)],
    8: [("ddp", 1), ("fsdp", 1), ("hsdp", 4), ("2x1x1", 4), ("1x8x1", 1)],
}


@on_nodes
@pytest.mark.parallel([4], thorough=[8])
@pytest.mark.parametrize("name", ["plain", "odd", "zero", "accumulated", "sharded"])
def test_a_run_moves_the_bytes_of_its_dry_run(comm, name):
    one = {"odd": 1, "zero": 0, "accumulated": 0, "sharded": -1}.get(name)  # grid with the largest effect of the option
    for shape, data in NODE_GRIDS[comm.size] if all_tests or one is None else [NODE_GRIDS[comm.size][one]]:
        with Grid(comm, shape, data) as grid:
            assert_moved_as_dry(grid, name)


@on_nodes
@pytest.mark.parallel([4], thorough=[8])
@looped("number", range(3))
def test_overlap_changes_no_bit(comm, number):
    found, (shape, data) = set(), NODE_GRIDS[comm.size][number]
    for overlap in (nn.Overlap(), nn.Overlap.none(), nn.Overlap(bucket_bytes=100)):
        with Grid(comm, shape, data) as grid:
            nn.Tape.of(grid).parallel.overlap = overlap
            losses, net = train(grid, CLASSES, 3, adamw)
            found.add((losses.tobytes(), *bits(weights_of(net)).values()))
    assert len(found) == 1


@on_nodes
@pytest.mark.parallel([4], thorough=[8])
def test_gradients_over_data_cross_the_link_once(comm, monkeypatch):
    """With 2 nodes of 4 ranks, a quarter of the bytes that flat sums bring into a node. Small gradients are sent
    whole."""

    def into_a_node(sums):
        monkeypatch.setenv("PMM3D_SUMS", sums)
        with Grid(comm, "ddp") as grid:
            net = train(grid, EVEN, 1)[1]
            grid.ledger.reset()
            train(grid, EVEN, 1, net=net)
            drain(grid)
            across = grid.comm.allgather(grid.ledger.total(axis="data", phase="reduce data").across)
            return sum(across[: comm.size // 2]), net.size

    (by_nodes, elements), (flat, _) = into_a_node("nodes"), into_a_node("ranks")
    assert flat == comm.size // 2 * by_nodes and by_nodes == comm.size // 2 * 8 * elements
