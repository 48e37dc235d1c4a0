"""The executor of schedules (`pmm3d.model.schedule`): messages and sums of one rank, as a generator that the engine
drives. Arguments are neither checked nor compared with other ranks.

MPI moves bytes and the array library adds. So every element type works, and low precision is summed in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays import Array, NumpyLibrary, Slab, copy_into, sum_in_order
from ..layout import aligned, itemsize
from ..model.rounds import NOTHING, Indices, Round, Schedule, Span, Sum, WorkBuffer, accumulator, count, packing_bytes
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


def under_way(exchange: Collective[None], library: NumpyLibrary, copies: Sequence[Arithmetic]) -> Collective[None]:
    """Generator: run an exchange, and carry out copies when its first messages are posted."""
    requests = next(exchange, None)
    try:
        compute(library, copies)
    except Exception as error:
        attach_active(error, requests or [])
        raise
    if requests is not None:
        yield requests
        yield from exchange


class Arithmetic(NamedTuple):
    """out = beta out + parts[0] + parts[1] + ..., in this order."""

    parts: list[Array]
    out: Array
    beta: complex


class BoundRound(NamedTuple):
    """A round with arrays in place of spans. tokens: whether its messages are empty."""

    sends: list[tuple[int, Array]]
    receives: list[tuple[int, Array]]
    copies: list[Arithmetic]
    sums: list[Arithmetic]
    tokens: bool


class Buffers:
    """The arrays of the buffers of a schedule, and views of their spans.

    arrays   the caller's arrays, 2D;   dims   for each array, the dim along which spans cut
    work     memory of `work_bytes` bytes. Spans cut work buffers along dims[0]
    beta     factor of an output before a sum, or a copy, is added to it
    dtype    type of the work buffers. Default: that of the first array
    """

    def __init__(
        self,
        schedule: Schedule,
        library: NumpyLibrary,
        arrays: Sequence[Array],
        dims: Sequence[int],
        work: Slab | None,
        beta: complex = 0,
        dtype: str = "",
    ):
        self.library, self._schedule, self._beta = library, schedule, beta
        self._arrays, self._dims, self._views = arrays, dims, dict[Span, Array]()
        if schedule.work:
            assert work is not None
            self._dtype = dtype or library.dtype(arrays[0])
            self._cols = 1 if schedule.work[0].cols else arrays[0].shape[1 - dims[0]]
            self._memory = work.array((schedule.work_rows * self._cols,), self._dtype)
        for place, span in schedule.packed:
            if beta == 0 or span.buffer < schedule.inputs:
                block = self.view(span)
                if library.is_contiguous(block):
                    self._views[place] = block

    def view(self, span: Span) -> Array:
        """Return the rows or columns of a span: the same object for equal spans."""
        found = self._views.get(span)
        if found is None:
            buffer = span.buffer - len(self._arrays)
            array, dim = (
                (self._arrays[span.buffer], self._dims[span.buffer])
                if buffer < 0
                else (self._in_work(self._schedule.work[buffer]), self._dims[0] if self._dims else 0)
            )
            if dim == 0 and span.across is None and span.times == 1:
                found = array[span.start : span.stop]
            else:
                found = _cut(self.library, array, span, dim)
            self._views[span] = found
        return found

    def _in_work(self, buffer: WorkBuffer) -> Array:
        """Return the array of a work buffer."""
        first, rows, wide, cols = buffer
        cols, row = cols or self._cols, self._cols
        memory = self._memory[first * row : first * row + rows * cols * (2 if wide else 1)]
        shape = (cols, rows) if self._dims and self._dims[0] == 1 else (rows, cols)
        return self.library.view(memory, shape, accumulator(self._dtype)) if wide else memory.reshape(*shape)

    def bound(self, each: Round) -> BoundRound:
        """Return a round with the arrays of its spans, without copies of a span to its own address."""
        sends, receives, copies, sums = each
        if sends and sends[0][1].buffer == NOTHING:
            nothing: Any = None
            return BoundRound(
                [(peer, nothing) for peer, _ in sends], [(peer, nothing) for peer, _ in receives], [], [], True
            )
        return BoundRound(
            [(peer, self.view(span)) for peer, span in sends],
            [(peer, self.view(span)) for peer, span in receives],
            self._arithmetic(copies) if copies else [],
            self._arithmetic(sums) if sums else [],
            False,
        )

    def _arithmetic(self, sums: Sequence[Sum]) -> list[Arithmetic]:
        library, inputs, found = self.library, self._schedule.inputs, list[Arithmetic]()
        if not library.has_data:
            return found
        for parts, target in sums:
            beta = self._beta if inputs <= target.buffer < len(self._arrays) else 0
            arrays, out = [self.view(part) for part in parts], self.view(target)
            if len(arrays) > 1 or beta != 0 or not (0 in out.shape or same_elements(library, arrays[0], out)):
                found.append(Arithmetic(arrays, out, beta))
        return found


def _cut(library: NumpyLibrary, array: Array, span: Span, dim: int) -> Array:
    """Return the elements of a span, in 2D. If blocks repeat along a dim, a dim for the blocks comes before it."""
    _, start, stop, times, step, across = span
    if across is None:
        if times == 1:
            return array[start:stop] if dim == 0 else array[:, start:stop]
        across = Indices(0, array.shape[1 - dim])
    if times == across.times == 1:
        rows, cols = slice(start, stop), slice(across.start, across.stop)
        return array[rows, cols] if dim == 0 else array[cols, rows]
    array = array if dim == 0 else array.T
    down, right = library.strides(array)
    dims = [(times, step * down), (stop - start, down), (across.times, across.step * right)]
    dims = [dims[number] for number in range(3) if number == 1 or dims[number][0] != 1]
    shape, strides = zip(*dims, (across.stop - across.start, right))
    return library.as_strided(array[start:, across.start :], shape, strides)


def same_elements(library: NumpyLibrary, one: Array, other: Array) -> bool:
    """Return whether two arrays of one shape are the same elements of memory."""
    return one is other or (
        library.address(one) == library.address(other) and library.strides(one) == library.strides(other)
    )


def compute(library: NumpyLibrary, sums: Sequence[Arithmetic]) -> None:
    """Carry out copies or sums."""
    for parts, out, beta in sums:
        if len(parts) == 1 and beta == 0:
            copy_into(library, parts[0], out)
        else:
            sum_in_order(library, parts, out, beta)


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
        yield from run_rounds(
            link, Buffers(schedule, library, (given, out), dims, memory, beta), schedule.rounds, memory
        )
    return out if result is None else result


def run_rounds(link: Link, buffers: Buffers, rounds: Sequence[Round], work: Slab | None = None) -> Collective[None]:
    """Generator: execute rounds of a schedule. work: its rest is memory for packed messages. Default: from the
    workspace."""
    library = buffers.library
    packs = None if work is None or not work.left else work.rest()
    for each in rounds:
        sends, receives, copies, sums, tokens = buffers.bound(each)
        if tokens:
            if not link.dry:
                yield link.tokens([peer for peer, _ in receives], [peer for peer, _ in sends])
        elif sends or receives:
            exchange = link.exchange(library, sends, receives, None if packs is None else packs.again())
            yield from under_way(exchange, library, copies) if copies else exchange
        else:
            compute(library, copies)
        if sums:
            compute(library, sums)


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
    sliced = bool(schedule.work and schedule.work[0].cols)
    work = aligned(schedule.work_rows * (1 if sliced else others[0]) * size)
    if not any(gaps):
        return work
    return work + packing_bytes(schedule, (others[0] * size, others[1] * size), gaps, columns, size)
