"""The step of a configuration on any grid of a machine: one rank for each class of ranks that are alike, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ...action import Action
from ...layout import FIRST, GridShape
from ...model.machines import Machine, groups_of
from ...model.simulation import Task, Timeline, simulate
from ...model.simulation.noise import slowest
from ...model.simulation.rank_classes import Cut, classes
from ...model.simulation.replay import WORDS, seconds_of, tasks, terms_of, totals
from ...nn.training.config import Config
from ...nn.training.dry_step import DrySteps, Step
from ...nn.training.samples import SampleSizes
from ...text import in_bytes


@dataclass(frozen=True)
class Simulated:
    """A step, simulated.

    grid       of all ranks
    alike      rank -> for how many it stands: itself and those that do the same
    timeline   of these ranks, in this order, without noise
    step       of rank 0, which has most
    alone      seconds of rank 0's actions, each by itself: "gemm", "passes", "overhead", and by axis
    noise      how many times longer the step is, as it ends with the slowest of all ranks
    """

    grid: GridShape
    alike: Mapping[int, int]
    timeline: Timeline
    step: Step
    alone: Mapping[str, float]
    noise: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds * self.noise

    @cached_property
    def terms(self) -> dict[str, float]:
        """Where the seconds of the slowest rank go, with "noise"; axes are what is waited for them. They add up."""
        terms = terms_of(self.timeline, self.timeline.slowest)
        return terms | ({"noise": self.seconds - self.timeline.seconds} if self.noise > 1 else {})

    @property
    def hidden(self) -> dict[str, float]:
        """By axis, seconds of rank 0's collectives that nobody waits for."""
        waits = self.timeline.waits(0)
        return {axis: max(0.0, seconds - waits.get(axis, 0.0)) for axis, seconds in self.alone.items()
                if axis not in WORDS.values()}

    @property
    def received(self) -> dict[str, int]:
        """By axis, bytes that rank 0 receives."""
        found: dict[str, int] = {}
        for action in self.step.actions:
            if action.what == "begin":
                found[action.axis] = found.get(action.axis, 0) + action.received
        return found

    @property
    def dtype(self) -> str:
        """In which most is multiplied."""
        flop: dict[str, float] = {}
        for action in self.step.actions:
            if action.what == "gemm":
                flop[action.dtype] = flop.get(action.dtype, 0.0) + 2.0 * action.m * action.n * action.k
        return max(flop, key=lambda dtype: flop[dtype], default="float32")

    def priced_as(self, machine: Machine) -> dict[str, str]:
        """The dtypes of GEMMs that are priced as others -> those."""
        dtypes = sorted({action.dtype for action in self.step.actions if action.what == "gemm"})
        return {dtype: other for dtype in dtypes if (other := machine.stands_for(dtype)) != dtype}

    def share_of_peak(self, machine: Machine) -> float | None:
        """Of a rank's; None if the machine does not state it."""
        peak = machine.peak.get(self.dtype)
        return self.step.flop / (self.seconds * peak) if peak and self.seconds else None


class Share(NamedTuple):
    """Actions of rank 0 that are alike: what they are, how many, seconds of all of them, each by itself."""

    what: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Simulator:
    """Simulates steps of a configuration.

    samples          of the data; None: what its file says
    ranks_per_node   ranks fill node after node
    noise            standard deviation of a rank's time for a step, as a share of it
    """

    config: Config
    machine: Machine
    ranks_per_node: int
    noise: float = 0.0
    samples: SampleSizes | None = None

    def largest(self, found: Simulated) -> list[Share]:
        """What rank 0 does, the longest first."""
        groups = groups_of(found.grid, self.ranks_per_node)
        shares: dict[str, Share] = {}
        for action in found.step.actions:
            if action.what != "wait":
                what = _in_words(action)
                old = shares.get(what, Share(what, 0, 0.0))
                seconds = old.seconds + seconds_of(action, self.machine, groups)
                shares[what] = Share(what, old.times + 1, seconds)
        return sorted(shares.values(), key=lambda share: -share.seconds)

    def unbounded(self) -> Simulator:
        """The same step, of a batch that may grow: the data's file is as long as it has to be."""
        data = self.config.data.model_copy(update={"batch_size": self.steps.rows * self.steps.micro_batches})
        return replace(self, config=self.config.model_copy(update={"data": data}),
                       samples=self.steps.samples._replace(rows=0))

    @cached_property
    def steps(self) -> DrySteps:
        return DrySteps(self.config, self.samples, self._keep)

    @property
    def _keep(self) -> int:
        """Bytes of gathered weights that a rank keeps: a quarter of its memory, as the planner says too."""
        return self.machine.memory // 4 or 2**62

    def of(self, grid: GridShape, config: Config | None = None, alone: bool = False) -> Simulated:
        """The step on a grid. alone: of rank 0 only, which has the largest parts of all that does not divide.

        config   one that differs from this one in the batch and the overlaps
        """
        steps = self.steps
        if config is not None:
            steps = DrySteps(config, self.steps.samples, self._keep)
        done = dict[int, Step]()

        def actions(rank: int) -> Sequence[Action]:
            done[rank] = steps.of(grid, self.ranks_per_node, rank)
            return done[rank].actions

        alike = classes(grid, actions, () if alone else self.cuts(steps))
        groups = groups_of(grid, self.ranks_per_node)
        tables = [_of_its_groups(tasks(done[rank].actions, self.machine, groups), grid, rank, len(alike))
                  for rank in alike]
        first = done[0]
        return Simulated(grid, alike, simulate(tables), first, totals(first.actions, self.machine, groups),
                         slowest(self.noise, grid.size))

    def cuts(self, steps: DrySteps) -> list[Cut]:
        """All numbers of rows and columns that axes cut: sizes of the products of one rank by itself. One of a single
        row sums rows, as those of a bias."""
        config = steps.config
        more = ("data",) if config.optimizer.shard_over_data else ()
        sharded = config.network.build or config.network.activations == "sharded"
        found: list[Cut] = [(steps.rows, ("data", "z", *axes)) for axes in ((("x",), ("y",)) if sharded else ((),))]
        return found + [(size, (axis, "z", *more)) for size in self._sizes for axis in ("x", "y")]

    @cached_property
    def _sizes(self) -> list[int]:
        step = self.steps.of(GridShape(1, 1, 1), 1)
        return sorted({size for action in step.actions if action.what == "gemm" and action.m > 1
                       for size in (action.m, action.n, action.k)})


def _in_words(action: Action) -> str:
    if action.what == "gemm":
        return f"GEMM {action.form or 'nn'} {action.m:,} x {action.n:,} x {action.k:,} {action.dtype}"
    if action.what == "pass":
        return f"{action.operation}, {in_bytes(action.nbytes)}"
    phase = f" ({action.phase})" if action.phase else ""
    return f"{action.operation}{phase} along {action.axis}, {in_bytes(max(action.sent, action.received))}"


def _of_its_groups(table: list[Task], grid: GridShape, rank: int, ranks: int) -> Sequence[Task]:
    """The table of a rank beside others, whose collectives meet those of its own group only."""
    if ranks == 1:
        return table
    coords, met = (grid.coords(rank) or FIRST)._asdict(), []
    for task in table:
        if isinstance(task.meets, tuple):
            axis, turn = task.meets
            others = tuple(index for name, index in coords.items() if name not in grid.axes_of(axis))
            task = replace(task, meets=(axis, turn, others))
        met.append(task)
    return met
