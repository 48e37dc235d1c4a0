"""Overlap modes. Decomposed: bits and bytes of the plain product; refused options. The default: none on one node,
decomposed across nodes; one setting switches it off."""

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import samples
from loops import given, looped
from products import each_shape
from samples import bits_of

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    Layout,
    LayoutError,
    MatmulPlan,
    MemoryLimitError,
    Pmm3dError,
    matmul,
)
from pmm3d.comm import communicator
from pmm3d.model.ranking import nominal, rank_products
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2], thorough=[4])
SMALL = [(37, 29, 41), (3, 2, 5), (1, 1, 1), (160, 96, 128), (9, 300, 200)]
SIZES = [(512, 64, 64), (64, 512, 96), (128, 128, 1024), (512, 1024, 8)]
operands = partial(samples.operands, distribution="integers")


def moved(grid):
    phases = "gather A", "gather B", "reduce C"
    return [(grid.ledger.total(phase=phase).sent, grid.ledger.total(phase=phase).received) for phase in phases]


@pytest.mark.parallel([1, 4, 8], thorough=[2])
@each_shape
def test_bytes_are_those_of_one_panel_and_so_are_whole_numbers(comm, grid, pytestconfig):
    """Also those of a dry run."""
    cases = [
        *((size, "float64") for size in SMALL),
        *((SMALL[0], dtype) for dtype in ("float32", "complex128")),
        *((size, "float16") for size in SMALL[:2]),
    ]
    if pytestconfig.getoption("all_tests"):
        cases = list(product(SMALL, ["float32", "float64", "complex128", "float16"]))
    for size, dtype in cases:
        with given(size=size, dtype=dtype), Grid.dry(grid.shape[:3], rank=comm.rank) as dry:
            a, b = operands(grid, size, dtype)
            grid.ledger.reset()  # before the plain product, whose results in work memory could hide an error
            found = matmul(a, b, alpha=2, overlap="decomposed")
            decomposed = moved(grid)
            grid.ledger.reset()
            wanted = matmul(a, b, alpha=2, panels=1)
            matmul(*operands(dry, size, dtype), overlap="decomposed")
            assert moved(grid) == decomposed == moved(dry)
            assert bits_of(found.local) == bits_of(wanted.local)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@each_shape
def test_bits_are_those_of_one_panel_where_the_blas_multiplies_rows_alike(comm, grid, fails):
    """Each element of C is the same sum over k, in rank order. For very few rows, OpenBLAS uses other kernels. Repeated
    calls allocate nothing, and max_workspace is kept."""
    a, b = samples.operands(grid, (512, 96, 128))
    wanted, c = matmul(a, b, panels=1), matmul(a, b, overlap="decomposed")
    held = grid.workspace.allocated
    assert bits_of(matmul(a, b, out=c, overlap="decomposed").local) == bits_of(wanted.local)
    assert grid.workspace.allocated == held
    if comm.size > 1:
        fails(MemoryLimitError, "decomposed", lambda: matmul(a, b, overlap="decomposed", max_workspace=1000))


@pytest.mark.parallel([4], thorough=[8])
@each_shape
def test_collectives_of_several_rounds_are_decomposed_and_kept_in_plans(grid, stages_of_two):
    """Rows that arrive in one round are sent on in the next round."""
    a, b = operands(grid, (37, 29, 41))
    wanted = matmul(a, b, alpha=2, panels=1)
    assert np.array_equal(wanted.gather(), 2 * a.gather() @ b.gather())
    assert bits_of(matmul(a, b, alpha=2, overlap="decomposed").local) == bits_of(wanted.local)
    with MatmulPlan(a, b, alpha=2) as plan:
        assert plan._bound[0].run.persists
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
        a, b = operands(grid, (64, 8, 16))
        expected = a.gather() @ b.gather()
        comm.Barrier()
        time.sleep(0.05 * (grid.rank == late))
        assert np.array_equal(matmul(a, b, overlap="decomposed").gather(), expected)


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


@pytest.fixture
def own_nodes(comm, monkeypatch):
    """MPI reports a different node for each rank."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank}")


def planned(a, b, out=None, panels=None, limit=None, overlap=None):
    return plan_for(a, b, out, panels, limit, overlap)


@looped("size", SIZES)
@each_shape
def test_products_across_nodes_are_decomposed_if_pieces_travel(grid, own_nodes, size):
    a, b = operands(grid, size)
    c, plan = matmul(a, b), planned(a, b)
    assert plan.decomposed == (grid.shape.x > 1 or grid.shape.y > 1) and plan.panels == 1
    assert np.array_equal(c.gather(), a.gather() @ b.gather())
    with MatmulPlan(a, b) as product:
        assert np.array_equal(product().gather(), c.gather())


@pytest.mark.parallel([4], thorough=[2])
@each_shape
def test_adjoints_go_by_the_axes_that_they_take(grid, own_nodes):
    """dA = dC B^T and dB = A^T dC move no operand, and exchange along other axes. A^T arrives as a whole."""
    a, b = operands(grid, (1024, 256, 512))
    c = matmul(a, b)
    for left, right in ((c, b.T), (a.T, c)):
        plan = planned(left, right)
        _, k_axis, n_axis = plan.axis_roles
        arrives = plan.a == 0 and getattr(grid.shape, n_axis) > 1
        assert not plan.moves and plan.decomposed == (arrives or getattr(grid.shape, k_axis) > 1)
        assert np.array_equal(matmul(left, right).gather(), left.gather() @ right.gather())


@each_shape
def test_on_one_node_no_product_is(grid):
    assert planned(*operands(grid, SIZES[0])).overlap == "none"


def test_no_measured_machine_decides_but_one_switch(comm, own_nodes, monkeypatch):
    """Otherwise bits would depend on a file in the user's home."""
    for machine in ("nominal", "perlmutter", "auto"):
        monkeypatch.setenv("PMM3D_MACHINE", machine)
        with Grid(comm, (comm.size, 1, 1)) as grid:
            assert planned(*operands(grid, SIZES[0])).decomposed
    monkeypatch.setenv("PMM3D_OVERLAP", "none")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for size in SIZES:
            a, b = operands(grid, size)
            assert planned(a, b).overlap == "none"
            assert np.array_equal(matmul(a, b).gather(), a.gather() @ b.gather())
        assert planned(a, b, panels=2).panels == 2 and planned(a, b, overlap="decomposed").decomposed


def test_what_is_given_is_kept(comm, own_nodes):
    """Panels, a limit of memory, which panels keep, and a C that all ranks along y store as a whole."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid, (4096, 64, 64))
        for panels in (1, 4):
            plan = planned(a, b, panels=panels)
            assert (plan.panels, plan.overlap) == (panels, "none")
        limit = planned(a, b, panels=1).workspace
        plan = planned(a, b, limit=limit // 2)
        assert planned(a, b, limit=limit).decomposed and not plan.decomposed
        assert plan.workspace <= limit // 2 and plan.panels > 1
    with Grid(comm, (1, comm.size, 1)) as grid:
        whole = DistMatrix.empty(grid, SIZES[0][:2], layout=Layout(rows=("z",), cols=("x",)))
        assert planned(*operands(grid, SIZES[0]), whole).overlap == "none"


@pytest.mark.parallel([4])
def test_axes_that_go_by_nodes_are_decomposed_too(comm, two_nodes):
    for shape in (4, 1, 1), (1, 4, 1), (2, 2, 1):
        with Grid(comm, shape) as grid:
            a, b = operands(grid, SIZES[0])
            assert planned(a, b).decomposed
            assert bits_of(matmul(a, b).local) == bits_of(matmul(a, b, overlap="none").local)


@pytest.mark.parallel([4], thorough=[2])
def test_grids_are_ranked_by_the_modes_that_products_take(comm, own_nodes):
    size, machine = (4096, 512, 512), replace(nominal(1), hidden={"across": 0.8})
    found = rank_products(size, comm.size, "float64", machine).candidates
    assert all(one.seconds <= other.seconds * (1 + 1e-8) for one, other in pairwise(found))
    without = rank_products(size, comm.size, "float64", machine, overlap="none").candidates
    plain = {candidate.grid: candidate.seconds for candidate in without}
    for candidate in found:
        with Grid(comm, candidate.grid[:3]) as grid:
            plan = planned(*operands(grid, size))
            assert plan.memory == sum(candidate.memory.values())
            assert plan.decomposed or candidate.seconds == plain[candidate.grid]
    assert any(candidate.seconds < plain[candidate.grid] for candidate in found)


@looped("asked", ["decomposed", "panels"])
def test_what_is_no_mode_of_all_products_is_refused_by_all(comm, monkeypatch, fails, asked):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    text = f"PMM3D_OVERLAP='{asked}' is invalid. It must be auto or none: .* argument: panels=4"
    fails(Pmm3dError, text, lambda: Grid(comm, (1, 1, 1)))


@pytest.mark.parallel([1])
@looped("asked, decomposed", [("auto", True), ("none", False)])
def test_dry_grids_take_the_switch_too(monkeypatch, asked, decomposed):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    with Grid.dry((2, 1, 1), hosts=2) as grid:
        assert planned(*operands(grid, SIZES[0])).decomposed == decomposed
