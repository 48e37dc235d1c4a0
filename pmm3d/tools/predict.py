"""The command `pmm3d predict`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .outputs import check_writable
from .ranks import all_ranks, on_first
from .terminal import say


def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a training run, whose newest good checkpoint is taken, or "
                                             "that of a checkpoint.")],
    file: Annotated[Path, typer.Argument(help="HDF5 file with the samples; it needs no targets.")],
    out: Annotated[Path, typer.Option(help="The HDF5 file to write.")],
    inputs: Annotated[str | None, typer.Option(help="Name of the samples' data set. Left out: data.inputs of the "
                                                    "run.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at a time, over all ranks. Left out: "
                                                               "data.batch_size of the run.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write what the network of a training run says of samples.

    The network is made as the run's configuration says, which its checkpoints hold. OUT gets a data set `outputs` with
    a row a sample; for classes also `probabilities`, and `classes` with the number of the most probable one, whose
    attribute class_names has their names. It appears only when it is complete. On any number of ranks; on the run's
    grid if it fits them.

    [bold]Examples[/]

    pmm3d predict runs/digits new.h5 --out predicted.h5

    pmm3d predict runs/digits new.h5 --out p.h5 --inputs images --batch-size 4096

    srun -n 64 pmm3d predict runs/flow/checkpoints/step-00000300 x.h5 --out y.h5
    """
    with all_ranks() as comm:
        from ..nn.training.predict import Asked, check_files, predict

        asked = Asked(run, file, out, inputs, batch_size, overwrite)

        def first() -> None:
            check_files(asked)
            check_writable(out)

        on_first(comm, first)
        with _bar(comm.rank == 0) as tell:
            done = predict(comm, asked, tell)
        if comm.rank == 0:
            sizes = (f"{name} {' x '.join(map(str, shape))}" for name, shape in done.shapes.items())
            say(f"wrote {out}: {', '.join(sizes)}; by {done.checkpoint} on grid {done.grid}")


@contextmanager
def _bar(speaks: bool) -> Iterator[Callable[[int, int], None]]:
    """tell(done, total) that draws a progress bar on stderr."""
    shown = speaks and sys.stderr.isatty()
    with Progress(console=Console(file=sys.stderr), transient=True, disable=not shown) as progress:
        bar = progress.add_task("predicting", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
