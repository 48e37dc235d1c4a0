"""Loops over the rows of arrays, on the number of threads of the BLAS.

A GEMM uses all cores of a rank. On one core, sums, casts and elementwise functions would dominate the time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

from ..layout import offsets, part_sizes
from ..thread_counts import asked_threads

LEAST_SLICES = 4
"""A loop of fewer slices runs on one thread, because it would end before other threads start."""
COPIED = 2**17
"""Elements of a slice in a copy."""
RUN_BYTES, MOST_BYTES = 32, 2**31
"""Smallest run in bytes that numpy copies as one element, and the upper limit of an element of numpy. This takes two
thirds of the time for 64 x 64 blocks of float64."""
WRITTEN, READ, LEAST_TILED = 256, 128, 2**10
"""Length of a tile of a transposition in the direction in which the written array is contiguous, and in that of the
read array; and elements of an array that is copied without tiles. Tiles take half of the time of one assignment, and
omatcopy of a BLAS takes longer."""
ALIASED, LINE = 2**10, 64
"""Rows that begin at multiples of ALIASED bytes use few lines of a cache, so that it cannot hold a tile of them. A line
has LINE bytes."""
PREFIX = "pmm3d loop"


class LoneThread(threading.Thread):
    """A thread whose loops use no other threads, because others compute at the same time.

    >>> issubclass(LoneThread, threading.Thread)
    True
    """


def parallel_rows(
    library: Any, work: Callable[[slice], Any], shape: Sequence[int], elements: int | None = None
) -> list[Any]:
    """Call work(slice) for slices of the rows of an array of this shape; return the results in order.

    elements   elements of a slice, which has at least one row. Default: the `slice_elements` of the library (None: all
               rows at once)

    For numpy arrays, several threads call `work`: each takes consecutive slices, and the caller's thread is one of
    them. Functions of the other libraries use threads of their own, so the caller's thread runs all slices. If `work`
    raises, the error is raised when no thread is in `work` any more.

        >>> from pmm3d.arrays import NumpyLibrary
        >>> parallel_rows(NumpyLibrary(), lambda rows: (rows.start, rows.stop), (3, 100), elements=200)
        [(0, 2), (2, 3)]
    """
    rows, elements = shape[0], elements or library.slice_elements
    step = max(1, rows if elements is None else elements // max(1, prod(shape[1:])))
    if 0 < rows <= step:
        return [work(slice(0, rows))]
    slices = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    shared = len(slices) >= LEAST_SLICES and _may_share(library)
    number = min(blas_threads(), len(slices)) if shared else 1
    if number == 1:
        return _each(work, slices)
    first, *others = [slices[start:stop] for start, stop in pairwise(offsets(part_sizes(len(slices), number)))]
    pool, under_way = _pool(blas_threads() - 1, os.getpid()), list[Future[list[Any]]]()
    try:
        for share in others:
            under_way.append(pool.submit(copy_context().run, _each, work, share))
        own_results = _each(work, first)
    finally:
        wait(under_way)
    return [*own_results, *(result for done in under_way for result in done.result())]


def copy_into(library: Any, source: Any, out: Any) -> None:
    """Copy `source` to `out`, of the same shape, and cast if types differ. Large numpy arrays use `parallel_rows`, and
    blocks of a transposition.

    >>> from pmm3d.arrays import NumpyLibrary
    >>> import numpy as np
    >>> out = np.zeros(2, "float32")
    >>> copy_into(NumpyLibrary(), np.arange(2), out)
    >>> out
    array([0., 1.], dtype=float32)
    """
    if library.name != "numpy" or not library.has_data or out.size <= LEAST_TILED:
        out[...] = source
        return
    if out.ndim > 2 or out.size < LEAST_SLICES * COPIED or blas_threads() == 1:
        _copy(source, out)
        return
    if out.strides[0] < out.strides[-1]:
        source, out = source.T, out.T

    def copy(rows: slice) -> None:
        _copy(source[rows], out[rows])

    parallel_rows(library, copy, out.shape, COPIED)


def _copy(source: Any, out: Any) -> None:
    """Copy numpy arrays. Short runs are copied as one element each, and a transposition tile by tile."""
    if out.ndim > 2:
        nbytes = out.shape[-1] * out.itemsize
        in_runs = out.shape[-1] == 1 or source.strides[-1] == out.strides[-1] == out.itemsize
        if in_runs and RUN_BYTES <= nbytes < MOST_BYTES and source.dtype == out.dtype:
            source, out = source.view(f"V{nbytes}"), out.view(f"V{nbytes}")
    in_tiles(source, out, _assign)


def _assign(source: Any, out: Any) -> None:
    out[...] = source


def in_tiles(source: Any, out: Any, work: Callable[[Any, Any], None], ordered: bool = False) -> None:
    """Call work(source, out) for the parts of two numpy arrays that `tiles` returns. If rows of the source use few
    lines of the cache, `work` gets a copy of its part.

    ordered   whether `work` gets a copy in the order of `out`: numpy adds arrays of different orders in twice the time
              of the copy and the sum

        >>> out = np.ones((300, 300))
        >>> in_tiles(np.ones((300, 300)).T, out, lambda source, out: np.add(source, out, out=out), ordered=True)
        >>> bool((out == 2).all())
        True
    """
    parts, room = tiles(source, out), None
    if len(parts) > 1 and source.strides[_contiguous(out)] % ALIASED == 0:
        room = _unaliased(source[parts[0]], _contiguous(out))
    for tile in parts:
        part, there = source[tile], out[tile]
        if room is not None:
            copied = room[tuple(slice(size) for size in part.shape)]
            copied[...] = part
            part = copied
        if ordered and len(parts) > 1:
            turned = np.empty_like(there, part.dtype)
            turned[...] = part
            part = turned
        work(part, there)


def tiles(source: Any, out: Any) -> list[tuple[slice, ...]]:
    """Return the parts of two arrays of one shape in which elements of `out` are computed from those of `source`: tiles
    that fit the cache if the arrays are stored in different orders, else one part.

        >>> import numpy as np
        >>> by_rows, by_columns = np.ones((300, 100)), np.ones((300, 100), order="F")
        >>> tiles(by_rows, by_columns)
        [(slice(0, 256, None), slice(0, 100, None)), (slice(256, 300, None), slice(0, 100, None))]
        >>> tiles(by_rows, by_rows)
        [(slice(None, None, None), slice(None, None, None))]
    """
    shape, writes, reads = out.shape, _contiguous(out), _contiguous(source)
    if prod(shape) <= LEAST_TILED or reads == writes:
        return [(slice(None),) * len(shape)]
    steps = []
    for axis, stride in enumerate(out.strides):  # the other axes repeat the blocks of one of these two
        block = writes if abs(stride) < abs(out.strides[reads]) else reads
        most = WRITTEN if block == writes else READ
        steps.append(most if axis in (reads, writes) else max(1, most // shape[block]))
    return [
        *product(
            *([slice(low, min(low + step, size)) for low in range(0, size, step)] for size, step in zip(shape, steps))
        )
    ]


def _contiguous(array: Any) -> int:
    """Return the axis of the smallest stride, among those of several elements."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    return min(axes, key=lambda axis: abs(array.strides[axis]), default=0)


def _unaliased(like: Any, axis: int) -> Any:
    """Return a new numpy array of the shape and order of another one. A step along the axis is no multiple of ALIASED
    bytes."""
    strides, extent = [0] * like.ndim, like.itemsize
    for each in sorted(range(like.ndim), key=lambda axis: abs(like.strides[axis])):
        if each == axis:
            extent += LINE if (extent + LINE) % ALIASED else 2 * LINE
        strides[each], extent = extent, extent * like.shape[each]
    return np.ndarray(like.shape, like.dtype, np.empty(extent, np.uint8), strides=strides)


def by_rows(library: Any, function: Callable[..., Any], out: Any, *operands: Any, name: str = "elementwise") -> None:
    """Set out = function(*operands), elementwise, by `parallel_rows` on slices that fit into the cache. In a dry run:
    record a pass of this name.

    operands   numbers, and arrays with the rows of `out` or with one row, which each call gets whole. `out` may be one
               of them

    Slices consist of whole rows. If all arrays are contiguous and have one shape, slices consist of elements.

        >>> from pmm3d.arrays import NumpyLibrary
        >>> import numpy as np
        >>> out = np.ones((2, 3))
        >>> by_rows(NumpyLibrary(), lambda part, row: 2 * part + row, out, out, np.array([[0.0, 1.0, 2.0]]))
        >>> out
        array([[2., 3., 4.],
               [2., 3., 4.]])
    """
    if not library.has_data:
        library.passed(name, out, *[each for each in operands if not isinstance(each, (int, float))])
    if not out.shape[0] or not library.has_data:
        return
    if library.slice_elements is None or prod(out.shape) <= library.slice_elements:
        out[...] = function(*operands)
        return
    numbers = [isinstance(each, (int, float)) for each in operands]
    if library.is_contiguous(out) and all(
        is_number or (each.shape == out.shape and library.is_contiguous(each))
        for each, is_number in zip(operands, numbers)
    ):
        out = out.reshape(-1)
        operands = tuple([each if is_number else each.reshape(-1) for each, is_number in zip(operands, numbers)])
    unsplit = [is_number or each.shape[0] == 1 for each, is_number in zip(operands, numbers)]

    def work(part: slice) -> None:
        out[part] = function(*[each if is_unsplit else each[part] for each, is_unsplit in zip(operands, unsplit)])

    parallel_rows(library, work, out.shape)


@cache
def blas_threads() -> int:
    """Number of threads of this rank's BLAS (`asked_threads`), the same for the life of the process.

    >>> blas_threads() >= 1
    True
    """
    return asked_threads()


def _each(work: Callable[[slice], Any], slices: Sequence[slice]) -> list[Any]:
    return [work(part) for part in slices]


def _may_share(library: Any) -> bool:
    here = threading.current_thread()
    return library.name == "numpy" and not isinstance(here, LoneThread) and not here.name.startswith(PREFIX)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return the pool of a process, with all threads started. A forked process gets a pool of its own. If the system
    refuses a thread, the error is raised before any thread writes."""
    pool, started = ThreadPoolExecutor(threads, PREFIX), threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(started.wait)
    except BaseException:
        started.abort()
        raise
    return pool
