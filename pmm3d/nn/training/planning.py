"""Choice of a grid for a training: a step is simulated on the most promising grids of a number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import gcd, inf
from typing import Any, NamedTuple

from ...errors import GridError, Pmm3dError
from ...layout import PIPE, SEQ, ULYSSES, GridShape
from ...model.candidates import FAMILIES, LARGER, SLOWER, Candidate, Ranking, preset_of
from ...model.grid_search import grids_4d
from ...model.machines import Group, Machine, groups_of
from ...model.simulation import simulate
from ...model.simulation.replay import tasks, terms_of
from ...text import counted, in_toml
from ..recompute import Recomputed
from .config import Config
from .dry_step import DrySteps
from .network import described
from .plan_stages import staged_candidates
from .remedies import Settings, budgets_of, cheapest, remedies_of
from .samples import SampleSizes
from .scaled_step import ScaledStep

ACTIVATIONS, RECOMPUTE = "network.activations", "network.recompute"
TOP = 12
"""Smallest number of simulated grids."""
ACTIONS = 4000
"""Simulated actions after which no more grids are simulated; some seconds. A limit in seconds would make the choice
depend on the load of the machine."""
LONGER = 4
"""Largest number of simulated grids with an axis "pipe", and with "seq", besides presets."""
NOISE = 0.02
"""A preset is chosen if its step is longer by at most this share. Predictions are not more accurate."""
SHOWN = 3
"""Largest number of micro-batches of a dry run. All but the first and the last are alike."""
FEW = 2
"""Least number of blocks of the smaller of two dry transformers; the other one has twice as many. The difference prices
the rest."""
LEAST_SEQ = 4
"""Ranks along "seq" that are planned for any number of sequences."""
DOUBLINGS = 8
"""Doublings of the number of ranks, in search of a number that is enough."""
COMBINED = 3
"""Largest number of grids for which combinations of remedies are simulated: the fastest ones that do not fit."""
BUDGETED = 24
"""Largest number of blocks of a transformer for which budgets of recomputation are remedies. Their dry runs have all
blocks."""
SMALL = tuple(
    GridShape(*sizes) for sizes in ((2, 2, 2, 2), (2, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1), (1, 1, 1, 2), (1, 1, 1))
)
"""Grids for the rough simulation, which uses the first one on which the network runs."""
ADVISED = RECOMPUTE, "overlap.reshard_after_forward", "overlap.shared_weights", "optimizer.shard_over_data"
"""Keys that a message about memory names, unless they were tried."""
UNLIMITED = 2**62
Tell = Callable[[int, int, str], None]


def rank_training(
    config: Config,
    ranks: int,
    machine: Machine,
    *,
    limit: int | None = None,
    samples: tuple[int, ...] | SampleSizes | None = None,
    top: int = TOP,
    actions: int = ACTIONS,
    run: int | None = None,
    pipes: Collection[int] = (1,),
    seqs: Collection[int] = (1,),
    experts: Collection[int] = (1,),
    activations: Sequence[str] = (),
    recompute: Sequence[str | int] = (),
    remedies: str = "none",
    grids: Sequence[GridShape] = (),
    also: Sequence[GridShape] = (),
    tell: Tell = lambda *told: None,
    pool: Executor | None = None,
) -> Ranking:
    """Rank grids of exactly that number of ranks by the simulated seconds of a step on the first rank, which has the
    largest part of everything. The step is a dry run of the code that trains.

    limit        largest number of bytes on a rank. Default: the memory of the machine
    samples      sizes of the data, as in `DrySteps`
    top          smallest number of simulated grids, besides the best of each preset
    actions      number of simulated actions after which no more grids are simulated
    run          number of consecutive ranks on a node. Default: all ranks of a node
    pipes        numbers of ranks along "pipe" (`pipes_of`). Such a grid is a candidate with the configured schedule, or
                 with the best of `plan_stages.SCHEDULES` that fits
    seqs         numbers of ranks that share a sequence (`seqs_of`). They are along "seq". On several nodes, a grid
                 whose ranks of a node are along "ulysses" is a candidate too
    experts      numbers of ranks along "expert" (`experts_of`). A grid is a candidate with up to three of those that
                 fit its ranks along z and data: the least that fits the memory by a rough estimate, the largest inside
                 a node, and the largest
    activations  values of network.activations: a grid is a candidate with each. Default: as configured
    recompute    values of network.recompute, the fastest first: a grid is a candidate with the first one that fits.
                 Default: as configured
    remedies     "exact", "lossy" or "none" (default): whether further settings may make a step fit: those that change
                 no values, or also others (`remedies.REMEDIES`). The cheapest combination is chosen for up to
                 `COMBINED` grids that do not fit, and that are faster than the others
    grids        the only grids to simulate. Default: all
    also         grids to simulate besides the others
    tell         a function that is called with (number of grids done, number of grids, "grids")
    pool         processes that simulate the grids; not for a configuration that names functions of the user's files,
                 which cannot be sent to them. Default: this process

    A rough simulation (`ScaledStep`) selects the grids. `Ranking.unpriced` counts the other grids. A preset is
    preferred to a grid that is faster by 2% or less. Ties: less memory, then fewer ranks along x, y, z.

    Raises GridError if the step fits on no grid; the message contains the memory and a number of ranks that is enough.
    Raises GridError for activations and recompute of a network of `build`, and Pmm3dError as `DrySteps`.
    """
    if ranks < 1:
        raise GridError(f"a plan is for at least 1 rank; got {ranks!r}")
    if config.network.build and (activations or recompute):
        raise GridError(
            f"network.build = {config.network.build} makes its own layers: plan it without activations and "
            "recompute, and set them in the function"
        )
    longer = [(pipe, seq) for pipe in pipes for seq in seqs if ranks % (pipe * seq) == 0]
    if not longer:
        products = sorted({pipe * seq for pipe in pipes for seq in seqs})
        raise GridError(
            f"{ranks} ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = "
            f"{' or '.join(map(str, products))}: use a multiple of it"
        )
    planner = _Planner(
        dry_steps(config, machine, limit, samples), ranks, machine, limit, run, longer, activations, recompute, experts
    )
    return planner.ranking(top, actions, grids, also, tell, pool, remedies)


def dry_steps(
    config: Config, machine: Machine, limit: int | None = None, samples: tuple[int, ...] | SampleSizes | None = None
) -> DrySteps:
    """Return the dry steps of a plan. A rank keeps gathered weights in up to a quarter of its memory."""
    limit = _limit(machine, limit)
    return DrySteps(config, samples, cached_bytes=UNLIMITED if limit == UNLIMITED else limit // 4)


def _limit(machine: Machine, limit: int | None) -> int:
    return (machine.memory if limit is None else limit) or UNLIMITED


def step_on(
    grid: GridShape,
    config: Config,
    machine: Machine,
    *,
    limit: int | None = None,
    samples: tuple[int, ...] | SampleSizes | None = None,
) -> Candidate:
    """Return one grid as a candidate of `rank_training`, with `why_not` if it exceeds the limit. Raises GridError if
    the library refuses the grid."""
    steps = dry_steps(config, machine, limit, samples)
    (candidate,) = _Planner(steps, grid.size, machine, limit, experts=(grid.expert,)).tried(grid)
    if not candidate.memory:
        raise GridError(f"grid {grid}: {candidate.why_not}")
    return candidate


def pipes_of(config: Config, ranks: int) -> list[int]:
    """Return the numbers of ranks along "pipe": divisors of the number of ranks, at most the micro-batches.

    >>> from .config import checked
    >>> pipes_of(checked({"data": {"file": "x.h5"}, "grid": {"micro_batches": 8}}), 12)
    [1, 2, 3, 4, 6]
    """
    return [pipe for pipe in range(1, min(ranks, config.grid.micro_batches) + 1) if ranks % pipe == 0]


def seqs_of(config: Config, ranks: int) -> list[int]:
    """Return the numbers of ranks that may share a sequence: divisors of the number of ranks, and multiples of
    grid.ulysses. Ranks along data send less, so numbers above 4 are for fewer sequences than ranks.

        >>> from .config import checked
        >>> tokens = {"file": "x.h5", "sequence": 4096, "batch_size": 4}
        >>> seqs_of(checked({"data": tokens, "network": {"kind": "gpt"}}), 32)
        [1, 2, 4, 8]
    """
    if config.data.sequence is None:
        return [1]
    sequences = max(1, config.data.batch_size // config.grid.micro_batches)
    most, near = min(config.data.sequence, max(LEAST_SEQ, ranks // sequences)), config.grid.ulysses
    return [seq for seq in range(near, most + 1, near) if ranks % seq == 0] or [near]


def experts_of(config: Config) -> list[int]:
    """Return the numbers of ranks that may share the experts: grid.expert if it is given, otherwise the divisors of
    network.experts. One rank for a network without experts.

        >>> from .config import checked
        >>> tokens = {"file": "x.h5", "sequence": 64}
        >>> experts_of(checked({"data": tokens, "network": {"kind": "gpt", "experts": 8}}))
        [1, 2, 4, 8]
    """
    asked, experts = config.grid.expert, config.network.experts or 1
    return [asked] if asked else [number for number in range(1, experts + 1) if experts % number == 0]


class Costs(NamedTuple):
    """Costs of a step on a rank: seconds by terms (`Candidate.terms`), bytes held by kind, bytes received, flop."""

    terms: Mapping[str, float]
    memory: Mapping[str, float]
    received: float
    flop: float

    def further(self, earlier: Costs, times: float) -> Costs:
        """Return these costs plus `times` their difference from the earlier ones."""

        def grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
            return {name: max(0.0, value + times * (value - before.get(name, 0.0))) for name, value in now.items()}

        return Costs(
            grown(self.terms, earlier.terms),
            grown(self.memory, earlier.memory),
            self.received + times * (self.received - earlier.received),
            self.flop + times * (self.flop - earlier.flop),
        )


class _Planner:
    """Ranking of the grids of one number of ranks."""

    def __init__(
        self,
        steps: DrySteps,
        ranks: int,
        machine: Machine,
        limit: int | None,
        run: int | None = None,
        longer: Sequence[tuple[int, int]] = ((1, 1),),
        activations: Sequence[str] = (),
        recompute: Sequence[str | int] = (),
        experts: Collection[int] = (1,),
    ):
        self.ranks, self.machine, self.limit, self.run = ranks, machine, _limit(machine, limit), run
        self.steps = steps
        self.longer, self.activations, self.recompute, self.experts = longer, activations, recompute, experts
        self.config, self.micro_batches = steps.config, steps.micro_batches
        self.shown = sorted({min(self.micro_batches, SHOWN - 1), min(self.micro_batches, SHOWN)}, reverse=True)

    @cached_property
    def one(self) -> Costs:
        """Costs of the step on one rank."""
        single = GridShape(1, 1, 1)
        return self._costs(self._alone, single, groups_of(single, self.machine.ranks_per_node))

    @property
    def _alone(self) -> DrySteps:
        recompute = [*self.recompute, self.config.network.recompute][0]
        if Recomputed.named(recompute).budget is not None:  # one rank may need more than the limit of one of several
            recompute = "none"
        return self.steps.unscheduled.of_settings({RECOMPUTE: recompute})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("one", "rough")}

    def ranking(
        self,
        top: int,
        actions: int,
        grids: Sequence[GridShape],
        also: Sequence[GridShape],
        tell: Tell,
        pool: Executor | None,
        remedies: str = "none",
    ) -> Ranking:
        possible = [*grids] or [*self._grids(self.ranks)]
        idle = {grid: reason for grid in possible for reason in [self._idle(grid)] if reason}
        every = [grid for grid in possible if grid not in idle]
        chosen = order = every
        left_out = set[GridShape]()
        if not grids:
            order = sorted(
                every, key=lambda grid: (self._least_held(grid) > self.limit, self._seconds(grid), _order(grid))
            )
            presets = [grid for name in FAMILIES for grid in [each for each in order if preset_of(each) == name][:1]]
            staged, shared = [each for each in order if each.stages > 1], [each for each in order if _sharing(each) > 1]
            left_out |= {*staged[LONGER:], *(shared[LONGER:] if len(shared) < len(order) else [])}
            order = [grid for grid in order if grid not in left_out]
            first = order[: max(top, actions // len(self.rough.step.actions))]
            chosen = [*dict.fromkeys([*first, *presets, *(grid for grid in also if not self._idle(grid))])]
        tried, variants = list[Candidate](), [(*each, grid) for grid in chosen for each in self._variants(grid)]
        folded, activations, of_grid = zip(*variants)
        for grid, candidate in zip(of_grid, (pool.map if pool else map)(self.fitting, folded, activations)):
            tried.append(candidate)
            tell(chosen.index(grid), len(chosen), "grids")
        if all(each.why_not for each in tried):
            tried += [
                each
                for grid in sorted(order, key=self._least_held)[:top]
                if grid not in chosen
                for each in self.tried(grid)
            ]
        if remedies != "none":
            tried += self._remedied(tried, remedies == "lossy")
        dropped = [each for each in tried if each.why_not]
        dropped += [Candidate(grid, 0.0, preset=preset_of(grid), why_not=reason) for grid, reason in idle.items()]
        if all(each.why_not for each in tried):
            raise GridError(self._nothing_fits(dropped, remedies))
        ordered = _preferring_presets(sorted((each for each in tried if not each.why_not), key=_best_first))
        priced = {each.grid for each in tried}
        unpriced = Counter(self._why_unpriced(grid, left_out) for grid in every if grid not in priced)
        considered, dtype = len({*possible, *priced}), self.config.precision.compute
        return Ranking(self._what(), self.ranks, ordered, dropped, self.one.flop, dtype, considered, unpriced)

    def _why_unpriced(self, grid: GridShape, left_out: Collection[GridShape]) -> str:
        """Return the reason why a grid was not simulated. left_out: grids with an axis of which only few are."""
        if self._least_held(grid) > self.limit:
            return LARGER
        if grid in left_out:
            return f"only the {LONGER} fastest grids with pipe, and with seq, are priced"
        return SLOWER

    def _idle(self, grid: GridShape) -> str:
        """Return the reason why ranks of the grid have no work; "" if all have work."""
        network, length, near = self.config.network, self.config.data.sequence, getattr(grid, ULYSSES, 1)
        if length is None:
            return ""
        for what, parts, axes, ranks in (
            ("sequences of a micro-batch", self.steps.rows, "data x z", grid.data * grid.z),
            ("tokens of a sequence", length, SEQ, _sharing(grid)),
            ("heads", network.heads, "x" if near == 1 else "x x ulysses", grid.x * near),
        ):
            if parts and parts < ranks:
                return f"{parts:,} {what} are fewer than {axes} = {ranks:,}"
        if not _folds(grid, self.experts):
            return f"expert = {min(self.experts)} does not fit z and data"
        return ""

    def _grids(self, ranks: int, longer: Sequence[tuple[int, int]] | None = None) -> Iterator[GridShape]:
        """Yield all grids of that many ranks, with each number of ranks along "pipe" and "seq". If ranks along seq
        would hold whole sequences, only the equal grid with these ranks along data is listed."""
        for pipe, seq in self.longer if longer is None else longer:
            equivalent = seq if (pipe, 1) in self.longer else 1
            for grid in grids_4d(ranks // (pipe * seq)):
                if equivalent == 1 or self.steps.rows % (grid.data * grid.z * seq):
                    for near in self._near(grid, seq):
                        sizes = (ULYSSES, near), (SEQ, seq // near), (PIPE, pipe)
                        yield GridShape(*grid, **{name: size for name, size in sizes if size > 1})

    def _near(self, grid: GridShape, seq: int) -> list[int]:
        """Return the numbers of ranks along "ulysses", if `seq` ranks share a sequence."""
        asked, heads = self.config.grid.ulysses, self.config.network.kv_heads or self.config.network.heads or 1
        if asked > 1:
            return [asked] if seq % asked == 0 else []
        on_node = gcd(seq, max(1, (self.run or self.machine.ranks_per_node) // (grid.x * grid.y * grid.z)))
        return [1, on_node] if 1 < on_node < seq and heads % (grid.x * on_node) == 0 else [1]

    def _seconds(self, grid: GridShape) -> float:
        """Return rough seconds of a step: those on the stage's grid, divided by the stages, with the bubble of 1F1B."""
        share = (self.micro_batches + grid.stages - 1) / (self.micro_batches * grid.stages)
        return share * self.rough.seconds(self._as_copies(grid))

    def _held(self, grid: GridShape) -> float:
        """Return the rough bytes on a rank."""
        return self.rough.held(self._as_copies(grid), grid.data // grid.expert_data) / grid.stages

    def _least_held(self, grid: GridShape) -> float:
        """Return `_held` with the largest number of ranks along "expert"."""
        return self._held(_folds(grid, self.experts)[-1])

    def _as_copies(self, grid: GridShape) -> GridShape:
        """Return the grid of a stage. Ranks along seq count as data, because they hold the same weights."""
        return GridShape(grid.x, grid.y, grid.z, grid.data * _sharing(grid))

    @cached_property
    def rough(self) -> ScaledStep:
        """The scaled step of a small grid, with the settings that need least memory."""
        variants = (ACTIVATIONS, self.activations), (RECOMPUTE, self.recompute)
        steps = self._alone.of_settings({name: values[-1] for name, values in variants if values})
        for small in [grid for grid in SMALL if not self._idle(grid)]:
            node = small.size if self.ranks <= self.machine.ranks_per_node else max(1, small.size // 2)
            try:
                some, fewest = steps.of_micro_batches(self.shown[-1]), _few(steps)
                some = some.of_blocks(min(steps.blocks, 2 * fewest))
                more, twice = (each.of(small, node) for each in (some, some.of_rows(2 * some.rows)))
                few = some.of_blocks(fewest).of(small, node) if steps.blocks > 2 * fewest else more
                times, work = max(0.0, steps.blocks / fewest - 2), more.memory["work"]
                memory = {
                    kind: round(nbytes + times * (nbytes - few.memory[kind])) for kind, nbytes in more.memory.items()
                }
                share = min(1.0, max(0.0, twice.memory["work"] / work - 1)) if work else 0.0
                return ScaledStep(small, more._replace(memory=memory), share, self.machine, self.run)
            except Pmm3dError as error:
                refused = error
        raise refused

    def tried(self, grid: GridShape) -> list[Candidate]:
        """Return the grid with each of `_variants`."""
        return [self.fitting(*each) for each in self._variants(grid)]

    def _variants(self, grid: GridShape) -> list[tuple[GridShape, str]]:
        """Return the grid with each number of ranks along "expert", and each value of network.activations that
        matters on it."""
        return [(folded, activations) for folded in self._folded(grid) for activations in self._activations(grid)]

    def _folded(self, grid: GridShape) -> list[GridShape]:
        """Return the grid with the numbers of ranks along "expert" that are priced. Of the numbers that fit z and data,
        these are the least that fits the memory by a rough estimate, the largest inside a node, and the largest."""
        folds = _folds(grid, self.experts)
        enough = [fold for fold in folds if self._held(fold) <= self.limit]
        inside = (self.run or self.machine.ranks_per_node) // (grid.x * grid.y)
        priced = {fold.expert for fold in (*enough[:1], *folds[-1:])}
        priced |= {max((fold.expert for fold in folds if fold.expert <= inside), default=folds[-1].expert)}
        return [fold for fold in folds if fold.expert in priced]

    def _activations(self, grid: GridShape) -> Sequence[str]:
        split = self.activations if grid.x * grid.y > 1 else self.activations[:1]
        return split or [self.config.network.activations]

    def fitting(self, grid: GridShape, activations: str) -> Candidate:
        """Return the grid with these activations and the first value of network.recompute that fits, or the last."""
        chosen: dict[str, Any] = {ACTIVATIONS: activations} if len(self.activations) > 1 else {}
        for recompute in self.recompute or [self.config.network.recompute]:
            chosen |= {RECOMPUTE: recompute} if len(self.recompute) > 1 else {}
            candidate = self._simulated(grid, {ACTIVATIONS: activations, RECOMPUTE: recompute})
            if not candidate.why_not:
                break
        return replace(candidate, settings=chosen, preset=preset_of(grid, activations))

    def _simulated(self, grid: GridShape, settings: Settings) -> Candidate:
        """Return the grid as a candidate, with these settings."""
        node, steps = self.machine.ranks_per_node, self.steps.of_settings(settings)
        groups = groups_of(grid, node, self.run)
        if grid.stages > 1:
            return self._best_schedule(steps, grid, groups)
        try:
            costs = self._costs(steps.unscheduled, grid, groups)
        except Pmm3dError as error:
            return Candidate(grid, 0.0, why_not=f"the library refuses it: {error}")
        memory = {kind: round(nbytes) for kind, nbytes in costs.memory.items()}
        held = sum(memory.values())
        why_not = self._too_much(held) if held > self.limit else ""
        return Candidate(grid, sum(costs.terms.values()), costs.terms, memory, round(costs.received), why_not=why_not)

    def _remedied(self, tried: Sequence[Candidate], lossy: bool) -> Iterator[Candidate]:
        """Yield the fastest grids that do not fit, with the cheapest settings with which they do."""
        fastest = min((each.seconds for each in tried if not each.why_not), default=inf)
        larger = [each for each in tried if each.why_not and each.memory and each.seconds < fastest]
        for each in sorted(larger, key=_best_first)[:COMBINED]:
            grid, own = each.grid, each.settings
            room = each.memory.get("work", 0) - (sum(each.memory.values()) - self.limit)
            budgets = budgets_of(room) if self.steps.blocks <= BUDGETED else []
            remedies = [
                one._replace(values=(*one.values[:-1], *budgets, one.values[-1])) if one.key == RECOMPUTE else one
                for one in remedies_of(self.config, grid, lossy, self.machine.passes)
                if one.key not in own
            ]

            def priced(settings: Settings, grid: GridShape = grid, own: Settings = own) -> Candidate:
                return replace(self._simulated(grid, {**own, **settings}), settings={**own, **settings})

            found = cheapest(each, remedies, self.limit, priced)
            if found is not each:
                preset = preset_of(grid, found.settings.get(ACTIVATIONS, self.config.network.activations))
                yield replace(found, preset=preset)

    def _costs(self, steps: DrySteps, grid: GridShape, groups: Mapping[str, Group]) -> Costs:
        """Return the costs of a step, extrapolated from steps of few micro-batches and networks of few blocks."""

        def of_blocks(blocks: int) -> Costs:
            costs = list[Costs]()
            for step in steps.of_blocks(blocks).each_of(grid, self.machine.ranks_per_node, 0, self.shown):
                terms = terms_of(simulate(tasks(step.actions, self.machine, groups)))
                costs.append(Costs(terms, step.memory, step.received, step.flop))
            all_of_them = costs[0].further(costs[-1], self.micro_batches - self.shown[0])
            batches = costs[0].memory["batches"] / self.shown[0] * self.micro_batches
            return all_of_them._replace(memory={**costs[0].memory, "batches": batches})

        few = _few(steps)
        if steps.blocks <= 2 * few:
            return of_blocks(steps.blocks)
        return of_blocks(2 * few).further(of_blocks(few), steps.blocks / few - 2)

    def _best_schedule(self, steps: DrySteps, grid: GridShape, groups: Mapping[str, Group]) -> Candidate:
        candidates = list[Candidate]()
        try:
            for each in staged_candidates(steps, grid, self.machine, groups):
                candidates.append(each)
        except Pmm3dError as error:
            if not candidates:
                return Candidate(grid, 0.0, why_not=f"the library refuses it: {error}")
        fits = [each for each in candidates if sum(each.memory.values()) <= self.limit]
        if fits:
            return min(fits, key=_best_first)
        least = min(candidates, key=lambda each: sum(each.memory.values()))
        return replace(least, why_not=self._too_much(sum(least.memory.values())))

    def _too_much(self, held: int) -> str:
        return f"holds {held:,} bytes on a rank, more than {self.limit:,}"

    def _what(self) -> str:
        samples = self.steps.samples
        name = described(self.config, samples.features, samples.outputs)
        if self.config.network.build:
            name += f" ({samples.features}-{samples.outputs})"
        batches = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "a batch"
        length = self.config.data.sequence
        unit = "rows" if length is None else f"sequences of {counted(length, 'token')}"
        return f"a training step of {name} on {batches} of {self.steps.rows:,} {unit}"

    def _nothing_fits(self, dropped: list[Candidate], remedies: str) -> str:
        """Return the message for a step that fits on no grid. It advises what was not tried."""
        tried = [each for each in dropped if each.memory]
        if not tried:
            return f"no grid of {counted(self.ranks, 'rank')} is left: {dropped[0].why_not}"
        least = min(tried, key=lambda each: (sum(each.memory.values()), _order(each.grid)))
        kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in least.memory.items())
        settings = f" with {in_toml(least.settings)}" * bool(least.settings)
        further = [key for key in ADVISED if key not in least.settings]
        further += ["pmm3d plan train --lossy, which tries settings that change values"] * (remedies == "exact")
        return (
            f"no grid of {counted(self.ranks, 'rank')} holds {self._what()} within {self.limit:,} bytes a rank: "
            f"grid {replace(least, settings={})}{settings}, which needs least, has {sum(least.memory.values()):,} on "
            f"its first rank ({kinds}). {self._enough()}. Or take smaller batches, more grid.micro_batches, "
            f"{', '.join(further)}"
        )

    def _enough(self) -> str:
        """Return a sentence with the first number of ranks that is enough, of twice as many, four times as many, ..."""
        ranks = self.ranks
        for _ in range(DOUBLINGS):
            ranks *= 2
            busy = (grid for grid in self._grids(ranks, self.longer[:1]) if not self._idle(grid))
            grid = min(busy, key=lambda grid: (self._least_held(grid), _order(grid)))
            if not all(each.why_not for each in self.tried(grid)):
                return f"{ranks:,} ranks are enough, as {grid}"
        return f"{ranks:,} ranks are not enough either"


def _few(steps: DrySteps) -> int:
    """Return the number of blocks of the smaller of two dry transformers: blocks of each kind are among them."""
    network = steps.config.network
    if Recomputed.named(network.recompute).budget is not None:  # the choice depends on the number of blocks
        return max(FEW, steps.blocks)
    return max(FEW, network.every or 1, network.recompute if isinstance(network.recompute, int) else 1)


def _folds(grid: GridShape, experts: Collection[int]) -> list[GridShape]:
    """Return the grid with each of these numbers of ranks along "expert" that fits its ranks along z and data."""
    folds = list[GridShape]()
    for number in sorted(experts):
        with suppress(GridError):
            folds.append(grid.folded(number))
    return folds


def _sharing(grid: GridShape) -> int:
    """Return the number of ranks that share a sequence."""
    return int(getattr(grid, SEQ, 1) * getattr(grid, ULYSSES, 1))


def _preferring_presets(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates with the first preset in front, if it is as fast as the first candidate within `NOISE`."""
    near = candidates[0].seconds * (1 + NOISE)
    first = next((each for each in candidates if each.preset and each.seconds <= near), None)
    return candidates if first is None else [first, *(each for each in candidates if each is not first)]


def _best_first(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    return float(f"{candidate.seconds:.9g}"), sum(candidate.memory.values()), _order(candidate.grid)


def _order(grid: GridShape) -> tuple[int, ...]:
    """Return the sorting key of equal candidates: few ranks along x, y and z."""
    return grid.x * grid.y * grid.z, *grid
