"""The executor in one process, with a fake link: results, rounds, messages, bytes, order of sums."""

from functools import reduce
from itertools import pairwise, product
from math import log2

import numpy as np
import pytest
from fake_link import LIBRARY, run
from loops import given

from pmm3d.comm.executor import run_schedule
from pmm3d.comm.strided_collectives import all_gather_into, all_reduce_into, reduce_scatter_into
from pmm3d.layout import offsets, part_sizes
from pmm3d.model import schedule
from pmm3d.model.node_map import FLAT
from pmm3d.model.rounds import IN, OUT, Schedule, Span
from pmm3d.model.schedule import all_reduce_volume, gather_volume, reduce_volume
from pmm3d.model.stages import DIRECT, LARGEST_STAGE, stages

SIZES = (*range(1, 25), 32, 37, 48, 59, 64)
"""Sizes of groups with one stage (up to 16 ranks) and with several stages. 17, 37 and 59 are prime."""
FEW = (1, 3, 16, 17, 24, 37)


@pytest.fixture
def sizes(pytestconfig):
    """Group sizes. With --all: each size up to 64."""
    return range(1, 65) if pytestconfig.getoption("all_tests") else SIZES


@pytest.fixture
def few(pytestconfig):
    """Some group sizes. With --all: `SIZES`."""
    return SIZES if pytestconfig.getoption("all_tests") else FEW


def rows_of(size):
    """Numbers of rows of the ranks: different, some 0."""
    return [(3, 0, 1, 4, 2, 0, 5)[rank % 7] for rank in range(size)]


def floats(size, rows, dtype="float64", seed=0):
    """Numbers whose sum depends on the order."""
    drawn = np.random.default_rng(seed).standard_normal((size, *np.atleast_1d(rows)))
    return list((drawn * 10.0 ** np.random.default_rng(seed + 1).integers(-2, 3, drawn.shape)).astype(dtype))


def summed(arrays):
    """The sum in the documented order: stage by stage, in rank order within each stage."""
    sums = list(arrays)
    for radix in stages(len(arrays)):
        stride = len(sums) // radix
        sums = [reduce(np.add, sums[first::stride]) for first in range(stride)]
    return sums[0]


def moved(links):
    return [(link.record.received, link.record.sent) for link in links]


def sum_in_cuts(arrays, cuts, node_map=FLAT, each=None):
    """The sum of the ranks' arrays, computed piece by piece between the cuts. Asserts that all ranks have equal
    results."""
    size, dtype, pieces = len(arrays), str(arrays[0].dtype), list(pairwise(cuts))

    def sums(link):
        out = np.zeros(cuts[-1], dtype)
        for low, high in pieces:
            yield from all_reduce_into(link, LIBRARY, arrays[link.rank][low:high], out[low:high])
        return out

    outs, links = run(size, sums, node_map, each)
    volumes = [
        [all_reduce_volume(high - low, dtype, size, rank, node_map) for low, high in pieces] for rank in range(size)
    ]
    assert moved(links) == [
        (sum(part.received for part in parts), sum(part.sent for part in parts)) for parts in volumes
    ]
    assert all(np.array_equal(out, outs[0]) for out in outs)
    return outs[0]


@pytest.fixture(params=["rule", "halving"])
def all_stages(request):
    if request.param == "halving":
        request.getfixturevalue("stages_of_two")


def test_gathers(all_stages, sizes):
    for size in sizes:
        with given(size=size):
            counts = rows_of(size)
            parts = [np.full((rows, 3), rank + 1.0) for rank, rows in enumerate(counts)]
            outs, links = run(
                size, lambda link: all_gather_into(link, LIBRARY, parts[link.rank], np.zeros((sum(counts), 3)), counts)
            )
            assert all(np.array_equal(out, np.concatenate(parts)) for out in outs)
            assert moved(links) == [gather_volume(counts, rank, 24)[:2] for rank in range(size)]


def test_a_part_may_lie_in_the_whole_already(sizes):
    for size in sizes:
        with given(size=size):
            counts = part_sizes(size + 3, size)
            starts = offsets(counts)

            def gather(link):
                out = np.zeros(size + 3)
                part = out[starts[link.rank] : starts[link.rank + 1]]
                part[...] = link.rank
                return all_gather_into(link, LIBRARY, part, out, counts)

            expected = np.repeat(np.arange(size), counts)
            assert all(np.array_equal(out, expected) for out in run(size, gather)[0])


def test_scatters_sums_in_the_order_of_the_contract(all_stages, sizes):
    for size in sizes:
        with given(size=size):
            counts, rows = rows_of(size), sum(rows_of(size))
            wholes = floats(size, (rows, 2))
            outs, links = run(
                size,
                lambda link: reduce_scatter_into(
                    link, LIBRARY, wholes[link.rank], np.ones((counts[link.rank], 2)), counts, beta=0
                ),
            )
            assert np.array_equal(np.concatenate(outs), summed(wholes))
            assert moved(links) == [reduce_volume(counts, rank, 2, "float64")[:2] for rank in range(size)]


def test_beta_and_types(few):
    for size, dtype in product(few, ["float16", "float32", "complex128", "int64"]):
        with given(size=size, dtype=dtype):
            wholes = [np.full((size + 1, 2), rank % 5).astype(dtype) for rank in range(size)]
            counts = part_sizes(size + 1, size)
            outs, links = run(
                size,
                lambda link: reduce_scatter_into(
                    link, LIBRARY, wholes[link.rank], np.ones((2, counts[link.rank]), dtype).T, counts, beta=3
                ),
            )
            expected = 3 + sum(rank % 5 for rank in range(size))
            assert all(np.array_equal(out, np.full_like(out, expected)) for out in outs)
            assert moved(links) == [reduce_volume(counts, rank, 2, dtype)[:2] for rank in range(size)]


def test_a_sum_does_not_depend_on_its_size_or_its_cuts(few):
    """Bits are equal for small and large messages, for whole arrays and pieces, and for the parts of all ranks."""
    for size, dtype in product(few, ["float16", "float64"]):
        with given(size=size, dtype=dtype):
            large = 40_000 // max(1, size // 8)
            arrays = floats(size, large, dtype)

            whole = sum_in_cuts(arrays, [0, large])
            assert np.array_equal(whole, sum_in_cuts(arrays, [0, 7, 20, 3001, large]))
            if dtype == "float16":
                assert np.array_equal(whole, summed([array.astype("float32") for array in arrays]).astype("float16"))
            else:
                assert np.array_equal(whole, summed(arrays))


def test_in_place(few):
    for size in few:
        with given(size=size):
            for elements in (5, 20_000):
                arrays = [np.full(elements, rank, np.float64) for rank in range(size)]
                outs, _ = run(size, lambda link: all_reduce_into(link, LIBRARY, arrays[link.rank], arrays[link.rank]))
                assert all(out is array and np.all(out == sum(range(size))) for out, array in zip(outs, arrays))


def costs(links):
    """(rounds, messages in a round, bytes received): the largest of all ranks."""
    return (
        max(link.steps for link in links),
        max(link.messages for link in links),
        max(link.record.received for link in links),
    )


def gathered(size, elements):
    counts = [elements // size] * size
    return costs(
        run(size, lambda link: all_gather_into(link, LIBRARY, np.zeros(counts[0]), np.zeros(elements), counts))[1]
    )


def scattered(size, elements):
    counts = [elements // size] * size
    return costs(
        run(
            size,
            lambda link: reduce_scatter_into(link, LIBRARY, np.zeros((elements, 1)), np.zeros((counts[0], 1)), counts),
        )[1]
    )


def all_reduced(size, elements):
    return costs(run(size, lambda link: all_reduce_into(link, LIBRARY, np.zeros(elements), np.zeros(elements)))[1])


LARGE, SMALL = 2**7 * 3**2 * 5 * 7, 1


def test_direct_costs_one_step():
    """Of n bytes on p ranks: all-gather and reduce-scatter take 1 round of p-1 messages, n (p-1)/p bytes; gather and
    add n (p-1)."""
    for size in [2, 3, 4, 6, 8, 16]:
        with given(size=size):
            share = 8 * LARGE * (size - 1) // size
            assert gathered(size, LARGE) == scattered(size, LARGE) == (1, size - 1, share)
            assert all_reduced(size, LARGE) == (2, size - 1, 2 * share)
            assert all_reduced(size, SMALL) == (1, size - 1, 8 * (size - 1))


def test_halving_and_doubling_cost_as_published(stages_of_two):
    """lg p rounds and n (p-1)/p bytes; all-reduce 2 lg p and 2 n (p-1)/p; for small arrays lg p and n lg p."""
    for size in [2, 4, 8, 16, 32, 64]:
        with given(size=size):
            share, steps = 8 * LARGE * (size - 1) // size, int(log2(size))
            assert stages(size) == (2,) * steps
            assert gathered(size, LARGE) == scattered(size, LARGE) == (steps, 1, share)
            assert all_reduced(size, LARGE) == (2 * steps, 1, 2 * share)
            assert all_reduced(size, SMALL) == (steps, 1, 8 * steps)


def test_stages_move_as_little_in_few_messages():
    for size in [18, 20, 24, 28, 32, 36, 40, 42, 48, 56, 60, 64]:
        with given(size=size):
            share = 8 * LARGE // size * (size - 1)
            steps, messages, received = scattered(size, LARGE // size * size)
            assert received == share and (steps, messages) == (len(stages(size)), max(stages(size)) - 1)
            assert gathered(size, LARGE // size * size) == (steps, messages, share)


def test_the_rule():
    for size in range(1, 5000):
        group = stages(size)
        assert np.prod(group) == size and (group == (size,) if size <= DIRECT else True)
        assert all(radix <= LARGEST_STAGE or is_prime(radix) for radix in group[: len(group) if size > DIRECT else 0])
    assert stages(4096) == (8, 8, 8, 8) and stages(32768) == (8, 8, 8, 8, 8) and stages(46) == (23, 2)


def is_prime(number):
    return all(number % factor for factor in range(2, int(number**0.5) + 1))


def test_windows_meet(monkeypatch):
    """Both ends of a message place it in the same window, in any order of the ranks. Otherwise the job would hang."""
    for size in [1, 2, 5, 16, 23]:
        with given(size=size):
            monkeypatch.setattr(schedule, "WINDOW", 3)
            drawn = np.random.default_rng(size).integers(0, 2, (size, size))

            def exchange(link):
                out = np.zeros(size, int)[:, None]
                sends = [(peer, Span(IN, peer, peer + 1)) for peer in range(size) if drawn[link.rank, peer]]
                receives = [(peer, Span(OUT, peer, peer + 1)) for peer in range(size) if drawn[peer, link.rank]]
                rounds = schedule.windows(schedule.Members(range(size), link.rank), sends, receives)
                given_ = 100 * link.rank + np.arange(size)[:, None]
                yield from run_schedule(link, LIBRARY, Schedule(tuple(rounds)), given_, out)
                return all(out[peer] == 100 * peer + link.rank for peer, _ in receives if peer != link.rank)

            right, links = run(size, exchange)
            assert all(right) and max(link.messages for link in links) <= 3
