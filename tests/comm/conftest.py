"""Fixture: the grids whose axes have every size and stride that matters to a collective."""

import pytest
from loops import given
from mpi_runner.plugin import process_grids

GRIDS = {1: [(1, 1, 1)], 2: [(1, 2, 1)], 3: [(3, 1, 1)], 4: [(2, 1, 2)], 6: [(1, 2, 3)], 8: [(4, 1, 2)]}
"""Axes of 2, 3, 4, 6 and 8 ranks, which are 1, 2 or 4 ranks apart."""


@pytest.fixture
def each_grid(comm, nranks, pytestconfig):
    """each_grid(check): runs check(grid) on a grid of that many ranks. With --all: on every grid, in turn."""
    from pmm3d import Grid

    def run(check):
        for shape in process_grids(nranks) if pytestconfig.getoption("all_tests") else GRIDS[nranks]:
            with given(shape=shape), Grid(comm, shape, device_transport="direct") as grid:
                check(grid)

    return run
