"""Recomputation under a budget in the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.recomputation import Chain
from ...product import DistMatrix
from ..recompute_budget import Budget, Chosen, cut_at, layers_of, operations_of
from ..tensor import Tensor, as_tensor
from .simulation import simulate
from .table import PipelineError

if TYPE_CHECKING:
    from .network import Pipeline


def choices_of(network: Pipeline, budget: Budget, largest: DistMatrix | Tensor, micros: int) -> list[Chosen]:
    """Return the choices for the stages of this rank, and set `budget.chosen`.

    largest   the largest micro-batch;   micros   their number
    """
    table, depth = network.table(micros), network.depth
    if any(part.kind in "IW" for line in table.actions for action in line for part in action.each):
        raise PipelineError(
            f"{table.name}: recompute as a number of bytes needs whole backward passes, as in 1f1b, gpipe or "
            'interleaved. Use one of them, or recompute="full"'
        )
    groups, line, made, words = cut_at(budget.groups, network._bounds), simulate(table), list[Chosen](), ""
    operations = operations_of(network.dry, groups, [as_tensor(largest)], network.grid)
    places = [
        [place for place, group in enumerate(groups) if group.begin in network._places(stage)] for stage in range(depth)
    ]
    for rank in range(network.ranks):
        own = [stage for stage, holder in network.rank_of.items() if holder == rank]
        live = [line.peak_bytes([stage == each for each in sorted(network.rank_of)])[rank] for stage in own]
        chains = [
            Chain(tuple(operations[place] for place in places[stage % depth]), number)
            for stage, number in zip(own, live)
        ]
        choice = budget.choice(chains, [largest], network.parent_grid, f" of rank {rank} along pipe")
        if rank == network.index:
            words = budget.chosen
            for stage, parts in zip(own, choice.parts):
                of_stage = [groups[place] for place in places[stage % depth]]
                made.append(Chosen(layers_of(network.stages[stage], of_stage, parts)))
    budget.chosen = words
    return made
