"""The command `pmm3d convert`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..errors import printable
from ..io import convert
from ..model.environment import task_rank
from .outputs import check_writable
from .terminal import complaining, say


def convert_command(
    source: Annotated[Path, typer.Argument(help="A table of numbers as text (CSV), or a .npz file of arrays.")],
    target: Annotated[Path, typer.Argument(help="The HDF5 file to write.")],
    inputs: Annotated[str, typer.Option(help="Name of the samples' data set; of their array in a .npz file.")] = "x",
    targets: Annotated[str, typer.Option(help="Likewise of the targets.")] = "y",
    target_columns: Annotated[str | None, typer.Option(help="Columns of a CSV file that are targets: names or indices, "
                                                            "as in age,income. Left out: the last one.")] = None,
    classes: Annotated[bool, typer.Option("--classes", help="The targets are labels of classes, numbers or "
                                                            "text.")] = False,
    class_names: Annotated[str | None, typer.Option(help="The classes in the order of their numbers, as in cat,dog: "
                                                         "a second file gets the numbers of the first.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Between cells. Left out: found in the first line.")] = None,
    encoding: Annotated[str, typer.Option(help="Of a CSV file: latin-1, utf-16. Left out: UTF-8.")] = "utf-8-sig",
    dtype: Annotated[str, typer.Option(help="float32 or float64, of what comes from a CSV file.")] = "float32",
    chunk_rows: Annotated[int | None, typer.Option(min=1, help="Lines in memory at a time. Left out: about a million "
                                                               "cells.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert samples from CSV or .npz to the HDF5 file that training reads.

    A file larger than memory is no obstacle. TARGET appears only when it is complete. Under mpiexec the first rank
    converts.

    [bold]Examples[/]

    pmm3d convert houses.csv houses.h5 --target-columns price

    pmm3d convert iris.csv iris.h5 --classes     species as text become 0, 1, 2

    pmm3d convert digits.npz digits.h5 --inputs images --targets labels
    """
    if task_rank(os.environ) > 0:
        return
    columns = target_columns and [int(name) if re.fullmatch("-?[0-9]+", name) else name
                                  for name in target_columns.split(",")]
    with complaining(), _bar(source) as tell:
        check_writable(target)
        shapes = convert(source, target, inputs=inputs, targets=targets, target_columns=columns or None,
                         classes=class_names.split(",") if class_names else classes, chunk_rows=chunk_rows,
                         delimiter=delimiter, encoding=encoding, dtype=dtype, overwrite=overwrite, tell=tell)
    sizes = (f"{name} {' x '.join(map(str, shape))}" for name, shape in zip((inputs, targets), shapes))
    say(f"wrote {target}: {', '.join(sizes)}")


@contextmanager
def _bar(source: Path) -> Iterator[Callable[[int, int], None]]:
    """tell(done, total) that draws a progress bar on stderr."""
    with Progress(console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(escape(printable(source.name)), total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
