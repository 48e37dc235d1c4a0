"""Hierarchical collectives, by a fake link: results, order of sums, bytes, bytes between nodes, work memory."""

from functools import partial

import numpy as np
import pytest
from fake_link import LIBRARY, run
from loops import given
from test_executor import floats, moved, rows_of, summed

from pmm3d.comm.strided_collectives import all_gather_into, all_reduce_into, reduce_scatter_into
from pmm3d.model.node_map import FLAT, GATHERS_FROM, NodeMap, node_map_over, ranks_each
from pmm3d.model.schedule import WINDOW, gather_volume, nodes_at_once, reduce_volume

SHAPES = [(nodes, each) for nodes in range(2, 33) for each in range(2, 33) if nodes * each <= 64]
FEWER_SHAPES = [
    (nodes, each)
    for nodes, each in SHAPES
    if max(nodes, each) <= 5 or {nodes, each} & {16, 17, 23} or nodes * each == 64
]
"""(nodes, ranks on each) with one or several stages on each level, with and without pairs."""
node_map = partial(NodeMap, sums=True, gathers_from=0.0)


@pytest.fixture
def shapes(pytestconfig):
    """(nodes, ranks on each). With --all: each shape up to 64 ranks."""
    return SHAPES if pytestconfig.getoption("all_tests") else FEWER_SHAPES


def by_nodes(arrays, each):
    """The sum in the documented order: first in each node, then over the nodes."""
    return summed([summed(arrays[first : first + each]) for first in range(0, len(arrays), each)])


def across(links):
    """Bytes that the ranks of a node receive from other nodes: the largest of all nodes."""
    each = links[0]._each
    return max(sum(link.record.across for link in links[first : first + each]) for first in range(0, len(links), each))


def test_gathers(shapes):
    for nodes, each in shapes:
        with given(nodes=nodes, each=each):
            size = nodes * each
            counts = rows_of(size)
            parts = [np.full((rows, 3), rank + 1.0) for rank, rows in enumerate(counts)]
            gather = lambda link: all_gather_into(link, LIBRARY, parts[link.rank], np.zeros((sum(counts), 3)), counts)
            outs, links = run(size, gather, node_map(each), each)
            assert all(np.array_equal(out, np.concatenate(parts)) for out in outs)
            assert moved(links) == [gather_volume(counts, rank, 24, node_map(each))[:2] for rank in range(size)]
            whole = 24 * sum(counts)
            for first in range(0, size, each):
                brought = sum(link.record.across for link in links[first : first + each])
                assert brought == whole - 24 * sum(counts[first : first + each])


def test_scatters_sums_in_the_order_of_the_contract(shapes):
    for nodes, each in shapes:
        with given(nodes=nodes, each=each):
            size = nodes * each
            counts, rows = rows_of(size), sum(rows_of(size))
            wholes = floats(size, (rows, 2))
            scatter = lambda link: reduce_scatter_into(
                link, LIBRARY, wholes[link.rank], np.ones((counts[link.rank], 2)), counts
            )
            outs, links = run(size, scatter, node_map(each), each)
            assert np.array_equal(np.concatenate(outs), by_nodes(wholes, each))
            assert moved(links) == [
                reduce_volume(counts, rank, 2, "float64", node_map(each))[:2] for rank in range(size)
            ]


def test_a_link_carries_what_it_must():
    """Of n bytes, an all-reduce brings 2 n (N-1)/N into a node, and a flat one this much for each rank of the node.
    Gathers and reduce-scatters bring n (N-1)/N. For 2 nodes of 4 ranks this is a quarter."""
    for nodes, each in [(2, 4), (4, 2), (2, 2), (4, 4), (2, 8)]:
        with given(nodes=nodes, each=each):
            size, elements = nodes * each, 2**14
            counts, nbytes = [elements // size] * size, 8 * elements

            def gather(link):
                return all_gather_into(link, LIBRARY, np.zeros(counts[0]), np.zeros(elements), counts)

            def scatter(link):
                return reduce_scatter_into(link, LIBRARY, np.zeros((elements, 1)), np.zeros((counts[0], 1)), counts)

            def reduce(link):
                return all_reduce_into(link, LIBRARY, np.zeros(elements), np.zeros(elements))

            for collective, times in ((gather, 1), (scatter, 1), (reduce, 2)):
                (_, flat), (_, better) = (run(size, collective, way, each) for way in (FLAT, node_map(each)))
                assert across(better) == times * nbytes * (nodes - 1) // nodes and across(flat) == each * across(better)
                assert moved(better) == moved(flat)


def test_many_nodes_are_taken_some_at_a_time():
    """`test_gathers` has 16 nodes of 4 ranks."""
    each = 4
    assert nodes_at_once(each) * (each - 1) <= WINDOW and nodes_at_once(100) == 1


def test_small_gathers_are_flat():
    known = node_map_over([0, 0, 1, 1])
    few, many = [1] * 4, [int(GATHERS_FROM)] * 4
    assert known.gathers_from == GATHERS_FROM
    for counts, by in ((few, 0), (many, 1)):
        parts = [np.full(rows, rank, np.uint8) for rank, rows in enumerate(counts)]
        _, links = run(
            4,
            lambda link: all_gather_into(link, LIBRARY, parts[link.rank], np.zeros(sum(counts), np.uint8), counts),
            known,
            2,
        )
        assert across(links) == sum(counts) // 2 * (1 if by else 2)


def test_the_rule():
    assert node_map_over([0] * 8) == node_map_over(range(8)) == node_map_over([0, 1] * 4) == FLAT
    assert node_map_over([0, 0, 0, 1, 1, 1, 2, 2]) == FLAT and node_map_over([5]) == FLAT
    assert node_map_over([0] * 4 + [1] * 4) == NodeMap(4, True, GATHERS_FROM)
    assert node_map_over([0] * 4 + [1] * 4, "ranks") == NodeMap(4, False, GATHERS_FROM)
    assert ranks_each([0, 0, 1, 1, 0, 0]) == 0 and ranks_each([7, 7, 7]) == 3
