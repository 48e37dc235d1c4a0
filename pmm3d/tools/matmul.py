"""The command `pmm3d matmul`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..text import counted, in_bytes, in_time
from .output import bar, facts
from .plan.options import bytes_named
from .ranks import all_ranks, on_first, one_of, size
from .terminal import console, say

WHERE = "a .npy file, or FILE.h5:NAME, a data set of an HDF5 file"


def matmul_command(
    a: Annotated[str, typer.Argument(help=f"A: {WHERE}.")],
    b: Annotated[str, typer.Argument(help=f"B: {WHERE}.")],
    c: Annotated[str, typer.Argument(help=f"The new file of C: {WHERE}.")],
    memory: Annotated[
        int, typer.Option(parser=bytes_named, metavar="BYTES", help='Bytes that a rank may hold, such as "2 GiB".')
    ],
    transa: Annotated[str, typer.Option(callback=one_of("N", "T", "C"), help="op(A): N, T or C, as in BLAS.")] = "N",
    transb: Annotated[str, typer.Option(callback=one_of("N", "T", "C"), help="op(B).")] = "N",
    grid: Annotated[str, typer.Option(help="GxxGyxGz. auto: y = 1, and x and z as equal as possible.")] = "auto",
    save_seconds: Annotated[int, size(0, "Time between two saves of an incomplete tile of C.")] = 600,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the whole file of C, and forget a run that was not finished.")
    ] = False,
) -> None:
    """C = op(A) op(B) of matrices in files, which need not fit in memory.

    The same command, without --overwrite, continues a run that ended early, also on another number of ranks. If the
    disk is full, nothing is lost.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d matmul a.npy b.npy c.npy --memory "2 GiB"

    srun -n 512 pmm3d matmul h.h5:H s.h5:S out.h5:HS --memory "60 GiB" --transa C
    """
    with all_ranks() as comm:
        from .. import Grid
        from ..io import matmul_files

        paths = [_stored(each) for each in (a, b, c)]
        shape = on_first(comm, lambda: _square(comm.size) if grid == "auto" else grid)
        with Grid(comm, shape) as made, bar("matmul", comm.rank == 0) as tell:
            report = matmul_files(
                made, *paths, memory=memory, transa=transa, transb=transb, save_seconds=save_seconds,
                overwrite=overwrite, progress=tell,
            )  # fmt: skip
        if comm.rank == 0:
            product = report.product
            steps = product.tiles * product.panels
            rate = report.read / report.seconds
            rows = {
                "product": f"{product.m} x {product.n} x {product.k} {product.dtype} on {made.shape}",
                "tiles of C": f"{product.tiles}, of {product.rows} x {product.cols}; panels of {product.depth}",
                "held by a rank": in_bytes(product.held),
                "read": f"{in_bytes(report.read)}, {in_bytes(rate)}/s; a whole run {in_bytes(product.read)}, "
                f"{product.read / report.bound:.2f} of the least possible",
                "time": f"{in_time(report.seconds)}, of which {in_time(report.waited)} waiting for files",
            }
            if report.first:
                rows["continued"] = f"after {report.first:,} of {counted(steps, 'product')} of panels"
            if report.unsaved:
                rows["not saved"] = f"{counted(report.unsaved, 'incomplete tile')}: the disk had no room"
            console(sys.stdout).print(facts("[bold]Product of files[/]", rows))
            say(f"wrote {c}")


def _stored(text: str) -> Path | tuple[Path, str]:
    path, colon, dataset = text.rpartition(":")
    return (Path(path), dataset) if colon and not text.endswith(".npy") else Path(text)


def _square(ranks: int) -> tuple[int, int, int]:
    """The grid of x z ranks with the most equal x and z."""
    x = next(x for x in range(int(ranks**0.5), 0, -1) if ranks % x == 0)
    return x, 1, ranks // x
