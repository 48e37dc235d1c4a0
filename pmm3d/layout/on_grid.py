"""A matrix in a Layout on a grid, as tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import LayoutError
from .cuts import offsets, part_sizes
from .dealing import Intervals
from .foreign import Tile
from .layout import cutting_unit
from .placement import Placement


@dataclass(frozen=True)
class OnGrid:
    """A matrix in a layout on a grid of ranks of a communicator.

    placement   shape, layout and grid
    order       of the shards
    ranks       of the communicator, of each rank of the grid; the same if left out

        >>> from .layout import Layout
        >>> from .shape import GridShape
        >>> tiled = OnGrid(Placement((5, 4), Layout("z"), GridShape(2, 1, 2)))
        >>> tiled.rows.borders, tiled.tiles(3), tiled.holders(Tile(1, 0)), tiled.server(Tile(1, 0), 1)
        ((0, 3, 5), (Tile(row=1, col=0),), [2, 3], 3)
    """

    placement: Placement
    order: str = "C"
    ranks: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.placement.shape

    @cached_property
    def rows(self) -> Intervals:
        return self._dealt(0)

    @cached_property
    def cols(self) -> Intervals:
        return self._dealt(1)

    def _dealt(self, dim: int) -> Intervals:
        grid, layout = self.placement.grid, self.placement.layout
        axes, size = (layout.rows, layout.cols)[dim], self.shape[dim]
        unit = cutting_unit(size, axes, layout.units[dim], grid)
        sizes = [size // unit]
        for axis in axes:
            sizes = [part for whole in sizes for part in part_sizes(whole, getattr(grid, axis))]
        return Intervals(tuple(unit * border for border in offsets(sizes)))

    def tiles(self, rank: int) -> Sequence[Tile]:
        position = self._grid_rank(rank)
        coords = None if position is None else self.placement.grid.coords(position)
        if coords is None:
            return ()
        parts = []
        for axes in (self.placement.layout.rows, self.placement.layout.cols):
            part = 0
            for axis in axes:
                part = part * getattr(self.placement.grid, axis) + getattr(coords, axis)
            parts.append(part)
        return (Tile(*parts),)

    def holders(self, tile: Tile) -> Sequence[int]:
        return [self._rank(rank) for rank in self.placement.replicas(self._first(tile))]

    def server(self, tile: Tile, reader: int) -> int:
        here = self._grid_rank(reader)
        return self._rank(self.placement.holder(self._first(tile), 0 if here is None else here))

    def extents(self, rank: int) -> list[tuple[int, int]]:
        here = self._grid_rank(rank)
        return [self.placement.box(here).shape for _ in self.tiles(rank) if here is not None]

    def check_ranks(self, size: int) -> None:
        if self.placement.grid.size > size:
            raise LayoutError(f"a grid of {self.placement.grid} does not fit a communicator of {size} ranks")

    def _first(self, tile: Tile) -> int:
        """The first rank of the grid that has the tile."""
        grid, layout, coords = self.placement.grid, self.placement.layout, dict[str, int]()
        for axes, part in ((layout.rows, tile.row), (layout.cols, tile.col)):
            for axis in reversed(axes):
                part, coords[axis] = divmod(part, getattr(grid, axis))
        return grid.rank(grid.position(0)._replace(**coords))

    def _rank(self, rank: int) -> int:
        return rank if self.ranks is None else self.ranks[rank]

    def _grid_rank(self, rank: int) -> int | None:
        if self.ranks is None:
            return rank
        return self._places.get(rank)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks or ())}
