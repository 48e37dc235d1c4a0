"""Arithmetic on distributed matrices. Each rank computes on its shard. Only operands in another layout are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, by_rows, check_matrix_dtype, copy_into, library_of
from ..comm import one_thread
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import LOW_PRECISION
from .checks import (
    array_signature,
    check_alike,
    check_numbers,
    check_out,
    check_square,
    no_matrix,
    scalar,
    signature_of,
)
from .reductions import Reductions, diagonals
from .relayout import Submatrices, brought
from .stored import StoredMatrix, flipped

if TYPE_CHECKING:
    from typing import Self

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Kernel = Callable[..., Array]


class Arithmetic(Reductions, Submatrices):
    """Sums, scalar multiples and elementwise functions of matrices."""

    def __add__(self, other: Any) -> Self:
        return NotImplemented if knows_matrices(other, "__radd__") else self._sum("add", other)

    def __sub__(self, other: Any) -> Self:
        return NotImplemented if knows_matrices(other, "__radd__") else self._sum("subtract", other, -1)

    def __neg__(self) -> Self:
        return self._multiple("negative", -1)

    def __mul__(self, factor: Any) -> Self:
        return NotImplemented if knows_matrices(factor, "__rmul__") else self._multiple("multiply", factor)

    def __truediv__(self, divisor: Any) -> Self:
        return NotImplemented if knows_matrices(divisor, "__rmul__") else self._multiple("divide", divisor)

    __radd__ = __add__

    __rsub__ = __sub__

    __rmul__ = __mul__

    def __iadd__(self, other: Any) -> Self:
        return NotImplemented if knows_matrices(other, "__radd__") else self.add(other)

    def __isub__(self, other: Any) -> Self:
        return NotImplemented if knows_matrices(other, "__rsub__") else self.add(other, -1)

    def __imul__(self, factor: Any) -> Self:
        return NotImplemented if knows_matrices(factor, "__rmul__") else self.scale(factor)

    def __itruediv__(self, divisor: Any) -> Self:
        return NotImplemented if knows_matrices(divisor, "__rmul__") else self._multiple("divide", divisor, True)

    def add(self, b: Self, alpha: complex = 1) -> Self:
        """A += alpha B, in place, in one pass.

        Parameters
        ----------
        b : DistMatrix, (m, n)
            Matrix of the same shape and type on the same grid. In another layout, it is redistributed to the layout of
            A.
        alpha : number
            The factor. If it is 0, B is not read, as in BLAS.

        Returns
        -------
        DistMatrix
            A.

        Raises
        ------
        LayoutError
            If the shapes differ, or if A is read-only or a conjugated view.
        DTypeError, GridError
            If types or grids differ.

        Notes
        -----
        Low precision is added in float32 and rounded once. Nothing is sent if the layouts are equal; else phase
        "redistribute" of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a, b = (DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j) for _ in range(2))
        ...     a.add(b, alpha=10).gather()
        array([[ 0., 11.],
               [11., 22.]])
        """
        return self._sum("add", b, alpha, in_place=True)

    def scale(self, factor: complex) -> Self:
        """A *= factor, in place. Nothing is sent.

        Returns
        -------
        DistMatrix
            A.

        Raises
        ------
        LayoutError, DTypeError
            As `add`.
        """
        return self._multiple("scale", factor, True)

    @one_thread
    def add_identity(self, factor: complex = 1) -> Self:
        """A += factor I, in place, for a square matrix. Nothing is sent.

        Returns
        -------
        DistMatrix
            A.

        Raises
        ------
        LayoutError, DTypeError
            As `add`, and LayoutError if A is not square.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.zeros(grid, (3, 3)).add_identity(2).trace()
        6.0
        """
        with self.grid.collective_call("add_identity", self._signature, factor):
            check_numbers("add_identity", self)
            check_square("add_identity", self)
            check_out("add_identity", self, name="the matrix")
            factor = scalar("the factor", factor, self.dtype, "add_identity")
        coords = self.grid.coords
        if coords is not None and not any(getattr(coords, axis) for axis in self.layout.sums):
            for diagonal, _ in diagonals(self):
                diagonal[...] = _widened(self.library, self.dtype)(diagonal) + factor
        self.fills += 1
        return self

    @one_thread
    def elementwise(self, function: Callable[..., Array], *others: Self, out: Self | None = None) -> Self:
        """function(A, B, ...), element by element.

        Parameters
        ----------
        function : callable
            Function of one array for each matrix: shards of one shape, which it must not change. It returns an array of
            that shape and of the same library. Examples: `numpy.exp`, `lambda a, b: a * b`. Each rank calls it once,
            also with arrays of no elements; numpy's ufuncs are called on slices, in threads.
        *others : DistMatrix
            Matrices of the same shape, type and grid. In other layouts, they are redistributed to the layout of A.
        out : DistMatrix or None
            Matrix of this shape, layout and library that is overwritten; it may be an operand. Default: a new matrix.

        Returns
        -------
        DistMatrix
            `out`, or a new matrix in the layout of A.

        Raises
        ------
        LayoutError
            If the function changes the shape, or if `out` does not fit.
        DTypeError
            If the types differ, or if the result's type is not one of matrices.

        Notes
        -----
        Partial sums are summed first. An error of the function on one rank is raised on every rank.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j)
        ...     a.elementwise(np.multiply, a).gather()
        array([[0., 1.],
               [1., 4.]])
        """
        passed = self._signature, *map(signature_of, others), signature_of(out)
        made, layout = None, self.layout.summed
        with ExitStack() as borrowed:
            with self.grid.collective_call("elementwise", *passed, always=out is None):
                check_numbers("elementwise", self)
                for other in others:
                    check_alike("elementwise", self, other)
                if not callable(function):
                    raise Pmm3dError(f"elementwise: {function!r} is no function of arrays")
                if out is not None:
                    _check_out(self, out)
                bring = [brought(matrix, layout, borrowed) for matrix in others]
                first = brought(self, layout, borrowed)
                if out is None and self.has_layout(layout) and all(other.has_layout(layout) for other in others):
                    made = _evaluated(function, first(), [each() for each in bring], out)
            if made is None:
                ours, theirs = first(), [each() for each in bring]
                with self.grid.collective_call("elementwise", always=True):
                    made = _evaluated(function, ours, theirs, out)
        if out is not None:
            out.fills += 1
            return out
        with self.grid.collective_call("elementwise", made.dtype):
            return made

    def conj(self) -> Self:
        """The conjugates of the elements, a view of the same memory.

        Returns
        -------
        DistMatrix
            The view; of a real matrix, a view of the same elements.
        """
        return self.H.T

    @one_thread
    def _sum(self, what: str, b: Any, alpha: complex = 1, in_place: bool = False) -> Self:
        """Return A + alpha B, in A or in a new matrix in the layout of A. Collective."""
        with ExitStack() as borrowed:
            with self.grid.collective_call(what, self._signature, signature_of(b), alpha):
                _check_sum(what, self, b)
                factor, out = scalar("alpha", alpha, self.dtype, what), self
                if in_place:
                    check_out(what, self, name="the matrix")
                    b = _apart(b, self) if b.has_layout(self.layout) else b
                else:
                    out = self._empty_in(self.layout, self.grid)
                bring = brought(b, self.layout if factor else b.layout, borrowed)
            if factor:
                _add_into(out, self, bring(), factor)
                out.fills += in_place
        return out

    def _multiple(self, what: str, factor: Any, in_place: bool = False) -> Self:
        """Return A times or divided by a number, in A or in a new matrix. Collective."""
        with self.grid.collective_call(
            what, self._signature, factor if isinstance(factor, Number) else signature_of(factor)
        ):
            check_numbers(what, self)
            if isinstance(factor, StoredMatrix):
                raise Pmm3dError(
                    f"{what}: of two matrices this may be meant in two ways. Element by element it is "
                    "a.elementwise(numpy.multiply, b), or numpy.divide; the product is a @ b"
                )
            factor = scalar("the factor", factor, self.dtype, what)
            if in_place:
                check_out(what, self, name="the matrix")
            out = self if in_place else self._empty_in(self.layout, self.grid)
        _scale_into(what, out, self, factor)
        out.fills += in_place
        return out


def knows_matrices(other: Any, method: str) -> bool:
    """Whether an object, such as a tensor of a network, implements its own arithmetic with matrices."""
    ours = isinstance(other, (StoredMatrix, Number)) or array_signature(other)[1] != ""
    return hasattr(type(other), method) and not ours


def _check_sum(what: str, a: StoredMatrix, b: Any) -> None:
    if isinstance(b, Number):
        raise Pmm3dError(
            f"{what}: {b!r} is no matrix. On the diagonal it is a.add_identity(s), on every element "
            "a.elementwise(lambda part: part + s)"
        )
    check_numbers(what, a)
    check_alike(what, a, b)


def _check_out(a: StoredMatrix, out: Any) -> None:
    if not isinstance(out, StoredMatrix):
        raise Pmm3dError(no_matrix("out", out, "elementwise"))
    check_out("elementwise", out)
    if (
        out.grid is not a.grid
        or out.shape != a.shape
        or out.library != a.library
        or not out.has_layout(a.layout.summed)
    ):
        raise LayoutError(
            f"elementwise: out is {out}; needed is {a.shape[0]} x {a.shape[1]} of {a.library.kind} in "
            f"{a.layout.summed} on the grid of the matrix"
        )
    a.grid.transport.check_place(a.library, out.memory)


def _as_in(matrix: StoredMatrix, like: StoredMatrix) -> Array:
    """Stored shard of a matrix, for reading. It is transposed if the other matrix is stored in the other order."""
    stored = matrix.library.as_input(matrix._stored)
    return stored if matrix.order == like.order else stored.T


def _one_place(a: StoredMatrix, b: StoredMatrix) -> bool:
    """Whether equal elements of two matrices have the same address."""
    return a.order == b.order and a.library.address(a.memory) == a.library.address(b.memory)


def _apart(b: StoredMatrix, a: StoredMatrix) -> StoredMatrix:
    """B, or a copy of B if adding it to A would change it."""
    if _one_place(a, b) or not a.library.share_memory(a.memory, b.memory):
        return b
    return b._over(b.library.copy(b._stored), b.layout, b.grid)


def _read(matrix: StoredMatrix) -> Kernel:
    """Function that converts a part of the shard's memory to operands of arithmetic: conjugated or widened."""
    library = matrix.library
    if matrix.conjugated:
        return library.conjugate
    return _widened(library, matrix.dtype)


def _widened(library: NumpyLibrary, dtype: str) -> Kernel:
    if dtype in LOW_PRECISION:
        return lambda part: library.astype(part, "float32")
    return lambda part: part


def _add_into(out: StoredMatrix, a: StoredMatrix, b: StoredMatrix, alpha: complex) -> None:
    """out = A + alpha B, for shards of the same rows and columns."""
    read_a, read_b = _read(a), _read(b)
    kernels: dict[complex, Kernel] = {1: lambda x, y: read_a(x) + read_b(y), -1: lambda x, y: read_a(x) - read_b(y)}
    kernel = kernels.get(alpha, lambda x, y: read_a(x) + alpha * read_b(y))
    by_rows(a.library, kernel, out._stored, _as_in(a, out), _as_in(b, out), name="add")


def _scale_into(what: str, out: StoredMatrix, a: StoredMatrix, factor: complex) -> None:
    read = _read(a)
    kernel = (lambda x: read(x) / factor) if what == "divide" else lambda x: read(x) * factor
    by_rows(a.library, kernel, out._stored, _as_in(a, out), name="scale")


def _evaluated(
    function: Callable[..., Array], first: Matrix, rest: Sequence[StoredMatrix], out: Matrix | None
) -> Matrix:
    matrices: list[StoredMatrix] = [first, *rest]
    library, arrays = first.library, [matrix.local for matrix in matrices]
    if isinstance(function, np.ufunc) and function.nout == 1 and library.name == "numpy" and library.has_data:
        kind = _checked_type(library, function(*(array[:0] for array in arrays)), out)
        if out is None or all(
            _one_place(out, matrix) or not library.share_memory(out.memory, array)
            for matrix, array in zip(matrices, arrays)
        ):
            made = first._empty_in(first.layout, first.grid, kind) if out is None else out
            by_rows(library, function, made._stored, *(flipped(array, made.order) for array in arrays))
            return made
    values = function(*arrays)
    kind = _checked_type(library, values, out)
    if tuple(values.shape) != first.box.shape:
        raise LayoutError(
            f"elementwise: the function makes the shape {tuple(values.shape)} of {first.box.shape}; it must keep it"
        )
    if out is not None:
        copy_into(library, values, out.memory)
        return out
    stored = library.as_input(flipped(values, first.order))
    if any(library.share_memory(stored, array) for array in arrays):
        stored = library.copy(stored)
    return type(first)(first.grid, flipped(stored, first.order), first.shape, first.layout, first.order)


def _checked_type(library: NumpyLibrary, made: Array, out: StoredMatrix | None) -> str:
    """Element type of an array that a function returned. Raises DTypeError for a wrong library or type."""
    other = library_of(made)
    if other != library:
        raise DTypeError(
            f"elementwise: the function makes arrays of {other.kind} of those of {library.kind}; it must keep to them"
        )
    kind = check_matrix_dtype(library.dtype(made), library)
    if out is not None and out.dtype != kind:
        raise DTypeError(f"elementwise: the function makes {kind}, and out is {out.dtype}")
    return kind
