"""How parts are gathered and sums formed: in the stages of the group (`pmm3d.model.stages`), round the ring, or, where
the group lies evenly on several nodes, by nodes (`pmm3d.model.spread`): on two levels, each in its stages.

Generators, of arrays whose shapes the caller knows to fit: nothing is looked at or compared. MPI moves bytes and the
array library adds: every type works, low precision is added up in float32, and rounded once.

The order of a sum depends on the number of ranks alone, and, where it goes by nodes, on how many of them each node
has. Up to 16 ranks it is that of the ranks; in larger groups ranks are added up stage by stage, in rank order within
each. By nodes, that is the order of the ranks of each node, and then that of the nodes' sums. It does not depend on the
size of the message, on where the array is cut into parts, or on who keeps them: so sums by panels, in buckets, small or
large, overlapped or not, are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..arrays import Array, NumpyLibrary, Slab, copy_into, sum_in_order
from ..layout import itemsize, offsets, part_sizes
from ..model.stages import Stage, stages, stages_of
from ..model.volumes import (
    accumulator,
    all_reduce_volume,
    gathers_by_nodes,
    goes_round,
    reduce_volume,
    sums_whole,
    sums_whole_by_nodes,
)
from .transport import Collective, Level, Link, keep_posted

Counts = Sequence[int]
"""Rows of each rank's part."""


def meeting(link: Link) -> Collective[None]:
    """Wait until all ranks of the link have come so far; what they wrote before is seen then by all. Empty messages,
    each round twice as far along the ring."""
    distance = 1
    while distance < link.size and not link.dry:
        yield link.token((link.rank - distance) % link.size, (link.rank + distance) % link.size)
        distance *= 2


def gather_parts(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts) -> Collective[Array]:
    """Every rank's part, one after the other, in `out` on every rank. `part` may be where it belongs in `out`; else it
    is copied there while the others travel. Returns `out`."""
    row_bytes = prod(out.shape[1:]) * itemsize(library.dtype(out))
    if gathers_by_nodes(counts, row_bytes, link.spread):
        return (yield from _gathered_by_nodes(link, library, part, out, counts))
    starts, rank, group = offsets(counts), link.rank, stages(link.size)

    def rows(first: int) -> Array:
        return out[starts[first] : starts[first + 1]]

    def copy_own() -> None:
        if library.has_data and part.shape[0] and library.address(rows(rank)) != library.address(part):
            copy_into(library, part, rows(rank))

    partner = group.partner(rank)
    if group.pairs and goes_round(counts, row_bytes):
        copy_own()
        for distance in range(link.size - 1):
            yield from link.exchange(library, [((rank + 1) % link.size, rows((rank - distance) % link.size))],
                                     [((rank - 1) % link.size, rows((rank - distance - 1) % link.size))])
        return out
    if not group.acts(rank):
        yield from link.exchange(library, [(rank - 1, part)], [(rank - 1, out)])
        return out
    if partner is not None:
        copy_own()
        yield from link.exchange(library, [], [(partner, rows(partner))])
    edges = group.actor_offsets(counts)
    for index, stage in enumerate(reversed(stages_of(link.size, rank))):
        regions = [out[first:last] for first, last in stage.rows(edges)]
        mine = regions[stage.digit] if index or partner is not None else part
        exchange = link.exchange(library, [(stage.peers[other], mine) for other in stage.others],
                                 [(stage.peers[other], regions[other]) for other in stage.others])
        yield from exchange if index else under_way(exchange, copy_own)
    if partner is not None:
        yield from link.exchange(library, [(partner, out)], [])
    return out


def reduce_parts(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts, beta: complex = 0,
                 work: Slab | None = None) -> Collective[Array]:
    """out = beta out + the sum over the ranks of this rank's part of their 2D arrays. `out` may be strided, but not a
    part of `whole`. Returns `out`.

    work   memory of `reduce_volume`; taken from the workspace if left out
    """
    if work is None:
        nbytes = reduce_volume(counts, link.rank, whole.shape[1], library.dtype(whole), link.spread).work
        with link.workspace.slab(nbytes, library) as work:
            return (yield from reduce_parts(link, library, whole, out, counts, beta, work))
    if link.spread.sums:
        return (yield from _reduced_by_nodes(link, library, whole, out, counts, beta, work))
    group, rank, total = stages(link.size), link.rank, accumulator(library.dtype(whole))
    partner, cols = group.partner(rank), whole.shape[1]
    if not group.acts(rank):
        yield from link.exchange(library, [(rank - 1, whole)], [])
        landing = work.array((counts[rank], cols), total)
        yield from link.exchange(library, [], [(rank - 1, landing)])
        sum_in_order(library, [landing], out, beta)
        return out
    sums = (yield from _with_partner(link, library, whole, work)) if group.pairs else whole
    edges, steps = group.actor_offsets(counts), stages_of(link.size, rank)
    for stage in steps:
        first = stage.rows(edges)[0][0]
        regions = [sums[low - first : high - first] for low, high in stage.rows(edges)]
        parts, received = _landing(regions[stage.digit], stage, library, work)
        yield from link.exchange(library, [(stage.peers[other], regions[other]) for other in stage.others],
                                 [(stage.peers[other], parts[other]) for other in stage.others])
        if stage is steps[-1] and partner is None:
            sum_in_order(library, parts, out, beta)
        else:
            sums = _added(library, parts, received, work)
    if partner is not None:
        own = counts[rank]
        yield from link.exchange(library, [(partner, sums[own:])], [])
        sum_in_order(library, [sums[:own]], out, beta)
    return out


def sum_arrays(link: Link, library: NumpyLibrary, array: Array, out: Array, work: Slab | None = None
               ) -> Collective[Array]:
    """out = the sum over the ranks of their arrays, on every rank: `reduce_parts`, then `gather_parts`; small arrays
    are sent whole in each stage. `out` may be `array`. Returns `out`.

    work   memory of `all_reduce_volume`; taken from the workspace if left out
    """
    size, dtype = prod(array.shape), library.dtype(array)
    form = _sum_by_nodes if link.spread.sums else \
        _sum_whole if sums_whole(size, dtype, link.size) else _sum_by_parts
    if work is not None:
        yield from form(link, library, array, out, work)
        return out
    with link.workspace.slab(all_reduce_volume(size, dtype, link.size, link.rank, link.spread).work, library) as work:
        yield from form(link, library, array, out, work)
    return out


def _sum_by_parts(link: Link, library: NumpyLibrary, array: Array, out: Array, work: Slab) -> Collective[None]:
    counts = part_sizes(prod(array.shape), link.size)
    own = work.array((counts[link.rank],), library.dtype(array))
    yield from reduce_parts(link, library, array.reshape(-1, 1), own[:, None], counts, 0, work)
    yield from gather_parts(link, library, own, out.reshape(-1), counts)


def _sum_whole(link: Link, library: NumpyLibrary, array: Array, out: Array, work: Slab) -> Collective[None]:
    """Every rank of a stage receives all arrays and adds them itself."""
    group, rank, row, out = stages(link.size), link.rank, array.reshape(1, -1), out.reshape(1, -1)
    partner = group.partner(rank) if group.pairs else None
    if group.pairs and not group.acts(rank):
        yield from link.exchange(library, [(rank - 1, row)], [])
        yield from link.exchange(library, [], [(rank - 1, out)])
        return
    sums = (yield from _with_partner(link, library, row, work)) if group.pairs else row
    for stage in stages_of(link.size, rank):
        parts, received = _landing(sums, stage, library, work)
        yield from link.exchange(library, [(stage.peers[other], sums) for other in stage.others],
                                 [(stage.peers[other], parts[other]) for other in stage.others])
        complete = link.size == len(parts)
        sums = _added(library, parts, out if complete and stage.digit < 2 else received, work, complete)
    if sums is not out and library.has_data:
        out[...] = sums
    if partner is not None:
        yield from link.exchange(library, [(partner, out)], [])


def levels(link: Link) -> tuple[Level, Level]:
    """Of the ranks of this one's node, and of those that have the same number in theirs, on an axis that lies evenly on
    several nodes."""
    inside = link.spread.inside
    node, own = divmod(link.rank, inside)
    return (Level(link, range(node * inside, (node + 1) * inside)), Level(link, range(own, link.size, inside)))


def to_each_node(link: Link, library: NumpyLibrary, block: Array, counts: Counts) -> Collective[None]:
    """Of a block that each of several nodes has once, this rank's rows go to the ranks with its number in the others,
    and theirs come: a link carries each byte once. Then the ranks of the node meet, and see all. counts: rows of each
    rank, one's after the other's."""
    inside, across = levels(link)
    edges, own = offsets(counts), [(node, node * inside.size + inside.rank) for node in across.peers()]

    def rows(rank: int) -> Array:
        return block[edges[rank] : edges[rank + 1]]

    yield from across.exchange_in_windows(library, [(node, rows(link.rank)) for node, _ in own],
                                          [(node, rows(rank)) for node, rank in own])
    yield from meeting(inside)


def _gathered_by_nodes(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts
                       ) -> Collective[Array]:
    """Each rank's part goes to one rank of every other node, and from there to the others of that node."""
    (inside, across), starts, each = levels(link), offsets(counts), link.spread.inside

    def mine(node: int) -> Array:
        first = node * each + inside.rank
        return out[starts[first] : starts[first + 1]]

    def in_node(node: int, brought: Array) -> Collective[Array]:
        first, last = node * each, (node + 1) * each
        return gather_parts(inside, library, brought, out[starts[first] : starts[last]], counts[first:last])

    yield from side_by_side([across.exchange_in_windows(library, [(node, part) for node in across.peers()],
                                                        [(node, mine(node)) for node in across.peers()]),
                             in_node(across.rank, part)])
    others, step = sorted(across.peers()), link.spread.blocks_at_once()
    for first in range(0, len(others), step):
        yield from side_by_side([in_node(node, mine(node)) for node in others[first : first + step]])
    return out


def _reduced_by_nodes(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts, beta: complex,
                      work: Slab) -> Collective[Array]:
    """The sums over the ranks of a node of what one rank of each node keeps, at one of them; then across."""
    (inside, across), starts, each = levels(link), offsets(counts), link.spread.inside
    cols, dtype, column = whole.shape[1], library.dtype(whole), counts[inside.rank :: each]
    sums, edges, rest = work.array((sum(column), cols), accumulator(dtype)), offsets(column), work.rest()

    def in_node(node: int, memory: Slab) -> Collective[Array]:
        sizes = counts[node * each : (node + 1) * each]
        landing = memory.slab(reduce_volume(sizes, inside.rank, cols, dtype).work)
        return reduce_parts(inside, library, whole[starts[node * each] : starts[(node + 1) * each]],
                            sums[edges[node] : edges[node + 1]], sizes, 0, landing)

    step = link.spread.blocks_at_once()
    for first in range(0, across.size, step):
        memory = rest.again()
        yield from side_by_side([in_node(node, memory) for node in range(first, min(first + step, across.size))])
    return (yield from reduce_parts(across, library, sums, out, column, beta, rest.again()))


def _sum_by_nodes(link: Link, library: NumpyLibrary, array: Array, out: Array, work: Slab) -> Collective[None]:
    """Inside a node each rank sums a part, which is summed across and gathered again; or small arrays whole."""
    (inside, across), dtype, size = levels(link), library.dtype(array), prod(array.shape)
    total = accumulator(dtype)
    if sums_whole_by_nodes(size, dtype, link.size, inside.size):
        row, final = array.reshape(1, -1), out.reshape(1, -1)
        wide = row if total == dtype else _added(library, [row], row, work)
        sums, rest = work.array((1, size), total), work.rest()
        yield from _sum_whole(inside, library, wide, sums, rest)
        yield from _sum_whole(across, library, sums, final if total == dtype else wide, rest.again())
        if total != dtype:
            sum_in_order(library, [wide], final)
        return
    counts, flat = part_sizes(size, inside.size), out.reshape(-1)
    parts, start = part_sizes(counts[inside.rank], across.size), offsets(counts)[inside.rank]
    sums, rest = work.array((counts[inside.rank], 1), total), work.rest()
    yield from reduce_parts(inside, library, array.reshape(-1, 1), sums, counts, 0, rest)
    again = rest.again()
    own, column = again.array((parts[across.rank],), dtype), flat[start : start + counts[inside.rank]]
    yield from reduce_parts(across, library, sums, own[:, None], parts, 0, again.rest())
    yield from gather_parts(across, library, own, column, parts)
    yield from gather_parts(inside, library, column, flat, counts)


def _with_partner(link: Link, library: NumpyLibrary, array: Array, work: Slab) -> Collective[Array]:
    """Generator: an actor's array, with that of the other rank of its pair added; in a group with pairs all actors'
    are in float32 from then on if they are of low precision."""
    group, parts = stages(link.size), [array]
    partner = group.partner(link.rank)
    if partner is not None:
        parts.append(work.array(tuple(array.shape), library.dtype(array)))
        yield from link.exchange(library, [], [(partner, parts[1])])
    widened = accumulator(library.dtype(array)) != library.dtype(array)
    return _added(library, parts, parts[-1], work) if len(parts) > 1 or (group.pairs and widened) else array


def _landing(own: Array, stage: Stage, library: NumpyLibrary, work: Slab) -> tuple[list[Array], Array]:
    """(What is to be added, in order: `own`, and new arrays in which the others' land; the first of the new ones, where
    the sum may be formed, since it is one of the first two of all.)"""
    others = len(stage.peers) - 1
    parts = list(work.array((others, *own.shape), library.dtype(own)))
    into = parts[0] if parts else own
    parts.insert(stage.digit, own)
    return parts, into


def _added(library: NumpyLibrary, parts: list[Array], into: Array, work: Slab, complete: bool = False) -> Array:
    """The sum of the parts, in `into`; in float32 if they are of low precision and the sum is not complete."""
    dtype = library.dtype(into)
    if accumulator(dtype) != dtype and not complete:
        into = work.array(tuple(into.shape), accumulator(dtype))
    sum_in_order(library, parts, into)
    return into


def side_by_side(collectives: Sequence[Collective[Any]]) -> Collective[None]:
    """All of them, step by step: their next messages are posted, in their order, once the last of all have come."""
    running = list(collectives)
    while running:
        posted, going = list[Any](), list[Collective[Any]]()
        for collective in running:
            try:
                posted += next(collective)
            except StopIteration:
                continue
            except Exception as error:
                keep_posted(error, posted)
                raise
            going.append(collective)
        running = going
        if going:
            yield posted


def under_way(exchange: Collective[None], work: Callable[[], None]) -> Collective[None]:
    """The exchange, with some work done as soon as its messages are posted."""
    requests = next(exchange)
    try:
        work()
    except Exception as error:
        keep_posted(error, requests)
        raise
    yield requests
    yield from exchange
