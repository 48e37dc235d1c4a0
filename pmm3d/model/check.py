"""The check of schedules without MPI: the tables of all ranks of a group are executed on symbols.

A row of IN is an `Element`. A sum is the tuple of its parts, in their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any, NamedTuple

from ..errors import Pmm3dError
from .rounds import IN, NOTHING, OUT, Round, Schedule, Span, Sum, is_wide

Memory = MutableSequence[Any]
"""Symbols of the rows of a buffer: elements, tuples of a sum's parts, or None if nothing was written."""


class Element(NamedTuple):
    """Row `row` of the IN of a rank."""

    rank: int
    row: int


def check(schedules: Sequence[Schedule], buffers: Sequence[tuple[Memory, Memory]] | None = None) -> list[Memory]:
    """Check the schedules of all ranks of a group, and return what OUT contains on each rank at the end.

    - Each message has a partner with as many rows of the same type, and the group ends. A round ends when its messages
      have been received, as with messages too large for MPI's own buffers.
    - During the messages of a round no row is written twice, and no row is written that is sent or copied.
    - Only rows that were written are read. Work buffers share memory as planned.
    - Each row of OUT is received at most once, and is written at the end.
    - No element is added twice. Ranks that hold a sum of the same elements have added them in the same order.

    Parameters
    ----------
    buffers : sequence, optional
        (IN, OUT) of each rank: lists of symbols, with None for rows to be written. Ranks may share a list, and OUT may
        be IN. Default: elements in as much of IN as the tables read, and an OUT of as many rows as they write.

    Raises
    ------
    Pmm3dError
        If a check fails. The text names the rank, the round and the span.

    Examples
    --------
    >>> from pmm3d.model.check import check
    >>> from pmm3d.model.schedule import all_gather, reduce_scatter
    >>> check([all_gather((2, 1), rank) for rank in range(2)])[1]
    [Element(rank=0, row=0), Element(rank=0, row=1), Element(rank=1, row=0)]
    >>> check([reduce_scatter((1, 1), rank) for rank in range(2)])
    [[(Element(rank=0, row=0), Element(rank=1, row=0))], [(Element(rank=0, row=1), Element(rank=1, row=1))]]
    >>> check([all_gather((2, 1), 0), all_gather((2, 2), 1)])
    Traceback (most recent call last):
    pmm3d.errors.Pmm3dError: schedule of rank 0, round 0: Span(buffer=1, start=2, stop=3) gets 2 rows from rank 1
    """
    if buffers is None:
        buffers = [_default_buffers(rank, schedule) for rank, schedule in enumerate(schedules)]
    ranks = [_Rank(rank, schedule, *buffers[rank]) for rank, schedule in enumerate(schedules)]
    posted = defaultdict[tuple[int, int], tuple[deque[_Message], deque[_Message]]](lambda: (deque(), deque()))
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        for message in rank.next_round():
            rank.pending += 1
            sender, receiver = (rank, ranks[message.peer])[:: 1 if message.sent else -1]
            sends, receives = posted[sender.number, receiver.number]
            (sends if message.sent else receives).append(message)
            if sends and receives:
                receiver.receive(receives.popleft(), sends.popleft())
                for each in (sender, receiver):
                    each.pending -= 1
                    if not each.pending and each is not rank:
                        ready.append(each)
        if not rank.pending and not rank.ended:
            ready.append(rank)
    for message in (message for queues in posted.values() for queue in queues for message in queue):
        raise message.error(f"its message {'to' if message.sent else 'from'} rank {message.peer} has no partner")
    _check_results(ranks)
    return [rank.out for rank in ranks]


class _Message(NamedTuple):
    """A message that a rank has posted. `values` are the symbols of a sent one."""

    rank: _Rank
    round: int
    sent: bool
    peer: int
    span: Span
    values: list[Any]

    def error(self, problem: str) -> Pmm3dError:
        return _error(self.rank.number, self.round, self.span, problem)


class _Rank:
    """The buffers of one rank, and the state of its execution. Work buffers share memory as planned, so a value that is
    overwritten too early changes the result."""

    def __init__(self, number: int, schedule: Schedule, given: Memory, out: Memory):
        self.number, self.schedule, self.given, self.out = number, schedule, given, out
        self.work: Memory = [None] * schedule.work_rows
        self.round, self.pending, self.received = -1, 0, set[int]()

    @property
    def ended(self) -> bool:
        return self.round == len(self.schedule.rounds)

    def next_round(self) -> list[_Message]:
        """Add the sums of the current round, and return the messages of the next one, whose copies are made."""
        if self.round >= 0:
            for each in self.schedule.rounds[self.round].sums:
                self.add(each)
        self.round += 1
        if self.ended:
            return []
        current = self.schedule.rounds[self.round]
        self.check_hazards(current)
        sends = [_Message(self, self.round, True, peer, span, self.read(span)) for peer, span in current.sends]
        receives = [_Message(self, self.round, False, peer, span, []) for peer, span in current.receives]
        for each in current.copies:
            self.add(each)
        return [message for message in sends + receives if message.span.buffer == NOTHING or message.span.rows]

    def places(self, span: Span) -> tuple[Memory, range]:
        """Return the memory that contains a span, and the numbers of its rows there."""
        if span.buffer in (NOTHING, IN, OUT):
            memory, rows = {NOTHING: [], IN: self.given, OUT: self.out}[span.buffer], range(span.start, span.stop)
        else:
            start, size, wide, _ = self.schedule.work[span.buffer - 2]
            step = 2 if wide else 1
            memory, rows = self.work, range(start + step * span.start, start + step * span.stop, step)
            if span.stop > size or (wide and start % 2):
                raise self.error(span, "is not inside of its work buffer, or the buffer is not aligned")
        if rows and not 0 <= rows[0] <= rows[-1] < len(memory):
            raise self.error(span, f"is outside of a buffer of {len(memory)} rows")
        return memory, rows

    def elements(self, span: Span) -> set[tuple[int, int]]:
        """Return the memory that a span occupies, as (identity of the memory, row)."""
        memory, rows = self.places(span)
        return {(id(memory), row + more) for row in rows for more in range(rows.step)}

    def read(self, span: Span) -> list[Any]:
        memory, rows = self.places(span)
        values = [memory[row] for row in rows]
        if None in values:
            raise self.error(span, "is read before it is written")
        return values

    def write(self, span: Span, values: Sequence[Any]) -> None:
        memory, rows = self.places(span)
        if len(values) != len(rows):
            raise self.error(span, f"gets {len(values)} rows")
        for row, value in zip(rows, values):
            memory[row : row + rows.step] = [value] * rows.step

    def add(self, total: Sum) -> None:
        parts, target = [self.read(part) for part in total.parts], self.elements(total.target)
        for part in total.parts[2:]:
            if target & self.elements(part):
                raise self.error(total.target, f"is the target of a sum whose part {part} it overlaps")
        values = parts[0] if len(parts) == 1 else list(zip(*parts))
        for value in values:
            found = list(_elements_of(value))
            if len(set(found)) < len(found):
                raise self.error(total.target, "adds an element twice")
        self.write(total.target, values)

    def receive(self, own: _Message, other: _Message) -> None:
        wide, others = is_wide(self.schedule.work, own.span), is_wide(other.rank.schedule.work, other.span)
        if wide != others or own.span.rows != other.span.rows:
            raise own.error(f"gets {other.span.rows}{' wide' * others} rows from rank {other.rank.number}")
        if own.span.buffer == OUT:
            rows = {*range(own.span.start, own.span.stop)}
            if rows & self.received:
                raise own.error("has been received before")
            self.received |= rows
        self.write(own.span, other.values)

    def check_hazards(self, current: Round) -> None:
        read = set[tuple[int, int]]()
        for span in (*(span for _, span in current.sends), *(part for copy in current.copies for part in copy.parts)):
            read |= self.elements(span)
        for span in (*(span for _, span in current.receives), *(copy.target for copy in current.copies)):
            written = self.elements(span)
            if written & read:
                raise self.error(span, "is written while it is sent, copied or written")
            read |= written

    def error(self, span: Span, problem: str) -> Pmm3dError:
        return _error(self.number, self.round, span, problem)


def _elements_of(value: Any) -> Iterator[Element]:
    """Return the elements of a symbol, in the order in which they are added."""
    if isinstance(value, Element):
        yield value
    else:
        for part in value:
            yield from _elements_of(part)


def _check_results(ranks: Sequence[_Rank]) -> None:
    checked, sums = set[int](), dict[frozenset[Element], Any]()
    for rank in ranks:
        for row, value in enumerate(rank.out):
            span = Span(OUT, row, row + 1)
            if value is None:
                raise rank.error(span, "was never written")
            if id(value) not in checked and sums.setdefault(frozenset(_elements_of(value)), value) != value:
                raise rank.error(span, "has a sum that another rank adds in another order")
            checked.add(id(value))


def _default_buffers(rank: int, schedule: Schedule) -> tuple[Memory, Memory]:
    spans = [
        span
        for each in schedule.rounds
        for spans in (
            [span for _, span in (*each.sends, *each.receives)],
            [span for total in (*each.copies, *each.sums) for span in (*total.parts, total.target)],
        )
        for span in spans
    ]
    sizes = [max((span.stop for span in spans if span.buffer == buffer), default=0) for buffer in (IN, OUT)]
    return [Element(rank, row) for row in range(sizes[0])], [None] * sizes[1]


def _error(rank: int, number: int, span: Span, problem: str) -> Pmm3dError:
    return Pmm3dError(f"schedule of rank {rank}, round {number}: {span} {problem}")
