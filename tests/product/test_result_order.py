"""matmul(order=): the storage order of a new C."""

import numpy as np
import pytest
from loops import looped
from products import SHAPES
from samples import integers, operands

from pmm3d import DisagreementError, DistMatrix, Grid, Layout, LayoutError, MatmulPlan, matmul
from pmm3d.product.multiply import plan_for


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("size", [(24, 12, 16), (7, 9, 5), (1, 6, 3)])
def test_a_new_c_by_columns(comm, size):
    m, n, k = size
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
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
        all_fail(
            (
                LayoutError,
                "out has an order already, .*: leave one of them out",
                lambda: matmul(a, b, out=out, order="F"),
            ),
            (LayoutError, text, lambda: matmul(a, b, order="f")),
            (LayoutError, text, lambda: MatmulPlan(a, b, order=0)),
            (LayoutError, bench, lambda: matmul(a, b, order="auto")),
            (LayoutError, bench, lambda: MatmulPlan(a, b, order="auto")),
            (LayoutError, bench, lambda: DistMatrix.random(grid, (4, 4), order="auto")),
            (LayoutError, bench, lambda: DistMatrix.from_local(grid, a.local, a.shape, order="auto")),
            (DisagreementError, "different", lambda: DistMatrix.random(grid, (4, 4), order="FC"[comm.rank == 0])),
            (DisagreementError, "different", lambda: matmul(a, b, order=None if comm.rank else "F")),
        )
