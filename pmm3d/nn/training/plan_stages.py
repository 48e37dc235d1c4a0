"""Predicted step of a grid with an axis "pipe": dry runs of its stages give the times of passes, by which tables are
simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...action import Action
from ...layout import PIPE, GridShape
from ...model.candidates import Candidate
from ...model.machines import Group, Machine
from ...model.simulation import simulate as replay
from ...model.simulation.replay import tasks, terms_of
from ..pipeline import PipelineError, PipelineSchedule, TimeLine, Times, schedule_of, simulate
from ..recompute import Recomputed
from .dry_step import DrySteps, Step

SCHEDULES = "1f1b", "zb-h1", "zb-h2", "interleaved-2", "zb-v"
"""Schedules that are planned if grid.schedule is left out."""
SHOWN = 2
"""Number of micro-batches of the dry run. All but the last one cost as much as the first one."""
Terms = Mapping[str, float]


@dataclass(frozen=True)
class RankCosts:
    """Costs of a rank of a pipeline; seconds by terms as in `Candidate.terms`.

    passes              (kind, stage) -> seconds of one pass, of the kinds F, I and W
    rest                seconds outside passes: sums over data, the optimizer, the agreement
    activations         stage -> bytes of a micro-batch from F to I
    saved_for_weights   stage -> bytes of a micro-batch from I to W
    received            bytes for each micro-batch, and further bytes
    memory              bytes by kind in a step of `SHOWN` micro-batches
    message             bytes of the largest message to another stage
    """

    passes: Mapping[tuple[str, int], Terms]
    rest: Terms
    activations: Mapping[int, int]
    saved_for_weights: Mapping[int, int]
    received: tuple[int, int]
    memory: Mapping[str, int]
    message: int

    def of_stages(self, stages: Sequence[int]) -> RankCosts:
        """Return the same costs for other stages, in ascending order."""
        number = dict(zip(sorted(self.activations), stages))
        return replace(
            self,
            passes={(kind, number[stage]): terms for (kind, stage), terms in self.passes.items()},
            activations={number[stage]: nbytes for stage, nbytes in self.activations.items()},
            saved_for_weights={number[stage]: nbytes for stage, nbytes in self.saved_for_weights.items()},
        )

    @classmethod
    def of(cls, step: Step, machine: Machine, groups: Mapping[str, Group]) -> RankCosts:
        """Return the costs of a dry step of `SHOWN` micro-batches."""

        def priced(actions: Sequence[Action]) -> Terms:
            return terms_of(replay(tasks(_inside(actions), machine, groups)))

        passes, held = dict[str, tuple[Terms, int]](), 0
        for each in step.passes:
            passes[each.name], held = (priced(step.actions[each.first : each.stop]), each.held - held), each.held
        stages = sorted({int(name[:-2]) for name in passes if name.endswith("F0")})
        spent = _sum(SHOWN * [terms for name, (terms, _) in passes.items() if name.endswith("0")])
        rest = {name: max(0.0, value - spent.get(name, 0.0)) for name, value in priced(step.actions).items()}
        activations = {stage: max(0, passes[f"{stage}F0"][1]) for stage in stages}
        saved_for_weights = {
            stage: max(0, min(held, held + passes[f"{stage}I0"][1])) for stage, held in activations.items()
        }
        messages = [action.sent for action in step.actions if action.what == "begin" and action.axis == PIPE]
        first = sum(
            action.received
            for each in step.passes
            if each.name.endswith("0")
            for action in step.actions[each.first : each.stop]
        )
        first += sum(action.received for action in step.actions if action.axis == PIPE) // SHOWN
        return cls(
            {(kind, stage): passes[f"{stage}{kind}0"][0] for stage in stages for kind in "FIW"},
            rest,
            activations,
            saved_for_weights,
            (first, step.received - SHOWN * first),
            step.memory,
            max(messages, default=0),
        )


class StagedStep(NamedTuple):
    """A step on a grid with several stages.

    table   schedule of all micro-batches;   line   its simulation, in seconds
    costs   of each rank along pipe
    """

    table: PipelineSchedule
    line: TimeLine
    costs: Sequence[RankCosts]


def staged_step(
    steps: DrySteps, grid: GridShape, machine: Machine, groups: Mapping[str, Group], schedule: str
) -> StagedStep:
    """Return the step by one schedule. Raises Pmm3dError as `staged_candidates`."""
    table = schedule_of(schedule, grid.stages, steps.micro_batches)
    shown = _shown(tuple(table.stages.values()))
    costs = _costs(steps.staged(shown), shown, grid, machine, groups)
    return StagedStep(table, _line(table, shown, costs, machine, groups), costs)


def staged_candidates(
    steps: DrySteps, grid: GridShape, machine: Machine, groups: Mapping[str, Group]
) -> Iterator[Candidate]:
    """Yield the step on a grid with several stages by the schedule of the configuration, or by each of `SCHEDULES`.

    Raises Pmm3dError if the grid is refused, or if the network has too few layers for the next schedule."""
    if Recomputed.named(steps.config.network.recompute).budget is not None:
        raise PipelineError(
            "network.recompute = bytes cannot be planned on a grid with pipe, because the choice depends on the "
            "micro-batches in flight: plan grids without pipe, or other values of network.recompute"
        )
    section, known = steps.config.grid, dict[tuple[int, ...], tuple[PipelineSchedule, list[RankCosts]]]()
    for name in [section.schedule] if section.schedule else SCHEDULES:
        table = schedule_of(name, grid.stages, steps.micro_batches)
        if len(table.chains) > 1:
            raise PipelineError(
                f"{name} cannot be planned, because it has two copies of the network: set grid.shape, "
                "or another grid.schedule"
            )
        places = tuple(table.stages.values())
        if places not in known:
            shown = _shown(places)
            known[places] = shown, _costs(steps.staged(shown), shown, grid, machine, groups)
        yield _candidate(name, table, *known[places], grid, machine, groups)


def _costs(
    steps: DrySteps, shown: PipelineSchedule, grid: GridShape, machine: Machine, groups: Mapping[str, Group]
) -> list[RankCosts]:
    """Return the costs of each rank along pipe. Of ranks with equal stages, such as equal blocks, one is run dry.

    All blocks are run, because work memory and waits along data are not linear in the number of blocks."""
    costs, kinds = list[RankCosts](), list[Any]()
    for index in range(grid.stages):
        own = sorted(stage for stage, rank in shown.stages.items() if rank == index)
        like = kinds.index(kinds[index]) if kinds else index
        if like == index:
            step = steps.of(grid, machine.ranks_per_node, grid.rank(grid.position(0)._replace(**{PIPE: index})))
            kinds = kinds or [*step.kinds]
            costs.append(RankCosts.of(step, machine, groups))
        else:
            costs.append(costs[like].of_stages(own))
    return costs


def _shown(places: Sequence[int]) -> PipelineSchedule:
    """Return a table of `SHOWN` micro-batches with separate I and W. places: rank of each stage."""
    lines = [list[str]() for _ in range(1 + max(places))]
    for kinds, stages in (("F", [*enumerate(places)]), ("IW", [*enumerate(places)][::-1])):
        for stage, rank in stages:
            lines[rank] += [f"{stage}{kind}{micro}" for micro in range(SHOWN) for kind in kinds]
    return PipelineSchedule.read("\n".join(map(",".join, lines)))


def _line(
    table: PipelineSchedule,
    shown: PipelineSchedule,
    ranks: Sequence[RankCosts],
    machine: Machine,
    groups: Mapping[str, Group],
) -> TimeLine:
    """Return the simulation of the passes of all micro-batches."""
    forward, backward, weight = (
        [sum(ranks[shown.stages[stage]].passes[kind, stage].values()) for stage in sorted(shown.stages)]
        for kind in "FIW"
    )
    message = machine.collective_in_step("shift", groups[PIPE], max(rank.message for rank in ranks))
    return simulate(table, Times(forward, backward, weight, message))


def _candidate(
    name: str,
    table: PipelineSchedule,
    shown: PipelineSchedule,
    ranks: Sequence[RankCosts],
    grid: GridShape,
    machine: Machine,
    groups: Mapping[str, Group],
) -> Candidate:
    rank_of, stages = shown.stages, sorted(shown.stages)
    line, micro_batches = _line(table, shown, ranks, machine, groups), table.micro_batches
    slowest = max(range(len(ranks)), key=lambda rank: line.work[rank])
    seconds = line.makespan + max(sum(rank.rest.values()) for rank in ranks)
    costs = ranks[slowest]
    terms = _sum(
        [costs.rest, *({key: micro_batches * value for key, value in spent.items()} for spent in costs.passes.values())]
    )
    held = [
        [getattr(ranks[rank_of[stage]], kind)[stage] for stage in stages]
        for kind in ("activations", "saved_for_weights")
    ]
    before, after = simulate(shown).peak_bytes(*held), line.peak_bytes(*held)
    memory = [
        {
            **rank.memory,
            "work": rank.memory["work"] - less + more,
            "batches": rank.memory["batches"] * micro_batches // SHOWN,
        }
        for rank, less, more in zip(ranks, before, after)
    ]
    received = max(rank.received[0] * micro_batches + rank.received[1] for rank in ranks)
    return Candidate(
        grid,
        seconds,
        {**terms, PIPE: max(0.0, seconds - sum(terms.values()))},
        max(memory, key=lambda kinds: sum(kinds.values())),
        received,
        schedule=name,
    )


def _inside(actions: Sequence[Action]) -> list[Action]:
    """Return the actions without messages between stages, because the simulated table contains their time."""
    between = {action.number for action in actions if action.what == "begin" and action.axis == PIPE}
    return [action for action in actions if action.what not in ("begin", "wait") or action.number not in between]


def _sum(terms: Sequence[Terms]) -> dict[str, float]:
    total = dict[str, float]()
    for name, value in (item for each in terms for item in each.items()):
        total[name] = total.get(name, 0.0) + value
    return total
