"""Where weights come from, and what of all this runs under computation; `gradients` is where gradients go to.

All that is under way belongs to one grid: `Tape.of(grid).parallel`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from ..layout import itemsize, part_range
from ..model.machine import available_memory
from .gradients import Gradients
from .parts import gathered_bytes, z_counts

STRIPS_ACROSS_HOSTS = 8
LEAST_STRIP_BYTES = 2**19
IDLE_PAUSES = 8


@dataclass(frozen=True)
class Overlap:
    """Which collectives run under computation. None of the four switches changes a result by a bit.

    oar       the all-reduces of a layer's output and of its input's gradient: under the GEMMs of the same product's
              further rows, and the latter under the GEMM of the weight gradient
    ors       the reduce-scatters of weight gradients (z) under the rest of the backward pass
    oag       the gather (z) of the weight that is needed next under the GEMM of the one before
    buckets   the sums of gradients over the data axis under the rest of the backward pass

    strips                  rows of those products are cut into so many strips, each reduced as it is there; None: 1 on
                            one node, 8 across nodes. Strips have half a MiB at least. The BLAS may round a product
                            that is cut differently
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
    strips: int | None = None
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
        memory["arrays, most at once"] = self.grid.workspace.most_lent

    def row_strips(self, rows: int, cols: int, dtype: str) -> list[slice]:
        """The strips that a product of this local shape is reduced in."""
        strips = self.overlap.strips or (1 if self.grid.hosts == 1 else STRIPS_ACROSS_HOSTS)
        strips = max(1, min(strips, rows * cols * itemsize(dtype) // LEAST_STRIP_BYTES))
        return [slice(*part_range(rows, strips, index)) for index in range(strips)]


class Held(NamedTuple):
    """A gathered weight that is kept; used: how many pauses there had been when it was last taken."""

    weight: ref
    nbytes: int
    used: int


class Weights:
    """Brings the shards of a weight together along z, one weight ahead: which one comes next is known from the time
    before.

    budget   bytes of gathered weights that a rank keeps, where `Overlap.keep_bytes` leaves that open; None before the
             ranks have agreed on it
    """

    def __init__(self, parallel: Parallel):
        self._parallel = parallel
        self._coming: WeakKeyDictionary = WeakKeyDictionary()
        self._kept: WeakKeyDictionary = WeakKeyDictionary()
        self._after: WeakKeyDictionary = WeakKeyDictionary()
        self._last = None
        self.budget: int | None = None
        self._held: dict[int, Held] = {}
        self._numbers: WeakKeyDictionary = WeakKeyDictionary()
        self._named = self._pauses = 0

    def take(self, weight, phase: str):
        """The block of the weight that this rank multiplies by: rows over its first axis, columns over its last.

        Each rank receives (Gz-1)/Gz of it, unless it was kept.
        """
        if weight.grid.z.size == 1:
            return weight.local
        self._learn(weight, phase)
        full = self._known(self._kept, weight)
        if full is not None:
            self._hold(weight)
        else:
            pending = self._known(self._coming, weight) or self._start(weight)
            self._coming.pop(weight, None)
            full = pending.wait()
            if self._keeps(weight):
                self._kept[weight] = weight.version, full
        if self._parallel.overlap.oag:
            self._prefetch(weight, phase)
        return full

    def pause(self) -> None:
        """What comes next is not known: the values may change before it. Weights out of use are let go."""
        self._last = None
        self._pauses += 1
        for number, held in list(self._held.items()):
            if held.used < self._pauses - IDLE_PAUSES:
                if held.weight() is not None:
                    self._kept.pop(held.weight(), None)
                del self._held[number]

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
        """The same on all ranks: by what was kept and is in use, not by what happens to be alive."""
        overlap = self._parallel.overlap
        if overlap.reshard_after_forward is not None:
            return not overlap.reshard_after_forward
        budget = overlap.keep_bytes
        if budget is None:
            budget = self.budget = self._agreed_budget() if self.budget is None else self.budget
        self._held.pop(self._number(weight), None)
        if sum(held.nbytes for held in self._held.values()) + gathered_bytes(weight) > budget:
            return False
        self._hold(weight)
        return True

    def _hold(self, weight) -> None:
        self._held[self._number(weight)] = Held(ref(weight), gathered_bytes(weight), self._pauses)

    def _number(self, weight) -> int:
        """In the order of first use, so the same on all ranks."""
        if weight not in self._numbers:
            self._named += 1
            self._numbers[weight] = self._named
        return self._numbers[weight]

    def _agreed_budget(self) -> int:
        grid = self._parallel.grid
        ranks_of_a_node = -(-grid.size // grid.hosts)
        return min(grid.comm.allgather(available_memory() // 4 // ranks_of_a_node))
