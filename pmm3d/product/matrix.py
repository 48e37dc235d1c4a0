"""DistMatrix: a matrix that is distributed over the ranks of a grid."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..arrays import check_matrix_dtype, copy_into, dtype_named
from ..comm import Grid, one_thread
from ..errors import DTypeError
from ..layout import Layout
from .arithmetic import Arithmetic, knows_matrices
from .array_io import ArrayIO
from .checks import check_target, compared_dtype, signature_of
from .constructors import Constructors
from .conversion import Conversion
from .multiply import multiplied
from .relayout import redistribution
from .shared import shared_room


class DistMatrix(Constructors, ArrayIO, Conversion, Arithmetic):
    """A matrix that is distributed over the ranks of a grid. Each rank stores one shard.

    The class methods make matrices. They and the methods that send are collective over the grid. Errors are raised on
    every rank, unless documented otherwise.

    Attributes
    ----------
    grid : Grid
        The grid.
    shape : tuple of int
        Number of rows and of columns of the whole matrix.
    dtype : str
        Element type, for example "float32".
    layout : Layout
        How the grid's axes split the matrix.
    local : array
        Shard of this rank: an array of numpy, torch or cupy. Write into it, or assign another array of the same shape
        and type. With `order="C"` the shard is C-contiguous, with "F" its transpose is. The shard of a conjugated view
        (`.H` of a complex matrix) is a copy, made at each access.
    memory : array
        The same memory as `local`; of a conjugated view, the elements before conjugation.
    library : array library
        Library of the shards; `library.xp` is its namespace.
    order : str
        "C" or "F": whether shards are stored by rows or by columns.
    conjugated : bool
        Whether the matrix is a conjugated view.
    labels_below : int or None
        For integers: a bound that all elements are known to be below, such as the number of classes.

    Notes
    -----
    In a layout with `sums` the matrix is the sum of the shards along those axes. `from_local` takes the partial sum of
    each rank. The other constructors store the whole matrix on the first rank of each such axis, and zeros on the
    others. `redistribute`, `gather`, products and files form the sum.

    A matrix can be neither copied nor pickled. `numpy.asarray(a)` raises an error, because no rank has the whole
    matrix: use `a.gather()`, or `a.local` for the shard. `numpy.from_dlpack(a)` and `torch.from_dlpack(a)` return the
    shard without a copy, unless the matrix is a conjugated view.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid
    >>> with Grid() as grid:
    ...     DistMatrix.from_function(grid, (2, 3), lambda i, j: 10 * i + j).gather()
    array([[ 0.,  1.,  2.],
           [10., 11., 12.]])
    """

    labels_below: int | None = None
    __array_ufunc__ = None

    def astype(self, dtype: Any) -> DistMatrix:
        """A copy with another element type, in the same layout and order.

        Parameters
        ----------
        dtype : str or dtype
            The new type. Elements are rounded to it; for int64 (labels) fractions are cut off.

        Returns
        -------
        DistMatrix
            The copy. Nothing is sent.

        Raises
        ------
        DTypeError
            If the array library has no such type, or for complex elements in a real type.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.full(grid, (2, 2), 1.7).astype("int64").gather()
        array([[1, 1],
               [1, 1]])
        """
        with self.grid.collective_call("astype", self._signature, compared_dtype(dtype)):
            kind = check_matrix_dtype(dtype_named(dtype), self.library, labels=True)
            if self.dtype.startswith("complex") and not kind.startswith("complex"):
                raise DTypeError(
                    f"astype: {kind} cannot hold the imaginary parts of {self.dtype}. Take a part of each "
                    "element first: a.elementwise(numpy.real)"
                )
            stored = self.library.empty(tuple(self._stored.shape), kind)
        made = self._over(stored, self.layout, self.grid)
        copy_into(self.library, self._stored, stored)
        return made

    @one_thread
    def redistribute(
        self, layout: Layout, grid: Grid | None = None, *, out: DistMatrix | None = None, shared: bool = False
    ) -> DistMatrix:
        """The same matrix in another layout, on this grid or on another grid over the same processes.

        Parameters
        ----------
        grid : Grid or None
            Another grid over the same processes, in the same order. Default: the grid of the matrix.
        out : DistMatrix or None
            Matrix of this shape, type and order, in that layout on that grid, which is overwritten. Default: a new
            matrix.
        shared : bool
            Store the new matrix in memory that ranks of a node share: see `DistMatrix.empty`. Not with `out`.

        Returns
        -------
        DistMatrix
            `out`, or the new matrix. A conjugated view becomes a plain matrix.

        Raises
        ------
        GridError
            For a grid over other processes, and for an `out` on another grid.
        LayoutError
            If `out` does not fit.

        Notes
        -----
        On the same grid, each axis that changes runs one collective of its own: an all-gather, a reduce-scatter, an
        all-reduce or an all-to-all. `pmm3d.product.relayout.relayout` lists the steps and the bytes that each rank
        receives. Changes that no such step can do, and moves to another grid, run between all ranks. Then each rank
        receives only elements that it did not store, each from one rank. Phase "redistribute" of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid, Layout
        >>> with Grid() as grid:
        ...     DistMatrix.identity(grid, 4).redistribute(Layout.B).layout == Layout.B
        True
        """
        grid = self.grid if grid is None else grid
        described = grid.shape if isinstance(grid, Grid) else f"a {type(grid).__name__}"
        if shared:
            out = shared_room(self, layout, grid, out)
        with ExitStack() as borrowed:
            with self.grid.collective_call("redistribute", self._signature, layout, described, signature_of(out)):
                check_target(self, layout, grid, out)
                grid.transport.check_place(self.library, *(each.memory for each in (self, out) if each is not None))
                out = self._empty_in(layout, grid) if out is None else out
                fill = redistribution(self, out, borrowed)
            fill()
        out.fills += 1
        return out

    def __matmul__(self, other: DistMatrix) -> DistMatrix:
        """C = A B; see `pmm3d.matmul`."""
        return NotImplemented if knows_matrices(other, "__rmatmul__") else multiplied(self, other)

    def __rmatmul__(self, other: Any) -> DistMatrix:
        """array @ matrix. Raises the error of `matmul` for an operand that is not a matrix."""
        return multiplied(other, self)
