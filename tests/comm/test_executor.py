"""The executor in one process, with a fake link: results, rounds, messages, bytes, order of sums, flat and by nodes.
tests/model/test_schedule.py executes the schedules on symbols, for all groups."""

from functools import partial, reduce
from itertools import pairwise, product
from math import log2

import numpy as np
from fake_link import LIBRARY, run
from loops import given

from pmm3d.comm.strided_collectives import all_gather_into, all_reduce_into, reduce_scatter_into
from pmm3d.layout import offsets, part_sizes
from pmm3d.model.node_map import FLAT, GATHERS_FROM, NodeMap, node_map_over, ranks_each
from pmm3d.model.schedule import all_reduce_volume, gather_volume, reduce_volume
from pmm3d.model.stages import DIRECT, LARGEST_STAGE, stages

GROUPS = [*((size, size) for size in (1, 2, 3, 7, 16, 17, 24, 37, 64)), (4, 2), (6, 2), (24, 4), (34, 17), (64, 4)]
"""(ranks, ranks on a node), with one or several stages on each level. 17 and 37 are prime."""


def way(size, each):
    return FLAT if each == size else NodeMap(each, sums=True, gathers_from=0.0)


def rows_of(size):
    """Numbers of rows of the ranks: different, some 0."""
    return [(3, 0, 1, 4, 2, 0, 5)[rank % 7] for rank in range(size)]


def floats(size, rows, dtype="float64"):
    """Numbers whose sum depends on the order."""
    drawn = np.random.default_rng(0).standard_normal((size, *np.atleast_1d(rows)))
    return list((drawn * 10.0 ** np.random.default_rng(1).integers(-2, 3, drawn.shape)).astype(dtype))


def summed(arrays, each):
    """The sum in the documented order: first in each node, then over the nodes; stage by stage, in rank order."""
    if each < len(arrays):
        first_ranks = range(0, len(arrays), each)
        return summed([summed(arrays[first : first + each], each) for first in first_ranks], len(first_ranks))
    sums = list(arrays)
    for radix in stages(len(arrays)):
        stride = len(sums) // radix
        sums = [reduce(np.add, sums[first::stride]) for first in range(stride)]
    return sums[0]


def moved(links):
    return [(link.record.received, link.record.sent) for link in links]


def across(links, each):
    """Bytes that the ranks of each node receive from other nodes."""
    return [sum(link.record.across for link in links[first : first + each]) for first in range(0, len(links), each)]


def test_gathers():
    """The own part is in an array of its own, or in the whole already."""
    for (size, each), in_place in product(GROUPS, [False, True]):
        with given(size=size, each=each, in_place=in_place):
            counts = rows_of(size)
            parts = [np.full((rows, 3), rank + 1.0) for rank, rows in enumerate(counts)]

            def gather(link):
                part, whole = parts[link.rank], np.zeros((sum(counts), 3))
                if in_place:
                    place = whole[slice(*offsets(counts)[link.rank :][:2])]
                    place[...], part = part, place
                return all_gather_into(link, LIBRARY, part, whole, counts)

            outs, links = run(size, gather, way(size, each), each)
            assert all(np.array_equal(out, np.concatenate(parts)) for out in outs)
            assert moved(links) == [gather_volume(counts, rank, 24, way(size, each))[:2] for rank in range(size)]
            of_nodes = [24 * sum(counts[first : first + each]) for first in range(0, size, each)]
            assert across(links, each) == [24 * sum(counts) - known for known in of_nodes]


def test_scatters_sums_in_the_order_of_the_contract():
    for size, each in GROUPS:
        with given(size=size, each=each):
            counts, node_map = rows_of(size), way(size, each)
            wholes = floats(size, (sum(counts), 2))
            outs, links = run(
                size,
                lambda link: reduce_scatter_into(
                    link, LIBRARY, wholes[link.rank], np.ones((counts[link.rank], 2)), counts, beta=0
                ),
                node_map,
                each,
            )
            assert np.array_equal(np.concatenate(outs), summed(wholes, each))
            volumes = [reduce_volume(counts, rank, 2, "float64", node_map)[:2] for rank in range(size)]
            assert moved(links) == volumes


def test_beta_and_types():
    for (size, each), dtype in product(GROUPS, ["float16", "float32", "complex128", "int64"]):
        with given(size=size, each=each, dtype=dtype):
            wholes = [np.full((size + 1, 2), rank % 5).astype(dtype) for rank in range(size)]
            counts = part_sizes(size + 1, size)
            outs, links = run(
                size,
                lambda link: reduce_scatter_into(
                    link, LIBRARY, wholes[link.rank], np.ones((2, counts[link.rank]), dtype).T, counts, beta=3
                ),
                way(size, each),
                each,
            )
            expected = 3 + sum(rank % 5 for rank in range(size))
            assert all(np.array_equal(out, np.full_like(out, expected)) for out in outs)
            assert moved(links) == [reduce_volume(counts, rank, 2, dtype, way(size, each))[:2] for rank in range(size)]


def sum_in_cuts(arrays, cuts, each, in_place):
    """The sum of the ranks' arrays, piece by piece between the cuts. Asserts that all ranks have equal results."""
    size, dtype, pieces = len(arrays), str(arrays[0].dtype), list(pairwise(cuts))

    def sums(link):
        array = arrays[link.rank].copy()
        out = array if in_place else np.zeros_like(array)
        for low, high in pieces:
            yield from all_reduce_into(link, LIBRARY, array[low:high], out[low:high])
        return out

    outs, links = run(size, sums, way(size, each), each)
    for rank, found in enumerate(moved(links)):
        volumes = [all_reduce_volume(high - low, dtype, size, rank, way(size, each)) for low, high in pieces]
        assert found == (sum(part.received for part in volumes), sum(part.sent for part in volumes))
    assert all(np.array_equal(out, outs[0]) for out in outs)
    return outs[0]


def test_a_sum_does_not_depend_on_its_size_or_its_cuts():
    """Bits are equal for small and large messages, for whole arrays and pieces, and for the parts of all ranks."""
    for (size, each), dtype in product(GROUPS, ["float16", "float64"]):
        with given(size=size, each=each, dtype=dtype):
            large = 10_000 // max(1, size // 8)
            arrays = floats(size, large, dtype)
            added = [array.astype("float32") for array in arrays] if dtype == "float16" else arrays
            for cuts, in_place in (([0, large], False), ([0, 7, 20, 301, large], True)):
                assert np.array_equal(sum_in_cuts(arrays, cuts, each, in_place), summed(added, each).astype(dtype))


def gather(size, elements):
    counts = [elements // size] * size
    return lambda link: all_gather_into(link, LIBRARY, np.zeros(counts[0]), np.zeros(elements), counts)


def scatter(size, elements):
    counts = [elements // size] * size
    return lambda link: reduce_scatter_into(link, LIBRARY, np.zeros(elements), np.zeros(counts[0]), counts)


def add(size, elements):
    return lambda link: all_reduce_into(link, LIBRARY, np.zeros(elements), np.zeros(elements))


def costs(collective, size, elements):
    """(rounds, messages in a round, bytes received): the largest of all ranks."""
    links = run(size, collective(size, elements))[1]
    figures = [(link.steps, link.messages, link.record.received) for link in links]
    return tuple(map(max, zip(*figures)))


LARGE, SMALL = 2**7 * 3**2 * 5 * 7, 1


def test_direct_costs_one_step():
    """Of n bytes on p ranks: all-gather and reduce-scatter take 1 round of p-1 messages, n (p-1)/p bytes; gather and
    add n (p-1)."""
    for size in [2, 3, 4, 6, 8, 16]:
        with given(size=size):
            share = 8 * LARGE * (size - 1) // size
            assert costs(gather, size, LARGE) == costs(scatter, size, LARGE) == (1, size - 1, share)
            assert costs(add, size, LARGE) == (2, size - 1, 2 * share)
            assert costs(add, size, SMALL) == (1, size - 1, 8 * (size - 1))


def test_halving_and_doubling_cost_as_published(stages_of_two):
    """lg p rounds and n (p-1)/p bytes; all-reduce 2 lg p and 2 n (p-1)/p; for small arrays lg p and n lg p."""
    for size in [2, 4, 8, 16, 32, 64]:
        with given(size=size):
            share, steps = 8 * LARGE * (size - 1) // size, int(log2(size))
            assert stages(size) == (2,) * steps
            assert costs(gather, size, LARGE) == costs(scatter, size, LARGE) == (steps, 1, share)
            assert costs(add, size, LARGE) == (2 * steps, 1, 2 * share)
            assert costs(add, size, SMALL) == (steps, 1, 8 * steps)


def test_stages_move_as_little_in_few_messages():
    for size in [18, 20, 24, 28, 32, 36, 40, 42, 48, 56, 60, 64]:
        with given(size=size):
            elements = LARGE // size * size
            expected = len(stages(size)), max(stages(size)) - 1, 8 * elements // size * (size - 1)
            assert costs(scatter, size, elements) == costs(gather, size, elements) == expected


def test_the_rule_of_stages():
    for size in range(1, 5000):
        group = stages(size)
        assert np.prod(group) == size and (group == (size,) if size <= DIRECT else True)
        is_prime = lambda number: all(number % factor for factor in range(2, int(number**0.5) + 1))
        assert size <= DIRECT or all(radix <= LARGEST_STAGE or is_prime(radix) for radix in group)
    assert stages(4096) == (8, 8, 8, 8) and stages(32768) == (8, 8, 8, 8, 8) and stages(46) == (23, 2)


def test_a_link_between_nodes_carries_what_it_must():
    """Of n bytes, an all-reduce brings 2 n (N-1)/N into a node, and a flat one this much for each rank of the node.
    Gathers and reduce-scatters bring n (N-1)/N. For 2 nodes of 4 ranks this is a quarter."""
    for (nodes, each), (collective, times) in product(
        [(2, 4), (4, 2), (2, 2), (4, 4), (2, 8)], [(gather, 1), (scatter, 1), (add, 2)]
    ):
        with given(nodes=nodes, each=each, collective=collective):
            size, elements = nodes * each, 2**14
            runs = partial(run, size, collective(size, elements), each=each)
            better, flat = runs(node_map=way(size, each))[1], runs(node_map=FLAT)[1]
            assert max(across(better, each)) == times * 8 * elements * (nodes - 1) // nodes
            assert max(across(flat, each)) == each * max(across(better, each)) and moved(better) == moved(flat)


def test_small_gathers_are_flat():
    known = node_map_over([0, 0, 1, 1])
    for rows, times in ((1, 2), (int(GATHERS_FROM), 1)):
        part, counts = np.zeros(rows, np.uint8), [rows] * 4
        gathers = lambda link: all_gather_into(link, LIBRARY, part, np.zeros(4 * rows, np.uint8), counts)
        assert across(run(4, gathers, known, 2)[1], 2) == [2 * rows * times] * 2


def test_the_rule_of_nodes():
    assert node_map_over([0] * 8) == node_map_over(range(8)) == node_map_over([0, 1] * 4) == FLAT
    assert node_map_over([0, 0, 0, 1, 1, 1, 2, 2]) == FLAT and node_map_over([5]) == FLAT
    assert node_map_over([0] * 4 + [1] * 4) == NodeMap(4, True, GATHERS_FROM)
    assert node_map_over([0] * 4 + [1] * 4, "ranks") == NodeMap(4, False, GATHERS_FROM)
    assert ranks_each([0, 0, 1, 1, 0, 0]) == 0 and ranks_each([7, 7, 7]) == 3
