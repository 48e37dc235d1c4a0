"""How communication runs under the GEMM where the caller leaves it open: by the model across nodes, alike on all ranks,
noted once, and off by one switch."""

import logging
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import samples
from loops import looped

from pmm3d import DisagreementError, Grid, MatmulPlan, Pmm3dError, matmul
from pmm3d.comm import communicator
from pmm3d.model import machines
from pmm3d.model.overlap import best_way, clocks_of
from pmm3d.model.product_costs import ProductCosts
from pmm3d.model.ranking import nominal, rank_products
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2], thorough=[4])
SHAPES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)]}
SIZES = [(512, 64, 64), (64, 512, 96), (128, 128, 2048), (1024, 1024, 8)]
operands = partial(samples.operands, distribution="integers")


@pytest.fixture
def own_nodes(comm, monkeypatch):
    """Each rank is on a node of its own, as MPI tells it; and what is measured on this machine is not taken."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank}")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")


@pytest.fixture
def measured(own_nodes, tmp_path, monkeypatch):
    """A machine with links of 4 Gbit/s, that hides 80% of what crosses them."""
    text = (Path(machines.__file__).parent / "known" / "nominal.toml").read_text()
    text = text.replace("byte_across = 8e-11", "byte_across = 2e-9").replace('name = "nominal"', 'name = "slow links"')
    (tmp_path / "slow.toml").write_text(text + "\n[hidden]\nacross = 0.8\ninside = 0.0\n")
    monkeypatch.setenv("PMM3D_MACHINE", str(tmp_path / "slow.toml"))


def wanted_way(grid, size, roles=("z", "y", "x"), rows_come=True):
    sizes = [getattr(grid.shape, axis) for axis in reversed(roles)]
    costs = ProductCosts(size, grid.size, "float64", grid.machine, run=1, roles=roles)
    found = clocks_of(costs, tuple(sizes), rows_come)
    return best_way({name: clock.now for name, clock in found.items()})


@pytest.mark.parallel([2, 4])
@looped("size", SIZES)
def test_the_fastest_way_by_the_model_is_taken(comm, measured, size):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, size)
            c = matmul(a, b)
            assert plan_for(a, b, None, None, None).overlap == wanted_way(grid, size)
            assert np.array_equal(c.gather(), a.gather() @ b.gather())
            with MatmulPlan(a, b) as plan:
                assert np.array_equal(plan().gather(), c.gather())


@pytest.mark.parallel([2, 4])
def test_more_than_one_way_is_taken(comm, measured):
    found = set()
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            found |= {plan_for(*operands(grid, size), None, None, None).overlap for size in (*SIZES, (4096, 512, 512))}
    assert len(found) > 1, found


@pytest.mark.parallel([4], thorough=[2])
def test_adjoints_are_priced_by_the_axes_that_they_take(comm, measured):
    """dA = dC B^T and dB = A^T dC move no operand, and exchange along other axes; A^T comes whole."""
    size = m, n, k = 1024, 256, 512
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, size)
            c = matmul(a, b)
            for left, right, product in ((c, b.T, (m, k, n)), (a.T, c, (k, n, m))):
                plan = plan_for(left, right, None, None, None)
                assert not plan.moves
                assert plan.overlap == wanted_way(grid, product, plan.roles, plan.a == 0)
                assert np.array_equal(matmul(left, right).gather(), left.gather() @ right.gather())


def test_the_choice_is_noted_once_by_one_rank(comm, measured, caplog):
    with caplog.at_level(logging.INFO, logger="pmm3d.comm"), Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid, (512, 64, 64))
        caplog.clear()
        for _ in range(3):
            matmul(a, b)
        chosen = wanted_way(grid, (512, 64, 64))
    told = [record.getMessage() for record in caplog.records if "overlap" in record.getMessage()]
    assert len(told) == (comm.rank == 0)
    if told:
        assert told[0].startswith(f"matmul of 512 x 64 x 64 on {comm.size}x1x1: overlap {chosen} (none ")
        assert told[0].endswith(" by the model of slow links)")


@looped("asked, panels", [("none", 1), ("panels", 4)])
def test_one_switch_for_all_products(comm, measured, monkeypatch, asked, panels):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for size in SIZES:
            a, b = operands(grid, size)
            plan = plan_for(a, b, None, None, None)
            assert (plan.panels, plan.decomposed) == (panels, False)
            assert np.array_equal(matmul(a, b).gather(), a.gather() @ b.gather())
        assert plan_for(a, b, None, 2, None).panels == 2


def test_decomposed_where_nothing_was_measured_and_plain_on_one_node(comm, own_nodes, monkeypatch):
    monkeypatch.setenv("PMM3D_MACHINE", "nominal")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert plan_for(*operands(grid, SIZES[0]), None, None, None).decomposed
    monkeypatch.setenv("PMM3D_MACHINE", "auto")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.machine is None
        plan = plan_for(*operands(grid, SIZES[0]), None, None, None)
        assert plan.decomposed and plan.panels == 1
    with Grid(comm, (1, 1, comm.size)) as grid:  # B comes whole, and no C leaves: nothing to take apart
        plan = plan_for(*operands(grid, SIZES[0]), None, None, None)
        assert plan.panels == 4 and not plan.decomposed
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: "node0")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert plan_for(*operands(grid, SIZES[0]), None, None, None).panels == 1


@pytest.mark.parallel([4], thorough=[2])
def test_grids_are_ranked_by_the_ways_that_products_take(comm, measured):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert_ranked_as_taken(comm, grid.machine)


@pytest.mark.parallel([4], thorough=[2])
def test_grids_are_ranked_so_where_nothing_was_measured_too(comm, own_nodes, monkeypatch):
    monkeypatch.setenv("PMM3D_MACHINE", "auto")
    assert_ranked_as_taken(comm, nominal(1))


def assert_ranked_as_taken(comm, machine):
    size = 4096, 512, 512
    found = rank_products(size, comm.size, "float64", machine).candidates
    assert all(one.seconds <= other.seconds * (1 + 1e-8) for one, other in pairwise(found))
    assert {candidate.overlap for candidate in found} >= {"decomposed"}
    for candidate in found:
        with Grid(comm, candidate.grid[:3]) as grid:
            plan = plan_for(*operands(grid, size), None, None, None)
            assert plan.overlap == candidate.overlap
            assert plan.memory == sum(candidate.memory.values())


def test_a_limit_of_memory_is_kept_by_panels(comm, measured):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = operands(grid, (4096, 64, 64))
        whole = plan_for(a, b, None, 1, None).workspace
        plan = plan_for(a, b, None, None, whole // 2)
        assert plan.workspace <= whole // 2 and plan.panels > 1 and not plan.decomposed


def test_what_is_no_way_is_refused_by_all(comm, monkeypatch, fails):
    monkeypatch.setenv("PMM3D_OVERLAP", "decomposed")
    fails(Pmm3dError, "PMM3D_OVERLAP='decomposed' is not understood; it means auto, none or panels",
          lambda: Grid(comm, (1, 1, 1)))


def test_all_ranks_ask_for_the_same_way(comm, monkeypatch, fails):
    monkeypatch.setenv("PMM3D_OVERLAP", "panels" if comm.rank == 1 else "auto")
    fails(DisagreementError, "different arguments", lambda: Grid(comm, (comm.size, 1, 1)))


@pytest.mark.parallel([1])
@looped("asked, way", [("auto", (1, True)), ("none", (1, False)), ("panels", (4, False))])
def test_dry_grids_take_the_switch_too(monkeypatch, asked, way):
    monkeypatch.setenv("PMM3D_OVERLAP", asked)
    with Grid.dry((2, 1, 1), hosts=2) as grid:
        plan = plan_for(*operands(grid, SIZES[0]), None, None, None)
        assert (plan.panels, plan.decomposed) == way
