"""Times of all ways of a collective, in turns, by size and group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ....comm import Axis, Grid
from ....comm.hosts import mpi_name
from ....comm.transport import Collective, Link
from ....model.machine import cpu
from ....model.machines import Group
from ....model.stages import DIRECT as ALL_AT_ONCE
from ....model.textbook import BY_NODES, DIRECT, OPERATIONS, SERVER, STAGES, TOGETHER, ways
from ....model.volumes import sums_whole
from ...tune.collectives import groups, shapes
from .ways import Buffers, way_of

MPI_BLOCKING, MPI_NONBLOCKING = "MPI", "MPI nonblocking"
ELEMENT = 4
"""Bytes: float32."""
SAMPLE_SECONDS = 4e-3
"""That a timing lasts, about: small messages are sent many times in it."""
MOST_CALLS = 1000
MOST_LANDING = 2**28
"""Bytes of all ranks' arrays at one: of more, the ways that bring them there are left out."""
GAMMA_BYTES = 2**22
"""Of the sum that gamma is measured by."""
Tell = Callable[[str, int], None]


class Asked(NamedTuple):
    """What to measure. sizes: bytes; repeat: timings of each way; nodes: on how many the ranks are to be looked at as
    if they were, 0: as they are; ranks: sizes of groups, none: all that there can be."""

    operations: Sequence[str] = OPERATIONS
    sizes: Sequence[int] = ()
    repeat: int = 5
    nodes: int = 0
    ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Row:
    """One way of a collective in one group, at one size.

    nbytes    of the whole: what is gathered, reduced, or sent by a rank in an all-to-all
    seconds   of each timing, the slowest rank's
    across    bytes that rank 0's node receives from others, for all groups of the axis together, by the ledger; 0 for
              MPI's own, which it does not see
    chosen    whether it is what the library does
    """

    operation: str
    way: str
    ranks: int
    inside: int
    nodes: int
    nbytes: int
    seconds: tuple[float, ...]
    across: int = 0
    chosen: bool = False

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def group(self) -> tuple[int, int, int]:
        return self.ranks, self.inside, self.nodes


@dataclass(frozen=True)
class Found:
    """All that was measured. as_if: on how many nodes the ranks were looked at as if they were; 0: as they are. alpha,
    beta, gamma: seconds of a step, of a byte received, of a byte added, of the largest group."""

    rows: list[Row]
    cpu: str
    mpi: str
    ranks: int
    hosts: int
    as_if: int
    alpha: float
    beta: float
    gamma: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [{**asdict(row), "median": row.median} for row in self.rows]}

    def groups(self) -> list[tuple[int, int, int]]:
        """(ranks, on each node, nodes), the largest first."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def of(self, operation: str, group: tuple[int, int, int]) -> dict[str, dict[int, Row]]:
        """way -> bytes -> its row; those that would take too much memory are missing."""
        found: dict[str, dict[int, Row]] = {}
        for row in self.rows:
            if (row.operation, row.group) == (operation, group):
                found.setdefault(row.way, {})[row.nbytes] = row
        return found

    @property
    def operations(self) -> list[str]:
        return list(dict.fromkeys(row.operation for row in self.rows))


def count(asked: Asked, ranks: int) -> int:
    """About how many points there are."""
    kinds = [size for size, _ in shapes(ranks) if not asked.ranks or size in asked.ranks]
    return len(kinds) * len(asked.operations) * len(asked.sizes)


def measured(comm: MPI.Intracomm, asked: Asked, tell: Tell) -> Found:
    """Collective. tell(what, points done) hears of each point on rank 0."""
    rows, hosts = list[Row](), 1
    for group, grid, axis in groups(comm):
        hosts = grid.hosts
        if asked.ranks and axis.size not in asked.ranks:
            continue
        rows += _of_group(grid, axis, group, asked, tell)
    alpha, beta = _fitted(rows)
    return Found(rows, cpu().name, mpi_name(), comm.size, hosts, asked.nodes, alpha, beta, _seconds_of_adding())


def _as_if(group: Group, axis: Axis, nodes: int) -> Group:
    """The group, spread evenly over so many nodes if that goes up."""
    if nodes > 1 and axis.size % nodes == 0:
        return group._replace(inside=axis.size // nodes, nodes=nodes)
    return group


def _of_group(grid: Grid, axis: Axis, group: Group, asked: Asked, tell: Tell) -> Iterator[Row]:
    for operation in asked.operations:
        tell(f"{operation} in groups of {axis.size}", 0)
        for nbytes in asked.sizes:
            point = Point(grid, axis, group, asked.nodes, operation, nbytes)
            yield from point.rows(asked.repeat)
            tell(f"{operation}, {axis.size} ranks, {nbytes:,} bytes", 1)


class Point:
    """A collective in a group at one size: all ways of it, on the same memory."""

    def __init__(self, grid: Grid, axis: Axis, group: Group, nodes: int, operation: str, nbytes: int):
        self._grid, self._axis, self.operation = grid, axis, operation
        self._as_it_is, self._group = group, _as_if(group, axis, nodes)
        elements = max(1, nbytes // ELEMENT // axis.size) * axis.size
        self.nbytes = elements * ELEMENT
        self._too_much = self.nbytes * axis.size > MOST_LANDING
        landing = axis.size if operation == "all_reduce" and not self._too_much else 1
        self._buffers = Buffers(np.ones(elements, np.float32), np.zeros(elements, np.float32),
                                np.zeros((landing, elements), np.float32))

    def rows(self, repeat: int) -> list[Row]:
        """Of each way; those are timed in turns, each turn in another order. Collective."""
        calls = self._calls()
        times, across = {}, {}
        for way, call in calls.items():
            across[way] = self._into_node(call() or 0)
            times[way] = self._times(call)
        seconds: dict[str, list[float]] = {way: [] for way in calls}
        names = list(calls)
        for turn in range(repeat):
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[way].append(self._seconds(calls[way], times[way]))
        group, chosen = self._group, self._chosen()
        return [Row(self.operation, way, group.size, group.inside, group.nodes, self.nbytes, tuple(found), across[way],
                    way == chosen) for way, found in seconds.items()]

    def _into_node(self, nbytes: int) -> int:
        """Of the node of rank 0, whose ranks receive so many each. Collective."""
        grid = self._grid
        received = grid.comm.allgather(nbytes)
        return sum(each for rank, each in enumerate(received) if grid.host_of(rank) == grid.host_of(0))

    def _calls(self) -> dict[str, Callable[[], int | None]]:
        group, made = self._group, dict[str, Callable[[], int | None]]()
        each = group.inside if group != self._as_it_is else self._axis.spread.inside
        for way in ways(self.operation, each):
            if not (self._too_much and way in (TOGETHER, SERVER)):
                made[way] = partial(self._run, way_of(self.operation, way, each))
        blocking, nonblocking = mpi_calls(self.operation, self._axis, self._buffers)
        made[MPI_BLOCKING], made[MPI_NONBLOCKING] = blocking, nonblocking
        return made

    def _run(self, way: Any) -> int:
        """Returns the bytes from other nodes."""
        pending = self._axis.begin(self.operation, lambda link: way(link, self._buffers))
        pending.wait()
        return pending.record.across

    def _chosen(self) -> str:
        """The way that the library goes, with the nodes as they are."""
        axis, size = self._axis, len(self._buffers.whole)
        if self.operation == "all_to_all":
            return DIRECT
        spread = axis.spread
        by_nodes = self.nbytes >= spread.gathers_from if self.operation == "all_gather" else spread.sums
        if by_nodes and spread.inside > 1:
            return BY_NODES
        if axis.size > ALL_AT_ONCE:
            return STAGES
        return TOGETHER if self.operation == "all_reduce" and sums_whole(size, "float32", axis.size) else DIRECT

    def _times(self, call: Callable[[], Any]) -> int:
        """Calls that a timing has, the same on all ranks."""
        once = self._seconds(call, 1)
        return int(max(1, min(MOST_CALLS, SAMPLE_SECONDS / once)))

    def _seconds(self, call: Callable[[], Any], times: int) -> float:
        """Of one call, of the slowest rank. Collective."""
        comm = self._grid.comm
        comm.Barrier()
        begun = time.perf_counter()
        for _ in range(times):
            call()
        return comm.largest((time.perf_counter() - begun) / times)


def mpi_calls(operation: str, axis: Axis, buffers: Buffers) -> tuple[Callable[[], None], Callable[[], None]]:
    """MPI's own collective, blocking, and nonblocking as the first step of one of the library's."""
    name = {"all_gather": "allgather", "reduce_scatter": "reduce_scatter_block", "all_reduce": "allreduce",
            "all_to_all": "alltoall"}[operation]
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


def _fitted(rows: list[Row]) -> tuple[float, float]:
    """(alpha, beta) of the largest group, by its direct all-gathers (or what there is): the seconds of the smallest,
    and of a byte more in the largest."""
    direct = [row for row in rows if row.way == DIRECT and row.group == rows[0].group
              and row.operation == rows[0].operation]
    if not direct:
        return 0.0, 0.0
    first, last = direct[0], direct[-1]
    received = (last.nbytes - first.nbytes) * (first.ranks - 1) / first.ranks
    alpha = first.median
    return alpha, max(0.0, last.median - alpha) / received if received else 0.0


def _seconds_of_adding() -> float:
    """Of a byte that is added."""
    mine, other = (np.ones(GAMMA_BYTES // ELEMENT, np.float32) for _ in range(2))
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        np.add(mine, other, out=mine)
        found.append((time.perf_counter() - begun) / GAMMA_BYTES)
    return median(found)
