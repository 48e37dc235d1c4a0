"""Shards by columns: every constructor can make them, results do not change, and nothing is copied."""

import h5py
import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import integers

from pmm3d import DistMatrix, Layout, LayoutError, MatmulPlan, matmul
from pmm3d.arrays import library_of

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6])
ROWS, COLS = 11, 7


def by_columns(matrix):
    return matrix.order == "F" and library_of(matrix.local).is_contiguous(matrix.local.T)


def made(grid, order, layout, path):
    """The same matrix by each constructor."""
    whole = integers((ROWS, COLS))
    placed = DistMatrix.from_global(grid, whole, layout=layout, order=order)
    empty = DistMatrix.empty(grid, (ROWS, COLS), layout=layout, order=order)
    empty.local[...] = placed.local
    return {
        "from_global": placed,
        "empty": empty,
        "from a root": DistMatrix.from_global(
            grid, whole if grid.rank == 0 else None, layout=layout, root=0, order=order
        ),
        "from_function": DistMatrix.from_function(
            grid, (ROWS, COLS), lambda i, j: whole[i, j], layout=layout, order=order
        ),
        "from_local": DistMatrix.from_local(
            grid, np.array(placed.local, order="F"), (ROWS, COLS), layout=layout, order=order
        ),
        "from_file": DistMatrix.from_file(grid, path, "values", layout=layout, order=order),
    }


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@pytest.mark.numpy_only("the shards of this test are made by numpy")
@each_grid
def test_every_maker_has_both_orders(grid, comm, tmp_path):
    path = comm.bcast(str(tmp_path / "values.h5"))
    if grid.rank == 0:
        with h5py.File(path, "w") as file:
            file["values"] = integers((ROWS, COLS))
    comm.Barrier()
    for layout in (Layout.A, Layout.B, Layout.C, Layout()):
        for order in "CF":
            for maker, matrix in made(grid, order, layout, path).items():
                with given(layout=layout, order=order, maker=maker):
                    assert matrix.order == order and (order == "C" or by_columns(matrix))
                    assert np.array_equal(matrix.gather(), integers((ROWS, COLS)))
        drawn = [DistMatrix.random(grid, (ROWS, COLS), seed=3, layout=layout, order=order) for order in "CF"]
        assert by_columns(drawn[1]) and np.array_equal(drawn[0].gather(), drawn[1].gather())


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_products_are_the_same_in_any_order(grid):
    for orders in ("CCC", "CFC", "FCC", "FFC", "CCF", "FFF"):
        with given(orders=orders):
            assert_order_changes_nothing(grid, *orders)


def assert_order_changes_nothing(grid, first, second, third):
    m, n, k = 13, 9, 10
    a, b = integers((m, k), seed=1), integers((k, n), seed=2)
    left = DistMatrix.from_global(grid, a, order=first)
    right = DistMatrix.from_global(grid, b, layout=Layout.B, order=second)
    out = DistMatrix.from_global(grid, integers((m, n), seed=3), layout=Layout.C, order=third)
    assert matmul(left, right, out=out, beta=2) is out and out.order == third
    assert np.array_equal(out.gather(), a @ b + 2 * integers((m, n), seed=3))
    assert (matmul(left, right) if third == "C" else out).order == third
    with MatmulPlan(left, right, out=out) as product:
        assert np.array_equal(product().gather(), a @ b)
    moved = left.redistribute(Layout.C)
    assert moved.order == first and np.array_equal(moved.gather(), a)
    assert np.array_equal((left.T @ left).gather(), a.T @ a)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@pytest.mark.numpy_only("tensors of this test are of numpy")
def test_a_product_copies_no_operand_for_its_order(some_grid):
    """Operands in the right layout are multiplied in place: the work memory is that of operands by rows."""
    grid, plans = some_grid, []
    for order in "CF":
        a = DistMatrix.random(grid, (64, 48), order=order)
        b = DistMatrix.random(grid, (48, 32), layout=Layout.B, order=order)
        with MatmulPlan(a, b) as product:
            plans.append(product._product.plan)
    assert plans[0].moves == plans[1].moves == plans[0].moves and not plans[1].moves


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_other_orders_and_shared_ones_are_refused(some_grid, fails):
    for order in ("A", "c", 3, None):
        fails(
            LayoutError,
            'the order of a shard is "C", by rows, or "F", by columns',
            lambda order=order: DistMatrix.empty(some_grid, (4, 4), order=order),
        )
    fails(
        LayoutError,
        "shards in shared memory are stored by rows",
        lambda: DistMatrix.random(some_grid, (4, 4), order="F", shared=True),
    )
