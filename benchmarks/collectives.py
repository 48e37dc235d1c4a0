"""Time every algorithm of every collective, and compare with MPI, bus bandwidth and the textbook's model.

    python -m pmm3d.launcher -n 8 benchmarks/collectives.py
    srun -N 4 -n 32 python benchmarks/collectives.py --ranks 32 --sizes 1MiB,64MiB
    python -m pmm3d.launcher -n 8 benchmarks/collectives.py --operation all_reduce --nodes 2 --json here.json

direct: a message to each other rank at the same time. ring: parts move along a ring. stages: few ranks at a time (two:
recursive halving and doubling). by nodes: sums first inside the nodes, gathers first between them, so that a link
between nodes carries each byte once. gather and add: every rank receives all arrays. parameter server: one rank adds.

All groups of a size work at the same time, as the axes of a grid do. The algorithms of a size are timed in turns.

us       microseconds of the slowest rank: median, and half the spread in percent. Bold: the fastest at this size
busbw    bus bandwidth in GB/s as defined by nccl-tests: bytes / seconds x 2 (p - 1) / p for an all-reduce, and
         x (p - 1) / p for the others, on p ranks. It can be compared with the bandwidth of the hardware
library  * marks the algorithm that the library selects. With PMM3D_SUMS=ranks, sums are not hierarchical
across   bytes that the node of rank 0 receives from other nodes, for all groups together
model    microseconds by alpha (a step), beta (a byte received) and gamma (a byte added); textbook.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from collective_ways import Buffers, way_of
from mpi4py import MPI
from records import parser, report
from textbook import BY_NODES, DIRECT, OPERATIONS, SERVER, STAGES, TOGETHER, cost, ways
from timing import all_rounds, repetitions, slowest

from pmm3d.comm import Axis, Grid
from pmm3d.comm.transport import Collective, Link
from pmm3d.model.machines import Group
from pmm3d.model.schedule import sums_whole
from pmm3d.model.stages import DIRECT as ALL_AT_ONCE
from pmm3d.text import in_bytes
from pmm3d.tools.tune.collectives import groups

SIZES, QUICK = "1KiB,16KiB,128KiB,1MiB,8MiB", "64,16KiB"
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
ELEMENT = 4
"""Bytes of a float32."""
SAMPLE_SECONDS, MOST_CALLS = 4e-3, 1000
"""Approximate seconds of a timing, and the largest number of repetitions in it."""
MOST_LANDING = 2**28
"""Largest number of bytes of all ranks' arrays for algorithms in which one rank receives all of them."""
GAMMA_BYTES = 2**22
HEADING = ["bytes", "algorithm", "us", "busbw", "library", "across", "model"]


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
    """A collective in a group at one size, with all its algorithms on the same memory."""

    def __init__(self, grid: Grid, axis: Axis, group: Group, as_if: Group, operation: str, nbytes: int):
        self._grid, self._axis, self.operation = grid, axis, operation
        self._as_it_is, self._group = group, as_if
        elements = max(1, nbytes // ELEMENT // axis.size) * axis.size
        self.nbytes = elements * ELEMENT
        self._too_much = self.nbytes * axis.size > MOST_LANDING
        landing = axis.size if operation == "all_reduce" and not self._too_much else 1
        self._buffers = Buffers(
            np.ones(elements, np.float32), np.zeros(elements, np.float32), np.zeros((landing, elements), np.float32)
        )

    def rows(self, repeat: int) -> list[Row]:
        """Time all algorithms. Collective."""
        comm, calls = self._grid.comm, self._calls()
        across = {way: self._into_node(call() or 0) for way, call in calls.items()}
        times = {way: repetitions(comm, call, SAMPLE_SECONDS, MOST_CALLS) for way, call in calls.items()}
        seconds = all_rounds(calls, lambda way: slowest(comm, calls[way], times[way]), repeat)
        chosen = self._chosen()
        return [
            Row(self.operation, way, self._group, self.nbytes, found, across[way], way == chosen)
            for way, found in seconds.items()
        ]

    def _into_node(self, nbytes: int) -> int:
        """Bytes that the node of rank 0 receives, if each rank receives `nbytes` from other nodes. Collective."""
        grid = self._grid
        received = grid.comm.allgather(nbytes)
        return sum(each for rank, each in enumerate(received) if grid.host_of(rank) == grid.host_of(0))

    def _calls(self) -> dict[str, Callable[[], int | None]]:
        made = dict[str, Callable[[], int | None]]()
        each = self._group.inside if self._group != self._as_it_is else self._axis.node_map.per_node
        for way in ways(self.operation, each):
            if not (self._too_much and way in (TOGETHER, SERVER)):
                made[way] = partial(self._run, way_of(self.operation, way, each))
        made["MPI"], made["MPI nonblocking"] = mpi_calls(self.operation, self._axis, self._buffers)
        return made

    def _run(self, way: Any) -> int:
        """Run an algorithm. Return the bytes from other nodes."""
        pending = self._axis.begin(self.operation, lambda link: way(link, self._buffers))
        pending.wait()
        return pending.record.across

    def _chosen(self) -> str:
        """The algorithm that the library selects on these nodes."""
        axis, size, node_map = self._axis, len(self._buffers.whole), self._axis.node_map
        if self.operation == "all_to_all":
            return DIRECT
        by_nodes = self.nbytes >= node_map.gathers_from if self.operation == "all_gather" else node_map.sums
        if by_nodes and node_map.per_node > 1:
            return BY_NODES
        if axis.size > ALL_AT_ONCE:
            return STAGES
        return TOGETHER if self.operation == "all_reduce" and sums_whole(size, "float32", axis.size) else DIRECT


def mpi_calls(operation: str, axis: Axis, buffers: Buffers) -> tuple[Callable[[], None], Callable[[], None]]:
    """MPI's own collective: blocking, and nonblocking as the first step of a collective of the library."""
    name = {
        "all_gather": "allgather",
        "reduce_scatter": "reduce_scatter_block",
        "all_reduce": "allreduce",
        "all_to_all": "alltoall",
    }[operation]
    whole, other, part = buffers.whole, buffers.other, len(buffers.whole) // axis.size
    sends = whole[:part] if operation == "all_gather" else whole
    lands = other[:part] if operation == "reduce_scatter" else other

    def steps(link: Link) -> Collective[None]:
        yield [getattr(link.comm, f"I{name}")(sends, lands)]

    def communicator(link: Link) -> Collective[MPI.Intracomm]:
        yield []
        return link.comm

    blocking = getattr(axis.begin("communicator", communicator).wait(), name.capitalize())
    return partial(blocking, sends, lands), lambda: axis.begin(f"MPI_I{name}", steps).wait()


def measured(comm: MPI.Intracomm, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all groups, operations and sizes. Collective."""
    for group, grid, axis in groups(comm):
        if options.ranks and axis.size not in options.ranks:
            continue
        as_if = group
        if options.nodes > 1 and axis.size % options.nodes == 0:
            as_if = group._replace(inside=axis.size // options.nodes, nodes=options.nodes)
        for operation in options.operation or OPERATIONS:
            for nbytes in options.sizes:
                yield from Point(grid, axis, group, as_if, operation, nbytes).rows(options.repeat)


def fitted(rows: list[Row]) -> tuple[float, float, float]:
    """(alpha, beta, gamma). alpha: seconds of the smallest direct message in the largest group. beta: seconds of each
    further byte in the largest message. gamma: seconds to add a byte."""
    direct = [
        row for row in rows if row.way == DIRECT and row.group == rows[0].group and row.operation == rows[0].operation
    ]
    first, last = direct[0], direct[-1]
    received = (last.nbytes - first.nbytes) * (first.group.size - 1) / first.group.size
    alpha = median(first.seconds)
    mine, other = (np.ones(GAMMA_BYTES // ELEMENT, np.float32) for _ in range(2))
    adding = []
    for _ in range(5):
        begun = time.perf_counter()
        np.add(mine, other, out=mine)
        adding.append((time.perf_counter() - begun) / GAMMA_BYTES)
    return alpha, max(0.0, median(last.seconds) - alpha) / received if received else 0.0, median(adding)


def table(rows: list[Row], law: tuple[float, float, float]) -> list[list[str]]:
    """The table of one collective in one group."""
    cells = [HEADING]
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        here = [row for row in rows if row.nbytes == nbytes]
        fastest = min(here, key=lambda row: median(row.seconds))
        for row in here:
            mid, mpi = median(row.seconds), row.way.startswith("MPI")
            inside = row.group.inside if row.group.nodes > 1 else 1
            spread = 50 * (max(row.seconds) - min(row.seconds)) / mid
            mark = "**" if row is fastest else ""
            model = ""
            if not mpi:
                known = cost(row.operation, row.way, row.group.size, nbytes, inside)
                model = f"{1e6 * known.seconds(*law):.0f}"
            cells.append(
                [
                    in_bytes(nbytes),
                    row.way,
                    f"{mark}{1e6 * mid:.0f}{mark} {spread:.0f}%",
                    f"{row.busbw:.3g}",
                    "*" * row.chosen,
                    "" if mpi or not row.across else in_bytes(row.across),
                    model,
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
    made.add_argument("--operation", action="append", choices=OPERATIONS, help="can be repeated (all)")
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
        law, tables = fitted(rows), dict[tuple[str, Group], list[Row]]()
        for row in rows:
            tables.setdefault((row.operation, row.group), []).append(row)
        print(f"alpha {1e6 * law[0]:.1f} us, beta {1e9 * law[1]:.3f} ns, gamma {1e9 * law[2]:.3f} ns")
        report(
            options,
            *((f"{operation}, {in_words(group)}", table(some, law)) for (operation, group), some in tables.items()),
        )


if __name__ == "__main__":
    main()
