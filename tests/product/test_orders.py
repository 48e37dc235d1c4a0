"""Shards by columns: products do not change, and nothing is copied. Constructors: test_matrix.py."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given, looped
from products import each_shape
from samples import integers, operands

from pmm3d import DisagreementError, DistMatrix, Grid, Layout, LayoutError, MatmulPlan, matmul
from pmm3d.product.multiply import plan_for


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


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@pytest.mark.numpy_only("tensors of this test are of numpy")
def test_a_product_copies_no_operand_for_its_order(some_grid):
    """Operands in the right layout are multiplied in place: the work memory is that of operands by rows."""
    plans = []
    for order in "CF":
        with MatmulPlan(*operands(some_grid, (64, 32, 48), order=order)) as product:
            plans.append(product._product.plan)
    assert plans[0].workspace == plans[1].workspace and not plans[0].moves and not plans[1].moves


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("size", [(24, 12, 16), (7, 9, 5), (1, 6, 3)])
@each_shape
def test_a_new_c_by_columns(grid, size):
    m, n, k = size
    a = DistMatrix.from_global(grid, integers((m, k), seed=1))
    b = DistMatrix.from_global(grid, integers((k, n), seed=2), layout=Layout.B)
    wanted, c = a.gather() @ b.gather(), matmul(a, b, order="F")
    assert c.order == "F" and np.array_equal(c.gather(), wanted)
    assert c.layout.on(grid.shape) == Layout(rows=("z",), cols=("x", "y")).on(grid.shape)
    assert not plan_for(b.T, a.T, None, None, None).moves
    assert matmul(a, b, out=c, beta=1) is c and np.array_equal(c.gather(), 2 * wanted)
    with MatmulPlan(a, b, order="F") as product:
        assert product().order == "F" and np.array_equal(product().gather(), wanted)


@pytest.mark.parallel([2], thorough=[4])
def test_what_makes_no_sense_is_refused(comm, all_fail):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid)
        out, text = matmul(a, b), "the order of a shard is"
        bench = f"{text} .*pmm3d bench --order times each"
        make = lambda order, **options: lambda: DistMatrix.random(grid, (4, 4), order=order, **options)
        all_fail(
            (
                LayoutError,
                "out has an order already, .*: leave one of them out",
                lambda: matmul(a, b, out=out, order="F"),
            ),
            (LayoutError, text, lambda: matmul(a, b, order="f")),
            *((LayoutError, text, make(order)) for order in ("A", "c", 3, None)),
            (LayoutError, "shards in shared memory are stored by rows", make("F", shared=True)),
            (LayoutError, text, lambda: MatmulPlan(a, b, order=0)),
            (LayoutError, bench, lambda: matmul(a, b, order="auto")),
            (LayoutError, bench, lambda: MatmulPlan(a, b, order="auto")),
            (LayoutError, bench, make("auto")),
            (LayoutError, bench, lambda: DistMatrix.from_local(grid, a.local, a.shape, order="auto")),
            (DisagreementError, "different", make("FC"[comm.rank == 0])),
            (DisagreementError, "different", lambda: matmul(a, b, order=None if comm.rank else "F")),
        )
