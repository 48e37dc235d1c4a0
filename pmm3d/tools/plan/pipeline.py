"""The command `pmm3d plan pipeline`."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from ...errors import Pmm3dError
from ..output import bar, say_written, write_json, write_text
from ..ranks import MOST_RANKS, one_process, size

MOST_PASSES = 2**18
"""Largest number of forward passes of a table."""
OF_A_RANK = "one number for a rank, split equally among its stages; or one for each stage, separated by commas"


@one_process
def pipeline_command(
    ranks: Annotated[int | None, size(1, "Ranks of the pipeline. Default: those of FILE.csv.", MOST_RANKS)] = None,
    micro_batches: Annotated[int | None, size(1, "Micro-batches of a step. Default: those of FILE.csv.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="A name: zb-h1, or interleaved-4 with 4 stages on each rank, or any other of the comparison; or "
            "FILE.csv, a table in PyTorch's notation. Default: compare all names."
        ),
    ] = None,
    forward: Annotated[
        str, typer.Option(metavar="T", help=f"Time of the forward pass of a micro-batch: {OF_A_RANK}.")
    ] = "1",
    backward: Annotated[
        str, typer.Option(metavar="T", help="Time of the backward pass for the input, given like --forward.")
    ] = "1",
    weight: Annotated[
        str, typer.Option(metavar="T", help="Time of the backward pass for the weights, given like --forward.")
    ] = "1",
    communication: Annotated[
        str, typer.Option(metavar="T", help="Time of a message between stages, one number.")
    ] = "0",
    peak_live: Annotated[
        float | None,
        typer.Option(
            help="Largest number of micro-batches that a rank may hold. "
            "zb-1p, zb-2p and v-half keep within it; other schedules "
            "that exceed it are refused."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the time line into this file (.png, .pdf, .svg).")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file, in PyTorch's notation.")] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Include sends and receives in the table of --csv.")
    ] = False,
) -> None:
    """Simulate schedules of a pipeline: the time of a step, the waits of its ranks, and the micro-batches they hold.

    The table of the schedule is checked and simulated. A rank begins an action when the rank is free and the input has
    arrived. Give all times in one unit; printed times have the same unit. "bubble" is the share of the time in which
    the rank with the most work waits. "peak live" is the largest number of micro-batches that a rank holds between
    their forward pass and the end of their backward pass for the weights. The stages of a rank count as one. No MPI is
    used.

    [bold]Examples[/]

    pmm3d plan pipeline --ranks 4 --micro-batches 8

    pmm3d plan pipeline --schedule zb-h1 --ranks 4 --micro-batches 8

    pmm3d plan pipeline --schedule own.csv --forward 1,1,2,2 --json -

    pmm3d plan pipeline --schedule zb-2p --ranks 8 --micro-batches 24 --weight 0.5

    More options: --forward 18.5 --backward 18.1 --weight 9.3 --communication 0.6 for measured times in ms; --plot
    zb-2p.svg; --csv zb-2p.csv --messages for the table with sends and receives.
    """
    from .ranking import check_outputs
    from .schedules import Asked, compare, draw, figures_of, print_schedule, simulated, table_text, times_of

    check_outputs(json, plot, csv)
    if messages and csv is None:
        raise Pmm3dError("--messages has no effect without --csv: name the file of the table")
    if peak_live is not None and not 0 < peak_live < inf:
        raise Pmm3dError(f"--peak-live must be a positive number of micro-batches, got {peak_live}")
    stages = re.search(r"-(\d+)$", schedule or "")
    if (passes := (ranks or 1) * (micro_batches or 1) * int(stages[1] if stages else 1)) > MOST_PASSES:
        raise Pmm3dError(
            f"ranks x stages of a rank x micro-batches is {passes:,}, and a table has at most {MOST_PASSES:,} such "
            "passes: take fewer micro-batches; the middle of a schedule repeats itself"
        )
    if schedule is None and (plot or csv):
        raise Pmm3dError("--plot and --csv need one schedule: name it with --schedule")
    texts = {"forward": forward, "backward": backward, "weight": weight, "communication": communication}
    times = {name: times_of(name, text) for name, text in texts.items()}
    if not any(map(any, times.values())):
        raise Pmm3dError(
            "all times are 0, so no schedule is faster than another: give a positive time to --forward, "
            "--backward or --weight"
        )
    asked = Asked(ranks, micro_batches, times, peak_live)
    if schedule is None:
        with bar("plan pipeline") as told:
            ranked, left_out = simulated(asked, told)
        figures = compare(ranked, left_out)
    else:
        with bar("plan pipeline"):
            table, line = asked.simulated(schedule)
        print_schedule(table, line)
        figures = figures_of(table, line)
        if plot:
            draw(table, line, plot)
        if csv:
            write_text(csv, table_text(table, messages))
    if json:
        write_json(json, figures)
    say_written(json, plot, csv)
