"""Cut of a network into stages that minimizes the work of the largest stage, within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from ...text import in_bytes
from .table import PipelineError

TRIES = 8
"""Number of memory limits for a stage that are tried if a rank has several stages."""


class Cost(NamedTuple):
    """Cost of a layer. flop: of the forward pass of a micro-batch. weights: bytes of weights, gradients and AdamW's
    state. saved: bytes of a micro-batch that the layer saves for the backward pass."""

    flop: float
    weights: int
    saved: int


def cut_by_cost(
    costs: Sequence[Cost], ranks: Sequence[Sequence[int]], live: Sequence[int], memory: float | None
) -> list[int]:
    """Number of layers of each stage. Raises PipelineError if no cut fits.

    `ranks` contains, for each stage, the ranks with a copy of the stage. `live` contains, for each rank, the number of
    micro-batches whose activations the rank keeps at once. `memory` is the limit of a rank in bytes, or None.

        >>> costs = [Cost(flop, 10, 1) for flop in (1, 1, 4, 2, 2)]
        >>> cut_by_cost(costs, [[0], [1]], [2, 1], None), cut_by_cost(costs, [[0], [1]], [2, 1], 35)
        ([3, 2], [2, 3])
    """

    def stage_bytes(stage: int, begin: int, end: int) -> float:
        return sum(each.weights for each in costs[begin:end]) + max(live[rank] for rank in ranks[stage]) * sum(
            each.saved for each in costs[begin:end]
        )

    def of_ranks(counts: Sequence[int]) -> list[float]:
        """Bytes of each rank: weights of all its stages, and activations of its stage with the most activations."""
        held = [0.0] * len(live)
        for rank in range(len(live)):
            own = [
                costs[begin:end]
                for stage, (begin, end) in enumerate(pairwise([0, *accumulate(counts)]))
                if rank in ranks[stage]
            ]
            held[rank] = sum(each.weights for stage in own for each in stage) + live[rank] * max(
                sum(each.saved for each in stage) for stage in own
            )
        return held

    flop = [0, *accumulate(each.flop for each in costs)]
    several = sum(map(len, ranks)) > len(live)
    for part in range(TRIES if several and memory is not None else 1):
        limit = inf if memory is None else memory * (1 - part / TRIES)
        counts = _least(
            len(costs),
            len(ranks),
            lambda stage, begin, end: flop[end] - flop[begin] if stage_bytes(stage, begin, end) <= limit else inf,
        )
        if counts and (memory is None or max(of_ranks(counts)) <= memory):
            return counts
    smallest = _least(len(costs), len(ranks), stage_bytes)
    assert smallest is not None and memory is not None
    held = of_ranks(smallest)
    if max(held) <= memory:
        return smallest
    raise PipelineError(
        f"Pipeline: no cut fits in memory={in_bytes(memory)} a rank. The cut {smallest} needs the "
        f"least, {in_bytes(max(held))} on rank {held.index(max(held))} along pipe. Use more ranks, "
        "smaller micro-batches, or recompute=True"
    )


def _least(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> list[int] | None:
    """Cut that minimizes the largest cost of a stage, or None if each cut has an infinite cost."""
    best, origins = [0.0, *[inf] * layers], list[list[int]]()
    for stage in range(stages):
        extended, origin = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                if best[begin] < extended[end]:
                    value = max(best[begin], cost(stage, begin, end))
                    if value < extended[end]:
                        extended[end], origin[end] = value, begin
        best = extended
        origins.append(origin)
    if best[layers] == inf:
        return None
    ends = [layers]
    for origin in reversed(origins):
        ends.append(origin[ends[-1]])
    return [end - begin for begin, end in pairwise(reversed(ends))]
