"""The command `pmm3d plan`."""

from __future__ import annotations

import json as json_format
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ...layout import MATRIX_DTYPES
from ...model.environment import task_rank
from ..output import check_writable, say_written, write_text
from ..terminal import complaining, console, say
from .asked import Asked


class Terms(Enum):
    """What --terms takes."""

    FULL = "full"
    AXONN = "axonn"


DTypes = Enum("DTypes", {name: name for name in MATRIX_DTYPES})  # type: ignore[misc]
"""What --dtype takes."""


def plan_command(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a training.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the job.")] = ...,  # type: ignore[assignment]
    machine: Annotated[str | None, typer.Option(help="perlmutter, frontier, alps, nominal, or a TOML file. Left out: "
                                                     "as measured here (pmm3d tune machine), else nominal.")] = None,
    m: Annotated[int | None, typer.Option(min=1, help="A product: rows of A and C.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="A product: columns of B and C.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="A product: columns of A, rows of B.")] = None,
    dtype: Annotated[DTypes | None, typer.Option(help="A product: type of its elements. Left out: float64.")] = None,
    features: Annotated[int | None, typer.Option(min=1, help="A training: columns of a sample, if the file of "
                                                             "samples does not exist yet.")] = None,
    outputs: Annotated[int | None, typer.Option(min=1, help="A training: columns of a target, if the file does not "
                                                            "exist yet.")] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="A training: number of classes, in place of "
                                                            "--outputs.")] = None,
    gpt: Annotated[bool, typer.Option("--gpt", help="A GPT, in bfloat16 with AdamW; recomputed where it fits "
                                                    "only so.")] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="A GPT: number of its blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="A GPT: its width.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="A GPT: number of heads. Left out: hidden / 64; with "
                                                          "--terms axonn, any number.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="A GPT: tokens of a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="A GPT: sequences of a step.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=0, help="A GPT: number of tokens. Left out: 51200. A training "
                                                               "on tokens: the same, if their file does not exist "
                                                               "yet.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="A GPT: micro-batches of a step, which pipelines "
                                                                  "need. Left out: 1.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node. Left out: those of the "
                                                                   "machine.")] = None,
    terms: Annotated[Terms, typer.Option(help="full: all that a rank does, simulated; axonn: the collectives of a GPT "
                                              "by the five terms of AxoNN's authors.")] = Terms.FULL,
    order: Annotated[str | None, typer.Option(help="Order of the axes in which ranks are numbered, innermost first, "
                                                   "for --terms axonn. Left out: y,x,z,data.")] = None,
    powers_of_two: Annotated[bool, typer.Option("--powers-of-two", help="Only grids whose sizes are powers of two, for "
                                                                        "--terms axonn.")] = False,
    min_tensor: Annotated[int | None, typer.Option(min=1, help="Least number of ranks along x, y and z together, for "
                                                               "--terms axonn.")] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="Bytes that a rank may hold. Left out: those of the "
                                                           "machine; no limit for --terms axonn.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Grids to show.")] = 10,
    mtbf: Annotated[float | None, typer.Option(help="Hours between failures of the job: says how often to write a "
                                                    "checkpoint.")] = None,
    write_seconds: Annotated[float | None, typer.Option(help="Seconds that it takes to write a checkpoint. Left out: "
                                                             "at 1 GB/s a node.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all ranked grids here; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw where the time goes here (.png, .pdf, .svg).")] = None,
) -> None:
    """Which grid, how many ranks, will it fit, how long: before a job is submitted.

    All grids of that many ranks are priced for a machine; what does not fit is dropped, and said. The best are shown
    with the time of each term, what a rank holds and the share of peak, and beside them the grids of plain data
    parallelism (ddp), of sharded weights (fsdp, hsdp) and of tensor parallelism (megatron); of a transformer also those
    of megatron+sp, cp, 3d, 4d and 5d. No MPI is used.

    [bold]Examples[/]

    pmm3d plan --m 65536 --n 65536 --k 65536 --ranks 512 --machine perlmutter

    pmm3d plan apps/digits.toml --ranks 64 --features 64 --classes 10

    pmm3d plan --gpt --layers 24 --hidden 1024 --sequence 512 --batch 64 --ranks 8

    To the last: --machine frontier; --micro-batches 8 for pipelines; --terms axonn --powers-of-two for the published
    model; --mtbf 24 --write-seconds 30 for how often to write a checkpoint; --plot plan.png.
    """
    if task_rank(os.environ):
        return
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    options = {"m": m, "n": n, "k": k, "dtype": dtype.value if dtype else None, "features": features,
               "outputs": outputs, "classes": classes, "layers": layers, "hidden": hidden, "heads": heads,
               "sequence": sequence, "batch": batch, "vocabulary": vocabulary, "micro_batches": micro_batches,
               "ranks_per_node": ranks_per_node, "order": order, "powers_of_two": powers_of_two,
               "min_tensor": min_tensor, "memory": memory, "mtbf": mtbf, "write_seconds": write_seconds}
    with complaining():
        asked = Asked(ranks, config, gpt, terms is Terms.AXONN, options)
        asked.check()
        _check_output(json, plot)
        _plan(asked, machine, top, json, plot)


def _check_output(json: Path | None, plot: Path | None) -> None:
    check_writable(plot, text=json)
    if plot:
        from ..plots import check_picture

        check_picture(plot, "--plot")


def _plan(asked: Asked, machine: str | None, top: int, json: Path | None, plot: Path | None) -> None:
    from .answer import answered
    from .machines import chosen_machine
    from .shown import choice, dropped_lines, shown_of
    from .table import print_ranking

    chosen = chosen_machine(machine, asked.ranks, asked["ranks_per_node"])
    answer = answered(asked, chosen.machine, top)
    ranking, shown = answer.ranking, shown_of(answer.ranking, top)
    for line in chosen.lines("axonn" if asked.axonn else "full", ranking.dtype):
        say(line)
    print_ranking(console(sys.stdout), ranking, shown, answer.peak, answer.product)
    for line in (*answer.notes, *dropped_lines(ranking), choice(ranking, answer.unit), *answer.advice):
        say(line)
    if json:
        write_text(json, json_format.dumps(answer.as_json(), indent=1) + "\n")
    if plot:
        from .plot import plot as draw

        draw(ranking, shown, chosen.machine.name, plot)
    say_written(json, plot)
