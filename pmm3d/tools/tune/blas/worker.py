"""A process of `pmm3d tune blas`, with one BLAS, kernel and number of threads, on cores of its own.

Arguments: its first core, and the shapes by type, as JSON. It writes a line about its BLAS to stdout. Then it answers
each line on stdin, (type, shape, form), with the seconds of that GEMM. Both are JSON. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from ....arrays import NumpyLibrary
from ....arrays.blas_choice import blas_here, chosen
from ....errors import Pmm3dError
from ...timing import GemmOperands

SECONDS = 0.04
"""Of one measurement, in which the median counts."""


def _seconds(gemm: Callable[[], Any]) -> float:
    """The median of the calls of SECONDS but for the first; of a longer one that first alone."""
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 2 or time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        gemm()
        found.append(time.perf_counter() - start)
        if found[0] > SECONDS:
            return found[0]
    return median(found[1:])


def main() -> None:
    core, shapes = int(sys.argv[1]), json.loads(sys.argv[2])
    os.sched_setaffinity(0, range(core, core + int(os.environ["OMP_NUM_THREADS"])))
    try:
        blas = blas_here()
    except (Pmm3dError, MemoryError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"file": chosen().file, **vars(blas)}), flush=True)
    operands = {dtype: GemmOperands(NumpyLibrary(), dtype, of_type) for dtype, of_type in shapes.items()}
    for line in sys.stdin:
        dtype, shape, form = json.loads(line)
        print(json.dumps(_seconds(operands[dtype].gemm(tuple(shape), form))), flush=True)


if __name__ == "__main__":
    main()
