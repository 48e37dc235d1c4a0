"""One message of more than 2 GiB."""

import numpy as np
import pytest

from pmm3d import Grid

GIBIBYTE = 2**30


@pytest.mark.thorough("5 GiB of memory")
@pytest.mark.parallel([2])
@pytest.mark.deadline(300)
def test_a_part_of_more_than_two_gibibytes(comm):
    """Rank 0 has 2 GiB and some bytes, with marks at the borders of messages; rank 1 has one byte."""
    counts = [2 * GIBIBYTE + 12345, 1]
    marks = [0, 1, GIBIBYTE - 1, GIBIBYTE, 2 * GIBIBYTE - 1, 2 * GIBIBYTE, counts[0] - 1]
    out = np.zeros(sum(counts), np.uint8)
    part = out[: counts[0]] if comm.rank == 0 else out[counts[0] :]
    if comm.rank == 0:
        part[marks] = np.arange(1, len(marks) + 1)
    else:
        part[...] = 99
    with Grid(comm, (2, 1, 1)) as grid:
        grid.x.all_gather(part, out=out, counts=counts).wait()
        entry = grid.ledger.total(axis="x")
    assert (entry.sent, entry.received) == tuple(counts if comm.rank == 0 else reversed(counts))
    assert list(out[marks]) == list(range(1, len(marks) + 1)) and out[-1] == 99
    written = [np.count_nonzero(out[start : start + GIBIBYTE]) for start in range(0, len(out), GIBIBYTE)]
    assert sum(written) == len(marks) + 1
