"""Reductions of a distributed matrix: sums and norms, also along rows and columns; inner products, trace and
diagonal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import frexp, hypot, inf, isfinite, isnan, ldexp, nan, sqrt
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..arrays import Array, NumpyLibrary, parallel_rows
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm import one_thread, sum_gathered
from ..errors import LayoutError
from ..layout import Layout, natural
from .checks import check_alike, check_numbers, check_square, signature_of
from .relayout import in_layout, relayout, summed
from .stored import StoredMatrix, shards

if TYPE_CHECKING:
    from typing import Self

SMALLEST = {"float64": 1e-270, "complex128": 1e-270}
"""Smallest reliable sum of squares of each type. Below it, squares may have underflowed."""
SMALLEST_OF_OTHERS = 1e-25
"""The same for other types, whose squares a device may sum in float32."""
LARGE, SMALL = 2.0**-538, 2.0**537
"""Factors of elements whose squares overflow or underflow in float64 (Blue, ACM TOMS 4(1), 1978)."""


class Reductions(StoredMatrix):
    """Reductions of a matrix. An element that several ranks store counts once."""

    @overload
    def norm(self, dim: None = None) -> float: ...

    @overload
    def norm(self, dim: int) -> Self: ...

    @one_thread
    def norm(self, dim: int | None = None) -> float | Self:
        """Frobenius norm, (sum |a_ij|^2)^(1/2), or the 2-norms of the columns (dim 0) or of the rows (dim 1).

        Parameters
        ----------
        dim : int or None
            0: over the rows, a norm for each column. 1: over the columns, a norm for each row. Default: the norm of the
            matrix.

        Returns
        -------
        float or DistMatrix
            The norm, the same number on every rank. With `dim`, a matrix (1, n) or (m, 1) as of `sum`, of real type.

        Raises
        ------
        LayoutError, DTypeError
            For another `dim`, and for labels.

        Notes
        -----
        Squares are added in float64. Squares that are too large or too small for the type do not change a norm. Each
        rank receives 8 bytes from each other rank; with `dim`, what it receives in `sum`, in float64, and twice if
        squares of float64 overflow or underflow, also if a row or column is 0. Phase "norm" of the ledger. Partial sums
        are summed first.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (2, 2), lambda i, j: (3 + i) * j)
        ...     a.norm(), a.norm(0).gather()
        (5.0, array([[0., 5.]]))
        """
        if dim is not None:
            return self._norms(dim)
        check = lambda: check_numbers("norm", self)
        own = lambda a, _: _norm_of(a.library, self.library.as_input(a._stored), self.dtype)
        found = self._own_of_all("norm", check, own, "float64").tolist()
        return nan if any(map(isnan, found)) else hypot(*found)

    @overload
    def sum(self, dim: None = None) -> complex: ...

    @overload
    def sum(self, dim: int) -> Self: ...

    @one_thread
    def sum(self, dim: int | None = None) -> complex | Self:
        """Sum of all elements, or sums over the rows (dim 0) or over the columns (dim 1).

        Parameters
        ----------
        dim : int or None
            0: over the rows, a sum for each column. 1: over the columns, a sum for each row. Default: all elements.

        Returns
        -------
        float, complex or DistMatrix
            The sum of all elements, the same number on every rank. With `dim`, a matrix (1, n) or (m, 1) of this type.
            The other dim has the layout of A, so that the shards of both fit: `a.local - a.sum(0).local / m`. Ranks
            along the other axes hold the same sums.

        Raises
        ------
        LayoutError, DTypeError
            For another `dim`, and for labels.

        Notes
        -----
        Elements are added in float64 (complex128), in an order that depends on the layout only, and the sum is rounded
        once. Each rank receives 8 bytes (16 for complex types) from each other rank. With `dim`, let s be 8 (16) bytes
        for each of this rank's columns (dim 0) or rows (dim 1). Along each axis of G ranks that splits the summed dim
        or has partial sums, a rank receives an all-reduce of s, at most 2 (G-1)/G s for large s. Phase "sum" of the
        ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
        ...     a.sum(), a.sum(0).gather(), a.sum(1).gather().tolist()
        (9.0, array([[1., 3., 5.]]), [[3.0], [6.0]])
        """
        library, wide = self.library, _wide(self.dtype)
        if dim is not None:
            with self.grid.collective_call("sum", self._signature, dim):
                dim = _checked_dim("sum", self, dim)
            sums = self._sums("sum", dim, lambda library, part: _cast(library, part, wide), wide)
            if self.conjugated:
                library.conjugate_in_place(sums.memory)
            return type(self)(self.grid, _cast(library, sums.memory, self.dtype), sums.shape, sums.layout)

        def own(a: StoredMatrix, _: StoredMatrix) -> complex:
            parts = _over_rows(library, lambda part: _cast(library, part, wide).sum(), library.as_input(a._stored))
            total = sum((part.item() for part in parts), 0.0)
            return np.conj(total).item() if self.conjugated else total

        return self._added_up("sum", lambda: check_numbers("sum", self), own, sums=False)

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

    def _norms(self, dim: int) -> Self:
        """2-norms of the columns (dim 0) or of the rows (dim 1). Collective."""
        with self.grid.collective_call("norm", self._signature, dim):
            dim = _checked_dim("norm", self, dim)
        a, library = summed(self), self.library
        squares = a._sums("norm", dim, _square, "float64")
        norms = library.xp.sqrt(squares.memory)
        if library.has_data and _wide(self.dtype) == self.dtype:
            found = library.to_numpy(squares.memory)
            factors = np.where(np.isinf(found), LARGE, np.where(found < SMALLEST[self.dtype], SMALL, 1.0))
            if (factors != 1).any():  # on all ranks that share these sums
                scale = library.from_numpy(factors, "float64")
                norms = library.xp.sqrt(a._sums("norm", dim, _square, "float64", scale).memory) / scale
        return type(self)(self.grid, _cast(library, norms, _real(self.dtype)), squares.shape, squares.layout)

    def _sums(self, what: str, dim: int, term: Callable[..., Array], dtype: str, *factors: Array) -> Self:
        """Sums of term(library, elements, *factors) over the rows (dim 0) or the columns (dim 1), in the layout of the
        other dim. Collective, without a comparison of arguments.

        factors   arrays of the shape of this rank's sums, which are broadcast to its elements
        """
        grid, library, (rows, cols) = self.grid, self.library, self.shape
        layout, units = self.layout, self.layout.units
        if dim == 0:
            shape, partial = (1, cols), Layout((), layout.cols, (*layout.sums, *layout.rows), (1, units[1]))
        else:
            shape, partial = (rows, 1), Layout(layout.rows, (), (*layout.sums, *layout.cols), (units[0], 1))
        own = library.empty(partial.box(shape, grid.shape, grid.coords).shape, dtype)
        own[...] = 0
        stored, axis = library.as_input(self._stored), dim if self.order == "C" else 1 - dim
        spread = [library.as_strided(factor, tuple(stored.shape), (axis, 1 - axis)) for factor in factors]
        parts = _over_rows(library, lambda *each: term(library, *each).sum(axis), stored, *spread)
        flat, start = own.reshape(-1), 0
        for part in parts if axis else [sum(parts[1:], parts[0])] if parts else []:
            flat[start : start + part.shape[0]] = part
            start += part.shape[0]
        with grid.ledger.phase(what):
            total = relayout(grid, own, shape, partial, partial.summed).wait()
        return type(self)(grid, total, shape, partial.summed)

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
                b is not None and b is not self and not b.has_layout(self.layout)
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


def _checked_dim(what: str, matrix: StoredMatrix, dim: object) -> int:
    check_numbers(what, matrix)
    return natural(dim, f"{what}: dim is 0, over the rows, or 1, over the columns", 0, LayoutError, most=1)


def _square(library: NumpyLibrary, part: Array, factor: Array = None) -> Array:
    """|factor part|^2, element by element, in float64."""
    if library.dtype(part).startswith("complex"):
        return _square(library, part.real, factor) + _square(library, part.imag, factor)
    part = _cast(library, part, "float64")
    part = part if factor is None else part * factor
    return part * part


def _cast(library: NumpyLibrary, part: Array, dtype: str) -> Array:
    return part if library.dtype(part) == dtype else library.astype(part, dtype)


def _real(dtype: str) -> str:
    """Type of the absolute values of elements of a type."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


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
        x, y = (_cast(library, part, wide) for part in (x, y))
        if wide == "complex128":
            x = x if a.conjugated else library.conjugate(x)
            y = library.conjugate(y) if b.conjugated else y
        return (x * y).sum()

    stored, other = library.as_input(a._stored), library.as_input(b._stored)
    other = other if a.order == b.order else other.T
    return sum((each.item() for each in _over_rows(library, product, stored, other)), 0.0)
