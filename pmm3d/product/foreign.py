"""Conversion of matrices from and to the layouts of other libraries and codes."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, library_of
from ..comm import Grid, one_thread
from ..errors import DTypeError, LayoutError
from ..layout import BlockCyclic, Blocks, Layout, Placement, Tile
from .checks import array_signature, check_order, collective_call, compared_dtype
from .redistribution import check_fits, planned
from .relayout import summed
from .stored import StoredMatrix, flipped, new_array, shards
from .tiles import checked_arrays

__all__ = ["BlockCyclic", "Blocks", "from_tiles", "to_tiles"]

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
    listed = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    found = (
        array_signature(listed[0])[1:] if listed else (compared_dtype("float64" if dtype is None else dtype), "numpy")
    )
    all_own = not _has_ranks_without_blocks(tiled, grid)
    with collective_call(grid, what, tiled, layout, order, *(found if all_own else ())):
        _check_kind(f"{what}: the layout", tiled, kind)
        check_order(order)
        on_grid = shards(tiled.shape, layout, grid, order)
        check_fits(grid, tiled, on_grid)
        library = library_of(listed[0]) if listed else grid.library("numpy")
        given = checked_arrays(what, arrays, tiled, grid, library, found[0])
        if listed:
            _check_dtype(what, found[0], library, dtype)
    if not all_own:  # the other ranks take the type and the library from an owner
        owners = grid.comm.bcast(found, tiled.owners_of(Tile(0, 0))[0])
        with grid.collective_call(what, *(found if listed else owners)):
            library = library if listed else grid.library(owners[1])
            _check_dtype(what, owners[0], library, dtype)
        found = owners
    dtype = found[0]
    move = planned(grid, tiled, on_grid, dtype, library)
    here = _in_place(given, on_grid, grid.rank, library, dtype) if move.in_place else None
    if move.in_place and not grid.comm.largest(here is None) and here is not None:
        return cls(grid, flipped(here, order), tiled.shape, layout, order).keep_one()
    with grid.collective_call(what, always=True):
        local = new_array(library, on_grid.box(grid.rank).shape, dtype, order)
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
        given = checked_arrays(what, arrays, tiled, grid, library, matrix.dtype, [matrix.memory])
        held = [matrix.memory] * len(on_grid.tiles(grid.rank))
    move = planned(grid, on_grid, tiled, matrix.dtype, library)
    with grid.ledger.phase("redistribute"):
        move.start(library, held, given).wait()
    return given


def _has_ranks_without_blocks(tiled: Any, grid: Any) -> bool:
    """Whether ranks of the grid own no block. They have no array that determines the type and the library."""
    return isinstance(tiled, Blocks) and len({*chain(*tiled.owners)}) < getattr(grid, "size", 0)


def _check_dtype(what: str, found: str, library: NumpyLibrary, dtype: Any) -> None:
    """Raise DTypeError if matrices cannot have the type of the arrays, or if it is not the type that was asked for."""
    check_matrix_dtype(found, library, labels=True)
    if dtype is not None and compared_dtype(dtype) != found:
        raise DTypeError(f"{what}: the arrays are {found}; dtype={dtype!r} must be their type, or left out")


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
