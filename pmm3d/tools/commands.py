"""The commands of `pmm3d`, and those of them that are short enough to stand here."""

from __future__ import annotations

import os
import re
import shlex
import sys
from enum import Enum
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..model.environment import task_rank
from .bench.command import bench_command
from .convert import table_command, text_command
from .doctor.command import doctor_command
from .export import export_command
from .outputs import check_writable
from .plan.gpt import gpt_command
from .plan.pipeline import pipeline_command
from .plan.product import product_command
from .plan.train import train_command as plan_train_command
from .predict import predict_command
from .ranks import all_ranks, on_first
from .terminal import complaining, say
from .tune.blas.command import blas_command
from .tune.command import machine_command

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Distributed matrix products by the 3D algorithm, and networks trained with them. Run under "
                       "mpiexec or srun: python -m pmm3d.launcher -n 8 -m pmm3d bench")
NOT_FINISHED = 75
"""Exit code of a run that a signal ended: EX_TEMPFAIL of sysexits.h, try again later."""

ENDED = (f"this command ends with exit code {NOT_FINISHED} (not finished). A launcher may report that as a process "
         "with non-zero status: Open MPI does so in a box. It is no failure.")


class Accepted(Enum):
    """What --accept takes."""

    NETWORK = "network"
    DATA = "data"


def _print_version(asked: bool) -> None:
    if asked:
        say(f"pmm3d {__version__}")
        raise typer.Exit


@app.callback()
def _pmm3d(context: typer.Context,
           version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                                 help="Print the version and end.")] = False) -> None:
    """Commands take the same options on all ranks."""
    context.call_on_close(partial(setattr, sys, "stdout", sys.stdout))


def _tune() -> None:
    """Commands take the same options on all ranks."""


def train_command(
    config: Annotated[Path, typer.Argument(help="TOML file; --show prints it with every key and its meaning.")],
    resume: Annotated[str, typer.Option(help="auto: from the newest good checkpoint of training.folder, or from the "
                                             "start if there is none; never: from the start, refused if there is one; "
                                             "or the path of a checkpoint: later ones are set aside.")] = "never",
    accept: Annotated[list[Accepted] | None, typer.Option(help="Go on although the network, or the data, is not that "
                                                               "of the checkpoint, which is refused otherwise; may be "
                                                               "given twice.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the configuration as TOML, with the meaning and the "
                                                      "allowed values of every key; train nothing.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run here (ui.perfetto.dev).")] = None,
) -> None:
    """Train a network on data in HDF5, as a configuration says.

    Writes metrics.jsonl, run.json, curves.png and checkpoints/ into training.folder, which belongs to this job until it
    ends: another one refuses. `pmm3d report` makes a page of them. Batches, weights and checkpoints do not depend on
    the grid: a run may be resumed on another number of ranks.

    A run that is resumed takes weights, the optimizer's state and its place in the data from the checkpoint, and all
    else from the configuration; what differs is said. SIGUSR1 has a checkpoint written; SIGTERM and Ctrl-C have one
    written and end the run.

    [bold]Exit codes[/]

    0: trained to the end, also where curves or a page could not be drawn; 75: ended by a signal, with a checkpoint:
    start it again with --resume auto; 2: bad input or configuration, in one line; 1: an unexpected error, with
    its traceback; 70: ranks hung, with the place of each.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d train apps/digits.toml

    srun -n 64 pmm3d train surrogate.toml --resume auto

    pmm3d train x.toml --show > every_key.toml
    """
    with all_ranks() as comm:
        from ..nn.training import config as configuration
        from ..nn.training.described import as_toml
        from ..nn.training.job import train_job

        def first() -> configuration.Config:
            check_writable(trace)
            return configuration.load(config)

        loaded = on_first(comm, first)
        if show:
            if comm.rank == 0:
                say(as_toml(loaded))
            return
        again = f"pmm3d train {shlex.quote(str(config))} --resume auto"
        finished = train_job(loaded, comm, resume, trace, frozenset(each.value for each in accept or ()), again)
        if not finished and comm.rank == 0:
            say(ENDED)
    if not finished:
        raise typer.Exit(NOT_FINISHED)


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run, or a file of pmm3d bench --json.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder if left "
                                                     "out.")] = None,
    mtbf: Annotated[float | None, typer.Option(help="Hours between failures of the whole job, for how often to write "
                                                    "checkpoints; left out: a day.")] = None,
) -> None:
    """Make a page of a run: curves, time and memory of each rank, bytes of each collective, the grid.

    One HTML file that needs no network, readable while the run goes on too. No MPI is used.

    [bold]Example[/]

    pmm3d report runs/digits
    """
    if task_rank(os.environ):
        return
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    with complaining():
        from .page import write_page

        if output is not None:
            check_writable(output)
        say(f"wrote {write_page(run, output, mtbf)}")


class _ConvertGroup(TyperGroup):
    """`pmm3d convert x.csv x.h5` is `pmm3d convert table x.csv x.h5`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = {*args[:1]} <= {*self.commands, "--help"}
        return super().parse_args(ctx, args if named else ["table", *args])


def _in_paragraphs(text: str) -> str:
    """A docstring whose lines end where the terminal does."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(text))


for command in (bench_command, train_command, predict_command, doctor_command,
                report_command, export_command):
    app.command(command.__name__.removesuffix("_command"), help=_in_paragraphs(command.__doc__ or ""))(command)

tune_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
                       pretty_exceptions_enable=False,
                       help="Measure what plans and products go by: this machine, its BLASes.")
tune_app.callback()(_tune)
plan_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
                       pretty_exceptions_enable=False,
                       help="Choose the grid and the number of ranks: predict time and memory.")
convert_app = typer.Typer(cls=_ConvertGroup, no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
                          pretty_exceptions_enable=False, help="Make the HDF5 files that training reads. The word "
                          "table may be left out: pmm3d convert x.csv x.h5.")
for group, name, grouped in ((tune_app, "machine", machine_command), (tune_app, "blas", blas_command),
                             (plan_app, "product", product_command), (plan_app, "train", plan_train_command),
                             (plan_app, "gpt", gpt_command), (plan_app, "pipeline", pipeline_command),
                             (convert_app, "table", table_command), (convert_app, "text", text_command)):
    group.command(name, help=_in_paragraphs(grouped.__doc__ or ""))(grouped)
app.add_typer(convert_app, name="convert")
app.add_typer(plan_app, name="plan")
app.add_typer(tune_app, name="tune")
