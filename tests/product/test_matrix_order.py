"""Shards by columns: products do not change, and nothing is copied. Constructors: test_matrix.py."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import integers, operands

from pmm3d import DistMatrix, Layout, LayoutError, MatmulPlan, matmul

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6])


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_products_are_the_same_in_any_order(grid):
    a, b, c = (integers(shape, seed=seed) for seed, shape in enumerate(((13, 10), (10, 9), (13, 9))))
    for first, second, third in ("CCC", "CFC", "FCC", "FFC", "CCF", "FFF"):
        with given(orders=first + second + third):
            left = DistMatrix.from_global(grid, a, order=first)
            right = DistMatrix.from_global(grid, b, layout=Layout.B, order=second)
            out = DistMatrix.from_global(grid, c, layout=Layout.C, order=third)
            assert matmul(left, right, out=out, beta=2) is out and out.order == third
            assert np.array_equal(out.gather(), a @ b + 2 * c)
            assert matmul(left, right).order == "C"
            with MatmulPlan(left, right, out=out) as product:
                assert np.array_equal(product().gather(), a @ b)
            moved = left.redistribute(Layout.C)
            assert moved.order == first and np.array_equal(moved.gather(), a)
            assert np.array_equal((left.T @ left).gather(), a.T @ a)


@pytest.mark.numpy_only("tensors of this test are of numpy")
def test_a_product_copies_no_operand_for_its_order(some_grid):
    """Operands in the right layout are multiplied in place: the work memory is that of operands by rows."""
    plans = []
    for order in "CF":
        with MatmulPlan(*operands(some_grid, (64, 32, 48), order=order)) as product:
            plans.append(product._product.plan)
    assert plans[0].workspace == plans[1].workspace and not plans[0].moves and not plans[1].moves


def test_other_orders_and_shared_ones_are_refused(some_grid, all_fail):
    make = lambda **options: lambda: DistMatrix.random(some_grid, (4, 4), **options)
    all_fail(
        *((LayoutError, 'the order of a shard is "C".* or "F"', make(order=order)) for order in ("A", "c", 3, None)),
        (LayoutError, "shards in shared memory are stored by rows", make(order="F", shared=True)),
    )
