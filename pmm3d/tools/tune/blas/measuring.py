"""Times GEMMs with every BLAS and kernel, in turns, on all cores of the node at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from ....arrays.blas_choice import KERNEL_VARIABLE
from ....errors import Pmm3dError
from ....layout import itemsize
from ....model.machine import THREAD_COUNTS, cores
from .candidates import OPENBLAS, Candidate
from .shapes import Gemm

ORDERS = tuple("".join(orders) for orders in product("nt", repeat=3))
"""Of A, B and C: each by rows, "n", or by columns, "t"."""
SECONDS = 0.04
"""Of one measurement."""
ROUNDS = 5
EQUAL = 0.01
"""Candidates whose times differ by less are equal: the first in their order is taken."""


class Loaded(NamedTuple):
    """A candidate that is here: what it turned out to be. early: whether numpy has loaded it already, with the kernel
    that it then keeps."""

    candidate: Candidate
    file: str
    name: str
    version: str
    kernel: str
    threads: int
    early: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment, that make it so whatever kernel is set there."""
        return self.candidate.variables | ({KERNEL_VARIABLE: self.kernel} if self.name == OPENBLAS and self.kernel
                                           else {})

    @property
    def in_time(self) -> bool:
        """Whether a job can still choose its kernel."""
        return not (self.early and self.candidate.kernel)


class Times(NamedTuple):
    """Of one GEMM with one candidate: seconds by the orders of A, B and C; of a copy of A into the other order, and of
    B. A quick measurement has the orders of the job alone, and no copies."""

    orders: dict[str, float]
    copies: tuple[float, ...]

    @property
    def best(self) -> str:
        return min(self.orders, key=lambda orders: self.orders[orders])

    def as_given(self, gemm: Gemm) -> float:
        return self.orders[gemm.form + "n"]

    def transposed_first(self, gemm: Gemm) -> float:
        """The least with A or B, or both, copied into the other order first."""
        ways = ((self.orders[a + b + "n"] + self.copies[0] * (a != gemm.form[0]) + self.copies[1] * (b != gemm.form[1]))
                for a, b in product("nt", repeat=2) if a + b != gemm.form)
        return min(ways)


class Findings(NamedTuple):
    """candidates   that are here, in their order
    absent       the others, with why
    times        by candidate and GEMM
    ranks        processes that multiplied at once
    """

    candidates: list[Loaded]
    absent: dict[Candidate, str]
    times: dict[Candidate, dict[Gemm, Times]]
    ranks: int

    def seconds(self, candidate: Candidate, dtype: str = "") -> float:
        """Of all GEMMs of the job, or those of one type, as they are given."""
        return sum(gemm.times * times.as_given(gemm) for gemm, times in self.times[candidate].items()
                   if dtype in ("", gemm.dtype))

    @property
    def dtypes(self) -> list[str]:
        """Of the GEMMs."""
        return list(dict.fromkeys(gemm.dtype for times in self.times.values() for gemm in times))

    @property
    def choice(self) -> Loaded:
        """For the whole job."""
        return self.choice_for("")

    def choice_for(self, dtype: str, in_time: bool = False) -> Loaded:
        """The fastest in the GEMMs of that type; of equals the first. in_time: of those that a job can still choose,
        if there is one."""
        found = [loaded for loaded in self.candidates if loaded.in_time or not in_time] or self.candidates
        least = min(self.seconds(loaded.candidate, dtype) for loaded in found)
        return next(loaded for loaded in found if self.seconds(loaded.candidate, dtype) <= least * (1 + EQUAL))


class Crew:
    """As many processes as ranks, on cores of their own, with one candidate."""

    def __init__(self, candidate: Candidate, ranks: int, threads: int, nbytes: int):
        available = sorted(cores())
        environ = os.environ | dict.fromkeys(THREAD_COUNTS, str(threads)) | candidate.variables
        self._workers = [subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", str(core), str(nbytes)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
            for core in (available[rank * threads] for rank in range(ranks))]
        self.candidate = candidate
        self.problem, self.loaded = "", None
        try:
            found = [self._read(worker) for worker in self._workers]
        except Pmm3dError as error:
            self.problem = str(error)
            return
        self.problem = found[0].get("error", "")
        self.loaded = None if self.problem else Loaded(candidate, **found[0])

    def measure(self, dtype: str, shape: tuple[int, ...], orders: str) -> float:
        """Seconds of a GEMM, or of a copy, of the slowest rank."""
        request = {"shape": shape, "dtype": dtype, "orders": orders, "seconds": SECONDS}
        for worker in self._workers:
            worker.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
        return max(self._read(worker) for worker in self._workers)

    def _read(self, worker: subprocess.Popen[str]) -> Any:
        if not (line := worker.stdout.readline()):  # type: ignore[union-attr]
            said = worker.stderr.read().strip().splitlines()  # type: ignore[union-attr]
            raise Pmm3dError(f"{self.candidate}: its process ended: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)

    def close(self) -> None:
        for worker in self._workers:
            for stream in (worker.stdin, worker.stdout, worker.stderr):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            worker.wait()


@contextmanager
def crews(found: list[Candidate], ranks: int, threads: int, nbytes: int) -> Iterator[list[Crew]]:
    made: list[Crew] = []
    try:
        for candidate in found:
            made.append(Crew(candidate, ranks, threads, nbytes))
        yield made
    finally:
        for crew in made:
            crew.close()


def stages(number: int, gemms: list[Gemm]) -> int:
    return ROUNDS * number * len(gemms)


def measure(found: list[Candidate], gemms: list[Gemm], ranks: int, threads: int,
            tell: Callable[[str, int], None], quick: bool = False) -> Findings:
    """Time each GEMM with every candidate, in turns; medians of the rounds. quick: in the orders of the job alone.
    Raises Pmm3dError if no candidate is here."""
    nbytes = max(1024, *(max(g.m * g.k, g.k * g.n, g.m * g.n) * itemsize(g.dtype) for g in gemms))
    tell("looking for BLASes", 0)
    with crews(found, ranks, threads, -(-nbytes // 64) * 64) as made:
        absent = {crew.candidate: crew.problem for crew in made if crew.problem}
        here = _distinct([crew for crew in made if not crew.problem])
        if not here:
            raise Pmm3dError(f"no BLAS that was asked for is here: {'; '.join(absent.values())}")
        samples: dict[tuple[Candidate, Gemm, str], list[float]] = {}
        for turn, gemm, crew in product(range(ROUNDS), gemms, here):
            tell(f"{crew.candidate}: {'x'.join(map(str, gemm.shape))} {gemm.dtype}", 1)
            copies = () if quick else (("A", (gemm.m, gemm.k), gemm.form[0]), ("B", (gemm.k, gemm.n), gemm.form[1]))
            turned = (gemm.form + "n",) if quick else (*ORDERS[turn:], *ORDERS[:turn])
            crew.measure(gemm.dtype, gemm.shape, turned[-1])  # wakes the cores, which waited for another crew
            for what, shape, orders in (*((orders, gemm.shape, orders) for orders in turned), *copies):
                seconds = crew.measure(gemm.dtype, shape, orders)
                samples.setdefault((crew.candidate, gemm, what), []).append(seconds)
        times: dict[Candidate, dict[Gemm, Times]] = {crew.candidate: {} for crew in here}
        for crew, gemm in product(here, gemms):
            medians = {what: median(samples[crew.candidate, gemm, what]) for what in (*ORDERS, "A", "B")
                       if (crew.candidate, gemm, what) in samples}
            copied = tuple(medians.pop(what) for what in "AB" if what in medians)
            times[crew.candidate][gemm] = Times(medians, copied)
        return Findings([crew.loaded for crew in here if crew.loaded], absent, times, ranks)


def _distinct(here: list[Crew]) -> list[Crew]:
    """Without those that turned out to be another one again: a kernel that is chosen anyway, a second name."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for crew in here:
        assert crew.loaded is not None
        what = crew.loaded.file, crew.loaded.kernel
        if what not in seen:
            kept.append(crew)
        seen.add(what)
    return kept
