"""Schedules from a search: W fills bubbles, within a memory limit, for given times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from .simulation import Times, simulate
from .table import PipelineAction, PipelineError, PipelineSchedule, check_sizes

WEIGHT_MEMORY = 0.4
"""Share of a micro-batch's memory that W needs after I. In a transformer with a heads, sequences of s tokens and width
h, this is 32 / (34 + 5 a s / h) (Qi et al., arXiv 2401.10241, Table 1)."""


class Policy(NamedTuple):
    """Rules by which a rank chooses its next action.

    F begins only if it fits within `limit`, in (stage, micro-batch) pairs. `weight` is the memory that W needs after I,
    as a share of a forward pass's memory. `first` limits, for each rank, the forward passes of its first stage before
    their I. W runs if the next other action starts later than `patience` times the time of W.
    """

    limit: float
    weight: float
    first: Sequence[float]
    patience: float = 0.0


def fill_bubbles(
    name: str, stages: Sequence[Sequence[int]], micro_batches: int, times: Times, policy: Policy
) -> PipelineSchedule | None:
    """Choose the actions of all ranks in the order of time, with I before F before W. Return None for a deadlock."""
    rank_of = {stage: rank for rank, own in enumerate(stages) for stage in own}
    last, ends, free = len(rank_of) - 1, dict[tuple[str, int, int], float](), [0.0] * len(stages)
    counts = {(kind, stage): 0 for kind in "FIW" for stage in rank_of}
    actions = [list[PipelineAction]() for _ in stages]

    def arrival(kind: str, stage: int, other: int, micro: int) -> float:
        """Time at which the result of another stage arrives on the rank of this stage."""
        away = rank_of[other] != rank_of[stage]
        return ends.get((kind, other, micro), inf) + times.communication * away

    def candidates(rank: int) -> Iterator[tuple[float, int, int, str]]:
        """Yield (start, order, -stage, kind) of passes whose start is known."""
        for number, stage in enumerate(stages[rank]):
            forwards, backwards = counts["F", stage], counts["I", stage]
            if backwards < forwards:
                needed = ends["F", stage, backwards]
                if stage < last:
                    needed = max(needed, arrival("I", stage, stage + 1, backwards))
                if needed < inf:
                    yield max(free[rank], needed), 0, -stage, "I"
            fits = held(rank) + 1 <= policy.limit + 1e-9
            if forwards < micro_batches and fits and (number or forwards - backwards < policy.first[rank]):
                needed = arrival("F", stage, stage - 1, forwards) if stage else 0.0
                if needed < inf:
                    yield max(free[rank], needed), 1, -stage, "F"

    def held(rank: int) -> float:
        return sum(
            counts["F", stage] - (1 - policy.weight) * counts["I", stage] - policy.weight * counts["W", stage]
            for stage in stages[rank]
        )

    def next_of(rank: int) -> tuple[float, int, int, str] | None:
        soonest = min(candidates(rank), default=None)
        waiting = [stage for stage in stages[rank] if counts["W", stage] < counts["I", stage]]
        if waiting:
            stage = max(waiting, key=lambda stage: (counts["I", stage] - counts["W", stage], stage))
            room = policy.patience * times.of(PipelineAction("W", stage, 0))
            if soonest is None or soonest[0] - free[rank] > room:
                return free[rank], 2, -stage, "W"
        return soonest

    chosen = {rank: next_of(rank) for rank in range(len(stages))}
    for _ in range(3 * len(rank_of) * micro_batches):
        ready = [(first, rank) for rank, first in chosen.items() if first is not None]
        if not ready:
            return None
        (start, _, negative, kind), rank = min(ready)
        stage = -negative
        action = PipelineAction(kind, stage, counts[kind, stage])
        counts[kind, stage] += 1
        actions[rank].append(action)
        ends[action[:3]] = free[rank] = start + times.of(action)
        for other in {rank, rank_of.get(stage - 1, rank), rank_of.get(stage + 1, rank)}:
            chosen[other] = next_of(other)
    return PipelineSchedule.of(name, actions)


def checked_limit(name: str, limit: float) -> float:
    """The limit of micro-batches that a rank may hold. Raises PipelineError if the limit is not positive and finite."""
    if not 0 < limit < inf:
        raise PipelineError(f"{name}: the limit of micro-batches on a rank must be a positive number, got {limit}")
    return limit


def best_of(name: str, tables: Iterable[PipelineSchedule | None], times: Times) -> PipelineSchedule:
    """The first table with the smallest `cost`."""
    made = [table for table in tables if table is not None]
    if not made:
        raise PipelineError(
            f"{name}: no schedule was found within this limit of memory. Allow more memory, or use fewer ranks"
        )
    return min(made, key=lambda table: simulate(table, times).cost)


def zb_1p(ranks: int, micro_batches: int, times: Times = Times(), limit: float | None = None) -> PipelineSchedule:
    """ZB-1p: the smallest bubble that a search finds with the memory of 1F1B (Qi et al., arXiv 2401.10241).

    Parameters
    ----------
    ranks, micro_batches : int
        Numbers of ranks and of micro-batches.
    times : Times
        Times for which the bubble is minimized. Default: all 1.
    limit : float or None
        Micro-batches that a rank may hold. A micro-batch counts 1 from F to I, and 0.4 from I to W. Default: p.

    Raises
    ------
    PipelineError
        If no schedule is found within the limit.
    """
    return _zero_bubble("zb-1p", ranks, micro_batches, times, ranks if limit is None else limit)


def zb_2p(ranks: int, micro_batches: int, times: Times = Times(), limit: float | None = None) -> PipelineSchedule:
    """ZB-2p: `zb_1p` with the default limit 2p, for a bubble of almost 0 if W takes no longer than F and I."""
    return _zero_bubble("zb-2p", ranks, micro_batches, times, 2 * ranks if limit is None else limit)


def _zero_bubble(name: str, ranks: int, micro_batches: int, times: Times, limit: float) -> PipelineSchedule:
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    most = int(checked_limit(name, limit))
    policies = [
        Policy(limit, WEIGHT_MEMORY, [max(1, number - step * rank) for rank in range(ranks)], part)
        for number in (most, most - 1)
        for step in (1, 2)
        for part in (0.0, 0.3, 0.5, 0.98)
    ]
    stages = [(rank,) for rank in range(ranks)]
    return best_of(name, (fill_bubbles(name, stages, micro_batches, times, policy) for policy in policies), times)
