"""Which grid serves a training: its step on every grid of so many ranks, priced by a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ...errors import GridError, Pmm3dError
from ...layout import GridShape
from ...model.candidates import PRESETS, SAVED, Candidate, Ranking, preset_of
from ...model.gpt_ranking import grids_4d
from ...model.machines import Machine, groups_of
from ...model.simulation import simulate
from ...model.simulation.replay import tasks, terms_of
from .config import Config
from .dry_step import DrySteps, SampleSizes, Step, step_of
from .estimate import Estimates

__all__ = ["SampleSizes", "Step", "rank_training", "step_of"]

TOP = 10
"""Grids that are simulated at least."""
ACTIONS = 4000
"""Of dry steps on one rank, which bound how many are simulated: some seconds. No clock does, so that the choice is the
same each time."""
NOISE = 0.02
"""A preset whose step takes no more than that much longer than the best one is taken instead: less moves along fewer
axes, and no model tells such times apart."""
SHOWN = 3
"""Batches of a step that are run dry, at most: all but the first and the last are alike."""
UNCERTAIN = 1.5
"""By how much an estimate of memory may be too high."""
LOOKED_AT, TRIED = 1000, 24
"""Numbers of ranks that are looked at to say how many would do; those of which a grid is tried."""
UNLIMITED = 2**62
Tell = Callable[[int, int], None]


def rank_training(config: Config, ranks: int, machine: Machine, *, limit: int | None = None,
                  samples: tuple[int, ...] | SampleSizes | None = None, top: int = TOP, tell: Tell | None = None,
                  actions: int = ACTIONS, run: int | None = None) -> Ranking:
    """The grids of exactly that many ranks, by what a step of a configuration takes on the first rank, which has the
    largest part of everything: the simulation of a dry run of the code that trains.

    limit     bytes that a rank may hold; left out: those of the machine
    samples   sizes of the data, as of `step_of`
    top       grids that are simulated at least, besides the best of each preset ("ddp", "fsdp", "hsdp", "megatron")
    actions   of steps on one rank, after which no more are simulated
    tell      tell(grids done, grids there are)
    run       ranks that follow each other on a node, if not all of a node's

    Where there are too many grids to try each, formulas order them first (`Estimates`): what was not simulated is
    `estimated`, and comes after those that were. A preset is preferred to what is faster by 2% or less. Ties: what
    holds less, then the grid of fewer ranks along x, y, z.

    Raises GridError, which says what is short and how many ranks would do, if no grid holds it; Pmm3dError as
    `step_of`, and for a machine without figures.
    """
    if ranks < 1:
        raise GridError(f"a plan is for at least 1 rank; got {ranks!r}")
    memory = machine.memory if limit is None else limit
    return _Planner(config, ranks, machine, memory or UNLIMITED, samples, tell or _silent, run).ranking(top, actions)


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""


@dataclass
class _Planner:
    """One ranking. found, dropped: grids with what was found of them so far."""

    config: Config
    ranks: int
    machine: Machine
    limit: int
    samples: tuple[int, ...] | SampleSizes | None
    tell: Tell
    run: int | None
    found: dict[GridShape, Candidate] = field(default_factory=dict)
    dropped: dict[GridShape, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keep = UNLIMITED if self.limit == UNLIMITED else self.limit // 4
        steps = DrySteps(self.config, self.samples, keep)
        self.all_batches = self.config.training.accumulate
        self.steps = [steps.accumulating(batches) for batches in sorted({min(self.all_batches, SHOWN - 1),
                                                                         min(self.all_batches, SHOWN)})]
        one = steps.accumulating(1)
        reference = one.of(GridShape(1, 1, 1), 1)
        self.flop, self.actions = reference.flop * self.all_batches, len(reference.actions)
        self.estimates = Estimates(one, reference, self.machine, self.all_batches)
        self.grids = {grid: self.estimates.of(grid, self.machine.ranks_per_node, self.run)
                      for grid in grids_4d(self.ranks)}

    def ranking(self, top: int, actions: int) -> Ranking:
        order, most = self._in_order(), max(top, actions // max(1, self.actions))
        for grid in self._best_presets():
            self._try(grid)
        for grid in order:
            if len(self.found) + len(self.dropped) >= most:
                break
            self._try(grid)
        if not self.found:
            for grid in sorted(order, key=lambda grid: self.grids[grid].held)[:top]:
                self._try(grid)
        if not self.found:
            raise GridError(self._nothing_fits())
        for grid in order:
            self._estimate(grid)
        ordered = _preferring_presets(sorted(self.found.values(), key=_best_first))
        dtype = self.config.precision.compute
        return Ranking(self._what(), self.ranks, ordered, list(self.dropped.values()), self.flop, dtype,
                       len(self.grids), {kind: self.estimates.reference.memory[kind] for kind in SAVED})

    def _in_order(self) -> list[GridShape]:
        """Those that may fit first, by their estimated seconds."""
        return sorted(self.grids, key=lambda grid: (self.grids[grid].held > UNCERTAIN * self.limit,
                                                    self.grids[grid].seconds, _order(grid)))

    def _best_presets(self) -> Iterator[GridShape]:
        for name in PRESETS:
            yield from [grid for grid in self._in_order() if preset_of(grid) == name][:1]

    def _try(self, grid: GridShape) -> None:
        """Simulate the step, once."""
        if grid in self.found or grid in self.dropped:
            return
        candidate = self._simulated(grid)
        (self.dropped if candidate.why_not else self.found)[grid] = candidate
        self.tell(len(self.found) + len(self.dropped), len(self.grids))

    def _simulated(self, grid: GridShape) -> Candidate:
        node = self.machine.ranks_per_node
        groups = groups_of(grid, node, self.run)
        try:
            done = [steps.of(grid, node) for steps in self.steps]
        except Pmm3dError as error:
            return Candidate(grid, 0.0, preset=preset_of(grid), why_not=f"the library refuses it: {error}")
        times = [simulate([tasks(step.actions, self.machine, groups)]) for step in done]
        terms = [terms_of(each, 0) for each in times]
        more = self.all_batches - self.steps[-1].config.training.accumulate
        all_terms = {name: value + more * (value - terms[0].get(name, 0.0)) for name, value in terms[-1].items()}
        received = done[-1].received + more * (done[-1].received - done[0].received)
        candidate = Candidate(grid, sum(all_terms.values()), all_terms, done[-1].memory, received, preset_of(grid))
        return replace(candidate, why_not=self._too_large(sum(candidate.memory.values())))

    def _too_large(self, held: int) -> str:
        return f"holds {held:,} bytes on a rank, more than {self.limit:,}" if held > self.limit else ""

    def _estimate(self, grid: GridShape) -> None:
        """What the formulas say of a grid that was not tried."""
        if grid in self.found or grid in self.dropped:
            return
        estimate = self.grids[grid]
        why_not = self._too_large(estimate.held)
        candidate = Candidate(grid, estimate.seconds, estimate.terms, estimate.memory, 0, preset_of(grid),
                              why_not and f"by the formulas, {why_not}", estimated=True)
        (self.dropped if why_not else self.found)[grid] = candidate

    def _what(self) -> str:
        samples = self.steps[0].samples
        hidden = [] if self.config.network.build else self.config.network.hidden
        sizes = "-".join(map(str, [samples.features, *hidden, samples.outputs]))
        name = f"{self.config.network.build} ({sizes})" if self.config.network.build else sizes
        batches = f"{self.all_batches} batches" if self.all_batches > 1 else "a batch"
        return f"a training step of {name} on {batches} of {self.steps[0].rows} rows"

    def _nothing_fits(self) -> str:
        """What is short, and how many ranks are enough."""
        tried = [each for each in self.dropped.values() if each.memory]
        if not tried:
            return f"no grid of {self.ranks} ranks is left: {next(iter(self.dropped.values())).why_not}"
        least = min(tried, key=lambda each: (sum(each.memory.values()), _order(each.grid)))
        kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in least.memory.items())
        return (f"no grid of {self.ranks} ranks holds {self._what()} within {self.limit:,} bytes a rank: grid "
                f"{least.grid}, which needs least, has {sum(least.memory.values()):,} on its first rank ({kinds}). "
                f"{self._enough()}. Or take smaller batches and more of them (training.accumulate), "
                "network.recompute, overlap.reshard_after_forward or overlap.shared_weights, optimizer.shard_over_data")

    def _enough(self) -> str:
        """How many ranks have a grid that fits, in words: the least number by the formulas, which what grids were
        found to hold corrects, that was then tried."""
        known = self.estimates.reference.memory
        fixed = known["weights"] + known["gradients"] + known["state"]
        ranks, looked_at, tried = max(self.ranks + 1, -(-fixed // self.limit)), 0, 0
        wrong = min(sum(each.memory.values()) / self.grids[each.grid].held
                    for each in self.dropped.values() if each.memory)
        while looked_at < LOOKED_AT and tried < TRIED:
            held, _, grid = min((sum(self.estimates.memory(grid).values()), _order(grid), grid)
                                for grid in grids_4d(ranks))
            looked_at += 1
            if held * wrong <= self.limit:
                tried += 1
                candidate = self._simulated(grid)
                if not candidate.why_not:
                    return f"The least number of ranks found to fit is {ranks}, as {grid}"
                wrong = sum(candidate.memory.values()) / held
            ranks += 1
        return f"No number of ranks below {ranks} was found that fits"


def _preferring_presets(candidates: list[Candidate]) -> list[Candidate]:
    """Them, but a preset first that takes as long as the first one, within the noise."""
    near = candidates[0].seconds * (1 + NOISE)
    first = next((each for each in candidates if each.preset and not each.estimated and each.seconds <= near), None)
    return candidates if first is None else [first, *(each for each in candidates if each is not first)]


def _best_first(candidate: Candidate) -> tuple[bool, float, int, tuple[int, ...]]:
    seconds = float(f"{candidate.seconds:.9g}")
    return candidate.estimated, seconds, sum(candidate.memory.values()), _order(candidate.grid)


def _order(grid: GridShape) -> tuple[int, ...]:
    """Among equals: few ranks along x, y and z."""
    return grid.x * grid.y * grid.z, *grid
