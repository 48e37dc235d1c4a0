"""Predicted step of a grid with an axis "pipe": dry runs of its stages give the times of passes, by which tables are
simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ...action import Action
from ...layout import PIPE, GridShape, part_sizes
from ...model.candidates import Candidate
from ...model.machines import Group, Machine
from ...model.simulation import simulate as replay
from ...model.simulation.replay import tasks, terms_of
from ..pipeline import PipelineError, PipelineSchedule, Times, schedule_of, simulate
from .dry_step import DrySteps, Step

SCHEDULES = "1f1b", "zb-h1", "zb-h2", "interleaved-2", "zb-v"
"""Schedules that are planned if grid.schedule is left out."""
SHOWN = 2
"""Number of micro-batches of the dry run. All but the last one cost as much as the first one."""
LEAST_BLOCKS = 3
"""Blocks of the smallest stage of a dry run. With fewer, the memory is not yet linear in the blocks."""
WORTH = 0.9
"""Share of the blocks of a network up to which two smaller networks are run in its place."""
SURELY = 1.0005
"""Factor from which a rough time is surely the longer one. The error of a rough time is below 0.00001."""
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

    def further(self, earlier: RankCosts, times: float) -> RankCosts:
        """Return these costs plus `times` their difference from the earlier ones, of the same stages."""

        def grown(now: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
            return {name: max(0.0, value + times * (value - before.get(name, 0.0))) for name, value in now.items()}

        def counted(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
            return {name: round(value) for name, value in grown(now, before).items()}

        return replace(
            self,
            passes={key: grown(terms, earlier.passes[key]) for key, terms in self.passes.items()},
            rest=grown(self.rest, earlier.rest),
            activations=counted(self.activations, earlier.activations),
            saved_for_weights=counted(self.saved_for_weights, earlier.saved_for_weights),
            received=tuple(round(now + times * (now - before)) for now, before in zip(self.received, earlier.received)),  # type: ignore[arg-type]
            memory=counted(self.memory, earlier.memory),
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


def staged_candidates(
    steps: DrySteps, grid: GridShape, machine: Machine, groups: Mapping[str, Group], limit: float = inf
) -> Iterator[Candidate]:
    """Yield the step on a grid with several stages by the schedule of the configuration, or by each of `SCHEDULES`. A
    schedule with other stages is left out if an earlier one is faster and keeps `limit` bytes on a rank.

    Raises Pmm3dError if the grid is refused, or if the network has too few layers for the next schedule."""
    section, known = steps.config.grid, dict[tuple[int, ...], tuple[_Placed, list[RankCosts]]]()
    block: _Block | None = None
    fastest = inf
    for name in [section.schedule] if section.schedule else SCHEDULES:
        table = schedule_of(name, grid.stages, steps.micro_batches)
        if len(table.chains) > 1:
            raise PipelineError(
                f"{name} cannot be planned, because it has two copies of the network: set grid.shape, "
                "or another grid.schedule"
            )
        places = tuple(table.stages.values())
        if places not in known:
            placed = _Placed.of(steps, places, grid, machine, groups)
            rough = placed.rough(block) if block is not None and fastest < inf else []
            if rough and _candidate(name, table, placed, rough).seconds > SURELY * fastest:
                continue
            costs, block_of = placed.costs()
            known[places], block = (placed, costs), block or block_of
        found = _candidate(name, table, *known[places])
        if sum(found.memory.values()) <= limit:
            fastest = min(fastest, found.seconds)
        yield found


class _Block(NamedTuple):
    """Seconds that further blocks add to each pass, by kind, and outside passes. Their number is `_Placed.unit`."""

    passes: Mapping[str, Terms]
    rest: Terms


@dataclass(frozen=True)
class _Placed:
    """Dry steps of a network whose stages are on certain ranks.

    shown    table of `SHOWN` micro-batches
    layers   number of layers with parameters of each stage; () if they are not known before the network is made
    blocks   smallest number of blocks of a stage
    unit     number of blocks that stages can have more or less: of these, one is recomputed
    """

    steps: DrySteps
    shown: PipelineSchedule
    layers: Sequence[int]
    blocks: int
    unit: int
    grid: GridShape
    machine: Machine
    groups: Mapping[str, Group]

    @classmethod
    def of(
        cls, steps: DrySteps, places: Sequence[int], grid: GridShape, machine: Machine, groups: Mapping[str, Group]
    ) -> _Placed:
        shown = _shown(places)
        staged, every = steps.staged(shown), steps.config.network.recompute
        cut, stages, layers = staged.config.grid.cut, len(places), list[int]()
        if steps.blocks and not isinstance(cut, str):
            layers = list(cut or part_sizes(steps.blocks + 2, stages))  # the embedding and the head are layers too
        of_stages = [number - (place in (0, stages - 1)) for place, number in enumerate(layers)]
        unit = every if isinstance(every, int) else 1
        return cls(staged, shown, layers, min(of_stages, default=0), unit, grid, machine, groups)

    def fewer(self, least: int) -> int:
        """Return the largest number of units by which each stage can be smaller and keep this number of blocks."""
        return max(0, (self.blocks - least) // self.unit)

    def share(self, units: int) -> float:
        """Return the blocks of a network whose stages have this number of units less, as a share of all blocks."""
        return 1 - len(self.layers) * units * self.unit / max(1, self.steps.blocks)

    def run(self, units: int = 0) -> list[RankCosts]:
        """Return the costs of each rank along pipe, of a network whose stages have this number of units less. Of ranks
        with equal stages, such as equal blocks, one is run dry."""
        steps, fewer = self.steps, units * self.unit
        if fewer:
            steps = steps.of_blocks(steps.blocks - len(self.layers) * fewer).cut([each - fewer for each in self.layers])
        costs, kinds, grid = list[RankCosts](), list[Any](), self.grid
        for index in range(grid.stages):
            own = sorted(stage for stage, rank in self.shown.stages.items() if rank == index)
            like = kinds.index(kinds[index]) if kinds else index
            if like == index:
                rank = grid.rank(grid.position(0)._replace(**{PIPE: index}))
                step = steps.of(grid, self.machine.ranks_per_node, rank)
                kinds = kinds or [*step.kinds]
                costs.append(RankCosts.of(step, self.machine, self.groups))
            else:
                costs.append(costs[like].of_stages(own))
        return costs

    def costs(self) -> tuple[list[RankCosts], _Block | None]:
        """Return the costs of each rank, and those of further blocks if they are known.

        The costs of many blocks are extrapolated from two networks of few blocks, unless a rank may not keep all of its
        gathered weights."""
        units = self.fewer(LEAST_BLOCKS)
        if units < 2 or self.share(units) + self.share(units - 1) > WORTH:
            return self.run(), None
        one, two = self.run(units), self.run(units - 1)
        found = [after.further(before, units - 1) for before, after in zip(one, two)]
        if any(rank.memory["weights"] * self.grid.z > self.steps.cached_bytes for rank in found):
            return self.run(), None
        (before, after), stage = (one[0], two[0]), min(two[0].activations)
        count = len(after.activations)
        return found, _Block(
            {kind: _difference(after.passes[kind, stage], before.passes[kind, stage]) for kind in "FIW"},
            {name: value / count for name, value in _difference(after.rest, before.rest).items()},
        )

    def rough(self, block: _Block) -> list[RankCosts]:
        """Return costs whose seconds are those of the smallest network and of further blocks. [] if this saves
        little."""
        units = self.fewer(1)
        if self.share(units) > WORTH / 2:
            return []
        return [
            replace(
                each,
                passes={key: _sum([terms, *units * [block.passes[key[0]]]]) for key, terms in each.passes.items()},
                rest=_sum([each.rest, *units * len(each.activations) * [block.rest]]),
            )
            for each in self.run(units)
        ]


def _shown(places: Sequence[int]) -> PipelineSchedule:
    """Return a table of `SHOWN` micro-batches with separate I and W. places: rank of each stage."""
    lines = [list[str]() for _ in range(1 + max(places))]
    for kinds, stages in (("F", [*enumerate(places)]), ("IW", [*enumerate(places)][::-1])):
        for stage, rank in stages:
            lines[rank] += [f"{stage}{kind}{micro}" for micro in range(SHOWN) for kind in kinds]
    return PipelineSchedule.read("\n".join(map(",".join, lines)))


def _candidate(name: str, table: PipelineSchedule, placed: _Placed, ranks: Sequence[RankCosts]) -> Candidate:
    rank_of, stages = placed.shown.stages, sorted(placed.shown.stages)
    forward, backward, weight = (
        [sum(ranks[rank_of[stage]].passes[kind, stage].values()) for stage in stages] for kind in "FIW"
    )
    largest = max(rank.message for rank in ranks)
    message = placed.machine.collective_in_step("shift", placed.groups[PIPE], largest)
    times = Times(forward, backward, weight, message)
    line, micro_batches = simulate(table, times), table.micro_batches
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
    before, after = simulate(placed.shown).peak_bytes(*held), line.peak_bytes(*held)
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
        placed.grid,
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


def _difference(now: Terms, before: Terms) -> dict[str, float]:
    return {name: now.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **now}}


def _sum(terms: Sequence[Terms]) -> dict[str, float]:
    total = dict[str, float]()
    for name, value in (item for each in terms for item in each.items()):
        total[name] = total.get(name, 0.0) + value
    return total
