"""The command `pmm3d simulate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress

from ...errors import Pmm3dError
from ...model.environment import task_rank
from ..output import check_writable, say_written, write_text
from ..terminal import complaining, console, say

if TYPE_CHECKING:
    from ...layout import GridShape
    from ...model.simulation.trace import Event
    from ...nn.training.config import Config
    from ...nn.training.samples import SampleSizes
    from .scaling import Curve
    from .steps import Simulated, Simulator

AUTO = "auto"
FEW = 3
"""Grids that are simulated to find the best for a point of a curve."""


class Scaling(Enum):
    """What --scaling takes."""

    STRONG = "strong"
    WEAK = "weak"
    BOTH = "both"
    NONE = "none"

    @property
    def kinds(self) -> list[str]:
        return ["strong", "weak"] if self is Scaling.BOTH else [] if self is Scaling.NONE else [self.value]


def simulate_command(
    config: Annotated[Path, typer.Argument(help="TOML file of pmm3d train.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the step; the configuration's batch is theirs.")],
    machine: Annotated[str | None, typer.Option(help="perlmutter, frontier, alps, nominal, or a TOML file, as pmm3d "
                                                     "tune machine writes it. Left out: PMM3D_MACHINE, or the one "
                                                     "measured here, or nominal.")] = None,
    grid: Annotated[str, typer.Option(help="GxxGyxGz, as 2x2x4, ddp, fsdp, hsdp, megatron, or auto: the best.")] = AUTO,
    data: Annotated[int | None, typer.Option(min=1, help="Ranks along data. Left out: those that x, y and z "
                                                         "leave. With a named grid, all points of the curves "
                                                         "have this number.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node. Left out: those of the "
                                                                   "machine.")] = None,
    noise: Annotated[float | None, typer.Option(min=0.0, help="Standard deviation of a rank's time for a step, as a "
                                                              "share of it. Left out: the machine's.")] = None,
    scaling: Annotated[Scaling, typer.Option(help="Curves to simulate.")] = Scaling.BOTH,
    from_ranks: Annotated[int | None, typer.Option(min=1, help="Least number of ranks of a curve.")] = None,
    to_ranks: Annotated[int | None, typer.Option(min=1, help="Largest number of ranks of a curve. Left out: 32,768, "
                                                             "or those of the node that was measured here.")] = None,
    features: Annotated[int | None, typer.Option(min=1, help="Columns of a sample, where the data file is not here "
                                                             "yet.")] = None,
    outputs: Annotated[int | None, typer.Option(min=1, help="Columns of a target, if the data file is not here "
                                                            "yet.")] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="Number of classes, if the targets are labels and the "
                                                            "data file is not here yet.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step as a Chrome trace here (ui.perfetto.dev).")] = None,
    beside: Annotated[Path | None, typer.Option(help="A file of pmm3d train --trace, to be put into --trace beside "
                                                     "the simulated step.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; - is standard "
                                                                  "output.")] = None,
) -> None:
    """Simulate a training step on a machine, on as many ranks as it is to have, and how it scales.

    The step is a dry run of the program that trains, priced by the machine: one rank stands for all that do the same.
    Printed are where its time goes, what is waited for along each axis and what is hidden, memory, and curves with and
    without each overlap. What it cannot know: docs/simulation.md. One process; no MPI is used.

    [bold]Examples[/]

    pmm3d simulate surrogate.toml --ranks 8192 --machine frontier

    pmm3d simulate surrogate.toml --ranks 512 --machine perlmutter --grid 2x2x4 --scaling weak --plot weak.png

    pmm3d simulate apps/digits.toml --ranks 8 --machine here.toml --grid 2x2x1 --trace both.json --beside real.json
    """
    if task_rank(os.environ):
        return
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    with complaining():
        from ...nn.training.config import load
        from ..plan.machines import chosen_machine
        from ..plots import check_picture
        from .beside import read_trace
        from .scaling import MOST, curves, rank_counts
        from .steps import Simulator

        if beside is not None and trace is None:
            raise Pmm3dError("--beside puts a real trace into the file of --trace: give that too")
        if plot is not None and not scaling.kinds:
            raise Pmm3dError("--plot draws the curves, and --scaling none asks for none: leave one of them out")
        if plot is not None:
            check_picture(plot, "--plot")
        check_writable(trace, plot, text=json_file)
        real = read_trace(beside) if beside else []
        loaded, asked = load(config), chosen_machine(machine, max(ranks, to_ranks or 0), ranks_per_node)
        if loaded.grid.pipe > 1:
            raise Pmm3dError(f"grid.pipe = {loaded.grid.pipe}: the step of a pipeline is not simulated here. Use pmm3d "
                             "plan train for its time, or leave grid.pipe out")
        known = asked.machine
        simulator = Simulator(loaded, known, known.ranks_per_node, known.noise if noise is None else noise,
                              _sizes(features, outputs, classes)).unbounded()
        if to_ranks is None and asked.measured and chosen_machine(None, MOST, ranks_per_node).machine != known:
            to_ranks = known.ranks_per_node
        counts = rank_counts(ranks, from_ranks, to_ranks) if scaling.kinds else []
        chosen = _chooser(simulator, grid, data)
        with _bar() as tell:
            found = simulator.of(chosen(simulator.config, ranks, True))
            drawn = curves(simulator, scaling.kinds, ranks, counts, lambda one, count: chosen(one, count, False), tell)
        for line in asked.lines("full", known.stands_for(found.dtype)):
            say(line)
        _print(simulator, found, drawn, config.name)
        _write(simulator, found, drawn, config.name, (trace, plot, json_file), real)


def _sizes(features: int | None, outputs: int | None, classes: int | None) -> SampleSizes | None:
    """Of the samples, where they are given."""
    from ...nn.training.samples import SampleSizes

    if features is None and outputs is None and classes is None:
        return None
    last = classes or outputs
    if features is None or last is None or (outputs and classes):
        raise Pmm3dError("samples are given by --features together with either --outputs or --classes")
    return SampleSizes(features, last, classes is not None)


def _chooser(simulator: Simulator, grid: str, data: int | None) -> Callable[[Config, int, bool], GridShape]:
    """What finds the grid for a configuration on a number of ranks: chosen(config, ranks, whether it is for the step
    itself, and no point of a curve)."""
    from ...comm import chosen_shape
    from ...layout import parse_shape

    best: dict[tuple[int, int], GridShape] = {}

    def chosen(config: Config, ranks: int, itself: bool) -> GridShape:
        if grid == AUTO:
            key = config.data.batch_size, ranks
            if key not in best:
                best[key] = _best(simulator, config, ranks, [] if itself else [*best.values()])
            return best[key]
        sizes = grid[:1].isdigit()
        size = data if itself or grid in ("hsdp", "megatron") else None
        if size is None and sizes:
            x, y, z = parse_shape(grid)[:3]
            size, over = divmod(ranks, max(1, x * y * z))
            if over or not size:
                raise Pmm3dError(f"grid {grid} takes a multiple of {x * y * z} ranks, and these are {ranks:,}: give "
                                 "another --grid or --ranks")
        elif size is None and grid == "hsdp":
            size = -(-ranks // simulator.ranks_per_node)
        return cast("GridShape", chosen_shape(grid, size or 1, {}, ranks, None, "float32", None))

    if grid == AUTO and data is not None:
        raise Pmm3dError("--data goes with a --grid that is not auto: auto chooses it")
    return chosen


def _best(simulator: Simulator, config: Config, ranks: int, others: list[GridShape]) -> GridShape:
    """By the planner, which simulates rank 0 too. If the best of other numbers of ranks are known (the first of them is
    that of the step, the last that of the point before), only a few in its order, and those like the known ones."""
    from ...nn.training.planning import ACTIONS, NOISE, TOP, rank_training

    top, actions = (FEW, 0) if others else (TOP, ACTIONS)
    ranking = rank_training(config, ranks, simulator.machine, samples=simulator.steps.samples, top=top, actions=actions)
    best, least = ranking.candidates[0].grid, ranking.candidates[0].seconds * (1 - NOISE)
    tried = {each.grid for each in [*ranking.candidates, *ranking.dropped]}
    for grid in dict.fromkeys([*_like(others[:1], ranks, 1), *_like(others[-1:], ranks, 2)]):
        if grid not in tried:
            with suppress(Pmm3dError):
                found = simulator.of(grid, config, alone=True)
                memory = simulator.machine.memory
                fits = not memory or sum(found.step.memory.values()) <= memory
                if fits and found.timeline.seconds < least:
                    best, least = grid, found.timeline.seconds
    return best


def _like(grids: list[GridShape], ranks: int, times: int) -> Iterator[GridShape]:
    """Of so many ranks, those as long along x, y and z as another, or so many times as long along one of them."""
    from ...layout import GridShape

    for grid in grids:
        for factors in ((1, 1, 1), (times, 1, 1), (1, times, 1), (1, 1, times)):
            x, y, z = (size * factor for size, factor in zip(grid, factors))
            data, over = divmod(ranks, x * y * z)
            if data and not over:
                yield GridShape(x, y, z, data)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """tell(done, total) that draws a progress bar on stderr."""
    with Progress(console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("simulating", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _print(simulator: Simulator, found: Simulated, drawn: list[Curve], what: str) -> None:
    from .printing import print_curve, print_step

    screen = console(sys.stdout)
    print_step(simulator, found, what, screen)
    for curve in drawn:
        print_curve(curve, screen)


def _write(simulator: Simulator, found: Simulated, drawn: list[Curve], what: str,
           files: tuple[Path | None, Path | None, Path | None], real: Sequence[Event]) -> None:
    from .as_json import as_json
    from .beside import write_trace
    from .picture import draw

    trace, plot, json_file = files
    if trace is not None:
        say(write_trace(trace, found, real))
    if plot is not None:
        draw(drawn, f"{what} on {simulator.machine.name}", plot)
    if json_file is not None:
        write_text(json_file, json.dumps(as_json(simulator, found, drawn, what), indent=1) + "\n")
    say_written(plot, json_file)
