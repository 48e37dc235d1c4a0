"""What operations are made of: GEMMs and loops over slices, while collectives go on; sums and gathers along an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..arrays import Array, library_of
from ..comm import Axis, Grid, Pending
from ..comm.collectives import gather_parts, sum_arrays
from ..comm.transport import Link, Steps

if TYPE_CHECKING:
    from .tensor import Form

CHUNK = 2**15
"""Elements of the slices that elementwise operations work through: they and their temporaries stay in the cache."""


@contextmanager
def computing(grid: Grid, what: str) -> Iterator[None]:
    """Time in this context is computation, and collectives go on under it."""
    with grid.ledger.computing(what), grid.engine.background():
        yield


def gemm(form: Form, a: Array, b: Array, c: Array, beta: float = 0) -> None:
    """C = A B + beta C on this rank."""
    with computing(form.grid, "gemm"):
        if a.shape[1] and 0 not in c.shape:
            form.library.gemm(a, b, c, 1, beta, form.grid.workspace)
        elif beta == 0:
            c[...] = 0
        if not form.library.on_host and not form.grid.engine.idle():
            form.library.synchronize()


def column_sums(form: Form, array: Array, out: Array, beta: float = 0) -> None:
    """out (1, n) = beta out + the sum of the rows of a local array."""
    ones = form.new((1, array.shape[0]))
    ones[...] = 1
    gemm(form, ones, array, out, beta)


def in_chunks(function: Callable[..., Array], out: Array, *arrays: Array) -> None:
    """out = function(*arrays), elementwise on contiguous arrays of one shape, slice by slice. `out` may be one of them.

        >>> import numpy as np
        >>> array = np.arange(4.0)
        >>> in_chunks(lambda part: part * part, array, array)
        >>> array
        array([0., 1., 4., 9.])
    """
    flat_out, flat = out.reshape(-1), [array.reshape(-1) for array in arrays]
    for start in range(0, flat_out.shape[0], CHUNK):
        chunk = slice(start, start + CHUNK)
        flat_out[chunk] = function(*(array[chunk] for array in flat))


def by_rows(function: Callable[..., Array], out: Array, *arrays: Array) -> None:
    """out = function(*arrays) on slices of rows; arrays of one column go along. `out` may be one of them."""
    rows = max(1, CHUNK // max(1, out.shape[1]))
    for start in range(0, out.shape[0], rows):
        out[start : start + rows] = function(*(array[start : start + rows] for array in arrays))


def begin_after(before: Sequence[Pending], axis: Axis, name: str, collective: Callable[[Link], Steps[Any]]) -> Pending:
    """Start a collective along an axis, which begins once others are done."""

    def steps(link: Link) -> Steps[Any]:
        if before:
            yield list(before)
        for pending in before:
            pending.wait()
        return (yield from collective(link))

    return axis.begin(name, steps)


def sum_over(axis: Axis, array: Array, *before: Pending) -> Pending:
    """Start the sum of an array over an axis, in place, once what fills it is done."""
    library = library_of(array)
    return begin_after(before, axis, "all_reduce", lambda link: sum_arrays(link, library, array, array))


def gather_over(axis: Axis, part: Array, out: Array, counts: Sequence[int]) -> Pending:
    """Start bringing the parts of all ranks of an axis, of so many rows, together in `out`."""
    library = library_of(part)
    return axis.begin("all_gather", lambda link: gather_parts(link, library, part, out, counts))


def stacked(axis: Axis, array: Array) -> Array:
    """The arrays of all ranks of an axis, of one shape: (G, *shape). Each rank receives G-1 of them."""
    library, rows = library_of(array), array.shape[0]
    out = library.empty((axis.size * rows, *array.shape[1:]), library.dtype(array))
    return gather_over(axis, array, out, [rows] * axis.size).wait().reshape((axis.size, *array.shape))
