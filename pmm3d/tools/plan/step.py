"""A training on a machine, and the actions of the first rank of a grid in one of its steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from rich.markup import escape

from ...action import Action
from ...comm import chosen_shape
from ...errors import Pmm3dError
from ...layout import GridShape, parse_shape
from ...model.candidates import Candidate, Ranking
from ...model.machines import Machine, groups_of
from ...model.simulation import Timeline, simulate
from ...model.simulation.noise import slowest
from ...model.simulation.replay import seconds_of, tasks
from ...nn.training.config import Config
from ...nn.training.dry_step import Step
from ...nn.training.planning import dry_steps, experts_of, pipes_of, rank_training, seqs_of, step_on
from ...nn.training.samples import SampleSizes
from ...text import counted, in_bytes, in_time, milliseconds
from ...thread_counts import cores
from ..output import FigureTable
from ..ranks import without_mpi
from ..terminal import console
from .schedules import NAMES, REST

PROCESSES = 8
"""Largest number of processes that simulate grids. Each has 0.3 GB of memory and takes 2 s to start."""
MANY = 16
"""Number of experts from which processes pay."""
LARGEST = 10
"""Number of rows of the table of the longest actions."""
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Training:
    """A configuration on a machine. Its batch may grow, as if the data file were long enough.

    limit     bytes that a rank may hold; None: the machine's memory
    samples   sizes of the data
    noise     standard deviation of a rank's time for a step, as a share of that time
    """

    config: Config
    machine: Machine
    limit: int | None
    samples: SampleSizes
    noise: float

    @classmethod
    def of(
        cls,
        config: Config,
        machine: Machine,
        limit: int | None = None,
        samples: SampleSizes | None = None,
        noise: float | None = None,
    ) -> Training:
        """Return a training. Defaults: samples of the data file, noise of the machine. Raises Pmm3dError."""
        steps = dry_steps(config, machine, limit, samples)
        batch = {"batch_size": min(config.data.batch_size, steps.samples.rows or config.data.batch_size)}
        unbounded = config.model_copy(update={"data": config.data.model_copy(update=batch)})
        return cls(unbounded, machine, limit, steps.samples._replace(rows=0), machine.noise if noise is None else noise)

    def ranking(self, ranks: int, config: Config | None = None, **options: Any) -> Ranking:
        """Return the ranking of the grids of these ranks by `rank_training`. config: with another batch."""
        config = config or self.config
        return rank_training(
            config,
            ranks,
            self.machine,
            limit=self.limit,
            samples=self.samples,
            pipes=pipes_of(config, ranks),
            seqs=seqs_of(config, ranks),
            experts=experts_of(config),
            **options,
        )

    @contextmanager
    def pool(self, ranks: int) -> Iterator[Executor | None]:
        """As a context: processes for `ranking`. None if they do not pay: on one core, and without pipelines or many
        experts, whose grids take seconds each; and None for functions of the user's files."""
        own = dry_steps(self.config, self.machine, self.limit, self.samples).own
        processes = min(PROCESSES, len(cores()))
        fast = pipes_of(self.config, ranks) == [1] and (self.config.network.experts or 0) < MANY
        if processes == 1 or own.is_named or fast:
            yield None
            return
        with ProcessPoolExecutor(processes, get_context("spawn"), without_mpi) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)

    def on(self, grid: GridShape, config: Config) -> Candidate:
        """Return the candidate of one grid, by `step_on`."""
        return step_on(grid, config, self.machine, limit=self.limit, samples=self.samples)

    def seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step, which ends with the slowest rank."""
        return candidate.seconds * slowest(self.noise, candidate.grid.size)

    def named_grid(self, name: str, data: int | None, ranks: int) -> GridShape:
        """Return the grid of --grid, with the axes seq and pipe of the configuration. Raises GridError."""
        axes = self.config.grid.axes
        left = ranks // prod(axes.values())
        if data is None and name[:1].isdigit():
            size = prod(parse_shape(name)[:3])
            data = left // size if size and left % size == 0 else 1
        elif data is None and name == "hsdp":
            data = -(-ranks // self.machine.ranks_per_node)
        shape = cast(GridShape, chosen_shape(name, data or 1, axes, ranks, None, "float32", None))
        return shape.folded(self.config.grid.expert or 1)

    def in_words(self, step: Candidate, amount: float | None = None) -> list[str]:
        """Return sentences about a step: rows per second, the effect of the noise, `routing` and `warning`.

        amount   rows, or tokens, of the whole training, whose time is added
        """
        tokens, batch = self.config.data.sequence, self.config.data.batch_size
        rate, noun = batch * (tokens or 1) / (self.seconds(step) or 1.0), "tokens" if tokens else "rows"
        text = f"{rate:,.0f} {noun} a second"
        if amount:
            text += f": {amount:,.0f} {noun} take {in_time(amount / rate)}"
        if self.noise:
            text += (
                f". With a noise of {self.noise:.3g} the slowest of {counted(step.grid.size, 'rank')} ends a step "
                f"after {1e3 * self.seconds(step):,.4g} ms"
            )
        return [each for each in (text, self.routing, self.warning(step.grid)) if each]

    @property
    def routing(self) -> str:
        """A sentence about the tokens of an expert, "" for a network without experts."""
        network = self.config.network
        if not network.experts:
            return ""
        return (
            f"Routing is assumed to be even: each of {network.experts} experts computes the same number of tokens. A "
            "real step ends with the rank that computes the most tokens, whose memory is also larger"
        )

    def warning(self, grid: GridShape, batch: int | None = None) -> str:
        """Return a sentence if some ranks have no row of a batch, otherwise ""."""
        rows = (batch or self.config.data.batch_size) // self.config.grid.micro_batches
        split = grid.data * grid.z
        return (
            ""
            if rows >= split
            else (
                f"Grid {grid}: a micro-batch of {counted(rows, 'row')} is split over data x z = {split:,} ranks, so "
                "some ranks have no row. Take a larger batch or fewer ranks along data and z"
            )
        )


class Share(NamedTuple):
    """Equal actions: description, number, and sum of their seconds without overlap."""

    what: str
    times: int
    seconds: float


@dataclass(frozen=True)
class FirstRank:
    """The actions of the first rank of a grid in a step. The first rank has the largest blocks.

    alone      axis -> seconds of the collectives, each by itself
    received   axis -> bytes
    largest    the actions, the longest first
    """

    grid: GridShape
    timeline: Timeline
    alone: Mapping[str, float]
    received: Mapping[str, int]
    largest: list[Share]

    @classmethod
    def of(cls, training: Training, grid: GridShape, settings: Mapping[str, Any] = NO_SETTINGS) -> FirstRank:
        """Return the actions on a grid, with these settings (`Candidate.settings`). Raises Pmm3dError for
        a grid with the axis pipe."""
        machine = training.machine
        if grid.stages > 1:
            raise Pmm3dError(
                f"grid {grid} is a pipeline, and a single rank of it is not simulated: name a --grid "
                "without the axis pipe, or see the schedule with pmm3d plan pipeline"
            )
        steps = dry_steps(training.config, machine, training.limit, training.samples).unscheduled.of_settings(settings)
        step = steps.of(grid, machine.ranks_per_node)
        actions, groups = step.actions, groups_of(grid, machine.ranks_per_node)
        shares, alone, received = dict[str, Share](), dict[str, float](), dict[str, int]()
        for action in actions:
            seconds = seconds_of(action, machine, groups)
            if action.what == "begin":
                received[action.axis] = received.get(action.axis, 0) + action.received
                alone[action.axis] = alone.get(action.axis, 0.0) + seconds
            if action.what != "wait":
                what = _in_words(action)
                old = shares.get(what, Share(what, 0, 0.0))
                shares[what] = Share(what, old.times + 1, old.seconds + seconds)
        return cls(
            grid,
            simulate(tasks(actions, machine, groups, _phases(step))),
            alone,
            received,
            sorted(shares.values(), key=lambda share: -share.seconds),
        )

    @property
    def waits(self) -> dict[str, float]:
        """Axis -> seconds for which the rank waits."""
        waits = self.timeline.waits
        return {axis: waits.get(axis, 0.0) for axis in self.alone}

    @property
    def hidden(self) -> dict[str, float]:
        """Axis -> seconds of collectives that run during computation."""
        waits = self.waits
        return {axis: max(0.0, seconds - waits[axis]) for axis, seconds in self.alone.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "grid": self.grid._asdict(),
            "alone": dict(self.alone),
            "hidden": self.hidden,
            "waited": self.waits,
            "received": dict(self.received),
            "largest": [share._asdict() for share in self.largest[:LARGEST]],
        }


def _phases(step: Step) -> list[str]:
    """Return the phase of each action of a step."""
    phases = [REST] * len(step.actions)
    for each in step.passes:
        kind = each.name.lstrip("0123456789")[:1]
        phases[each.first : each.stop] = [NAMES[kind]] * (each.stop - each.first)
    return phases


def print_first_rank(first_rank: FirstRank) -> None:
    """Print the communication along each axis, and the longest actions."""
    axes = FigureTable(
        "[bold]Communication of the first rank[/]", ("axis", "received", "ms by itself", "ms hidden", "ms waited")
    )
    waits, hidden = first_rank.waits, first_rank.hidden
    for axis, seconds in first_rank.alone.items():
        axes.add_row(
            axis, in_bytes(first_rank.received[axis]), *map(milliseconds, (seconds, hidden[axis], waits[axis]))
        )
    largest = FigureTable("[bold]Longest actions of the first rank[/], without overlap", ("what", "times", "ms"))
    for share in first_rank.largest[:LARGEST]:
        largest.add_row(escape(share.what), f"{share.times:,}", milliseconds(share.seconds))
    screen = console(sys.stdout)
    for table in (axes, largest):
        screen.print()
        screen.print(table)


def _in_words(action: Action) -> str:
    if action.what == "gemm":
        return f"GEMM {action.form or 'nn'} {action.m:,} x {action.n:,} x {action.k:,} {action.dtype}"
    if action.what == "pass":
        return f"{action.operation}, {in_bytes(action.nbytes)}"
    phase = f" ({action.phase})" if action.phase else ""
    return f"{action.operation}{phase} along {action.axis}, {in_bytes(max(action.sent, action.received))}"
