"""Encoded messages: float32 sent as 16 bits."""

from itertools import product

import numpy as np
import pytest
from fake_link import LIBRARY, run
from loops import given
from samples import to_library, to_numpy

from pmm3d import DTypeError, Grid
from pmm3d.comm import unchecked
from pmm3d.comm.codec import Cast
from pmm3d.comm.executor import encoded_by, work_bytes
from pmm3d.layout import offsets, part_sizes
from pmm3d.model.node_map import FLAT, NodeMap
from pmm3d.model.rounds import count
from pmm3d.model.schedule import all_to_all, gather_schedule, reduce_schedule, sum_schedule

HALF = Cast("float16")
GROUPS = [(2, FLAT), (3, FLAT), (4, FLAT), (8, FLAT), (24, FLAT), (4, NodeMap(2, True, 0)), (8, NodeMap(4, True, 0))]
"""Numbers of ranks, and their nodes. 24 ranks exchange in stages."""
ROWS = 29


def arrays(size, dim):
    return [
        np.random.default_rng(rank).standard_normal((ROWS, 6) if dim == 0 else (6, ROWS)).astype("float32")
        for rank in range(size)
    ]


def cut(array, counts, rank, dim):
    start, stop = offsets(counts)[rank : rank + 2]
    return array[start:stop] if dim == 0 else array[:, start:stop]


def rounded(array):
    return array.astype("float16").astype("float32")


def with_work(nbytes, collective):
    """The collective with exactly the planned work memory."""

    def steps(link):
        with link.workspace.slab(nbytes(link), LIBRARY) as work:
            return (yield from collective(link, work))

    return steps


def test_all_ranks_gather_the_decoded_parts():
    """The part of a rank is decoded also on this rank."""
    for (size, node_map), dim in product(GROUPS, (0, 1)):
        with given(size=size, node_map=node_map, dim=dim):
            counts, whole = part_sizes(ROWS, size), arrays(1, dim)[0]
            found, links = run(
                size,
                with_work(
                    lambda link: unchecked.all_gather_work(
                        whole.shape, "float32", counts, link.rank, dim, node_map, HALF
                    ),
                    lambda link, work: unchecked.all_gather_into(
                        link,
                        LIBRARY,
                        cut(whole, counts, link.rank, dim).copy(),
                        np.empty_like(whole),
                        counts,
                        dim,
                        work,
                        HALF,
                    ),
                ),
                node_map,
            )
            assert all(np.array_equal(each, rounded(whole)) for each in found)
            for link in links:
                schedule = gather_schedule(counts, link.rank, 6 * 4, node_map)
                moved = count(schedule, 24, encoded=encoded_by(HALF, "float32", (6, 6)))
                assert (link.record.received, link.record.sent) == moved[:2]
                assert 2 * moved.received == count(schedule, 24).received


def test_sums_are_of_the_decoded_parts_in_a_fixed_order_in_float32():
    for (size, node_map), dim in product(GROUPS, (0, 1)):
        with given(size=size, node_map=node_map, dim=dim):
            counts, mine = part_sizes(ROWS, size), arrays(size, dim)
            outs = [np.ones_like(cut(mine[0], counts, rank, dim)) for rank in range(size)]
            found, links = run(
                size,
                with_work(
                    lambda link: unchecked.reduce_scatter_work(
                        LIBRARY, mine[link.rank], counts, link.rank, dim, node_map, HALF
                    ),
                    lambda link, work: unchecked.reduce_scatter_into(
                        link, LIBRARY, mine[link.rank], outs[link.rank], counts, 2, dim, work, HALF
                    ),
                ),
                node_map,
            )
            exact = sum(each.astype("float64") for each in mine) + 2
            for rank, each in enumerate(found):
                assert np.allclose(each, cut(exact, counts, rank, dim), atol=0.05)
                if node_map is FLAT and size <= 16:
                    parts = [
                        cut(one if peer == rank else rounded(one), counts, rank, dim) for peer, one in enumerate(mine)
                    ]
                    assert np.array_equal(each, sum(parts, 2 * np.ones_like(parts[0])))
                volume = count(
                    reduce_schedule(counts, rank, "float32", node_map), 24, encoded=encoded_by(HALF, "float32", (6, 6))
                )
                assert (links[rank].record.received, links[rank].record.sent) == volume[:2]


def test_an_all_reduce_is_bitwise_the_same_on_every_rank():
    for (size, node_map), rows in product(GROUPS, (1, ROWS, 5000)):
        with given(size=size, node_map=node_map, rows=rows):
            mine = [np.random.default_rng(rank).standard_normal(rows).astype("float32") for rank in range(size)]
            found, links = run(
                size,
                with_work(
                    lambda link: unchecked.all_reduce_work((rows,), "float32", size, link.rank, node_map, HALF),
                    lambda link, work: unchecked.all_reduce_into(
                        link, LIBRARY, mine[link.rank].copy(), np.empty_like(mine[0]), 0, work, HALF
                    ),
                ),
                node_map,
            )
            assert len({each.tobytes() for each in found}) == 1
            assert np.allclose(found[0], sum(mine), atol=0.05) and np.array_equal(found[0], rounded(found[0]))
            moved = count(
                sum_schedule(rows, "float32", size, 0, node_map, True), 4, encoded=encoded_by(HALF, "float32", (1, 1))
            )
            assert (links[0].record.received, links[0].record.sent) == moved[:2]


def test_all_to_all():
    for size, dims in product((2, 3, 4, 8), product((0, 1), repeat=2)):
        with given(size=size, dims=dims):
            shapes = [(2 * size, 2) if dim == 0 else (2, 2 * size) for dim in dims]
            mine = [np.random.default_rng(rank).standard_normal(shapes[0]).astype("float32") for rank in range(size)]
            twos, outs = [2] * size, [np.empty(shapes[1], "float32") for _ in range(size)]
            found, _ = run(
                size,
                with_work(
                    lambda link: work_bytes(
                        all_to_all(tuple(twos), tuple(twos), link.rank),
                        LIBRARY,
                        mine[link.rank],
                        outs[link.rank],
                        dims,
                        HALF,
                    ),
                    lambda link, work: unchecked.all_to_all_into(
                        link, LIBRARY, mine[link.rank], outs[link.rank], twos, twos, dims, work, HALF
                    ),
                ),
            )
            for rank, each in enumerate(found):
                for source in range(size):
                    part = cut(mine[source], twos, rank, dims[0])
                    assert np.array_equal(cut(each, twos, source, dims[1]), part if source == rank else rounded(part))


@pytest.mark.parallel([2, 4], thorough=[3, 8])
def test_an_axis_sends_half_of_the_bytes(comm):
    with Grid(comm, "ddp") as grid:
        axis = grid.everyone
        for library, codec in (("numpy", HALF), ("standin", HALF), ("torch", Cast("bfloat16"))):
            with given(library=library):
                mine = to_library(np.full(8 * axis.size, 1 + 2.0**-8 * axis.index, "float32"), library)
                out = to_library(np.zeros(8 * axis.size, "float32"), library)
                grid.ledger.reset()
                axis.all_reduce_into(mine, out, codec=codec).wait()
                assert grid.ledger.total(operation="all_reduce").received == 2 * 2 * 8 * (axis.size - 1)
                assert len(set(comm.allgather(to_numpy(out, library).tobytes()))) == 1


def test_what_a_cast_does_not_send_is_refused():
    with pytest.raises(DTypeError, match="arrays are sent as"):
        Cast("complex64")
    with pytest.raises(DTypeError, match="sends real arrays; got complex64"):
        HALF.nbytes(3, "complex64")
    with pytest.raises(DTypeError, match="numpy have no bfloat16"):
        Cast("bfloat16").encode(LIBRARY, np.ones(2, "float32"), np.empty(4, "uint8"))
