"""The check of schedules without MPI: the tables of all ranks of a group are executed on symbols.

A row of IN is an `Element`. A sum is the tuple of its parts, in their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import Pmm3dError
from ..layout import offsets
from .rounds import NOTHING, Indices, Round, Schedule, Span, Sum

Memory = MutableSequence[Any]
"""Symbols of the rows of a buffer: elements, tuples of a sum's parts, or None if nothing was written. If spans cut both
dims, symbols of its elements, row by row."""


class Element(NamedTuple):
    """Row `row` of the inputs of a rank, counted through all of them. If spans cut both dims, element `row`."""

    rank: int
    row: int


def check(
    schedules: Sequence[Schedule], buffers: Sequence[Sequence[Memory]] | None = None, cols: Sequence[Sequence[int]] = ()
) -> list[Memory]:
    """Check the schedules of all ranks of a group, and return what the last output of each rank contains at the end.

    - Each message has a partner with as many rows of the same type, and the group ends. A round ends when its messages
      have been received, as with messages too large for MPI's own buffers.
    - During the messages of a round no row is written twice, and no row is written that is sent or copied.
    - Only rows that were written are read. Work buffers share memory as planned.
    - Each row of an output is received at most once, and is written at the end.
    - No element is added twice. Ranks that hold a sum of the same elements have added them in the same order.

    Parameters
    ----------
    buffers : sequence, optional
        Inputs and outputs of each rank: lists of symbols, with None for rows to be written. Ranks may share a list, and
        an output may be an input. Default: elements in as many rows of the inputs as the tables read, and outputs of as
        many rows as they write.
    cols : sequence of sequences of int
        Columns of each rank's inputs and outputs, if spans cut both dims. Default: as many as the tables use.

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
    pmm3d.errors.Pmm3dError: schedule of rank 0, round 0: rows 2:3 of buffer 1 gets 2 rows from rank 1
    """
    extents = [_extents(schedule) for schedule in schedules]
    ranks = [
        _Rank(
            number,
            schedule,
            buffers[number] if buffers is not None else _default_buffers(number, schedule, *extents[number]),
            cols[number] if cols else extents[number][1],
        )
        for number, schedule in enumerate(schedules)
    ]
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
    return [rank.given[-1] if rank.given else [] for rank in ranks]


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

    def __init__(self, number: int, schedule: Schedule, given: Sequence[Memory], cols: Sequence[int]):
        self.number, self.schedule, self.given, self.cols = number, schedule, given, cols
        self.work: Memory = [None] * schedule.work_rows
        self.round, self.pending, self.received = -1, 0, set[tuple[int, int]]()

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

    def places(self, span: Span) -> tuple[Memory, list[int], int]:
        """Return the memory that contains a span, the numbers of its symbols there, and the places that each takes."""
        if span.buffer == NOTHING:
            return [], [], 1
        buffer = self.schedule.work_of(span)
        if buffer is None:
            memory, first, width, wide = self.given[span.buffer], 0, self.cols[span.buffer], False
            size = len(memory)
        else:
            first, rows, wide, cols = buffer
            memory, width = self.work, cols or 1
            size = rows * width
            if wide and first % 2:
                raise self.error(span, "is in a buffer that is not aligned")
        cut = span.across or Indices(0, width)
        across = _indices(cut)
        indices = _indices(span)
        if not width == len(across) == 1:
            indices = [row * width + col for row in indices for col in across]
        step = 2 if wide else 1
        places = [first + step * number for number in indices]
        if indices and not (min(indices) >= 0 and max(indices) < size and max(places) + step <= len(memory)):
            raise self.error(span, f"is outside of a buffer of {size // width} rows")
        return memory, places, step

    def elements(self, span: Span) -> set[tuple[int, int]]:
        """Return the memory that a span occupies, as (identity of the memory, place)."""
        memory, places, step = self.places(span)
        return {(id(memory), place + more) for place in places for more in range(step)}

    def read(self, span: Span) -> list[Any]:
        memory, places, _ = self.places(span)
        values = [memory[place] for place in places]
        if None in values:
            raise self.error(span, "is read before it is written")
        return values

    def write(self, span: Span, values: Sequence[Any]) -> None:
        memory, places, step = self.places(span)
        if len(values) != len(places):
            raise self.error(span, f"gets {len(values)} rows")
        for place, value in zip(places, values):
            memory[place : place + step] = [value] * step

    def add(self, total: Sum) -> None:
        parts, target = [self.read(part) for part in total.parts], self.elements(total.target)
        for part in total.parts[2:]:
            if target & self.elements(part):
                raise self.error(total.target, f"is the target of a sum whose part, {_words(part)}, it overlaps")
        if len(set(map(len, parts))) > 1:
            raise self.error(total.target, "is the target of a sum of different numbers of rows")
        values = parts[0] if len(parts) == 1 else list(zip(*parts))
        for value in values:
            elements = list(_elements_of(value))
            if len(set(elements)) < len(elements):
                raise self.error(total.target, "adds an element twice")
        self.write(total.target, values)

    def receive(self, own: _Message, other: _Message) -> None:
        wide, others = (len(each.rank.places(each.span)[1]) and each.rank.places(each.span)[2] for each in (own, other))
        if wide != others or (own.span.buffer != NOTHING and len(self.places(own.span)[1]) != len(other.values)):
            raise own.error(f"gets {len(other.values)}{' wide' * (others == 2)} rows from rank {other.rank.number}")
        if own.span.buffer != NOTHING and self.schedule.work_of(own.span) is None:
            places = self.elements(own.span)
            if places & self.received:
                raise own.error("has been received before")
            self.received |= places
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
        for span, value in (
            (Span(buffer, row, row + 1), value)
            for buffer in range(rank.schedule.inputs, len(rank.given))
            for row, value in enumerate(rank.given[buffer])
        ):
            if value is None:
                raise rank.error(span, "was never written")
            if id(value) not in checked and sums.setdefault(frozenset(_elements_of(value)), value) != value:
                raise rank.error(span, "has a sum that another rank adds in another order")
            checked.add(id(value))


def _indices(cut: Span | Indices) -> Sequence[int]:
    """Return the rows of a span, or the indices across."""
    if cut.times == 1:
        return range(cut.start, cut.stop)
    return [cut.start + block * cut.step + one for block in range(cut.times) for one in range(cut.stop - cut.start)]


def _extents(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Return the numbers of rows and of columns of the caller's buffers that a schedule reads or writes."""
    number = schedule.inputs + schedule.outputs
    rows, cols = [0] * number, [1] * number
    for each in schedule.rounds:
        spans = [span for _, span in (*each.sends, *each.receives)]
        spans += [span for total in (*each.copies, *each.sums) for span in (*total.parts, total.target)]
        for span in spans:
            if 0 <= span.buffer < number and span.rows:
                rows[span.buffer] = max(rows[span.buffer], _indices(span)[-1] + 1)
                if span.across is not None:
                    cols[span.buffer] = max(cols[span.buffer], *(index + 1 for index in _indices(span.across)))
    return rows, cols


def _default_buffers(rank: int, schedule: Schedule, rows: Sequence[int], cols: Sequence[int]) -> list[Memory]:
    edges = offsets([height * width for height, width in zip(rows, cols)])
    buffers: list[Memory] = [[Element(rank, row) for row in range(*cut)] for cut in pairwise(edges)]
    return [*buffers[: schedule.inputs], *([None] * len(buffer) for buffer in buffers[schedule.inputs :])]


def _error(rank: int, number: int, span: Span, problem: str) -> Pmm3dError:
    return Pmm3dError(f"schedule of rank {rank}, round {number}: {_words(span)} {problem}")


def _words(span: Span) -> str:
    blocks = f" and {span.times - 1} more blocks" if span.times > 1 else ""
    return f"rows {span.start}:{span.stop}{blocks} of buffer {span.buffer}"
