"""Which way the communication of a product runs under its GEMM, where the caller leaves it open."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..comm import Grid
from ..layout import AXES, FIRST
from ..model.notes import show_notes
from ..model.plan import ProductPlan
from ..model.planning import AUTO

if TYPE_CHECKING:
    from ..model.machines import Machine

logger = logging.getLogger("pmm3d.comm")


def way_of(grid: Grid, plan: ProductPlan, asked: str | None, *, on_host: bool, limited: bool) -> str:
    """"none", "panels" or "decomposed", for a product whose plan in one panel this is; the same on every rank.

    asked     by the caller; None or "auto": as PMM3D_OVERLAP says, and if that leaves it open too, on one node "none",
              on several the fastest by the machine that was measured here. Where none was, or not how much it hides,
              "decomposed" if axes are flat and on the host, which measured best there; else "panels", as where
              operands or C are whole on the ranks that would exchange them. Panels, which would gather again what is
              read in place along k, are not taken then
    on_host   whether the GEMM runs there: of devices nothing is measured, but a machine that is named may be of them
    limited   whether work memory has a limit, which is kept by more panels
    """
    if asked not in (None, AUTO):
        return str(asked)
    if grid.overlap != AUTO:
        return grid.overlap
    if grid.hosts == 1:
        return "none"
    if _cut_by_panels(plan):
        return "decomposed" if on_host and not limited and _can_decompose(grid, plan) else "none"
    m_axis, k_axis, n_axis = plan.roles
    held = (plan.a, n_axis), (plan.b, m_axis), (plan.c, k_axis)
    machine = grid.machine
    if limited or any(dim < 0 and getattr(grid.shape, axis) > 1 for dim, axis in held):
        return "panels"
    if machine is None or not machine.hidden or (machine.key and not on_host):
        return "decomposed" if on_host and _can_decompose(grid, plan) else "panels"
    return _fastest(grid, plan, machine)


def _cut_by_panels(plan: ProductPlan) -> bool:
    """Whether an operand is read in place that is sharded along k."""
    first = plan.on_rank(FIRST)
    return any(part.in_place and part.along_k for part in (first.a, first.b))


def _can_decompose(grid: Grid, plan: ProductPlan) -> bool:
    """Whether rows of A come along a flat axis, or rows of C leave along one."""
    sizes = [getattr(grid.shape, axis) for axis in plan.roles]
    return (sizes[2] > 1 and plan.a == 0 or sizes[1] > 1)


def _fastest(grid: Grid, plan: ProductPlan, machine: Machine) -> str:
    from ..model.overlap import best_way, clocks_of
    from ..model.product_costs import ProductCosts

    x, y, z = (getattr(grid.shape, axis) for axis in reversed(plan.roles))
    costs = ProductCosts((plan.m, plan.n, plan.k), x * y * z, plan.dtype, machine, run=grid.run,
                         beside=grid.shape.size // (x * y * z), roles=plan.roles)
    found = {way: clock.now for way, clock in clocks_of(costs, (x, y, z), rows_come=plan.a == 0).items()}
    way = best_way(found)
    if grid.rank == 0 and len(found) > 1:
        show_notes("pmm3d.comm")
        logger.info("matmul of %s on %s: overlap %s (%s by the model of %s)", f"{plan.m} x {plan.n} x {plan.k}",
                    "x".join(str(getattr(grid.shape, axis)) for axis in AXES[:3]), way,
                    ", ".join(f"{each} {1e3 * seconds:.3g} ms" for each, seconds in found.items()),
                    machine.name)
    return way
