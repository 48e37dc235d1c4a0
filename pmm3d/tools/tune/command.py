"""The command `pmm3d tune machine`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import Pmm3dError, needs
from ...layout import MATRIX_DTYPES
from ..outputs import check_writable, say_written, write_text
from ..progress import progress
from ..ranks import all_ranks, on_first
from ..terminal import console, say

if TYPE_CHECKING:
    from mpi4py import MPI

    from .measure import Report

MEASURED = ("float32", "float64")


def _dtypes(given: list[str] | None) -> list[str]:
    for dtype in given or ():
        if dtype not in MATRIX_DTYPES:
            raise typer.BadParameter(f"{dtype!r} is none of {', '.join(MATRIX_DTYPES)}")
    return list(dict.fromkeys(given or MEASURED))


def machine_command(
    dtype: Annotated[list[str] | None, typer.Option(help=f"Types of the GEMMs: {', '.join(MATRIX_DTYPES)}; may be "
                                                         "given more than once. Left out: float32 and float64.",
                                                    callback=_dtypes)] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Time that each section may take, as a share of what it takes "
                                                         "at most: 0.5 measures fewer points.")] = 1.0,
    output: Annotated[Path | None, typer.Option(help="Write the machine here too: a TOML file for PMM3D_MACHINE and "
                                                     "pmm3d plan --machine.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what was measured of this machine before, as TOML; "
                                                      "measure nothing.")] = False,
) -> None:
    """Measure this machine: GEMMs, passes over memory, collectives, what is hidden under computation.

    All ranks measure at once, so start as many on a node as your jobs do: the figures hold for that many. It takes less
    than two minutes. What is found is kept in the user's cache folder, and Grid("auto"), `pmm3d plan` go by
    it wherever CPU, MPI, BLAS, versions and ranks per node are the same; on several nodes, run it on
    several. PMM3D_MACHINE names another machine, or a file.

    Where a rank's clock jumps, its samples are thrown away; where ranks differ, the slowest counts, and a rank that is
    slow throughout is named. Sizes between those measured are interpolated; groups that were not measured have a law of
    latency and bandwidth, whose misfit is printed.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d tune machine

    srun -N 2 -n 128 pmm3d tune machine --output here.toml

    pmm3d tune machine --dtype float32 --budget 0.3

    srun -N 2 -n 128 pmm3d tune machine --show
    """
    with all_ranks() as comm:
        with needs("train", "writing a machine file"):
            import tomlkit  # noqa: F401
        on_first(comm, lambda: check_writable(text=output))
        if show:
            _show(comm)
            return
        _measure(comm, dtype or list(MEASURED), budget, output)


def _measure(comm: MPI.Intracomm, dtypes: list[str], budget: float, output: Path | None) -> None:
    from .gemms import library_for
    from .measure import measure, stages
    from .tables import print_report

    for dtype in dtypes:
        library_for(dtype)
    with progress("tune machine", comm.rank == 0, stages(comm.size, dtypes)) as tell:
        report = measure(comm, dtypes, budget, tell)
    written = on_first(comm, lambda: _write(report, output))
    if comm.rank == 0:
        print_report(report, console(sys.stdout))
        for line in written:
            say(line)


def _write(report: Report, output: Path | None) -> list[str]:
    """Keep it, and write it to output; what was done, in lines. Only what is read again is written."""
    from ...comm import remember_machine
    from ...model.machines import as_toml, machine_from

    text, lines = as_toml(report.machine), []
    machine_from(text, "what was measured")
    try:
        lines.append(f"kept in {remember_machine(report.machine.key, text)}")
    except (OSError, RuntimeError) as error:
        lines.append(f"what was measured is not kept: {error}. --output FILE and PMM3D_MACHINE=FILE do without")
    if output is not None:
        write_text(output, text)
        say_written(output)
    return lines


def _show(comm: MPI.Intracomm) -> None:
    from ...comm import AUTO_MACHINE, machine_here
    from ...model.machines import as_toml
    from .measure import nodes_of

    nodes = nodes_of(comm)
    machine = machine_here(comm, nodes.ranks_per_node, nodes.number, AUTO_MACHINE)
    if machine is None:
        raise Pmm3dError(f"nothing was measured with {nodes.ranks_per_node} ranks a node on {nodes.number} node(s) of "
                         "this kind, with this MPI and BLAS: run pmm3d tune machine on as many")
    if comm.rank == 0:
        say(as_toml(machine))
