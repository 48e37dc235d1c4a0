"""Bytes and MPI calls of one rank of tens of thousands, without the other ranks."""

import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from each_grid import each_grid
from loops import given

from pmm3d import Grid
from pmm3d.comm import communicator
from pmm3d.comm import nodes as nodes_module
from pmm3d.comm.nodes import Process, Processes, hosts, row

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from one_of_many import OneOfMany, grid_of, setup

RANKS = 32768
MOST_BYTES = 20 * 10**6


@pytest.mark.parallel(1)
@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    "shape",
    [
        "32x32x32",
        "32768x1x1",
        pytest.param("auto", marks=pytest.mark.thorough("comparing all grids takes 14 s of a core")),
    ],
)
def test_what_one_rank_of_many_holds(comm, shape):
    """Grid, plan, watch and ledger together. The first Grid also duplicates the caller's communicator."""
    tracemalloc.start()
    try:
        made = setup(RANKS, shape, lambda what, part: part())
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < MOST_BYTES
    assert made.messages <= 25 and made.received <= 40 * RANKS


@pytest.mark.parallel(1)
def test_setting_up_takes_no_more_calls_on_more_ranks(comm):
    one, few, many = (
        setup(ranks, shape, lambda what, part: part())
        for ranks, shape in ((8, "2x2x2"), (128, "8x4x4"), (RANKS, "32x32x32"))
    )
    assert few.messages == many.messages == one.messages + 1  # with several nodes, the measured machine
    assert one.received < 64 * 8


@pytest.mark.parallel(1)
def test_one_rank_of_many_knows_where_it_is(comm):
    rank = 1 + 32 * (2 + 32 * 3)
    with grid_of(OneOfMany(RANKS, rank), "32x32x32") as grid:
        assert (grid.x.index, grid.y.index, grid.z.index) == tuple(grid.coords[:3]) == (1, 2, 3)
        assert grid.x.ranks == range(rank - 1, rank + 31) and grid.y.ranks[:3] == range(rank - 64, rank + 32, 32)
        assert list(grid.z.ranks) == [1 + 32 * (2 + 32 * z) for z in range(32)] and list(grid.data.ranks) == [rank]
        assert grid.everyone.ranks == range(RANKS)
        assert grid.hosts == RANKS // 64 and grid.local_rank == rank % 64


def processes(*told):
    """Processes from (host, pid, namespace) of each rank."""
    known = [Process(*one) for one in told]
    names = list(dict.fromkeys(one.host for one in known))
    return known, Processes(np.concatenate([row(one, False) for one in known]), names)


def test_processes_are_those_that_were_told():
    known, found = processes(("b", 7, 1), ("a", 8, 2), ("b", 9, 1), ("c\N{SNOWMAN}", 10, 1), ("b", 11, 3), ("a", 8, 2))
    assert len(found) == 6 and list(found) == known and found[1:3] == known[1:3] and found[-1] == known[-1]
    assert found.hosts == 3 and found.first_ranks() == [0, 1, 3]
    assert [found.host_of(rank) for rank in range(6)] == [one.host for one in known]
    assert [found.node_of(rank) for rank in range(6)] == [0, 1, 0, 2, 0, 1]
    assert [found.local_rank(rank) for rank in range(6)] == [0, 0, 1, 0, 2, 1]
    for rank, one in enumerate(known):
        near = {other: theirs.pid for other, theirs in enumerate(known) if one[::2] == theirs[::2]}
        assert found.neighbours(rank) == near and found.first_near(rank, range(rank, 6)) == rank
    assert found.first_near(4, range(0, 6, 2)) == 0 and found.first_near(5, (5, 1)) == 5
    with pytest.raises(IndexError):
        found[6]


def test_processes_that_have_not_told_are_unknown():
    found = Processes.unknown(3)
    assert list(found) == [Process()] * 3 and found.hosts == 1 and found.neighbours(1) == {}


def test_the_nodes_of_many_ranks_are_found_in_one_pass():
    """Each rank may use two cores, which it shares with the next rank. Ranks are assigned to three nodes in turns."""
    for on_a_node in [1, 64]:
        with given(on_a_node=on_a_node):
            names = [f"n{rank % 3 * RANKS + rank // on_a_node}" for rank in range(RANKS)]
            masks = [3 << rank % on_a_node for rank in range(RANKS)]
            found = hosts(SimpleNamespace(allgather=lambda mine: masks), names, 1)
            ranks = {name: [] for name in names}
            for rank, name in enumerate(names):
                ranks[name].append(rank)
            assert {host.name: list(host.ranks) for host in found} == ranks and len(found) == len(ranks)
            assert all(host.cores == len(host.ranks) for host in found)


@pytest.mark.parallel([4], thorough=[1, 2])
def test_nodes_have_the_cores_of_their_ranks(comm, monkeypatch):
    monkeypatch.setattr(nodes_module, "cores", lambda: frozenset({comm.rank, comm.rank + 1, 99}))
    found = hosts(comm, [f"node{rank % 2}" for rank in range(comm.size)], 8)
    assert [host.name for host in found] == ["node0", "node1"][: comm.size]
    assert [host.ranks for host in found] == [tuple(range(node, comm.size, 2)) for node in range(min(2, comm.size))]
    assert [host.cores for host in found] == [5 if comm.size == 4 else 3] * len(found)


@pytest.mark.parallel([4], thorough=[1, 2, 3])
def test_every_rank_learns_where_the_others_run(comm, monkeypatch):
    """Host names of several lengths, one of them empty. The ranks of a node are not consecutive."""
    names = ["a node with a long name", "", "node"]
    own = names[comm.rank % 2 if comm.rank < 3 else 2]
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: own)
    with Grid(comm) as grid:
        told = grid.comm.allgather(grid._processes[grid.rank])
        assert list(grid._processes) == told and grid.hosts == len({one.host for one in told})
        assert grid.local_rank == [one.host for one in told[: grid.rank]].count(own)
        assert grid.comm.largest(-grid.rank) == 0 and grid.comm.largest(2**50 + grid.rank) == 2**50 + grid.size - 1


@pytest.mark.parallel([4, 6, 8], thorough=[1, 2])
@each_grid
def test_the_ranks_of_an_axis_are_those_of_its_communicator(grid):
    for name in ("x", "y", "z", "data"):
        axis = grid.axis(name)
        assert list(axis.ranks) == axis._comm.allgather(grid.rank) and axis.ranks[axis.index] == grid.rank
