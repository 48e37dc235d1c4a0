"""overlap="decomposed": bits and bytes of the plain product for all operands and options; refused options."""

import time
from itertools import product

import numpy as np
import pytest
from loops import given
from samples import bits_of, operands

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    Layout,
    LayoutError,
    MatmulPlan,
    MemoryLimitError,
    matmul,
)

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 8])
SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)],
    8: [(2, 2, 2), (1, 4, 2), (8, 1, 1), (4, 2, 1)],
}
SIZES = [(37, 29, 41), (3, 2, 5), (1, 1, 1), (160, 96, 128), (9, 300, 200)]


@pytest.fixture
def grids(comm):
    made = [Grid(comm, shape) for shape in SHAPES[comm.size]]
    yield made
    for grid in made:
        grid.close()


def moved(grid):
    phases = "gather A", "gather B", "reduce C"
    return [(grid.ledger.total(phase=phase).sent, grid.ledger.total(phase=phase).received) for phase in phases]


@pytest.mark.parallel([1, 4, 8], thorough=[2])
def test_bytes_are_those_of_one_panel_and_so_are_whole_numbers(grids, pytestconfig):
    cases = [
        *((size, "float64") for size in SIZES),
        *((SIZES[0], dtype) for dtype in ("float32", "complex128")),
        *((size, "float16") for size in SIZES[:2]),
    ]
    if pytestconfig.getoption("all_tests"):
        cases = list(product(SIZES, ["float32", "float64", "complex128", "float16"]))
    for grid, (size, dtype) in product(grids, cases):
        with given(grid=grid.shape, size=size, dtype=dtype):
            a, b = operands(grid, size, dtype, distribution="integers")
            grid.ledger.reset()  # before the plain product, whose results in work memory could hide an error
            found = matmul(a, b, alpha=2, overlap="decomposed")
            decomposed = moved(grid)
            grid.ledger.reset()
            wanted = matmul(a, b, alpha=2, panels=1)
            assert moved(grid) == decomposed
            assert bits_of(found.local) == bits_of(wanted.local)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_bits_are_those_of_one_panel_where_the_blas_multiplies_rows_alike(grids):
    """Each element of C is the same sum over k, in rank order. For very few rows, OpenBLAS uses other kernels."""
    for grid in grids:
        a, b = operands(grid, (512, 96, 128))
        wanted = matmul(a, b, panels=1)
        assert bits_of(matmul(a, b, overlap="decomposed").local) == bits_of(wanted.local)


@pytest.mark.parallel([4], thorough=[8])
def test_collectives_of_several_rounds_are_decomposed_and_kept_in_plans(comm, stages_of_two):
    """Rows that arrive in one round are sent on in the next round."""
    for shape in SHAPES[comm.size]:
        with given(grid=shape), Grid(comm, shape) as grid:
            a, b = operands(grid, (37, 29, 41), distribution="integers")
            wanted = matmul(a, b, alpha=2, panels=1)
            assert np.array_equal(wanted.gather(), 2 * a.gather() @ b.gather())
            assert bits_of(matmul(a, b, alpha=2, overlap="decomposed").local) == bits_of(wanted.local)
            with MatmulPlan(a, b, alpha=2) as plan:
                assert plan._product.persists
                for _ in range(3):
                    plan.out.local[...] = 7
                    grid.ledger.reset()
                    assert bits_of(plan().local) == bits_of(wanted.local)
                    kept = moved(grid)
            grid.ledger.reset()
            matmul(a, b, alpha=2, panels=1)
            assert moved(grid) == kept


@pytest.mark.parallel([4])
def test_own_rows_are_sent_on_if_a_rank_comes_late(comm, stages_of_two):
    """For the late rank, the messages of the first round have arrived, and it sends its own rows in the second round at
    once."""
    for late in range(comm.size):
        with given(late=late), Grid(comm, (4, 1, 1)) as grid:
            a, b = operands(grid, (64, 8, 16), distribution="integers")
            expected = a.gather() @ b.gather()
            comm.Barrier()
            if grid.rank == late:
                time.sleep(0.05)
            assert np.array_equal(matmul(a, b, overlap="decomposed").gather(), expected)


CASES = ("transposed", "conjugated", "out transposed", "beta", "redistributed", "plan")


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_whatever_matmul_takes(grids):
    for grid, case in product(grids, CASES):
        with given(grid=grid.shape, case=case):
            assert_takes(grid, case)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_matrices_of_torch(grids):
    for grid in grids:
        assert_takes(grid, "torch")


def assert_takes(grid, case):
    library = "torch" if case == "torch" else "numpy"
    a, b = operands(grid, (23, 17, 19), "complex128", library=library, distribution="integers")
    if case == "transposed":
        a, b = b.T, a.T
    if case == "conjugated":
        a, b = b.H, a.H
    if case == "redistributed":
        a, b = a.redistribute(Layout.B), b.redistribute(Layout.C)
    rows, columns = a.shape[0], b.shape[1]
    shape = (columns, rows) if case == "out transposed" else (rows, columns)
    outs = [
        DistMatrix.random(
            grid, shape, seed=5, dtype="complex128", layout=Layout.C, library=library, distribution="integers"
        )
        for _ in range(2)
    ]
    if case == "out transposed":
        outs = [out.T for out in outs]
    beta = 3 if case == "beta" else 0
    matmul(a, b, out=outs[0], beta=beta, panels=1)
    if case == "plan":
        with MatmulPlan(a, b, out=outs[1], overlap="decomposed") as plan:
            plan()
            plan()
    else:
        matmul(a, b, out=outs[1], beta=beta, overlap="decomposed")
    assert np.array_equal(outs[1].gather(), outs[0].gather())


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_work_memory_is_that_of_the_plan_and_max_workspace_is_kept(comm, grids, fails):
    for grid in grids:
        a, b = operands(grid, (300, 200, 250))
        c = matmul(a, b, overlap="decomposed")
        held = grid.workspace.allocated
        matmul(a, b, out=c, overlap="decomposed")
        assert grid.workspace.allocated == held
        if comm.size > 1:
            fails(MemoryLimitError, "decomposed", lambda: matmul(a, b, overlap="decomposed", max_workspace=1000))


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_what_cannot_be_is_refused_on_every_rank(comm, fails):
    with Grid(comm) as grid:
        a, b = operands(grid, (40, 40, 40))
        fails(LayoutError, "overlap is one of auto, none, decomposed", lambda: matmul(a, b, overlap="ring"))
        fails(LayoutError, "pass the number of panels", lambda: matmul(a, b, overlap="panels"))
        fails(LayoutError, "do not go together", lambda: matmul(a, b, overlap="none", panels=2))
        if comm.size > 1:
            fails(LayoutError, "and panels=2 do not go", lambda: matmul(a, b, overlap="decomposed", panels=2))
            fails(DisagreementError, "different", lambda: matmul(a, b, overlap="decomposed" if comm.rank else None))
        fails(DTypeError, "tf32", lambda: matmul(a, b, overlap="decomposed", tf32=True))
    with Grid(comm, (1, comm.size, 1)) as grid:
        a, b = operands(grid, (40, 40, 40))
        whole = DistMatrix.empty(grid, (40, 40), layout=Layout(rows=("z",), cols=("x",)))
        if comm.size > 1:
            fails(LayoutError, "pass an out in Layout.C", lambda: matmul(a, b, out=whole, overlap="decomposed"))


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_a_dry_run_counts_the_same(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid, Grid.dry(shape, rank=comm.rank) as dry:
            for each in (grid, dry):
                a, b = operands(each, (60, 50, 70))
                each.ledger.reset()
                matmul(a, b, overlap="decomposed")
            assert moved(grid) == moved(dry)
