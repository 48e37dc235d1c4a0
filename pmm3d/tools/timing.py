"""Timing: repetitions and medians, operands and rates of GEMMs, ranks with cores of their own, work of all ranks."""

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
"""Duration of a timing on a device, and repetitions in it at most."""
DEVICE_WARM_UP = 5
"""Timings before the first that counts: the clock rate of a device rises under load."""
GEMM_SAMPLES = 5
SAMPLES, SAMPLE_SECONDS, MOST_CALLS = 3, 4e-3, 2000
"""Of a point: timings; the duration of one, by the fastest rank; repetitions in it at most. Ranks that share a core
take turns of some milliseconds, which a timing must contain."""
YIELD_SECONDS, SLEEP_SECONDS, SLEPT = 2e-4, 1e-3, 1 / 8
"""A rank that waits yields its core for the first seconds, then sleeps for this share of the time waited so far."""
IDLE_SECONDS = 3e-3
"""Between two looks of a rank without work: each look takes a core some 20 us."""

Work = Callable[[], Any]
Shape = tuple[int, int, int]


def in_a_row(work: Work, library: NumpyLibrary, times: int) -> float:
    """Return the seconds of one of `times` repetitions, all of which a device has then ended."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    library.synchronize()
    return (time.perf_counter() - begun) / times


def repetitions(library: NumpyLibrary, work: Work, seconds: Callable[[Work, int], float] | None = None) -> int:
    """Return the repetitions of a timing: 1 on the host; on a device, which they warm up, those of DEVICE_SECONDS.

    seconds   seconds(work, times): of one of `times` repetitions; default: those of this rank
    """
    if library.on_host:
        return 1
    measured = seconds or (lambda work, times: in_a_row(work, library, times))
    first = min(DEVICE_CALLS, 1 + int(DEVICE_WARM_UP * DEVICE_SECONDS / measured(work, 1)))
    return max(1, min(DEVICE_CALLS, round(DEVICE_SECONDS / measured(work, first))))


class Timer:
    """Times work that ends on the devices of a library. Collective over the grid.

    times   repetitions of a timing
    """

    def __init__(self, grid: Grid, library: NumpyLibrary):
        self._grid, self._library, self.times = grid, library, 1

    def warm_up(self, work: Work) -> None:
        """Do the work once, and set `times`."""
        work()
        self.times = repetitions(self._library, work, self.seconds)

    def seconds(self, work: Work, times: int = 0) -> float:
        """Return the seconds of one of `times` (default: `self.times`) repetitions on the slowest rank."""
        self._library.synchronize()
        self._grid.comm.Barrier()
        return self._grid.comm.largest(in_a_row(work, self._library, times or self.times))


class GemmOperands:
    """A, B and C of GEMMs of several shapes, in the same memory, which is touched once.

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
        return [flat[: rows * cols].reshape(cols, rows).T if flag == "t" else flat[: rows * cols].reshape(rows, cols)
                for flat, rows, cols, flag in zip(self._flats, (m, k, m), (k, n, n), form + "n")]

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
    """Return the ranks that have cores of their own, each as many as its BLAS has threads, as far as there are any.

    usable   host and cores of each rank

        >>> one_a_core([("a", {0}), ("a", {0}), ("a", {1}), ("b", {0, 1}), ("b", {0, 1}), ("b", {0, 1})], 1)
        {0, 2, 3, 4}
    """
    found, taken = set[int](), set[tuple[str, int]]()
    for rank, (host, own) in enumerate(usable):
        free = [(host, core) for core in sorted(own) if (host, core) not in taken][: max(1, threads)]
        if free:
            found.add(rank)
            taken.update(free)
    return found


class CoreShare(NamedTuple):
    """How ranks share the cores of their node.

    crowd   ranks for each set of cores: what keeps a core busy takes this many times as long
    works   whether this rank is one of those that have cores of their own
    """

    crowd: float = 1.0
    works: bool = True


def core_share(comm: MPI.Intracomm, threads: int) -> CoreShare:
    """Return the share of this rank. Collective. threads: of the BLAS of a rank."""
    host = socket.gethostname()
    everyones = comm.allgather((host, cores()))
    here = {rank for rank, (name, _) in enumerate(everyones) if name == host}
    working = one_a_core(everyones, threads)
    return CoreShare(len(here) / len(here & working), comm.rank in working)


class Sampler:
    """Measures work that all ranks of a communicator do at once. All methods are collective.

    share     of the cores of this rank's node
    budget    duration of the sections, as a share of what each asks for; a later one has what earlier ones left
    clock     a function that returns seconds
    left_out  points that were not measured, because the time of their section was up
    """

    def __init__(self, comm: MPI.Intracomm, budget: float = 1.0, share: CoreShare = CoreShare(),
                 clock: Callable[[], float] = time.perf_counter):
        self.comm, self.budget, self.share, self.clock = comm, budget, share, clock
        self.left_out = 0
        self._ends, self._over, self._due = inf, False, clock()

    @contextmanager
    def section(self, seconds: float) -> Iterator[None]:
        """Return a context in which `measure` takes about `seconds` at most, and what earlier sections left."""
        self._due = max(self._due, self.clock()) + self.budget * seconds
        self._ends, self._over = self._due, False
        try:
            yield
        finally:
            self._ends, self._over = inf, False

    def largest(self, *values: float) -> list[float]:
        """Return the largest of the ranks' values, each."""
        mine, found = np.array(values, np.float64), np.empty(len(values), np.float64)
        self.comm.Allreduce(mine, found, MPI.MAX)
        return found.tolist()

    def meet(self, idle: bool = False) -> None:
        """Wait for all ranks, and leave them the cores meanwhile. idle: look rarely."""
        arrival, begun = self.comm.Ibarrier(), self.clock()
        while not arrival.Test():
            waited = self.clock() - begun
            if idle:
                time.sleep(IDLE_SECONDS)
            elif waited < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(SLEEP_SECONDS, waited * SLEPT))

    def measure_busy(self, work: Work) -> float | None:
        """`measure` of work that keeps a core busy and waits for nobody.

        If ranks share cores, one rank on each core works, so that no timing contains turns of another rank, and the
        time is multiplied by the number of ranks on a core.
        """
        seconds = self.measure(work, counts=self.share.works)
        return None if seconds is None else seconds * self.share.crowd

    def measure(self, work: Work, *, samples: int = SAMPLES, sample_seconds: float = SAMPLE_SECONDS,
                counts: bool = True) -> float | None:
        """Return the median seconds of a call on the slowest rank, or None if the time of the section is up.

        counts   whether this rank works; one that does not only waits
        """
        if self._over:
            self.left_out += 1
            return None
        self._timed(work, 1, counts)
        first = self._timed(work, 1, counts)
        fastest, over = self.largest(-first if counts else -inf, self.clock() - self._ends)
        if over > 0:
            self._over, self.left_out = True, self.left_out + 1
            return None
        calls = max(1, min(MOST_CALLS, round(sample_seconds / max(-fastest, 1e-9))))
        return self.largest(median(self._timed(work, calls, counts) for _ in range(samples)))[0]

    def _timed(self, work: Work, calls: int, counts: bool) -> float:
        """Seconds of one of `calls` calls; 0 on a rank that does not work."""
        self.meet(idle=not counts)
        if not counts:
            return 0.0
        begun = self.clock()
        for _ in range(calls):
            work()
        return (self.clock() - begun) / calls
