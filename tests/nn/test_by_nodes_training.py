"""Networks on ranks with invented nodes: bytes as in a dry run, weights that do not depend on overlap, hierarchical
sums over data."""

import pytest
from loops import given
from mpi_runner.plugin import all_tests
from networks import CLASSES, EVEN, adamw, bits, train, weights_of
from test_nn_volume import assert_moved_as_dry

from pmm3d import Grid, nn
from pmm3d.nn.training.record import drain

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(240), pytest.mark.usefixtures("two_nodes")]
GRIDS = {
    4: [("ddp", 1), ("fsdp", 1), ("1x4x1", 1)],
    8: [("ddp", 1), ("fsdp", 1), ("hsdp", 4), ("2x1x1", 4), ("1x8x1", 1)],
}


@pytest.mark.parametrize("name", ["plain", "odd", "zero", "accumulated", "sharded"])
def test_a_run_moves_the_bytes_of_its_dry_run(comm, name):
    one = {"odd": 1, "zero": 0, "accumulated": 0, "sharded": -1}.get(name)  # grid with the largest effect of the option
    for shape, data in GRIDS[comm.size] if all_tests or one is None else [GRIDS[comm.size][one]]:
        with Grid(comm, shape, data) as grid:
            assert_moved_as_dry(grid, name)


def test_overlap_changes_no_bit(comm):
    for number in range(3):
        with given(number=number):
            shape, data = GRIDS[comm.size][number]
            found = []
            for overlap in (nn.Overlap(), nn.Overlap.none(), nn.Overlap(bucket_bytes=100)):
                with Grid(comm, shape, data) as grid:
                    nn.Tape.of(grid).parallel.overlap = overlap
                    losses, net = train(grid, CLASSES, 3, adamw)
                    found.append((losses.tolist(), bits(weights_of(net))))
            assert found[0] == found[1] == found[2]


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
