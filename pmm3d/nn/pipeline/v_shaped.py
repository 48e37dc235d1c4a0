"""Schedules whose stages form a V: rank r holds the stages r and 2p-1-r, so all ranks need the same memory.

p, m, F, B and W are as in `schedules`, with the times of both stages of a rank. A peak counts a micro-batch once for
each stage.
"""

from __future__ import annotations

from collections import Counter

from .simulation import Times
from .table import PipelineAction, PipelineSchedule, check_sizes
from .zero_bubble import Policy, best_of, checked_limit, fill_bubbles


def zb_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """ZB-V (Qi et al., arXiv 2401.10241).

    Bubble 0 if F = B = W and m >= 2p - 1. Peak 2p, which is the memory of the first rank in 1F1B.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    number = max(micro_batches, 2 * ranks - 1)  # `add` skips passes of micro-batches that do not exist
    tables = []
    for rank in range(ranks):
        stages, done, actions = (rank, 2 * ranks - 1 - rank), Counter[str](), list[PipelineAction]()

        def add(*passes: str) -> None:
            for each in passes:
                if done[each] < micro_batches:
                    actions.append(PipelineAction(each[0], stages[int(each[1])], done[each]))
                done[each] += 1

        add(*["F0"] * (2 * (ranks - rank) - 1), *["F1", "F0"] * rank, *["F1", "I1", "W1"] * (ranks - rank))
        while done["F1"] < number:
            add(*["F0"] * (done["F0"] < number), "I0", "W0", "F1", "I1", "W1")
        add(*["I0", "I1"] * rank, *["I0", "W0"] * (ranks - rank), *["W1"] * rank)
        add(*["W0"] * (number - done["W0"]))
        tables.append(actions)
    return PipelineSchedule.of("zb-v", tables)


def v_half(ranks: int, micro_batches: int, times: Times = Times(), limit: float | None = None) -> PipelineSchedule:
    """V-Half (Qi et al., arXiv 2405.15362): a search within about half of the memory of 1F1B.

    Parameters
    ----------
    ranks, micro_batches : int
        Numbers of ranks and of micro-batches.
    times : Times
        Times for which the bubble is minimized. Default: all 1.
    limit : float or None
        Micro-batches that a rank may hold. A micro-batch counts 1/2 in each stage, from F to W. Default: p/2 + 1.

    Raises
    ------
    PipelineError
        If no schedule is found within the limit.

    Notes
    -----
    The bubble is at most half of the bubble of 1F1B if F = B = W and m >= 2p.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    stages = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    most = int(2 * checked_limit("v-half", ranks / 2 + 1 if limit is None else limit))
    policies = [
        Policy(most, 1, [max(1, int(number - step * rank)) for rank in range(ranks)])
        for number in (most - 1, most - 2)
        for step in (0, 0.2, 0.3, 0.4, 0.5)
    ]
    return best_of("v-half", (fill_bubbles("v-half", stages, micro_batches, times, each) for each in policies), times)


def v_min(ranks: int, micro_batches: int) -> PipelineSchedule:
    """V-Min (Qi et al., arXiv 2405.15362): about a third of the memory of 1F1B, with two thirds of its bubble.

    A micro-batch has six passes on a rank, at fixed places in a period of six passes. If F = B = W and p > 1, the
    bubble is at most (2p - 5/2)(F+B+W)/3, or (2p - 3/2)(F+B+W)/3 if 3 divides p. Peak at most 2 floor((p+1)/3) + 2.
    """
    check_sizes(ranks=ranks, micro_batches=micro_batches)
    tables, later = [], 2 * (ranks % 3 == 0)  # delays I, whose place would otherwise be the place of F
    for rank in range(ranks):
        first, second = rank, 2 * ranks - 1 - rank
        places = {
            ("F", first): rank,
            ("F", second): 2 * ranks - 1 - rank,
            ("I", second): 2 * ranks + rank + later,
            ("I", first): 4 * ranks - 1 - rank + later,
        }
        for stage in (second, first):
            taken = {place % 6 for place in places.values()}
            places["W", stage] = next(
                place for place in range(places["I", stage] + 1, places["I", stage] + 7) if place % 6 not in taken
            )
        tables.append(
            [
                action
                for _, action in sorted(
                    (place + 6 * micro, PipelineAction(kind, stage, micro))
                    for (kind, stage), place in places.items()
                    for micro in range(micro_batches)
                )
            ]
        )
    return PipelineSchedule.of("v-min", tables)
