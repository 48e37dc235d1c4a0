"""Time the collectives between nodes and inside them, and MPI's own, by bus bandwidth.

    python -m pmm3d.launcher -n 8 benchmarks/collectives.py
    srun -N 4 -n 32 python benchmarks/collectives.py --ranks 32 --sizes 1MiB,64MiB
    python -m pmm3d.launcher -n 8 benchmarks/collectives.py --operation all_reduce --nodes 2 --json here.json

direct: the library's algorithm without nodes, a message to each other rank at the same time (in stages on more than 16
ranks). by nodes: sums first inside the nodes, gathers first between them. A link between nodes then carries each byte
once.

All groups of a size work at the same time, as the axes of a grid do. The algorithms of a size are timed in turns.

us       microseconds of the slowest rank: median, and half the spread in percent. Bold: the fastest at this size
busbw    bus bandwidth in GB/s as defined by nccl-tests: bytes / seconds x 2 (p - 1) / p for an all-reduce, and
         x (p - 1) / p for the others, on p ranks. It can be compared with the bandwidth of the hardware
library  * marks the algorithm that the library selects. With PMM3D_SUMS=ranks, sums are not hierarchical
across   bytes that the node of rank 0 receives from other nodes, for all groups together
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, repetitions, slowest

from pmm3d.comm import Axis, Grid, Pending
from pmm3d.model.machines import Group
from pmm3d.model.node_map import FLAT, NodeMap
from pmm3d.text import in_bytes
from pmm3d.tools.tune.collectives import groups

SIZES, QUICK = "1KiB,16KiB,128KiB,1MiB,8MiB", "64,16KiB"
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
ELEMENT = 4
"""Bytes of a float32."""
SAMPLE_SECONDS, MOST_CALLS = 4e-3, 1000
"""Approximate seconds of a timing, and the largest number of repetitions in it."""
DIRECT, BY_NODES = "direct", "by nodes"
OF_MPI = {
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter_block",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
}
"""Operation -> name of MPI's own collective."""
HEADING = ["bytes", "algorithm", "us", "busbw", "library", "across"]


class Row(NamedTuple):
    """One algorithm of a collective in one group, at one size.

    nbytes    bytes of the gathered or reduced array, or of the array that a rank sends in an all-to-all
    seconds   seconds of each timing, on the slowest rank
    across    bytes from other nodes; 0 for MPI's own algorithms, whose messages the ledger does not count
    """

    operation: str
    way: str
    group: Group
    nbytes: int
    seconds: list[float]
    across: int
    chosen: bool

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s."""
        share = (self.group.size - 1) / self.group.size * (2 if self.operation == "all_reduce" else 1)
        return share * self.nbytes / median(self.seconds) / 1e9


def number_of_bytes(text: str) -> int:
    digits = text.strip().lower().rstrip("bgikm")
    unit = UNITS.get(text.strip().lower()[len(digits) :])
    if not digits.isdecimal() or unit is None or not 4 <= int(digits) * unit <= 2**31:
        raise argparse.ArgumentTypeError(
            f"{text.strip()!r} is no size from 4 bytes to 2GiB: 4096, 16KiB or 1MiB, with commas between them"
        )
    return int(digits) * unit


class Point:
    """A collective in a group at one size, with all its algorithms on the same memory.

    as_if   the group, on the nodes that --nodes pretends
    own     communicator of the group, for MPI's own collective
    """

    def __init__(self, grid: Grid, axis: Axis, as_if: Group, own: MPI.Intracomm, operation: str, nbytes: int):
        self._grid, self._axis, self._group, self._own, self.operation = grid, axis, as_if, own, operation
        self._selected = axis.node_map
        elements = max(1, nbytes // ELEMENT // axis.size) * axis.size
        self.nbytes = elements * ELEMENT
        self._whole, self._other = np.ones(elements, np.float32), np.zeros(elements, np.float32)

    def rows(self, repeat: int) -> list[Row]:
        """Time all algorithms. Collective."""
        comm, calls = self._grid.comm, self._calls()
        across = {way: self._into_node(call() or 0) for way, call in calls.items()}
        times = {way: repetitions(comm, call, SAMPLE_SECONDS, MOST_CALLS) for way, call in calls.items()}
        seconds = all_rounds(calls, lambda way: slowest(comm, calls[way], times[way]), repeat)
        self._axis.node_map, chosen = self._selected, self._chosen()
        return [
            Row(self.operation, way, self._group, self.nbytes, found, across[way], way == chosen)
            for way, found in seconds.items()
        ]

    def _into_node(self, nbytes: int) -> int:
        """Bytes that the node of rank 0 receives, if each rank receives `nbytes` from other nodes. Collective."""
        grid = self._grid
        received = grid.comm.allgather(nbytes)
        return sum(each for rank, each in enumerate(received) if grid._host_of(rank) == grid._host_of(0))

    def _calls(self) -> dict[str, Callable[[], int | None]]:
        own, part = self._own, len(self._whole) // self._axis.size
        made: dict[str, Callable[[], int | None]] = {DIRECT: partial(self._run, FLAT)}
        if self._group.nodes > 1 and self._group.inside > 1 and self.operation != "all_to_all":
            made[BY_NODES] = partial(self._run, NodeMap(self._group.inside, True, 0.0))
        name = OF_MPI[self.operation]
        sends = self._whole[:part] if self.operation == "all_gather" else self._whole
        lands = self._other[:part] if self.operation == "reduce_scatter" else self._other
        made["MPI"] = partial(getattr(own, name.capitalize()), sends, lands)
        made["MPI nonblocking"] = lambda: getattr(own, f"I{name}")(sends, lands).Wait() and None
        return made

    def _run(self, node_map: NodeMap) -> int:
        """Run the library's algorithm on these nodes. Return the bytes from other nodes."""
        self._axis.node_map = node_map
        pending = self._begun()
        pending.wait()
        return pending.record.across

    def _begun(self) -> Pending:
        axis, whole, other = self._axis, self._whole, self._other
        part = len(whole) // axis.size
        counts, own = [part] * axis.size, slice(axis.index * part, (axis.index + 1) * part)
        if self.operation == "all_gather":
            return axis._all_gather_into(whole[own], other, counts)
        if self.operation == "reduce_scatter":
            return axis._reduce_scatter_into(whole, other[own], counts)
        if self.operation == "all_reduce":
            return axis._all_reduce_into(whole, other)
        return axis._all_to_all_into(whole, other, counts, counts)

    def _chosen(self) -> str:
        """The algorithm that the library selects on these nodes."""
        node_map = self._selected
        gathers = self.operation in ("all_gather", "all_to_all")
        by_nodes = self.nbytes >= node_map.gathers_from if gathers else node_map.sums
        return BY_NODES if by_nodes and node_map.per_node > 1 and self.operation != "all_to_all" else DIRECT


def measured(comm: MPI.Intracomm, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all groups, operations and sizes. Collective."""
    for group, grid, axis in groups(comm):
        if options.ranks and axis.size not in options.ranks:
            continue
        as_if = group
        if options.nodes > 1 and axis.size % options.nodes == 0:
            as_if = group._replace(inside=axis.size // options.nodes, nodes=options.nodes)
        own = comm.Split(axis.ranks[0], axis.index)
        for operation in options.operation or OF_MPI:
            for nbytes in options.sizes:
                yield from Point(grid, axis, as_if, own, operation, nbytes).rows(options.repeat)
        own.Free()


def table(rows: list[Row]) -> list[list[str]]:
    """The table of one collective in one group."""
    cells = [HEADING]
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        here = [row for row in rows if row.nbytes == nbytes]
        fastest = min(here, key=lambda row: median(row.seconds))
        for row in here:
            mid, mark = median(row.seconds), "**" if row is fastest else ""
            cells.append(
                [
                    in_bytes(nbytes),
                    row.way,
                    f"{mark}{1e6 * mid:.0f}{mark} {50 * (max(row.seconds) - min(row.seconds)) / mid:.0f}%",
                    f"{row.busbw:.3g}",
                    "*" * row.chosen,
                    in_bytes(row.across) if row.across else "",
                ]
            )
    return cells


def in_words(group: Group) -> str:
    if group.nodes == 1:
        return f"{group.size} ranks on a node"
    most = "" if group.size == group.inside * group.nodes else "up to "
    return f"{group.size} ranks, {most}{group.inside} on each of {group.nodes} nodes"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--operation", action="append", choices=[*OF_MPI], help="can be repeated (all)")
    made.add_argument(
        "--sizes",
        type=lambda text: sorted({number_of_bytes(word) for word in text.split(",")}),
        help=f"bytes of the whole array ({SIZES})",
    )
    made.add_argument("--ranks", type=int, action="append", help="size of the groups (all that divide the ranks)")
    made.add_argument("--repeat", type=int, default=5, help="timings of each algorithm (5)")
    made.add_argument("--nodes", type=int, default=0, help="treat the ranks of a group as if on N nodes")
    options, comm = made.parse_args(), MPI.COMM_WORLD
    if comm.size == 1:
        made.error("a collective needs several ranks: python -m pmm3d.launcher -n 8 benchmarks/collectives.py")
    if wrong := [group for group in options.ranks or () if group < 2 or comm.size % group]:
        made.error(
            f"--ranks {wrong[0]}: {comm.size} ranks form groups of "
            f"{', '.join(str(group) for group in range(2, comm.size + 1) if comm.size % group == 0)}"
        )
    text = QUICK if options.quick else SIZES
    options.sizes = options.sizes or sorted(map(number_of_bytes, text.split(",")))
    options.repeat = 1 if options.quick else options.repeat
    rows = [*measured(comm, options)]
    if comm.rank == 0:
        tables = dict[tuple[str, Group], list[Row]]()
        for row in rows:
            tables.setdefault((row.operation, row.group), []).append(row)
        report(
            options, *((f"{operation}, {in_words(group)}", table(some)) for (operation, group), some in tables.items())
        )


if __name__ == "__main__":
    main()
