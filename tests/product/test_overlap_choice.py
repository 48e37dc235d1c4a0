"""The default overlap mode: none on one node, decomposed across nodes; one setting switches it off."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import samples
from loops import looped
from products import SHAPES
from samples import bits_of

from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, Pmm3dError, matmul
from pmm3d.comm import communicator
from pmm3d.model.ranking import nominal, rank_products
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2], thorough=[4])
SIZES = [(512, 64, 64), (64, 512, 96), (128, 128, 1024), (512, 1024, 8)]
operands = partial(samples.operands, distribution="integers")


@pytest.fixture
def own_nodes(comm, monkeypatch):
    """MPI reports a different node for each rank."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank}")


def planned(a, b, out=None, panels=None, limit=None, overlap=None):
    return plan_for(a, b, out, panels, limit, overlap)


@looped("size", SIZES)
def test_products_across_nodes_are_decomposed_if_pieces_travel(comm, own_nodes, size):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, size)
            c, plan = matmul(a, b), planned(a, b)
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
                plan = planned(left, right)
                _, k_axis, n_axis = plan.axis_roles
                arrives = plan.a == 0 and getattr(grid.shape, n_axis) > 1
                assert not plan.moves and plan.decomposed == (arrives or getattr(grid.shape, k_axis) > 1)
                assert np.array_equal(matmul(left, right).gather(), left.gather() @ right.gather())


def test_on_one_node_no_product_is(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
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
