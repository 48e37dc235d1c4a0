"""Hierarchical collectives on ranks with invented host names: results, order of sums, bytes between nodes, products,
plans, dry runs, and nodes for which collectives are flat. `test_executor` has their schedules."""

import logging
from functools import reduce

import numpy as np
import pytest
from loops import given
from samples import TESTED, bits_of, integers, operands, to_library, to_numpy

from pmm3d import Grid, MatmulPlan, matmul
from pmm3d.comm import communicator
from pmm3d.layout import offsets, part_sizes
from pmm3d.model.machines import Group, load
from pmm3d.model.node_map import FLAT, GATHERS_FROM, NodeMap
from pmm3d.product.multiply import plan_for

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(120)]
TYPES = ("float64", "float32", "complex64", "int64", "float16")


@pytest.fixture
def line(comm, two_nodes):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.hosts == 2 and grid.x.node_map == NodeMap(comm.size // 2, True, GATHERS_FROM)
        yield grid


def fill_first_node(comm, monkeypatch, ranks):
    """MPI reports host names as if the first ranks had a node of their own, and the others another one."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{int(comm.rank >= ranks)}")


def floats(shape, seed, dtype="float64"):
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return (drawn * 10.0 ** np.random.default_rng(seed + 99).integers(-3, 4, shape)).astype(dtype)


def in_order(arrays, each):
    """The sum in the documented order: the ranks of each node in order, then the nodes."""
    dtype = arrays[0].dtype
    arrays = [array.astype("float32") if dtype == np.float16 else array for array in arrays]
    nodes = [reduce(np.add, arrays[first : first + each]) for first in range(0, len(arrays), each)]
    return reduce(np.add, nodes).astype(dtype)


def test_gathers_bring_every_part(line):
    counts, each = [(1700, 0, 4001, 2300)[rank % 4] for rank in range(line.size)], line.size // 2
    for dtype in ("float64", "float16"):
        line.ledger.reset()
        parts = [integers((rows, 3), dtype, seed=rank) for rank, rows in enumerate(counts)]
        whole, turned = np.concatenate(parts), to_library(np.zeros((3, sum(counts)), dtype))
        for known in (counts, None):
            found = line.x.all_gather(to_library(parts[line.rank]), counts=known).wait()
            assert np.array_equal(to_numpy(found), whole)
        line.x._all_gather_into(to_library(np.ascontiguousarray(parts[line.rank].T)), turned, counts, dim=1).wait()
        assert np.array_equal(to_numpy(turned), whole.T)
        brought = sum(counts[line.rank % each :: each]) - counts[line.rank]
        assert line.ledger.total(axis="x", operation="all_gather").across == 3 * brought * 3 * whole.itemsize


def check_sums(grid, dtype, rows, each, library=TESTED):
    make = integers if dtype == "int64" else floats
    arrays = [make((rows,), dtype=dtype, seed=rank) for rank in range(grid.size)]
    mine, same = (to_library(arrays[grid.rank], library) for _ in range(2))
    expected, counts = in_order(arrays, each), part_sizes(rows, grid.size)[::-1]
    own = expected[slice(*offsets(counts)[grid.rank :][:2])]
    for pending, wanted in (
        (grid.x.all_reduce(mine), expected),
        (grid.x.reduce_scatter(mine, counts=counts), own),
        (grid.x._sum_coalesced([same, mine + 0]), expected),
    ):
        found = pending.wait()
        assert bits_of(to_numpy(same if found is None else found, library)) == bits_of(wanted)


@pytest.mark.parallel([8], thorough=[4])
def test_sums_are_exact_and_in_their_order(line):
    for dtype in TYPES:
        for rows in (0, 1, 5, 30_000):
            with given(dtype=dtype, rows=rows):
                check_sums(line, dtype, rows, line.size // 2)


def test_sums_by_ranks_where_that_is_asked_for(comm, two_nodes, monkeypatch):
    """Gathers are hierarchical in both cases. With PMM3D_SUMS=ranks, sums have the bits of one node."""
    monkeypatch.setenv("PMM3D_SUMS", "ranks")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.x.node_map == NodeMap(comm.size // 2, False, GATHERS_FROM)
        check_sums(grid, "float32", 5000, comm.size)


@pytest.mark.parallel([8], thorough=[4])
def test_arrays_of_a_device_go_the_same_way(comm, two_nodes):
    for transport in ["staged", "direct"]:
        with given(transport=transport), Grid(comm, (comm.size, 1, 1), device_transport=transport) as grid:
            check_sums(grid, "float32", 24_001, comm.size // 2, "standin")
            part = to_library(np.full(3000, grid.rank), "standin")
            gathered = to_numpy(grid.x.all_gather(part).wait(), "standin")
            assert np.array_equal(gathered, np.repeat(np.arange(grid.size), 3000))
            assert grid.ledger.total(axis="x", operation="all_reduce").across > 0


def test_uneven_nodes_are_flat_and_said_once(comm, monkeypatch, caplog):
    fill_first_node(comm, monkeypatch, comm.size - 1)
    with caplog.at_level(logging.INFO, "pmm3d.comm"), Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.x.node_map == grid.everyone.node_map == FLAT and grid.hosts == 2
        check_sums(grid, "float64", 5, comm.size)
        assert grid.comm.allgather(grid.ledger.total(axis="x").across)[-1] > 0
    said = [record.message for record in caplog.records if "not distributed evenly" in record.message]
    assert len(said) == (comm.rank == 0) and all(f"({comm.size - 1}, 1 ranks" in text for text in said)


def test_groups_that_lie_differently_are_flat(comm, monkeypatch):
    """If some groups of an axis are on one node and others on two, the collectives of all ranks are flat."""
    fill_first_node(comm, monkeypatch, comm.size // 4)
    with Grid(comm, (comm.size // 2, 2, 1)) as grid:
        assert set(grid.comm.allgather(grid.x.node_map)) == {FLAT}
        assert to_numpy(grid.x.all_reduce(to_library(np.ones(3))).wait()).tolist() == [comm.size // 2] * 3


def test_the_measured_machine_chooses_gathers(comm, two_nodes, monkeypatch):
    """The choice is the same on all ranks, and does not change the order of sums."""
    monkeypatch.setenv("PMM3D_MACHINE", "perlmutter")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        known = grid.comm.allgather(grid.x.node_map)
    each = comm.size // 2
    wanted = load("perlmutter").with_ranks_per_node(each).gathers_from(Group(comm.size, each, 2, 1))
    assert known == [NodeMap(each, True, wanted)] * comm.size and wanted < 2**24


SHAPES = {4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4)], 8: [(2, 2, 2), (1, 8, 1), (1, 4, 2), (2, 1, 4), (8, 1, 1)]}


@pytest.mark.parallel([4, 8])
def test_products_and_their_plans_and_dry_runs(comm, two_nodes):
    """The ledger's bytes are those of the plan and of a dry run. A repeated plan has the bits of matmul."""
    for shape in SHAPES[comm.size]:
        with given(shape=shape), Grid(comm, shape) as grid:
            a, b = operands(grid, (251, 127, 190), library=TESTED)
            grid.ledger.reset()
            c = matmul(a, b)
            plan = plan_for(a, b, c, None, None).on_rank(grid.coords)
            moved = {axis: grid.ledger.total(axis=axis) for axis in "xyz"}
            for axis, total in moved.items():
                assert (total.received, total.sent) == (plan.bytes_received[axis], plan.bytes_sent[axis])
            with MatmulPlan(a, b) as product:
                assert bits_of(to_numpy(product().local)) == bits_of(to_numpy(c.local))
            assert np.allclose(to_numpy(c.gather()), to_numpy(a.gather()) @ to_numpy(b.gather()))
            with Grid.dry(shape, rank=comm.rank, hosts=2) as dry:
                assert all(dry.axis(axis).node_map == grid.axis(axis).node_map for axis in (*"xyz", "everyone"))
                matmul(*operands(dry, (251, 127, 190)))
                assert all(dry.ledger.total(axis=axis).across == total.across for axis, total in moved.items())
