"""The values of a schedule: rounds of messages and sums over spans of buffers, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..layout import LOW_PRECISION, aligned

IN, OUT = 0, 1
"""Numbers of the caller's two buffers. Work buffers follow: 2, 3, ..."""
NOTHING = -1
"""Number of the buffer of empty messages. They are sent too."""


class Span(NamedTuple):
    """Rows start:stop of a buffer, or columns start:stop if the executor divides dim 1."""

    buffer: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Sum(NamedTuple):
    """target = parts[0] + parts[1] + ..., in that order; a sum of one part is a copy.

    The target may be one of the first two parts."""

    parts: tuple[Span, ...]
    target: Span


class Round(NamedTuple):
    """Messages that are in flight together, and the arithmetic on them.

    sends, receives   (peer, span)
    copies            done while the messages travel: they read nothing that arrives in this round
    sums              done in their order after the messages have arrived
    """

    sends: tuple[tuple[int, Span], ...] = ()
    receives: tuple[tuple[int, Span], ...] = ()
    copies: tuple[Sum, ...] = ()
    sums: tuple[Sum, ...] = ()


class WorkBuffer(NamedTuple):
    """A piece of the work memory of a schedule.

    start   of the piece, in rows of the arrays' type
    rows    number of rows
    wide    whether its type is the accumulator of a low-precision type: such a row is as long as two others
    """

    start: int
    rows: int
    wide: bool


class Schedule(NamedTuple):
    """Messages and sums of one rank in a collective.

    rounds      rounds in their order. The sender and the receiver have the messages between them in the same order
    work        the buffers 2, 3, ... Two buffers may share memory if their contents are not needed at the same time
    work_rows   size of the work memory, in rows of the arrays' type
    """

    rounds: tuple[Round, ...]
    work: tuple[WorkBuffer, ...] = ()
    work_rows: int = 0


Encoded = Callable[[Span, bool], int]
"""Bytes of the encoded message of a span, given whether it is of the accumulator's type."""


class Volume(NamedTuple):
    """Bytes that a rank receives and sends in a collective, and bytes of its work memory."""

    received: int
    sent: int
    work: int = 0


def accumulator(dtype: str) -> str:
    """The type of partial sums: float32 for low precision, else the type itself."""
    return "float32" if dtype in LOW_PRECISION else dtype


def count(schedule: Schedule, row_bytes: int, off_node: frozenset[int] | None = None,
          encoded: Encoded | None = None) -> Volume:
    """Bytes of a schedule whose rows, in the arrays' type, have this number of bytes.

    off_node   count only messages from and to these ranks
    encoded    bytes of a message, if a codec is used. `Volume.work` is without the encoded messages

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
    """The messages of a round one by one: a send, beside the receive from the rank that is as far along the ring in the
    other direction. All ranks have the same number of messages, in the same order."""
    return [Round((send,) if send else (), (receive,) if receive else ())
            for send, receive in zip_longest(each.sends, each.receives)]


def in_order(first: Round, rows: int) -> list[tuple[int, int]]:
    """(start, stop) of blocks of the rows of IN, in the order in which they are computed if the messages of the first
    round leave one by one: first what each message sends, the remaining rows last.

        >>> from .schedule import reduce_scatter
        >>> in_order(reduce_scatter((2, 2, 1), 1).rounds[0], 5)
        [(4, 5), (0, 2), (2, 4)]
    """
    leaving = [(span.start, span.stop) for _, span in first.sends if span.buffer == IN]
    edges = [0, *(edge for block in sorted(set(leaving)) for edge in block), rows]
    return [*leaving, *((low, high) for low, high in zip(edges[::2], edges[1::2]) if low < high)]


def is_wide(work: Sequence[WorkBuffer], span: Span) -> bool:
    """Whether the span is of a buffer in the accumulator's type. work: of a schedule."""
    return span.buffer > OUT and work[span.buffer - 2].wide


def encoded_bytes(schedule: Schedule, encoded: Encoded) -> int:
    """Bytes of the encoded messages of the round with the most. A span for several ranks is encoded once."""
    return max((sum(aligned(encoded(span, is_wide(schedule.work, span)))
                    for span in (*{span for _, span in each.sends}, *(span for _, span in each.receives)))
                for each in schedule.rounds), default=0)


def packing_bytes(schedule: Schedule, row_bytes: tuple[int, int], gaps: tuple[bool, bool], columns: bool) -> int:
    """Bytes of the copies of messages that are packed, of the round with the most.

    row_bytes   of IN and of OUT;   gaps: whether their spans are packed
    columns     whether spans of work buffers are columns, which are packed too
    """

    def nbytes(span: Span) -> int:
        if span.buffer <= OUT:
            return aligned(span.rows * row_bytes[span.buffer]) if gaps[span.buffer] else 0
        buffer = schedule.work[span.buffer - 2]
        whole = span.rows == buffer.rows
        return aligned(span.rows * row_bytes[IN] * (2 if buffer.wide else 1)) if columns and not whole else 0

    return max((sum(map(nbytes, {span for _, span in each.sends})) + sum(nbytes(span) for _, span in each.receives)
                for each in schedule.rounds), default=0)
