"""A product of one panel and strip whose messages are the same each time: persistent requests of MPI."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

from ..arrays import Array, Slab, sum_in_order
from ..comm.requests import Exchange
from ..layout import LOW_PRECISION, offsets
from ..model.plan import ProductPlan, RankPlan
from ..model.stages import DIRECT
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
    """Whether the product is one panel, and one strip, of host memory that lies right, along axes on which all send to
    all, and not by nodes.

    in_place   whether nothing is redistributed
    """
    sizes = [getattr(a.grid.shape, axis) for axis in plan.roles]
    return (in_place and a.grid.dry_run is None and not a.grid.engine.debug and a.library.on_host
            and plan.dtype not in LOW_PRECISION and plan.panels == plan.strips == 1 and not any(plan.shared)
            and not plan.sums_in_place and not plan.decomposed
            and max(sizes) <= DIRECT and (plan.c == 0 or sizes[1] == 1)
            and not any(spread.inside > 1 for spread in plan.spreads))


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
        self._reduction = Reduction(plan, factors, self._strips, held, number) if plan.reduces else None

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
            self._reduction.run()


class Gather:
    """The panel of A or of B, whose memory is always the same. `exchange`: its messages; None where the shard is the
    block."""

    def __init__(self, panels: OperandPanels, held: ExitStack, number: int):
        self._panels, self._copies = panels, panels.copies
        self.exchange: Exchange | None = None
        if panels.axis is None:
            self.panel = _turned(panels, panels.here(0))
            return
        part, whole, counts = panels.to_gather(0)
        rows = [whole[low:high] for low, high in pairwise(offsets(counts))]
        own, axis = rows[panels.axis.index], panels.axis
        address = panels.library.address
        self._packs = 0 not in own.shape and address(part) == address(own)
        self.panel, self._part, self._own = _turned(panels, whole), part, own
        peers = [peer for peer in range(axis.size) if peer != axis.index]
        self.exchange = axis.repeated("all_gather", panels.phase, panels.library, [(peer, part) for peer in peers],
                                      [(peer, rows[peer]) for peer in peers], number)
        held.callback(self.exchange.free)

    def begin(self) -> None:
        if self.exchange is None:
            return
        if self._packs:
            self._panels.to_gather(0)
        self.exchange.begin()
        if not self._packs:
            self._own[...] = self._part

    def wait(self) -> None:
        """Until the panel has what it is of."""
        if self.exchange is not None:
            self.exchange.wait()
        elif self._copies:
            self._panels.here(0)
        self._panels.conjugate(self.panel)


def _turned(panels: OperandPanels, panel: Array) -> Array:
    turned: Array = panel.T if panels.turned else panel
    return turned


class Reduction:
    """The sum of C over the ranks along k, added up in their order."""

    def __init__(self, plan: RankPlan, factors: Factors, strips: ResultStrips, held: ExitStack, number: int):
        self._partial, self._out, landing = strips.posted()
        self._library, self._beta = factors.c.library, factors.beta
        axis, edges = factors.c.grid.axis(plan.plan.roles[1]), offsets(plan.c_counts)
        rows = [self._partial[low:high] for low, high in pairwise(edges)]
        own = rows[axis.index]
        peers = [peer for peer in range(axis.size) if peer != axis.index]
        landed = landing.array((len(peers), *own.shape), plan.plan.dtype)
        self._parts = [*landed[: axis.index], own, *landed[axis.index :]]
        self._exchange = axis.repeated("reduce_scatter", "reduce C", self._library,
                                       [(peer, rows[peer]) for peer in peers],
                                       [(peer, self._parts[peer]) for peer in peers], number)
        held.callback(self._exchange.free)

    def run(self) -> None:
        self._exchange.begin()
        self._exchange.wait()
        sum_in_order(self._library, self._parts, self._out, self._beta)
