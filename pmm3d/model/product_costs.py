"""The costs of a product on a grid, from a simulation of its actions on the first rank.

The first rank has the largest blocks, so all other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..layout import ALL, GridShape
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

    def groups(self, shape: Sizes3) -> Mapping[str, Group]:
        """Return the groups of the axes of a grid."""
        return _groups(shape, self._beside, self.machine.ranks_per_node, self.run, self.everyone)

    def plan(self, shape: Sizes3, groups: Mapping[str, Group] | None = None) -> ProductPlan:
        """Return the plan of the product on a grid."""
        groups, nodes = groups or self.groups(shape), self.everyone.nodes
        plan = ProductPlan(*self.product, self.dtype, GridShape(*shape), node_maps=_node_maps(groups))
        return replace(plan, decomposed=True) if self.overlap == AUTO and decomposes(plan, nodes) else plan

    def simulated(self, plan: ProductPlan, groups: Mapping[str, Group]) -> Timeline:
        """Return the times of the actions of a plan on the first rank."""
        return simulate(tasks(product_actions(plan.first), self.machine, groups))

    def timed(self, shape: Sizes3) -> Timed:
        """Return the product on a grid, with its times."""
        groups = self.groups(shape)
        plan = self.plan(shape, groups)
        return Timed(plan, self.simulated(plan, groups), sum([groups[axis].nodes - 1 for axis in "xyz"]))

    def priced(self, shape: Sizes3) -> Candidate:
        """Return the grid as a candidate."""
        return self.timed(shape).candidate()


class Timed(NamedTuple):
    """A product on a grid, the times of its actions, and the number of borders of nodes that the grid's axes cross."""

    plan: ProductPlan
    timeline: Timeline
    crossed: int

    @property
    def grid(self) -> GridShape:
        return self.plan.grid

    @property
    def seconds(self) -> float:
        """Seconds of the product on the slowest rank."""
        return self.timeline.seconds

    @property
    def terms(self) -> dict[str, float]:
        """`Candidate.terms`."""
        return {name: spent for name, spent in terms_of(self.timeline).items() if spent}

    def candidate(self) -> Candidate:
        """Return the grid as a candidate, with its memory and bytes."""
        plan = self.plan
        received = max(sum(rank.bytes_received.values()) for rank in plan.fullest)
        return Candidate(plan.grid, self.seconds, self.terms, plan.held, received, preset_of(plan.grid))


@lru_cache(maxsize=4096)
def _groups(shape: Sizes3, beside: int, ranks_per_node: int, run: int, everyone: Group) -> Mapping[str, Group]:
    """Return the groups of the axes of a grid, and the group of all ranks."""
    found = groups_of(GridShape(*shape, beside), ranks_per_node, run)
    found[ALL] = everyone
    return found


def _node_maps(groups: Mapping[str, Group]) -> tuple[NodeMap, ...]:
    return tuple([NodeMap(groups[axis].inside, True, GATHERS_FROM) if groups[axis].even else FLAT for axis in "xyz"])
