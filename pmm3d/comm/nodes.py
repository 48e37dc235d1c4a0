"""Map of ranks to nodes: hosts and processes of the ranks, ranks that share a node, and the placement of each axis on
nodes. Each rank stores a few bytes for each other rank, and the name of each host once."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..layout import ALL, EXPERT, EXPERT_DATA, EXPERT_Z, STAGE, GridShape
from ..model.machine import cores
from ..model.node_map import FLAT, NodeMap, node_map_over
from ..model.notes import show_notes

if TYPE_CHECKING:
    from ..model.machines import Machine

DEAD = "dead: its process is gone"
COMPUTES = "it computes without letting Python's threads run"
STATES = {
    "T": "stopped by a signal (SIGSTOP, or a debugger)",
    "t": "stopped by a debugger",
    "Z": DEAD,
    "X": DEAD,
    "D": "waiting for a disk or a file system",
    "R": COMPUTES,
}
"""State letter in /proc/PID/stat -> why the process does not answer."""
ROW = np.dtype(
    [("host", np.uint64), ("namespace", np.int64), ("pid", np.int32), ("name_bytes", np.uint16), ("debug", np.uint8)],
    align=True,
)
"""Record of a rank, sent to all others when a Grid is made. host: digest of the host's name."""
logger = logging.getLogger("pmm3d.comm")


class Process(NamedTuple):
    """Host and process of a rank.

    pid         process id; 0 if it is not known
    namespace   number of the PID namespace of the pid. Containers may have their own
    """

    host: str = ""
    pid: int = 0
    namespace: int = 0

    def described(self, rank: int) -> str:
        return f"rank {rank}" + (f" (host {self.host}, pid {self.pid})" if self.pid else "")


def this_process(host: str) -> Process:
    try:
        return Process(host, os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return Process(host, os.getpid())


def process_state(pid: int) -> str | None:
    """Return the reason why a process on this host does not answer, or None if it is not known."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # ENOENT, ESRCH
        return DEAD
    except OSError:  # for example, no file descriptor is left
        return None
    return STATES.get(letter)


def row(process: Process, debug: bool) -> np.ndarray:
    """Return the ROW of a process."""
    name = process.host.encode()
    digest = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
    return np.array([(digest, process.namespace, process.pid, len(name), debug)], ROW)


def first_of_each(values: np.ndarray) -> np.ndarray:
    """Return the index of the first element with each value, in ascending order.

    >>> first_of_each(np.array([7, 7, 2, 7, 2])).tolist()
    [0, 2]
    """
    return np.sort(np.unique(values, return_index=True)[1])


class Processes(Sequence[Process]):
    """The Process of each rank, and the node map of a communicator. Nodes are numbered in the order of their first
    ranks.

    rows    ROW of each rank;   names   of the hosts, in the order of the nodes
    hosts   number of nodes

        >>> known = Processes(np.concatenate([row(Process(host, 1), False) for host in "aba"]), ["a", "b"])
        >>> known[2].host, known.hosts, known.first_ranks(), known.local_rank(2), known.neighbours(0)
        ('a', 2, [0, 1], 1, {0: 1, 2: 1})
    """

    def __init__(self, rows: np.ndarray, names: Sequence[str]):
        _, firsts, host = np.unique(rows["host"], return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        self._firsts, self._host = firsts[order], np.argsort(order).astype(np.int32)[host]
        self._pids, self._namespaces = rows["pid"].copy(), rows["namespace"].copy()
        self._names = list(names)
        self.hosts = len(self._firsts)

    def among(self, ranks: Sequence[int]) -> Processes:
        """Return the map of these ranks alone.

        >>> known = Processes(np.concatenate([row(Process(host, 1), False) for host in "aabb"]), ["a", "b"])
        >>> [known.among([2, 3]).host_of(0), known.among([1, 2]).hosts]
        ['b', 2]
        """
        own = np.asarray(ranks)
        rows = np.zeros(len(own), ROW)
        rows["host"], rows["namespace"], rows["pid"] = self._host[own], self._namespaces[own], self._pids[own]
        return Processes(rows, [self._names[host] for host in self._host[own[first_of_each(rows["host"])]]])

    @classmethod
    def unknown(cls, size: int) -> Processes:
        """Return the map of `size` ranks with unknown hosts and processes."""
        return cls(np.zeros(size, ROW), [""])

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        return Process(self._names[self._host[rank]], int(self._pids[rank]), int(self._namespaces[rank]))

    def host_of(self, rank: int) -> str:
        return self._names[self._host[rank]]

    def nodes(self) -> np.ndarray:
        """Node of each rank."""
        return self._host

    def node_of(self, rank: int) -> int:
        """Node of a rank."""
        return int(self._host[rank])

    def first_ranks(self) -> list[int]:
        """First rank of each node."""
        return self._firsts.tolist()

    def local_rank(self, rank: int) -> int:
        """Number of a rank among the ranks of its node."""
        return int(np.count_nonzero(self._host[:rank] == self._host[rank]))

    def beside(self, rank: int) -> int:
        """Number of ranks on the node of a rank."""
        return int(np.count_nonzero(self._host == self._host[rank]))

    def per_node(self) -> int:
        """Largest number of ranks on a node."""
        return int(np.bincount(self._host).max())

    def run(self) -> int:
        """Return the largest length for which every aligned run of consecutive ranks shares a node. If all nodes have
        the same number of ranks, in order, it is this number. If ranks are assigned to nodes round-robin, it is 1.

            >>> [Processes(np.concatenate([row(Process(host, 1), False) for host in hosts]), ["a", "b"]).run()
            ...  for hosts in ("aaaabbbb", "aaaabb", "aabbbb", "abab")]
            [4, 4, 2, 1]
        """
        changes = np.flatnonzero(np.diff(self._host)) + 1
        return int(np.gcd.reduce(changes)) if len(changes) else len(self)

    def places(self) -> np.ndarray:
        """Return a number for each rank. Ranks with the same number have the same node and PID namespace, so they can
        access each other's processes. A rank with an unknown process has a unique negative number."""
        pairs = np.stack([self._host, self._namespaces.astype(np.int64)], axis=1)
        _, numbers = np.unique(pairs, axis=0, return_inverse=True)
        return np.where(self._pids != 0, numbers.reshape(-1), -1 - np.arange(len(self)))

    def first_near(self, rank: int, ranks: Sequence[int]) -> int:
        """Return the first of these ranks that shares the node of `rank`, which is one of them."""
        return ranks[int(np.argmax(self._host[np.asarray(ranks)] == self._host[rank]))]

    def neighbours(self, rank: int) -> dict[int, int]:
        """Rank -> pid, for the ranks with the node and namespace of `rank`, itself included."""
        near = (self._host == self._host[rank]) & (self._namespaces == self._namespaces[rank]) & (self._pids != 0)
        ranks = np.flatnonzero(near)
        return dict(zip(ranks.tolist(), self._pids[ranks].tolist()))


@dataclass(frozen=True)
class Host:
    """A node of the job: its name, its ranks, and the number of cores that they have together."""

    name: str
    ranks: tuple[int, ...]
    cores: int


def hosts(comm: MPI.Intracomm, names: Iterable[str], threads: int) -> list[Host]:
    """Return the nodes of a communicator, in the order of their first ranks. Collective.

    names     host of each rank
    threads   BLAS threads of a rank. The cores of a node are those to which its ranks are bound, at most one per thread
    """
    masks = comm.allgather(sum(1 << core for core in cores()))
    ranks: dict[str, list[int]] = {}
    usable: dict[str, int] = {}
    for rank, (name, mask) in enumerate(zip(names, masks)):
        ranks.setdefault(name, []).append(rank)
        usable[name] = usable.get(name, 0) | mask
    return [
        Host(name, tuple(own), min(usable[name].bit_count(), len(own) * max(1, threads))) for name, own in ranks.items()
    ]


def mpi_name() -> str:
    """Return the name and version of the MPI library."""
    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")


def node_maps_of(shape: GridShape, nodes: np.ndarray, sums: str, machine: Machine | None = None) -> dict[str, NodeMap]:
    """Return the placement on nodes of each axis, and of "all" ranks. An axis is FLAT unless all its groups are placed
    in the same way, because the ranks of all groups use the same collectives.

    nodes     node of each rank of the communicator
    machine   determines the message size from which gathers are hierarchical by nodes; None: `GATHERS_FROM`
    """
    maps = dict.fromkeys((*shape.names, ALL), FLAT)
    maps.update({name: node_map_of(groups, nodes, sums, machine) for name, groups in _groups(shape, nodes)})
    return maps


def node_map_of(groups: np.ndarray, nodes: np.ndarray, sums: str, machine: Machine | None = None) -> NodeMap:
    """Return the placement of groups of ranks on nodes. groups: node of each rank, one row per group. Otherwise as
    `node_maps_of`."""
    from ..model.machines import Group

    alike = {node_map_over(group.tolist(), sums) for group in _unlike(groups)}
    node_map = alike.pop() if len(alike) == 1 else FLAT
    if node_map.per_node > 1 and machine is not None:
        sharers = max(1, int(np.bincount(nodes).max()) // node_map.per_node)
        group = Group(groups.shape[1], node_map.per_node, groups.shape[1] // node_map.per_node, sharers)
        node_map = node_map._replace(gathers_from=machine.gathers_from(group))
    return node_map


def set_node_maps(axes: Iterable[Any], node_maps: Mapping[str, NodeMap], nodes: np.ndarray | None = None) -> None:
    """Set `node_map` of each axis, and `off_node` if the node of each rank is given."""
    for axis in axes:
        if axis.size > 1:
            axis.node_map = node_maps.get(axis.name, FLAT)
            if nodes is not None:
                far = nodes[np.asarray(axis.ranks)] != nodes[axis.ranks[axis.index]]
                axis.off_node = frozenset(np.flatnonzero(far).tolist())


def note_uneven(shape: GridShape, nodes: np.ndarray, node_maps: Mapping[str, NodeMap]) -> None:
    """Log the axes whose collectives are flat although nodes contain several of their ranks."""
    for name, groups in _groups(shape, nodes):
        parted = [group for group in _unlike(groups) if 1 < len(np.unique(group)) < len(group)]
        if name != ALL and node_maps[name] is FLAT and parted:
            runs = [len(list(ranks)) for _, ranks in groupby(parted[0].tolist())]
            shown = ", ".join(map(str, runs[:8])) + (", ..." if len(runs) > 8 else "")
            show_notes("pmm3d.comm")
            logger.info(
                "axis %s is not distributed evenly over its nodes (%s ranks, one node after the other): its "
                "collectives are flat, and the links between nodes carry more bytes than necessary",
                name,
                shown,
            )


def groups_along(names: Collection[str], shape: GridShape, nodes: np.ndarray) -> np.ndarray:
    """Return the node of each rank in each group along the named axes, one row per group, with ranks in ascending
    order."""
    outer_first = list[tuple[set[str], int]]()
    parts = {"z": (EXPERT_Z, shape.fold[0]), "data": (EXPERT_DATA, shape.fold[1])}
    for name in shape.inner_first[::-1]:
        if name in parts:  # the minor part of z and of data is along "expert"
            major, size = parts[name]
            outer_first += [({name, major}, getattr(shape, major)), ({name, EXPERT}, size)]
        else:
            outer_first.append(({name}, getattr(shape, name)))
    by_coords = nodes[: shape.size].reshape([size for _, size in outer_first])
    dims = [dim for dim, (axes, _) in enumerate(outer_first) if axes & {*names}]
    return np.moveaxis(by_coords, dims, range(-len(dims), 0)).reshape(-1, shape.along(names))


def _groups(shape: GridShape, nodes: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield (name, node of each rank in each group) for each axis of several ranks, for stages, and for all ranks."""
    for name, size in zip(shape.names, shape):
        if size > 1:
            yield name, groups_along([name], shape, nodes)
    if shape.stages > 1:
        yield STAGE, groups_along(shape.axes_of(STAGE), shape, nodes)
    if len(nodes) > 1:
        yield ALL, nodes[None, :]


def _unlike(groups: np.ndarray) -> list[np.ndarray]:
    """Return the different groups, with nodes numbered relative to the node of the first rank. If ranks fill nodes in
    order, groups with the same placement become equal."""
    return list({group.tobytes(): group for group in groups - groups[:, :1]}.values())
