"""A product with one panel and one strip, whose messages are persistent requests of MPI."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from ..arrays import Array, Slab
from ..comm.executor import Buffers
from ..comm.persistent import Persistent
from ..layout import LOW_PRECISION, itemsize, offsets
from ..model.plan import ProductPlan, RankPlan
from ..model.schedule import gather_schedule, reduce_schedule
from .panels import OperandPanels, ResultStrips
from .stored import StoredMatrix


class Factors(NamedTuple):
    """C = alpha a b + beta c, of matrices that lie as a plan has them."""

    a: StoredMatrix
    b: StoredMatrix
    c: StoredMatrix
    alpha: complex
    beta: complex
    tf32: bool


def can_post(plan: ProductPlan, in_place: bool, a: StoredMatrix) -> bool:
    """Whether the product is one panel, and one strip, of host memory that has the layouts of the plan.

    in_place   whether nothing is redistributed
    """
    return (in_place and a.grid.dry_run is None and not a.grid.engine.debug and a.library.on_host
            and plan.dtype not in LOW_PRECISION and plan.panels == plan.strips == 1 and not any(plan.shared)
            and not plan.sums_in_place and not plan.decomposed
            and (plan.c == 0 or getattr(a.grid.shape, plan.roles[1]) == 1))


class Posted:
    """This rank's part of a product that `can_post`. `held` frees the requests. number: of the plan, the same on all
    ranks."""

    def __init__(self, plan: RankPlan, factors: Factors, work: Slab, held: ExitStack, number: int):
        a, b, c = factors[:3]
        self._panels = OperandPanels.of_a(plan, a, work), OperandPanels.of_b(plan, b, work)
        conjugated = self._panels[0].conjugated, self._panels[1].conjugated
        self._strips = ResultStrips(plan, c, factors.alpha, factors.beta, factors.tf32, conjugated, work)
        self._gathers = [Gather(panels, held, number) for panels in self._panels]
        self._add = self._strips.bound(*(gather.panel for gather in self._gathers))
        self._reduction = _reduction(plan, factors, self._strips, held, number) if plan.reduces else None

    def begin(self) -> None:
        """Begin to bring the operands together; `finish` follows."""
        for gather in self._gathers:
            gather.begin()

    def finish(self) -> None:
        """Multiply what comes together, and add up."""
        for gather in self._gathers:
            gather.wait()
        self._add()
        if self._reduction is not None:
            self._reduction.begin()
            self._reduction.wait()


class Gather:
    """The gather of A or B into a panel at a fixed address. persistent: its messages; None if the shard is the block.
    """

    def __init__(self, panels: OperandPanels, held: ExitStack, number: int):
        self._panels, self._copies = panels, panels.copies
        self.persistent: Persistent | None = None
        if panels.axis is None:
            self.panel = _turned(panels, panels.here(0))
            return
        part, whole, counts = panels.to_gather(0)
        axis, library = panels.axis, panels.library
        row_bytes, start = whole.shape[1] * itemsize(library.dtype(whole)), offsets(counts)[axis.index]
        self._packs = 0 not in part.shape and library.address(part) == library.address(whole[start:])
        self.panel, schedule = _turned(panels, whole), gather_schedule(counts, axis.index, row_bytes, axis.spread)
        buffers = Buffers(schedule, library, (part, whole), (0, 0), None)
        self.persistent = axis.persistent("all_gather", panels.phase, schedule, buffers, row_bytes, number)
        held.callback(self.persistent.free)

    def begin(self) -> None:
        if self.persistent is not None:
            if self._packs:
                self._panels.to_gather(0)
            self.persistent.begin()

    def wait(self) -> None:
        """Wait until the panel is complete."""
        if self.persistent is not None:
            self.persistent.wait()
        elif self._copies:
            self._panels.here(0)
        self._panels.conjugate(self.panel)


def _turned(panels: OperandPanels, panel: Array) -> Array:
    turned: Array = panel.T if panels.turned else panel
    return turned


def _reduction(plan: RankPlan, factors: Factors, strips: ResultStrips, held: ExitStack, number: int) -> Persistent:
    """The sum of C over the ranks along k."""
    partial, out, work = strips.posted()
    axis, library = factors.c.grid.axis(plan.plan.roles[1]), factors.c.library
    schedule = reduce_schedule(plan.c_counts, axis.index, plan.plan.dtype, axis.spread)
    buffers = Buffers(schedule, library, (partial, out), (0, 0), work)
    persistent = axis.persistent("reduce_scatter", "reduce C", schedule, buffers,
                                 partial.shape[1] * itemsize(plan.plan.dtype), number, factors.beta)
    held.callback(persistent.free)
    return persistent
