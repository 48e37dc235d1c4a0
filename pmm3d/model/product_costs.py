"""The costs of a product on a grid, from a simulation of its actions on the first rank.

The first rank has the largest blocks, so all other ranks wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from ..layout import ALL, FIRST, GridShape
from .candidates import Candidate, preset_of
from .machines import Group, Machine, groups_of
from .machines.figures import InSteps
from .machines.groups import everyone
from .node_map import FLAT, GATHERS_FROM, NodeMap
from .plan import ProductPlan
from .planning import AUTO, decomposes
from .product_actions import product_actions
from .simulation import Timeline, simulate
from .simulation.replay import tasks, terms_of

Product = tuple[int, int, int]
"""m, n, k."""
Sizes3 = tuple[int, int, int]
"""Ranks along x, y, z."""


class ProductCosts:
    """Costs of the product C (m, n) = A (m, k) B on any grid.

    `product` is (m, n, k). `ranks` is the number of ranks for x, y and z, and `beside` the number along all other axes.
    A grid may leave ranks idle. `overlap` is PMM3D_OVERLAP, "auto" or "none". `run` is the number of consecutive ranks
    on a node, as in `groups_of`.
    """

    def __init__(
        self,
        product: Product,
        ranks: int,
        dtype: str,
        machine: Machine,
        overlap: str = AUTO,
        run: int | None = None,
        beside: int = 1,
    ):
        self.product, self.ranks, self.dtype, self.overlap = product, ranks, dtype, overlap
        self.machine = replace(machine, in_steps=InSteps())  # products are measured in loops, not in training steps
        self.run, self._beside = run or machine.ranks_per_node, beside
        self.everyone = everyone(ranks * beside, machine.ranks_per_node)

    def groups(self, shape: Sizes3) -> dict[str, Group]:
        """Return the groups of the axes of a grid."""
        found = groups_of(GridShape(*shape, self._beside), self.machine.ranks_per_node, self.run)
        found[ALL] = self.everyone
        return found

    def plan(self, shape: Sizes3, groups: dict[str, Group] | None = None) -> ProductPlan:
        """Return the plan of the product on a grid."""
        groups = groups or self.groups(shape)
        node_maps = tuple(
            NodeMap(groups[axis].inside, True, GATHERS_FROM) if groups[axis].even else FLAT for axis in "xyz"
        )
        plan = ProductPlan(*self.product, self.dtype, GridShape(*shape), node_maps=node_maps)
        return replace(plan, decomposed=self.overlap == AUTO and decomposes(plan, self.everyone.nodes))

    def simulated(self, plan: ProductPlan, groups: dict[str, Group]) -> Timeline:
        """Return the times of the actions of a plan on the first rank."""
        return simulate(tasks(product_actions(plan.on_rank(FIRST)), self.machine, groups))

    def priced(self, shape: Sizes3) -> Candidate:
        """Return the grid as a candidate."""
        groups = self.groups(shape)
        plan = self.plan(shape, groups)
        timeline = self.simulated(plan, groups)
        terms = {name: spent for name, spent in terms_of(timeline).items() if spent}
        fullest = max(plan.fullest, key=lambda rank: rank.workspace + rank.shards)
        received = max(sum(rank.bytes_received.values()) for rank in plan.fullest)
        return Candidate(
            plan.grid,
            timeline.seconds,
            terms,
            {"shards": fullest.shards, "workspace": fullest.workspace},
            received,
            preset_of(plan.grid),
        )
