"""Options that the commands of `pmm3d plan` share, and the choice of the machine."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ...errors import Pmm3dError
from ...model.environment import Settings
from ...model.machines import Machine, assumed_machines, load
from ...text import bytes_in, counted, in_bytes, in_flops
from ..ranks import MOST_BYTES, MOST_RANKS, size

Ranks = Annotated[int, size(1, "Number of ranks of the job.", MOST_RANKS)]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help="perlmutter, frontier, alps, nominal, or a TOML file of pmm3d tune machine --out. Default: "
        "PMM3D_MACHINE, the machine measured here, or nominal.",
    ),
]
RanksPerNode = Annotated[int | None, size(1, "Ranks on each node. Default: those of the machine.", MOST_RANKS)]


def bytes_named(text: str) -> int:
    """Return a number of bytes, which may have a unit. Raises BadParameter."""
    found = int(text) if text.isdecimal() else bytes_in(text)
    if not found or found > MOST_BYTES:
        raise typer.BadParameter(f'{text!r} is not a number of bytes of at least 1, such as 2147483648 or "2 GiB"')
    return found


Memory = Annotated[
    int | None,
    typer.Option(
        parser=bytes_named, metavar="BYTES", help='Memory limit of a rank, such as "2 GiB". Default: the machine\'s.'
    ),
]
Top = Annotated[int, size(1, "Number of grids to show.")]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print all columns in one table, also if the lines are longer than the terminal.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all ranked grids to this file; - is standard output.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the terms of the time into this file (.png, .pdf, .svg).")]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw the simulated step of the first choice into this file (.svg, .pdf, .png): computation and the "
        "collectives of each axis on the first rank, or the passes of each rank along pipe."
    ),
]
MemoryPicture = Annotated[
    Path | None,
    typer.Option(
        help="Draw the memory of the first rank over the step of the first choice, by kind of array, into this file "
        "(.svg, .pdf, .png). The peak is printed: its operation, its kinds and its largest arrays."
    ),
]

NOMINAL = "nominal"
SECTIONS = "gemm", "passes", "collectives", "laws", "memory"
"""Sections of a machine file whose sources are printed."""


class Chosen(NamedTuple):
    """A machine, the reason why it was chosen, and its number of ranks on a node, if --ranks-per-node changes it."""

    machine: Machine
    why: str
    own_ranks: int = 0

    def lines(self, dtype: str, sections: tuple[str, ...] = SECTIONS) -> list[str]:
        """Return lines about the sources of these sections. dtype: of the GEMMs; "" if GEMMs are not used."""
        machine = self.machine
        lines = [f"Machine {machine.name} ({self.why}), {counted(machine.ranks_per_node, 'rank')} a node"]
        if self.own_ranks:
            lines.append(
                f"  --ranks-per-node {machine.ranks_per_node}: the file of {machine.name} has {self.own_ranks}. The "
                "rates and the memory of a rank do not change"
            )
        other = machine.stands_for(dtype) if dtype else ""
        if other != dtype:
            lines.append(f"  {dtype}: not known, priced as {other}")
        if peak := machine.peak.get(dtype, machine.peak.get(other, 0.0)):
            core = ", as a CPU core" * (machine.name == NOMINAL)
            held = f"{in_bytes(machine.memory)} of memory" if machine.memory else "memory without a known limit"
            lines.append(f"  a rank: at most {in_flops(peak)} in {dtype}{core}; {held}")
        return lines + [
            f"  {section}: {machine.sources[section]}" for section in sections if section in machine.sources
        ]


def chosen_machine(asked: str | None, ranks: int, ranks_per_node: int | None) -> Chosen:
    """Return the machine that --machine or PMM3D_MACHINE names. The default is the machine measured here, or else the
    nominal one. Raises Pmm3dError if a machine file cannot be read."""
    from ...comm import AUTO_MACHINE

    by_variable = Settings().machine
    name, why = (by_variable, "named by PMM3D_MACHINE") if asked is None else (asked, "asked for")
    if name != AUTO_MACHINE:
        found = Chosen(load(name), f"{why}; figures assumed, not measured" if name in assumed_machines() else why)
    else:
        found = _measured(ranks, ranks_per_node)
    own = found.machine.ranks_per_node
    if ranks_per_node is not None and ranks_per_node != own:
        changed = found.machine.with_ranks_per_node(ranks_per_node)
        found = Chosen(changed, found.why, own if found.machine.name != NOMINAL else 0)
    return found


def check_amount(name: str, amount: float | None) -> None:
    """Raise Pmm3dError unless a number of tokens or rows is positive."""
    if amount is not None and not (isfinite(amount) and amount >= 1):
        raise Pmm3dError(f"{name} must be at least 1, got {amount:g}")


def _measured(ranks: int, ranks_per_node: int | None) -> Chosen:
    """Return the machine that was measured on one node if the ranks fit it, else on several nodes, else nominal."""
    from ...comm import measured_here

    one = measured_here(ranks_per_node, 1)
    if one is not None and ranks <= one.ranks_per_node:
        return Chosen(one, "measured here")
    if (several := measured_here(ranks_per_node, 2)) is not None:
        return Chosen(several, "measured here")
    why = (
        "nothing was measured here"
        if one is None
        else (f"the measured machine is one node with {counted(one.ranks_per_node, 'rank')}")
    )
    return Chosen(load(NOMINAL), f"assumed: {why}; pmm3d tune machine measures, --machine names another")
