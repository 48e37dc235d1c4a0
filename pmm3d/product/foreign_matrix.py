"""Matrices that come from, and go to, layouts of other libraries and codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays import Array
from ..comm import Grid
from ..layout import Layout
from .stored import StoredMatrix

if TYPE_CHECKING:  # what follows is loaded by who uses it
    from ..layout import BlockCyclic, Blocks

Matrix = TypeVar("Matrix", bound="ForeignMatrix")


class ForeignMatrix(StoredMatrix):
    """What a DistMatrix has to do with matrices that lie otherwise."""

    @classmethod
    def from_block_cyclic(cls: type[Matrix], grid: Grid, local: Array, cyclic: BlockCyclic, *,
                          layout: Layout = Layout.A, order: str = "F") -> Matrix:
        """From a block-cyclic matrix, as ScaLAPACK's.

        local    this rank's array: rows up to its leading dimension, and columns, in Fortran's order
        cyclic   how it lies on the ranks of the grid's communicator; `Descriptor.cyclic` of a context over them
        order    of the shards; by rows ("C") each is transposed where it is packed, which takes longer

        Moved in one exchange (`Redistribution`), which is planned once; where all ranks have their shards already, in
        that order and without gaps, they are used in place. Raises, on every rank: LayoutError, DTypeError.
        """
        from .foreign import BlockCyclic, from_tiles

        what = "DistMatrix.from_block_cyclic"
        return from_tiles(cls, what, grid, local, cyclic, BlockCyclic, layout, order, None)

    @classmethod
    def from_blocks(cls: type[Matrix], grid: Grid, arrays: Any, blocks: Blocks, *, layout: Layout = Layout.A,
                    order: str | None = None, dtype: Any = None) -> Matrix:
        """From blocks between any cuts.

        arrays   this rank's, one for each of its blocks, as `Blocks.tiles` has them; one alone need not be in a list
        order    of the shards; that of the blocks if left out
        dtype    of the arrays, for ranks that have none; float64 if left out

        The rest as in `from_block_cyclic`."""
        from .foreign import Blocks, from_tiles

        order = getattr(blocks, "order", "C") if order is None else order
        return from_tiles(cls, "DistMatrix.from_blocks", grid, arrays, blocks, Blocks, layout, order, dtype)

    def to_block_cyclic(self, cyclic: BlockCyclic, local: Array | None = None) -> Array:
        """Into this rank's array of a block-cyclic matrix, which is returned; a new one if it is left out. Other
        elements of it stay. One exchange, as `from_block_cyclic`; partial sums are summed first. Collective."""
        from .foreign import BlockCyclic, to_tiles

        given = to_tiles(self, "to_block_cyclic", cyclic, BlockCyclic, local)
        return given[0] if given else self.library.empty((0, 0), self.dtype)

    def to_blocks(self, blocks: Blocks, arrays: Any = None) -> list[Array]:
        """Into this rank's arrays of a matrix in blocks, which are returned; new ones if they are left out.
        Collective."""
        from .foreign import Blocks, to_tiles

        return to_tiles(self, "to_blocks", blocks, Blocks, arrays)
