"""Schedules with a call of the axis for each message: messages overlap with computation (Wang et al., ASPLOS 2023). The
rows of an all-gather are used as they arrive, and the rows of a reduce-scatter are sent as they are computed.

Bytes, messages and the order of sums are those of the schedules, which the executor walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..arrays import Array, Slab, library_of
from ..layout import itemsize, offsets
from ..model.rounds import Round, Schedule, in_order, one_by_one
from ..model.schedule import gather_schedule, reduce_schedule
from .axis import Axis
from .engine import Pending
from .executor import Buffers, Counts, compute, run_rounds
from .transport import Collective, Link


class Piece(NamedTuple):
    """Rows start:stop of a gathered block, and the Pending of the message that contains them."""

    start: int
    stop: int
    pending: Pending


class Arrivals:
    """An all-gather of rows in progress. `gathered` contains rows once `within` has yielded them.

    part   this rank's rows;   counts   number of rows of each rank
    """

    def __init__(self, axis: Axis, part: Array, gathered: Array, counts: Counts):
        self.gathered = gathered
        library, first = library_of(gathered), offsets(counts)[axis.index]
        self._own = first, first + counts[axis.index]
        row_bytes = gathered.shape[1] * itemsize(library.dtype(gathered))
        schedule = gather_schedule(counts, axis.index, row_bytes, axis.node_map)
        buffers, before = Buffers(schedule, library, (part, gathered), (0, 0), None), list[Pending]()
        messages = _Messages(axis, "all_gather", buffers, schedule, row_bytes)
        self._coming = list[Piece]()
        for each in schedule.rounds:  # before the first message, because a later round also sends this rank's rows
            buffers.copy(each.copies)
        for each in schedule.rounds:
            pairs = one_by_one(each)
            begun = [messages.begin([pair], before) for pair in pairs]
            self._coming += [
                Piece(span.start, span.stop, pending)
                for pending, pair in zip(begun, pairs)
                for _, span in pair.receives
            ]
            before = begun

    @classmethod
    def here(cls, gathered: Array) -> Arrivals:
        """Return the Arrivals of a block whose rows are all present."""
        rows = cls.__new__(cls)
        rows.gathered, rows._own, rows._coming = gathered, (0, gathered.shape[0]), []
        return rows

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the pieces of these rows, each after its arrival. This rank's rows come first."""
        low, high = max(start, self._own[0]), min(stop, self._own[1])
        if low < high:
            yield low, high
        for piece in self._coming:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                piece.pending.wait()
                yield low, high

    def wait(self) -> Array:
        """Wait for all rows, and return `gathered`."""
        for piece in self._coming:
            piece.pending.wait()
        return self.gathered


class Departures:
    """A reduce-scatter of rows that are computed block by block. Rows for other ranks are sent as soon as they are
    computed.

    partial   this rank's partial sums of all rows;   counts   number of rows of each rank
    out       this rank's rows of the result: out = beta out + the sum
    work      memory of the schedule's work buffers (`strided_collectives.reduce_scatter_work`)
    blocks    (start, stop) of rows, in the order in which the caller must compute them: first the rows for other
              ranks, one block per message, then the remaining rows. The order of messages is the same on all ranks
    """

    def __init__(self, axis: Axis, partial: Array, counts: Counts, work: Slab, out: Array, beta: complex = 0):
        self.partial, self.out = partial, out
        self._library = library_of(out)
        schedule = reduce_schedule(counts, axis.index, self._library.dtype(partial), axis.node_map)
        self._buffers = Buffers(schedule, self._library, (partial, out), (0, 0), work, beta)
        self._first, *self._rest = schedule.rounds
        row_bytes = partial.shape[1] * itemsize(self._library.dtype(partial))
        self._messages = _Messages(axis, "reduce_scatter", self._buffers, schedule, row_bytes)
        self._leaving = one_by_one(self._first)
        self._done, self._begun, self.blocks = 0, list[Pending](), in_order(self._first, partial.shape[0])
        self._last: Pending | None = None
        self._added = False

    def done(self) -> None:
        """Note that the next of the blocks is computed, and begin its message."""
        if len(self._begun) < len(self._leaving):
            self._begun.append(self._messages.begin([self._leaving[len(self._begun)]]))
        self._done += 1
        if self._rest and self._done == len(self.blocks):
            self._last = self._messages.begin(self._rest, self._begun, self._add)

    def wait(self) -> Array:
        """Wait for all messages, and return the result."""
        if self._last is not None:
            self._last.wait()
        elif not self._added:
            for pending in self._begun:
                pending.wait()
            self._add()
        self._added = True
        return self.out

    def _add(self) -> None:
        """Carry out the sums of the first round."""
        compute(self._library, self._buffers.arithmetic(self._first.sums))


class _Messages:
    """Messages of a schedule, each a separate call on the axis."""

    def __init__(self, axis: Axis, operation: str, buffers: Buffers, schedule: Schedule, row_bytes: int):
        self._axis, self._operation, self._buffers = axis, operation, buffers
        self._schedule, self._row_bytes, self._number = schedule, row_bytes, 0

    def begin(
        self, rounds: Sequence[Round], after: Sequence[Pending] = (), first: Callable[[], None] = lambda: None
    ) -> Pending:
        """Begin rounds as one call, when all of `after` are done and first() is called."""

        def steps(link: Link) -> Collective[None]:
            first()
            yield from run_rounds(link, self._buffers, rounds)

        pending = self._axis.begin(self._operation, steps, library=self._buffers.library, after=after)
        self._number += 1
        pending._message_of(self._schedule, self._row_bytes, self._number)
        return pending
