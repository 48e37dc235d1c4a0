"""A test that loops over process grids: one item per rank count, and a failure names the grid."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
from loops import given
from mpi_runner.plugin import canonical_grids, process_grids

MOST_WITHOUT_ALL = 4
"""Above so many ranks a test without --all takes the first of the canonical grids. On 8 ranks this is 2x2x2."""


def each_grid(test: Callable) -> Callable:
    """Run the test once on each grid of its number of ranks. The test takes the open grid as `grid`.

    With --all these are all grids. Without it these are the canonical grids, and on 8 ranks the first of them.
    """

    @functools.wraps(test)
    def looped(comm, request, **fixtures):
        from pmm3d import Grid

        every = request.config.getoption("all_tests")
        shapes = process_grids(comm.size) if every else canonical_grids(comm.size)
        for shape in shapes if every or comm.size <= MOST_WITHOUT_ALL else shapes[:1]:
            with given(grid=shape), Grid(comm, shape, device_transport="direct") as grid:
                test(grid=grid, **fixtures, **({"comm": comm} if "comm" in wanted else {}))

    wanted = inspect.signature(test).parameters
    fixtures = [name for name in wanted if name not in ("grid", "comm")]
    looped.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("comm", "request", *fixtures)]
    )
    return pytest.mark.deadline(240)(looped)
