"""Conversion of matrices from and to the layouts of other libraries and codes."""

from __future__ import annotations

from typing import Any, TypeVar

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, library_of
from ..comm import Grid, one_thread
from ..errors import DTypeError, LayoutError
from ..layout import BlockCyclic, Blocks, Layout, Placement
from .checks import array_signature, check_order, collective_call, compared_dtype
from .redistribution import check_fits, check_targets, planned
from .relayout import summed
from .stored import StoredMatrix, flipped, new_array, shards
from .tiles import checked_arrays

__all__ = ["BlockCyclic", "Blocks", "from_tiles", "to_tiles"]

Matrix = TypeVar("Matrix", bound=StoredMatrix)


def from_tiles(cls: type[Matrix], what: str, grid: Grid, arrays: Any, tiled: Any, kind: type[Any], layout: Layout,
               order: str, dtype: Any) -> Matrix:
    """Make a matrix of a class from tiles that a BlockCyclic or Blocks describes. Collective."""
    listed = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    _, found, library_name = array_signature(listed[0]) if listed else (
        (), compared_dtype("float64" if dtype is None else dtype), "numpy")
    with collective_call(grid, what, tiled, layout, order, found, library_name):
        _check_kind(f"{what}: the layout", tiled, kind)
        library = library_of(listed[0]) if listed else grid.library("numpy")
        check_order(order)
        on_grid = shards(tiled.shape, layout, grid, order)
        check_fits(grid, tiled, on_grid)
        check_matrix_dtype(found, library, labels=True)
        if dtype is not None and compared_dtype(dtype) != found:
            raise DTypeError(f"{what}: the arrays are {found}; dtype={dtype!r} is for ranks that have none, and is the "
                             "same")
        given = checked_arrays(what, arrays, tiled, grid, library, found)
    move = planned(grid, tiled, on_grid, found, library)
    here = _in_place(given, on_grid, grid.rank, library, found) if move.in_place else None
    if move.in_place and not grid.comm.largest(here is None) and here is not None:
        return cls(grid, flipped(here, order), tiled.shape, layout, order).keep_one()
    with grid.collective_call(what, always=True):
        local = new_array(library, on_grid.box(grid.rank).shape, found, order)
    with grid.ledger.phase("redistribute"):
        move.start(library, given, [local] * len(on_grid.tiles(grid.rank))).wait()
    return cls(grid, local, tiled.shape, layout, order).keep_one()


@one_thread
def to_tiles(matrix: StoredMatrix, what: str, tiled: Any, kind: type[Any], arrays: Any) -> list[Array]:
    """Copy a matrix into tiles; return this rank's arrays. Collective."""
    matrix = summed(matrix).resolved
    grid, library = matrix.grid, matrix.library
    on_grid = matrix.placement()
    with grid.collective_call(what, matrix.signature, tiled):
        _check_kind(f"{what}: the layout", tiled, kind)
        check_fits(grid, on_grid, tiled)
        if arrays is None:
            arrays = [new_array(library, shape, matrix.dtype, tiled.order) for shape in tiled.local_shapes(grid.rank)]
        given = checked_arrays(what, arrays, tiled, grid, library, matrix.dtype)
        held = [matrix.memory] * len(on_grid.tiles(grid.rank))
        check_targets(library, what, held, given)
    move = planned(grid, on_grid, tiled, matrix.dtype, library)
    with grid.ledger.phase("redistribute"):
        move.start(library, held, given).wait()
    return given


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
    return stored if fits and library_of(array).plain(stored) is stored else None
