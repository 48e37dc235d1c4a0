"""Textbook algorithms of the collectives, as generators for the engine.

`whole` has `link.size` equal parts. Sums are of arrays with one dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from textbook import BY_NODES, DIRECT, RING, SERVER, STAGES, TOGETHER, radices

from pmm3d.arrays import Array, NumpyLibrary
from pmm3d.comm.strided_collectives import all_gather_into, all_reduce_into, reduce_scatter_into
from pmm3d.comm.transport import Collective, Link
from pmm3d.layout import offsets
from pmm3d.model.node_map import NodeMap
from pmm3d.model.stages import stages_of

LIBRARY = NumpyLibrary()


class Buffers(NamedTuple):
    """Arrays of an algorithm. whole, other: arrays of all parts, `other` for results; landing: arrays of all ranks, for
    algorithms in which a rank receives all of them."""

    whole: np.ndarray
    other: np.ndarray
    landing: np.ndarray


Way = Callable[[Link, Buffers], Collective[Array]]


def way_of(operation: str, name: str, inside: int) -> Way:
    """The generator function of an algorithm. It returns the result of the collective."""
    if name == BY_NODES:
        return _by_nodes(operation, inside)
    return WAYS[operation, name]


def _rows(array: np.ndarray, size: int) -> np.ndarray:
    return array.reshape(size, -1)


def direct_gather(link: Link, buffers: Buffers) -> Collective[Array]:
    own, rows = _rows(buffers.whole, link.size)[link.rank], _rows(buffers.other, link.size)
    rows[link.rank] = own
    yield from link.exchange(
        LIBRARY, [(peer, own) for peer in link.peers()], [(peer, rows[peer]) for peer in link.peers()]
    )
    return buffers.other


def ring_gather(link: Link, buffers: Buffers) -> Collective[Array]:
    rows, size, rank = _rows(buffers.other, link.size), link.size, link.rank
    rows[rank] = _rows(buffers.whole, size)[rank]
    for distance in range(size - 1):
        yield from link.exchange(
            LIBRARY,
            [((rank + 1) % size, rows[(rank - distance) % size])],
            [((rank - 1) % size, rows[(rank - distance - 1) % size])],
        )
    return buffers.other


def staged_gather(link: Link, buffers: Buffers) -> Collective[Array]:
    rows = _rows(buffers.other, link.size)
    rows[link.rank] = _rows(buffers.whole, link.size)[link.rank]
    for stage in reversed(stages_of(link.size, link.rank, radices(link.size))):
        regions = [rows[first:last] for first, last in stage.rows(range(link.size + 1))]
        others = [other for other in range(len(stage.peers)) if other != stage.digit]
        yield from link.exchange(
            LIBRARY,
            [(stage.peers[other], regions[stage.digit]) for other in others],
            [(stage.peers[other], regions[other]) for other in others],
        )
    return buffers.other


def direct_scatter(link: Link, buffers: Buffers) -> Collective[Array]:
    rows, landing = _rows(buffers.whole, link.size), _rows(buffers.other, link.size)
    yield from link.exchange(
        LIBRARY, [(peer, rows[peer]) for peer in link.peers()], [(peer, landing[peer]) for peer in link.peers()]
    )
    landing[link.rank] = rows[link.rank]
    return _added(landing, buffers.landing[0][: landing.shape[1]])


def ring_scatter(link: Link, buffers: Buffers) -> Collective[Array]:
    """A sum moves along the ring, and each rank adds its part. The order of the sum differs between parts."""
    rows, sums = _rows(buffers.whole, link.size), _rows(buffers.other, link.size)
    size, rank = link.size, link.rank
    leaving = rows[(rank - 1) % size]
    for distance in range(size - 1):
        coming = (rank - distance - 2) % size
        yield from link.exchange(LIBRARY, [((rank + 1) % size, leaving)], [((rank - 1) % size, sums[coming])])
        sums[coming] += rows[coming]
        leaving = sums[coming]
    return leaving


def staged_scatter(link: Link, buffers: Buffers) -> Collective[Array]:
    sums, first = _rows(buffers.other, link.size), 0
    sums[...] = _rows(buffers.whole, link.size)
    for stage in stages_of(link.size, link.rank, radices(link.size)):
        others = [other for other in range(len(stage.peers)) if other != stage.digit]
        edges = [(low - first, high - first) for low, high in stage.rows(range(link.size + 1))]
        low, high = edges[stage.digit]
        own, regions = sums[low:high], [sums[start:stop] for start, stop in edges]
        landing = buffers.landing.reshape(-1)[: len(others) * own.size].reshape(len(others), *own.shape)
        yield from link.exchange(
            LIBRARY,
            [(stage.peers[other], regions[other]) for other in others],
            [(stage.peers[other], place) for other, place in zip(others, landing)],
        )
        for place in landing:
            own += place
        sums, first = own, first + low
    return sums.reshape(-1)


def _gathered(link: Link, buffers: Buffers, own: Array, gather: Way) -> Collective[Array]:
    """The second half of an all-reduce: gather the parts that the ranks have summed."""
    _rows(buffers.whole, link.size)[link.rank] = own
    return (yield from gather(link, buffers))


def _twice(scatter: Way, gather: Way) -> Way:
    def reduce(link: Link, buffers: Buffers) -> Collective[Array]:
        own = yield from scatter(link, buffers)
        return (yield from _gathered(link, buffers, own, gather))

    return reduce


def gather_and_add(link: Link, buffers: Buffers) -> Collective[Array]:
    yield from link.exchange(
        LIBRARY,
        [(peer, buffers.whole) for peer in link.peers()],
        [(peer, buffers.landing[peer]) for peer in link.peers()],
    )
    buffers.landing[link.rank] = buffers.whole
    return _added(buffers.landing[: link.size], buffers.other)


def parameter_server(link: Link, buffers: Buffers) -> Collective[Array]:
    """Rank 0 receives all arrays, adds them, and sends the sum to all. Its link carries the bytes of all others."""
    workers = range(1, link.size)
    if link.rank:
        yield from link.exchange(LIBRARY, [(0, buffers.whole)], [])
        yield from link.exchange(LIBRARY, [], [(0, buffers.other)])
        return buffers.other
    yield from link.exchange(LIBRARY, [], [(worker, buffers.landing[worker]) for worker in workers])
    buffers.landing[0] = buffers.whole
    total = _added(buffers.landing[: link.size], buffers.other)
    yield from link.exchange(LIBRARY, [(worker, total) for worker in workers], [])
    return total


def direct_exchange(link: Link, buffers: Buffers) -> Collective[Array]:
    pieces, places = _rows(buffers.whole, link.size), _rows(buffers.other, link.size)
    yield from link.exchange(
        LIBRARY, [(peer, pieces[peer]) for peer in link.peers()], [(peer, places[peer]) for peer in link.peers()]
    )
    places[link.rank] = pieces[link.rank]
    return buffers.other


def pairwise_exchange(link: Link, buffers: Buffers) -> Collective[Array]:
    pieces, places = _rows(buffers.whole, link.size), _rows(buffers.other, link.size)
    for distance in range(1, link.size):
        to, source = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        yield from link.exchange(LIBRARY, [(to, pieces[to])], [(source, places[source])])
    places[link.rank] = pieces[link.rank]
    return buffers.other


def _by_nodes(operation: str, inside: int) -> Way:
    node_map = NodeMap(inside, sums=True, gathers_from=0.0)

    def run(link: Link, buffers: Buffers) -> Collective[Array]:
        link.node_map = node_map
        whole, other, size = buffers.whole, buffers.other, link.size
        counts = [len(whole) // size] * size
        start, stop = offsets(counts)[link.rank : link.rank + 2]
        if operation == "all_gather":
            return (yield from all_gather_into(link, LIBRARY, whole[start:stop], other, counts))
        if operation == "all_reduce":
            return (yield from all_reduce_into(link, LIBRARY, whole, other))
        own = other[start:stop]
        yield from reduce_scatter_into(link, LIBRARY, whole[:, None], own[:, None], counts)
        return own

    return run


def _added(parts: np.ndarray, out: np.ndarray) -> np.ndarray:
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out


WAYS: dict[tuple[str, str], Way] = {
    ("all_gather", DIRECT): direct_gather,
    ("all_gather", RING): ring_gather,
    ("all_gather", STAGES): staged_gather,
    ("reduce_scatter", DIRECT): direct_scatter,
    ("reduce_scatter", RING): ring_scatter,
    ("reduce_scatter", STAGES): staged_scatter,
    ("all_reduce", DIRECT): _twice(direct_scatter, direct_gather),
    ("all_reduce", RING): _twice(ring_scatter, ring_gather),
    ("all_reduce", STAGES): _twice(staged_scatter, staged_gather),
    ("all_reduce", TOGETHER): gather_and_add,
    ("all_reduce", SERVER): parameter_server,
    ("all_to_all", DIRECT): direct_exchange,
    ("all_to_all", RING): pairwise_exchange,
}
"""(operation, algorithm) -> generator function, without hierarchical algorithms."""
