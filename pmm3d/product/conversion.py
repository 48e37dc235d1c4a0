"""Conversion of matrices from and to the layouts of other libraries and codes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays import Array, Factors, NumpyLibrary, check_matrix_dtype, library_of
from ..comm import Grid, one_thread
from ..errors import DTypeError, LayoutError
from ..layout import Layout, Placement, Tile
from .checks import array_signature, check_order, collective_call, compared_dtype
from .relayout import summed
from .stored import StoredMatrix, flipped, new_array, shards
from .tiles import checked_arrays

if TYPE_CHECKING:  # imported at first use
    from typing import Self

    from ..layout import BlockCyclic, Blocks

Matrix = TypeVar("Matrix", bound=StoredMatrix)


def from_tiles(
    cls: type[Matrix],
    what: str,
    grid: Grid,
    arrays: Any,
    tiled: Any,
    kind: type[Any],
    layout: Layout,
    order: str,
    dtype: Any,
) -> Matrix:
    """Make a matrix of a class from tiles that a BlockCyclic or Blocks describes. Collective."""
    from .redistribution import check_fits, planned  # loads descriptors of ScaLAPACK

    listed = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    signature = (
        array_signature(listed[0])[1:] if listed else (compared_dtype("float64" if dtype is None else dtype), "numpy")
    )
    # a rank without blocks has no array that determines the type and the library
    all_own = not hasattr(tiled, "owners") or len({*chain(*tiled.owners)}) >= getattr(grid, "size", 0)
    with collective_call(grid, what, tiled, layout, order, *(signature if all_own else ())):
        _check_kind(f"{what}: the layout", tiled, kind)
        check_order(order)
        on_grid = shards(tiled.shape, layout, grid, order)
        check_fits(grid, tiled, on_grid)
        library = library_of(listed[0]) if listed else grid.library("numpy")
        given = checked_arrays(what, arrays, tiled, grid, library, signature[0])
        if listed:
            _check_dtype(what, signature[0], library, dtype)
    if not all_own:  # the other ranks take the type and the library from an owner
        owners = grid.comm.bcast(signature, tiled.owners_of(Tile(0, 0))[0])
        with grid.collective_call(what, *(signature if listed else owners)):
            library = library if listed else grid.library(owners[1])
            _check_dtype(what, owners[0], library, dtype)
        signature = owners
    dtype = signature[0]
    move = planned(grid, tiled, on_grid, dtype, library)
    here = _in_place(given, on_grid, grid.rank, library, dtype) if move.in_place else None
    if move.in_place and not grid.comm.largest(here is None) and here is not None:
        return cls(grid, flipped(here, order), tiled.shape, layout, order)._zero_unless_first()
    with grid.collective_call(what, always=True):
        local = new_array(library, on_grid.box(grid.rank).shape, dtype, order)
    with grid.ledger.phase("redistribute"):
        move.start(library, given, [local] * len(on_grid.tiles(grid.rank))).wait()
    return cls(grid, local, tiled.shape, layout, order)._zero_unless_first()


@one_thread
def to_tiles(matrix: StoredMatrix, what: str, tiled: Any, kind: type[Any], arrays: Any) -> list[Array]:
    """Copy a matrix into tiles; return this rank's arrays. Collective."""
    from .redistribution import check_fits, planned

    matrix = summed(matrix)
    grid, library = matrix.grid, matrix.library
    on_grid = matrix._placement()
    with grid.collective_call(what, matrix._signature, tiled):
        _check_kind(f"{what}: the layout", tiled, kind)
        check_fits(grid, on_grid, tiled)
        if arrays is None:
            arrays = [new_array(library, shape, matrix.dtype, tiled.order) for shape in tiled.local_shapes(grid.rank)]
        given = checked_arrays(what, arrays, tiled, grid, library, matrix.dtype, [matrix.memory])
        held = [matrix.memory] * len(on_grid.tiles(grid.rank))
    move = planned(grid, on_grid, tiled, matrix.dtype, library)
    with grid.ledger.phase("redistribute"):
        move.start(library, held, given, factors=[Factors(conjugated=matrix.conjugated)]).wait()
    return given


def _check_dtype(what: str, held: str, library: NumpyLibrary, dtype: Any) -> None:
    """Raise DTypeError if matrices cannot have the type of the arrays, or if it is not the type that was asked for."""
    check_matrix_dtype(held, library, labels=True)
    if dtype is not None and compared_dtype(dtype) != held:
        raise DTypeError(f"{what}: the arrays are {held}; dtype={dtype!r} must be their type, or left out")


def _check_kind(what: str, tiled: Any, kind: type[Any]) -> None:
    if not isinstance(tiled, kind):
        raise LayoutError(f"{what} is described by a pmm3d.{kind.__name__}; got {tiled!r}")


def _in_place(arrays: list[Array], on_grid: Placement, rank: int, library: NumpyLibrary, dtype: str) -> Array:
    """Return the array, C-contiguous, if its memory can be the shard; else None.

    The array must be contiguous and contain only the elements of the shard.
    """
    shape = on_grid.box(rank).shape
    if not arrays and 0 in shape:
        return flipped(new_array(library, shape, dtype, on_grid.order), on_grid.order)
    if len(arrays) != 1:
        return None
    array = arrays[0]
    stored = flipped(array, on_grid.order)
    fits = tuple(array.shape) == shape
    return stored if fits and library_of(array).as_input(stored) is stored else None


class Conversion(StoredMatrix):
    """Methods that convert from and to the layouts of other libraries and codes."""

    @classmethod
    def from_block_cyclic(
        cls, grid: Grid, local: Array, cyclic: BlockCyclic, *, layout: Layout = Layout.A, order: str = "F"
    ) -> Self:
        """A matrix from a block-cyclic matrix, as ScaLAPACK stores it.

        Parameters
        ----------
        local : array
            Array of this rank in Fortran order: rows up to its leading dimension, and columns.
        cyclic : BlockCyclic
            Its layout on the ranks of the grid's communicator, for example `Descriptor.cyclic`.
        order : str
            Order of the shards. Default: "F". With "C" each shard is transposed while it is packed, which takes longer.

        Returns
        -------
        DistMatrix
            The matrix. If each rank has its shard already, in that order and without gaps, its memory is used.

        Raises
        ------
        LayoutError, DTypeError
            If arrays or layouts do not fit.

        Notes
        -----
        One exchange, which is planned once (`Redistribution`): each rank receives the elements that it did not store.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import BlockCyclic, DistMatrix, Grid
        >>> with Grid() as grid:
        ...     cyclic = BlockCyclic((3, 3), (2, 2), (1, 1))
        ...     mine = np.ones((3, 3) if grid.rank == 0 else (0, 0), order="F")
        ...     DistMatrix.from_block_cyclic(grid, mine, cyclic).trace()
        3.0
        """
        from ..layout import BlockCyclic

        what = "DistMatrix.from_block_cyclic"
        return from_tiles(cls, what, grid, local, cyclic, BlockCyclic, layout, order, None)

    @classmethod
    def from_blocks(
        cls,
        grid: Grid,
        arrays: Any,
        blocks: Blocks,
        *,
        layout: Layout = Layout.A,
        order: str | None = None,
        dtype: Any = None,
    ) -> Self:
        """A matrix from blocks between any cuts, such as slabs of rows.

        Parameters
        ----------
        arrays : array or list of array
            Arrays of this rank, one for each of its blocks, in the order of `Blocks.tiles`. Each has the shape of its
            block. A rank with one block may pass the array itself. A rank without blocks passes an empty list.
        order : str or None
            Order of the shards. Default: that of the blocks.
        dtype : str or dtype or None
            Element type that the arrays must have. Default: any. In a dry run, the type on a rank without blocks.

        Returns
        -------
        DistMatrix
            The matrix. If each rank has its shard already, in that order and without gaps, its memory is used.

        Raises
        ------
        LayoutError, DTypeError
            If arrays or layouts do not fit.

        Notes
        -----
        One exchange, as in `from_block_cyclic`.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import Blocks, DistMatrix, Grid
        >>> with Grid() as grid:
        ...     slabs = Blocks.rows_of([2] * grid.size, 3)
        ...     a = DistMatrix.from_blocks(grid, np.full((2, 3), float(grid.rank)), slabs)
        ...     [slab] = a.to_blocks(slabs)
        ...     bool((slab == grid.rank).all())
        True
        """
        from ..layout import Blocks

        order = getattr(blocks, "order", "C") if order is None else order
        return from_tiles(cls, "DistMatrix.from_blocks", grid, arrays, blocks, Blocks, layout, order, dtype)

    def to_block_cyclic(self, cyclic: BlockCyclic, local: Array | None = None) -> Array:
        """Copy the matrix into a block-cyclic matrix. Collective.

        Parameters
        ----------
        cyclic : BlockCyclic
            Layout of the block-cyclic matrix on the ranks of the grid's communicator.
        local : array or None
            Array of this rank. Its elements outside the matrix do not change. Default: a new array.

        Raises
        ------
        LayoutError, DTypeError
            If arrays or layouts do not fit.

        Notes
        -----
        One exchange, as in `from_block_cyclic`. Partial sums are summed first.

        Examples
        --------
        >>> from pmm3d import BlockCyclic, DistMatrix, Grid
        >>> with Grid() as grid:
        ...     mine = DistMatrix.ones(grid, (3, 2)).to_block_cyclic(BlockCyclic((3, 2), (2, 2), (1, 1)))
        ...     mine.shape == ((3, 2) if grid.rank == 0 else (0, 0))
        True
        """
        from ..layout import BlockCyclic

        given = to_tiles(self, "to_block_cyclic", cyclic, BlockCyclic, local)
        return given[0] if given else self.library.empty((0, 0), self.dtype)

    def to_blocks(self, blocks: Blocks, arrays: Any = None) -> list[Array]:
        """Copy the matrix into blocks between any cuts. Collective.

        Parameters
        ----------
        arrays : array or list of array or None
            Arrays of this rank, one for each of its blocks. Default: new arrays.

        Returns
        -------
        list of array
            The arrays of this rank, one for each of its blocks, also if it has one block.

        Raises
        ------
        LayoutError, DTypeError
            If arrays or layouts do not fit.

        Notes
        -----
        One exchange, as in `from_block_cyclic`. See the example of `from_blocks`.
        """
        from ..layout import Blocks

        return to_tiles(self, "to_blocks", blocks, Blocks, arrays)
