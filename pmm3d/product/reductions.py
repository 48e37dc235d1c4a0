"""Numbers of a matrix that is spread over ranks: its norm, inner products, its trace and its diagonal."""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, hypot, inf, isfinite, isnan, ldexp, nan, sqrt
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, parallel_rows
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm.guard import one_thread
from .checks import check_alike, check_numbers, check_square, signature_of
from .relayout import in_layout, summed
from .stored import StoredMatrix

SMALLEST = {"float64": 1e-270, "complex128": 1e-270}
"""Of sums of squares, below which squares were lost."""
SMALLEST_OF_OTHERS = 1e-25
"""Of types whose squares a device may add up in float32."""


class Reductions(StoredMatrix):
    """What of a matrix every rank is told. Each element counts once, however many ranks hold it."""

    @one_thread
    def norm(self) -> float:
        """The Frobenius norm, (sum |a_ij|^2)^(1/2), added up in float64, the same on every rank. Elements whose
        squares are too large or too small for the type do no harm.

        Each rank receives 8 bytes of every other one, phase "norm" of the ledger; partial sums are summed first.

            >>> from pmm3d import DistMatrix, Grid
            >>> with Grid() as grid:
            ...     DistMatrix.from_function(grid, (2, 1), lambda i, j: 3 + i).norm()
            5.0
        """
        with self.grid.together("norm", self.signature):
            check_numbers("norm", self)
        matrix = summed(self)
        own = _norm_of(matrix.library, self.library.plain(matrix.stored), self.dtype) if _counts(matrix) else 0.0
        everyone = self.grid.everyone
        with self.grid.ledger.phase("norm"):
            norms = everyone.all_gather(np.array([own]), counts=[1] * everyone.size).wait()
        found = norms.tolist()
        return nan if any(map(isnan, found)) else hypot(*found)

    @one_thread
    def inner(self, b: StoredMatrix) -> complex:
        """sum conj(a_ij) b_ij, as `numpy.vdot`: a number of Python, the same on every rank, added up in float64.

        b    of the same shape and type, on the same grid; in another layout it is redistributed to that of this matrix

        Phase "inner" of the ledger, besides what is redistributed. Raises LayoutError, DTypeError, GridError.
        """
        with self.grid.together("inner", self.signature, signature_of(b)):
            check_numbers("inner", self)
            check_alike("inner", self, b)
        a = summed(self)
        other = a if b is self else in_layout(b, a.layout, "inner")
        own = _inner_of(a, other) if _counts(a) else 0.0
        return self._added_up("inner", own)

    @one_thread
    def trace(self) -> complex:
        """sum a_ii of a square matrix, a number of Python, added up in float64. Phase "trace" of the ledger."""
        with self.grid.together("trace", self.signature):
            check_numbers("trace", self)
            check_square("trace", self)
        own = 0.0
        if _counts(self):
            values = self.library.to_numpy(diagonal_of(self)[0])
            own = values.astype(_wide(self.dtype)).sum().item()
        return self._added_up("trace", np.conj(own).item() if self.conjugated else own)

    @one_thread
    def diagonal(self) -> Array:
        """The elements a_ii, an array of one dim, on every rank. Phase "diagonal" of the ledger: a sum of such arrays
        over all ranks."""
        with self.grid.together("diagonal", self.signature):
            check_numbers("diagonal", self)
            found = self.library.empty((min(self.shape),), self.dtype)
            found[...] = 0
        if not min(self.shape):
            return found
        if _counts(self):
            values, first = diagonal_of(self)
            found[first : first + values.shape[0]] = self.library.conjugate(values) if self.conjugated else values
        with self.grid.ledger.phase("diagonal"):
            total: Array = self.grid.everyone.all_reduce(found, agreed=True).wait()
        return total

    def _added_up(self, phase: str, own: complex) -> complex:
        """The sum of what the ranks have, in the order of their numbers."""
        kind = "complex128" if self.dtype.startswith("complex") else "float64"
        with self.grid.ledger.phase(phase):
            total = self.grid.everyone.all_reduce(np.array([own], kind), agreed=True).wait()
        number: complex = total[0].item()
        return number


def diagonal_of(matrix: StoredMatrix) -> tuple[Array, int]:
    """This rank's part of the diagonal, a view of one dim, and of which row its first element is. Of a conjugated view
    the conjugates."""
    box, stored = matrix.box, matrix.stored
    first, last = max(box.r0, box.c0), min(box.r1, box.c1)
    if first >= last:
        return stored[:1].reshape(-1)[:0], 0
    row, column = (first - box.r0, first - box.c0) if matrix.order == "C" else (first - box.c0, first - box.r0)
    step = sum(matrix.library.strides(stored))
    return matrix.library.as_strided(stored[row:, column:], (last - first,), (step,)), first


def _counts(matrix: StoredMatrix) -> bool:
    """Whether this rank is the first of those that hold the same."""
    grid = matrix.grid
    return grid.coords is not None and matrix.layout.on(grid.shape).is_first(grid.coords)


def _wide(dtype: str) -> str:
    return "complex128" if dtype.startswith("complex") else "float64"


def _over_rows(library: NumpyLibrary, function: Callable[..., Any], *arrays: Array) -> list[Any]:
    """function(*arrays) of each slice of their rows."""
    if 0 in arrays[0].shape:
        return []
    if not library.has_data:
        return [function(*arrays)]

    def work(rows: slice) -> Any:
        with np.errstate(over="ignore", under="ignore"):
            return function(*(array[rows] for array in arrays))

    return parallel_rows(library, work, arrays[0].shape, library.slice_elements or DEVICE_ELEMENTS)


def _norm_of(library: NumpyLibrary, stored: Array, dtype: str) -> float:
    total = float(sum(map(float, _over_rows(library, library.square_sum, stored))))
    if not library.has_data or isfinite(total) and total > SMALLEST.get(dtype, SMALLEST_OF_OTHERS) or total != total:
        return sqrt(total) if isfinite(total) else total
    largest = max((float(each) for each in _over_rows(library, lambda part: library.xp.abs(part).max(), stored)),
                  default=0.0)
    if largest in (0.0, inf):
        return largest
    factor = ldexp(1.0, min(-frexp(largest)[1], 1000))
    squares = lambda part: library.square_sum(library.astype(part, _wide(dtype)) * factor)
    return sqrt(sum(map(float, _over_rows(library, squares, stored)))) / factor


def _inner_of(a: StoredMatrix, b: StoredMatrix) -> complex:
    library, wide = a.library, _wide(a.dtype)

    def product(x: Array, y: Array) -> Any:
        x, y = (part if a.dtype == wide else library.astype(part, wide) for part in (x, y))
        if wide == "complex128":
            x = x if a.conjugated else library.conjugate(x)
            y = library.conjugate(y) if b.conjugated else y
        return (x * y).sum()

    stored, other = library.plain(a.stored), library.plain(b.stored)
    other = other if a.order == b.order else other.T
    return sum((each.item() for each in _over_rows(library, product, stored, other)), 0.0)
