"""The machine that `pmm3d plan` plans for, and where its figures are from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ...errors import Pmm3dError
from ...model.machine import cores
from ...model.machines import Machine
from ...model.machines.reading import load, machine_from

SECTIONS = {"full": ("gemm", "passes", "collectives", "laws", "memory"), "axonn": ("axonn",)}
"""Whose sources are told."""


class Chosen(NamedTuple):
    """A machine, and why it is this one, in words."""

    machine: Machine
    why: str

    def lines(self, terms: str, dtype: str) -> list[str]:
        """Where the figures that count are from."""
        machine = self.machine
        lines = [f"Machine {machine.name} ({self.why}), {machine.ranks_per_node} ranks a node"]
        if terms == "full" and (other := machine.stands_for(dtype)) != dtype:
            lines.append(f"  {dtype}: not known, priced as {other}")
        return lines + [f"  {section}: {machine.sources[section]}" for section in SECTIONS[terms]
                        if section in machine.sources]


def chosen_machine(asked: str | None, ranks: int, ranks_per_node: int | None) -> Chosen:
    """The one asked for by name or path; else the one measured here, else the nominal one. Raises Pmm3dError."""
    if asked is not None:
        found = Chosen(load(asked), "asked for")
    else:
        measured = _measured_here(ranks, ranks_per_node)
        found = Chosen(measured, "measured here") if measured else Chosen(
            load("nominal"), "assumed: nothing was measured here; pmm3d tune machine does, --machine names another")
    if ranks_per_node is not None:
        found = found._replace(machine=replace(found.machine, ranks_per_node=ranks_per_node))
    return found


def bandwidths_of(machine: Machine) -> dict[str, dict[str, float]]:
    """The table of the five-term model. Raises Pmm3dError for a machine without one."""
    if not machine.axonn:
        raise Pmm3dError(f"machine {machine.name} has no table [axonn] of bandwidths, which --terms axonn goes by: "
                         "name one that has (--machine perlmutter, --machine frontier), or take --terms full")
    return {inside: dict(row) for inside, row in machine.axonn.items()}


def _measured_here(ranks: int, ranks_per_node: int | None) -> Machine | None:
    """By `pmm3d tune machine`, with that many ranks on a node; if that was left out, with all of them on one, or with
    as many as this node has cores, or half of that, and so on."""
    from ...comm.machine_cache import key_of, recalled

    here = len(cores())
    may_be = [ranks, *(here >> halved for halved in range(here.bit_length()))]
    for on_node in [ranks_per_node] if ranks_per_node else may_be:
        with suppress(ImportError, RuntimeError):
            for nodes in (1, 2) if ranks <= on_node else (2,):
                key = key_of(on_node, nodes)
                for threads in dict.fromkeys((str(max(1, here // on_node)), key["threads"])):
                    if (text := recalled({**key, "threads": threads})) is not None:
                        return machine_from(text, "the machine measured here")
    return None
