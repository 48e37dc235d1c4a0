"""The plans of a grid's recent products."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from ..model.plan import ProductPlan, RankPlan

Planned = tuple[ProductPlan, RankPlan | None]
KEPT_PLANS = 256
"""Number of plans that a grid caches. A plan takes a few KiB."""


class RecentPlans:
    """Cache of the last KEPT_PLANS plans; the least recently used plan is dropped first.

    A plan depends on its key alone. Ranks that cache different plans therefore still plan alike.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Planned] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], Planned]) -> Planned:
        """Return the plan of that key; make it if it is not cached."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        self._plans[key] = planned = make()
        if len(self._plans) > KEPT_PLANS:
            self._plans.popitem(last=False)
        return planned
