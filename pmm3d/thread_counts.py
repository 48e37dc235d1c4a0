"""Number of threads of a BLAS, as the environment sets it. Imports no array library."""

from __future__ import annotations

import os
from collections.abc import Mapping

THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads of a BLAS. The first one that holds a number counts."""


def cores() -> frozenset[int]:
    """The cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def asked_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads of a rank's BLAS: the number in the first of `THREAD_COUNTS` that holds one. The
    number of cores of the process is the limit, and the default if no variable holds a number.

        >>> asked_threads({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "many"})
        1
    """
    asked = [int(text) for text in map(environment.get, THREAD_COUNTS) if text and text.isdecimal()]
    return max(1, min([*asked[:1], len(cores())]))
