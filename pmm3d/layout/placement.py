"""A matrix in a Layout on a grid, as a tiling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from ..errors import LayoutError
from .cuts import matrix_shape
from .distribution import Distribution1D, Split, Tile, check_window
from .layout import EMPTY, Box, Layout, cutting_units, order_of
from .shape import Coords, GridShape


@dataclass(frozen=True)
class Placement:
    """A matrix in a Layout on a grid. Each rank has one tile, which ranks along replicating axes share.

    shape, layout, grid   shape, layout and grid shape of the matrix
    order                 order in which shards are stored: "C" by rows, "F" by columns
    ranks                 rank in the communicator of each rank of the grid (default: 0, 1, ...)
    start                 for a window (`sub`), its first row and column
    parent_shape          for a window, the shape of the whole matrix

    A rank reads a replicated tile from itself, or from the owner with its own coordinates along replicating axes.

    Raises LayoutError for an invalid shape or layout, for a layout that does not fit the grid or the shape, and for
    partial sums, because no rank has their elements.

        >>> tiled = Placement((5, 4), Layout("z"), GridShape(2, 1, 2))
        >>> tiled.tiles(3), tiled.owners_of(Tile(1, 0)), tiled.sender_for(Tile(1, 0), 1), tiled.box(3)
        ((Tile(row=1, col=0),), (2, 3), 3, Box(r0=3, r1=5, c0=0, c1=4))
        >>> tiled.sub(1, 0, 3, 2).box(0), tiled.sub(1, 0, 3, 2).box(3)
        (Box(r0=0, r1=2, c0=0, c1=2), Box(r0=2, r1=3, c0=0, c1=2))
    """

    shape: tuple[int, int]
    layout: Layout
    grid: GridShape
    order: str = "C"
    ranks: tuple[int, ...] | None = None
    start: tuple[int, int] = (0, 0)
    parent_shape: tuple[int, int] | None = None
    exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise LayoutError(f"a layout is a pmm3d.Layout; got {self.layout!r}")
        object.__setattr__(self, "shape", matrix_shape(self.shape))
        self.layout.on(self.grid)
        if self.layout.sums:
            raise LayoutError(
                f"{self.layout}: along {', '.join(self.layout.sums)} the ranks hold partial sums, of "
                "which no rank has the elements; bring the matrix to a sum first: "
                "redistribute(layout.summed)"
            )
        if self.layout.units != (1, 1):
            self.box(0)

    @classmethod
    def copies(cls, shape: tuple[int, int], ranks: Sequence[int]) -> Placement:
        """Placement with the whole matrix on each of the given ranks.

        >>> Placement.copies((10, 6), (3,)).box(3), Placement.copies((10, 6), (3,)).box(0).size
        (Box(r0=0, r1=10, c0=0, c1=6), 0)
        """
        return cls(shape, Layout(), GridShape(len(ranks), 1, 1), ranks=tuple(ranks))

    def sub(self, row: int, col: int, rows: int, cols: int) -> Placement:
        """Window of `rows` rows and `cols` columns from `row` and `col` on, in the same arrays. Raises LayoutError if
        it is not within the matrix."""
        check_window(self.shape, row, col, rows, cols)
        return replace(
            self,
            shape=(rows, cols),
            start=(self.start[0] + row, self.start[1] + col),
            parent_shape=self.parent_shape or self.shape,
        )

    def box(self, rank: int) -> Box:
        """Box of the matrix that the rank stores."""
        held = self.layout.box(self.parent_shape or self.shape, self.grid, self._coords(rank))
        if self.parent_shape is None:
            return held
        (row, col), (rows, cols) = self.start, self.shape
        return (held & Box(row, row + rows, col, col + cols)).moved(-row, -col)

    def runs(self, rank: int) -> Iterator[tuple[Box, tuple[slice, slice]]]:
        """Yield boxes of consecutive rows and columns that the rank stores, and their slices of its array. There is one
        box, unless the layout has an order of rows.

            >>> from .order import RowOrder
            >>> layout = Layout(units=({"": RowOrder("zigzag", 4, 1, 1)}, 1))
            >>> [box for box, _ in Placement((4, 2), layout, GridShape(1, 1, 1)).runs(0)][:2]
            [Box(r0=0, r1=1, c0=0, c1=2), Box(r0=1, r1=2, c0=0, c1=2)]
        """
        for tile in self.tiles(rank):
            for row, col in product(self.rows.runs(tile.row), self.cols.runs(tile.col)):
                box = Box(row.start, row.stop, col.start, col.stop)
                yield box, box.moved(row.local - row.start, col.local - col.start).within(EMPTY)

    @cached_property
    def rows(self) -> Distribution1D:
        return self._split(0)

    @cached_property
    def cols(self) -> Distribution1D:
        return self._split(1)

    def _split(self, dim: int) -> Distribution1D:
        axes, size = (self.layout.rows, self.layout.cols)[dim], (self.parent_shape or self.shape)[dim]
        units = cutting_units(size, axes, self.layout.units[dim], self.grid)
        cuts = [(count, unit) for axis, unit in zip(axes, units) if (count := getattr(self.grid, axis)) > 1]
        counts, lengths = zip(*cuts) if cuts else ((), ())
        split = Split(self.shape[dim], counts, lengths, self.start[dim], size)
        order = order_of(self.layout.units[dim])
        if order is None:
            return split
        if self.shape[dim] != size or size % order.length:
            raise LayoutError(
                f"{self.shape[dim]} of {size} rows, which are stored in {order.name} order in sequences "
                f"of {order.length}: select all rows of complete sequences, or redistribute the matrix "
                "to a layout without an order first"
            )
        from .order import Ordered

        return Ordered(split, order)

    def most(self) -> tuple[int, int, int]:
        rows, cols = self.rows.spacing.most, self.cols.spacing.most
        return rows * cols, rows, cols

    def tiles(self, rank: int) -> Sequence[Tile]:
        place = self._place(rank)
        return () if place is None else _tiles(self.layout, self.grid, place)

    def owners_of(self, tile: Tile) -> Sequence[int]:
        places = _owners(self.layout, self.grid, tile)
        return places if self.ranks is None else tuple([self.ranks[place] for place in places])

    def sender_for(self, tile: Tile, reader: int) -> int:
        place = _sender(self.layout, self.grid, tile, (self._place(reader) or 0) % self.grid.size)
        return place if self.ranks is None else self.ranks[place]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        coords = self._coords(rank)
        return [] if coords is None else [self.layout.box(self.parent_shape or self.shape, self.grid, coords).shape]

    def check_ranks(self, size: int) -> None:
        if self.grid.size > size:
            raise LayoutError(f"a grid of {self.grid} does not fit a communicator of {size} ranks")

    def _coords(self, rank: int) -> Coords | None:
        place = self._place(rank)
        return None if place is None else self.grid.coords(place)

    def _place(self, rank: int) -> int | None:
        """Rank on the grid of a rank of the communicator, or None if `ranks` does not contain it."""
        return rank if self.ranks is None else self._places.get(rank)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks or ())}


@lru_cache(maxsize=1024)
def _tiles(layout: Layout, grid: GridShape, place: int) -> tuple[Tile, ...]:
    """Tile of a rank of the grid; none for a rank outside."""
    coords = grid.coords(place)
    if coords is None:
        return ()
    parts = [0, 0]
    for dim, axes in enumerate((layout.rows, layout.cols)):
        for axis in axes:
            parts[dim] = parts[dim] * getattr(grid, axis) + getattr(coords, axis)
    return (Tile(*parts),)


@lru_cache(maxsize=128)
def _owners(layout: Layout, grid: GridShape, tile: Tile) -> tuple[int, ...]:
    """Ranks of the grid that store a tile."""
    along, factors = _along(layout, grid, tile), grid.factors(layout.named)
    indices = [(along[axis],) if axis in along else range(size) for axis, size in factors.items()]
    if factors.keys() == {*grid.names}:
        return tuple(map(grid.rank, product(*indices)))
    return tuple(sorted(grid.rank_at(dict(zip(factors, each))) for each in product(*indices)))


@lru_cache(maxsize=1024)
def _sender(layout: Layout, grid: GridShape, tile: Tile, reader: int) -> int:
    """Owner of a tile with the coordinates of `reader` along replicating axes."""
    along, factors, place = _along(layout, grid, tile), grid.factors(layout.named), grid.position(reader)
    return grid.rank_at({axis: along.get(axis, getattr(place, axis)) for axis in factors})


def _along(layout: Layout, grid: GridShape, tile: Tile) -> dict[str, int]:
    """Coordinates of the owners of a tile along the axes that split."""
    indices = dict[str, int]()
    for axes, part in ((layout.rows, tile.row), (layout.cols, tile.col)):
        for axis in reversed(axes):
            part, indices[axis] = divmod(part, getattr(grid, axis))
    return indices
