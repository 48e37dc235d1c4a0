"""A process of `pmm3d tune blas`, with one BLAS and kernel on its own cores. numpy is imported late, because OpenBLAS
reads the environment when it is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ...ranks import without_mpi

SECONDS = 0.04
"""Duration of a measurement."""
OPERANDS = dict[str, Any]()
"""Type of the elements -> `GemmOperands`."""


def start(variables: Mapping[str, str], cores: Sequence[int]) -> None:
    os.environ.update(variables)
    os.sched_setaffinity(0, cores)


def load(shapes: Mapping[str, Sequence[tuple[int, int, int]]]) -> dict[str, Any]:
    """Load the BLAS, and make operands. Return the file, name, version, kernel and threads of the BLAS.

    shapes   type of the elements -> (m, n, k) of each GEMM

    Raises Pmm3dError, or MemoryError, if the BLAS cannot be used.
    """
    without_mpi()
    from ....arrays import NumpyLibrary
    from ....arrays.blas_choice import blas_here, chosen
    from ...timing import GemmOperands

    blas = blas_here()
    OPERANDS.update({dtype: GemmOperands(NumpyLibrary(), dtype, of_type) for dtype, of_type in shapes.items()})
    return {"file": chosen().file, **vars(blas)}


def seconds(dtype: str, shape: tuple[int, int, int], form: str) -> float:
    """Return the median seconds of the calls of a GEMM within SECONDS, without the first call. If the first call takes
    longer than SECONDS, its time is returned."""
    gemm, samples = OPERANDS[dtype].gemm(shape, form), list[float]()
    begun = time.perf_counter()
    while len(samples) < 2 or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        gemm()
        samples.append(time.perf_counter() - start)
        if samples[0] > SECONDS:
            return samples[0]
    return median(samples[1:])
