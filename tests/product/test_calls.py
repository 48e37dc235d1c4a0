"""Repeated products: their overhead, as the number of calls of Python functions, and their checks."""

import pytest
from calls import calls_of

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, LayoutError, matmul

pytestmark = pytest.mark.numpy_only("the limits are those of numpy arrays")
MOST_CALLS = {1: 150, 4: 280}
"""Largest number of calls of a repeated `a @ b`, by ranks. On Python 3.11 with numpy 2 it takes 117 and 240 calls. It
took 219 and 392, when each call checked and planned the product anew."""


@pytest.mark.parallel([1, 4])
def test_a_repeated_product_takes_few_calls_of_python_and_finds_each_error(comm):
    shape = (1, 1, 1) if comm.size == 1 else (2, 2, 1)
    with Grid(comm, shape) as grid, Grid(comm, shape) as other:
        a, c = (DistMatrix.random(grid, (64, 64), seed=seed) for seed in (1, 3))
        b, d = (DistMatrix.random(grid, (64, 64), seed=seed, layout=Layout.B) for seed in (2, 4))
        first = a @ b
        for left, right in ((a, b), (c, d)):  # equal forms
            assert min(calls_of(lambda: left @ right) for _ in range(3)) < MOST_CALLS[comm.size]
        assert ((a @ b) - first).norm() == 0 and ((c @ d) - first).norm() != 0
        matmul(a, b, out=first)
        with pytest.raises(LayoutError, match="out"):
            matmul(a, b, out=a)
        with pytest.raises(GridError, match="on another Grid"):
            a @ DistMatrix.random(other, (64, 64), layout=Layout.B)
        matmul(a, b, panels=1)
        with pytest.raises(LayoutError, match="whole number"):
            matmul(a, b, panels=True)
        matmul(a, b, alpha=2)
        if comm.size > 1:
            with pytest.raises(DisagreementError, match="argument 4: 2"):
                matmul(a, b, alpha=2) if grid.rank == 1 else a @ b
        assert ((a @ b) - matmul(a, b, alpha=1.0)).norm() == 0
