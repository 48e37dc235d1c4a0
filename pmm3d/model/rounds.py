"""The types of schedules: rounds of messages and sums over spans of buffers. Functions count their bytes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..layout import LOW_PRECISION, aligned

IN, OUT = 0, 1
"""Numbers of the caller's two buffers in most schedules. Work buffers follow: 2, 3, ..."""
NOTHING = -1
"""Number of the buffer of empty messages, which are also sent."""


class Indices(NamedTuple):
    """`times` blocks of indices, one every `step` indices. The first block is start:stop.

    >>> Indices(1, 3, times=2, step=5).size
    4
    """

    start: int
    stop: int
    times: int = 1
    step: int = 0

    @property
    def size(self) -> int:
        return (self.stop - self.start) * self.times


class Strides(NamedTuple):
    """The blocks of rows of a span: `times` blocks, one every `step` rows, the first included.

    across   indices along the other dim. Default: all
    """

    times: int = 1
    step: int = 0
    across: Indices | None = None


class Span(NamedTuple):
    """Rows of a buffer, or columns if the executor divides dim 1: start:stop, and further blocks of `strides`.

    `strides` is one field, because executors look spans up: most have three numbers to hash.
    """

    buffer: int
    start: int
    stop: int
    strides: Strides | None = None

    @property
    def times(self) -> int:
        return 1 if self.strides is None else self.strides.times

    @property
    def step(self) -> int:
        return 0 if self.strides is None else self.strides.step

    @property
    def across(self) -> Indices | None:
        return None if self.strides is None else self.strides.across

    @property
    def rows(self) -> int:
        return (self.stop - self.start) * self.times


class Sum(NamedTuple):
    """target = parts[0] + parts[1] + ..., in this order. A sum of one part is a copy. The target may be one of the
    first two parts. If the target is one of the caller's outputs, the executor may also multiply it by beta before,
    and a single part by alpha. A sum of no parts is beta times the target."""

    parts: tuple[Span, ...]
    target: Span


class Round(NamedTuple):
    """Messages that are in flight together, and the arithmetic on them.

    sends, receives   (peer, span) of each message
    copies            copies during the messages. They read no data that arrives in this round
    sums              sums, in this order, after the messages have arrived
    """

    sends: tuple[tuple[int, Span], ...] = ()
    receives: tuple[tuple[int, Span], ...] = ()
    copies: tuple[Sum, ...] = ()
    sums: tuple[Sum, ...] = ()


class WorkBuffer(NamedTuple):
    """A piece of the work memory of a schedule.

    start   first row of the piece, in rows of the arrays' type
    rows    number of rows
    wide    whether its type is the accumulator of a low-precision type, whose rows take twice the memory
    cols    number of columns; then `start` and the size of the work memory are in elements. Default: as in the arrays
    """

    start: int
    rows: int
    wide: bool
    cols: int = 0


class Schedule(NamedTuple):
    """Messages and sums of one rank in a collective.

    rounds      rounds in their order. A sender and its receiver have their messages in the same order
    work        buffers that follow those of the caller. Two buffers may share memory if their contents are not needed
                at the same time
    work_rows   size of the work memory, in rows of the arrays' type
    inputs, outputs   numbers of the caller's buffers that are read, and that are written. The latter follow the former
    packed      (span of a work buffer, span of a caller's buffer) of each message that is a copy of one block. If the
                block has no gaps, the message is the block itself
    """

    rounds: tuple[Round, ...]
    work: tuple[WorkBuffer, ...] = ()
    work_rows: int = 0
    inputs: int = 1
    outputs: int = 1
    packed: tuple[tuple[Span, Span], ...] = ()

    def work_of(self, span: Span) -> WorkBuffer | None:
        """Return the work buffer of a span; None for a span of the caller's buffers."""
        number = span.buffer - self.inputs - self.outputs
        return self.work[number] if number >= 0 else None

    def nbytes(self, span: Span, row_bytes: int, element_bytes: int) -> int:
        """Return the bytes of a span of arrays with rows of `row_bytes` bytes."""
        buffer = self.work_of(span)
        cols = span.across.size if span.across is not None else buffer.cols if buffer is not None else 0
        rows = span.rows * (2 if buffer is not None and buffer.wide else 1)
        return rows * (cols * element_bytes if cols or span.across is not None else row_bytes)


class Volume(NamedTuple):
    """Bytes that a rank receives and sends in a collective, and bytes of its work memory."""

    received: int
    sent: int
    work: int = 0


def accumulator(dtype: str) -> str:
    """Return the type of partial sums: float32 for low precision, else the type itself."""
    return "float32" if dtype in LOW_PRECISION else dtype


def count(schedule: Schedule, row_bytes: int, off_node: Container[int] | None = None) -> Volume:
    """Return the bytes of a schedule. A row in the arrays' type has `row_bytes` bytes, and so has an element of a
    schedule of blocks (`across`).

    off_node   ranks whose messages are counted. Default: all ranks

        >>> from .schedule import reduce_scatter
        >>> count(reduce_scatter((2, 1), 0), 80)
        Volume(received=160, sent=80, work=192)
    """
    totals, callers = [0, 0], schedule.inputs + schedule.outputs
    for each in schedule.rounds:
        for side, messages in enumerate((each.receives, each.sends)):
            for peer, span in messages:
                if off_node is None or peer in off_node:
                    buffer, start, stop, strides = span
                    if strides is None and buffer < callers:  # most spans
                        totals[side] += (stop - start) * row_bytes
                    else:
                        totals[side] += schedule.nbytes(span, row_bytes, row_bytes)
    received, sent = totals
    return Volume(received, sent, aligned(schedule.work_rows * row_bytes))


def in_slices(schedule: Schedule, size: int, step: int) -> Schedule:
    """Return a schedule that executes another one for the indices 0:step of the other dim, then for step:2 step, and so
    on up to `size`. Work memory and packed copies are those of one slice.

    >>> from .schedule import all_gather
    >>> [each.receives[0][1].across for each in in_slices(all_gather((1, 1), 0), 5, 3).rounds]
    [Indices(start=0, stop=3, times=1, step=0), Indices(start=3, stop=5, times=1, step=0)]
    """
    if size <= step:
        return schedule

    def cut(each: Round, low: int, high: int) -> Round:
        def within(span: Span) -> Span:
            start = low if schedule.work_of(span) is None else 0
            return span._replace(strides=Strides(across=Indices(start, start + high - low)))

        sends, receives = (tuple((peer, within(span)) for peer, span in side) for side in (each.sends, each.receives))
        copies, sums = (
            tuple(Sum(tuple(map(within, parts)), within(target)) for parts, target in side)
            for side in (each.copies, each.sums)
        )
        return Round(sends, receives, copies, sums)

    rounds = (cut(each, low, min(low + step, size)) for low in range(0, size, step) for each in schedule.rounds)
    work = tuple(buffer._replace(start=buffer.start * step, cols=step) for buffer in schedule.work)
    return Schedule(tuple(rounds), work, schedule.work_rows * step)


def one_by_one(each: Round) -> list[Round]:
    """Return the messages of a round one by one: each send with the receive from the rank at the same distance in the
    other direction of the ring. All ranks have the same number of messages, in the same order."""
    return [
        Round((send,) if send else (), (receive,) if receive else ())
        for send, receive in zip_longest(each.sends, each.receives)
    ]


def in_order(first: Round, rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of blocks of the rows of IN, in the order of their computation if the messages of the first
    round are sent one by one: first the rows of each message, then the remaining rows.

        >>> from .schedule import reduce_scatter
        >>> in_order(reduce_scatter((2, 2, 1), 1).rounds[0], 5)
        [(4, 5), (0, 2), (2, 4)]
    """
    leaving = [(span.start, span.stop) for _, span in first.sends if span.buffer == IN]
    edges = [0, *(edge for block in sorted(set(leaving)) for edge in block), rows]
    return [*leaving, *((low, high) for low, high in zip(edges[::2], edges[1::2]) if low < high)]


def is_wide(work: Sequence[WorkBuffer], span: Span) -> bool:
    """Return whether the span's buffer has the accumulator's type. `work` is that of a schedule."""
    return span.buffer > OUT and work[span.buffer - 2].wide


def packing_bytes(
    schedule: Schedule, row_bytes: tuple[int, int], gaps: tuple[bool, bool], columns: bool, element_bytes: int = 1
) -> int:
    """Return the bytes of packed messages in the round with most bytes.

    `row_bytes` are the bytes of a row of IN and of OUT, and `gaps` whether their spans are packed. `columns` is whether
    spans of work buffers are columns, which are packed too.
    """

    def nbytes(span: Span) -> int:
        buffer = schedule.work_of(span)
        if buffer is None:
            packs, row = gaps[span.buffer], row_bytes[span.buffer]
        else:
            packs, row = columns and span.rows != buffer.rows, row_bytes[IN]
        return aligned(schedule.nbytes(span, row, element_bytes)) if packs else 0

    return max(
        (
            sum(map(nbytes, {span for _, span in each.sends})) + sum(nbytes(span) for _, span in each.receives)
            for each in schedule.rounds
        ),
        default=0,
    )
