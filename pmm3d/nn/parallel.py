"""What of a grid's networks is under way, or kept from pass to pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from zlib import crc32

from ..comm import Grid
from ..errors import DisagreementError, Pmm3dError
from .contract import Part
from .gathered import Weights
from .gradients import Gradients, Leaf
from .overlap import Overlap

NAMED = 4
"""Parameters that are named where ranks differ."""
Uses = list[tuple[str, int]]


class Parallel:
    """The collectives of one grid's networks. `Parallel.of(grid)`.

    overlap    may be replaced between steps, by all ranks
    weights    brings their shards together;   gradients   sums theirs
    deferred   None, or who takes the gradients of parameters in place of `gradients` (see `defer_weights`)
    trusting   whether a pass that uses what the one before used is not compared among the ranks before its first
               message: whoever sets it compares `digest` before the gradients are used
    used       of the last backward pass: the name of each parameter, and how often it is used
    scale      what its loss was multiplied with; None where the gradient was given
    passes     how many backward passes there were
    """

    def __init__(self, grid: Grid):
        self.grid, self.weights, self.gradients = grid, Weights(grid), Gradients(grid)
        self.deferred: Callable[[Leaf, Part], None] | None = None
        self.trusting = False
        self.used: Uses = []
        self.scale: float | None = None
        self.passes = 0
        self._compared = self._problem = ""

    @property
    def digest(self) -> int:
        """Of `used` and `scale`: 16 bits."""
        return crc32(f"{self.scale} {self.used}".encode()) & 0xFFFF

    @property
    def overlap(self) -> Overlap:
        return self.weights.overlap

    @overlap.setter
    def overlap(self, value: Overlap) -> None:
        self.weights.overlap = value

    @classmethod
    def of(cls, grid: Grid) -> Parallel:
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    @contextmanager
    def backward(self, sync: bool, uses: Counter[Leaf], scale: float | None = None,
                 problem: str = "") -> Iterator[None]:
        """A context for a backward pass that brings so many parts to each leaf; after it all gradients are there.

        scale     factor of the loss; None if the gradient was given
        problem   why this rank cannot begin the pass; "" if it can

        Raises, on every rank, DisagreementError if the ranks' networks or scales differ, and Pmm3dError if a rank has a
        problem. If all ranks have the same problem, nothing is changed.
        """
        grid, memory = self.grid, self.grid.ledger.memory
        agreed = self._agreement(uses, scale, problem)
        if scale is not None and not 0 < scale < inf:
            problem = problem or f"backward: the scale is a positive number; got {scale!r}"
        records = Counter({leaf.accumulated: times for leaf, times in uses.items() if leaf.accumulated is not None})
        memory["recompute saves"] = 0
        with grid.ledger.phase("backward"):
            self.gradients.begin(sync and self.deferred is None, self.overlap, records, agreed)
            try:
                if problem:
                    grid.engine.prepare_next()
                else:
                    self.passes += 1
                    for record in records:
                        record.scales |= set() if scale is None else {scale}
                    yield
                    self.gradients.finish()
            except BaseException:
                self.gradients.abandon()
                raise
            finally:
                self.weights.pause()
        if problem:
            raise Pmm3dError(problem)
        memory["arrays, most at once"] = grid.workspace.most_lent

    def _agreement(self, uses: Counter[Leaf], scale: float | None, problem: str) -> Callable[[], None]:
        """Begins to compare parameters, scale and problem among the ranks. The function that is returned waits, and
        raises, on every rank, if they differ: the ranks' sums would not match."""
        self.scale, self._problem = scale, problem
        self.used = [(f"{leaf.name or 'a tensor'} ({leaf.shape[0]} x {leaf.shape[1]})", times)
                     for leaf, times in uses.items()]
        text = problem + ", ".join(f"{name} {times}" for name, times in self.used)
        if self.trusting and text == self._compared:
            return lambda: None
        compared = self.grid.compared("backward", text, scale)

        def conclude() -> None:
            try:
                compared()
            except DisagreementError:
                self.explain()
            self._compared = text

        return conclude

    def explain(self) -> None:
        """Raises DisagreementError, on every rank, if the last pass did not use the same on all. Collective."""
        mine, (others, scale) = self.used, self.grid.comm.bcast((self.used, self.scale))
        with self.grid.collective_call("backward", always=True):
            if scale != self.scale:
                raise DisagreementError(f"backward: the loss is scaled by {self.scale!r} on rank {self.grid.rank}, by "
                                        f"{scale!r} on rank 0: ranks scale and step alike, or their weights part")
            if self._problem:
                raise Pmm3dError(self._problem)
            if mine != others:
                difference = _difference(_added(mine), _added(others))
                raise DisagreementError("backward: the ranks use different parameters, or in another order. On rank "
                                        f"{self.grid.rank} {difference}. All ranks must compute the same operations: "
                                        "what a rank decides alone must not choose layers")


def _added(uses: Uses) -> Counter[str]:
    """Return name -> number of uses; tensors of one name count together."""
    return Counter(name for name, times in uses for _ in range(times))


def _difference(mine: Counter[str], others: Counter[str]) -> str:
    """What differs on this rank from rank 0, by name -> times."""
    names = [name for name in {**others, **mine} if mine[name] != others[name]]
    said = [f"{name} is used {mine[name]} times, on rank 0 {others[name]} times" for name in names[:NAMED]]
    return "; ".join(said + [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)) or "the order is another"
