"""One rank's share of `pmm3d tune blas`: a process with one BLAS, kernel and number of threads, told what to time.

Reads a request a line on stdin, answers in a line on stdout; both are JSON. Ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ....arrays import NumpyLibrary, Workspace
from ....arrays.blas_choice import chosen
from ....arrays.blas_library import file_of
from ....errors import Pmm3dError
from ....processor import loaded_blas


class Operands:
    """Matrices of any type, size and order in the same memory, which is touched once."""

    def __init__(self, nbytes: int):
        self._flats = [np.full(nbytes // 8, 0.5) for _ in range(3)]
        self._library, self._work = NumpyLibrary(), Workspace()

    def timed(self, request: dict[str, Any]) -> float:
        """Seconds of a GEMM of m, n, k; or of a copy of a matrix of rows, columns into the other order."""
        dtype, orders, shape = request["dtype"], request["orders"], request["shape"]
        if len(shape) == 2:
            matrix = self._matrix(self._flats[0], shape, orders == "t", dtype)
            return _seconds(partial(np.copyto, self._matrix(self._flats[1], shape, orders == "n", dtype), matrix),
                            request["seconds"])
        m, n, k = shape
        a, b, c = (self._matrix(flat, shape, order == "t", dtype)
                   for flat, shape, order in zip(self._flats, ((m, k), (k, n), (m, n)), orders))
        return _seconds(partial(self._library.gemm, a, b, c, 1, 0, self._work), request["seconds"])

    @staticmethod
    def _matrix(flat: np.ndarray, shape: tuple[int, int], by_columns: bool, dtype: str) -> np.ndarray:
        part = flat.view(dtype)[: shape[0] * shape[1]]
        return part.reshape(shape[::-1]).T if by_columns else part.reshape(shape)


def _seconds(call: Any, least: float) -> float:
    """The median of as many calls as fit into so many seconds, but for the first; of a long one that first alone."""
    found: list[float] = []
    begun = time.perf_counter()
    while not 1 < len(found) or time.perf_counter() - begun < least:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
        if found[0] > least:
            return found[0]
    return median(found[1:])


def _mapped() -> set[str]:
    """Files that are loaded by now; none where the system does not tell."""
    with suppress(OSError), open("/proc/self/maps") as lines:
        return {os.path.realpath(line[line.index("/") :].rstrip("\n")) for line in lines if "/" in line}
    return set()


def main() -> None:
    core, nbytes = map(int, sys.argv[1:])
    if core >= 0:
        os.sched_setaffinity(0, range(core, core + int(os.environ["OMP_NUM_THREADS"])))
    before = _mapped()
    try:
        file, early = chosen().file, file_of(chosen().routines["dgemm"]) in before
    except (Pmm3dError, MemoryError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"file": file, "early": early, **vars(loaded_blas(file))}), flush=True)
    operands = Operands(nbytes)
    operands.timed({"dtype": "float32", "orders": "nnn", "shape": (8, 8, 8), "seconds": 0})
    for line in sys.stdin:
        print(json.dumps(operands.timed(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
