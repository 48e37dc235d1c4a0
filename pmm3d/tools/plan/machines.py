"""The machine that `pmm3d plan` plans for, and where its figures are from."""

from __future__ import annotations

from typing import NamedTuple

from ...comm import AUTO_MACHINE, measured_here
from ...errors import Pmm3dError
from ...model.environment import Settings
from ...model.machines import Machine
from ...model.machines.reading import load

NOMINAL, MEASURED = "nominal", "measured here"
SECTIONS = {"full": ("gemm", "passes", "collectives", "laws", "memory"), "axonn": ("axonn",)}
"""Whose sources are told."""


class Chosen(NamedTuple):
    """A machine, and why it is this one, in words."""

    machine: Machine
    why: str

    @property
    def measured(self) -> bool:
        return self.why == MEASURED

    def lines(self, terms: str, dtype: str) -> list[str]:
        """Where the figures that count are from."""
        machine = self.machine
        lines = [f"Machine {machine.name} ({self.why}), {machine.ranks_per_node} ranks a node"]
        if terms == "full" and (other := machine.stands_for(dtype)) != dtype:
            lines.append(f"  {dtype}: not known, priced as {other}")
        return lines + [f"  {section}: {machine.sources[section]}" for section in SECTIONS[terms]
                        if section in machine.sources]


def chosen_machine(asked: str | None, ranks: int, ranks_per_node: int | None) -> Chosen:
    """The one asked for by name or path, here or by PMM3D_MACHINE; else the one measured here, else the nominal one.
    Raises Pmm3dError."""
    by_variable = Settings().machine
    if asked is not None:
        found = Chosen(load(asked), "asked for")
    elif by_variable != AUTO_MACHINE:
        found = Chosen(load(by_variable), "named by PMM3D_MACHINE")
    else:
        found = _measured(ranks, ranks_per_node)
    if ranks_per_node is not None:
        found = found._replace(machine=found.machine.with_ranks_per_node(ranks_per_node))
    return found


def _measured(ranks: int, ranks_per_node: int | None) -> Chosen:
    """By `pmm3d tune machine`: on one node for ranks that one holds, else on several."""
    one = measured_here(ranks_per_node, 1)
    if one is not None and ranks <= one.ranks_per_node:
        return Chosen(one, MEASURED)
    if (several := measured_here(ranks_per_node, 2)) is not None:
        return Chosen(several, MEASURED)
    why = "nothing was measured here" if one is None else (
        f"what was measured here is of one node with {one.ranks_per_node} ranks")
    return Chosen(load(NOMINAL), f"assumed: {why}; pmm3d tune machine measures, --machine names another")


def bandwidths_of(machine: Machine) -> dict[str, dict[str, float]]:
    """The table of the five-term model. Raises Pmm3dError for a machine without one."""
    if not machine.axonn:
        raise Pmm3dError(f"machine {machine.name} has no table [axonn] of bandwidths, which --terms axonn goes by: "
                         "name one that has (--machine perlmutter, --machine frontier), or take --terms full")
    return {inside: dict(row) for inside, row in machine.axonn.items()}
