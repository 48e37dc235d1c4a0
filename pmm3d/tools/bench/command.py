"""The command `pmm3d bench`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...layout import MATRIX_DTYPES
from ...model import ranked_grids
from ...model.planning import OVERLAPS
from ...text import counted, names_in_words
from ..output import check_writable, progress, say_written, write_json
from ..plots import check_picture
from ..ranks import MOST_BYTES, all_ranks, on_first, one_of, size
from ..terminal import console, say
from .result import TF32

if TYPE_CHECKING:
    from mpi4py import MPI

    from .result import Case, Result


DTYPES = *MATRIX_DTYPES, TF32


def bench_command(
    m: Annotated[int, size(0, "Rows of A and C.")] = 4096,
    n: Annotated[int, size(0, "Columns of B and C.")] = 4096,
    k: Annotated[int, size(0, "Columns of A, rows of B.")] = 4096,
    grid: Annotated[
        str,
        typer.Option(
            help="auto: the grid with the lowest modelled time; GxxGyxGz, as in 2x2x2; "
            "all: compare every grid of all ranks and the grid of auto, which may "
            "leave ranks idle."
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            callback=one_of(*DTYPES),
            help=f"{', '.join(MATRIX_DTYPES)}; tf32: float32 with factors that the GPU rounds.",
        ),
    ] = "float64",
    array: Annotated[str, typer.Option(help="Array library: numpy, torch, torch:DEVICE or cupy.")] = "numpy",
    transpose: Annotated[
        str,
        typer.Option(
            callback=one_of("nn", "tn", "nt", "tt"), help="Storage of A and B, as in BLAS: n normal, t transposed."
        ),
    ] = "nn",
    order: Annotated[
        str,
        typer.Option(
            callback=one_of("C", "F"),
            help="Storage order of the shards of A, B and C: C by rows, F by columns. On some BLAS F is faster.",
        ),
    ] = "C",
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Store A and B in memory that the ranks of a node share. "
            "Products read them in place, and nothing is "
            "gathered.",
        ),
    ] = False,
    repeat: Annotated[
        int, size(1, "Number of timings. The median counts. On a GPU one timing covers many products.")
    ] = 7,
    reference: Annotated[
        str,
        typer.Option(
            help="Array library (as for --array) whose matmul is timed in turns with the product. One rank only."
        ),
    ] = "",
    verify: Annotated[
        str,
        typer.Option(
            callback=one_of("auto", "freivalds", "exact", "none"),
            help="freivalds: a randomized check; exact: also compare a product of integers "
            "exactly; auto: exact for a small product, otherwise freivalds; "
            "none.",
        ),
    ] = "auto",
    panels: Annotated[
        int | None,
        size(
            1,
            "Number of panels along k. The messages of one panel run during the GEMM of "
            "another. --max-workspace may raise the number. Default: 1.",
        ),
    ] = None,
    overlap: Annotated[
        str,
        typer.Option(
            callback=one_of(*OVERLAPS),
            help="none; decomposed: rows of A are multiplied as they arrive, and rows of "
            "C are sent when they are computed; auto: none on one node, decomposed "
            "across nodes if that is possible.",
        ),
    ] = "auto",
    max_workspace: Annotated[
        int | None, size(0, "Limit of a rank's work arrays, in bytes. Default: no limit.", MOST_BYTES)
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the figures to this file, as a list for --grid all; - is standard output."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the parts of the time into this file (.png, .pdf, .svg).")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run (ui.perfetto.dev).")] = None,
) -> None:
    """Time C = A B on all ranks, verify the result, and compare the rate with the limit.

    The limit is the number of cores times the rate of the same BLAS on one core. On GPUs it is the number of GPUs times
    the rate of one GPU. These rates are measured in the same run, with a GEMM of the same proportions. The first table
    contains the parts of the time of a product: the GEMM, the waits for messages of each phase, and the rest. The
    second table compares the bytes sent along each axis with the model. The exit code is 1 if the result is wrong.

    [bold]Examples[/]

    pmm3d bench                                  4096 cubed, float64

    pmm3d bench --m 65536 --n 512 --k 512 --dtype float32

    pmm3d bench --grid all --plot grids.png      which grid is the fastest?

    pmm3d bench --array torch:cuda --dtype bfloat16 --reference torch:cuda
    """
    if order != "C" and transpose != "nn":
        raise typer.BadParameter(f"--transpose {transpose} already selects how A and B are stored: leave --order out")
    if shared and order == "F":
        raise typer.BadParameter("matrices in shared memory are stored by rows: leave --shared or --order out")
    if trace and grid == "all":
        raise typer.BadParameter("--trace needs one grid: leave --trace out, or name the grid")
    with all_ranks() as comm:
        from .result import Case
        from .tables import draw, print_results

        on_first(comm, lambda: _check_output(json, plot, trace))
        case = Case.named(
            m,
            n,
            k,
            dtype,
            array,
            transpose=transpose,
            repeat=repeat,
            verification=verify,
            panels=panels,
            max_workspace=max_workspace,
            reference=reference,
            overlap=overlap,
            order=order,
            shared=shared,
        )
        results = _run_all(case, comm, grid, trace)
        if comm.rank == 0:
            print_results(results, console(sys.stdout))
            if fewer := [
                f"{counted(each.panels, 'panel')} on {each.shape}" for each in results if each.panels < (panels or 1)
            ]:
                say(
                    f"--panels {panels:,}: only {names_in_words(fewer)}. A rank has at most a panel for each of its "
                    "columns of A, and one panel if it gathers nothing"
                )
            if json:
                records = [result.as_json() for result in results]
                write_json(json, records if grid == "all" else records[0])
            if plot:
                draw(results, plot)
            say_written(json, plot, trace)
    if verify != "none" and not all(result.verified for result in results):
        raise typer.Exit(1)


def _check_output(json: Path | None, plot: Path | None, trace: Path | None) -> None:
    """Raise Pmm3dError, before anything is measured, if an output cannot be written."""
    check_writable(plot, trace, text=json)
    if plot:
        check_picture(plot, "--plot")


def _run_all(case: Case, comm: MPI.Intracomm, grid: str, trace: Path | None) -> list[Result]:
    """Measure the case on the grid. For "all", measure every grid of all ranks, and the grid of "auto", which may leave
    ranks idle. The limit is measured with the first grid."""
    from ...comm import Grid
    from .measure import run

    shapes: list[Any] = [grid]
    chosen: tuple[int, ...] = ()
    if grid == "all":
        with Grid(comm, (1, 1, comm.size)) as every:
            chosen = every.shape_for(case.product, case.dtype)[:3]
        shapes = [shape[:3] for shape in ranked_grids(case.product, comm.size, case.dtype)]
        shapes += [] if chosen in shapes else ["auto"]
    results: list[Result] = []
    with progress("bench", comm.rank == 0, (case.repeat + 4) * len(shapes)) as tell:
        for number, shape in enumerate(shapes, 1):
            name = shape if isinstance(shape, str) else "x".join(map(str, shape))
            tell(f"grid {number} of {len(shapes)}: {name}" if len(shapes) > 1 else "", 0)
            results.append(
                run(
                    case,
                    comm,
                    shape,
                    tell=lambda stage: tell(stage, 1),
                    trace=trace,
                    limit=results[0].limit if results else None,
                )
            )
    return [replace(result, auto=grid == "auto" or tuple(result.grid) == chosen) for result in results]
