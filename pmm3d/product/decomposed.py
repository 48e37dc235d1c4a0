"""One product whose collectives are decomposed: each piece is multiplied when it has come, and sent when it is done.

Wang et al., ASPLOS 2023. Each message brings rows of A of one or several ranks; the GEMM of these rows runs while the
next message travels. Rows of C for other ranks are multiplied first and sent as soon as they are done, this rank's rows
last. Bytes and the order of sums do not change.
"""

from __future__ import annotations

from ..comm.pieces import Arrivals, Departures
from ..model.plan import RankPlan
from .panels import OperandPanels, ResultStrips


def multiply_decomposed(plan: RankPlan, a: OperandPanels, b: OperandPanels, strips: ResultStrips) -> None:
    """This rank's part of a product of one panel; collective."""
    coming = b.start(0)
    rows, panel = rows_of_a(a), coming.wait()
    b.conjugate(panel)
    sums = rows_of_c(plan, strips) if plan.reduces else None
    for start, stop in sums.blocks if sums else [(0, plan.rows)]:
        for low, high in rows.within(start, stop):
            strips.add(0, rows.whole[low:high], panel, first=True, rows=slice(low, high))
        if sums:
            with strips.ledger.phase("reduce C"):
                sums.done()
    rows.wait()
    if sums:
        sums.wait()


def rows_of_a(panels: OperandPanels) -> Arrivals:
    """Begin to gather the rows of A's block."""
    if panels.axis is None or panels.turned or panels.conjugates:
        whole = panels.start(0).wait()
        panels.conjugate(whole)
        return Arrivals.here(whole)
    part, whole, counts = panels.to_gather(0)
    with panels.ledger.phase(panels.phase):
        return Arrivals(panels.axis, part, whole, counts)


def rows_of_c(plan: RankPlan, strips: ResultStrips) -> Departures:
    """Return the reduce-scatter of C."""
    partial, out, work = strips.posted()
    return Departures(strips.axis, partial, plan.c_counts, work, out, strips.beta)
