"""Tests of products and collectives that loop over process grids: one item for each number of ranks. An error message
contains the grid. Tests of networks use `networks.over_grids`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from grids import canonical_grids, process_grids
from loops import given


def each_grid(test: Callable, shapes: Mapping[int, list] | None = None, **options: Any) -> Callable:
    """Decorator: run the test on each canonical grid of its number of ranks; with --all, on each grid.

    The argument `grid` of the test is the open grid.

    shapes   for each number of ranks, the grids to run on instead
    options  further arguments of Grid
    """

    @functools.wraps(test)
    def looped(comm, request, **fixtures):
        from pmm3d import Grid

        grids = process_grids if request.config.getoption("all_tests") else canonical_grids
        for shape in shapes[comm.size] if shapes else grids(comm.size):
            with given(grid=shape), Grid(comm, shape, device_transport="direct", **options) as grid:
                test(grid=grid, **fixtures, **({"comm": comm} if "comm" in wanted else {}))

    wanted = inspect.signature(test).parameters
    fixtures = [name for name in wanted if name not in ("grid", "comm")]
    looped.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("comm", "request", *fixtures)]
    )
    return pytest.mark.deadline(240)(looped)
