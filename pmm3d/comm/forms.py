"""The collectives of callers that know their shapes, along either dim: `algorithms` on arrays that may have gaps.

Generators; nothing is looked at or compared. What lies apart in memory, as parts along dim 1 do, is packed first and
unpacked at the end, columns in rounds of some rows. Each takes `work`: a Slab of the bytes that the function named with
it says; it is taken from the workspace if left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from math import prod
from typing import Any, Protocol

from ..arrays import Array, NumpyLibrary, Slab, add_up, copy_into
from ..layout import aligned, itemsize, offsets
from ..model.move import ROUND_BYTES
from ..model.spread import FLAT, Spread
from ..model.volumes import all_reduce_volume, reduce_volume
from .algorithms import Counts, gather_parts, reduce_parts, sum_arrays, under_way
from .transport import Collective, Link


class Awaited(Protocol):
    """What a collective may have to wait for: a `Pending`, or what has its `done` and `wait`."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


def following(after: Sequence[Awaited], collective: Callable[[Link], Collective[Any]]
              ) -> Callable[[Link], Collective[Any]]:
    """The collective, once all of `after` are done; it fails with the first of them that failed."""

    def steps(link: Link) -> Collective[Any]:
        yield list(after)
        for awaited in after:
            awaited.wait()
        return (yield from collective(link))

    return steps


def gathered(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts, dim: int = 0,
             work: Slab | None = None) -> Collective[Array]:
    """Every rank's part, one after the other along `dim`, in `out`, which has no gaps. `gather_work`."""
    if dim == 0:
        if not library.is_contiguous(part):
            own = list(blocks(out, counts, 0))[link.rank]
            copy_into(library, part, own)
            part = own
        return (yield from gather_parts(link, library, part, out, counts))
    with ExitStack() as borrowed:
        nbytes = lambda: gather_work(out.shape, library.dtype(out), dim)
        memory = work_slab(link, library, work, nbytes, borrowed).rest()
        for rows in _rounds(out.shape, library.dtype(out)):
            yield from _gathered_columns(link, library, part[rows], out[rows], counts, memory.again())
    return out


def _gathered_columns(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts, work: Slab
                      ) -> Collective[None]:
    packed = work.array((prod(out.shape),), library.dtype(out))
    sizes = [out.shape[0] * count for count in counts]
    places = [flat.reshape(out.shape[0], count) for flat, count in zip(blocks(packed, sizes, 0), counts)]
    copy_into(library, part, places[link.rank])
    yield from gather_parts(link, library, places[link.rank].reshape(-1), packed, sizes)
    for block, place in zip(blocks(out, counts, 1), places):
        copy_into(library, place, block)


def reduced(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts, beta: complex = 0,
            dim: int = 0, work: Slab | None = None) -> Collective[Array]:
    """out = beta out + the sum of this rank's part along `dim` of the ranks' arrays, of one or two dims. Along dim 1
    `out` has no gaps. `reduce_work`."""
    if dim == 0 and library.is_contiguous(whole):
        flat = (whole, out) if whole.ndim == 2 else (whole[:, None], out[:, None])
        yield from reduce_parts(link, library, *flat, counts, beta, work)
        return out
    with ExitStack() as borrowed:
        nbytes = lambda: reduce_work(library, whole, counts, link.rank, dim, link.spread)
        memory = work_slab(link, library, work, nbytes, borrowed).rest()
        if dim == 0:
            packed = memory.array(tuple(whole.shape), library.dtype(whole))
            copy_into(library, whole, packed)
            return (yield from reduced(link, library, packed, out, counts, beta, 0, memory.rest()))
        for rows in _rounds(whole.shape, library.dtype(whole)):
            yield from _reduced_columns(link, library, whole[rows], out[rows], counts, beta, memory.again())
    return out


def _reduced_columns(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts, beta: complex,
                     work: Slab) -> Collective[None]:
    packed = work.array((prod(whole.shape),), library.dtype(whole))
    sizes = [whole.shape[0] * count for count in counts]
    for place, block in zip(blocks(packed, sizes, 0), blocks(whole, counts, 1)):
        copy_into(library, block, place.reshape(tuple(block.shape)))
    yield from reduce_parts(link, library, packed[:, None], out.reshape(-1, 1), sizes, beta, work.rest())


def summed(link: Link, library: NumpyLibrary, array: Array, out: Array, beta: complex = 0, work: Slab | None = None
           ) -> Collective[Array]:
    """out = beta out + the sum of the ranks' arrays. With beta, or where `out` has gaps, the sum is formed in `array`
    first. `all_reduce_volume`."""
    if beta == 0 and (out is array or library.is_contiguous(out)):
        if out is not array and not library.is_contiguous(array):
            copy_into(library, array, out)
            array = out
        return (yield from sum_arrays(link, library, array, out, work))
    yield from sum_arrays(link, library, array, array, work)
    add_up(library, [array], out, beta)
    return out


def exchanged(link: Link, library: NumpyLibrary, pieces: Sequence[Array], landing: Sequence[Array],
              work: Slab | None = None) -> Collective[Sequence[Array]]:
    """pieces[r] to rank r, and in landing[r] what rank r sent. `exchange_work`."""
    with ExitStack() as borrowed:
        memory = work_slab(link, library, work, lambda: exchange_work(library, pieces, landing, link.rank), borrowed)
        leaving, coming = (_without_gaps(library, arrays, link.rank, memory) for arrays in (pieces, landing))
        for piece, packed in zip(pieces, leaving):
            if packed is not piece:
                copy_into(library, piece, packed)

        def keep_own() -> None:
            if library.has_data and 0 not in pieces[link.rank].shape:
                copy_into(library, pieces[link.rank], landing[link.rank])

        exchange = link.exchange_in_windows(library, [(peer, leaving[peer]) for peer in link.peers()],
                                            [(peer, coming[peer]) for peer in link.peers()])
        yield from under_way(exchange, keep_own)
        for place, packed in zip(landing, coming):
            if packed is not place:
                copy_into(library, packed, place)
    return landing


def gather_work(shape: Sequence[int], dtype: str, dim: int) -> int:
    """Bytes of the work memory of `gathered` into an array of that shape."""
    return 0 if dim == 0 else aligned(_rounds(shape, dtype)[0].stop * shape[1] * itemsize(dtype))


def reduce_work(library: NumpyLibrary, whole: Array, counts: Counts, rank: int, dim: int,
                spread: Spread = FLAT) -> int:
    """Bytes of the work memory of `reduced`."""
    shape, dtype = tuple(whole.shape), library.dtype(whole)
    if dim == 0:
        packed = 0 if library.is_contiguous(whole) else aligned(prod(shape) * itemsize(dtype))
        return packed + reduce_volume(counts, rank, prod(shape[1:]), dtype, spread).work
    rows = _rounds(shape, dtype)[0].stop
    sizes = [rows * count for count in counts]
    return aligned(rows * shape[1] * itemsize(dtype)) + reduce_volume(sizes, rank, 1, dtype, spread).work


def sum_work(shape: Sequence[int], dtype: str, ranks: int, rank: int, spread: Spread = FLAT) -> int:
    """Bytes of the work memory of `summed`."""
    return all_reduce_volume(prod(shape), dtype, ranks, rank, spread).work


def exchange_work(library: NumpyLibrary, pieces: Sequence[Array], landing: Sequence[Array], rank: int) -> int:
    """Bytes of the work memory of `exchanged`."""
    return sum(aligned(prod(array.shape) * itemsize(library.dtype(array))) for arrays in (pieces, landing)
               for peer, array in enumerate(arrays) if peer != rank and not library.is_contiguous(array))


def blocks(array: Array, counts: Counts, dim: int) -> Iterator[Array]:
    """The parts of an array along a dim, of so many rows or columns each."""
    starts = offsets(counts)
    return (array[start:stop] if dim == 0 else array[:, start:stop] for start, stop in zip(starts, starts[1:]))


def _rounds(shape: Sequence[int], dtype: str) -> list[slice]:
    """Rows whose columns are packed at once, so that the copies have a bound; the first are the most."""
    step = max(1, ROUND_BYTES // max(1, shape[1] * itemsize(dtype)))
    return [slice(start, min(start + step, shape[0])) for start in range(0, max(1, shape[0]), step)]


def work_slab(link: Link, library: NumpyLibrary, work: Slab | None, nbytes: Callable[[], int],
              borrowed: ExitStack) -> Slab:
    """The work memory that was given, or so much of the workspace's."""
    return work if work is not None else borrowed.enter_context(link.workspace.slab(nbytes(), library))


def _without_gaps(library: NumpyLibrary, arrays: Sequence[Array], rank: int, work: Slab) -> list[Array]:
    """Each array itself if it has no gaps, or is this rank's own; else work memory of its shape."""
    return [array if peer == rank or library.is_contiguous(array)
            else work.array(tuple(array.shape), library.dtype(array)) for peer, array in enumerate(arrays)]


def coalesced(link: Link, library: NumpyLibrary, arrays: Sequence[Array], counts: Sequence[Counts] | None,
              sent: str | None = None) -> Collective[None]:
    """Generator: arrays of one type, without gaps, each the sum of the ranks'. counts: of each, the elements of every
    rank's part; then of each only this rank's part is summed. sent: the type in which they travel, and to which their
    sums are rounded. `coalesced_work`."""
    held = library.dtype(arrays[0])
    packs = len(arrays) > 1 or sent not in (None, held)
    if not packs and counts is None:
        yield from sum_arrays(link, library, arrays[0], arrays[0])
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
            yield from sum_arrays(link, library, packed, packed)
        else:
            sizes, starts = [sum(each) for each in zip(*counts)], [offsets(each) for each in counts]
            wanted = [flat[start[link.rank] : start[link.rank + 1]] for flat, start in zip(flats, starts)]
            if packs:
                _pack_by_rank(packed, flats, counts)
            own = work(sizes[link.rank])
            yield from reduce_parts(link, library, packed[:, None], own[:, None], sizes)
        for part, flat in _beside(own, wanted):
            copy_into(library, part, flat)


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


def coalesced_work(sizes: Sequence[int], counts: Sequence[Counts] | None, dtype: str, ranks: int, rank: int,
                   sent: str | None = None, spread: Spread = FLAT) -> list[int]:
    """Bytes of the work arrays of `coalesced`, of arrays of so many elements.

        >>> coalesced_work([10, 6], None, "float64", 1, 0)
        [128, 0]
    """
    sent = sent or dtype
    packed = [sum(sizes) * itemsize(sent)] if len(sizes) > 1 or sent != dtype else []
    if counts is None:
        return [*packed, all_reduce_volume(sum(sizes), sent, ranks, rank, spread).work]
    parts = [sum(each) for each in zip(*counts)]
    return [*packed, parts[rank] * itemsize(sent), reduce_volume(parts, rank, 1, sent, spread).work]


def _beside(packed: Array, arrays: Iterable[Array]) -> Iterator[tuple[Array, Array]]:
    """The flat arrays, each with where it is in `packed`, in which they are one after the other."""
    start = 0
    for array in arrays:
        yield packed[start : start + array.shape[0]], array
        start += array.shape[0]
