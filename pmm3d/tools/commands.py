"""The commands of `pmm3d`, and those of them that are short enough to stand here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import Pmm3dError
from ..model.environment import task_rank
from .bench.command import bench_command
from .convert import convert_command
from .doctor.command import doctor_command
from .ranks import all_ranks, on_first

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Distributed matrix products by the 3D algorithm, and networks trained with them. Run under "
                       "mpiexec or srun: python -m pmm3d.launcher -n 8 -m pmm3d bench")
NOT_FINISHED = 75
"""Exit code of a run that a signal ended: EX_TEMPFAIL of sysexits.h, try again later."""


@app.callback()
def _pmm3d() -> None:
    """Commands take the same options on all ranks."""


app.command("bench")(bench_command)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="TOML file; apps/digits.toml is one, with every section.")],
    resume: Annotated[str, typer.Option(help="auto: from the newest good checkpoint of training.folder, if there is "
                                             "one; never: from the start, if there is none; or the path of a "
                                             "checkpoint.")] = "never",
    show: Annotated[bool, typer.Option("--show", help="Print the configuration with defaults; do nothing.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run here (ui.perfetto.dev).")] = None,
) -> None:
    """Train a fully connected network on data in HDF5, as a configuration says.

    Writes metrics.jsonl, run.json, curves.png and checkpoints/ into training.folder, which belongs to this job until it
    ends: another one refuses. `pmm3d report` makes a page of them. Batches, weights and checkpoints do not depend on
    the grid: a run may be resumed on another number of ranks. SIGUSR1 has a checkpoint written, SIGTERM has
    one written and ends the run with exit code 75: not finished, start again with --resume auto.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d train apps/digits.toml

    srun -n 64 pmm3d train surrogate.toml --resume auto

    pmm3d train x.toml --show                          every key with its default
    """
    with all_ranks() as comm:
        from ..nn.training import config as configuration
        from ..nn.training.job import train_job

        loaded = on_first(comm, lambda: configuration.load(config))
        if show:
            if comm.rank == 0:
                print(loaded.model_dump_json(indent=2))
            return
        finished = train_job(loaded, comm, resume, trace)
    if not finished:
        raise typer.Exit(NOT_FINISHED)


app.command("convert")(convert_command)
app.command("doctor")(doctor_command)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a training run, or a file of pmm3d bench --json.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder if left "
                                                     "out.")] = None,
) -> None:
    """Make a page of a run: curves, time of each rank, bytes beside the model, memory, the grid.

    One HTML file that needs no network, readable while the run goes on too. No MPI is used.

    [bold]Example[/]

    pmm3d report runs/digits
    """
    if task_rank(os.environ):
        return
    from .page import write_page

    try:
        print(f"wrote {write_page(run, output)}")
    except Pmm3dError as error:
        print(f"pmm3d: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(2) from None


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's, whose newest one is taken.")],
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
) -> None:
    """Write the weights of a checkpoint as a torch state dict, in a safetensors file.

    [bold]Example[/]

    pmm3d export runs/digits digits.safetensors

    and in torch: net.load_state_dict(safetensors.torch.load_file("digits.safetensors")), where net is an nn.Sequential
    of the same layers.
    """
    with all_ranks() as comm:
        from ..nn.exchange import export_checkpoint

        export_checkpoint(comm, checkpoint, target)
        if comm.rank == 0:
            print(f"wrote {target}")
