"""The actions of one rank in a product, from its plan. A dry run of `matmul` records the same list.

`product/multiply.py` executes these actions with arrays, and tests compare the two. `pmm3d.model.product_costs`
simulates them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..action import Action
from ..layout import ALL, LOW_PRECISION, WIDENED_DEPTH, itemsize, multiplied_in, offsets
from .plan import ProductPlan, RankPlan
from .rounds import Round, Schedule, Volume, count, in_order, one_by_one
from .schedule import gather_schedule, reduce_schedule

AGREEMENT_BYTES = 24
"""Bytes of the all-reduce by which the ranks compare the arguments of a product."""
FEW = 16
"""Number of rounds of a gather up to which each message is an action. With more rounds, each round is an action."""


def product_actions(rank: RankPlan) -> list[Action]:
    """Return the actions of a product of one panel whose operands are in the layouts of the plan.

    A decomposed product gathers B first. Then it multiplies the rows of A in the order in which they arrive, and sends
    the rows of C that other ranks keep as soon as they are computed.

        >>> from pmm3d.layout import FIRST, GridShape
        >>> from .plan import ProductPlan
        >>> rank = ProductPlan(64, 64, 64, "float64", GridShape(1, 2, 2)).on_rank(FIRST)
        >>> for action in product_actions(rank)[2:]:
        ...     print(action)
        begin #2 all_gather (gather B) on axis z: sends 8,192, receives 8,192 bytes
        wait for #2
        gemm 32 x 64 x 32 float64
        begin #3 reduce_scatter (reduce C) on axis y: sends 8,192, receives 8,192 bytes
        wait for #3
    """
    plan, done = rank.plan, _Actions()
    m_axis, k_axis, n_axis = plan.axis_roles
    if plan.grid.size > 1:
        done.wait(done.begin(ALL, "all_reduce", "matmul", Volume(AGREEMENT_BYTES, AGREEMENT_BYTES)))
    if plan.decomposed:
        _decomposed(rank, done)
        return done.actions
    gathers = [
        done.begin(axis, "all_gather", phase, rank.volumes[axis])
        for phase, axis in (("gather A", n_axis), ("gather B", m_axis))
    ]
    for number in gathers:
        done.wait(number)
    done.gemm(rank.rows, rank.cols, rank.depth, plan)
    done.wait(done.begin(k_axis, "reduce_scatter", "reduce C", rank.volumes[k_axis]))
    return done.actions


class _Actions:
    """A list of actions under construction. Collectives are numbered from 1. A collective without bytes has the number
    0 and is left out."""

    def __init__(self) -> None:
        self.actions = list[Action]()
        self._open = set[int]()
        self._last = 0

    def begin(
        self,
        axis: str,
        operation: str,
        phase: str,
        volume: Volume,
        after: Sequence[int] = (),
        collective_bytes: int = 0,
        message: int = 0,
    ) -> int:
        """Begin a collective, or one message of a collective of `collective_bytes`. Return its number."""
        if not volume.received and not volume.sent:
            return 0
        self._last += 1
        self._open.add(self._last)
        self.actions.append(
            Action(
                "begin",
                axis=axis,
                operation=operation,
                phase=phase,
                sent=volume.sent,
                received=volume.received,
                number=self._last,
                after=tuple(filter(None, after)),
                collective_bytes=collective_bytes,
                message=message,
            )
        )
        return self._last

    def wait(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self.actions.append(Action("wait", number=number))

    def gemm(self, m: int, n: int, k: int, plan: ProductPlan) -> None:
        """Add a GEMM, with the copies of `widened_gemm`."""
        if not m * n * k:
            return
        dtype, c_dtype = plan.dtype, plan.c_dtype
        wide = multiplied_in(dtype, c_dtype, plan.gemm_copies)
        if wide == dtype:
            self.actions.append(Action("gemm", m, n, k, dtype, form="nn"))
            return
        for start in range(0, k, WIDENED_DEPTH):
            depth = min(WIDENED_DEPTH, k - start)
            self._copy((m + n) * depth, dtype, wide)
            self.actions.append(Action("gemm", m, n, depth, wide, form="nn"))
        if c_dtype in LOW_PRECISION:
            self._copy(m * n, wide, c_dtype)

    def _copy(self, elements: int, *dtypes: str) -> None:
        nbytes = elements * sum(map(itemsize, dtypes))
        self.actions.append(Action("pass", operation="copy", nbytes=nbytes))


class _Messages:
    """Adds the messages of a collective as separate actions. `row_bytes` is the bytes of a row of the schedule."""

    def __init__(self, done: _Actions, axis: str, operation: str, phase: str, schedule: Schedule, row_bytes: int):
        self._done, self._what, self._schedule, self._row_bytes = done, (axis, operation, phase), schedule, row_bytes
        self._collective_bytes, self._begun = max(count(schedule, row_bytes)[:2]), 0

    def begin(self, rounds: Sequence[Round], after: Sequence[int] = ()) -> int:
        """Begin the messages of these rounds as one action. Return its number."""
        volume = count(self._schedule._replace(rounds=tuple(rounds)), self._row_bytes)
        self._begun += 1
        return self._done.begin(*self._what, volume, after, self._collective_bytes, self._begun)


def _decomposed(rank: RankPlan, done: _Actions) -> None:
    """Add the actions of a decomposed product (`comm/arrivals.py`)."""
    (m_axis, k_axis, n_axis), size = rank.plan.axis_roles, itemsize(rank.plan.dtype)
    gather_b = done.begin(m_axis, "all_gather", "gather B", rank.volumes[m_axis])
    arriving, before = [(0, rank.rows, 0)], list[int]()
    if rank.a.gathered:
        first = offsets(rank.a.counts)[rank.a.index]
        arriving, row = [(first, first + rank.a.counts[rank.a.index], 0)], size * rank.depth
        gather = gather_schedule(rank.a.counts, rank.a.index, row, rank.node_map(rank.a))
        messages = _Messages(done, n_axis, "all_gather", "gather A", gather, row)
        for each in gather.rounds:
            begun = list[int]()
            for pair in one_by_one(each) if len(gather.rounds) <= FEW else [each]:
                begun.append(messages.begin([pair], before))
                arriving += [(span.start, span.stop, begun[-1]) for _, span in pair.receives]
            before = begun
    done.wait(gather_b)
    blocks, leaving, rest, sent = [(0, rank.rows)], list[Round](), list[Round](), list[int]()
    if rank.reduces:
        row = itemsize(rank.plan.c_dtype) * rank.cols
        sums = reduce_schedule(rank.c_counts, rank.k_index, rank.plan.c_dtype, rank.node_maps[1])
        messages, (start, *rest) = _Messages(done, k_axis, "reduce_scatter", "reduce C", sums, row), sums.rounds
        leaving, blocks = one_by_one(start), in_order(start, rank.rows)
    for number, (low, high) in enumerate(blocks):
        for first, last, message in arriving:
            rows = min(high, last) - max(low, first)
            if rows > 0:
                done.wait(message)
                done.gemm(rows, rank.cols, rank.depth, rank.plan)
        if number < len(leaving):
            sent.append(messages.begin([leaving[number]]))
    if rest:
        sent = [messages.begin(rest, sent)]
    for number in sent:
        done.wait(number)
