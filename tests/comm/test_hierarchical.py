"""Hierarchical collectives on ranks with invented host names: results, order of sums, bytes between nodes, products,
plans, dry runs, and refused settings."""

import logging
from itertools import product

import numpy as np
import pytest
from loops import given
from samples import TESTED, bits_of, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, matmul
from pmm3d.comm import communicator
from pmm3d.layout import offsets, part_sizes
from pmm3d.model.machines import Group, load
from pmm3d.model.node_map import FLAT, GATHERS_FROM, NodeMap
from pmm3d.product.multiply import plan_for

pytestmark = [pytest.mark.parallel([4, 8]), pytest.mark.deadline(120)]
TYPES = ("float64", "float32", "complex64", "int64", "float16")


@pytest.fixture
def nodes_of(comm, monkeypatch):
    """nodes_of(n): MPI reports host names as if each node had n consecutive ranks."""

    def told(*each):
        ends = np.cumsum(each if len(each) > 1 else each * comm.size)
        name = f"node{np.searchsorted(ends, comm.rank, 'right')}"
        monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: name)

    return told


@pytest.fixture
def two_nodes(comm, nodes_of):
    nodes_of(comm.size // 2)


@pytest.fixture
def line(comm, two_nodes):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.hosts == 2 and grid.x.node_map == NodeMap(comm.size // 2, True, GATHERS_FROM)
        yield grid


@pytest.fixture(params=["nodes", "ranks"])
def sums(request, monkeypatch):
    monkeypatch.setenv("PMM3D_SUMS", request.param)
    return request.param


def uneven(size):
    """Numbers of rows of the ranks: different, some 0."""
    return [(1700, 0, 4001, 2300)[rank % 4] for rank in range(size)]


def floats(shape, seed, dtype="float64"):
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return (drawn * 10.0 ** np.random.default_rng(seed + 99).integers(-3, 4, shape)).astype(dtype)


def in_order(arrays, each):
    """The sum in the documented order: the ranks of each node in order, then the nodes."""
    arrays = [array.astype("float32") if array.dtype == np.float16 else array for array in arrays]
    of_nodes = []
    for first in range(0, len(arrays), each):
        total = arrays[first].copy()
        for array in arrays[first + 1 : first + each]:
            total += array
        of_nodes.append(total)
    total = of_nodes[0].copy()
    for array in of_nodes[1:]:
        total += array
    return total


def part_of(array, counts, rank, dim=0):
    low, high = offsets(counts)[rank : rank + 2]
    return array[low:high] if dim == 0 else array[:, low:high]


def test_gathers_bring_every_part(line):
    for dtype in TYPES:
        with given(dtype=dtype):
            counts = uneven(line.size)
            line.ledger.reset()
            parts = [integers((rows, 3), dtype, seed=rank) for rank, rows in enumerate(counts)]
            whole = np.concatenate(parts)
            for known in (counts, None):
                found = line.x.all_gather(to_library(parts[line.rank]), counts=known).wait()
                assert np.array_equal(to_numpy(found), whole)
            turned = to_library(np.zeros((3, sum(counts)), dtype))
            line.x._all_gather_into(to_library(np.ascontiguousarray(parts[line.rank].T)), turned, counts, dim=1).wait()
            assert np.array_equal(to_numpy(turned), whole.T)
            each = line.size // 2
            brought = sum(
                rows for rank, rows in enumerate(counts) if rank % each == line.rank % each and rank != line.rank
            )
            assert line.ledger.total(axis="x", operation="all_gather").across == 3 * brought * 3 * whole.itemsize


@pytest.mark.parallel([8], thorough=[4])
def test_sums_are_exact_and_in_their_order(line):
    for dtype, rows in product(TYPES, [0, 1, 5, 30_000]):
        with given(dtype=dtype, rows=rows):
            arrays = [
                floats(rows, rank, dtype) if dtype != "int64" else integers((rows,), dtype, rank)
                for rank in range(line.size)
            ]
            expected = in_order(arrays, line.size // 2).astype(dtype)
            total = line.x.all_reduce(to_library(arrays[line.rank])).wait()
            assert bits_of(to_numpy(total)) == bits_of(expected)
            part = line.x.reduce_scatter(to_library(arrays[line.rank])).wait()
            assert bits_of(to_numpy(part)) == bits_of(part_of(expected, part_sizes(rows, line.size), line.rank))
            here = to_library(arrays[line.rank])
            line.x._sum_coalesced([here, to_library(arrays[line.rank])]).wait()
            assert bits_of(to_numpy(here)) == bits_of(expected)


@pytest.mark.parallel([8], thorough=[4])
def test_scatters_of_uneven_parts_with_beta(line):
    for dim in [0, 1]:
        with given(dim=dim):
            counts, cols = uneven(line.size), 2
            shape = (sum(counts), cols) if dim == 0 else (cols, sum(counts))
            wholes = [integers(shape, seed=rank) for rank in range(line.size)]
            own = part_of(sum(wholes), counts, line.rank, dim)
            out = to_library(np.ones(own.shape))
            line.x._reduce_scatter_into(to_library(wholes[line.rank]), out, counts, 3, dim=dim).wait()
            assert np.array_equal(to_numpy(out), 3 + own)
            array, out = to_library(wholes[line.rank]), to_library(np.ones(shape))
            line.x._all_reduce_into(array, out, 2).wait()
            assert np.array_equal(to_numpy(out), 2 + sum(wholes))


def bytes_into_a_node(grid, operation, work):
    """(bytes that a node receives from other nodes, largest number of bytes that a rank receives) during work()."""
    grid.ledger.reset()
    work()
    total = grid.ledger.total(axis="x", operation=operation)
    rows = grid.comm.allgather((total.across, total.received))
    each = grid.size // 2
    return max(sum(across for across, _ in rows[:each]), sum(across for across, _ in rows[each:])), max(
        received for _, received in rows
    )


@pytest.mark.parallel([8], thorough=[4])
def test_the_link_carries_each_byte_once(line):
    """With 2 nodes of 4 ranks, a quarter of the bytes of a flat collective. No rank receives more than in a flat
    one."""
    for operation, nodes_share in [("all_gather", 0.5), ("reduce_scatter", 0.5), ("all_reduce", 1.0)]:
        with given(operation=operation, nodes_share=nodes_share):
            rows, each = 2**13 * line.size, line.size // 2
            mine = np.ones(rows // line.size if operation == "all_gather" else rows)
            run = lambda: getattr(line.x, operation)(to_library(mine)).wait()
            across, received = bytes_into_a_node(line, operation, run)
            known, line.x.node_map = line.x.node_map, FLAT
            try:
                flat_across, flat_received = bytes_into_a_node(line, operation, run)
            finally:
                line.x.node_map = known
            assert across == nodes_share * 8 * rows and flat_across == each * across and received == flat_received


@pytest.mark.parallel([8], thorough=[4])
def test_sums_by_ranks_where_that_is_asked_for(comm, two_nodes, sums):
    """Gathers are hierarchical in both cases. With PMM3D_SUMS=ranks, sums have the bits of one node."""
    arrays = [floats(5000, rank, "float32") for rank in range(comm.size)]
    with Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.x.node_map == NodeMap(comm.size // 2, sums == "nodes", GATHERS_FROM)
        found = to_numpy(grid.x.all_reduce(to_library(arrays[comm.rank])).wait())
    assert bits_of(found) == bits_of(in_order(arrays, comm.size // 2 if sums == "nodes" else comm.size))


@pytest.mark.parallel([4], thorough=[8])
def test_uneven_nodes_are_flat_and_said_once(comm, nodes_of, caplog):
    nodes_of(comm.size - 1, 1)
    with caplog.at_level(logging.INFO, "pmm3d.comm"), Grid(comm, (comm.size, 1, 1)) as grid:
        assert grid.x.node_map == grid.everyone.node_map == FLAT and grid.hosts == 2
        total = to_numpy(grid.x.all_reduce(to_library(np.ones(5))).wait())
        across = grid.comm.allgather(grid.ledger.total(axis="x").across)
    assert total.tolist() == [comm.size] * 5 and across[-1] > 0
    said = [record.message for record in caplog.records if "not distributed evenly" in record.message]
    assert said == (
        [
            f"axis x is not distributed evenly over its nodes ({comm.size - 1}, 1 ranks, one node after the "
            "other): its collectives are flat, and the links between nodes carry more bytes than necessary"
        ]
        if comm.rank == 0
        else []
    )


@pytest.mark.parallel([4], thorough=[8])
def test_one_rank_a_node_and_one_node_are_flat(comm, nodes_of):
    for each in [1, 0]:
        with given(each=each):
            nodes_of(each or comm.size)
            with Grid(comm, (comm.size, 1, 1)) as grid:
                assert grid.x.node_map == grid.everyone.node_map == FLAT
                assert len(grid.x.off_node) == (comm.size - 1 if each else 0)


@pytest.mark.parallel([4], thorough=[8])
def test_the_measured_machine_chooses_gathers(comm, two_nodes, monkeypatch):
    """The choice is the same on all ranks, and does not change the order of sums."""
    monkeypatch.setenv("PMM3D_MACHINE", "perlmutter")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        known = grid.comm.allgather(grid.x.node_map)
    each = comm.size // 2
    wanted = load("perlmutter").with_ranks_per_node(each).gathers_from(Group(comm.size, each, 2, 1))
    assert known == [NodeMap(each, True, wanted)] * comm.size and wanted < 2**24


SHAPES = {4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4)], 8: [(2, 2, 2), (1, 8, 1), (1, 4, 2), (2, 1, 4), (8, 1, 1)]}


def test_products_and_their_plans_and_dry_runs(comm, two_nodes):
    """The ledger's bytes are those of the plan and of a dry run. A repeated plan has the bits of matmul."""
    m, n, k = 251, 127, 190
    for shape in SHAPES[comm.size]:
        with given(shape=shape), Grid(comm, shape) as grid:
            a, b = (
                DistMatrix.random(grid, size, seed=seed, layout=layout, library=TESTED)
                for size, seed, layout in (((m, k), 1, Layout.A), ((k, n), 2, Layout.B))
            )
            grid.ledger.reset()
            c = matmul(a, b)
            plan = plan_for(a, b, c, None, None).on_rank(grid.coords)
            for axis in "xyz":
                moved = grid.ledger.total(axis=axis)
                assert (moved.received, moved.sent) == (plan.bytes_received[axis], plan.bytes_sent[axis])
            across = {axis: grid.ledger.total(axis=axis).across for axis in "xyz"}
            with MatmulPlan(a, b) as product:
                assert bits_of(to_numpy(product().local)) == bits_of(to_numpy(c.local))
            assert np.allclose(to_numpy(c.gather()), to_numpy(a.gather()) @ to_numpy(b.gather()))
            with Grid.dry(shape, rank=comm.rank, hosts=2) as dry:
                assert all(dry.axis(axis).node_map == grid.axis(axis).node_map for axis in (*"xyz", "everyone"))
                matmul(
                    *(
                        DistMatrix.random(dry, size, layout=layout)
                        for size, layout in (((m, k), Layout.A), ((k, n), Layout.B))
                    )
                )
                assert {axis: dry.ledger.total(axis=axis).across for axis in "xyz"} == across


@pytest.mark.parallel([4], thorough=[8])
def test_groups_that_lie_differently_are_flat(comm, nodes_of):
    """If some groups of an axis are on one node and others on two, the collectives of all ranks are flat."""
    nodes_of(*{4: (1, 3), 8: (2, 6)}[comm.size])
    with Grid(comm, (comm.size // 2, 2, 1)) as grid:
        assert set(grid.comm.allgather(grid.x.node_map)) == {FLAT}
        assert to_numpy(grid.x.all_reduce(to_library(np.ones(3))).wait()).tolist() == [comm.size // 2] * 3


@pytest.mark.parallel([8], thorough=[4])
def test_arrays_of_a_device_go_the_same_way(comm, two_nodes):
    for transport in ["staged", "direct"]:
        with given(transport=transport):
            counts = [3000 + rank for rank in range(comm.size)]
            arrays = [floats(sum(counts), rank, "float32") for rank in range(comm.size)]
            expected = in_order(arrays, comm.size // 2)
            with Grid(comm, (comm.size, 1, 1), device_transport=transport) as grid:
                mine = to_library(arrays[comm.rank], "standin")
                total = grid.x.all_reduce(mine).wait()
                assert bits_of(to_numpy(total, "standin")) == bits_of(expected)
                part = grid.x.reduce_scatter(mine, counts=counts).wait()
                assert bits_of(to_numpy(part, "standin")) == bits_of(part_of(expected, counts, comm.rank))
                assert bits_of(to_numpy(grid.x.all_gather(part, counts=counts).wait(), "standin")) == bits_of(expected)
                assert grid.ledger.total(axis="x", operation="all_reduce").across > 0
