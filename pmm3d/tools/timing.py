"""Timing: repetitions and medians, operands and rates of GEMMs, ranks with their own cores, work of all ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, Workspace
from ..comm import Grid
from ..model.machine import cores
from ..model.machines import flop_of

DEVICE_SECONDS, DEVICE_CALLS = 0.1, 200
"""Duration of a timing on a device, and largest number of repetitions in it."""
DEVICE_WARM_UP = 5
"""Untimed multiples of DEVICE_SECONDS, because the clock rate of a device rises under load."""
GEMM_SAMPLES = 5
SAMPLES, SAMPLE_SECONDS, MOST_CALLS = 3, 4e-3, 2000
"""Timings of a point; duration of a timing on the fastest rank; largest number of calls in it. A timing is longer than
the turns of some milliseconds that ranks on one core take."""
YIELD_SECONDS, SLEEP_SECONDS, SLEPT = 2e-4, 1e-3, 1 / 8
"""A waiting rank yields its core for YIELD_SECONDS. Then it sleeps for the share SLEPT of the time waited so far, at
most for SLEEP_SECONDS at once."""
IDLE_SECONDS = 3e-3
"""Interval between the polls of a rank without work. A poll takes about 20 us of a core."""

Work = Callable[[], Any]
Shape = tuple[int, int, int]


def in_a_row(work: Work, library: NumpyLibrary, times: int) -> float:
    """Return the mean seconds of `times` calls. The time ends when a device has completed all of them."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    library.synchronize()
    return (time.perf_counter() - begun) / times


def repetitions(library: NumpyLibrary, work: Work, seconds: Callable[[Work, int], float] | None = None) -> int:
    """Return the number of calls in a timing: 1 on the host; on a device, which is warmed up, those of DEVICE_SECONDS.

    seconds   the function seconds(work, times); default: `in_a_row` on this rank
    """
    if library.on_host:
        return 1
    measured = seconds or (lambda work, times: in_a_row(work, library, times))
    first = min(DEVICE_CALLS, 1 + int(DEVICE_WARM_UP * DEVICE_SECONDS / measured(work, 1)))
    return max(1, min(DEVICE_CALLS, round(DEVICE_SECONDS / measured(work, first))))


class Timer:
    """Times work on the host or the devices of a library. Collective over the grid.

    times   number of calls in a timing
    """

    def __init__(self, grid: Grid, library: NumpyLibrary):
        self._grid, self._library, self.times = grid, library, 1

    def warm_up(self, work: Work) -> None:
        """Do the work once, and set `times`."""
        work()
        self.times = repetitions(self._library, work, self.seconds)

    def seconds(self, work: Work, times: int = 0) -> float:
        """Return the mean seconds of `times` calls (default: `self.times`) on the slowest rank."""
        self._library.synchronize()
        self._grid.comm.Barrier()
        return self._grid.comm.largest(in_a_row(work, self._library, times or self.times))


class GemmOperands:
    """Operands A, B and C for GEMMs of several shapes, which share memory. The memory is touched once.

    >>> operands = GemmOperands(NumpyLibrary(), "float32", [(2, 3, 4), (4, 2, 2)])
    >>> a, b, c = operands.matrices((2, 3, 4), "nt")
    >>> a.shape, b.shape, c.shape, b.flags.c_contiguous
    ((2, 4), (4, 3), (2, 3), False)
    """

    def __init__(self, library: NumpyLibrary, dtype: str, shapes: Sequence[Shape]):
        sizes = [max(sizes) for sizes in zip(*((m * k, k * n, m * n) for m, n, k in shapes))]
        values = np.random.default_rng(0).random(max(sizes), np.float32) - 0.5
        self.library, self._work = library, Workspace()
        self._flats = [library.from_numpy(values[:size].copy(), dtype).reshape(-1) for size in sizes]

    def matrices(self, shape: Shape, form: str = "nn") -> list[Array]:
        """Return A (m, k), B (k, n) and C (m, n). form: "t" for an operand that is stored transposed, as in BLAS."""
        m, n, k = shape
        return [
            flat[: rows * cols].reshape(cols, rows).T if flag == "t" else flat[: rows * cols].reshape(rows, cols)
            for flat, rows, cols, flag in zip(self._flats, (m, k, m), (k, n, n), form + "n")
        ]

    def gemm(self, shape: Shape, form: str = "nn", **options: Any) -> Work:
        """Return a function that computes C = A B. options: those of the library's `gemm`."""
        a, b, c = self.matrices(shape, form)
        return partial(self.library.gemm, a, b, c, 1, 0, self._work, **options)


def gemm_rate(library: NumpyLibrary, dtype: str, shape: Shape, **options: Any) -> float:
    """Return the median flop/s of a GEMM on this rank. options: those of the library's `gemm`."""
    gemm = GemmOperands(library, dtype, [shape]).gemm(shape, **options)
    in_a_row(gemm, library, 1)
    times = repetitions(library, gemm)
    return flop_of(*shape, dtype) / median(in_a_row(gemm, library, times) for _ in range(GEMM_SAMPLES))


def one_a_core(usable: Sequence[tuple[str, Collection[int]]], threads: int) -> set[int]:
    """Return the ranks that get their own cores. In rank order, each gets a core for each BLAS thread, or the rest.

    usable   host and usable cores of each rank

        >>> one_a_core([("a", {0}), ("a", {0}), ("a", {1}), ("b", {0, 1}), ("b", {0, 1}), ("b", {0, 1})], 1)
        {0, 2, 3, 4}
    """
    chosen, taken = set[int](), set[tuple[str, int]]()
    for rank, (host, own) in enumerate(usable):
        free = [(host, core) for core in sorted(own) if (host, core) not in taken][: max(1, threads)]
        if free:
            chosen.add(rank)
            taken.update(free)
    return chosen


class CoreShare(NamedTuple):
    """Sharing of the cores of a node by its ranks.

    crowd   ranks per set of cores: computation takes this many times as long
    works   whether this rank has its own cores (`one_a_core`)
    """

    crowd: float = 1.0
    works: bool = True


def core_share(comm: MPI.Intracomm, threads: int) -> CoreShare:
    """Return the share of this rank. Collective. threads: BLAS threads of a rank."""
    host = socket.gethostname()
    everyones = comm.allgather((host, cores()))
    here = {rank for rank, (name, _) in enumerate(everyones) if name == host}
    working = one_a_core(everyones, threads)
    return CoreShare(len(here) / len(here & working), comm.rank in working)


class Sampler:
    """Measures work that all ranks of a communicator do at once. All methods are collective.

    budget    share of the requested time that a section gets
    share     share of the cores of this rank's node
    clock     a function that returns seconds
    left_out  number of points that were not measured, because the time of their section was up
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        budget: float = 1.0,
        share: CoreShare = CoreShare(),
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.comm, self.budget, self.share, self.clock = comm, budget, share, clock
        self.left_out = 0
        self._ends, self._over, self._due = inf, False, clock()

    @contextmanager
    def section(self, seconds: float) -> Iterator[None]:
        """As a context: `measure` stops after about `budget * seconds` and the time that earlier sections left."""
        self._due = max(self._due, self.clock()) + self.budget * seconds
        self._ends, self._over = self._due, False
        try:
            yield
        finally:
            self._ends, self._over = inf, False

    def largest(self, *values: float) -> list[float]:
        """Return the largest of the ranks' values, for each of the values."""
        mine, maxima = np.array(values, np.float64), np.empty(len(values), np.float64)
        self.comm.Allreduce(mine, maxima, MPI.MAX)
        return maxima.tolist()

    def meet(self, idle: bool = False) -> None:
        """Wait for all ranks, and leave the cores to them meanwhile. idle: poll rarely."""
        arrival, begun = self.comm.Ibarrier(), self.clock()
        while not arrival.Test():
            waited = self.clock() - begun
            if idle:
                time.sleep(IDLE_SECONDS)
            elif waited < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(SLEEP_SECONDS, waited * SLEPT))

    def measure_busy(self, work: Work, always: bool = False) -> float | None:
        """Like `measure`, for work that keeps a core busy and waits for no other rank.

        If ranks share cores, only one rank works on each core, so that no timing contains turns of another rank. The
        time is multiplied by the number of ranks on a core.
        """
        seconds = self.measure(work, counts=self.share.works, always=always)
        return None if seconds is None else seconds * self.share.crowd

    def measure(
        self,
        work: Work,
        *,
        samples: int = SAMPLES,
        sample_seconds: float = SAMPLE_SECONDS,
        counts: bool = True,
        always: bool = False,
    ) -> float | None:
        """Return the median seconds of a call on the slowest rank, or None if the time of the section is up.

        counts   whether this rank works; otherwise it only waits
        always   measure even if the time is up, with samples of one call
        """
        if self._over and not always:
            self.left_out += 1
            return None
        self._timed(work, 1, counts)
        first = self._timed(work, 1, counts)
        fastest, over = self.largest(-first if counts else -inf, self.clock() - self._ends)
        self._over = over > 0
        if self._over and not always:
            self.left_out += 1
            return None
        calls = 1 if self._over else max(1, min(MOST_CALLS, round(sample_seconds / max(-fastest, 1e-9))))
        return self.largest(median(self._timed(work, calls, counts) for _ in range(samples)))[0]

    def _timed(self, work: Work, calls: int, counts: bool) -> float:
        """Return the mean seconds of `calls` calls; 0 on a rank that does not work."""
        self.meet(idle=not counts)
        if not counts:
            return 0.0
        begun = self.clock()
        for _ in range(calls):
            work()
        return (self.clock() - begun) / calls
