"""Gathers the shards of weights, one weight ahead, and keeps the blocks while there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from ..arrays import Array
from ..comm import Axis, Grid, Pending
from ..model.machine import available_memory
from .compute import Form
from .overlap import Overlap

if TYPE_CHECKING:
    from .node_shared_weights import NodeSharedBlock

IDLE_PAUSES = 8
"""A weight that was not used between so many changes of weights belongs to a network that is gone."""


class Weight(Protocol):
    """A parameter whose rows are sharded over the last of the axes that split them (z). version: number of changes of
    its values that are known."""

    form: Form
    version: int

    @property
    def shard(self) -> Array: ...


@dataclass(eq=False)
class Gathered:
    """A weight's gathered block, of the values of one version.

    number     of the weight: weights are numbered in the order of first use
    used       `Weights._pauses` at the last use
    version    of the values;   nbytes: size of the block
    pending    None, or the gather under way;   block: None, or the block that is kept
    copy       None, or the block that the ranks of a node share
    promise    the `unchanged` context in which the block was gathered
    following  phase of the pass -> the weight that was used next the last time, and its phase. The reference is strong,
               because all ranks must gather the same weight ahead, also if it is garbage on one of them
    """

    number: int
    used: int = 0
    version: int = -1
    nbytes: int = 0
    pending: Pending | None = None
    copy: NodeSharedBlock | None = None
    block: Array = None
    promise: object = None
    following: dict[str, tuple[Weight, str]] = field(default_factory=dict)


class Weights:
    """Gathers the shards of each weight along the axis over which they are sharded (z). When a weight is used, the
    gather of the weight that followed it in the pass before begins. In `unchanged`, the last weight of a backward pass
    is followed by the first weight of the next forward pass, if there is one.

    overlap  which collectives run under computation
    more     whether another pass follows before weights change: a backward pass in `no_sync` says so
    budget   bytes of gathered weights that a rank keeps if `Overlap.keep_bytes` is None. None before the ranks have
             agreed on it. While it is None, a dry run keeps all of them, because it knows no machine
    """

    def __init__(self, grid: Grid):
        self._grid, self.overlap, self.more = grid, Overlap(), False
        self._gathered: WeakKeyDictionary[Weight, Gathered] = WeakKeyDictionary()
        self._kept: dict[int, tuple[int, int]] = {}
        """Number -> (bytes, `_pauses` at the last use) of what is kept, and stays so when the weight is gone: ranks
        collect garbage at different moments, and must keep the same weights."""
        self._numbers, self._pauses = count(), 0
        self._last: tuple[Gathered, str] | None = None
        self.budget: int | None = None
        self._promise: object = None
        grid.at_close(self._gathered.clear)

    def take(self, weight: Weight, phase: str) -> Array:
        """The block of the weight that this rank multiplies by: not split over the last of the axes that split the
        weight's rows.

        Each rank receives (G-1)/G of it from the G ranks of this axis, unless it was kept.
        """
        if self._axis(weight).size == 1:
            return weight.shard
        gathered = self._of(weight)
        if self._last is not None:
            before, its_phase = self._last
            before.following[its_phase] = weight, phase
        self._last, gathered.used = (gathered, phase), self._pauses
        self._drop_unusable(gathered, phase)
        block = gathered.block
        if block is None:
            gathered.promise = self._promise
            pending, gathered.pending = gathered.pending or self._start(weight, gathered), None
            block = pending.wait()
        self._kept.pop(gathered.number, None)
        nbytes = gathered.nbytes if gathered.copy is None else 0
        if gathered.block is not None or gathered.copy is not None or self._keeps(nbytes):
            gathered.block = block
            self._kept[gathered.number] = nbytes, self._pauses
        if self.overlap.oag:
            self._prefetch(weight, gathered, phase)
        return block

    def pause(self) -> None:
        """A pass is over. Outside of `unchanged`, values may change before the next pass. So all ranks drop the gathers
        that began ahead, and the blocks of weights out of use."""
        if self._promise is None or not self.more:
            self._last = None
        if self._promise is not None:
            return
        for gathered in self._gathered.values():
            gathered.pending = None
        self._pauses += 1
        oldest = self._pauses - IDLE_PAUSES
        self._kept = {number: kept for number, kept in self._kept.items() if kept[1] >= oldest}
        for gathered in list(self._gathered.values()):
            if gathered.number not in self._kept:
                gathered.block = gathered.copy = None
            for phase, (weight, _) in list(gathered.following.items()):
                if self._gathered[weight].used < oldest:
                    del gathered.following[phase]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """In this context no values change. A block that is kept serves all forward passes in it."""
        if self._promise is not None:
            yield
            return
        self._promise = object()
        try:
            yield
        finally:
            self._promise = None
            self.pause()

    def _axis(self, weight: Weight) -> Axis:
        """The axis over which the weight is sharded."""
        return self._grid.axis(weight.form.layout.rows[-1])

    def _of(self, weight: Weight) -> Gathered:
        """Return the record of a weight. A block of older values is dropped."""
        if weight not in self._gathered:
            self._gathered[weight] = Gathered(next(self._numbers))
        gathered = self._gathered[weight]
        if gathered.version != weight.version:
            gathered.version, gathered.pending, gathered.block = weight.version, None, None
            gathered.nbytes = weight.form.largest_without(self._axis(weight).name)
        return gathered

    def _drop_unusable(self, gathered: Gathered, phase: str) -> None:
        """Drop a kept block in a forward pass, unless it was gathered in the same `unchanged` context."""
        if phase == "forward" and (self._promise is None or gathered.promise is not self._promise):
            gathered.block = None

    def _prefetch(self, weight: Weight, gathered: Gathered, phase: str) -> None:
        following, next_phase = gathered.following.get(phase, (weight, phase))
        ahead = self._of(following)
        if next_phase == "forward" and (phase != "forward" or ahead.number <= gathered.number):  # of the next pass
            if self._promise is None or (phase != "forward" and not self.more):
                return
        elif following is weight:
            return
        self._drop_unusable(ahead, next_phase)
        if ahead.block is None and ahead.pending is None:
            ahead.pending = self._start(following, ahead)

    def _start(self, weight: Weight, gathered: Gathered) -> Pending:
        grid, axis, shard = self._grid, self._axis(weight), weight.shard
        counts = weight.form.counts(axis.name)
        if self.overlap.shared_weights:
            from .node_shared_weights import NodeSharedBlock

            gathered.copy = gathered.copy or NodeSharedBlock(grid, weight.form)
            return gathered.copy.fill(shard)
        gathered.copy = None
        block = weight.form.new((sum(counts), shard.shape[1]))
        with grid.ledger.phase("gather W"):
            return axis.all_gather_into(shard, block, counts)

    def _keeps(self, nbytes: int) -> bool:
        """Whether a block of this size may be kept beside the blocks that are kept already."""
        overlap = self.overlap
        if overlap.reshard_after_forward is not None:
            return not overlap.reshard_after_forward
        grid = self._grid
        if overlap.keep_bytes is None and self.budget is None:
            if grid.dry_run is not None:
                return True
            self.budget = min(grid.comm.allgather(available_memory() // 4 // grid.local_size))
        budget = (self.budget or 0) if overlap.keep_bytes is None else overlap.keep_bytes
        return sum(taken for taken, _ in self._kept.values()) + nbytes <= budget
