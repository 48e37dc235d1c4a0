"""The types of schedules: rounds of messages and sums over spans of buffers. Functions count their bytes."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..layout import LOW_PRECISION, aligned

IN, OUT = 0, 1
"""Numbers of the caller's two buffers. Work buffers follow: 2, 3, ..."""
NOTHING = -1
"""Number of the buffer of empty messages, which are also sent."""


class Span(NamedTuple):
    """Rows start:stop of a buffer, or columns start:stop if the executor divides dim 1."""

    buffer: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Sum(NamedTuple):
    """target = parts[0] + parts[1] + ..., in this order. A sum of one part is a copy. The target may be one of the
    first two parts."""

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
    """

    start: int
    rows: int
    wide: bool


class Schedule(NamedTuple):
    """Messages and sums of one rank in a collective.

    rounds      rounds in their order. A sender and its receiver have their messages in the same order
    work        buffers 2, 3, ... Two buffers may share memory if their contents are not needed at the same time
    work_rows   size of the work memory, in rows of the arrays' type
    """

    rounds: tuple[Round, ...]
    work: tuple[WorkBuffer, ...] = ()
    work_rows: int = 0


Encoded = Callable[[Span, bool], int]
"""encoded(span, wide) returns the bytes of the encoded message of a span. `wide`: whether its type is the
accumulator."""


class Volume(NamedTuple):
    """Bytes that a rank receives and sends in a collective, and bytes of its work memory."""

    received: int
    sent: int
    work: int = 0


def accumulator(dtype: str) -> str:
    """Return the type of partial sums: float32 for low precision, else the type itself."""
    return "float32" if dtype in LOW_PRECISION else dtype


def count(
    schedule: Schedule, row_bytes: int, off_node: Container[int] | None = None, encoded: Encoded | None = None
) -> Volume:
    """Return the bytes of a schedule. A row in the arrays' type has `row_bytes` bytes.

    off_node   ranks whose messages are counted. Default: all ranks
    encoded    bytes of a message, if a codec is used. `Volume.work` does not include encoded messages

        >>> from .schedule import reduce_scatter
        >>> count(reduce_scatter((2, 1), 0), 80)
        Volume(received=160, sent=80, work=192)
    """

    def nbytes(messages: Sequence[tuple[int, Span]]) -> int:
        counted = [span for peer, span in messages if off_node is None or peer in off_node]
        if encoded is not None:
            return sum(encoded(span, is_wide(schedule.work, span)) for span in counted)
        return row_bytes * sum(span.rows * (2 if is_wide(schedule.work, span) else 1) for span in counted)

    received = sum(nbytes(each.receives) for each in schedule.rounds)
    sent = sum(nbytes(each.sends) for each in schedule.rounds)
    return Volume(received, sent, aligned(schedule.work_rows * row_bytes))


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


def encoded_bytes(schedule: Schedule, encoded: Encoded) -> int:
    """Return the bytes of encoded messages in the round with most bytes. A span for several ranks is encoded once."""
    return max(
        (
            sum(
                aligned(encoded(span, is_wide(schedule.work, span)))
                for span in (*{span for _, span in each.sends}, *(span for _, span in each.receives))
            )
            for each in schedule.rounds
        ),
        default=0,
    )


def packing_bytes(schedule: Schedule, row_bytes: tuple[int, int], gaps: tuple[bool, bool], columns: bool) -> int:
    """Return the bytes of packed messages in the round with most bytes.

    `row_bytes` are the bytes of a row of IN and of OUT, and `gaps` whether their spans are packed. `columns` is whether
    spans of work buffers are columns, which are packed too.
    """

    def nbytes(span: Span) -> int:
        if span.buffer <= OUT:
            return aligned(span.rows * row_bytes[span.buffer]) if gaps[span.buffer] else 0
        buffer = schedule.work[span.buffer - 2]
        whole = span.rows == buffer.rows
        return aligned(span.rows * row_bytes[IN] * (2 if buffer.wide else 1)) if columns and not whole else 0

    return max(
        (
            sum(map(nbytes, {span for _, span in each.sends})) + sum(nbytes(span) for _, span in each.receives)
            for each in schedule.rounds
        ),
        default=0,
    )
