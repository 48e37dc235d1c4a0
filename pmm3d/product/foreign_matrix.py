"""Matrices that come from, and go to, layouts of other libraries and codes."""

from __future__ import annotations

from typing import Any, TypeVar

from ..arrays import Array, check_matrix_dtype, library_of
from ..comm import Grid
from ..comm.guard import one_thread
from ..errors import LayoutError
from ..layout import BlockCyclic, Blocks, Layout, OnGrid
from .checks import array_signature, check_order, compared_dtype, together
from .redistribution import check_fits, check_written, planned
from .relayout import summed
from .stored import StoredMatrix, shards
from .tiles import TileMove, checked_arrays

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
        return cls._from_tiles("DistMatrix.from_block_cyclic", grid, local, cyclic, BlockCyclic, layout, order, "float64")

    @classmethod
    def from_blocks(cls: type[Matrix], grid: Grid, arrays: Any, blocks: Blocks, *, layout: Layout = Layout.A,
                    order: str | None = None, dtype: Any = "float64") -> Matrix:
        """From blocks between any cuts.

        arrays   this rank's, one for each of its blocks, as `Blocks.tiles` has them; one alone need not be in a list
        order    of the shards; that of the blocks if left out
        dtype    of the arrays, for ranks that have none

        The rest as in `from_block_cyclic`."""
        order = getattr(blocks, "order", "C") if order is None else order
        return cls._from_tiles("DistMatrix.from_blocks", grid, arrays, blocks, Blocks, layout, order, dtype)

    def to_block_cyclic(self, cyclic: BlockCyclic, local: Array | None = None) -> Array:
        """Into this rank's array of a block-cyclic matrix, which is returned; a new one if it is left out. Other
        elements of it stay. One exchange, as `from_block_cyclic`; partial sums are summed first. Collective."""
        given = self._to_tiles("to_block_cyclic", cyclic, BlockCyclic, local)
        return given[0] if given else self.library.empty((0, 0), self.dtype)

    def to_blocks(self, blocks: Blocks, arrays: Any = None) -> list[Array]:
        """Into this rank's arrays of a matrix in blocks, which are returned; new ones if they are left out.
        Collective."""
        return self._to_tiles("to_blocks", blocks, Blocks, arrays)

    @classmethod
    def _from_tiles(cls: type[Matrix], what: str, grid: Grid, arrays: Any, tiled: Any, kind: type[Any], layout: Layout,
                    order: str, dtype: Any) -> Matrix:
        listed = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
        _, found, library_name = array_signature(listed[0]) if listed else ((), compared_dtype(dtype), "numpy")
        with together(grid, what, tiled, layout, order, found, library_name):
            _check_kind(f"{what}: how the matrix lies", tiled, kind)
            library = library_of(listed[0]) if listed else grid.library("numpy")
            check_order(order, as_it_lies=True)
            on_grid = OnGrid(shards(tiled.shape, layout, grid), order)
            check_fits(grid, tiled, on_grid)
            check_matrix_dtype(found, library, labels=True)
            given = checked_arrays(what, arrays, tiled, grid, library, found)
        move = planned(grid, tiled, on_grid, found)
        with grid.together(what, always=True) as vote:
            here = _in_place(move, given, on_grid, grid.rank)
            memory = library.empty(_stored_shape(on_grid, grid.rank), found) if here is None else here
            vote.mine = int(here is not None)
        local = memory if order == "C" else memory.T
        if vote.common != 1:
            with grid.ledger.phase("redistribute"):
                move.start(library, given, [local] * len(on_grid.tiles(grid.rank))).wait()
        return cls(grid, local, tiled.shape, layout, order).keep_one()

    @one_thread
    def _to_tiles(self, what: str, tiled: Any, kind: type[Any], arrays: Any) -> list[Array]:
        if self.layout.sums:
            return summed(self)._to_tiles(what, tiled, kind, arrays)
        matrix, grid, library = self.resolved, self.grid, self.library
        on_grid = OnGrid(matrix.placement(), matrix.order)
        with grid.together(what, matrix.signature, tiled, arrays is None):
            _check_kind(f"{what}: how the matrix is to lie", tiled, kind)
            check_fits(grid, on_grid, tiled)
            if arrays is None:
                arrays = [_new(matrix, shape, tiled.order) for shape in tiled.extents(grid.rank)]
            given = checked_arrays(what, arrays, tiled, grid, library, matrix.dtype)
            held = [matrix.memory] * len(on_grid.tiles(grid.rank))
            check_written(library, what, held, given)
        move = planned(grid, on_grid, tiled, matrix.dtype)
        with grid.ledger.phase("redistribute"):
            move.start(library, held, given).wait()
        return given


def _check_kind(what: str, tiled: Any, kind: type[Any]) -> None:
    if not isinstance(tiled, kind):
        raise LayoutError(f"{what} is said by a pmm3d.{kind.__name__}; got {tiled!r}")


def _in_place(move: TileMove, arrays: list[Array], on_grid: OnGrid, rank: int) -> Array | None:
    """The array, by rows or by columns as the shards lie, if it can be the shard; else None. An array that is more than
    its elements, or has gaps, cannot."""
    if not move.in_place or len(arrays) != 1:
        return None
    array = arrays[0]
    stored = array if on_grid.order == "C" else array.T
    fits = tuple(stored.shape) == _stored_shape(on_grid, rank)
    return stored if fits and library_of(array).plain(stored) is stored else None


def _stored_shape(on_grid: OnGrid, rank: int) -> tuple[int, int]:
    rows, cols = on_grid.placement.box(rank).shape
    return (rows, cols) if on_grid.order == "C" else (cols, rows)


def _new(like: StoredMatrix, shape: tuple[int, int], order: str) -> Array:
    made = like.library.empty(shape if order == "C" else shape[::-1], like.dtype)
    return made if order == "C" else made.T
