"""The axes of a grid are told how they lie on nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby

import numpy as np

from ..layout import GridShape
from ..model.machines import Group, Machine
from ..model.machines.by_nodes import gathers_from
from ..model.notes import show_notes
from ..model.spread import FLAT, Spread, spread_over
from .axis import Axis
from .communicator import WatchedComm
from .processes import Processes

ALL = "all"
logger = logging.getLogger("pmm3d.comm")


def spread_axes(axes: Iterable[Axis], shape: GridShape, comm: WatchedComm, processes: Processes, sums: str,
                machine: Machine | None) -> dict[str, Spread]:
    """Tell the axes of a grid how they lie on nodes; `spreads_of` them. Gathers go by the machine that the job goes by.
    The same on all ranks; rank 0 notes what lies unevenly."""
    nodes = processes.nodes()
    found = spreads_of(shape, nodes, sums, machine)
    tell_axes(axes, found, nodes)
    if comm.rank == 0:
        _note_uneven(shape, nodes, found)
    return found


def spreads_of(shape: GridShape, nodes: np.ndarray, sums: str, machine: Machine | None = None) -> dict[str, Spread]:
    """How each axis, and "all" ranks, lie on nodes: FLAT where not all groups of the axis lie alike, so that the ranks
    of all groups go by the same.

    nodes     of each rank of the communicator
    machine   by which gathers are chosen, in place of the plain rule
    """
    found = dict.fromkeys((*shape.names, ALL), FLAT)
    for name, groups in _groups(shape, nodes):
        alike = {spread_over(group.tolist(), sums) for group in _unlike(groups)}
        spread = alike.pop() if len(alike) == 1 else FLAT
        if spread.inside > 1 and machine is not None:
            sharers = max(1, int(np.bincount(nodes).max()) // spread.inside)
            group = Group(groups.shape[1], spread.inside, groups.shape[1] // spread.inside, sharers)
            spread = spread._replace(gathers_from=gathers_from(machine, group))
        found[name] = spread
    return found


@lru_cache(maxsize=256)
def spreads_in_order(shape: GridShape, names: tuple[str, ...], beside: int, sums: str) -> Mapping[str, Spread]:
    """Of a grid whose ranks fill nodes of so many, one after the other. names: those of the shape, which two shapes
    may have different."""
    return spreads_of(shape, np.arange(shape.size) // beside, sums)


def tell_axes(axes: Iterable[Axis], spreads: Mapping[str, Spread], nodes: np.ndarray | None = None) -> None:
    """Each axis gets its `spread`, and, if it is known on which node each rank is, its `afar`."""
    for axis in axes:
        if axis.size > 1:
            axis.spread = spreads.get(axis.name, FLAT)
            if nodes is not None:
                far = nodes[axis.ranks.start : axis.ranks.stop : axis.ranks.step] != nodes[axis.ranks[axis.index]]
                axis.afar = frozenset(np.flatnonzero(far).tolist())


def _note_uneven(shape: GridShape, nodes: np.ndarray, spreads: Mapping[str, Spread]) -> None:
    """Note axes whose collectives are flat although nodes have several of their ranks."""
    for name, groups in _groups(shape, nodes):
        parted = [group for group in _unlike(groups) if 1 < len(np.unique(group)) < len(group)]
        if name != ALL and spreads[name] is FLAT and parted:
            runs = [len(list(ranks)) for _, ranks in groupby(parted[0].tolist())]
            shown = ", ".join(map(str, runs[:8])) + (", ..." if len(runs) > 8 else "")
            show_notes("pmm3d.comm")
            logger.info("axis %s does not lie evenly on its nodes (%s ranks, one node after the other): its "
                        "collectives are flat, and the links between nodes carry more bytes than they would have to",
                        name, shown)


def _groups(shape: GridShape, nodes: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """(name, the nodes of the ranks of each group) of each axis of several ranks."""
    by_coords = nodes[: shape.size].reshape(tuple(shape)[::-1])
    for number, (name, size) in enumerate(zip(shape.names, shape)):
        if size > 1:
            yield name, np.moveaxis(by_coords, -1 - number, -1).reshape(-1, size)
    if len(nodes) > 1:
        yield ALL, nodes[None, :]


def _unlike(groups: np.ndarray) -> list[np.ndarray]:
    """The groups that differ, with the nodes of each numbered from the first one's: groups that lie alike are equal
    where ranks fill nodes in order."""
    return list({group.tobytes(): group for group in groups - groups[:, :1]}.values())
