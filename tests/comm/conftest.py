"""Fixture: `each_grid` of tests/each_grid.py for a check inside a test."""

import each_grid as helper
import pytest


@pytest.fixture
def each_grid(comm, request):
    """each_grid(check): runs check(grid) on each grid of that many ranks."""
    return lambda check: helper.each_grid(check)(comm, request)
