"""The command `pmm3d plan train`."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import Pmm3dError
from ...model.interval import HOUR, advice
from ..output import bar, say_written, write_json
from ..ranks import one_process, size
from ..terminal import say
from . import options

if TYPE_CHECKING:
    from ...nn.training.config import Config
    from ...nn.training.samples import SampleSizes

AUTO = "auto"


@one_process
def train_command(
    config: Annotated[Path, typer.Argument(help="TOML file of pmm3d train.")],
    ranks: options.Ranks,
    machine: options.MachineName = None,
    ranks_per_node: options.RanksPerNode = None,
    memory: options.Memory = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Plan only this grid: GxxGyxGz as in 2x2x4, ddp, fsdp, hsdp or "
            "megatron. auto: plan all grids. Both print the communication, "
            "waits and computation of the first rank."
        ),
    ] = None,
    data: Annotated[
        int | None,
        size(
            1,
            "Ranks along data of a named --grid. Default: the ranks that "
            "x, y and z leave; for hsdp, the number of nodes.",
        ),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Simulate strong and weak scaling up to this "
            "number of ranks, or FROM:TO, with and without each overlap. --plot "
            "draws it.",
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Standard deviation of a rank's time for a step, as a share of it. Default: that of the machine.",
        ),
    ] = None,
    features: Annotated[
        int | None, size(1, "Columns of a sample. With --outputs or --classes, no data file is read.")
    ] = None,
    outputs: Annotated[int | None, size(1, "Columns of a target, with --features.")] = None,
    classes: Annotated[int | None, size(2, "Number of classes, with --features.")] = None,
    vocabulary: Annotated[
        int | None, size(2, "Number of different tokens. With it, no file of tokens is read.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated step as a Chrome trace (ui.perfetto.dev).")
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="A file of pmm3d train --trace. Its events are added to --trace.")
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            help="Mean hours between failures of the whole job. With --write-seconds, "
            "print how often to write a checkpoint."
        ),
    ] = None,
    write_seconds: Annotated[float | None, typer.Option(help="Seconds to write a checkpoint, for --mtbf.")] = None,
    samples: Annotated[
        float | None, typer.Option(help="Rows of the whole training: the time that it takes is printed.")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of the whole training, if the data are tokens: the time that it takes is printed."),
    ] = None,
    top: options.Top = 10,
    wide: options.Wide = False,
    json: options.Json = None,
    plot: options.Plot = None,
    picture: options.Picture = None,
    memory_picture: options.MemoryPicture = None,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy",
            help="To fit the memory, also try settings that change values, such as states of the optimizer in 8 bits.",
        ),
    ] = False,
) -> None:
    """Rank the grids for a training by the simulated time of a step, before a job is submitted.

    The step is a dry run of the training program, with the times of the machine. The tables show the time with its
    largest terms, the share of peak, and the memory of the fullest rank and of a node, for the best grids and for a
    grid of each family: ddp, fsdp, hsdp, megatron; for transformers also megatron+sp, cp, 3d, 4d, 5d. Grids that are
    not shown are counted by reason. If a fast grid does not fit the memory, the cheapest settings with which it does
    are printed. No MPI is used.

    [bold]Examples[/]

    pmm3d plan train apps/digits.toml --ranks 64 --features 64 --classes 10

    pmm3d plan train surrogate.toml --ranks 8192 --machine frontier --grid auto

    pmm3d plan train surrogate.toml --ranks 512 --curve 4096 --plot curves.png

    pmm3d plan train x.toml --ranks 8 --grid fsdp --trace x.json --beside run.json

    pmm3d plan train x.toml --ranks 8 --grid fsdp --memory-picture memory.svg

    More options: --mtbf 24 --write-seconds 30 for the interval of checkpoints.
    """
    from ...nn.training.config import load
    from ...nn.training.planning import TOP
    from .curves import best_grids, curves_of, draw_curves, print_curve, rank_counts
    from .memory import draw_memory_of
    from .ranking import as_json, check_outputs, draw, print_plan, tell
    from .step import FirstRank, Training, print_first_rank
    from .step_picture import draw_step
    from .trace import read_trace, write_trace

    check_outputs(json, plot, trace, picture=picture, memory_picture=memory_picture)
    check_mtbf(mtbf, write_seconds)
    options.check_amount("--samples", samples)
    options.check_amount("--tokens", tokens)
    if beside is not None and trace is None:
        raise Pmm3dError("--beside adds the events of a run to the file of --trace: give --trace too")
    if data is not None and grid in (None, AUTO):
        raise Pmm3dError("--data needs a named --grid: name the grid, or leave out --data")
    real, counts = read_trace(beside) if beside else [], rank_counts(ranks, curve) if curve else []
    loaded = load(config, open_pipe=True)
    amount = _amount(loaded, samples, tokens)
    chosen = options.chosen_machine(machine, max([ranks, *counts]), ranks_per_node)
    with bar("plan train") as told:
        training = Training.of(
            loaded, chosen.machine, memory, _samples(loaded, features, outputs, classes, vocabulary), noise
        )
        named = None if grid in (None, AUTO) else training.named_grid(str(grid), data, ranks)
        with training.pool(ranks) as pool:
            ranking = training.ranking(
                ranks,
                top=max(top, TOP),
                grids=[named] if named else [],
                tell=told,
                pool=None if named else pool,
                remedies="lossy" if lossy else "exact",
            )
        best = ranking.candidates[0]
        first = FirstRank.of(training, best.grid, best.settings) if trace or (grid and best.grid.stages == 1) else None
    written: dict[str, Any] = {"grids": as_json(ranking)}
    notes = [*how_often(mtbf, write_seconds, best.seconds), *training.in_words(best, amount)]
    print_plan(chosen, ranking, top, "a step", memory=memory, wide=wide)
    tell(*notes)
    if grid and first is not None:
        print_first_rank(first)
        written["first_rank"] = first.as_json()
    elif grid:
        tell("The messages of a pipeline's first rank are not listed. pmm3d plan pipeline shows its schedule")
    if counts:
        copies = data if grid in ("hsdp", "megatron") else None
        found = (
            best_grids(training, ranks, best.grid)
            if named is None
            else (lambda config, count: training.named_grid(str(grid), copies, count))
        )
        with bar("plan train --curve") as told:
            curves = curves_of(training, ranks, counts, found, told)
        for each in curves:
            print_curve(each, training)
        written["scaling"] = {each.kind: each.as_json() for each in curves}
    if trace and first is not None:
        say(write_trace(trace, first, real))
    if picture:
        draw_step(training, best, picture)
    if memory_picture:
        written["memory"] = draw_memory_of(training, best, memory_picture)
    if json:
        write_json(json, written)
    if plot and counts:
        draw_curves(curves, f"{config.name} on {chosen.machine.name}", plot)
    elif plot:
        draw(ranking, top, chosen.machine.name, plot)
    say_written(json, plot, picture, memory_picture)


def _samples(
    config: Config, features: int | None, outputs: int | None, classes: int | None, vocabulary: int | None
) -> SampleSizes | None:
    """Return the sizes of samples that the options give; None: those of the data file. Raises Pmm3dError."""
    from ...nn.training.samples import SampleSizes

    given = [each for each in (features, outputs, classes) if each is not None]
    if config.data.sequence is not None:
        if given:
            raise Pmm3dError("the data are tokens (data.sequence): give --vocabulary in place of --features")
        return SampleSizes(1 + (config.data.documents is not None), vocabulary, True) if vocabulary else None
    if vocabulary is not None:
        raise Pmm3dError("--vocabulary is for tokens, and the configuration has no data.sequence: leave it out")
    last = classes or outputs
    if given and (len(given) != 2 or features is None or last is None):
        raise Pmm3dError("the sizes of samples are --features together with either --outputs or --classes")
    return SampleSizes(features, last, classes is not None) if features and last else None


def _amount(config: Config, samples: float | None, tokens: float | None) -> float | None:
    """Return the rows or tokens of the whole training. Raises Pmm3dError for the option of other data."""
    if config.data.sequence is None and tokens is not None:
        raise Pmm3dError("--tokens is for tokens, and the configuration has no data.sequence: give --samples")
    if config.data.sequence is not None and samples is not None:
        raise Pmm3dError("the data are tokens (data.sequence): give --tokens in place of --samples")
    return samples if tokens is None else tokens


def check_mtbf(mtbf: float | None, write_seconds: float | None) -> None:
    """Raise Pmm3dError for wrong values of these options, before the work."""
    if (mtbf is None) != (write_seconds is None):
        raise Pmm3dError("--mtbf and --write-seconds belong together: give both or neither")
    if mtbf is not None and not 0 < mtbf < inf:
        raise Pmm3dError(f"--mtbf must be positive, got {mtbf:g} hours")
    how_often(mtbf, write_seconds, 1.0)


def how_often(mtbf: float | None, write_seconds: float | None, step_seconds: float) -> list[str]:
    """Return a sentence about how often to write a checkpoint; [] without the options."""
    if mtbf is None or write_seconds is None:
        return []
    return [advice(write_seconds, mtbf * HOUR, step_seconds).sentence]
