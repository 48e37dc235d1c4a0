"""The barrier along an axis."""

import time

import pytest
from loops import given

from pmm3d import Grid


@pytest.mark.parallel([4], thorough=[2, 3, 8])
def test_no_rank_leaves_the_barrier_before_all_have_entered(comm):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for late in range(comm.size):
            with given(late=late):
                comm.Barrier()
                if grid.rank == late:
                    time.sleep(0.05)  # a rank that did not wait would have left by then
                entered = time.monotonic()
                grid.x.barrier("barrier").wait()
                left = time.monotonic()
                assert min(comm.allgather(left)) >= max(comm.allgather(entered))
