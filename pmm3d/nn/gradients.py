"""The gradients of parameters: one record each, and when the sums over the ranks that hold other rows of the batch are
begun and awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import add as plus
from typing import Protocol

from ..arrays import Array, by_rows, library_of
from ..arrays.workspace import Ticket
from ..comm import Axis, Grid, Pending, coalesced_work
from ..errors import Pmm3dError
from ..layout import FIRST, Layout, itemsize, offsets
from ..layout.layout import layout_of
from ..model.schedule import reduce_volume
from ..product.relayout import relayout
from .compute import Form
from .contract import EVERYTHING, Gradient, Part, Product, landing, natural
from .overlap import Overlap
from .precision import Precision

IN_FLIGHT = 2
"""Sums of gradients along one axis that are under way at once: more would take memory and speed nothing up, since the
link is busy already."""


class State(Enum):
    """Of a parameter's gradient.

    EMPTY     there is none; its memory may be there
    OPEN      this rank's part: the sums over other ranks are still to be begun
    SUMMING   they are under way
    SUMMED    it is whole: the same on all ranks that hold the same part
    BROKEN    a backward pass ended with an error: it is to be forgotten
    """

    EMPTY = "empty"
    OPEN = "open"
    SUMMING = "summing"
    SUMMED = "summed"
    BROKEN = "broken"


@dataclass(eq=False)
class Accumulated:
    """A parameter's gradient, kept from step to step.

    of        the form of the parameter, and of the parts that rules return;   precision   its types
    form      the same of the gradient's type;   message   of that in which parts are sent
    array     shaped like the parameter's shard;   state   how far it is
    sums      axes over which the ranks' arrays are still to be added
    split     whether, once summed, each rank along data holds its own part only (ZeRO-1)
    wants_split   whether the optimizer that was made last for the parameter needs that part only
    pending   the last collective that writes to the array
    to_come   how often the backward pass under way will still add to it
    waiting   queues of `defer_weights` that hold parts of it
    scales    with which the losses were multiplied that it comes from
    """

    of: Form
    precision: Precision
    array: Array = None
    state: State = State.EMPTY
    sums: tuple[str, ...] = ()
    split: bool = False
    pending: Pending | None = None
    to_come: int = 0
    wants_split: bool = False
    waiting: set[object] = field(default_factory=set)
    scales: set[float] = field(default_factory=set)

    @cached_property
    def form(self) -> Form:
        return self.of.typed(self.precision.gradient)

    @cached_property
    def message(self) -> Form:
        return self.of.typed(self.precision.communication)

    @property
    def layout(self) -> Layout:
        """That the array, or the part of it that counts, is in."""
        rows, cols = self.form.layout.rows, self.form.layout.cols
        return self.split_layout if self.split else layout_of(rows, cols, self.sums, self.form.layout.units)

    @cached_property
    def split_layout(self) -> Layout:
        """If the data axis splits it too: the rows of a matrix, the columns of a vector."""
        rows, cols, units = self.form.layout.rows, self.form.layout.cols, self.form.layout.units
        if self.form.is_vector:
            return Layout(rows, (*cols, "data"), units=units)
        return Layout((*rows, "data"), cols, units=units)

    @cached_property
    def data_counts(self) -> list[int]:
        """Elements of the shard in each part that the data axis splits it into, one after the other."""
        dim, form = int(self.form.is_vector), self.form
        width = 1 if dim else form.local_shape[1]
        split = form.like(form.shape, self.split_layout)
        return [part * width for part in split.counts("data", dim)]

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest rank's array."""
        return self.form.layout.box(self.form.shape, self.form.grid.shape, FIRST).size * itemsize(self.form.dtype)

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def landing(self, sums: tuple[str, ...]) -> tuple[Array, int, bool]:
        """(array, beta, adds): where another part of the gradient goes that is to be summed over those axes, the array
        times beta that it is added to, and whether this rank adds it: of what is whole along an axis over which the
        rest is still to be summed the first rank counts alone."""
        grid = self.form.grid
        if self.state is State.EMPTY:
            if self.array is None:
                with grid.ledger.holding("gradients"):
                    self.array = self.form.library.empty(self.form.local_shape, self.form.dtype)
            beta, self.sums, self.state, self.split = 0, sums, State.OPEN, False
        else:
            self._open([axis for axis in sums if self.state is not State.OPEN or axis not in self.sums])
            beta = 1
        return self.array, beta, all(grid.axis(axis).index == 0 for axis in self.sums if axis not in sums)

    def _open(self, more: Sequence[str]) -> None:
        """To be summed over more axes too, along which it is whole: of the ranks there one keeps it, the others begin
        from zero."""
        if self.state is State.OPEN and not more:
            return
        self.wait()
        if self.state is not State.OPEN:
            self.sums, self.state = (), State.OPEN
        flat, grid = self.array.reshape(-1), self.form.grid
        start, stop = 0, flat.shape[0]
        if self.split:
            more, self.sums, self.split = [axis for axis in more if axis != "data"], ("data",), False
            start, stop = offsets(self.data_counts)[grid.data.index :][:2]
        if any(grid.axis(axis).index for axis in more):
            start = stop = 0
        flat[:start] = 0
        flat[stop:] = 0
        self.sums = tuple(axis for axis in grid.shape.names if axis in (*self.sums, *more))


class Leaf(Protocol):
    """A tensor that no operation made: a backward pass ends in it.

    accumulated   the gradient of a parameter; None for another tensor
    written       numbers of which one changes when the values are written (`Tensor.written`)
    """

    name: str
    shape: tuple[int, int]

    @property
    def written(self) -> tuple[object, ...]: ...

    @property
    def accumulated(self) -> Accumulated | None: ...

    def receive(self, part: Part) -> None: ...


class Gradients:
    """Brings every part of a gradient to its parameter: sums that scatter it along an axis (weights: z) as it comes,
    those over data in buckets as they fill, others at the end of the backward pass."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._flights: dict[str, list[Pending]] = {}
        self._work: dict[str, list[Sequence[int]]] = {}
        self._in_turn: list[tuple[str, Sequence[int]]] = []
        self._partials = Partials(grid)
        self._open: dict[Accumulated, None] = {}
        self.begin(True, Overlap(), Counter(), None)

    def begin(self, sync: bool, overlap: Overlap, uses: Counter[Accumulated],
              agreed: Callable[[], None] | None) -> None:
        """A backward pass begins, which brings so many parts to each gradient; they are summed in it or in a later
        one. agreed: called before the first collective of the pass, whoever begins that; raises if the ranks do not
        sum the same."""
        self._sync, self._overlap, self._grid.engine.before_next = sync, overlap, agreed
        self._bucket: list[Accumulated] = []
        self._bucket_bytes = 0
        self._expected = list(uses)
        for record, times in uses.items():
            record.to_come = times

    def add(self, record: Accumulated, part: Part) -> None:
        """Add a part to a parameter's gradient."""
        if record.state is State.BROKEN:
            raise Pmm3dError("backward: an earlier backward pass ended with an error and left gradients that are not "
                             "whole: forget them first (optimizer.zero_grad())")
        found = natural(record.of, part)
        landed, kind, axis = landing(found.layout, record.form.layout, self._grid.shape)
        if record in self._bucket:
            self._flush()
        out, beta, adds = record.landing(landed.sums)
        self._open[record] = None
        if kind == "stay" and adds:
            record.wait()
            _fill(found, out, beta)
        elif kind == "reduce_scatter" and adds:
            self._scatter(record, found, self._grid.axis(axis), out, beta)
        else:
            self._bring(record, found, landed, beta, adds)
        record.to_come -= 1
        if self._sync and self._overlap.buckets and record.to_come == 0 and set(record.sums) <= {"data"}:
            self._put(record)

    def _scatter(self, record: Accumulated, part: Gradient | Product, axis: Axis, out: Array, beta: int) -> None:
        cols, counts = out.shape[1], record.form.counts(axis.name)
        partial = self._partials.take(record.message, (sum(counts), cols))
        _fill(part, partial, 0)
        record.wait()
        self.note_work("dW", [reduce_volume(counts, axis.index, cols, record.message.dtype, axis.node_map).work])
        with self._grid.ledger.phase("reduce dW"):
            record.pending = axis.reduce_scatter_into(partial, out, counts, beta)
        self._partials.busy(record.pending)
        if not self._overlap.ors:
            record.pending.wait()

    def _bring(self, record: Accumulated, part: Gradient | Product, landed: Layout, beta: int, adds: bool) -> None:
        """By way of an array of its own: what takes more than one step, or is not added on this rank."""
        form = record.message
        array = None if isinstance(part, Product) else part.array
        if array is None or form.dtype != record.of.dtype:
            array = form.new(part.shape if isinstance(part, Product) else tuple(part.array.shape))
            _fill(part, array, 0)
        with self._grid.ledger.phase("relayout"):
            moved = relayout(self._grid, array, form.shape, part.layout, landed).wait()
        record.wait()
        if adds:
            _fill(Gradient(moved, landed), record.array, beta)

    def finish(self) -> None:
        """The backward pass is over: sum what is not under way, and wait for all."""
        self._grid.engine.prepare_next()
        used = list(self._open)
        summed = used if self._sync else []
        for name in self._grid.shape.names:
            if name != "data":
                waiting = [record for record in summed if record.state is State.OPEN and name in record.sums]
                for group in _alike(waiting):
                    self._sum(self._grid.axis(name), group, "reduce vectors")
                    for record in group:
                        record.sums = tuple(axis for axis in record.sums if axis != name)
        for record in summed:
            if record.state is State.OPEN:
                self._put(record)
        self._flush()
        for record in used:
            record.wait()
            if record.state is State.SUMMING:
                record.state, record.sums = State.SUMMED, ()
        self._rehearse(used)
        if self._sync:
            self._open = {}
        self.begin(self._sync, self._overlap, Counter(), None)

    def forget(self, record: Accumulated) -> None:
        """There is no gradient any more."""
        record.state = State.EMPTY
        record.waiting.clear()
        record.scales.clear()
        self._open.pop(record, None)

    def abandon(self) -> None:
        """The backward pass ended with an error: what it has begun is of no use, nor what it was to be added to."""
        for record in (*self._expected, *self._open):
            record.state, record.pending = State.BROKEN, None
        self._open, self._work, self._in_turn = {}, {}, []
        self.begin(self._sync, self._overlap, Counter(), None)

    def _rehearse(self, used: list[Accumulated]) -> None:
        """Have what is noted, and what each two sums take that follow each other: the second is begun before the first
        is done, or after, as messages go."""
        if used:
            work = [size for noted in self._work.values() for sizes in noted for size in sizes]
            library = used[0].form.library
            with self._grid.engine.transport.as_in_collectives(library):
                self._grid.workspace.rehearse(work, library)
                for (axis, sizes), (after, others) in pairwise(self._in_turn):
                    if axis == after:
                        self._grid.workspace.rehearse([*sizes, *others], library)
        self._work, self._in_turn = {}, []

    def note_work(self, kind: str, sizes: Sequence[int], at_once: int = IN_FLIGHT) -> None:
        """A collective takes work arrays of these bytes, and up to `at_once` of its kind are under way: at the end of
        the pass the most that they can take together is had, so that no later pass must find memory."""
        self._work[kind] = sorted([*self._work.get(kind, []), sizes], key=sum)[-at_once:]

    def _put(self, record: Accumulated) -> None:
        """Into the bucket of what is summed over data together."""
        record.state = State.SUMMING
        if "data" not in record.sums:
            return
        record.split = record.wants_split
        if self._bucket and _kind(self._bucket[0]) != _kind(record):
            self._flush()
        self._bucket.append(record)
        self._bucket_bytes += record.largest
        if self._bucket_bytes >= self._overlap.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._bucket:
            self._sum(self._grid.data, self._bucket, "reduce data")
            self._bucket, self._bucket_bytes = [], 0

    def _sum(self, axis: Axis, members: list[Accumulated], phase: str) -> None:
        """Start the sum of some gradients along an axis, once what they wait for is done."""
        before = list(dict.fromkeys(member.pending for member in members if member.pending is not None))
        arrays = [member.array for member in members]
        counts = [member.data_counts for member in members] if members[0].split else None
        sizes = [prod(member.form.local_shape) for member in members]
        held = members[0].form.dtype
        sent = members[0].message.dtype if axis is self._grid.data else held
        work = coalesced_work(sizes, counts, held, axis.size, axis.index, sent, axis.node_map)
        self.note_work(phase, work)
        self._in_turn.append((axis.name, work))
        flight = [other for other in self._flights.get(axis.name, []) if not other.done]
        if len(flight) == IN_FLIGHT:
            flight.pop(0).wait()
        with self._grid.ledger.phase(phase):
            pending = axis.sum_coalesced(arrays, counts, sent, after=before)
        for member in members:
            member.pending = pending
        self._flights[axis.name] = [*flight, pending]
        if not self._overlap.buckets:
            pending.wait()


def _fill(part: Gradient | Product, out: Array, beta: int) -> None:
    """out = beta out + part."""
    if isinstance(part, Product):
        part.fill(out, beta, EVERYTHING)
    elif beta:
        by_rows(library_of(out), plus, out, out, part.array, name="add")
    else:
        by_rows(library_of(out), lambda new: new, out, part.array, name="copy")


def _alike(records: Iterable[Accumulated]) -> list[list[Accumulated]]:
    """The gradients in groups that one message can carry."""
    groups: dict[tuple[object, ...], list[Accumulated]] = {}
    for record in records:
        groups.setdefault(_kind(record), []).append(record)
    return list(groups.values())


def _kind(record: Accumulated) -> tuple[object, ...]:
    return record.form.dtype, record.message.dtype, record.form.library, record.split


class Partials:
    """Where weight gradients stand before their sum over z: two arrays, used in turn. One is written to again once
    the sum of what it held is done, so that memory does not depend on how fast messages are."""

    def __init__(self, grid: Grid):
        self._grid, self._turn = grid, 0
        self._tickets: list[Ticket | None] = [None] * IN_FLIGHT
        self._sums: list[Pending | None] = [None] * IN_FLIGHT

    def take(self, form: Form, shape: tuple[int, int]) -> Array:
        """An array with arbitrary contents; `busy` says until when it is needed."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        ticket, pending = self._tickets[self._turn], self._sums[self._turn]
        if pending is not None:
            pending.wait()
        nbytes, library = shape[0] * shape[1] * itemsize(form.dtype), form.library
        if ticket is None or ticket.pool.memory != library.memory or ticket.flat.shape[0] < nbytes:
            if ticket is not None:
                self._grid.workspace.give(ticket)
            _, ticket = self._grid.workspace.take((nbytes,), "uint8", library)
        self._tickets[self._turn], self._sums[self._turn] = ticket, None
        return library.view(ticket.flat, shape, form.dtype)

    def busy(self, pending: Pending) -> None:
        """The array that was taken last is needed until this collective is done."""
        self._sums[self._turn] = pending
