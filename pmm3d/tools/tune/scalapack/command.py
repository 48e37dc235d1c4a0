"""The command `pmm3d tune scalapack`."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...output import FigureTable, progress
from ...ranks import all_ranks, size
from ...terminal import console, say

if TYPE_CHECKING:
    from rich.console import Console

    from .measuring import Timed


def scalapack_command(
    library: Annotated[
        str, typer.Argument(help="File of ScaLAPACK. Default: libscalapack-openmpi.so, or libscalapack.so.")
    ] = "",
    block: Annotated[int | None, size(1, "Rows and columns of a block of the matrices. Default: 64.")] = None,
) -> None:
    """Find the routines and the sizes that pmm3d computes faster than ScaLAPACK, for the drop-in.

    All ranks multiply float64 matrices with pgemm and with ScaLAPACK's p?gemm, in turns. The median of five rounds on
    the slowest rank counts. Then they call the other routines of the drop-in on square matrices, of the smallest size
    that the drop-in takes and of twice this size. The command prints two variables for a batch script.

    PMM3D_SCALAPACK_BELOW=L: the smallest L for which no measured product is slower than with ScaLAPACK, and at least
    32, the shortest length measured. The drop-in leaves a product to ScaLAPACK if m, n or k is below L, or if m n k /
    ranks is below L^3.

    PMM3D_SCALAPACK_ROUTINES: gemm, and the routines that were in no measured size slower than ScaLAPACK's.

    Start as many ranks as in your jobs, and let no other program run. This Python's mpi4py must use the MPI of
    ScaLAPACK, as that of .venv-embed does (make embed). Use the same BLAS on both sides: PMM3D_BLAS, and the BLAS of
    ScaLAPACK.

    [bold]Examples[/]

    mpirun -n 16 .venv-embed/bin/pmm3d tune scalapack

    srun -n 128 env/bin/pmm3d tune scalapack /opt/lib/libscalapack.so
    """
    with all_ranks() as comm:
        logging.getLogger("pmm3d.comm").setLevel(logging.WARNING)  # no line for the grid of each product
        from .library import Scalapack
        from .measuring import choice, length_of, measure, products
        from .routines import ROUTINES, faster, measure_routines

        scalapack, shapes = Scalapack(library), products(comm.size)
        with progress("tune scalapack", comm.rank == 0, len(shapes) + 2 * len(ROUTINES)) as tell:
            timed = measure(comm, scalapack, shapes, block or 64, tell)
            below = choice(timed, comm.size)  # the times are the same on all ranks
            of_routines = measure_routines(comm, scalapack, below, block or 64, tell)
        if comm.rank == 0:
            print_timed([*timed, *of_routines], console(sys.stdout))
            if below > max(length_of(each.shape, comm.size) for each in timed):
                say("The largest measured products are slower with pmm3d. Larger products were not measured.")
            say(f"  export PMM3D_SCALAPACK_BELOW={below}")
            say(f"  export PMM3D_SCALAPACK_ROUTINES={','.join(['gemm', *faster(of_routines)])}")


def print_timed(timed: list[Timed], console: Console) -> None:
    table = FigureTable("", ("routine", "size", "ScaLAPACK ms", "pmm3d ms", "pmm3d / ScaLAPACK"))
    for each in timed:
        table.add_row(
            each.name,
            "x".join(map(str, each.shape)),
            f"{1e3 * each.scalapack:.2f}",
            f"{1e3 * each.pmm3d:.2f}",
            f"{each.pmm3d / each.scalapack:.2f}",
        )
    console.print(table)
