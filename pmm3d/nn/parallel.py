"""Where weights come from and gradients go to: gathers along z, sums along z and data, their overlap with computing.

All under way belongs to one grid: `Tape.of(grid).parallel`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from .. import collectives
from ..arrays import itemsize
from ..errors import Pmm3dError
from ..layout import GridShape, Layout, offsets, part_range, part_sizes
from ..machine import available_memory

PANELS_ACROSS_HOSTS = 8
LEAST_PANEL_BYTES = 2**19
IN_FLIGHT = 2
"""Sums of gradients along one axis that are under way at once: more would take memory and speed nothing up, since the
link is busy already."""
FIRST = GridShape(0, 0, 0, 0)
"""The rank that has the largest block of everything: what it decides by sizes, all ranks decide."""


@dataclass(frozen=True)
class Overlap:
    """Which collectives run under computation. No choice changes a result by a bit.

    oar       the all-reduces of a layer's output and of its input's gradient: under the GEMMs of the same product's
              further rows, and the latter under the GEMM of the weight gradient
    ors       the reduce-scatters of weight gradients (z) under the rest of the backward pass
    oag       the gather (z) of the weight that is needed next under the GEMM of the one before
    buckets   the sums of gradients over the data axis under the rest of the backward pass

    panels                  rows of those products are cut into so many panels, each reduced as it is there; None: 1 on
                            one node, 4 across nodes. Panels have a MiB at least
    bucket_bytes            gradients are summed over data once this much has come together
    reshard_after_forward   True: gathered weights are dropped after the forward pass and gathered again for the
                            backward pass; False: kept until they change; None: kept while they take no more than
                            `keep_bytes`
    keep_bytes              None: a quarter of the memory that is free, shared by the ranks of the node
    """

    oar: bool = True
    ors: bool = True
    oag: bool = True
    buckets: bool = True
    panels: int | None = None
    bucket_bytes: int = 2**24
    reshard_after_forward: bool | None = None
    keep_bytes: int | None = None

    @classmethod
    def none(cls, **others) -> Overlap:
        return cls(oar=False, ors=False, oag=False, buckets=False, **others)


class Parallel:
    """The collectives of one grid's networks.

    overlap     an Overlap; may be replaced between steps, by all ranks
    weights     gathers them;   gradients   sums them
    """

    def __init__(self, grid):
        self.grid = grid
        self.overlap = Overlap()
        self.weights = Weights(self)
        self.gradients = Gradients(self)

    @contextmanager
    def backward(self, sync: bool):
        """A backward pass; at its end all gradients are there."""
        memory = self.grid.ledger.memory
        memory["recompute saves"] = 0
        with self.grid.ledger.phase("backward"):
            self.gradients.begin(sync)
            yield
            self.gradients.finish()
        self.weights.pause()
        memory["activations, most"] = self.grid.workspace.most_lent


    def row_panels(self, rows: int, cols: int, dtype: str) -> list[slice]:
        """The panels that a product of this local shape is reduced in."""
        panels = self.overlap.panels or (1 if self.grid.hosts == 1 else PANELS_ACROSS_HOSTS)
        panels = max(1, min(panels, rows * cols * itemsize(dtype) // LEAST_PANEL_BYTES))
        return [slice(*part_range(rows, panels, index)) for index in range(panels)]


class Weights:
    """Brings the shards of a weight together along z, one weight ahead: which one comes next is known from the time
    before."""

    def __init__(self, parallel: Parallel):
        self._parallel = parallel
        self._coming: WeakKeyDictionary = WeakKeyDictionary()
        self._kept: WeakKeyDictionary = WeakKeyDictionary()
        self._after: WeakKeyDictionary = WeakKeyDictionary()
        self._last = None
        self._budget: int | None = None

    def take(self, weight, phase: str):
        """The block of the weight that this rank multiplies by: rows over its first axis, columns over its last.

        Each rank receives (Gz-1)/Gz of it, unless it was kept.
        """
        if weight.grid.z.size == 1:
            return weight.local
        self._learn(weight, phase)
        full = self._known(self._kept, weight)
        if full is None:
            pending = self._known(self._coming, weight) or self._start(weight)
            self._coming.pop(weight, None)
            full = pending.wait()
            if self._keeps(weight):
                self._kept[weight] = weight.version, full
        if self._parallel.overlap.oag:
            self._prefetch(weight, phase)
        return full

    def pause(self) -> None:
        """What comes next is not known: the values may change before it."""
        self._last = None

    def _learn(self, weight, phase: str) -> None:
        if self._last is not None and self._last[0]() is not None:
            self._after.setdefault(self._last[0](), {})[self._last[1]] = ref(weight)
        self._last = ref(weight), phase

    def _prefetch(self, weight, phase: str) -> None:
        following = self._after.get(weight, {}).get(phase, lambda: None)()
        if following is None or following is weight:
            return
        if self._known(self._kept, following) is None and self._known(self._coming, following) is None:
            self._coming[following] = following.version, self._start(following)

    @staticmethod
    def _known(where, weight):
        """What is there for the weight's present values; what is out of date is dropped."""
        version, found = where.get(weight, (None, None))
        if version != weight.version:
            where.pop(weight, None)
            return None
        return found

    def _start(self, weight):
        grid, counts = weight.grid, z_counts(weight)
        full = grid.workspace.array((sum(counts), weight.local.shape[1]), weight.dtype, weight.library)
        with grid.ledger.phase("gather W"):
            return grid.z.all_gather(weight.local, out=full, counts=counts)

    def _keeps(self, weight) -> bool:
        overlap = self._parallel.overlap
        if overlap.reshard_after_forward is not None:
            return not overlap.reshard_after_forward
        if overlap.keep_bytes is not None:
            self._budget = overlap.keep_bytes
        elif self._budget is None:
            self._budget = self._agreed_budget()
        kept = sum(_gathered_bytes(other) for other in self._kept if other is not weight)
        return kept + _gathered_bytes(weight) <= self._budget

    def _agreed_budget(self) -> int:
        grid = self._parallel.grid
        ranks_of_a_node = -(-grid.size // grid.hosts)
        return min(grid.comm.allgather(available_memory() // 4 // ranks_of_a_node))


class Gradients:
    """Sums gradients over the ranks that hold other rows of the batch: matrices along z as they come, all along data
    in buckets as they fill, vectors at the end of the backward pass.

    How often a parameter is used in a pass, and so when its gradient is complete, is known from the pass before; in
    the first one the sums over data wait for its end.
    """

    def __init__(self, parallel: Parallel):
        self._parallel = parallel
        self._expected: WeakKeyDictionary = WeakKeyDictionary()
        self._unsynced: dict = {}
        self._waiting: dict = {}
        self._begun: dict = {}
        self._uses: dict = {}
        self._bucket: list = []
        self._flights: dict[str, list] = {}
        self._sync = True

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
            partial = grid.workspace.array((sum(counts), weight.local.shape[1]), weight.dtype, weight.library)
            multiply(partial, 0)
            self._scatter(weight, partial, counts)
        self._used(weight)

    def vector(self, vector, multiply) -> None:
        """Add the gradient of a vector: multiply(out, beta) forms this rank's part of the sum."""
        multiply(*vector.landing())
        self._used(vector)

    def _scatter(self, weight, partial, counts) -> None:
        if weight in self._waiting:
            self._waiting[weight].wait()
        out, beta = weight.landing()
        with weight.grid.ledger.phase("reduce dW"):
            pending = weight.grid.z.reduce_scatter(partial, out=out, counts=counts, beta=beta)
        self._waiting[weight] = pending
        self._limit("z", pending)
        if not self._parallel.overlap.ors:
            pending.wait()

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
            vectors = [parameter for parameter in self._unsynced if self._along_z(parameter)]
            if vectors:
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
        self.begin(self._sync)

    def _put(self, parameter) -> None:
        self._begun[parameter] = None
        if self._parallel.grid.data.size == 1:
            return
        first = self._bucket[0] if self._bucket else parameter
        if (first.dtype, first.sharded, first.library) != (parameter.dtype, parameter.sharded, parameter.library):
            self._flush()
        self._bucket.append(parameter)
        if sum(_stored_bytes(member) for member in self._bucket) >= self._parallel.overlap.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._bucket:
            self._sum(self._parallel.grid.data, self._bucket, "reduce data")
            self._bucket = []

    def _sum(self, axis, members, phase: str) -> None:
        """Start the sum of some gradients along an axis, once what they wait for is done."""
        before = list(dict.fromkeys(self._waiting[member] for member in members if member in self._waiting))
        sharded = members[0].sharded and axis.name == "data"
        library, operation = members[0].library, scattered if sharded else summed
        members = list(members)

        def generator(link):
            if before:
                yield before
                for pending in before:
                    pending.wait()
            yield from operation(link, library, members)

        with self._parallel.grid.ledger.phase(phase):
            pending = axis.begin("reduce_scatter" if sharded else "all_reduce", generator)
        for member in members:
            self._waiting[member] = pending
        self._limit(axis.name, pending)
        if not self._parallel.overlap.buckets:
            pending.wait()


def summed(link, library, members):
    """Generator: all-reduce of the members' gradients in place, in one message a peer."""
    flats = [member.gradient.reshape(-1) for member in members]
    if len(flats) == 1:
        yield from collectives.all_reduce(link, library, flats[0], flats[0], agreed=True)
        return
    starts = offsets([flat.shape[0] for flat in flats])
    with link.workspace.borrow((starts[-1],), members[0].dtype, library) as packed:
        for flat, start, stop in zip(flats, starts, starts[1:]):
            packed[start:stop] = flat
        yield from collectives.all_reduce(link, library, packed, packed, agreed=True)
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
        yield from collectives.reduce_scatter(link, library, packed, own, counts)
        _unpack(own, flats, starts, link.rank)


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


def gathered(weight) -> Layout:
    """The layout of a weight once its shards along z are together."""
    return Layout(weight.layout.rows[:-1], weight.layout.cols)


def z_counts(weight) -> list[int]:
    """Rows of a weight's gathered block that each rank along z holds."""
    grid = weight.grid
    return part_sizes(gathered(weight).block(weight.shape, grid.shape, grid.coords).shape[0], grid.z.size)


def split_counts(parameter) -> list[int]:
    """Elements of a parameter's local block in each part that the data axis splits it into, one after the other."""
    rows, cols = parameter.value.local.shape
    size = parameter.grid.data.size
    if parameter.is_vector:
        return part_sizes(cols, size)
    return [part * cols for part in part_sizes(rows, size)]


def _gathered_bytes(weight) -> int:
    return gathered(weight).block(weight.shape, weight.grid.shape, FIRST).size * itemsize(weight.dtype)


def _stored_bytes(parameter) -> int:
    return parameter.layout.block(parameter.shape, parameter.grid.shape, FIRST).size * itemsize(parameter.dtype)
