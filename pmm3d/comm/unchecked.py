"""Collectives for callers that know their shapes, along either dim, of arrays that may have gaps: generators, in which
nothing is checked or compared.

Each takes `work`, a Slab of the bytes that the function named with it returns; it is taken from the workspace if left
out. Along dim 1 the messages are packed, in rounds of some rows; `all_to_all_into` packs all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from math import prod

from ..arrays import Array, NumpyLibrary, Slab, add_up, copy_into, sum_in_order
from ..layout import itemsize, offsets
from ..model.move import ROUND_BYTES
from ..model.node_map import FLAT, NodeMap
from ..model.rounds import accumulator
from ..model.schedule import all_to_all, gather_schedule, reduce_schedule, sum_schedule
from ..model.stages import stages
from .codec import Codec
from .executor import Counts, planned_bytes, run_schedule
from .transport import Collective, Link


def all_gather_rows(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts,
                    work: Slab | None = None, codec: Codec | None = None) -> Collective[Array]:
    """Gather every rank's rows, of arrays of any dims, in `out`, which has no gaps. `part` may be its place in `out`; a
    part with gaps is copied there first."""
    if not library.is_contiguous(part):
        start = offsets(counts)[link.rank]
        own = out[start : start + part.shape[0]]
        copy_into(library, part, own)
        part = own
    schedule = gather_schedule(counts, link.rank, prod(out.shape[1:]) * itemsize(library.dtype(out)), link.node_map)
    yield from run_schedule(link, library, schedule, in_two_dims(part), in_two_dims(out), work=work, codec=codec)
    return out


def all_gather_into(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts, dim: int = 0,
                    work: Slab | None = None, codec: Codec | None = None) -> Collective[Array]:
    """Gather every rank's part, one after the other along `dim`, in `out`, which has no gaps. Work:
    `all_gather_work`."""
    if dim == 0:
        return (yield from all_gather_rows(link, library, part, out, counts, work, codec))
    dtype = library.dtype(out)
    schedule = gather_schedule(counts, link.rank, out.shape[0] * itemsize(dtype), link.node_map)
    with ExitStack() as borrowed:
        nbytes = lambda: all_gather_work(out.shape, dtype, counts, link.rank, dim, link.node_map, codec)
        memory = work_slab(link, library, work, nbytes, borrowed)
        for rows in _rounds(out.shape, dtype):
            yield from run_schedule(link, library, schedule, part[rows], out[rows], dims=(1, 1), work=memory.again(),
                                    codec=codec)
    return out


def reduce_scatter_into(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts, beta: complex = 0,
                        dim: int = 0, work: Slab | None = None, codec: Codec | None = None) -> Collective[Array]:
    """out = beta out + the sum of this rank's part along `dim` of the ranks' arrays, of one or two dims. Along dim 1
    `out` has no gaps. Work: `reduce_scatter_work`."""
    dtype = library.dtype(whole)
    schedule = reduce_schedule(counts, link.rank, dtype, link.node_map)
    if dim == 0:
        yield from run_schedule(link, library, schedule, in_two_dims(whole), in_two_dims(out), beta=beta, work=work,
                                codec=codec)
        return out
    with ExitStack() as borrowed:
        nbytes = lambda: reduce_scatter_work(library, whole, counts, link.rank, dim, link.node_map, codec)
        memory = work_slab(link, library, work, nbytes, borrowed)
        for rows in _rounds(whole.shape, dtype):
            yield from run_schedule(link, library, schedule, whole[rows], out[rows], beta=beta, dims=(1, 1),
                                    work=memory.again(), codec=codec)
    return out


def all_reduce_flat(link: Link, library: NumpyLibrary, array: Array, out: Array, work: Slab | None = None,
                    codec: Codec | None = None) -> Collective[Array]:
    """out = the sum over the ranks of their arrays, without gaps, on every rank. `out` may be `array`. Work:
    `all_reduce_work`."""
    assert library.is_contiguous(array) and library.is_contiguous(out)  # else a reshaped copy would be summed
    size, dtype = prod(array.shape), library.dtype(array)
    schedule = sum_schedule(size, dtype, link.size, link.rank, link.node_map, codec is not None)
    yield from run_schedule(link, library, schedule, array.reshape(size, 1), out.reshape(size, 1), work=work,
                            codec=codec)
    return out


def all_reduce_into(link: Link, library: NumpyLibrary, array: Array, out: Array, beta: complex = 0,
                    work: Slab | None = None, codec: Codec | None = None) -> Collective[Array]:
    """out = beta out + the sum of the ranks' arrays. With beta, or if `out` has gaps, the sum is formed in `array`
    first, which then has no gaps. Work: `all_reduce_work`."""
    if beta == 0 and (out is array or library.is_contiguous(out)):
        if out is not array and not library.is_contiguous(array):
            copy_into(library, array, out)
            array = out
        return (yield from all_reduce_flat(link, library, array, out, work, codec))
    yield from all_reduce_flat(link, library, array, array, work, codec)
    add_up(library, [array], out, beta)
    return out


def sum_gathered(library: NumpyLibrary, arrays: Array, out: Array, node_map: NodeMap, beta: complex = 0) -> None:
    """out = beta out + the sum of the rows of `arrays`, of which row r is rank r's array, flat. The order is that of
    the sums in the schedules of `reduce_scatter_into` and `all_reduce_flat`. `out` is of two dims."""
    per_node, elements, dtype = node_map.per_node if node_map.sums else 1, arrays.shape[1], library.dtype(arrays)
    for ranks in (arrays.shape[0],) if per_node == 1 else (per_node, arrays.shape[0] // per_node):
        for radix in stages(ranks):
            block, ranks = ranks, ranks // radix
            groups = arrays.shape[0] // radix
            parts = arrays.reshape(arrays.shape[0] // block, radix, ranks, elements)
            if groups == 1:
                sum_in_order(library, [parts[0, number, 0].reshape(*out.shape) for number in range(radix)], out, beta)
                return
            arrays = library.empty((groups, elements), accumulator(dtype))
            sum_in_order(library, [parts[:, number].reshape(groups, elements) for number in range(radix)], arrays)


def all_to_all_into(link: Link, library: NumpyLibrary, array: Array, out: Array, sent: Counts, received: Counts,
                    dims: tuple[int, int] = (0, 0), work: Slab | None = None, codec: Codec | None = None
                    ) -> Collective[Array]:
    """Send part r of `array` along dims[0] to rank r; part r of `out` along dims[1] comes from rank r. Work:
    `executor.work_bytes`."""
    schedule = all_to_all(tuple(sent), tuple(received), link.rank)
    return (yield from run_schedule(link, library, schedule, array, out, dims=dims, work=work, codec=codec))


def all_gather_work(shape: Sequence[int], dtype: str, counts: Counts, rank: int, dim: int, node_map: NodeMap = FLAT,
                    codec: Codec | None = None) -> int:
    """Bytes of the work memory of `all_gather_into` into an array of that shape."""
    if dim == 0 and codec is None:
        return 0
    other = prod(shape[1:]) if dim == 0 else shape[0]
    schedule = gather_schedule(counts, rank, other * itemsize(dtype), node_map)
    step = other if dim == 0 else _rounds(shape, dtype)[0].stop
    return planned_bytes(schedule, dtype, (step, step), (True, True), True, codec)


def reduce_scatter_work(library: NumpyLibrary, whole: Array, counts: Counts, rank: int, dim: int,
                        node_map: NodeMap = FLAT, codec: Codec | None = None) -> int:
    """Bytes of the work memory of `reduce_scatter_into`."""
    dtype = library.dtype(whole)
    schedule = reduce_schedule(counts, rank, dtype, node_map)
    other = prod(whole.shape[1:]) if dim == 0 else _rounds(tuple(whole.shape), dtype)[0].stop
    gaps = dim == 1 or not library.is_contiguous(whole)
    return planned_bytes(schedule, dtype, (other, other), (gaps, gaps), dim == 1, codec)


def all_reduce_work(shape: Sequence[int], dtype: str, ranks: int, rank: int, node_map: NodeMap = FLAT,
                    codec: Codec | None = None) -> int:
    """Bytes of the work memory of `all_reduce_into`."""
    schedule = sum_schedule(prod(shape), dtype, ranks, rank, node_map, codec is not None)
    return planned_bytes(schedule, dtype, (1, 1), codec=codec)


def work_slab(link: Link, library: NumpyLibrary, work: Slab | None, nbytes: Callable[[], int],
              borrowed: ExitStack) -> Slab:
    """Return `work`, or memory of nbytes() from the workspace, which `borrowed` gives back, if `work` is None."""
    return work if work is not None else borrowed.enter_context(link.workspace.slab(nbytes(), library))


def in_two_dims(array: Array) -> Array:
    """The array with its dims after the first taken together."""
    return array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))


def _rounds(shape: Sequence[int], dtype: str) -> list[slice]:
    """Return the rows whose columns are packed at once, which bounds the packed copies. The first slice is longest."""
    step = max(1, ROUND_BYTES // max(1, shape[1] * itemsize(dtype)))
    return [slice(start, min(start + step, shape[0])) for start in range(0, max(1, shape[0]), step)]


def sum_coalesced(link: Link, library: NumpyLibrary, arrays: Sequence[Array], counts: Sequence[Counts] | None,
                  sent: str | None = None, outs: Sequence[Array] | None = None, beta: complex = 0
                  ) -> Collective[None]:
    """Sum several arrays of one type, without gaps, over the ranks, in place, in one message for each peer.

    counts   for each array, the elements of every rank's part: then only this rank's part of each is summed
    sent     type of the messages and of their rounded sums; default: the arrays' type
    outs     with counts: out = beta out + this rank's part, in place of the part of the array
    """
    held = library.dtype(arrays[0])
    packs = len(arrays) > 1 or sent not in (None, held)
    if not packs and counts is None:
        yield from all_reduce_flat(link, library, arrays[0], arrays[0])
        return
    flats = [array.reshape(-1) for array in arrays]
    with ExitStack() as borrowed:

        def work(size: int) -> Array:
            return borrowed.enter_context(link.workspace.borrow((size,), sent or held, library))

        packed = work(sum(flat.shape[0] for flat in flats)) if packs else flats[0]
        if counts is None:
            for part, flat in _beside(packed, flats):
                copy_into(library, flat, part)
            own, wanted = packed, flats
            yield from all_reduce_flat(link, library, packed, packed)
        else:
            sizes, starts = [sum(each) for each in zip(*counts)], [offsets(each) for each in counts]
            wanted = [flat[start[link.rank] : start[link.rank + 1]] for flat, start in zip(flats, starts)]
            wanted = wanted if outs is None else [out.reshape(-1) for out in outs]
            if packs:
                _pack_by_rank(packed, flats, counts)
            own = work(sizes[link.rank])
            yield from reduce_scatter_into(link, library, packed, own, sizes)
        for part, flat in _beside(own, wanted):
            if beta == 0:
                copy_into(library, part, flat)
            else:
                sum_in_order(library, [part.reshape(1, -1)], flat.reshape(1, -1), beta)


def _pack_by_rank(packed: Array, flats: Sequence[Array], counts: Sequence[Counts]) -> None:
    """All parts of rank 0, then those of rank 1, and so on. Ranks whose parts are alike are copied at once: parts of a
    dim have two sizes, so that there are not more groups of them than arrays and one."""
    alike = [len(list(ranks)) for _, ranks in groupby(zip(*counts))]
    first, position, read = 0, 0, [0] * len(flats)
    for ranks in alike:
        parts = [each[first] for each in counts]
        block = packed[position : position + ranks * sum(parts)].reshape(ranks, sum(parts))
        for index, (flat, part, column) in enumerate(zip(flats, parts, offsets(parts))):
            block[:, column : column + part] = flat[read[index] : read[index] + ranks * part].reshape(ranks, part)
            read[index] += ranks * part
        first, position = first + ranks, position + ranks * sum(parts)


def _beside(packed: Array, arrays: Iterable[Array]) -> Iterator[tuple[Array, Array]]:
    """The flat arrays, each with where it is in `packed`, in which they are one after the other."""
    start = 0
    for array in arrays:
        yield packed[start : start + array.shape[0]], array
        start += array.shape[0]
