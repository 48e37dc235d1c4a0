"""Tiles of the rows of a matrix: local rows of all ranks that are computed together, as a matrix in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..errors import LayoutError
from ..layout import Box, GridShape, Layout
from ..layout.layout import Unit, layout_of, row_range


class RowTile(NamedTuple):
    """The local rows start:stop of each rank, as a matrix. A rank with fewer rows has fewer or none in the tile.

    rows     number of rows of all ranks
    layout   layout of these rows. Its columns are not split

        >>> from pmm3d.layout import GridShape, Layout
        >>> row_tiles(Layout("z"), 10, GridShape(1, 1, 4), 2)[1]
        RowTile(start=2, stop=3, rows=2, layout=Layout(rows=('z',), cols=()))
    """

    start: int
    stop: int
    rows: int
    layout: Layout


@lru_cache(maxsize=1024)
def row_tiles(layout: Layout, rows: int, grid: GridShape, largest: int) -> tuple[RowTile, ...]:
    """Tiles of at most `largest` local rows, of a matrix whose rows are in this layout. All ranks have equally many.

    The tiles follow each other in the local rows of a rank. There is at least one tile. A single tile is the matrix
    itself. Raises LayoutError if no layout describes the rows of a tile, because several axes cut unequal parts.

        >>> [(tile.start, tile.stop, tile.rows) for tile in row_tiles(Layout("z"), 10, GridShape(1, 1, 4), 2)]
        [(0, 2, 8), (2, 3, 2)]
        >>> row_tiles(Layout("z", units=(4, 1)), 12, GridShape(1, 1, 2), 4)[1]
        RowTile(start=4, stop=8, rows=4, layout=Layout(rows=('z',), cols=(), units=(4, 1)))
    """
    counts = _ranges(layout, rows, grid)[1]
    most, start, tiles = int(counts.max()), 0, list[RowTile]()
    if most <= largest:
        return (RowTile(0, most, rows, layout),)
    while start < most:
        end = min(start + largest, most)
        for stop in (end, *sorted({each for each in counts.ravel().tolist() if start < each < end}, reverse=True)):
            wanted = (counts.clip(start, stop) - start).astype(int)
            if (found := _with_counts(layout.rows, grid, wanted)) is not None:
                tiles.append(RowTile(start, stop, int(wanted.sum()), found))
                start = stop
                break
        else:
            raise LayoutError(
                f"tiles: the {rows} rows in {layout} have unequal parts along several axes of grid {grid}, which no "
                "layout of a tile describes. Choose a batch whose sequences are a multiple of the ranks along "
                f"{layout.rows[0]}, or leave the tiles out"
            )
    return tuple(tiles)


def _ranges(layout: Layout, rows: int, grid: GridShape) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of rows of each part, at the indices along the axes that split the rows.

    >>> [array.tolist() for array in _ranges(Layout(("z", "y")), 7, GridShape(1, 2, 2))]
    [[[0, 2], [4, 6]], [[2, 2], [2, 1]]]
    """
    parts = [getattr(grid, axis) for axis in layout.rows]
    places = SimpleNamespace(**dict(zip(layout.rows, np.indices(parts))))
    start, stop = row_range(layout, rows, grid, places)
    return np.broadcast_to(start, parts), np.broadcast_to(stop - start, parts)


def _with_counts(axes: tuple[str, ...], grid: GridShape, wanted: np.ndarray) -> Layout | None:
    """Layout that gives the wanted number of rows to each index along these axes, or None."""
    for unit in _units(axes, wanted):
        try:
            found = layout_of(axes, (), (), (unit, 1))
            if (_ranges(found, int(wanted.sum()), grid)[1] == wanted).all():
                return found
        except LayoutError:  # units that do not fit each other, or the number of rows
            continue
    return None


def _units(axes: tuple[str, ...], wanted: np.ndarray) -> Iterator[Unit]:
    """Yield candidates: single rows; the rows of a rank; and for each axis, the most rows that one part of it has."""
    yield 1
    yield int(wanted.max())
    inner = [tuple(range(dim, len(axes))) for dim in range(1, len(axes) + 1)]
    yield tuple(sorted((axis, int(wanted.sum(axis=each).max())) for axis, each in zip(axes, inner)))


@lru_cache(maxsize=1024)
def pieces_of(layout: Layout, rows: int, tile: RowTile, box: Box, grid: GridShape) -> tuple[tuple[int, int, int], ...]:
    """Rows of a tile that a rank stores, by their numbers in the whole matrix.

    layout, rows   of the whole matrix;   box   the rows of the tile that this rank stores.
    Returns (start, stop, row) for each run: the stored rows start:stop are the rows from `row` on.

        >>> layout, grid = Layout("z"), GridShape(1, 1, 2)
        >>> [tile] = row_tiles(layout, 8, grid, 2)[1:]
        >>> pieces_of(layout, 8, tile, Box(0, 4, 0, 1), grid)
        ((0, 2, 2), (2, 4, 6))
    """
    [starts, _], [firsts, counts] = _ranges(layout, rows, grid), _ranges(tile.layout, tile.rows, grid)
    low, high = firsts.clip(box.r0), (firsts + counts).clip(None, box.r1)
    pieces = low - box.r0, high - box.r0, starts + tile.start + low - firsts
    return tuple(sorted(zip(*(each[low < high].tolist() for each in pieces))))
