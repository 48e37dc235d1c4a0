"""New matrices: constants, functions of the indices, random numbers, diagonals. The ranks compare the arguments, then
each rank computes its shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, dtype_named, library_kind, library_of, random
from ..comm import Grid
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import MATRIX_DTYPES, Box, Layout, Placement
from .checks import array_signature, check_order, collective_call, compared_dtype, passed_contents
from .reductions import diagonals
from .shared import sharing_axis, window_of
from .stored import StoredMatrix, flipped, new_array, shards

if TYPE_CHECKING:
    from typing import Self

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Library = str | NumpyLibrary
Shape = tuple[int, int]
Values = Callable[[NumpyLibrary, Box, str], Any]
"""values(library, box, dtype): an array of the elements of a box, or None."""


class Source(NamedTuple):
    """Elements of a new matrix: their shape, type and library, and the function that computes them."""

    shape: tuple[int, int]
    dtype: Any
    library: str | NumpyLibrary | None
    values: Values
    labels: bool = True
    """Whether the elements may be labels."""
    as_stored: bool = False
    """Whether `values` returns a shard whose rows already have the order of the layout."""


def construct(
    cls: type[Matrix],
    what: str,
    grid: Grid,
    source: Source | Callable[[], Source],
    layout: Layout,
    order: str,
    shared: bool,
    *passed: Any,
    shape_is_own: bool = False,
) -> Matrix:
    """Make a new matrix of a class. Collective.

    source         the source, or a function that returns it; a function may raise on one rank only
    passed         further values that the ranks compare
    shape_is_own   whether each rank determines shape and type itself; then the ranks compare them too
    """
    if isinstance(source, Source):
        passed = source.shape, *passed, compared_dtype(source.dtype), library_kind(source.library)
    with collective_call(grid, what, *passed, layout, order, shared):
        check_order(order, shared)
        if isinstance(source, Source):
            source = source._replace(dtype=dtype_named(source.dtype))
        shape, dtype, library, values, labels, as_stored = source if isinstance(source, Source) else source()
        library = grid.library(library)
        grid.transport.check_place(library)
        dtype = check_matrix_dtype(dtype, library, labels=labels)
        placement = shards(shape, layout, grid)
        axis = sharing_axis(grid, layout, library) if shared else ""
        local = (
            values(library, placement.box(grid.rank), dtype)
            if as_stored or not library.has_data
            else _by_runs(placement, grid.rank, values, library, dtype)
        )
        if not shared:
            local = in_order(library, local, order)
    if shape_is_own:
        with grid.collective_call(what, *passed, shape, dtype):
            pass
    if shared:
        return in_window(cls, grid, what, axis, shape, layout, dtype, library, local)
    return cls(grid, local, shape, layout, order)


def _by_runs(placement: Placement, rank: int, values: Values, library: NumpyLibrary, dtype: str) -> Any:
    """Values of a rank's shard, in the order in which its layout stores rows."""
    runs, box = [*placement.runs(rank)], placement.box(rank)
    if len(runs) < 2:
        return values(library, runs[0][0] if runs else box, dtype)
    local = library.empty(box.shape, dtype)
    for part, within in runs:
        local[within] = values(library, part, dtype)
    return local


def in_window(
    cls: type[Matrix],
    grid: Grid,
    what: str,
    axis: str,
    shape: tuple[int, int],
    layout: Layout,
    dtype: str,
    library: NumpyLibrary,
    values: Array | None = None,
) -> Matrix:
    """Make a matrix in memory that the ranks of an axis share. Collective. `values` are this rank's elements."""
    with grid.collective_call(what, always=True):
        window, local = window_of(grid, axis, shards(shape, layout, grid), dtype, library)
        if values is not None:
            local[...] = values
    matrix = cls(grid, local, shape, layout)
    matrix.window = window
    return matrix


def in_order(library: NumpyLibrary, local: Array, order: str) -> Array:
    """Return the array, or a copy, contiguous by rows (order "C") or by columns (order "F")."""
    return flipped(library.as_input(flipped(local, order)), order)


def exchanged(grid: Grid, array: Any) -> Any:
    """Return the array. An object of another library with `__dlpack__` is wrapped as an array of the grid's library.

    Both share memory. Never raises: `library_of_passed` reports errors.
    """
    with suppress(Exception):
        given = hasattr(array, "__dlpack__") and not isinstance(array, (np.ndarray, StoredMatrix))
        if given and not array_signature(array)[1]:
            return grid.library().xp.from_dlpack(array)
    return array


def library_of_passed(grid: Grid, array: Any) -> NumpyLibrary:
    """Library of an array that the caller passed, after `exchanged`. May raise on this rank only."""
    if isinstance(array, StoredMatrix):
        raise DTypeError(
            "a DistMatrix is spread over the ranks, and no array. Its gather() returns an array of the "
            "whole matrix, its local the shard of this rank, and its redistribute() another matrix"
        )
    try:
        return grid.library(library_of(array))
    except DTypeError as error:
        if not hasattr(array, "__dlpack__") or isinstance(array, np.ndarray):
            raise
        try:
            grid.library().xp.from_dlpack(array)
        except Exception as refusal:
            name = grid.library().name
            error = DTypeError(
                f"{error}, and {name} cannot take its memory by DLPack ({refusal}). Make the Grid with "
                "a library= that can, or convert the array"
            )
        raise error from None


def array_source(grid: Grid, array: Array, values: Values) -> Source:
    """Source of a matrix from an array that the caller passed. May raise on this rank only."""
    library = library_of_passed(grid, array)
    grid.transport.check_place(library, array)
    return Source(tuple(array.shape), library.dtype(array), library, values)


def zero_values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
    """Values of a matrix of zeros."""
    local = library.empty(box.shape, dtype)
    local[...] = 0
    return local


def values_of(function: Any) -> Values:
    """`Values` that are computed by function(i, j)."""
    return lambda library, box, dtype: library.made(box.shape, dtype, lambda: _evaluated(function, box, dtype))


def _evaluated(function: Any, box: Box, dtype: str) -> np.ndarray:
    """Values of function(i, j) at the indices of a box, broadcast to its shape."""
    if not callable(function):
        raise Pmm3dError(f"DistMatrix.from_function: {function!r} is no function of row and column indices")
    values = function(np.arange(box.r0, box.r1)[:, None], np.arange(box.c0, box.c1)[None, :])
    if isinstance(values, np.ndarray):
        library_of(values)
    values = np.asarray(values)
    check_can_hold("DistMatrix.from_function: the function gives", values, dtype)
    try:
        if values.ndim == 1:
            raise ValueError
        return np.broadcast_to(values, box.shape)
    except ValueError:
        raise LayoutError(
            f"DistMatrix.from_function: the function gives the shape {values.shape} for "
            f"{box.shape[0]} row indices i of shape ({box.shape[0]}, 1) and {box.shape[1]} column "
            f"indices j of shape (1, {box.shape[1]}); wanted is {box.shape}, or a number"
        ) from None


def check_can_hold(what: str, values: np.ndarray, dtype: str) -> None:
    """Raise DTypeError if the values cannot be cast to an element type by numpy's rule "same_kind"."""
    if not np.can_cast(values.dtype, "float32" if dtype == "bfloat16" else dtype, "same_kind"):
        other = f': pass dtype="{values.dtype.name}"' if values.dtype.name in MATRIX_DTYPES else ""
        raise DTypeError(f"{what} {values.dtype.name}, which no {dtype} can hold{other}")


class Constructors(StoredMatrix):
    """Class methods that make matrices. Each rank computes the elements of its shard."""

    @classmethod
    def empty(
        cls,
        grid: Grid,
        shape: Shape,
        *,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A new matrix whose elements are arbitrary.

        Parameters
        ----------
        grid : Grid
            The grid. The call is collective over it.
        shape : tuple of int
            Number of rows and of columns.
        dtype : str or dtype
            Element type: "float64" (default), "float32", "float16", "bfloat16" (torch only), "complex64", "complex128",
            or "int64" for labels.
        layout : Layout
            Layout of the matrix.
        library : str or None
            "numpy", "torch", "torch:DEVICE" or "cupy". Default: the library of the grid.
        order : str
            "C" stores shards by rows, "F" by columns. Some BLAS libraries are faster with "F" (`pmm3d bench --order
            F`).
        shared : bool
            Store the shards in memory that the ranks of a node share. See Notes.

        Raises
        ------
        LayoutError
            If the layout, the shape or the order is not valid, or the layout cannot be shared.
        DTypeError
            If the library has no such element type.
        DisagreementError
            If ranks passed different arguments.
        GridError
            With `shared`, if nodes have different numbers of ranks along the axis.
        OutOfMemoryError
            With `shared`, if a node has no such memory.

        Notes
        -----
        With `shared`, ranks along the axis over which a product gathers the operand read each other's shards in place.
        Nothing is gathered inside a node, and no rank stores a copy. If the axis covers several nodes evenly, each node
        stores one copy of the block, and a product receives the other nodes' rows over the network once. If the ranks
        that sum C share a node, they also read each other's partial sums.

        `shared` is for operands on the host in layouts that shard rows, such as Layout.A and Layout.B. A rank may write
        to its shard between products.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.empty(grid, (4, 3), dtype="float32").shape
        (4, 3)
        """
        values = lambda library, box, dtype: None if shared else new_array(library, box.shape, dtype, order)
        return construct(cls, "DistMatrix.empty", grid, Source(shape, dtype, library, values), layout, order, shared)

    @classmethod
    def from_function(
        cls,
        grid: Grid,
        shape: Shape,
        function: Callable[[np.ndarray, np.ndarray], Any],
        *,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix whose elements are the values of a function of their indices.

        Parameters
        ----------
        function : callable
            function(i, j) of the global row indices, (rows, 1), and column indices, (1, cols), of this rank. Returns an
            array that numpy can broadcast to (rows, cols), or a number.
        dtype, layout, library, order, shared
            See `DistMatrix.empty`.

        Raises
        ------
        LayoutError, DTypeError, DisagreementError
            As `DistMatrix.empty`, and if the values have another shape or do not fit `dtype`.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.from_function(grid, (2, 2), lambda i, j: i - j).gather()
        array([[ 0., -1.],
               [ 1.,  0.]])
        """
        source = Source(shape, dtype, library, values_of(function))
        return construct(cls, "DistMatrix.from_function", grid, source, layout, order, shared)._zero_unless_first()

    @classmethod
    def full(
        cls,
        grid: Grid,
        shape: Shape,
        value: complex,
        *,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix whose elements all have one value.

        Parameters
        ----------
        value : number
            The value. It is rounded to `dtype`; beyond the range of a real type it becomes infinite.
        dtype, layout, library, order, shared
            See `DistMatrix.empty`.

        Raises
        ------
        DTypeError
            If the type cannot represent the value: a complex number in a real type, or a fraction in int64.
        LayoutError, DisagreementError
            As `DistMatrix.empty`.
        """

        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            if not isinstance(value, Number):
                raise DTypeError(f"DistMatrix.full: the value is a number; got {value!r}")
            return values_of(lambda i, j: value)(library, box, dtype)

        return construct(
            cls, "DistMatrix.full", grid, Source(shape, dtype, library, values), layout, order, shared, value
        )._zero_unless_first()

    @classmethod
    def zeros(
        cls,
        grid: Grid,
        shape: Shape,
        *,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix of zeros.

        Parameters
        ----------
        grid, shape, dtype, layout, library, order, shared
            See `DistMatrix.empty`.
        """
        return cls.full(grid, shape, 0, dtype=dtype, layout=layout, library=library, order=order, shared=shared)

    @classmethod
    def ones(
        cls,
        grid: Grid,
        shape: Shape,
        *,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix of ones.

        Parameters
        ----------
        grid, shape, dtype, layout, library, order, shared
            See `DistMatrix.empty`.
        """
        return cls.full(grid, shape, 1, dtype=dtype, layout=layout, library=library, order=order, shared=shared)

    @classmethod
    def random(
        cls,
        grid: Grid,
        shape: Shape,
        *,
        seed: int = 0,
        dtype: Any = "float64",
        layout: Layout = Layout.A,
        library: Library | None = None,
        distribution: str = "uniform",
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix of random numbers, which are the same on every grid for the same seed.

        Parameters
        ----------
        grid, shape
            See `DistMatrix.empty`.
        dtype, layout, library
            See `DistMatrix.empty`. Labels (int64) are not drawn.
        distribution : str
            "uniform" (default), "normal" or "integers": see `pmm3d.arrays.random.fill`.
        order, shared
            See `DistMatrix.empty`.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.random(grid, (3, 3), seed=1, distribution="integers")
        ...     a.norm() == DistMatrix.random(grid, (3, 3), seed=1, distribution="integers").norm()
        True
        """
        values = lambda library, box, dtype: random.drawn(library, box, dtype, int(shape[1]), seed, distribution)
        source = Source(shape, dtype, library, values, labels=False)
        return construct(
            cls, "DistMatrix.random", grid, source, layout, order, shared, seed, distribution
        )._zero_unless_first()

    @classmethod
    def identity(
        cls, grid: Grid, n: int, *, dtype: Any = "float64", layout: Layout = Layout.A, library: Library | None = None
    ) -> Self:
        """The identity matrix.

        Parameters
        ----------
        dtype, layout, library
            See `DistMatrix.empty`.
        """
        source = Source((n, n), dtype, library, zero_values, labels=False)
        made = construct(cls, "DistMatrix.identity", grid, source, layout, "C", False)
        for diagonal, _ in diagonals(made):
            diagonal[...] = 1
        return made._zero_unless_first()

    @classmethod
    def diag(
        cls, grid: Grid, values: Any, *, dtype: Any = None, layout: Layout = Layout.A, library: Library | None = None
    ) -> Self:
        """A diagonal matrix.

        Parameters
        ----------
        values : array, (n,)
            The diagonal, the same on all ranks (compared only with PMM3D_DEBUG=1).
        dtype, layout, library
            See `empty`. Default of type and library: those of `values`.

        Raises
        ------
        LayoutError
            If `values` does not have one dim.
        DTypeError
            If `dtype` cannot represent the values.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.diag(grid, np.array([1.0, 2.0])).gather()
        array([[1., 0.],
               [0., 2.]])
        """

        def describe() -> Source:
            of_values = library_of(values)
            if len(values.shape) != 1:
                raise LayoutError(
                    f"DistMatrix.diag: the values are an array of one dim; got the shape {tuple(values.shape)}"
                )
            kind = dtype_named(of_values.dtype(values) if dtype is None else dtype)
            check_can_hold("DistMatrix.diag: the values are", of_values.to_numpy(values), kind)
            chosen = of_values.kind if library is None else library
            return Source((len(values),) * 2, kind, chosen, zero_values, labels=False)

        passed = (
            *array_signature(values),
            compared_dtype(dtype),
            library_kind(library or "numpy"),
            *passed_contents(grid, values),
        )
        made = construct(cls, "DistMatrix.diag", grid, describe, layout, "C", False, *passed)
        numbers = library_of(values).to_numpy(values)
        for diagonal, first in diagonals(made):
            diagonal[...] = made.library.from_numpy(numbers[first : first + diagonal.shape[0]], made.dtype)
        return made._zero_unless_first()
