"""What a grid keeps of its products: plans of the recent ones; and of small ones that are repeated the messages, which
go ahead of the agreement from the third time on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from ..arrays import Array
from ..comm import Grid
from ..comm.agreement import Vote
from ..comm.ahead import Ahead
from ..model.plan import ProductPlan, RankPlan
from .posted import Posted
from .stored import StoredMatrix

KEPT_BYTES = 2**26
"""Of all products that are kept, with their operands, on the fullest rank; one has half of it at most: a larger one
waits for its bytes."""
KEEP = 1
"""What a rank says in the agreement on a product that came before and may be kept."""
RECENT = 64
"""Products whose second time is noticed."""
OPTIONS = int, float, complex, bool, str, type(None)
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


class Product(Protocol):
    """What was prepared of a product."""

    plan: ProductPlan

    @property
    def can_post(self) -> bool: ...

    def posted(self, held: ExitStack, number: int = 0) -> Posted | None: ...

    def multiply(self) -> None: ...


class Kept(NamedTuple):
    """A product of which all ranks hold the requests.

    posted   None on a rank that has no part in it
    arrays   the shards: while they are held, their ids are theirs
    """

    number: int
    product: Any
    posted: Posted | None
    arrays: list[Array]
    held: ExitStack


class KeptProducts:
    """The small products of a grid that came twice, with the same matrices as out too: the same on all ranks.

    They hold their matrices. The one whose last use is longest ago goes first where there are more than can have
    numbers (`pmm3d.comm.ahead`), or take more than KEPT_BYTES; all go when one rank does not know what others repeat,
    and with the grid.
    """

    def __init__(self, grid: Grid):
        self._grid, self._kept = grid, OrderedDict[Hashable, Kept]()
        self._recent = OrderedDict[Hashable, None]()
        grid.at_close(self.clear)

    @classmethod
    def of(cls, grid: Grid) -> KeptProducts:
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        kept: KeptProducts = grid.attached[cls]
        return kept

    def key(self, matrices: Sequence[Any], options: Sequence[Any]) -> Hashable | None:
        """By which the same call is known again on this rank; None of one that is not kept, as those whose C is new
        each time."""
        of_grid = all(isinstance(matrix, StoredMatrix) and matrix.grid is self._grid for matrix in matrices)
        if not of_grid or not self._grid.engine.check or not all(type(option) in OPTIONS for option in options):
            return None
        return (*((id(matrix), id(matrix.memory)) for matrix in matrices),
                *((type(option), option) for option in options))

    def find(self, key: Hashable | None) -> Kept | None:
        return self._kept.get(key)

    def wish(self, key: Hashable | None, product: Product) -> int:
        """What this rank says in the agreement on a product that it has not kept."""
        if key is None or not product.can_post or 2 * product.plan.memory > KEPT_BYTES:
            return 0
        again = key in self._recent
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return KEEP if again else 0

    def heard(self, vote: Vote, key: Hashable | None, product: Any, borrowed: ExitStack) -> None:
        """After the agreement: keep it, with what it borrowed, if all ranks would."""
        if vote.common is None:
            self.clear()
        if vote.common != KEEP:
            return
        ahead = self._grid.ahead
        while (number := ahead.free_number()) is None or product.plan.memory + self._bytes() > KEPT_BYTES:
            self._free(self._kept.popitem(last=False)[1])
        held = borrowed.pop_all()
        posted = product.posted(held, number)
        ahead.keep(number, [] if posted is None else posted.exchanges)
        self._kept[key] = Kept(number, product, posted, [matrix.memory for matrix in product.natives], held)

    def repeat(self, key: Hashable, passed: Sequence[Any]) -> Any:
        """The product that was found; returns C. Collective; where other ranks do not repeat it, as if it were not
        kept."""
        known = self._kept[key]
        with self._grid.together("matmul", *passed) as vote:
            vote.mine = Ahead.said(known.number)
            if known.posted is not None:
                known.posted.post()
        if vote.common == vote.mine:
            self._kept.move_to_end(key)
            if known.posted is not None:
                known.posted.posted()
            known.product.out.fills += 1
        else:
            known.product.multiply()
            self.clear()
        return known.product.out

    def _bytes(self) -> int:
        return sum(kept.product.plan.memory for kept in self._kept.values())

    def clear(self) -> None:
        """Keep none. Collective."""
        while self._kept:
            self._free(self._kept.popitem()[1])

    def _free(self, kept: Kept) -> None:
        self._grid.ahead.drop(kept.number)
        kept.held.close()
