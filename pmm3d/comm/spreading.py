"""The axes of a grid are told how they lie on nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import groupby

from ..model.machines import Group, Machine
from ..model.machines.by_nodes import gathers_from
from ..model.notes import show_notes
from ..model.spread import FLAT, spread_over
from .axis import Axis
from .communicator import WatchedComm
from .processes import Processes

logger = logging.getLogger("pmm3d.comm")


def spread_axes(axes: Iterable[Axis], node_of: Callable[[int], int], sums: str, machine: Machine | None = None,
                per_node: int = 1, speaks: bool = False) -> None:
    """Each axis gets its `spread` and `afar`.

    node_of    of a rank of the grid
    machine    by which gathers are chosen;   per_node: ranks on a node
    speaks     whether to note axes whose collectives are flat although nodes have several of their ranks
    """
    for axis in axes:
        nodes = [node_of(rank) for rank in axis.ranks]
        here = nodes[axis.index]
        axis.afar = frozenset(member for member, node in enumerate(nodes) if node != here)
        if not axis.afar:
            continue
        found = spread_over(nodes, sums)
        if found.inside > 1 and machine is not None:
            group = Group(axis.size, found.inside, axis.size // found.inside, max(1, per_node // found.inside))
            found = found._replace(gathers_from=gathers_from(machine, group))
        axis.spread = found
        if speaks and found is FLAT and len(set(nodes)) < len(nodes):
            _note(axis.name, nodes)


def _note(name: str, nodes: list[int]) -> None:
    runs = [len(list(ranks)) for _, ranks in groupby(nodes)]
    shown = ", ".join(map(str, runs[:8])) + (", ..." if len(runs) > 8 else "")
    show_notes("pmm3d.comm")
    logger.info("axis %s does not lie evenly on its nodes (%s ranks, one node after the other): its collectives are "
                "flat, and the links between nodes carry more bytes than they would have to", name, shown)


def measured_here(comm: WatchedComm, processes: Processes, waiting: Callable[[str], AbstractContextManager[None]]
                  ) -> Machine | None:
    """The machine that the job goes by, if nodes have several ranks, so that there is something to choose. Collective.
    """
    if processes.per_node() == 1:
        return None
    from .machine_cache import machine_here

    with waiting("the choice of collectives"):
        return machine_here(comm, processes.per_node(), processes.hosts)


