"""Where gradients go to: their sums over the ranks that hold other rows of the batch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from ..comm.collectives import reduce_parts, sum_arrays
from ..errors import Pmm3dError
from ..layout import itemsize, offsets
from ..model.volumes import all_reduce_work
from .parts import split_counts, stored_bytes, z_counts

IN_FLIGHT = 2
"""Sums of gradients along one axis that are under way at once: more would take memory and speed nothing up, since the
link is busy already."""


class Gradients:
    """Sums gradients over the ranks that hold other rows of the batch: matrices along z as they come, all along data
    in buckets as they fill, vectors at the end of the backward pass.

    How often a parameter is used in a pass, and so when its gradient is complete, is known from the pass before; in
    the first one the sums over data wait for its end.
    """

    def __init__(self, parallel):
        self._parallel = parallel
        self._expected: WeakKeyDictionary = WeakKeyDictionary()
        self._unsynced: dict = {}
        self._waiting: dict = {}
        self._begun: dict = {}
        self._uses: dict = {}
        self._bucket: list = []
        self._flights: dict[str, list] = {}
        self._work: dict[str, list[tuple]] = {}
        self._sync = True
        self._partials = Partials(parallel.grid)

    def begin(self, sync: bool) -> None:
        self._uses, self._bucket, self._begun, self._sync = {}, [], {}, sync
        self._waiting = {}

    def matrix(self, weight, multiply) -> None:
        """Add a weight's gradient: multiply(out, beta) forms this rank's part of the sum, the whole block."""
        grid = weight.grid
        if grid.z.size == 1:
            multiply(*weight.landing())
        else:
            counts = z_counts(weight)
            partial = self._partials.take(weight, (sum(counts), weight.local.shape[1]))
            multiply(partial, 0)
            self._partials.busy(self._scatter(weight, partial, counts))
        self._used(weight)

    def vector(self, vector, multiply) -> None:
        """Add the gradient of a vector: multiply(out, beta) forms this rank's part of the sum."""
        multiply(*vector.landing())
        self._used(vector)

    def _scatter(self, weight, partial, counts):
        if weight in self._waiting:
            self._waiting[weight].wait()
        out, beta = weight.landing()
        grid, own = weight.grid, _nbytes(weight, out.shape[0] * out.shape[1])
        self.note("dW", [own] * (grid.z.size - 1))
        with grid.ledger.phase("reduce dW"):
            pending = grid.z.reduce_scatter(partial, out=out, counts=counts, beta=beta)
        self._waiting[weight] = pending
        if not self._parallel.overlap.ors:
            pending.wait()
        return pending

    def _limit(self, axis: str, pending) -> None:
        """Wait for the oldest sum along an axis if too many are under way."""
        flight = self._flights.setdefault(axis, [])
        flight[:] = [other for other in flight if not other.done] + [pending]
        if len(flight) > IN_FLIGHT:
            flight[0].wait()

    def _used(self, parameter) -> None:
        if parameter in self._begun:
            raise Pmm3dError(
                f"{parameter.name or 'a parameter'} was used more often than in the pass before, and its gradient was "
                "on its way already: a network whose graph changes needs Overlap(buckets=False)"
            )
        self._unsynced[parameter] = None
        self._uses[parameter] = self._uses.get(parameter, 0) + 1
        complete = self._expected.get(parameter) == self._uses[parameter]
        if self._sync and self._parallel.overlap.buckets and complete and not self._along_z(parameter):
            self._put(parameter)

    def _along_z(self, parameter) -> bool:
        """Whether its sum over z is still to be begun: vectors, at the end."""
        return parameter.is_vector and parameter.grid.z.size > 1

    def finish(self) -> None:
        self._expected.update(self._uses)
        if self._sync:
            for vectors in _alike(filter(self._along_z, self._unsynced)):
                self._sum(self._parallel.grid.z, vectors, "reduce vectors")
            for parameter in [parameter for parameter in self._unsynced if parameter not in self._begun]:
                self._put(parameter)
            self._flush()
        for pending in self._waiting.values():
            pending.wait()
        if self._sync:
            for parameter in self._unsynced:
                parameter.synced = True
            self._unsynced.clear()
        for parameter in list(self._uses)[:1]:
            work = [size for sizes in self._work.values() for size in sum(sizes, ())]
            self._parallel.grid.workspace.rehearse(work, parameter.library)
        self._work = {}
        self.begin(self._sync)

    def note(self, kind: str, sizes, at_once: int = IN_FLIGHT) -> None:
        """A collective takes work arrays of these bytes, and up to `at_once` of its kind are under way."""
        found = sorted([*self._work.get(kind, []), tuple(sizes)], key=sum)
        self._work[kind] = found[-at_once:]

    def _put(self, parameter) -> None:
        self._begun[parameter] = None
        if self._parallel.grid.data.size == 1:
            return
        if len(_alike([*self._bucket, parameter])) > 1:
            self._flush()
        self._bucket.append(parameter)
        if sum(stored_bytes(member) for member in self._bucket) >= self._parallel.overlap.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._bucket:
            self._sum(self._parallel.grid.data, self._bucket, "reduce data")
            self._bucket = []

    def _sum(self, axis, members, phase: str) -> None:
        """Start the sum of some gradients along an axis, once what they wait for is done."""
        before = list(dict.fromkeys(self._waiting[member] for member in members if member in self._waiting))
        split_over_data = members[0].split_over_data and axis.name == "data"
        library, operation = members[0].library, scattered if split_over_data else summed
        members = list(members)
        self.note(phase, (_scattered_work if split_over_data else _summed_work)(axis, members))

        def generator(link):
            if before:
                yield before
                for pending in before:
                    pending.wait()
            yield from operation(link, library, members)

        with self._parallel.grid.ledger.phase(phase):
            pending = axis.begin("reduce_scatter" if split_over_data else "all_reduce", generator)
        for member in members:
            self._waiting[member] = pending
        self._limit(axis.name, pending)
        if not self._parallel.overlap.buckets:
            pending.wait()


def _alike(parameters) -> list[list]:
    """The parameters in groups that one message can carry."""
    groups: dict = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.library, parameter.split_over_data), []).append(parameter)
    return list(groups.values())


class Partials:
    """Where weight gradients stand before their sum over z: two arrays, used in turn. One is written to again once
    the sum of what it held is done, so that memory does not depend on how fast messages are."""

    def __init__(self, grid):
        self._grid, self._turn = grid, 0
        self._slots: list[list[Any]] = [[None, None] for _ in range(IN_FLIGHT)]

    def take(self, weight, shape):
        """An array with arbitrary contents; `busy` says until when it is needed."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        ticket, pending = self._slots[self._turn]
        if pending is not None:
            pending.wait()
        nbytes, memory = _nbytes(weight, shape[0] * shape[1]), weight.library.memory
        if ticket is None or ticket.pool.memory != memory or ticket.flat.shape[0] < nbytes:
            if ticket is not None:
                self._grid.workspace.give(ticket)
            _, ticket = self._grid.workspace.take((nbytes,), "uint8", weight.library)
        self._slots[self._turn] = [ticket, None]
        return weight.library.view(ticket.flat, shape, weight.dtype)

    def busy(self, pending) -> None:
        """The array that was taken last is needed until this collective is done."""
        self._slots[self._turn][1] = pending


def summed(link, library, members):
    """Generator: all-reduce of the members' gradients in place, in one message a peer."""
    flats = [member.gradient.reshape(-1) for member in members]
    if len(flats) == 1:
        yield from sum_arrays(link, library, flats[0], flats[0])
        return
    starts = offsets([flat.shape[0] for flat in flats])
    with link.workspace.borrow((starts[-1],), members[0].dtype, library) as packed:
        for flat, start, stop in zip(flats, starts, starts[1:]):
            packed[start:stop] = flat
        yield from sum_arrays(link, library, packed, packed)
        for flat, start, stop in zip(flats, starts, starts[1:]):
            flat[...] = packed[start:stop]


def scattered(link, library, members):
    """Generator: reduce-scatter of the members' gradients along data; each member's own part is summed in place."""
    flats = [member.gradient.reshape(-1) for member in members]
    starts = [offsets(split_counts(member)) for member in members]
    counts = [sum(start[rank + 1] - start[rank] for start in starts) for rank in range(link.size)]
    with ExitStack() as borrowed:
        work = lambda size: borrowed.enter_context(link.workspace.borrow((size,), members[0].dtype, library))
        packed = flats[0]
        if len(flats) > 1:
            packed = work(sum(counts))
            for rank, place in enumerate(offsets(counts)[:-1]):
                _pack(packed[place:], flats, starts, rank)
        own = work(counts[link.rank])
        yield from reduce_parts(link, library, packed[:, None], own[:, None], counts)
        _unpack(own, flats, starts, link.rank)


def _summed_work(axis, members) -> list[int]:
    """Bytes of the work arrays of `summed`."""
    size = sum(member.gradient.reshape(-1).shape[0] for member in members)
    packed = [_nbytes(members[0], size)] if len(members) > 1 else []
    return packed + all_reduce_work(size, members[0].dtype, axis.size, axis.index)


def _scattered_work(axis, members) -> list[int]:
    """Bytes of the work arrays of `scattered`."""
    sizes = [split_counts(member) for member in members]
    own = _nbytes(members[0], sum(size[axis.index] for size in sizes))
    packed = [_nbytes(members[0], sum(map(sum, sizes)))] if len(members) > 1 else []
    return packed + [own] * axis.size


def _nbytes(parameter, elements: int) -> int:
    return elements * itemsize(parameter.dtype)


def _pack(packed, flats, starts, rank: int) -> None:
    """One rank's parts of several arrays, one after the other."""
    place = 0
    for flat, start in zip(flats, starts):
        part = flat[start[rank] : start[rank + 1]]
        packed[place : place + part.shape[0]] = part
        place += part.shape[0]


def _unpack(packed, flats, starts, rank: int) -> None:
    place = 0
    for flat, start in zip(flats, starts):
        part = flat[start[rank] : start[rank + 1]]
        part[...] = packed[place : place + part.shape[0]]
        place += part.shape[0]
