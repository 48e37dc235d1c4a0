"""Layers with overlap="decomposed": received rows are multiplied when they arrive, and rows of sums are sent when they
are computed. Bytes and numbers are equal; there are more GEMMs."""

import numpy as np
import pytest
from loops import given
from networks import GRIDS, Case, batch_of, network_of, on_each_grid, spread

from pmm3d import nn
from pmm3d.layout import batch_layout

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


def test_result_gradients_and_bytes_are_the_same(comm):
    for again in [False, True]:
        for case in CASES.values():
            with given(again=again, case=case):

                def check(grid):
                    plain, decomposed = (
                        passed(grid, case, decomposed=wanted, regather_inputs=again, oar=not again)
                        for wanted in (False, True)
                    )
                    for one, other in zip(plain[0], decomposed[0], strict=True):
                        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
                    moved, also_moved = (
                        comm.allreduce(sum(map(np.array, found[1].values()), np.zeros(2)))
                        for found in (plain, decomposed)
                    )
                    assert np.array_equal(moved, also_moved) and plain[1].keys() == decomposed[1].keys()

                on_each_grid(comm, check, GRIDS[comm.size])


def test_each_ranks_rows_have_a_gemm(comm):
    """A product has one GEMM for each rank whose rows it receives or keeps. The first of three layers has a whole
    input, and reduces along y. The forward products of the others, and their dI, gather along one axis and reduce along
    the other."""

    def check(grid):
        case = CASES["even"]
        plain, decomposed = (passed(grid, case, wanted=False, decomposed=wanted)[2] for wanted in (False, True))
        assert decomposed - plain == (grid.y.size - 1) + 4 * (max(grid.x.size, grid.y.size) - 1)

    on_each_grid(comm, check, GRIDS[comm.size])


def test_left_open_it_is_done_across_nodes(comm, monkeypatch):
    def check(grid):
        counts = []
        for hosts in (1, 2):
            monkeypatch.setattr(grid, "hosts", hosts)
            counts.append(passed(grid, CASES["even"])[2])
        monkeypatch.setattr(grid, "hosts", 1)
        assert counts[0] == passed(grid, CASES["even"], decomposed=False)[2]
        assert (counts[1] > counts[0]) == (grid.x.size * grid.y.size > 1)
        assert nn.Overlap.none().decomposed is False

    on_each_grid(comm, check, GRIDS[comm.size])
