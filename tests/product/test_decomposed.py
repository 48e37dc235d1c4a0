"""overlap="decomposed": bits and bytes of the plain product for all operands and options; refused options."""

import time
from itertools import product

import numpy as np
import pytest
from loops import given, looped
from products import SHAPES
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

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 8])
SIZES = [(37, 29, 41), (3, 2, 5), (1, 1, 1), (160, 96, 128), (9, 300, 200)]


def moved(grid):
    phases = "gather A", "gather B", "reduce C"
    return [(grid.ledger.total(phase=phase).sent, grid.ledger.total(phase=phase).received) for phase in phases]


@pytest.mark.parallel([1, 4, 8], thorough=[2])
def test_bytes_are_those_of_one_panel_and_so_are_whole_numbers(comm, grids, pytestconfig):
    """Also those of a dry run."""
    cases = [
        *((size, "float64") for size in SIZES),
        *((SIZES[0], dtype) for dtype in ("float32", "complex128")),
        *((size, "float16") for size in SIZES[:2]),
    ]
    if pytestconfig.getoption("all_tests"):
        cases = list(product(SIZES, ["float32", "float64", "complex128", "float16"]))
    for grid, (size, dtype) in product(grids, cases):
        with given(grid=grid.shape, size=size, dtype=dtype), Grid.dry(grid.shape[:3], rank=comm.rank) as dry:
            a, b = operands(grid, size, dtype, distribution="integers")
            grid.ledger.reset()  # before the plain product, whose results in work memory could hide an error
            found = matmul(a, b, alpha=2, overlap="decomposed")
            decomposed = moved(grid)
            grid.ledger.reset()
            wanted = matmul(a, b, alpha=2, panels=1)
            matmul(*operands(dry, size, dtype), overlap="decomposed")
            assert moved(grid) == decomposed == moved(dry)
            assert bits_of(found.local) == bits_of(wanted.local)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_bits_are_those_of_one_panel_where_the_blas_multiplies_rows_alike(comm, grids, fails):
    """Each element of C is the same sum over k, in rank order. For very few rows, OpenBLAS uses other kernels. Repeated
    calls allocate nothing, and max_workspace is kept."""
    for grid in grids:
        a, b = operands(grid, (512, 96, 128))
        wanted, c = matmul(a, b, panels=1), matmul(a, b, overlap="decomposed")
        held = grid.workspace.allocated
        assert bits_of(matmul(a, b, out=c, overlap="decomposed").local) == bits_of(wanted.local)
        assert grid.workspace.allocated == held
        if comm.size > 1:
            fails(MemoryLimitError, "decomposed", lambda: matmul(a, b, overlap="decomposed", max_workspace=1000))


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
@looped("late", range(4))
def test_own_rows_are_sent_on_if_a_rank_comes_late(comm, stages_of_two, late):
    """For the late rank, the messages of the first round have arrived, and it sends its own rows in the second round at
    once."""
    with Grid(comm, (4, 1, 1)) as grid:
        a, b = operands(grid, (64, 8, 16), distribution="integers")
        expected = a.gather() @ b.gather()
        comm.Barrier()
        time.sleep(0.05 * (grid.rank == late))
        assert np.array_equal(matmul(a, b, overlap="decomposed").gather(), expected)


def assert_takes(grid, case, form=None, layouts=(Layout.A, Layout.B), beta=0, **options):
    of = {"dtype": "complex128", "distribution": "integers", **options}
    a, b = operands(grid, (23, 17, 19), layouts=layouts, **of)
    if form:
        a, b = form(b), form(a)
    shape, turned = (a.shape[0], b.shape[1]), case == "out transposed"
    out = lambda: DistMatrix.random(grid, shape[::-1] if turned else shape, seed=5, layout=Layout.C, **of)
    plain, decomposed = (out().T if turned else out() for _ in range(2))
    matmul(a, b, out=plain, beta=beta, panels=1)
    if case == "plan":
        with MatmulPlan(a, b, out=decomposed, overlap="decomposed") as plan:
            plan()
            plan()
    else:
        matmul(a, b, out=decomposed, beta=beta, overlap="decomposed")
    assert np.array_equal(decomposed.gather(), plain.gather())


@looped(
    "case, options",
    [
        ("transposed", {"form": lambda x: x.T}),
        ("conjugated", {"form": lambda x: x.H}),
        ("redistributed", {"layouts": (Layout.B, Layout.C)}),
        ("out transposed", {}),
        ("beta", {"beta": 3}),
        ("plan", {}),
    ],
)
def test_whatever_matmul_takes(grids, case, options):
    for grid in grids:
        assert_takes(grid, case, **options)


def test_matrices_of_torch(grids):
    for grid in grids:
        assert_takes(grid, "torch", library="torch")


@pytest.mark.parallel([2], thorough=[4, 8])
def test_what_cannot_be_is_refused_on_every_rank(comm, all_fail):
    with Grid(comm) as grid, Grid(comm, (1, comm.size, 1)) as other:
        (a, b), (c, d) = operands(grid, (40, 40, 40)), operands(other, (40, 40, 40))
        whole = DistMatrix.empty(other, (40, 40), layout=Layout(rows=("z",), cols=("x",)))
        call = lambda overlap, **options: lambda: matmul(a, b, overlap=overlap, **options)
        all_fail(
            (LayoutError, "overlap is one of auto, none, decomposed", call("ring")),
            (LayoutError, "pass the number of panels", call("panels")),
            (LayoutError, "do not go together", call("none", panels=2)),
            (DTypeError, "tf32", call("decomposed", tf32=True)),
            (LayoutError, "and panels=2 do not go", call("decomposed", panels=2)),
            (DisagreementError, "different", call("decomposed" if comm.rank else None)),
            (LayoutError, "pass an out in Layout.C", lambda: matmul(c, d, out=whole, overlap="decomposed")),
        )
