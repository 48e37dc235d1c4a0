"""Methods of DistMatrix for the layouts of other libraries and codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..comm import Grid
from ..layout import Layout
from .stored import StoredMatrix

if TYPE_CHECKING:  # imported at first use
    from typing import Self

    from ..layout import BlockCyclic, Blocks


class ForeignMatrix(StoredMatrix):
    """Methods that convert from and to the layouts of other libraries and codes."""

    @classmethod
    def from_block_cyclic(
        cls, grid: Grid, local: Array, cyclic: BlockCyclic, *, layout: Layout = Layout.A, order: str = "F"
    ) -> Self:
        """A matrix from a block-cyclic matrix, as ScaLAPACK stores it.

        Parameters
        ----------
        grid : Grid
            The grid. The call is collective over it.
        local : array
            Array of this rank in Fortran order: rows up to its leading dimension, and columns.
        cyclic : BlockCyclic
            Its layout on the ranks of the grid's communicator, for example `Descriptor.cyclic`.
        layout : Layout
            Layout of the new matrix.
        order : str
            Order of the shards. Default: "F". With "C" each shard is transposed while it is packed, which takes longer.

        Returns
        -------
        DistMatrix
            The matrix. If each rank has its shard already, in that order and without gaps, its memory is used.

        Raises
        ------
        LayoutError, DTypeError
            On every rank, if arrays or layouts do not fit.

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
        from .foreign import BlockCyclic, from_tiles

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
        grid : Grid
            The grid. The call is collective over it.
        arrays : array or list of array
            Arrays of this rank, one for each of its blocks, in the order of `Blocks.tiles`. Each has the shape of its
            block. A rank with one block may pass the array itself. A rank without blocks passes an empty list.
        blocks : Blocks
            The blocks and their owners.
        layout : Layout
            Layout of the new matrix.
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
            On every rank, if arrays or layouts do not fit.

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
        from .foreign import Blocks, from_tiles

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

        Returns
        -------
        array
            `local`, or the new array.

        Raises
        ------
        LayoutError, DTypeError
            On every rank, if arrays or layouts do not fit.

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
        from .foreign import BlockCyclic, to_tiles

        given = to_tiles(self, "to_block_cyclic", cyclic, BlockCyclic, local)
        return given[0] if given else self.library.empty((0, 0), self.dtype)

    def to_blocks(self, blocks: Blocks, arrays: Any = None) -> list[Array]:
        """Copy the matrix into blocks between any cuts. Collective.

        Parameters
        ----------
        blocks : Blocks
            The blocks and their owners.
        arrays : array or list of array or None
            Arrays of this rank, one for each of its blocks. Default: new arrays.

        Returns
        -------
        list of array
            The arrays of this rank, one for each of its blocks, also if it has one block.

        Raises
        ------
        LayoutError, DTypeError
            On every rank, if arrays or layouts do not fit.

        Notes
        -----
        One exchange, as in `from_block_cyclic`. See the example of `from_blocks`.
        """
        from .foreign import Blocks, to_tiles

        return to_tiles(self, "to_blocks", blocks, Blocks, arrays)
