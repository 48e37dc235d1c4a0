"""One product whose collectives are decomposed: each piece is multiplied when it has come, and sent when it is done.

Wang et al., ASPLOS 2023. The rows of A that other ranks bring come one rank after the other, the own ones are here: the
GEMM of rows runs while the next travel. The rows of C that another rank keeps are multiplied first, the own ones last,
and each rank's partial sums leave as soon as they are done. What travels, and the order of sums, is as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..arrays import Array, sum_in_order
from ..comm import Pending
from ..layout import offsets
from ..model.plan import RankPlan
from .panels import OperandPanels, ResultStrips


def multiply_decomposed(plan: RankPlan, a: OperandPanels, b: OperandPanels, strips: ResultStrips) -> None:
    """This rank's part of a product of one panel; collective."""
    coming = b.start(0)
    rows, panel = ComingRows(a), coming.wait()
    b.conjugate(panel)
    sums = LeavingSums(plan, strips) if plan.reduces else None
    for start, stop in sums.blocks() if sums else [(0, plan.rows)]:
        for low, high in rows.within(start, stop):
            strips.add(0, rows.whole[low:high], panel, first=True, rows=slice(low, high))
        if sums:
            sums.done(start, stop)
    rows.wait()
    if sums:
        sums.wait()


class ComingRows:
    """The rows of A's block, which other ranks bring: whole has them once `within` has given them."""

    def __init__(self, panels: OperandPanels):
        self._panels, self._coming = panels, dict[int, Pending]()
        if panels.axis is None or panels.turned:
            coming = panels.start(0)
            self.whole: Array = coming.wait()
            panels.conjugate(self.whole)
            self._order, self._edges = [0], [0, self.whole.shape[0]]
            return
        axis, (part, self.whole, counts) = panels.axis, panels.to_gather(0)
        self._edges = offsets(counts)
        for distance in range(1, axis.size):
            source = (axis.index - distance) % axis.size
            with panels.ledger.phase(panels.phase):
                self._coming[source] = axis.exchange_at(distance, part, self._rows_of(source), "all_gather")
        own = self._rows_of(axis.index)
        library = panels.library
        if library.has_data and 0 not in own.shape and library.address(own) != library.address(part):
            own[...] = part
        panels.conjugate(own)
        self._order = [(axis.index - distance) % axis.size for distance in range(axis.size)]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The pieces of these rows, the own ones first, each once it is here."""
        for source in self._order:
            low, high = max(start, self._edges[source]), min(stop, self._edges[source + 1])
            if low < high:
                self._arrived(source)
                yield low, high

    def wait(self) -> None:
        """For all messages."""
        for source in list(self._coming):
            self._arrived(source)

    def _arrived(self, source: int) -> None:
        if source in self._coming:
            self._coming.pop(source).wait()
            self._panels.conjugate(self._rows_of(source))

    def _rows_of(self, source: int) -> Array:
        return self.whole[self._edges[source] : self._edges[source + 1]]


class LeavingSums:
    """The partial sums of C: those of other ranks' rows leave, those of the own rows come."""

    def __init__(self, plan: RankPlan, strips: ResultStrips):
        self._strips, self._axis = strips, strips.axis
        self._partial, self._out, landing = strips.posted()
        edges, axis = offsets(plan.c_counts), self._axis
        self._edges = list(pairwise(edges))
        low, high = self._edges[axis.index]
        landed = landing.array((axis.size - 1, high - low, self._partial.shape[1]), plan.plan.dtype)
        self._parts = [*landed[: axis.index], self._partial[low:high], *landed[axis.index :]]
        self._under_way: list[Pending] = []

    def blocks(self) -> list[tuple[int, int]]:
        """The rows of each rank, the next one's first, the own last; of all ranks in the same order of distances."""
        axis = self._axis
        return [self._edges[(axis.index + distance) % axis.size] for distance in (*range(1, axis.size), 0)]

    def done(self, start: int, stop: int) -> None:
        """The next of the blocks is multiplied."""
        axis, distance = self._axis, len(self._under_way) + 1
        if distance == axis.size:
            return
        landing = self._parts[(axis.index - distance) % axis.size]
        with self._strips.ledger.phase("reduce C"):
            self._under_way.append(axis.exchange_at(distance, self._partial[start:stop], landing, "reduce_scatter"))

    def wait(self) -> None:
        """For all messages; and add up, in the order of the ranks."""
        for pending in self._under_way:
            pending.wait()
        sum_in_order(self._strips.library, self._parts, self._out, self._strips.beta)
