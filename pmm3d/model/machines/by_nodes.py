"""When a gather goes by nodes (`pmm3d.model.spread`), by what a machine takes for messages and bytes."""

from __future__ import annotations

from ..spread import GATHERS_FROM, NEVER
from .description import Machine
from .groups import Group
from .laws import DEFAULT

SIZES = [2.0**power for power in range(30, 7, -1)]
"""Bytes of a whole that are looked at."""


def gathers_from(machine: Machine, group: Group) -> float:
    """Bytes of a whole from which an all-gather along an axis that lies evenly on nodes is faster by nodes, by the law
    of the machine; `NEVER` if it is not, `GATHERS_FROM` if the machine has no law.

        >>> from pmm3d.model.machines import load
        >>> gathers_from(load("nominal"), Group(8, 4, 2, 1)) < 2**20
        True
    """
    law = machine.laws.get("all_gather") or machine.laws.get(DEFAULT)
    if law is None:
        return GATHERS_FROM
    found = NEVER
    for size in SIZES:
        received = size * (group.size - 1) / group.size
        flat, by_nodes = (law.seconds("all_gather", group, received, way) for way in (False, True))
        if by_nodes > flat:
            break
        found = size
    return found
