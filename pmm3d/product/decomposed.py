"""One product whose collectives are decomposed: each piece is multiplied when it has come, and sent when it is done.

Wang et al., ASPLOS 2023. The rows of A that other ranks bring come one rank after the other, the own ones are here: the
GEMM of rows runs while the next travel. The rows of C that another rank keeps are multiplied first, the own ones last,
and each rank's partial sums leave as soon as they are done. What travels, and the order of sums, is as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ..arrays import Array, copy_into, library_of, sum_in_order
from ..comm import Axis, Pending
from ..layout import offsets
from ..model.plan import RankPlan
from .panels import OperandPanels, ResultStrips


def multiply_decomposed(plan: RankPlan, a: OperandPanels, b: OperandPanels, strips: ResultStrips) -> None:
    """This rank's part of a product of one panel; collective."""
    coming = b.start(0)
    rows, panel = rows_of_a(a), coming.wait()
    b.conjugate(panel)
    sums = rows_of_c(plan, strips) if plan.reduces else None
    for start, stop in sums.blocks() if sums else [(0, plan.rows)]:
        for low, high in rows.within(start, stop):
            strips.add(0, rows.whole[low:high], panel, first=True, rows=slice(low, high))
        if sums:
            with strips.ledger.phase("reduce C"):
                sums.done(start, stop)
    rows.wait()
    if sums:
        sums.wait()


def rows_of_a(panels: OperandPanels) -> ComingRows:
    """Those of A's block."""
    if panels.axis is None or panels.turned:
        whole = panels.start(0).wait()
        panels.conjugate(whole)
        return ComingRows.here(whole)
    part, whole, counts = panels.to_gather(0)
    with panels.ledger.phase(panels.phase):
        return ComingRows(panels.axis, part, whole, counts, panels.conjugate)


class ComingRows:
    """Rows of a block that other ranks bring: `whole` has them once `within` has given them.

    axis, counts   along which they come, and how many of each rank;   part   the own ones, without gaps
    arrived        called with the rows of each rank as soon as they are here
    """

    def __init__(self, axis: Axis, part: Array, whole: Array, counts: Sequence[int],
                 arrived: Callable[[Array], None] = lambda rows: None):
        self.whole, self._edges, self._ready = whole, offsets(counts), arrived
        self._order = [(axis.index - distance) % axis.size for distance in range(axis.size)]
        self._coming = {source: axis.exchange_at(distance, part, self._rows_of(source), "all_gather")
                        for distance, source in enumerate(self._order) if distance}
        own, library = self._rows_of(axis.index), library_of(whole)
        if library.has_data and 0 not in own.shape and library.address(own) != library.address(part):
            copy_into(library, part, own)
        arrived(own)

    @classmethod
    def here(cls, whole: Array) -> ComingRows:
        """A block that is here."""
        rows = cls.__new__(cls)
        rows.whole, rows._order, rows._edges, rows._coming = whole, [0], [0, whole.shape[0]], {}
        return rows

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The pieces of these rows, the own ones first, each once it is here."""
        for source in self._order:
            low, high = max(start, self._edges[source]), min(stop, self._edges[source + 1])
            if low < high:
                self._arrived(source)
                yield low, high

    def wait(self) -> Array:
        """All rows."""
        for source in list(self._coming):
            self._arrived(source)
        return self.whole

    def _arrived(self, source: int) -> None:
        if source in self._coming:
            self._coming.pop(source).wait()
            self._ready(self._rows_of(source))

    def _rows_of(self, source: int) -> Array:
        return self.whole[self._edges[source] : self._edges[source + 1]]


class LeavingRows:
    """Partial sums whose rows belong to the ranks of an axis: those of other ranks leave, those of the own rows come.

    partial   of all rows;   counts   those of each rank
    landed    (ranks - 1, own rows, columns): memory for what comes
    out       the own rows of the sum: beta out + all parts, in the order of the ranks
    """

    def __init__(self, axis: Axis, partial: Array, counts: Sequence[int], landed: Array, out: Array, beta: complex = 0):
        self._axis, self.partial, self.out, self._beta = axis, partial, out, beta
        self._edges = list(pairwise(offsets(counts)))
        low, high = self._edges[axis.index]
        self._parts = [*landed[: axis.index], partial[low:high], *landed[axis.index :]]
        self._under_way: list[Pending] = []

    def blocks(self) -> list[tuple[int, int]]:
        """The rows of each rank, the next one's first, the own last; of all ranks in the same order of distances."""
        axis = self._axis
        return [self._edges[(axis.index + distance) % axis.size] for distance in (*range(1, axis.size), 0)]

    def done(self, start: int, stop: int) -> None:
        """The next of the blocks is multiplied."""
        axis, distance = self._axis, len(self._under_way) + 1
        if distance < axis.size:
            landing = self._parts[(axis.index - distance) % axis.size]
            self._under_way.append(axis.exchange_at(distance, self.partial[start:stop], landing, "reduce_scatter"))

    def wait(self) -> Array:
        """For all messages; add up."""
        for pending in self._under_way:
            pending.wait()
        sum_in_order(library_of(self.out), self._parts, self.out, self._beta)
        return self.out


def rows_of_c(plan: RankPlan, strips: ResultStrips) -> LeavingRows:
    """The partial sums of C."""
    partial, out, landing = strips.posted()
    own = plan.c_counts[strips.axis.index]
    landed = landing.array((strips.axis.size - 1, own, partial.shape[1]), plan.plan.dtype)
    return LeavingRows(strips.axis, partial, plan.c_counts, landed, out, strips.beta)
