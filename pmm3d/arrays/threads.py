"""Loops over slices of arrays on as many threads as the BLAS has: where a GEMM has all cores of a rank, sums, casts and
elementwise functions on one of them would take most of the time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

from ..layout import offsets, part_sizes
from ..thread_counts import asked_threads

LEAST_SLICES = 4
"""Of a loop that is shared out: a shorter one is over before other threads have begun."""
COPIED = 2**17
"""Elements of a slice of a copy."""
PREFIX = "pmm3d loop"
Slice = TypeVar("Slice")


class LoneThread(threading.Thread):
    """A thread whose loops stay on it, since others compute beside it.

        >>> issubclass(LoneThread, threading.Thread)
        True
    """


def in_threads(work: Callable[[Slice], None], slices: Iterable[Slice]) -> None:
    """work(slice) for each, consecutive ones on the same thread; the caller's is one of them. What `work` raises is
    raised once no thread works any more.

        >>> found = [0, 0, 0]
        >>> in_threads(lambda index: found.__setitem__(index, index), range(3))
        >>> found
        [0, 1, 2]
    """
    every = list(slices)
    number = min(blas_threads(), len(every)) if len(every) >= LEAST_SLICES and _may_share() else 1
    if number == 1:
        _each(work, every)
        return
    first, *others = [every[start:stop] for start, stop in pairwise(offsets(part_sizes(len(every), number)))]
    pool = _pool(blas_threads() - 1, os.getpid())
    under_way = [pool.submit(copy_context().run, _each, work, share) for share in others]
    try:
        _each(work, first)
    finally:
        problems = [done.exception() for done in under_way]
    for problem in problems:
        if problem is not None:
            raise problem


def each_slice(library: Any, work: Callable[[Slice], None], slices: Iterable[Slice]) -> None:
    """As `in_threads`, for arrays of numpy; those of torch, whose functions have threads of their own, one by one.

        >>> from pmm3d.arrays import NumpyLibrary
        >>> found = []
        >>> each_slice(NumpyLibrary(), found.append, [slice(0, 2), slice(2, 3)])
        >>> found
        [slice(0, 2, None), slice(2, 3, None)]
    """
    if library.name == "numpy":
        in_threads(work, slices)
    else:
        _each(work, slices)


def copy_into(library: Any, source: Any, out: Any) -> None:
    """out[...] = source, of the same shape, cast where the types differ; a large one of numpy as `in_threads`.

        >>> from pmm3d.arrays import NumpyLibrary
        >>> import numpy as np
        >>> out = np.zeros(2, "float32")
        >>> copy_into(NumpyLibrary(), np.arange(2), out)
        >>> out
        array([0., 1.], dtype=float32)
    """
    if library.name != "numpy" or not library.has_data or out.size < LEAST_SLICES * COPIED or blas_threads() == 1:
        out[...] = source
        return
    if out.strides[0] < out.strides[-1]:
        source, out = source.T, out.T
    step = max(1, COPIED // prod(out.shape[1:]))

    def copy(rows: slice) -> None:
        out[rows] = source[rows]

    in_threads(copy, [slice(start, start + step) for start in range(0, out.shape[0], step)])


def by_rows(library: Any, function: Callable[..., Any], out: Any, *arrays: Any, name: str = "elementwise") -> None:
    """out = function(*arrays) on slices of rows, as `each_slice`; arrays of one row or one column go along. `out` may
    be one of them.

        >>> from pmm3d.arrays import NumpyLibrary
        >>> import numpy as np
        >>> out = np.ones((2, 3))
        >>> by_rows(NumpyLibrary(), lambda part, row: 2 * part + row, out, out, np.array([[0.0, 1.0, 2.0]]))
        >>> out
        array([[2., 3., 4.],
               [2., 3., 4.]])
    """
    if not library.has_data:
        library.passed(name, out, *arrays)
    if not out.shape[0] or not library.has_data:
        return
    if library.slice_elements is None or prod(out.shape) <= library.slice_elements:
        out[...] = function(*arrays)
        return

    def work(part: slice) -> None:
        out[part] = function(*(array if array.shape[0] == 1 else array[part] for array in arrays))

    each_slice(library, work, slices_of_rows(out.shape, library.slice_elements))


def slices_of_rows(shape: tuple[int, ...], elements: int) -> list[slice]:
    """The rows of an array of that shape, in slices of so many elements.

        >>> slices_of_rows((3, 100), 200)
        [slice(0, 2, None), slice(2, 4, None)]
    """
    rows = max(1, elements // max(1, shape[1]))
    return [slice(start, start + rows) for start in range(0, shape[0], rows)]


@cache
def blas_threads() -> int:
    """Number of threads of this rank's BLAS (`asked_threads`), the same for as long as the process lives.

        >>> blas_threads() >= 1
        True
    """
    return asked_threads()


def _each(work: Callable[[Slice], None], slices: Iterable[Slice]) -> None:
    for each in slices:
        work(each)


def _may_share() -> bool:
    here = threading.current_thread()
    return not isinstance(here, LoneThread) and not here.name.startswith(PREFIX)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of one process: a fork has none of its threads."""
    return ThreadPoolExecutor(threads, PREFIX)
