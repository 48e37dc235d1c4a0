"""Gathers of weight shards, one weight ahead. Gathered blocks are kept up to a memory budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

from ..arrays import Array, Workspace
from ..arrays.codecs import Codec
from ..comm import Axis, Collective, Grid, Link, Pending, gathered_encoded, run_schedule, wait_for_all
from ..errors import GridError, LayoutError
from ..layout import is_folded, itemsize, offsets, part_sizes
from ..model.machine import available_memory
from ..model.schedule import shared_all_gather
from .compute import TensorSpec
from .overlap import Overlap

if TYPE_CHECKING:
    from .parallel import BackwardSync

IDLE_PAUSES = 8
"""Number of `Weights.pause` calls after which an unused weight is assumed to belong to a discarded network."""
SHARED = "shared weights"
Weight = Any
"""A parameter whose rows are sharded over the minor axis of its rows (z)."""


@dataclass(eq=False)
class Gathered:
    """The gathered block of one version of a weight.

    used        number of pauses at the last use
    context     the `unchanged` context that was active when the block was gathered, or None
    following   phase of the pass -> (weight that was used next in the last such pass, its phase)

    References in `following` are strong, because all ranks must prefetch the same weight, even if one rank has
    discarded it.
    """

    number: int
    used: int = 0
    version: int = -1
    nbytes: int = 0
    pending: Pending | None = None
    copy: NodeSharedBlock | None = None
    block: Array = None
    context: object = None
    following: dict[str, tuple[Weight, str]] = field(default_factory=dict)


class Weights:
    """Gathers weights along the axis over which they are sharded (z).

    When a weight is used, the weight that followed it in the previous pass is prefetched. If another pass of this step
    follows (`more`), the end of a backward pass in `unchanged` prefetches the first weight of the next forward pass.

    With `Compression.weights` of `sync`, shards are encoded in messages. All ranks use the decoded block, so its bits
    agree.

    after      functions that are called at the end of `unchanged`

    `budget` is the number of bytes of gathered weights that a rank keeps if `Overlap.keep_bytes` is None. It is None
    until the ranks have agreed on it. Without a budget, a dry run keeps all weights, because it has no machine.
    """

    def __init__(self, grid: Grid, sync: BackwardSync):
        self._grid, self._sync, self.overlap, self.more = grid, sync, Overlap(), False
        self._is_apart, self.after = False, list[WeakMethod[Callable[[], None]]]()
        self._gathered: WeakKeyDictionary[Weight, Gathered] = WeakKeyDictionary()
        self._cached: dict[int, tuple[int, int]] = {}
        """Number -> (bytes, `pauses` at the last use) of a kept block. An entry remains if the weight is deleted,
        because ranks collect garbage at different times, and must keep the same weights."""
        self._numbers, self.pauses = count(), 0
        self._last: tuple[Gathered, str] | None = None
        self.budget: int | None = None
        self._context: object = None
        self._held: dict[Weight, Array] | None = None
        grid._at_close(self._gathered.clear)

    def gathered(self, weight: Weight, phase: str) -> Array:
        """Return the gathered block of a weight. Collective along its axis, unless the block was kept.

        Each of the G ranks along the axis receives (G-1)/G of the block, or the encoded shards of the other ranks.
        """
        if self._axis(weight).size == 1:
            return weight.shard
        if self._held is not None and weight in self._held:
            return self._held[weight]
        gathered = self._of(weight)
        if self._last is not None:
            before, its_phase = self._last
            before.following[its_phase] = weight, phase
        self._last, gathered.used = (gathered, phase), self.pauses
        self._drop_unusable(gathered, phase)
        block = gathered.block
        if block is None:
            gathered.context = self._context
            pending, gathered.pending = gathered.pending or self._start(weight, gathered), None
            block = pending.wait()
        self._cached.pop(gathered.number, None)
        nbytes = gathered.nbytes if gathered.copy is None else 0
        if gathered.block is not None or gathered.copy is not None or self._fits_cache(nbytes):
            gathered.block = block
            self._cached[gathered.number] = nbytes, self.pauses
        if self._held is not None:
            self._held[weight] = block
        if self.overlap.oag:
            self._prefetch(weight, gathered, phase)
        return block

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context that gathers each weight once, and holds its block to the end, for the passes of several tiles."""
        outer, self._held = self._held, {} if self._held is None else self._held
        try:
            yield
        finally:
            self._held = outer

    def pause(self) -> None:
        """Note the end of a pass. Outside of `unchanged`, drop prefetched gathers and the blocks of unused weights."""
        if self._context is None or not self.more:
            self._last = None
        if self._context is not None:
            return
        self._drop_prefetched()
        self.pauses += 1
        oldest = self.pauses - IDLE_PAUSES
        if self._cached:
            self._cached = {number: entry for number, entry in self._cached.items() if entry[1] >= oldest}
        for gathered in list(self._gathered.values()) if self._gathered else ():
            if gathered.number not in self._cached:
                gathered.block = gathered.copy = None
            for phase, (weight, _) in list(gathered.following.items()):
                if self._gathered[weight].used < oldest:
                    del gathered.following[phase]

    def used_since(self, pauses: int) -> list[Gathered]:
        """Records of the weights that were used since `pauses` had this value."""
        return [each for each in self._gathered.values() if each.used >= pauses]

    def use_again(self, records: Sequence[Gathered]) -> None:
        """Note that a replay used these weights, so that an ordinary step after it prefetches them."""
        for each in records:
            each.used = self.pauses

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which no weight changes. All forward passes in the context can use a kept block."""
        if self._context is not None:
            yield
            return
        self._context = object()
        try:
            yield
        finally:
            self._context = None
            self.pause()
            after, self.after = self.after, []
            for each in after:
                if (known := each()) is not None:
                    known()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of a forward pass that uses no gather of the pass before, and starts none for the next pass."""
        self._drop_prefetched()
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False
            self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        for gathered in self._gathered.values():
            gathered.pending = None

    def blocks(self, weights: Sequence[Weight]) -> list[Array | None] | None:
        """Kept blocks of the weights that forward passes gather, or None for each one that the next pass gathers.

        The result is None if these weights were not gathered yet in this `unchanged` context, so that a pass may keep
        their blocks.
        """
        if not self._gathered:
            return []
        known = [(weight, self._gathered[weight]) for weight in weights if weight in self._gathered]
        if any(gathered.context is not self._context for _, gathered in known):
            return None
        kept = (self._context is not None and each.version == weight.version for weight, each in known)
        return [each.block if is_kept else None for is_kept, (_, each) in zip(kept, known)]

    def _axis(self, weight: Weight) -> Axis:
        return self._grid.axis(weight.spec.layout.rows[-1])

    def _of(self, weight: Weight) -> Gathered:
        """Return the record of a weight. A block of an older version is dropped."""
        if weight not in self._gathered:
            self._gathered[weight] = Gathered(next(self._numbers))
        gathered = self._gathered[weight]
        if gathered.version != weight.version:
            gathered.version, gathered.pending, gathered.block = weight.version, None, None
            gathered.nbytes = weight.spec.largest_without(self._axis(weight).name)
        return gathered

    def _drop_unusable(self, gathered: Gathered, phase: str) -> None:
        """Drop a kept block in a forward pass, unless it was gathered in the same `unchanged` context."""
        if phase == "forward" and (self._context is None or gathered.context is not self._context):
            gathered.block = None

    def _prefetch(self, weight: Weight, gathered: Gathered, phase: str) -> None:
        following, next_phase = gathered.following.get(phase, (weight, phase))
        ahead = self._of(following)
        if next_phase == "forward" and (phase != "forward" or ahead.number <= gathered.number):  # in the next pass
            if self._context is None or self._is_apart or (phase != "forward" and not self.more):
                return
        elif following is weight:
            return
        self._drop_unusable(ahead, next_phase)
        if ahead.block is None and ahead.pending is None:
            ahead.pending = self._start(following, ahead)

    def _start(self, weight: Weight, gathered: Gathered) -> Pending:
        grid, axis, shard = self._grid, self._axis(weight), weight.shard
        codec = self._sync.compression.codec_of("weights", weight.dtype)
        if self.overlap.shared_weights and not is_folded(axis.name):
            gathered.copy = gathered.copy or NodeSharedBlock(grid, weight.spec)
            return gathered.copy.fill(shard, codec)
        gathered.copy, counts = None, weight.spec.counts(axis.name)
        block = weight.spec.new((sum(counts), shard.shape[1]))
        with grid.ledger.phase("gather W"):
            return axis._all_gather_into(shard, block, counts, codec=codec)

    def _fits_cache(self, nbytes: int) -> bool:
        """Whether a block of this size may be kept in addition to the kept blocks. Collective if there is no budget."""
        overlap, grid = self.overlap, self._grid
        if overlap.reshard_after_forward is not None:
            return not overlap.reshard_after_forward
        if overlap.keep_bytes is None and self.budget is None:
            if grid.dry_run is not None:
                return True
            self.budget = min(grid.comm.allgather(available_memory() // 4 // grid.local_size))
        budget = (self.budget or 0) if overlap.keep_bytes is None else overlap.keep_bytes
        return sum(taken for taken, _ in self._cached.values()) + nbytes <= budget


class NodeSharedBlock:
    """The gathered block of a weight, in memory that the ranks of a node share.

    Each rank writes its shard, and all ranks read the block. A rank also receives the shards of the ranks with the same
    index on other nodes. So each byte is sent once to a node, which holds one copy. Each rank of a node counts an equal
    part of the block in the workspace. Construction is collective over the grid, and raises GridError, LayoutError or
    OutOfMemoryError on every rank.
    """

    def __init__(self, grid: Grid, spec: TensorSpec):
        from ..comm import ranks_that_share

        with grid.collective_call(SHARED):
            _check_can_share(grid, spec)
        self._grid, self._axis = grid, grid.axis(spec.layout.rows[-1])
        self._library: Any = spec.library
        self._counts, self._per_node = spec.counts(self._axis.name), ranks_that_share(grid, self._axis.name)
        self._filling: Pending | None = None
        shape = sum(self._counts), spec.local_shape[1]
        with grid.collective_call(SHARED, always=True):
            memory = self._room(itemsize(spec.dtype) * shape[0] * shape[1])
        self.block: Array = spec.library.view(memory, shape, spec.dtype)

    def _room(self, nbytes: int) -> Array:
        """Allocate `nbytes` shared bytes on each node. Collective."""
        from ..comm import one_for_each_node

        grid, own = self._grid, part_sizes(nbytes, self._per_node)[self._axis.index % self._per_node]
        if grid.dry_run is None:
            memory = one_for_each_node(grid, self._axis, nbytes, self._per_node)
        else:
            memory = self._library.array((nbytes,), "uint8", grid.dry_run.hold(own, "workspace"))
        grid.workspace.allocated += own
        weakref.finalize(self, _less, grid.workspace, own).atexit = False
        return memory

    def fill(self, shard: Array, codec: Codec | None = None) -> Pending:
        """Begin to fill the block, after a barrier of the node, because ranks may still read the old values.

        Within a node no bytes are sent. A codec encodes the shards that are sent to other nodes, and all nodes have the
        decoded shards. Collective along the axis.
        """
        if self._filling is not None:  # a prefetch of outdated values
            self._filling.wait()

        def steps(link: Link) -> Collective[Array]:
            start, stop = offsets(self._counts)[link.rank :][:2]
            yield from wait_for_all(link, self._per_node)
            if codec is not None and self._per_node < link.size:
                given = link, self._library, shard, self.block, self._counts, codec, self._per_node
                yield from gathered_encoded(*given)
                yield from wait_for_all(link, self._per_node)
                return self.block
            self.block[start:stop] = shard
            schedule = shared_all_gather(tuple(self._counts), link.rank, self._per_node)
            return (yield from run_schedule(link, self._library, schedule, self.block, self.block))

        with self._grid.ledger.phase("gather W"):
            name = "read in place" if self._per_node == self._axis.size else "all_gather"
            self._filling = self._axis.begin(name, steps)
        return self._filling


def _check_can_share(grid: Grid, spec: TensorSpec) -> None:
    """Raise GridError or LayoutError if the ranks along the axis that shards such a weight cannot share its block."""
    from ..comm import ranks_that_share

    remedy, axis = "Leave Overlap(shared_weights=True) out, or", spec.layout.rows[-1]
    if spec.library.kind not in ("numpy", "torch"):
        raise LayoutError(
            f"shared weights must be arrays on the host, got arrays of {spec.library.kind}. "
            f'{remedy} make the network with library="numpy" or "torch"'
        )
    if not ranks_that_share(grid, axis):
        raise GridError(
            f"shared weights: ranks along {axis} of grid {grid.shape} are on several nodes, not equally "
            f"many consecutive ranks on each, or they run in separate containers. {remedy} choose a grid "
            f"whose axis {axis} is in one node, or fills nodes evenly. Consecutive ranks are along x"
        )


def _less(workspace: Workspace, nbytes: int) -> None:
    workspace.allocated -= nbytes
