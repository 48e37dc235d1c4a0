"""The executor of schedules (`pmm3d.model.schedule`): messages and sums of one rank, as a generator that the engine
drives. Arguments are neither checked nor compared with other ranks.

MPI moves bytes and the array library adds. So every element type works, and low precision is summed in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from ..arrays import Array, NumpyLibrary, Slab, copy_into, sum_in_order
from ..layout import aligned, itemsize
from ..model.rounds import IN, NOTHING, OUT, Round, Schedule, Span, Sum, accumulator, count, packing_bytes
from ..model.schedule import barrier
from .transport import Collective, Link, attach_active

Counts = Sequence[int]
"""Number of rows of each rank's part."""


class Awaited(Protocol):
    """An operation for which a collective waits: a `Pending`, or another object with `done` and `wait`."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


def following(
    after: Sequence[Awaited], collective: Callable[[Link], Collective[Any]]
) -> Callable[[Link], Collective[Any]]:
    """Return a collective that begins when all of `after` are done. It raises the error of the first that failed."""

    def steps(link: Link) -> Collective[Any]:
        yield list(after)
        for awaited in after:
            awaited.wait()
        return (yield from collective(link))

    return steps


def under_way(exchange: Collective[None], work: Callable[[], None]) -> Collective[None]:
    """Generator: run an exchange, and call `work` when its first messages are posted."""
    requests = next(exchange, None)
    try:
        work()
    except Exception as error:
        attach_active(error, requests or [])
        raise
    if requests is not None:
        yield requests
        yield from exchange


class Buffers:
    """The arrays of the buffers of a schedule, and views of their spans.

    arrays   the caller's arrays IN and OUT, 2D;   dims   for each array, the dim along which spans cut
    work     memory of `work_bytes` bytes. Spans cut work buffers along dims[0]
    """

    def __init__(
        self, schedule: Schedule, library: NumpyLibrary, arrays: Sequence[Array], dims: Sequence[int], work: Slab | None
    ):
        self.library = library
        self._arrays, self._dims, self._views = arrays, dims, dict[Span, Array]()
        self._work = schedule.work
        if not self._work:
            return
        assert work is not None
        self._other, self._dtype = arrays[0].shape[1 - dims[0]], library.dtype(arrays[0])
        self._memory = work.array((schedule.work_rows, self._other), self._dtype)

    def view(self, span: Span) -> Array:
        """Return the rows or columns of a span: the same object for equal spans."""
        found = self._views.get(span)
        if found is None:
            buffer, start, stop = span
            if buffer > OUT:
                found = self._in_work(*self._work[buffer - 2], start, stop)
            else:
                array = self._arrays[buffer]
                found = array[start:stop] if self._dims[buffer] == 0 else array[:, start:stop]
            self._views[span] = found
        return found

    def _in_work(self, first: int, rows: int, wide: bool, start: int, stop: int) -> Array:
        """Return rows or columns start:stop of a work buffer."""
        by_rows = self._dims[IN] == 0
        if by_rows and not wide:
            return self._memory[first + start : first + stop]
        memory = self._memory[first : first + rows * (2 if wide else 1)].reshape(-1)
        shape = (rows, self._other) if by_rows else (self._other, rows)
        array = self.library.view(memory, shape, accumulator(self._dtype)) if wide else memory.reshape(*shape)
        return array[start:stop] if by_rows else array[:, start:stop]

    def messages(self, messages: Sequence[tuple[int, Span]]) -> list[tuple[int, Array]]:
        return [(peer, self.view(span)) for peer, span in messages]


def run_schedule(
    link: Link,
    library: NumpyLibrary,
    schedule: Schedule,
    given: Array,
    out: Array,
    *,
    beta: complex = 0,
    dims: tuple[int, int] = (0, 0),
    work: Slab | None = None,
    result: Array | None = None,
) -> Collective[Array]:
    """Generator: execute a schedule. Returns `result`, by default `out`.

    given, out   the buffers IN and OUT, 2D. Arrays with gaps are packed for their messages
    beta         OUT = beta OUT + the sum
    dims         the dim of `given`, and of `out`, along which spans cut
    work         memory of `work_bytes` bytes. Default: from the workspace
    """
    borrowed: AbstractContextManager[Slab | None] = nullcontext(work)
    if work is None and schedule.work:
        borrowed = link.workspace.slab(work_bytes(schedule, library, given, out, dims), library)
    with borrowed as memory:
        buffers = Buffers(schedule, library, (given, out), dims, memory)
        packs = None if memory is None or not memory.left else memory.rest()
        for each in schedule.rounds:
            yield from run_round(link, buffers, each, beta, None if packs is None else packs.again())
    return out if result is None else result


def run_round(
    link: Link, buffers: Buffers, each: Round, beta: complex = 0, packs: Slab | None = None
) -> Collective[None]:
    """Generator: execute one round. packs: memory for packed messages. Default: from the workspace."""
    sends, receives, copies, sums = each
    if sends and sends[0][1].buffer == NOTHING:
        if not link.dry:
            yield link.tokens([peer for peer, _ in receives], [peer for peer, _ in sends])
    elif sends or receives:
        exchange = link.exchange(buffers.library, buffers.messages(sends), buffers.messages(receives), packs)
        if copies:
            exchange = under_way(exchange, lambda: make_copies(buffers, copies))
        yield from exchange
    elif copies:
        make_copies(buffers, copies)
    add_sums(buffers, sums, beta)


def add_sums(buffers: Buffers, sums: Sequence[Sum], beta: complex) -> None:
    """Carry out the sums of a round."""
    library, view = buffers.library, buffers.view
    for parts, target in sums:
        sum_in_order(library, [view(part) for part in parts], view(target), beta if target.buffer == OUT else 0)


def wait_for_all(link: Link, per_node: int = 0) -> Collective[None]:
    """Generator: barrier of the link's ranks, or of the ranks of this node. After it, each rank sees the data that the
    others wrote before it.

    per_node   number of ranks on each node; 0: one barrier of all ranks of the link"""
    nothing = np.empty((0, 0), np.uint8)
    yield from run_schedule(link, NumpyLibrary(), barrier(link.size, link.rank, per_node), nothing, nothing)


def count_data(link: Link, schedule: Schedule, row_bytes: int) -> None:
    """Count data that was sent in the message of an agreement, as the bytes that its schedule would move."""
    moved = count(schedule, row_bytes)
    link.record.received += moved.received
    link.record.sent += moved.sent
    if link.off_node:
        link.record.across += count(schedule, row_bytes, frozenset(link.off_node)).received


def work_bytes(
    schedule: Schedule, library: NumpyLibrary, given: Array, out: Array, dims: tuple[int, int] = (0, 0)
) -> int:
    """Return the bytes of work memory of `run_schedule`: for work buffers, and for packed copies of arrays with
    gaps."""
    gaps = dims[0] == 1 or not library.is_contiguous(given), dims[1] == 1 or not library.is_contiguous(out)
    return planned_bytes(
        schedule, library.dtype(given), (given.shape[1 - dims[0]], out.shape[1 - dims[1]]), gaps, dims[0] == 1
    )


def planned_bytes(
    schedule: Schedule,
    dtype: str,
    others: tuple[int, int],
    gaps: tuple[bool, bool] = (False, False),
    columns: bool = False,
) -> int:
    """Return `work_bytes` without arrays.

    others    extents of IN and OUT along the dim that spans do not cut;   gaps   whether IN and OUT are packed
    columns   whether spans of work buffers are columns, which are packed too
    """
    size = itemsize(dtype)
    work = aligned(schedule.work_rows * others[0] * size)
    if not any(gaps):
        return work
    return work + packing_bytes(schedule, (others[0] * size, others[1] * size), gaps, columns)


def make_copies(buffers: Buffers, copies: Sequence[Sum]) -> None:
    """Copy spans. A span that is already at its target address is not copied."""
    for part, place in copied(buffers, copies):
        copy_into(buffers.library, part, place)


def copied(buffers: Buffers, copies: Sequence[Sum]) -> list[tuple[Array, Array]]:
    """Return (source, target) arrays of each copy, without empty copies and copies of a span to its own address."""
    library, pairs = buffers.library, [(buffers.view(source), buffers.view(target)) for (source,), target in copies]
    return [
        (part, place)
        for part, place in pairs
        if library.has_data and 0 not in place.shape and library.address(place) != library.address(part)
    ]
