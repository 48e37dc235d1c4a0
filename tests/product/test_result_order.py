"""matmul(order=): the storage order of a new C."""

import numpy as np
import pytest
from loops import looped
from samples import integers

from pmm3d import DisagreementError, DistMatrix, Grid, Layout, LayoutError, MatmulPlan, matmul
from pmm3d.product.multiply import plan_for

M, N, K = 24, 12, 16
SHAPES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (1, 1, 4)]}


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("size", [(24, 12, 16), (7, 9, 5), (1, 6, 3)])
def test_a_new_c_by_columns(comm, size):
    m, n, k = size
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a = DistMatrix.from_global(grid, integers((m, k), seed=1))
            b = DistMatrix.from_global(grid, integers((k, n), seed=2), layout=Layout.B)
            c = matmul(a, b, order="F")
            assert c.order == "F" and np.array_equal(c.gather(), a.gather() @ b.gather())
            assert c.layout.on(grid.shape) == Layout(rows=("z",), cols=("x", "y")).on(grid.shape)
            assert not plan_for(b.T, a.T, None, None, None).moves
            again = matmul(a, b, out=c, beta=1)
            assert again is c and np.array_equal(c.gather(), 2 * (a.gather() @ b.gather()))
            with MatmulPlan(a, b, order="F") as product:
                assert product().order == "F" and np.array_equal(product().gather(), a.gather() @ b.gather())


@pytest.mark.parallel([2], thorough=[1])
def test_what_makes_no_sense_is_refused(comm, fails):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = DistMatrix.random(grid, (M, K)), DistMatrix.random(grid, (K, N), layout=Layout.B)
        out = matmul(a, b)
        fails(
            LayoutError,
            "out has an order already, and order='F' is of a new C: leave one of them out",
            lambda: matmul(a, b, out=out, order="F"),
        )
        fails(LayoutError, "the order of a shard is", lambda: matmul(a, b, order="f"))
        fails(LayoutError, "the order of a shard is", lambda: MatmulPlan(a, b, order=0))
        for made in (
            lambda: matmul(a, b, order="auto"),
            lambda: MatmulPlan(a, b, order="auto"),
            lambda: DistMatrix.random(grid, (M, K), order="auto"),
            lambda: DistMatrix.from_local(grid, a.local, (M, K), order="auto"),
        ):
            fails(LayoutError, "the order of a shard is .*pmm3d bench --order times each", made)


@pytest.mark.parallel([2])
def test_all_ranks_ask_for_one_order(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        fails(DisagreementError, "different", lambda: DistMatrix.random(grid, (4, 4), order="FC"[comm.rank]))
        a, b = DistMatrix.random(grid, (M, K)), DistMatrix.random(grid, (K, N), layout=Layout.B)
        fails(DisagreementError, "different", lambda: matmul(a, b, order=("F", None)[comm.rank]))
