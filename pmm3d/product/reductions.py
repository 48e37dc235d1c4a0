"""Reductions of a distributed matrix: norm, inner products, trace and diagonal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import frexp, hypot, inf, isfinite, isnan, ldexp, nan, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, NumpyLibrary, parallel_rows
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm import one_thread, sum_gathered
from .checks import check_alike, check_numbers, check_square, signature_of
from .relayout import has_layout, in_layout, summed
from .stored import StoredMatrix, shards

if TYPE_CHECKING:
    from typing import Self

SMALLEST = {"float64": 1e-270, "complex128": 1e-270}
"""Smallest reliable sum of squares of each type. Below it, squares may have underflowed."""
SMALLEST_OF_OTHERS = 1e-25
"""The same for other types, whose squares a device may sum in float32."""


class Reductions(StoredMatrix):
    """Reductions of a matrix, with the same result on every rank. An element that several ranks store counts once."""

    @one_thread
    def norm(self) -> float:
        """Frobenius norm, (sum |a_ij|^2)^(1/2), the same number on every rank.

        Returns
        -------
        float
            The norm, added in float64. Squares that are too large or too small for the type do not change it.

        Raises
        ------
        DTypeError
            For labels.

        Notes
        -----
        Each rank receives 8 bytes from each other rank, phase "norm" of the ledger. Partial sums are summed first.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.from_function(grid, (2, 1), lambda i, j: 3 + i).norm()
        5.0
        """
        check = lambda: check_numbers("norm", self)
        own = lambda a, _: _norm_of(a.library, self.library.as_input(a._stored), self.dtype)
        found = self._own_of_all("norm", check, own, "float64").tolist()
        return nan if any(map(isnan, found)) else hypot(*found)

    @one_thread
    def inner(self, b: Self) -> complex:
        """Inner product, sum conj(a_ij) b_ij, as `numpy.vdot`; the same number on every rank.

        Parameters
        ----------
        b : DistMatrix, (m, n)
            Matrix of the same shape and type on the same grid. In another layout, it is redistributed to the layout of
            A.

        Returns
        -------
        float or complex
            The inner product, added in float64.

        Raises
        ------
        LayoutError, DTypeError, GridError
            If the matrices do not fit.

        Notes
        -----
        Each rank receives 8 bytes (16 for complex types) from each other rank, phase "inner" of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.ones(grid, (2, 3))
        ...     a.inner(a)
        6.0
        """

        def check() -> None:
            check_numbers("inner", self)
            check_alike("inner", self, b)

        return self._added_up("inner", check, _inner_of, b)

    @one_thread
    def trace(self) -> complex:
        """Trace, sum a_ii, of a square matrix; the same number on every rank.

        Returns
        -------
        float or complex
            The trace, added in float64.

        Raises
        ------
        LayoutError, DTypeError
            If the matrix is not square, or contains labels.

        Notes
        -----
        Each rank receives 8 bytes (16 for complex types) from each other rank, phase "trace" of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.identity(grid, 4).trace()
        4.0
        """

        def check() -> None:
            check_numbers("trace", self)
            check_square("trace", self)

        def own(a: StoredMatrix, _: StoredMatrix) -> complex:
            values = [self.library.to_numpy(part).astype(_wide(self.dtype)) for part, _ in diagonals(self)]
            total = sum((part.sum().item() for part in values), 0.0)
            return np.conj(total).item() if self.conjugated else total

        return self._added_up("trace", check, own, sums=False)

    @one_thread
    def diagonal(self) -> Array:
        """The diagonal elements a_ii, on every rank.

        Raises
        ------
        DTypeError
            For labels.

        Notes
        -----
        An all-reduce of the diagonal over all ranks, phase "diagonal" of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.identity(grid, 3).diagonal()
        array([1., 1., 1.])
        """
        with self.grid.collective_call("diagonal", self._signature):
            check_numbers("diagonal", self)
            own = self.library.empty((min(self.shape),), self.dtype)
            own[...] = 0
        if not min(self.shape):
            return own
        if _counts(self):
            for values, first in diagonals(self):
                own[first : first + values.shape[0]] = self.library.conjugate(values) if self.conjugated else values
        with self.grid.ledger.phase("diagonal"):
            total: Array = self.grid.everyone.all_reduce(own, agreed=True).wait()
        return total

    def _own_of_all(
        self,
        what: str,
        check: Callable[[], None],
        own: Callable[[StoredMatrix, StoredMatrix], complex],
        dtype: str,
        b: StoredMatrix | None = None,
        sums: bool = True,
    ) -> np.ndarray:
        """Gather own(A, B) of each rank, or 0 for a rank whose elements do not count. Collective.

        The numbers are part of the message by which ranks compare arguments, unless A or B must be moved first.

        own    function of A and B, with B in the layout of A; B is A if b is None
        sums   whether partial sums of A are summed first
        """
        others = () if b is None else (signature_of(b),)

        def number() -> complex:
            check()
            if moves():
                return 0.0
            return own(self, self if b is None else b) if _counts(self) else 0.0

        def moves() -> bool:
            return bool(sums and self.layout.sums) or (
                b is not None and b is not self and not has_layout(b, self.layout)
            )

        found = self.grid._number_of_all(what, number, dtype, self._signature, *others)
        if not moves():
            return found
        a = summed(self) if sums else self
        other = a if b is None or b is self else in_layout(b, a.layout, what)
        return self.grid._number_of_all(what, lambda: own(a, other) if _counts(a) else 0.0, dtype)

    def _added_up(
        self,
        what: str,
        check: Callable[[], None],
        own: Callable[[StoredMatrix, StoredMatrix], complex],
        b: StoredMatrix | None = None,
        sums: bool = True,
    ) -> complex:
        """Sum of the numbers of `_own_of_all`, in the order of an all-reduce. Collective."""
        kind = _wide(self.dtype)
        total = np.empty((1, 1), kind)
        sum_gathered(
            NumpyLibrary(),
            self._own_of_all(what, check, own, kind, b, sums)[:, None],
            total,
            self.grid.everyone.node_map,
        )
        number: complex = total.item()
        return number


def diagonals(matrix: StoredMatrix) -> Iterator[tuple[Array, int]]:
    """Yield this rank's parts of the diagonal, each with the row of its first element. A part is a 1D view before
    conjugation."""
    step = sum(matrix.library.strides(matrix._stored))
    for box, within in shards(matrix.shape, matrix.layout, matrix.grid).runs(matrix.grid.rank):
        first, last = max(box.r0, box.c0), min(box.r1, box.c1)
        if first < last:
            part = matrix.memory[within][first - box.r0 :, first - box.c0 :]
            yield matrix.library.as_strided(part, (last - first,), (step,)), first


def _counts(matrix: StoredMatrix) -> bool:
    """Whether this rank is the first among the ranks that store the same elements."""
    grid = matrix.grid
    return grid.coords is not None and matrix.layout.on(grid.shape).is_first(grid.coords)


def _wide(dtype: str) -> str:
    return "complex128" if dtype.startswith("complex") else "float64"


def _over_rows(library: NumpyLibrary, function: Callable[..., Any], *arrays: Array) -> list[Any]:
    """List of function(*slices) for consecutive slices of the rows of the arrays."""
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
    if not library.has_data or (isfinite(total) and total > SMALLEST.get(dtype, SMALLEST_OF_OTHERS)) or total != total:
        return sqrt(total) if isfinite(total) else total
    largest = max(
        (float(each) for each in _over_rows(library, lambda part: library.xp.abs(part).max(), stored)), default=0.0
    )
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

    stored, other = library.as_input(a._stored), library.as_input(b._stored)
    other = other if a.order == b.order else other.T
    return sum((each.item() for each in _over_rows(library, product, stored, other)), 0.0)
