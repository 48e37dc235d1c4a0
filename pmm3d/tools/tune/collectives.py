"""Times of collectives by operation, bytes and group, while all groups of an axis are busy; and the share of an
all-reduce that GEMMs hide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
from mpi4py import MPI

from ...arrays import Slab, library_named
from ...comm import Axis, Grid, Pending, Record, all_reduce_work, reduce_scatter_work
from ...model.machines import Group
from ...model.machines.figures import Measured
from ...model.machines.laws import OPERATIONS
from ...model.node_map import GATHERS_FROM
from ..timing import GemmOperands, Sampler, Work
from .rates import library_for

SIZES = 2**6, 2**9, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24
"""Approximate bytes that a rank receives or sends."""
LONGEST = 0.06
"""Seconds of a call. After a longer call, no larger size is measured."""
SAMPLE_SECONDS = 5e-3
BETWEEN = 320, 320, 320
"""GEMM between calls if ranks share cores. It takes about a millisecond of a core."""
MORE_SAMPLES = 11
"""Timings if ranks share cores, because the turns of ranks on a core are random."""
ALONE_SECONDS = 3e-2
"""Duration of a timing of the GEMM alone. It contains many turns of the ranks."""
LEAST_SHARE = 0.05
"""Smallest share of the call in the time of a GEMM and a call."""
SECONDS = 40.0
ELEMENT = 4
"""Bytes of a float32."""
HIDDEN_BYTES, HIDDEN_GEMM, HIDDEN_SECONDS = 2**22, (256, 256, 256), 6.0
"""Bytes of the all-reduce that GEMMs hide; shape of the GEMM; seconds of the section."""
LONGER, REPEATS = 1.3, 5
"""Time of the GEMMs over that of the all-reduce; number of timings."""
PLACES = "inside", "across"
Tell = Callable[[str, int], None]


class Buffers:
    """Send, receive and work buffers for collectives of any size. The memory is touched once."""

    def __init__(self, most_bytes: int, ranks: int):
        self.library = library_named("numpy")
        size = 2 * most_bytes // ELEMENT + 2 * ranks
        self.leaving, self.coming = np.ones(size, np.float32), np.zeros(size, np.float32)
        self.work = np.zeros(2 * most_bytes * 2 + 256 * (ranks + 1), np.uint8)

    def slab(self, nbytes: int) -> Slab:
        return (
            Slab(self.work[:nbytes], self.library)
            if nbytes <= self.work.shape[0]
            else Slab(np.zeros(nbytes, np.uint8), self.library)
        )


def shapes(ranks: int) -> list[tuple[int, int]]:
    """Return (ranks along x, ranks along y) of the grids whose axes are the groups. Groups along x are neighbours.

    >>> shapes(6)
    [(6, 1), (3, 2), (2, 3)]
    """
    return [(size, ranks // size) for size in range(ranks, 1, -1) if ranks % size == 0]


def count(ranks: int) -> int:
    """Return the approximate number of points on one node."""
    return len(shapes(ranks)) * len(OPERATIONS) * len(SIZES) + len(PLACES)


def groups(comm: MPI.Intracomm) -> Iterator[tuple[Group, Grid, Axis]]:
    """Yield each kind of group that the ranks can form, the largest first, with a grid and its axis of such groups. The
    grid is closed before the next group. Collective."""
    seen = set[tuple[int, int]]()
    for shape in shapes(comm.size):
        with Grid(comm, (*shape, 1)) as grid:
            for axis in (grid.x, grid.y):
                group = group_of(grid, axis)
                if axis.size > 1 and (group.inside, group.nodes) not in seen:
                    seen.add((group.inside, group.nodes))
                    yield group, grid, axis


def group_of(grid: Grid, axis: Axis) -> Group:
    """Return the largest group of an axis by its ranks on hosts. Collective."""
    hosts = [grid._host_of(rank) for rank in axis.ranks]
    inside = max(map(hosts.count, set(hosts)))
    figures = np.array([inside, len(set(hosts)), max(1, grid.local_size // inside)], np.int64)
    grid.comm.Allreduce(MPI.IN_PLACE, figures, MPI.MAX)
    return Group(axis.size, *map(int, figures))


def measured_collectives(sampler: Sampler, tell: Tell) -> tuple[list[Measured], dict[tuple[int, int], Group]]:
    """Return rows, and (inside, nodes) -> the group that was measured. Collective."""
    rows, measured_groups = list[Measured](), dict[tuple[int, int], Group]()
    if sampler.comm.size == 1:
        return rows, measured_groups
    with sampler.section(SECONDS):
        buffers, timing = Buffers(SIZES[-1], sampler.comm.size), Timing(sampler)
        for group, _, axis in groups(sampler.comm):
            measured_groups[group.inside, group.nodes] = group
            if axis.node_map.per_node > 1:  # the laws assume the default rule, not that of an earlier measurement
                axis.node_map = axis.node_map._replace(gathers_from=GATHERS_FROM)
            for operation in OPERATIONS:
                points = _points(timing, sampler, axis, operation, buffers, always=not rows)
                tell(f"{operation} in groups of {axis.size}", len(SIZES))
                if points:
                    nbytes, seconds = zip(*points)
                    rows.append(Measured(operation, group.inside, group.nodes, nbytes, seconds))
    return rows, measured_groups


class Timing:
    """Times collectives. If ranks share cores, a GEMM precedes each call and its seconds are subtracted. As in a
    program, ranks on one core then arrive one after the other and wait for each other."""

    def __init__(self, sampler: Sampler):
        self._sampler, self._alone = sampler, 0.0
        self._gemm: Work | None = None
        if sampler.share.crowd > 1:
            self._gemm = GemmOperands(library_for("float32"), "float32", [BETWEEN]).gemm(BETWEEN)
            self._alone = (
                sampler.measure(self._gemm, samples=MORE_SAMPLES, sample_seconds=ALONE_SECONDS, always=True) or 0.0
            )

    def seconds(self, begin: Begin, always: bool) -> float | None:
        """Return the seconds of one call, or None, as `Sampler.measure` does. Collective."""
        gemm = self._gemm
        if gemm is None:
            return self._sampler.measure(partial(completed, begin), sample_seconds=SAMPLE_SECONDS, always=always)

        def both() -> None:
            gemm()
            completed(begin)

        both_seconds = self._sampler.measure(both, samples=MORE_SAMPLES, sample_seconds=SAMPLE_SECONDS, always=always)
        return None if both_seconds is None else max(both_seconds - self._alone, both_seconds * LEAST_SHARE)


def _points(
    timing: Timing, sampler: Sampler, axis: Axis, operation: str, buffers: Buffers, always: bool
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of each size, ascending; [] if there was no time for all sizes, because the time of more
    bytes is computed from the last point."""
    points = list[tuple[int, float]]()
    for size in SIZES:
        begin = collective(axis, operation, size, buffers)
        record = completed(begin)
        (nbytes,) = map(int, sampler.largest(max(record.received, record.sent)))
        if points and nbytes <= points[-1][0]:
            continue
        seconds = timing.seconds(begin, always)
        if seconds is None:
            return []
        points.append((nbytes, seconds))
        if seconds > LONGEST:
            break
    return points


Begin = Callable[[], Pending]


def completed(begin: Begin) -> Record:
    """Start a collective, and wait for its end. Return its record."""
    pending = begin()
    pending.wait()
    return pending.record


def collective(axis: Axis, operation: str, nbytes: int, buffers: Buffers) -> Begin:
    """Return a function that starts a collective, as nn and products do. A rank receives or sends about `nbytes`."""
    ranks, library = axis.size, buffers.library
    leaving, coming = buffers.leaving, buffers.coming
    part = max(1, nbytes // ELEMENT // (1 if operation == "shift" else ranks - 1))
    counts, sent = [part] * ranks, leaving[: part * ranks]
    if operation == "all_gather":
        return partial(axis._all_gather_into, leaving[:part], coming[: part * ranks], counts)
    if operation == "reduce_scatter":
        memory = reduce_scatter_work(library, sent, counts, axis.index, 0, axis.node_map)
        return lambda: axis._reduce_scatter_into(sent, coming[:part], counts, work=buffers.slab(memory))
    if operation == "all_reduce":
        size = max(1, part * ranks // 2)
        memory = all_reduce_work((size,), "float32", ranks, axis.index, axis.node_map)
        return lambda: axis._all_reduce_into(leaving[:size], coming[:size], work=buffers.slab(memory))
    if operation == "all_to_all":
        pieces, places = (flat[: part * ranks].reshape(-1, 1) for flat in (leaving, coming))
        return partial(axis._all_to_all_into, pieces, places, counts, counts)
    return partial(axis.shift, leaving[:part], out=coming[:part], agreed=True)


def measured_hidden(sampler: Sampler, dtype: str, tell: Tell) -> dict[str, float]:
    """Return the share of an all-reduce that runs during GEMMs, in the largest group inside a node and in the largest
    group with one rank on each node. Collective."""
    shares = dict[str, float]()
    if sampler.comm.size == 1:
        return shares
    buffers = Buffers(HIDDEN_BYTES, sampler.comm.size)
    gemm = GemmOperands(library_for(dtype), dtype, [HIDDEN_GEMM]).gemm(HIDDEN_GEMM)
    for group, grid, axis in groups(sampler.comm):
        place = PLACES[group.nodes > 1]
        if place not in shares and (group.nodes == 1 or group.inside == 1):
            with sampler.section(HIDDEN_SECONDS):
                share = _share_hidden(sampler, grid, collective(axis, "all_reduce", HIDDEN_BYTES, buffers), gemm)
            tell("hidden", 1)
            if share is not None:
                shares[place] = share
    return shares


def _share_hidden(sampler: Sampler, grid: Grid, begin: Begin, gemm: Work) -> float | None:
    call = partial(completed, begin)
    alone, one = sampler.measure(call, always=True), sampler.measure(gemm, always=True)
    if alone is None or one is None:
        return None
    times = max(1, round(LONGER * alone / one))

    def gemms() -> None:
        for _ in range(times):
            with grid.engine.background():
                gemm()

    def both() -> None:
        pending = begin()
        gemms()
        pending.wait()

    turns = [
        [sampler.measure(work, samples=1, always=turn == 0) for work in (call, gemms, both)] for turn in range(REPEATS)
    ]
    shares = [
        min(1.0, max(0.0, (collective + computed - together) / collective))
        for collective, computed, together in turns
        if collective is not None and computed is not None and together is not None
    ]
    return round(median(shares), 4) if shares else None
