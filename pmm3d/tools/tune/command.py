"""The command `pmm3d tune machine`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import needs
from ...layout import MATRIX_DTYPES
from ..output import check_writable, progress, say_written, write_text
from ..ranks import all_ranks, on_first, one_of
from ..terminal import console, say

if TYPE_CHECKING:
    from mpi4py import MPI

    from .measure import Report

MEASURED = ("float32", "float64")


def machine_command(
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Type of GEMMs: {', '.join(MATRIX_DTYPES)}. Repeatable. Default: float32 and float64.",
            callback=one_of(*MATRIX_DTYPES),
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(min=0.01, help="Share of the time limit of each section. A smaller share measures fewer points."),
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write the machine to this TOML file, for PMM3D_MACHINE and "
            "pmm3d plan ... --machine; - is standard output."
        ),
    ] = None,
    store: Annotated[bool, typer.Option(help="Store the machine for jobs on machines of this kind.")] = True,
) -> None:
    """Measure this machine: GEMMs, copies, collectives, and whole steps of training.

    All ranks measure at once, which takes less than two minutes. Start as many ranks on a node as in your jobs, because
    the figures hold for that number. For jobs on several nodes, measure on several nodes. Let no other program run.

    The machine is stored in the user's cache folder. Grid(comm, "auto") and `pmm3d plan` use it if CPU, MPI, BLAS,
    versions and ranks per node are the same. PMM3D_MACHINE selects another machine, or a file.

    The time of the slowest rank counts. `pmm3d doctor` names ranks that are slower than the others. Sizes between
    measured sizes are interpolated. A law of latency and bandwidth gives the time of groups that were not measured. Its
    misfit is printed.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d tune machine

    srun -N 2 -n 128 pmm3d tune machine --out here.toml

    pmm3d tune machine --dtype float32 --budget 0.3
    """
    with all_ranks() as comm:
        with needs("train", "writing a machine file"):
            import tomlkit  # noqa: F401
        on_first(comm, lambda: check_writable(text=out))
        _measure(comm, [*dict.fromkeys(dtype or MEASURED)], budget, out, store)


def _measure(comm: MPI.Intracomm, dtypes: list[str], budget: float, out: Path | None, store: bool) -> None:
    from .measure import measure, print_report, stages
    from .rates import library_for

    for dtype in dtypes:
        library_for(dtype)
    with progress("tune machine", comm.rank == 0, stages(comm.size, dtypes)) as tell:
        report = measure(comm, dtypes, budget, tell)
    written = on_first(comm, lambda: _write(report, out, store))
    if comm.rank == 0:
        print_report(report, console(sys.stdout))
        for line in written:
            say(line)


def _write(report: Report, out: Path | None, store: bool) -> list[str]:
    """Store the machine, and write it to `out`, after a check of the text. Return lines for the user."""
    from ...comm import remember_machine
    from ...model.machines import as_toml, machine_from

    text, lines = as_toml(report.machine), []
    machine_from(text, "what was measured")
    try:
        if store:
            lines.append(f"stored in {remember_machine(report.machine.key, text)}")
    except (OSError, RuntimeError) as error:
        lines.append(f"The machine is not stored: {error}. Use --out FILE and PMM3D_MACHINE=FILE")
    if out is not None:
        write_text(out, text)
        say_written(out)
    return lines
