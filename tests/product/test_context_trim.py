"""BlacsContext.trim frees the memory of plans, and the next product plans again."""

import tracemalloc

import numpy as np
import pytest

from pmm3d import BlacsContext, GridError, PgemmPlan, pgemm, pgemr2d

pytestmark = pytest.mark.parallel([2])
N, BLOCK = 400, 64


def test_trim_frees_the_memory_of_plans(comm, fails):
    """On a product's grid, and where C stays. A PgemmPlan goes on."""
    with BlacsContext(comm, (1, 2)) as context, BlacsContext(context.grid, (2, 1)) as other:
        square, rows = context.descriptor(N, N, BLOCK, BLOCK), other.descriptor(N, N, BLOCK, BLOCK)
        ones, c, moved = square.empty(), square.empty(), rows.empty()
        ones[...] = 1
        part = (1, 1, square)

        def products():
            for n in (N - 1, N, N - 1, N):
                for trans in "NT":
                    c[...] = -1
                    pgemm(trans, trans, n, n, n, 1, ones, *part, ones, *part, 0, c, *part)
            assert (c == N).all()
            pgemr2d(N, N, ones, *part, moved, 1, 1, rows)

        plan = PgemmPlan("N", "N", N, N, N, *part, *part, *part)
        products()
        plan(ones, ones, c)
        context.trim()
        tracemalloc.start()
        products()
        plan(ones, ones, c)
        held = tracemalloc.get_traced_memory()[0]
        numbers = context.grid.everyone._number
        context.trim()
        assert context.grid.everyone._number == numbers + 1  # one agreement
        freed = held - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        matrices = 3 * N * N * 8 // 2
        assert freed > matrices / 2 and not context.plans and not context._memory and not context._plan_work
        grids = context.grid, *context._grids.values()
        assert sum(grid.workspace.allocated for grid in grids) == 0
        products()
        plan(ones, ones, c)
        assert np.all(c == N) and context.plans
        pending = plan.start(ones, ones, c)
        fails(GridError, "a product is under way: wait for it first", context.trim)
        pending.wait()
    fails(GridError, "closed", context.trim)
