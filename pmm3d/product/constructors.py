"""New matrices: constants, functions of the indices, random numbers, diagonals."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, NumpyLibrary, dtype_named, library_kind, library_of, random
from ..comm import Grid
from ..errors import DTypeError, LayoutError
from ..layout import Box, Layout
from .checks import array_signature, compared_dtype, passed_contents
from .construct import Library, Shape, Source, check_can_hold, construct, values_of, zero_values
from .reductions import diagonals
from .stored import StoredMatrix, new_array

if TYPE_CHECKING:
    from typing import Self


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

        Returns
        -------
        DistMatrix
            The new matrix.

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
        grid : Grid
            The grid. The call is collective over it.
        shape : tuple of int
            Number of rows and of columns.
        function : callable
            function(i, j) of the global row indices, (rows, 1), and column indices, (1, cols), of this rank. Returns an
            array that numpy can broadcast to (rows, cols), or a number.
        dtype, layout, library, order, shared
            See `DistMatrix.empty`.

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.

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
        return construct(cls, "DistMatrix.from_function", grid, source, layout, order, shared).keep_one()

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
        grid : Grid
            The grid. The call is collective over it.
        shape : tuple of int
            Number of rows and of columns.
        value : number
            The value. It is rounded to `dtype`; beyond the range of a real type it becomes infinite.
        dtype, layout, library, order, shared
            See `DistMatrix.empty`.

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.

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
        ).keep_one()

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

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.
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

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.
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
        seed : int
            The seed.
        dtype, layout, library
            See `DistMatrix.empty`. Labels (int64) are not drawn.
        distribution : str
            "uniform" (default), "normal" or "integers": see `pmm3d.arrays.random.fill`.
        order, shared
            See `DistMatrix.empty`.

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.

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
        return construct(cls, "DistMatrix.random", grid, source, layout, order, shared, seed, distribution).keep_one()

    @classmethod
    def identity(
        cls, grid: Grid, n: int, *, dtype: Any = "float64", layout: Layout = Layout.A, library: Library | None = None
    ) -> Self:
        """The identity matrix.

        Parameters
        ----------
        grid : Grid
            The grid. The call is collective over it.
        n : int
            Number of rows.
        dtype, layout, library
            See `DistMatrix.empty`.

        Returns
        -------
        DistMatrix
            The matrix. Nothing is sent.
        """
        source = Source((n, n), dtype, library, zero_values, labels=False)
        made = construct(cls, "DistMatrix.identity", grid, source, layout, "C", False)
        for diagonal, _ in diagonals(made):
            diagonal[...] = 1
        return made.keep_one()

    @classmethod
    def diag(
        cls, grid: Grid, values: Any, *, dtype: Any = None, layout: Layout = Layout.A, library: Library | None = None
    ) -> Self:
        """A diagonal matrix.

        Parameters
        ----------
        grid : Grid
            The grid. The call is collective over it.
        values : array, (n,)
            The diagonal, the same on all ranks (compared only with PMM3D_DEBUG=1).
        dtype, layout, library
            See `empty`. Default of type and library: those of `values`.

        Returns
        -------
        DistMatrix
            The matrix, n x n. Nothing is sent.

        Raises
        ------
        LayoutError
            On every rank, if `values` does not have one dim.
        DTypeError
            On every rank, if `dtype` cannot represent the values.

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
        return made.keep_one()
