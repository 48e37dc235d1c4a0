"""The command `pmm3d bench collectives`."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....errors import Pmm3dError
from ....model.textbook import OPERATIONS
from ...outputs import check_writable, say_written, write_text
from ...progress import progress
from ...ranks import all_ranks, on_first
from ...terminal import console

if TYPE_CHECKING:
    from mpi4py import MPI

    from .measure import Asked, Found

SIZES = "1KiB,16KiB,128KiB,1MiB,8MiB"
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
LARGEST = 2**31


def _sizes(text: str) -> list[int]:
    found = []
    for word in text.split(","):
        digits = word.strip().lower().rstrip("bgikm")
        unit = UNITS.get(word.strip().lower()[len(digits) :])
        if not digits.isdecimal() or unit is None or not 4 <= int(digits) * unit <= LARGEST:
            raise typer.BadParameter(f"{word.strip()!r} is no size from 4 bytes to 2GiB: 4096, 16KiB or 1MiB, with "
                                     "commas between them")
        found.append(int(digits) * unit)
    return sorted(set(found))


def _operations(given: list[str] | None) -> list[str]:
    for name in given or ():
        if name not in OPERATIONS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(given or OPERATIONS))


def collectives_command(
    operation: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OPERATIONS)}; may be given more than once. "
                                                             "Left out: all.", callback=_operations)] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of the whole: what is gathered or summed, or what a rank sends in "
                                            "an all-to-all.")] = SIZES,
    ranks: Annotated[list[int] | None, typer.Option(help="Size of the groups (axes of a grid); may be given more than "
                                                         "once. Left out: all that divide the ranks.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timings of each way, in turns; the median counts.")] = 5,
    nodes: Annotated[int, typer.Option(min=0, help="Look at the ranks of a group as if they were on so many nodes, to "
                                                   "try what goes by nodes where there is one. Left out: as they "
                                                   "are.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures here; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time by size here (.png, .pdf, .svg).")] = None,
) -> None:
    """Time every way of every collective, beside MPI's own, and say which is the fastest from which size on.

    direct: a message to each other rank at once. ring: parts go round. stages: few ranks at a time (two: recursive
    halving and doubling). by nodes: inside the nodes first for sums, across first for gathers, so that a link between
    nodes carries each byte once; only where a group lies evenly on several nodes. gather and add: every rank receives
    all arrays. parameter server: one rank adds for all, the bottleneck that the others avoid.

    All groups of a size work at once, as the axes of a grid do. * marks what the library does by itself; set
    PMM3D_SUMS=ranks to keep sums from going by nodes. Below stand steps, bytes, and the time that latency, bandwidth
    and adding make of them.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d bench collectives

    srun -N 4 -n 32 pmm3d bench collectives --ranks 32 --sizes 1MiB,64MiB --plot collectives.png

    pmm3d bench collectives --operation all_reduce --nodes 2 --json here.json
    """
    asked_sizes = _sizes(sizes)
    with all_ranks() as comm:
        from .measure import Asked

        on_first(comm, lambda: _check(comm.size, ranks or [], json, plot))
        asked = Asked(operation or OPERATIONS, asked_sizes, repeat, nodes, ranks or ())
        found = _measured(comm, asked)
        if comm.rank == 0:
            _show(found, json, plot)


def _check(size: int, groups: list[int], json: Path | None, plot: Path | None) -> None:
    """Raises Pmm3dError unless there is something to measure, and a place for it."""
    if size == 1:
        raise Pmm3dError("a collective takes several ranks: python -m pmm3d.launcher -n 8 -m pmm3d bench collectives, "
                         "or srun at a site")
    if wrong := [group for group in groups if group < 2 or size % group]:
        raise Pmm3dError(f"--ranks {wrong[0]}: {size} ranks form groups of "
                         f"{', '.join(str(group) for group in range(2, size + 1) if size % group == 0)}")
    check_writable(plot, text=json)
    if plot:
        from ..plot import check_picture

        check_picture(plot)


def _measured(comm: MPI.Intracomm, asked: Asked) -> Found:
    from .measure import count, measured

    with progress("bench collectives", comm.rank == 0, count(asked, comm.size)) as tell:
        return measured(comm, asked, tell)


def _show(found: Found, json: Path | None, plot: Path | None) -> None:
    from .tables import print_found

    print_found(found, console(sys.stdout))
    if json:
        write_text(json, json_format.dumps(found.as_json(), indent=1))
    if plot:
        from .plot import plot as draw

        draw(found, str(plot))
    say_written(json, plot)
