"""Collectives along either dim of arrays that may have gaps, as generators. Arguments are neither checked nor compared:
the callers know their shapes.

The argument `work` is a Slab; each docstring names the function that returns its size in bytes. Default: memory of the
workspace. Along dim 1 the messages are packed, some rows at a time. `all_to_all_into` packs all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from ..arrays import Array, NumpyLibrary, Slab, add_up, copy_into, sum_in_order
from ..arrays.workspace import Ticket
from ..layout import itemsize, offsets
from ..model.move import ROUND_BYTES
from ..model.node_map import FLAT, NodeMap
from ..model.rounds import Schedule, accumulator, in_slices
from ..model.schedule import all_to_all, gather_schedule, reduce_schedule, shared_all_gather, sum_schedule
from ..model.stages import in_pairs, stages
from .executor import Counts, planned_bytes, run_schedule
from .transport import Collective, Link

if TYPE_CHECKING:
    from ..arrays.codecs import Codec


def all_gather_into(
    link: Link,
    library: NumpyLibrary,
    part: Array,
    out: Array,
    counts: Counts,
    dim: int = 0,
    work: Slab | None = None,
    codec: Codec | None = None,
) -> Collective[Array]:
    """Gather every rank's part in `out`, concatenated along `dim`. `out` has no gaps. Along dim 0 the arrays may have
    any number of dims; `part` may be the view of its rows in `out`, and a part with gaps is copied there first. With a
    codec, along dim 0, each rank sends its part encoded, and decodes all parts, also its own. Work:
    `all_gather_work`."""
    if codec is not None:
        return gathered_encoded(link, library, part, out, counts, codec)
    dtype = library.dtype(out)
    if dim == 1:
        schedule = _gather_columns(out.shape, dtype, counts, link.rank, link.node_map)
        return run_schedule(link, library, schedule, part, out, dims=(1, 1), work=work)
    schedule = gather_schedule(counts, link.rank, prod(out.shape[1:]) * itemsize(dtype), link.node_map)
    if not library.is_contiguous(part):
        start = offsets(counts)[link.rank]
        place = out[start : start + part.shape[0]]
        return _copied_first(link, library, schedule, part, place, in_two_dims(place), in_two_dims(out), work, out)
    return run_schedule(link, library, schedule, in_two_dims(part), in_two_dims(out), work=work, result=out)


def gathered_encoded(
    link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts, codec: Codec, per_node: int = 1
) -> Collective[Array]:
    """Generator: `all_gather_into` with a codec.

    per_node   number of ranks of a node that share `out`: each gets, and decodes, the parts of the ranks with its
               number in their nodes. A barrier of the node must follow
    """
    ranks, width, edges = range(link.rank % per_node, link.size, per_node), prod(out.shape[1:]), offsets(counts)
    sizes = tuple([codec.nbytes(rows * width) if rank in ranks else 0 for rank, rows in enumerate(counts)])
    places = offsets(sizes)
    with link.workspace.borrow((places[-1], 1), "uint8", library) as data:
        parts = {rank: data[places[rank] : places[rank + 1]] for rank in ranks}
        codec.encode(library, flattened(library, part), parts[link.rank][:, 0])
        if per_node == 1:
            schedule, given = gather_schedule(sizes, link.rank, 1, link.node_map), parts[link.rank]
        else:
            schedule, given = shared_all_gather(sizes, link.rank, per_node), data
        yield from run_schedule(link, library, schedule, given, data)
        for rank, code in parts.items():
            codec.decode(library, code[:, 0], out[edges[rank] : edges[rank + 1]].reshape(-1))
    return out


def flattened(library: NumpyLibrary, array: Array) -> Array:
    """Return an array in one dim: a view, or a copy of an array with gaps."""
    return (array if library.is_contiguous(array) else library.copy(array)).reshape(-1)


def reduce_scatter_into(
    link: Link,
    library: NumpyLibrary,
    array: Array,
    out: Array,
    counts: Counts,
    beta: complex = 0,
    dim: int = 0,
    work: Slab | None = None,
) -> Collective[Array]:
    """Sum this rank's part along `dim` of all ranks' arrays: out = beta out + the sum. Arrays are 1D or 2D. Along dim 1
    `out` has no gaps. Work: `reduce_scatter_work`."""
    dtype = library.dtype(array)
    schedule = reduce_schedule(counts, link.rank, dtype, link.node_map)
    if dim == 1:
        schedule = in_slices(schedule, array.shape[0], _slice_rows(array.shape, dtype))
    given, sums = in_two_dims(array), in_two_dims(out)
    return run_schedule(link, library, schedule, given, sums, beta=beta, dims=(dim, dim), work=work, result=out)


def all_reduce_into(
    link: Link, library: NumpyLibrary, array: Array, out: Array, beta: complex = 0, work: Slab | None = None
) -> Collective[Array]:
    """Sum the arrays of all ranks: out = beta out + the sum. `out` may be `array`. If beta is not 0, or if `out` has
    gaps, the sum is first written to `array`, which must have no gaps. Work: `all_reduce_work`."""
    size = prod(array.shape)
    schedule = sum_schedule(size, library.dtype(array), link.size, link.rank, link.node_map)
    if beta != 0 or not library.is_contiguous(out):
        return _added_last(link, library, schedule, array, out, beta, work)
    flat = out.reshape(size, 1)
    if not library.is_contiguous(array):
        return _copied_first(link, library, schedule, array, out, flat, flat, work, out)
    return run_schedule(link, library, schedule, array.reshape(size, 1), flat, work=work, result=out)


def _copied_first(
    link: Link,
    library: NumpyLibrary,
    schedule: Schedule,
    given: Array,
    place: Array,
    part: Array,
    out: Array,
    work: Slab | None,
    result: Array,
) -> Collective[Array]:
    """Generator: execute a schedule for a copy of `given`, an array with gaps. place: of the copy in the result. `part`
    and `out` are place and result in 2D."""
    copy_into(library, given, place)
    return (yield from run_schedule(link, library, schedule, part, out, work=work, result=result))


def _added_last(
    link: Link, library: NumpyLibrary, schedule: Schedule, array: Array, out: Array, beta: complex, work: Slab | None
) -> Collective[Array]:
    """Generator: execute the schedule of a sum in place, in `array`; then out = beta out + the sum."""
    assert library.is_contiguous(array)  # else a reshaped copy would be summed
    flat = array.reshape(prod(array.shape), 1)
    yield from run_schedule(link, library, schedule, flat, flat, work=work)
    add_up(library, [array], out, beta)
    return out


def sum_gathered(library: NumpyLibrary, arrays: Array, out: Array, node_map: NodeMap, beta: complex = 0) -> None:
    """Sum the rows of `arrays`: out = beta out + the sum. Row r is the flattened array of rank r; `out` is 2D. The
    order of the sum is that of `reduce_scatter_into` and `all_reduce_into`."""
    per_node, elements, dtype = node_map.per_node if node_map.sums else 1, arrays.shape[1], library.dtype(arrays)
    for ranks in (arrays.shape[0],) if per_node == 1 else (per_node, arrays.shape[0] // per_node):
        for radix in stages(ranks):
            block, ranks = ranks, ranks // radix
            groups = arrays.shape[0] // radix
            parts = arrays.reshape(arrays.shape[0] // block, radix, ranks, elements)
            add = _sum_pairwise if node_map.pairwise else sum_in_order
            if groups == 1:
                add(library, [parts[0, number, 0].reshape(*out.shape) for number in range(radix)], out, beta)
                return
            arrays = library.empty((groups, elements), accumulator(dtype))
            add(library, [parts[:, number].reshape(groups, elements) for number in range(radix)], arrays)


def _sum_pairwise(library: NumpyLibrary, parts: Sequence[Array], out: Array, beta: complex = 0) -> None:
    """Compute out = beta out + the sum of the parts by `in_pairs`."""

    def add(one: Array, other: Array) -> Array:
        total = library.empty(tuple(one.shape), accumulator(library.dtype(one)))
        sum_in_order(library, [one, other], total)
        return total

    sum_in_order(library, [in_pairs(parts, add)], out, beta)


def all_to_all_into(
    link: Link,
    library: NumpyLibrary,
    array: Array,
    out: Array,
    sent: Counts,
    received: Counts,
    dims: tuple[int, int] = (0, 0),
    work: Slab | None = None,
) -> Collective[Array]:
    """Send part r of `array` along dims[0] to rank r, and receive part r of `out` along dims[1] from rank r. Work:
    `executor.work_bytes`."""
    schedule = all_to_all(tuple(sent), tuple(received), link.rank)
    return run_schedule(link, library, schedule, in_two_dims(array), in_two_dims(out), dims=dims, work=work, result=out)


def all_gather_work(
    shape: Sequence[int], dtype: str, counts: Counts, rank: int, dim: int, node_map: NodeMap = FLAT
) -> int:
    """Return the bytes of work memory of `all_gather_into`. shape: of `out`."""
    if dim == 0:
        return 0
    schedule = _gather_columns(shape, dtype, counts, rank, node_map)
    return planned_bytes(schedule, dtype, (shape[0], shape[0]), (True, True), True)


def reduce_scatter_work(
    library: NumpyLibrary, array: Array, counts: Counts, rank: int, dim: int, node_map: NodeMap = FLAT
) -> int:
    """Return the bytes of work memory of `reduce_scatter_into`."""
    dtype = library.dtype(array)
    schedule = reduce_schedule(counts, rank, dtype, node_map)
    if dim == 1:
        schedule = in_slices(schedule, array.shape[0], _slice_rows(array.shape, dtype))
    other = prod(array.shape[1:]) if dim == 0 else array.shape[0]
    gaps = dim == 1 or not library.is_contiguous(array)
    return planned_bytes(schedule, dtype, (other, other), (gaps, gaps), dim == 1)


def _gather_columns(shape: Sequence[int], dtype: str, counts: Counts, rank: int, node_map: NodeMap) -> Schedule:
    """Return the schedule of `all_gather_into` along dim 1. shape: of `out`."""
    schedule = gather_schedule(counts, rank, shape[0] * itemsize(dtype), node_map)
    return in_slices(schedule, shape[0], _slice_rows(shape, dtype))


def _slice_rows(shape: Sequence[int], dtype: str) -> int:
    """Return the number of rows that are packed at once along dim 1, so that packed copies stay small."""
    return max(1, ROUND_BYTES // max(1, shape[1] * itemsize(dtype)))


def all_reduce_work(shape: Sequence[int], dtype: str, ranks: int, rank: int, node_map: NodeMap = FLAT) -> int:
    """Return the bytes of work memory of `all_reduce_into`."""
    schedule = sum_schedule(prod(shape), dtype, ranks, rank, node_map)
    return planned_bytes(schedule, dtype, (1, 1))


def in_two_dims(array: Array) -> Array:
    """Return the array in 2D, with all dims after the first merged."""
    return array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))


def sum_coalesced(
    link: Link,
    library: NumpyLibrary,
    arrays: Sequence[Array],
    counts: Sequence[Counts] | None,
    sent: str | None = None,
    outs: Sequence[Array] | None = None,
    beta: complex = 0,
) -> Collective[None]:
    """Sum several arrays of one type over the ranks, in place, with one message for each peer. The arrays have no gaps.

    counts   for each array, the elements of every rank's part. With counts, only this rank's part of each array is
             summed
    sent     type of the messages and of their rounded sums. Default: type of the arrays
    outs     with counts: out = beta out + the sum of this rank's part. Default: the sum overwrites the array's part
    """
    held = library.dtype(arrays[0])
    packs = len(arrays) > 1 or sent not in (None, held)
    if not packs and counts is None:
        yield from all_reduce_into(link, library, arrays[0], arrays[0])
        return
    flats, workspace, taken = [array.reshape(-1) for array in arrays], link.workspace, list[Ticket]()
    adds_first = beta != 0 and sent in (None, held)  # in the order of `reduce_scatter_into`

    def work(size: int) -> Array:
        array, ticket = workspace.take((size,), sent or held, library)
        taken.append(ticket)
        return array

    try:
        packed = work(sum([flat.shape[0] for flat in flats])) if packs else flats[0]
        if counts is None:
            for part, flat in _beside(packed, flats):
                copy_into(library, flat, part)
            own, wanted = packed, flats
            yield from all_reduce_into(link, library, packed, packed)
        else:
            sizes, starts = [sum(each) for each in zip(*counts)], [offsets(each) for each in counts]
            wanted = [flat[start[link.rank] : start[link.rank + 1]] for flat, start in zip(flats, starts)]
            wanted = wanted if outs is None else list(outs)
            if packs:
                for place, part in _by_rank(packed, flats, counts):
                    place[...] = part
            own = work(sizes[link.rank])
            for part, out in _beside(own, wanted) if adds_first else ():
                copy_into(library, out, part)
            yield from reduce_scatter_into(link, library, packed, own, sizes, beta if adds_first else 0)
        for part, out in _beside(own, wanted):
            if beta == 0 or adds_first:
                copy_into(library, part, out)
            else:
                sum_in_order(library, [in_two_dims(part)], in_two_dims(out), beta)
    finally:
        for ticket in reversed(taken):
            workspace.give(ticket)


def gather_coalesced(
    link: Link, library: NumpyLibrary, parts: Sequence[Array], outs: Sequence[Array], counts: Sequence[Counts]
) -> Collective[None]:
    """Gather several arrays of one type, with one message for each peer. Each of `outs` contains the parts of all ranks
    in order. The arrays have no gaps.

    counts   for each array, the elements of every rank's part
    """
    own_parts, flats = [part.reshape(-1) for part in parts], [out.reshape(-1) for out in outs]
    if len(parts) == 1:
        yield from all_gather_into(link, library, own_parts[0], flats[0], counts[0])
        return
    sizes = [sum(each) for each in zip(*counts)]
    edges = offsets(sizes)
    with link.workspace.borrow((edges[-1],), library.dtype(outs[0]), library) as packed:
        own = packed[edges[link.rank] : edges[link.rank + 1]]
        for place, part in _beside(own, own_parts):
            copy_into(library, part, place)
        yield from all_gather_into(link, library, own, packed, sizes)
        for place, part in _by_rank(packed, flats, counts):
            part[...] = place


def _by_rank(packed: Array, flats: Sequence[Array], counts: Sequence[Counts]) -> Iterator[tuple[Array, Array]]:
    """Yield (view of `packed`, view of an array) of each part. `packed` contains all parts of rank 0, then all parts of
    rank 1, and so on. Consecutive ranks with equal part sizes are in one view. Parts of an array have at most two
    sizes, so there are at most len(flats) + 1 views of each array."""
    alike = [len(list(ranks)) for _, ranks in groupby(zip(*counts))]
    first, position, read = 0, 0, [0] * len(flats)
    for ranks in alike:
        parts = [each[first] for each in counts]
        block = packed[position : position + ranks * sum(parts)].reshape(ranks, sum(parts))
        for index, (flat, part, column) in enumerate(zip(flats, parts, offsets(parts))):
            yield block[:, column : column + part], flat[read[index] : read[index] + ranks * part].reshape(ranks, part)
            read[index] += ranks * part
        first, position = first + ranks, position + ranks * sum(parts)


def _beside(packed: Array, arrays: Iterable[Array]) -> list[tuple[Array, Array]]:
    """Return (view of `packed`, array) for each array. `packed` contains the arrays one after the other."""
    start, pairs = 0, list[tuple[Array, Array]]()
    for array in arrays:
        stop, shape = start + prod(array.shape), tuple(array.shape)
        pairs.append((packed[start:stop] if len(shape) == 1 else packed[start:stop].reshape(*shape), array))
        start = stop
    return pairs
