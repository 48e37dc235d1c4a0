"""The sum of several arrays in one message a peer: packed one after the other, summed, and unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain

from ..arrays import Array, NumpyLibrary
from ..layout import itemsize, offsets
from ..model.volumes import all_reduce_volume, reduce_volume
from .algorithms import Counts, reduce_parts, sum_arrays
from .transport import Collective, Link


def summed_in_place(link: Link, library: NumpyLibrary, arrays: Sequence[Array], counts: Sequence[Counts] | None
                    ) -> Collective[None]:
    """Generator: arrays of one type, without gaps, each the sum of the ranks'. counts: of each, the elements of every
    rank's part; then of each only this rank's part is summed. `coalesced_work`."""
    flats, dtype = [array.reshape(-1) for array in arrays], library.dtype(arrays[0])
    with ExitStack() as borrowed:

        def work(size: int) -> Array:
            return borrowed.enter_context(link.workspace.borrow((size,), dtype, library))

        pieces = [flats]
        if counts is not None:
            starts = [offsets(each) for each in counts]
            pieces = [[flat[start[rank] : start[rank + 1]] for flat, start in zip(flats, starts)]
                      for rank in range(link.size)]
        packed = flats[0]
        if len(flats) > 1:
            packed = work(sum(flat.shape[0] for flat in flats))
            for part, flat in _beside(packed, chain(*pieces)):
                part[...] = flat
        if counts is None:
            own, wanted = packed, flats
            yield from sum_arrays(link, library, packed, packed)
        else:
            sizes = [sum(each) for each in zip(*counts)]
            own, wanted = work(sizes[link.rank]), pieces[link.rank]
            yield from reduce_parts(link, library, packed[:, None], own[:, None], sizes)
        for part, flat in _beside(own, wanted) if own is not flats[0] else ():
            flat[...] = part


def coalesced_work(sizes: Sequence[int], counts: Sequence[Counts] | None, dtype: str, ranks: int, rank: int
                   ) -> list[int]:
    """Bytes of the work arrays of `summed_in_place`, of arrays of so many elements.

        >>> coalesced_work([10, 6], None, "float64", 1, 0)
        [128, 0]
    """
    packed = [sum(sizes) * itemsize(dtype)] if len(sizes) > 1 else []
    if counts is None:
        return [*packed, all_reduce_volume(sum(sizes), dtype, ranks, rank).work]
    parts = [sum(each) for each in zip(*counts)]
    return [*packed, parts[rank] * itemsize(dtype), reduce_volume(parts, rank, 1, dtype).work]


def _beside(packed: Array, arrays: Iterable[Array]) -> Iterator[tuple[Array, Array]]:
    """The flat arrays, each with where it is in `packed`, in which they are one after the other."""
    start = 0
    for array in arrays:
        yield packed[start : start + array.shape[0]], array
        start += array.shape[0]
