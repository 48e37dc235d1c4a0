"""The default overlap mode: none on one node, decomposed across nodes; one setting switches it off."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import samples
from loops import looped
from samples import bits_of

from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, Pmm3dError, matmul
from pmm3d.comm import communicator
from pmm3d.model.ranking import nominal, rank_products
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2], thorough=[4])
SHAPES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)]}
SIZES = [(512, 64, 64), (64, 512, 96), (128, 128, 2048), (1024, 1024, 8)]
operands = partial(samples.operands, distribution="integers")


@pytest.fixture
def own_nodes(comm, monkeypatch):
    """MPI reports a different node for each rank."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank}")


@looped("size", SIZES)
def test_products_across_nodes_are_decomposed_if_pieces_travel(comm, own_nodes, size):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, size)
            c = matmul(a, b)
            plan = plan_for(a, b, None, None, None)
            assert plan.decomposed == (shape[0] > 1 or shape[1] > 1) and plan.panels == 1
            assert np.array_equal(c.gather(), a.gather() @ b.gather())
            with MatmulPlan(a, b) as product:
                assert np.array_equal(product().gather(), c.gather())


@pytest.mark.parallel([4], thorough=[2])
def test_adjoints_go_by_the_axes_that_they_take(comm, own_nodes):
    """dA = dC B^T and dB = A^T dC move no operand, and exchange along other axes. A^T arrives as a whole."""
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, (1024, 256, 512))
            c = matmul(a, b)
            for left, right in ((c, b.T), (a.T, c)):
                plan = plan_for(left, right, None, None, None)
                _, k_axis, n_axis = plan.axis_roles
                arrives = plan.a == 0 and getattr(grid.shape, n_axis) > 1
                assert not plan.moves and plan.decomposed == (arrives or getattr(grid.shape, k_axis) > 1)
                assert np.array_equal(matmul(left, right).gather(), left.gather() @ right.gather())


def test_on_one_node_no_product_is(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            assert plan_for(*operands(grid, SIZES[0]), None, None, None).overlap == "none"


def test_no_measured_machine_decides(comm, own_nodes, monkeypatch):
    """Otherwise bits would depend on a file in the user's home."""
    for machine in ("nominal", "perlmutter", "auto"):
        monkeypatch.setenv("PMM3D_MACHINE", machine)
        with Grid(comm, (comm.size, 1, 1)) as grid:
            assert plan_for(*operands(grid, SIZES[0]), None, None, None).decomposed


def test_one_switch_for_all_products(comm, own_nodes, monkeypatch):
    monkeypatch.setenv("PMM3D_OVERLAP", "none")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for size in SIZES:
            a, b = operands(grid, size)
            assert plan_for(a, b, None, None, None).overlap == "none"
            assert np.array_equal(matmul(a, b).gather(), a.gather() @ b.gather())
        assert plan_for(a, b, None, 2, None).panels == 2
        assert plan_for(a, b, None, None, None, "decomposed").decomposed


def test_panels_that_are_given_are_taken(comm, own_nodes):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid, SIZES[0])
        for panels in (1, 4):
            plan = plan_for(a, b, None, panels, None)
            assert (plan.panels, plan.overlap) == (panels, "none")


@pytest.mark.parallel([4])
def test_axes_that_go_by_nodes_are_decomposed_too(comm, monkeypatch):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank // 2}")
    for shape in (4, 1, 1), (1, 4, 1), (2, 2, 1):
        with Grid(comm, shape) as grid:
            a, b = operands(grid, SIZES[0])
            c = matmul(a, b)
            assert plan_for(a, b, None, None, None).decomposed
            assert bits_of(c.local) == bits_of(matmul(a, b, overlap="none").local)


def test_a_c_that_is_whole_on_the_ranks_that_add_it_up_is_left_whole(comm, own_nodes):
    with Grid(comm, (1, comm.size, 1)) as grid:
        a, b = operands(grid, SIZES[0])
        whole = DistMatrix.empty(grid, (SIZES[0][0], SIZES[0][1]), layout=Layout(rows=("z",), cols=("x",)))
        assert plan_for(a, b, whole, None, None).overlap == "none"


@pytest.mark.parallel([4], thorough=[2])
def test_grids_are_ranked_by_the_modes_that_products_take(comm, own_nodes):
    size, machine = (4096, 512, 512), replace(nominal(1), hidden={"across": 0.8})
    found = rank_products(size, comm.size, "float64", machine).candidates
    assert all(one.seconds <= other.seconds * (1 + 1e-8) for one, other in pairwise(found))
    plain = {
        candidate.grid: candidate.seconds
        for candidate in rank_products(size, comm.size, "float64", machine, overlap="none").candidates
    }
    for candidate in found:
        with Grid(comm, candidate.grid[:3]) as grid:
            plan = plan_for(*operands(grid, size), None, None, None)
            assert plan.memory == sum(candidate.memory.values())
            assert plan.decomposed or candidate.seconds == plain[candidate.grid]
    assert any(candidate.seconds < plain[candidate.grid] for candidate in found)


def test_a_limit_of_memory_is_kept_by_panels(comm, own_nodes):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid, (4096, 64, 64))
        whole = plan_for(a, b, None, 1, None).workspace
        assert plan_for(a, b, None, None, whole).decomposed
        plan = plan_for(a, b, None, None, whole // 2)
        assert plan.workspace <= whole // 2 and plan.panels > 1 and not plan.decomposed


@looped("asked", ["decomposed", "panels"])
def test_what_is_no_mode_of_all_products_is_refused_by_all(comm, monkeypatch, fails, asked):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    fails(
        Pmm3dError,
        f"PMM3D_OVERLAP='{asked}' is invalid. It must be auto or none: .* argument: panels=4",
        lambda: Grid(comm, (1, 1, 1)),
    )


@pytest.mark.parallel([1])
@looped("asked, decomposed", [("auto", True), ("none", False)])
def test_dry_grids_take_the_switch_too(monkeypatch, asked, decomposed):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    with Grid.dry((2, 1, 1), hosts=2) as grid:
        assert plan_for(*operands(grid, SIZES[0]), None, None, None).decomposed == decomposed
