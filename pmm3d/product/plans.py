"""The plans of a grid's recent products."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from ..model.plan import ProductPlan, RankPlan

Planned = tuple[ProductPlan, RankPlan | None]
KEPT_PLANS = 256
"""Products of different shapes, types or options in a row that are planned once; a plan takes some KiB."""


class RecentPlans:
    """The last plans that were asked for, up to KEPT_PLANS: the one whose last use is longest ago goes first.

    A plan follows from its key alone, so that ranks that keep others still plan the same.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Planned] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], Planned]) -> Planned:
        """The plan of that key, made if it is not kept."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        self._plans[key] = planned = make()
        if len(self._plans) > KEPT_PLANS:
            self._plans.popitem(last=False)
        return planned
