"""The executor of schedules (`pmm3d.model.schedule`): messages and sums of one rank, as a generator that the engine
drives. Arguments are neither checked nor compared with other ranks.

`run_schedule` executes a schedule once, and `Persistent` repeatedly.

MPI moves bytes and the array library adds. So every element type works, and low precision is summed in float32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from ..arrays import Array, Factors, NumpyLibrary, Slab, add_scaled, add_up, copy_into, scale, sum_in_order
from ..layout import aligned, itemsize
from ..model.rounds import NOTHING, Indices, Round, Schedule, Span, Sum, WorkBuffer, accumulator, count, packing_bytes
from ..model.schedule import barrier
from .engine import Engine
from .ledger import Record
from .transport import Collective, Link, attach_active, mpi_buffers

Counts = Sequence[int]
"""Number of rows of each rank's part."""


class Awaited(Protocol):
    """An operation for which a collective waits: a `Pending`, or another object with these methods."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any: ...

    def raise_error(self) -> None: ...


def following(
    after: Sequence[Awaited], collective: Callable[[Link], Collective[Any]]
) -> Callable[[Link], Collective[Any]]:
    """Return a collective that begins when all of `after` are done. It raises the error of the first that failed."""

    def steps(link: Link) -> Collective[Any]:
        yield list(after)
        for awaited in after:
            awaited.raise_error()
        return (yield from collective(link))

    return steps


def under_way(exchange: Iterator[list[Any]], work: Callable[[], None]) -> Collective[None]:
    """Generator: run an exchange (`Link.posted`), and call `work` when its first messages are posted."""
    requests = next(exchange, None)
    try:
        work()
    except Exception as error:
        attach_active(error, requests or [])
        raise
    if requests is not None:
        yield requests
        yield from exchange


Arithmetic = tuple[list[Array], Array, Factors]
"""(parts, out, factors): out = beta out + parts[0] + parts[1] + ..., in this order. One part may have an alpha."""
PLAIN = Factors()


class Buffers:
    """The arrays of the buffers of a schedule, and views of their spans.

    arrays     the caller's arrays, 2D;   dims   for each array, the dim along which spans cut
    work       memory of `work_bytes` bytes. Spans cut work buffers along dims[0]
    beta       factor of an output before a sum, or a copy, is added to it
    factors    by the number of an array: Factors of what is written to it. Default: beta, for all outputs
    dtype      type of the work buffers. Default: that of the first array
    recorded   whether a dry run records copies and sums as passes. The prices of most operations contain theirs
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
        recorded: bool = False,
        factors: Mapping[int, Factors] | None = None,
    ):
        self._computes = library.has_data or recorded
        self.library, self._schedule = library, schedule
        self._arrays, self._dims, self._views = arrays, dims, dict[Span, Array]()
        self._factors = (self._of_outputs(beta) if beta else {}) if factors is None else factors
        self._columns = bool(dims) and dims[0] == 1
        if schedule.work:
            assert work is not None
            self._dtype = dtype or library.dtype(arrays[0])
            self._cols = 1 if schedule.work[0].cols else arrays[0].shape[1 - dims[0]]
            self._memory = work.array((schedule.work_rows, self._cols), self._dtype)
        for place, span in schedule.packed:
            if span.buffer not in self._factors:
                block = self.view(span)
                if library.is_contiguous(block):
                    self._views[place] = block

    def view(self, span: Span) -> Array:
        """Return the rows or columns of a span: the same object for equal spans."""
        view = self._views.get(span)
        if view is None:
            buffer, start, stop, strides = span
            if buffer < len(self._arrays):
                array, dim = self._arrays[buffer], self._dims[buffer]
            else:
                first, _, wide, cols = work = self._schedule.work[buffer - len(self._arrays)]
                if wide or cols or self._columns:
                    array, dim = self._in_work(work), int(self._columns)
                else:
                    array, dim, start, stop = self._memory, 0, first + start, first + stop
            plain = dim == 0 and strides is None
            self._views[span] = view = array[start:stop] if plain else _cut(self.library, array, span, dim)
        return view

    def _in_work(self, buffer: WorkBuffer) -> Array:
        """Return the array of a work buffer."""
        first, rows, wide, cols = buffer
        memory = self._memory[first : first + rows * (cols or 1) * (2 if wide else 1)].reshape(-1)
        cols = cols or self._cols
        shape = (cols, rows) if self._columns else (rows, cols)
        return self.library.view(memory, shape, accumulator(self._dtype)) if wide else memory.reshape(*shape)

    def messages(self, messages: Sequence[tuple[int, Span]]) -> list[tuple[int, Array]]:
        return [(peer, self.view(span)) for peer, span in messages]

    def arithmetic(self, sums: Sequence[Sum], copies: bool = False) -> list[Arithmetic]:
        """Return sums with arrays in place of spans. copies: whether copies of a span to its own address are left
        out."""
        library, operations = self.library, list[Arithmetic]()
        for parts, target in sums if self._computes else ():
            arrays, out = [self.view(part) for part in parts], self.view(target)
            if (factors := self._factors.get(target.buffer)) is not None:
                operations.append((arrays, out, factors))
            elif not (arrays[0] is out and len(arrays) == 1) and not (
                copies and same_elements(library, arrays[0], out)
            ):
                operations.append((arrays, out, PLAIN))
        return operations

    def arithmetic_of(self, each: Round) -> tuple[list[Arithmetic], list[Arithmetic]]:
        """Return the copies and the sums of a round."""
        return self.arithmetic(each.copies, True), self.arithmetic(each.sums)

    def scale(self, beta: complex) -> Schedule:
        """Set `beta` for the sums that follow, and return the schedule."""
        if self._schedule.packed:
            raise RuntimeError("messages that are received in an output are not added to it")
        self._factors = self._of_outputs(beta) if beta else {}
        return self._schedule

    def _of_outputs(self, beta: complex) -> dict[int, Factors]:
        return dict.fromkeys(range(self._schedule.inputs, len(self._arrays)), Factors(beta))

    def copy(self, copies: Sequence[Sum]) -> None:
        """Carry out copies, but not those of a span to its own address."""
        compute(self.library, self.arithmetic(copies, True))


def _cut(library: NumpyLibrary, array: Array, span: Span, dim: int) -> Array:
    """Return the elements of a span, in 2D. If blocks repeat along a dim, a dim for the blocks comes before it."""
    _, start, stop, strides = span
    if strides is None:
        return array[start:stop] if dim == 0 else array[:, start:stop]
    times, step, across = strides
    across = across or Indices(0, array.shape[1 - dim])
    if times == across.times == 1:
        rows, cols = slice(start, stop), slice(across.start, across.stop)
        return array[rows, cols] if dim == 0 else array[cols, rows]
    array = array if dim == 0 else array.T
    down, right = library.strides(array)
    shape: tuple[int, ...] = (stop - start, across.stop - across.start)
    steps: tuple[int, ...] = (down, right)
    if across.times > 1:
        shape, steps = (shape[0], across.times, shape[1]), (down, across.step * right, right)
    if times > 1:
        shape, steps = (times, *shape), (step * down, *steps)
    return library.as_strided(array, shape, steps, start * down + across.start * right)


def same_elements(library: NumpyLibrary, one: Array, other: Array) -> bool:
    """Return whether two arrays of one shape are the same elements of memory, or empty."""
    return 0 in one.shape or (
        library.address(one) == library.address(other) and library.strides(one) == library.strides(other)
    )


def compute(library: NumpyLibrary, sums: Sequence[Arithmetic]) -> None:
    """Carry out copies or sums. A sum of no parts scales its target."""
    for parts, out, factors in sums:
        beta, alpha, conjugated = factors
        if not parts:
            scale(library, out, beta)
        elif len(parts) > 1:
            (sum_in_order if library.has_data else add_up)(library, parts, out, beta)
        elif beta == 0 and alpha == 1 and not conjugated:
            copy_into(library, parts[0], out)
        else:
            add_scaled(library, parts[0], out, factors)


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
    """Return a generator that executes a schedule. Its result is `result`, by default `out`.

    given, out   the buffers IN and OUT, 2D. Arrays with gaps are packed for their messages
    beta         OUT = beta OUT + the sum
    dims         the dim of `given`, and of `out`, along which spans cut
    work         memory of `work_bytes` bytes. Default: from the workspace
    """
    result = out if result is None else result
    if work is None and schedule.work:
        return _in_workspace(link, library, schedule, given, out, beta, dims, result)
    return run_rounds(link, Buffers(schedule, library, (given, out), dims, work, beta), schedule.rounds, work, result)


def _in_workspace(
    link: Link,
    library: NumpyLibrary,
    schedule: Schedule,
    given: Array,
    out: Array,
    beta: complex,
    dims: tuple[int, int],
    result: Array,
) -> Collective[Array]:
    """Generator: `run_schedule` with work memory from the workspace."""
    with link.workspace.slab(work_bytes(schedule, library, given, out, dims), library) as work:
        buffers = Buffers(schedule, library, (given, out), dims, work, beta)
        return (yield from run_rounds(link, buffers, schedule.rounds, work, result))


def run_rounds(
    link: Link, buffers: Buffers, rounds: Sequence[Round], work: Slab | None = None, result: Array | None = None
) -> Collective[Any]:
    """Generator: execute rounds of a schedule, and return `result`. work: its rest is memory for packed messages.
    Default: from the workspace."""
    library = buffers.library
    packs = None if work is None or not work.left else work.rest()
    for sends, receives, copies, sums in rounds:
        if sends and sends[0][1].buffer == NOTHING:
            if not link.dry:
                yield link.tokens([peer for peer, _ in receives], [peer for peer, _ in sends])
        elif sends or receives:
            pack = None if packs is None else packs.again()
            exchange = link.posted(library, buffers.messages(sends), buffers.messages(receives), pack)
            yield from under_way(exchange, partial(buffers.copy, copies)) if copies else exchange
        elif copies:
            buffers.copy(copies)
        if sums:
            compute(library, buffers.arithmetic(sums))
    return result


def wait_for_all(link: Link, per_node: int = 0) -> Collective[Any]:
    """Return a generator: barrier of the link's ranks, or of the ranks of this node. After it, each rank sees the data
    that the others wrote before it.

    per_node   number of ranks on each node; 0: one barrier of all ranks of the link"""
    nothing = np.empty((0, 0), np.uint8)
    return run_schedule(link, NumpyLibrary(), barrier(link.size, link.rank, per_node), nothing, nothing)


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


class Persistent:
    """A schedule that is executed repeatedly, with persistent requests of MPI. Its host arrays have fixed addresses and
    no gaps.

    All members must create it, and begin and await it in the same order. next_record() returns the record of one call.

    record   record of the call in progress, or None
    """

    record: Record | None = None
    _round = 0

    def __init__(
        self,
        next_record: Callable[[], Record],
        engine: Engine,
        comm: MPI.Intracomm,
        off_node: Set[int],
        tag: int,
        schedule: Schedule,
        buffers: Buffers,
        row_bytes: int,
    ):
        self._next_record, self._engine, self._comm, self._tag = next_record, engine, comm, tag
        self._library, self._buffers = buffers.library, [buffers]  # the requests hold no arrays
        self._rounds = [
            (self._made(buffers.messages(each.sends), buffers.messages(each.receives)), *buffers.arithmetic_of(each))
            for each in schedule.rounds
        ]
        self._moved = count(schedule, row_bytes)
        self._across = count(schedule, row_bytes, frozenset(off_node)).received

    def _made(self, sends: list[tuple[int, Array]], receives: list[tuple[int, Array]]) -> list[MPI.Prequest]:
        return [
            init(part, peer, self._tag)
            for init, messages in ((self._comm.Recv_init, receives), (self._comm.Send_init, sends))
            for peer, array in messages
            for part in mpi_buffers(self._library, array)
        ]

    def scale(self, beta: complex) -> None:
        """Set the factor of the outputs in the next calls."""
        (buffers,) = self._buffers
        self._rounds = [
            (requests, *buffers.arithmetic_of(each))
            for (requests, *_), each in zip(self._rounds, buffers.scale(beta).rounds)
        ]

    def begin(self) -> Persistent:
        """Start the messages of the first round, as one call of the axis. Returns this object, for `wait`."""
        self._engine.prepare_next()
        self.record = self._next_record()
        self.record.received, self.record.sent, self.record.across = *self._moved[:2], self._across
        self._engine.begun(self.record)
        self._round = 0
        self._post(*self._rounds[0][:2])
        return self

    def _post(self, requests: list[MPI.Prequest], copies: list[Arithmetic]) -> None:
        self._engine.post(self, requests)
        if copies:
            compute(self._library, copies)

    def wait(self) -> None:
        """Wait for the messages of each round and carry out its sums. After an error of a signal handler, another call
        waits for the rest."""
        assert self.record is not None  # `begin` came before
        while True:
            requests, _, sums = self._rounds[self._round]
            self._engine.wait_persistent(requests, self.record)
            if sums:
                compute(self._library, sums)
            if self._round == len(self._rounds) - 1:
                break
            self._round += 1
            self._post(*self._rounds[self._round][:2])
        self._engine.end_persistent(self, self.record)
        self.record = None

    def free(self) -> None:
        """Free the requests. If some are still active, the engine keeps them and their arrays instead. After
        MPI.Finalize() there is nothing to free."""
        requests = [request for each, *_ in self._rounds for request in each]
        if not MPI.Is_finalized() and MPI.Request.Testall(requests):
            self._engine.persistent.pop(self, None)
            for request in requests:
                request.Free()
            self._rounds, self._buffers = [], []
