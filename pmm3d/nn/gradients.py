"""Where gradients go to: their sums over the ranks that hold other rows of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from weakref import WeakKeyDictionary

from ..arrays import Array
from ..arrays.workspace import Ticket
from ..comm import Axis, Grid, Pending
from ..comm.algorithms import reduce_parts, sum_arrays
from ..comm.transport import Collective, Link
from ..errors import Pmm3dError
from ..layout import itemsize, offsets
from ..model.volumes import all_reduce_volume, reduce_volume
from .compute import begin_after
from .overlap import Overlap
from .shard import ParameterShard

Multiply = Callable[[Array, int], None]
"""multiply(out, beta): out = beta out + this rank's part of a gradient."""
IN_FLIGHT = 2
"""Sums of gradients along one axis that are under way at once: more would take memory and speed nothing up, since the
link is busy already."""


class Gradients:
    """Sums gradients over the ranks that hold other rows of the batch: matrices along z as they come, all along data
    in buckets as they fill, vectors at the end of the backward pass.

    How often a parameter is used in a pass, and so when its gradient is complete, is known from the pass before; in
    the first one the sums over data wait for its end.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._expected: WeakKeyDictionary[ParameterShard, int] = WeakKeyDictionary()
        self._unsynced: dict[ParameterShard, None] = {}
        self._flights: dict[str, list[Pending]] = {}
        self._work: dict[str, list[Sequence[int]]] = {}
        self._partials = Partials(grid)
        self.begin(True, Overlap())

    def begin(self, sync: bool, overlap: Overlap) -> None:
        """A backward pass begins; its gradients are summed over data at its end, or in a later pass."""
        self._sync, self._overlap = sync, overlap
        self._uses: Counter[ParameterShard] = Counter()
        self._begun: set[ParameterShard] = set()
        self._under_way: dict[ParameterShard, Pending] = {}
        self._bucket: list[ParameterShard] = []

    def add(self, parameter: ParameterShard, multiply: Multiply) -> None:
        """Add to a gradient: multiply(out, beta) forms this rank's part of the sum, of a weight the whole block."""
        if parameter.is_vector or self._grid.z.size == 1:
            multiply(*parameter.landing())
        else:
            counts = parameter.z_counts()
            partial = self._partials.take(parameter, (sum(counts), parameter.local.shape[1]))
            multiply(partial, 0)
            self._partials.busy(self._scatter(parameter, partial, counts))
        self._used(parameter)

    def _scatter(self, weight: ParameterShard, partial: Array, counts: list[int]) -> Pending:
        if weight in self._under_way:
            self._under_way[weight].wait()
        out, beta = weight.landing()
        axis, library = weight.grid.z, weight.library
        self.note_work("dW", [reduce_volume(counts, axis.index, partial.shape[1], weight.dtype).work])
        collective = lambda link: reduce_parts(link, library, partial, out, counts, beta)
        with weight.grid.ledger.phase("reduce dW"):
            pending = axis.begin("reduce_scatter", collective, library=library)
        self._under_way[weight] = pending
        if not self._overlap.ors:
            pending.wait()
        return pending

    def _used(self, parameter: ParameterShard) -> None:
        if parameter in self._begun:
            raise Pmm3dError(f"{parameter.name or 'a parameter'} was used more often than in the pass before, and its "
                             "gradient was on its way already: a network whose graph changes needs "
                             "Overlap(buckets=False)")
        self._unsynced[parameter] = None
        self._uses[parameter] += 1
        complete = self._expected.get(parameter) == self._uses[parameter]
        if self._sync and self._overlap.buckets and complete and not self._along_z(parameter):
            self._put(parameter)

    def _along_z(self, parameter: ParameterShard) -> bool:
        """Whether its sum over z is still to be begun: vectors, at the end."""
        return parameter.is_vector and parameter.grid.z.size > 1

    def finish(self) -> None:
        """The backward pass is over: sum what is not under way, and wait for all."""
        self._expected.update(self._uses)
        unsynced, self._unsynced = (self._unsynced, {}) if self._sync else ({}, self._unsynced)
        for vectors in _alike(filter(self._along_z, unsynced)):
            self._sum(self._grid.z, vectors, "reduce vectors")
        for parameter in [parameter for parameter in unsynced if parameter not in self._begun]:
            self._put(parameter)
        self._flush()
        for pending in self._under_way.values():
            pending.wait()
        for parameter in unsynced:
            parameter.synced = True
        if self._uses:
            work = [size for noted in self._work.values() for sizes in noted for size in sizes]
            library = next(iter(self._uses)).library
            with self._grid.engine.transport.as_in_collectives(library):
                self._grid.workspace.rehearse(work, library)
        self._work = {}
        self.begin(self._sync, self._overlap)

    def note_work(self, kind: str, sizes: Sequence[int], at_once: int = IN_FLIGHT) -> None:
        """A collective takes work arrays of these bytes, and up to `at_once` of its kind are under way: at the end of
        the pass the most that they can take together is had, so that no later pass must find memory."""
        self._work[kind] = sorted([*self._work.get(kind, []), sizes], key=sum)[-at_once:]

    def _put(self, parameter: ParameterShard) -> None:
        """Into the bucket of what is summed over data together."""
        self._begun.add(parameter)
        if self._grid.data.size == 1:
            return
        if len(_alike([*self._bucket, parameter])) > 1:
            self._flush()
        self._bucket.append(parameter)
        if sum(member.largest(member.layout) for member in self._bucket) >= self._overlap.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._bucket:
            self._sum(self._grid.data, self._bucket, "reduce data")
            self._bucket = []

    def _sum(self, axis: Axis, members: list[ParameterShard], phase: str) -> None:
        """Start the sum of some gradients along an axis, once what they wait for is done."""
        before = list(dict.fromkeys(self._under_way[member] for member in members if member in self._under_way))
        split = members[0].split_over_data and axis.name == "data"
        self.note_work(phase, _work(axis, members, split))
        flight = [other for other in self._flights.get(axis.name, []) if not other.done]
        if len(flight) == IN_FLIGHT:
            flight.pop(0).wait()
        collective = lambda link: reduced(link, members, split)
        with self._grid.ledger.phase(phase):
            pending = begin_after(before, axis, "reduce_scatter" if split else "all_reduce", collective,
                                  members[0].library)
        self._under_way.update(dict.fromkeys(members, pending))
        self._flights[axis.name] = [*flight, pending]
        if not self._overlap.buckets:
            pending.wait()


def _alike(parameters: Iterable[ParameterShard]) -> list[list[ParameterShard]]:
    """The parameters in groups that one message can carry."""
    groups: dict[tuple[object, ...], list[ParameterShard]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.library, parameter.split_over_data), []).append(parameter)
    return list(groups.values())


class Partials:
    """Where weight gradients stand before their sum over z: two arrays, used in turn. One is written to again once
    the sum of what it held is done, so that memory does not depend on how fast messages are."""

    def __init__(self, grid: Grid):
        self._grid, self._turn = grid, 0
        self._tickets: list[Ticket | None] = [None] * IN_FLIGHT
        self._sums: list[Pending | None] = [None] * IN_FLIGHT

    def take(self, weight: ParameterShard, shape: tuple[int, int]) -> Array:
        """An array with arbitrary contents; `busy` says until when it is needed."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        ticket, pending = self._tickets[self._turn], self._sums[self._turn]
        if pending is not None:
            pending.wait()
        nbytes, library = shape[0] * shape[1] * itemsize(weight.dtype), weight.library
        if ticket is None or ticket.pool.memory != library.memory or ticket.flat.shape[0] < nbytes:
            if ticket is not None:
                self._grid.workspace.give(ticket)
            _, ticket = self._grid.workspace.take((nbytes,), "uint8", library)
        self._tickets[self._turn], self._sums[self._turn] = ticket, None
        return library.view(ticket.flat, shape, weight.dtype)

    def busy(self, pending: Pending) -> None:
        """The array that was taken last is needed until this collective is done."""
        self._sums[self._turn] = pending


def reduced(link: Link, members: list[ParameterShard], split: bool) -> Collective[None]:
    """Generator: the members' gradients summed in place, in one message a peer. split: along data, of each gradient
    only the part that this rank is to have."""
    flats, library = [member.gradient.reshape(-1) for member in members], members[0].library
    with ExitStack() as borrowed:

        def work(size: int) -> Array:
            return borrowed.enter_context(link.workspace.borrow((size,), members[0].dtype, library))

        starts = [offsets(member.data_counts()) for member in members] if split else []
        pieces = [_parts(flats, starts, rank) for rank in range(link.size)] if split else [flats]
        packed = flats[0]
        if len(flats) > 1:
            packed = work(sum(flat.shape[0] for flat in flats))
            for part, flat in _beside(packed, chain(*pieces)):
                part[...] = flat
        own, wanted = packed, pieces[link.rank if split else 0]
        if split:
            counts = [sum(piece.shape[0] for piece in theirs) for theirs in pieces]
            own = work(counts[link.rank])
            yield from reduce_parts(link, library, packed[:, None], own[:, None], counts)
        else:
            yield from sum_arrays(link, library, packed, packed)
        for part, flat in _beside(own, wanted) if own is not flats[0] else ():
            flat[...] = part


def _parts(flats: list[Array], starts: list[list[int]], rank: int) -> list[Array]:
    """One rank's part of each array."""
    return [flat[start[rank] : start[rank + 1]] for flat, start in zip(flats, starts)]


def _beside(packed: Array, arrays: Iterable[Array]) -> Iterator[tuple[Array, Array]]:
    """The flat arrays, each with where it is in `packed`, in which they are one after the other."""
    start = 0
    for array in arrays:
        yield packed[start : start + array.shape[0]], array
        start += array.shape[0]


def _work(axis: Axis, members: list[ParameterShard], split: bool) -> list[int]:
    """Bytes of the work arrays of `reduced`."""
    size, dtype = sum(member.gradient.reshape(-1).shape[0] for member in members), members[0].dtype
    packed = [size * itemsize(dtype)] if len(members) > 1 else []
    if not split:
        return [*packed, all_reduce_volume(size, dtype, axis.size, axis.index).work]
    counts = [sum(parts) for parts in zip(*(member.data_counts() for member in members))]
    return [*packed, counts[axis.index] * itemsize(dtype), reduce_volume(counts, axis.index, 1, dtype).work]
