"""Fixtures of tests of products: open grids, and tables of errors."""

import pytest
from loops import given
from products import SHAPES


@pytest.fixture
def grids(comm):
    """Open grids of several shapes. After a failed test, they stay open until the end of the job."""
    from pmm3d import Grid

    made = [Grid(comm, shape) for shape in SHAPES[comm.size]]
    yield made
    for grid in made:
        grid.close()


@pytest.fixture
def all_fail(fails):
    """all_fail(case, ...): check each case (kind, text, call) by `fails`."""

    def check(*cases):
        for kind, text, call in cases:
            with given(text=text):
                fails(kind, text, call)

    return check
