"""Timings: of one product on the host; on a device of many in a row, so that launching them is mostly hidden."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import Array, NumpyLibrary, check_matrix_dtype, library_here
from ...comm import Grid
from ...errors import DTypeError, Pmm3dError
from .result import Case

SAMPLE = 0.1
"""Seconds that a timing on a device lasts."""
WARM_UP = 5
"""Timings that pass before those that count: the clocks of a device rise."""
MOST = 200
"""Products in a timing."""

Work = Callable[[], Any]


class Timer:
    """Times work that ends on the devices of a library. Collective over the grid.

    times   how many repetitions make a timing
    """

    def __init__(self, grid: Grid, library: NumpyLibrary):
        self._grid, self._library, self.times = grid, library, 1

    def warm_up(self, work: Work) -> None:
        """Do it once, and find out how many repetitions make a timing."""
        work()
        self.times = repetitions(self._library, work, self.seconds)

    def seconds(self, work: Work, times: int = 0) -> float:
        """Of one of `times` repetitions, those of a timing if left out; the slowest rank's."""
        self._library.synchronize()
        self._grid.comm.Barrier()
        return self._grid.comm.largest(in_a_row(work, self._library, times or self.times))


def repetitions(library: NumpyLibrary, work: Work, seconds: Callable[[Work, int], float] | None = None) -> int:
    """How many make a timing: one on the host; on a device, which they warm up, as many as last for SAMPLE.

    seconds   of one of so many repetitions; of this rank if left out
    """
    if library.on_host:
        return 1
    measured = seconds or (lambda work, times: in_a_row(work, library, times))
    first = min(MOST, 1 + int(WARM_UP * SAMPLE / measured(work, 1)))
    return max(1, min(MOST, round(SAMPLE / measured(work, first))))


def in_a_row(work: Work, library: NumpyLibrary, times: int) -> float:
    """Seconds of one of so many repetitions; the device has done all of them by then."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    library.synchronize()
    return (time.perf_counter() - begun) / times


def random_arrays(library: NumpyLibrary, dtype: str, shape: tuple[int, ...]) -> list[Array]:
    """A, B and C of a product m, n, k, C for its result."""
    m, n, k = shape
    source = np.random.default_rng(0)
    factors = [library.from_numpy(source.random(size, np.float32) - 0.5, dtype) for size in ((m, k), (k, n))]
    return [*factors, library.empty((m, n), dtype)]


def reference_of(case: Case) -> tuple[str, NumpyLibrary, Work]:
    """The name of another library's own matmul, the library, and a function that multiplies by it.

    Raises DTypeError for what it cannot multiply, Pmm3dError where it is not there.
    """
    library = library_here(case.reference)
    check_matrix_dtype(case.dtype, library)
    if case.tf32 and library.kind != "torch:cuda":
        raise DTypeError(f"--reference {case.reference}: tf32 is rounding by torch:cuda alone")
    a, b, c = random_arrays(library, case.dtype, case.product)
    matmul = library.xp.matmul

    def multiply() -> None:
        matmul(a, b, out=c)

    name = f"{library.xp.__name__}.matmul"
    return name, library, _rounded(library, multiply) if case.tf32 else multiply


def _rounded(library: Any, multiply: Work) -> Work:
    """The same with tf32, which is as it was afterwards."""
    rounding = library.xp.backends.cuda.matmul

    def multiply_rounded() -> None:
        before, rounding.fp32_precision = rounding.fp32_precision, "tf32"
        try:
            multiply()
        finally:
            rounding.fp32_precision = before

    return multiply_rounded


def check_reference(case: Case, ranks: int) -> None:
    """Raises Pmm3dError where there is nothing that a reference could be held against."""
    if case.reference and ranks > 1:
        raise Pmm3dError(f"--reference times the whole product on one rank, and here are {ranks}: start one rank")
