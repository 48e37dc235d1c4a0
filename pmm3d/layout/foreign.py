"""Layouts of other libraries and codes, as tilings: block-cyclic as in ScaLAPACK, and blocks with any cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from ..errors import LayoutError
from .cuts import matrix_shape, naturals
from .distribution import Cyclic, Intervals, Tile, check_window


@dataclass(frozen=True)
class BlockCyclic:
    """The layout of ScaLAPACK: blocks of mb x nb are assigned cyclically to a grid of Pr x Pc processes.

    Parameters
    ----------
    blocks : tuple of int
        (mb, nb).
    process_grid : tuple of int
        (Pr, Pc).
    numbering : str
        "R" (default): process (p, q) has the number p Pc + q, as in BLACS. "C": p + q Pr.
    first : tuple of int
        (rsrc, csrc): process row and column of the first block.
    ranks : sequence of int or None
        Rank in the communicator of each number. Default: 0, 1, ...
    start : tuple of int
        First row and column of the part that is meant, counted from 0: see `sub`.

    Raises
    ------
    LayoutError
        For wrong sizes or numbers.

    Notes
    -----
    Each process stores its blocks in one array, in Fortran order. The array may have more rows, up to its leading
    dimension, and more columns.

    Examples
    --------
    >>> from pmm3d import BlockCyclic
    >>> cyclic = BlockCyclic((10, 6), (2, 3), (2, 2))
    >>> cyclic.local_shapes(0), cyclic.local_shapes(3), cyclic.sub(4, 0, 3, 6).shape
    ([(6, 3)], [(4, 3)], (3, 6))
    """

    shape: tuple[int, int]
    blocks: tuple[int, int]
    process_grid: tuple[int, int]
    numbering: str = "R"
    first: tuple[int, int] = (0, 0)
    ranks: Sequence[int] | None = None
    start: tuple[int, int] = (0, 0)
    order = "F"
    exact = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", matrix_shape(self.shape))
        for name, least in (("blocks", 1), ("process_grid", 1), ("first", 0), ("start", 0)):
            object.__setattr__(self, name, _two_numbers(name, getattr(self, name), least))
        if self.numbering not in ("R", "C"):
            raise LayoutError(
                f'the numbering of a process grid is "R", by rows, or "C", by columns; got {self.numbering!r}'
            )
        if not all(first < size for first, size in zip(self.first, self.process_grid)):
            raise LayoutError(
                f"the first block is on process {self.first} of a process grid of {self._grid}: they are counted from 0"
            )
        if self.ranks is not None:
            object.__setattr__(self, "ranks", _ranks(self.ranks))
            if len(set(self.ranks)) < len(self.ranks) or len(self.ranks) != self._processes:
                raise LayoutError(
                    f"a process grid of {self._grid} has {self._processes} ranks, each once; got {self.ranks}"
                )

    def sub(self, row: int, col: int, rows: int, cols: int) -> BlockCyclic:
        """A part of the matrix, in the same arrays.

        Parameters
        ----------
        row, col : int
            First row and column, counted from 0.

        Raises
        ------
        LayoutError
            If the part is not inside the matrix.
        """
        check_window(self.shape, row, col, rows, cols)
        row, col, height, width = naturals((row, col, rows, cols), "a part is whole numbers", 0, LayoutError)
        part = object.__new__(type(self))
        fields = vars(part)
        fields.update(vars(self), shape=(height, width), start=(self.start[0] + row, self.start[1] + col))
        for divided in ("rows", "cols"):
            fields.pop(divided, None)
        return part

    @cached_property
    def rows(self) -> Cyclic:
        return Cyclic(self.shape[0], self.blocks[0], self.process_grid[0], self.first[0], self.start[0])

    @cached_property
    def cols(self) -> Cyclic:
        return Cyclic(self.shape[1], self.blocks[1], self.process_grid[1], self.first[1], self.start[1])

    def most(self) -> tuple[int, int, int]:
        rows, cols = self.rows.spacing.most, self.cols.spacing.most
        return rows * cols, rows, cols

    def tiles(self, rank: int) -> Sequence[Tile]:
        """Tiles of a rank: its process row and column, as one tile; none if it stores nothing."""
        if self.ranks is None:
            number = rank
        elif rank in self.ranks:
            number = self.ranks.index(rank)
        else:
            return ()
        if number >= self._processes:
            return ()
        row, col = divmod(number, self.process_grid[1])
        return (Tile(row, col) if self.numbering == "R" else Tile(*divmod(number, self.process_grid[0])[::-1]),)

    def owners_of(self, tile: Tile) -> Sequence[int]:
        rows, cols = self.process_grid
        number = tile.row * cols + tile.col if self.numbering == "R" else tile.row + tile.col * rows
        return (number if self.ranks is None else self.ranks[number],)

    def sender_for(self, tile: Tile, reader: int) -> int:
        return self.owners_of(tile)[0]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Number of rows and of columns that a rank stores, for each of its tiles.

        Returns
        -------
        list of tuple of int
            One shape, or none.
        """
        return [(self.rows.extent(row), self.cols.extent(col)) for row, col in self.tiles(rank)]

    def check_ranks(self, size: int) -> None:
        if (needed := 1 + max(self.ranks or (self._processes - 1,))) > size:
            raise LayoutError(
                f"a process grid of {self._grid} on ranks up to {needed - 1} does not fit a communicator of {size}"
            )

    @property
    def _processes(self) -> int:
        return self.process_grid[0] * self.process_grid[1]

    @property
    def _grid(self) -> str:
        return f"{self.process_grid[0]} x {self.process_grid[1]}"


class _Replicated:
    """A tiling whose tiles are the same on all processes of a process row, or of a process column, of a matrix."""

    matrix: BlockCyclic
    of: int
    dim: int
    exact = False

    def owners_of(self, tile: Tile) -> Sequence[int]:
        part, replicas = tile[self.dim], range(self.matrix.process_grid[1 - self.of])
        tiles = [Tile(other, part) if self.of else Tile(part, other) for other in replicas]
        return tuple([self.matrix.owners_of(each)[0] for each in tiles])

    def sender_for(self, tile: Tile, reader: int) -> int:
        owners = self.owners_of(tile)
        return reader if reader in owners else owners[0]

    def check_ranks(self, size: int) -> None:
        self.matrix.check_ranks(size)


@dataclass(frozen=True)
class Lines(_Replicated):
    """A block-cyclic matrix of which each process stores whole rows or columns: an array for each part of the others.

    matrix   the block-cyclic matrix
    of       dim of the process grid that divides them. Processes along the other dim are replicas
    dim      0: rows are divided, as in the matrix. 1: columns

        >>> rows = Lines(BlockCyclic((10, 6), (2, 3), (2, 2)), 0, 0)
        >>> rows.owners_of(Tile(1, 0)), rows.tiles(3), rows.local_shapes(3), rows.most()
        ((2, 3), [Tile(row=1, col=0), Tile(row=1, col=1)], [(4, 3), (4, 3)], (36, 6, 6))
    """

    matrix: BlockCyclic
    of: int
    dim: int
    order = "F"

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @cached_property
    def rows(self) -> Cyclic:
        return near_start(self.matrix).rows

    @cached_property
    def cols(self) -> Cyclic:
        return near_start(self.matrix).cols

    def most(self) -> tuple[int, int, int]:
        rows, cols = ([one.extent(part) for part in range(one.parts)] for one in (self.rows, self.cols))
        height, width = (sum(rows), max(cols)) if self.dim else (max(rows), sum(cols))
        return height * width, height, width

    def tiles(self, rank: int) -> Sequence[Tile]:
        parts = [tile[self.of] for tile in self.matrix.tiles(rank)]
        others = range((self.cols, self.rows)[self.dim].parts)
        return [Tile(other, part) if self.dim else Tile(part, other) for part in parts for other in others]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        return [(self.rows.extent(row), self.cols.extent(col)) for row, col in self.tiles(rank)]


@dataclass(frozen=True)
class Spread(_Replicated):
    """A factor of a product on all processes that multiply with it: each has the lines of the factor that its part of
    the product needs, in the places of the product's array.

    matrix   the product
    of       dim of the process grid, and of the product, whose lines are those of the factor
    dim      dim of the factor that these lines divide
    width    size of the other dim of the factor, which is not divided

    `most` counts what is before the lines from the first round of blocks on, as in the arrays of a matrix `near_start`.

        >>> rows = Spread(BlockCyclic((10, 6), (2, 3), (2, 2)), 0, 0, 5)
        >>> rows.shape, rows.owners_of(Tile(1, 0)), rows.tiles(3), rows.local_shapes(3), rows.most()
        ((10, 5), (2, 3), [Tile(row=1, col=0)], [(4, 5)], (30, 6, 5))
    """

    matrix: BlockCyclic
    of: int
    dim: int
    width: int

    @property
    def order(self) -> str:
        return self.matrix.order

    @property
    def shape(self) -> tuple[int, int]:
        size = self.matrix.shape[self.of]
        return (self.width, size) if self.dim else (size, self.width)

    @property
    def _lines(self) -> Cyclic:
        return self.matrix.cols if self.of else self.matrix.rows

    @property
    def _undivided(self) -> Cyclic:
        return Cyclic(self.width, max(1, self.width), 1)

    @cached_property
    def rows(self) -> Cyclic:
        return self._undivided if self.dim else self._lines

    @cached_property
    def cols(self) -> Cyclic:
        return self._lines if self.dim else self._undivided

    def most(self) -> tuple[int, int, int]:
        near = (near_start(self.matrix).rows, near_start(self.matrix).cols)[self.of]
        size = max([near.extent(part) for part in range(near.parts)])
        return size * self.width, *((self.width, size) if self.dim else (size, self.width))

    def tiles(self, rank: int) -> Sequence[Tile]:
        parts = [tile[self.of] for tile in self.matrix.tiles(rank)]
        return [Tile(0, part) if self.dim else Tile(part, 0) for part in parts]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        sizes = [self._lines.extent(tile[self.of]) for tile in self.matrix.tiles(rank)]
        return [(self.width, size) if self.dim else (size, self.width) for size in sizes]


def near_start(cyclic: BlockCyclic) -> BlockCyclic:
    """Return the same division of a window with the least start. Arrays then begin at most a block before it. Along a
    dim of one process, they begin with it."""
    start = [
        first % (block * parts) if parts > 1 else 0
        for first, block, parts in zip(cyclic.start, cyclic.blocks, cyclic.process_grid)
    ]
    return replace(cyclic, start=(start[0], start[1]))


def stored_in(tiled: BlockCyclic | Lines | Spread, tile: Tile) -> tuple[slice, slice]:
    """Return the rows and columns of a tile's array that contain the elements of the matrix.

    >>> stored_in(BlockCyclic((10, 6), (2, 3), (2, 2)).sub(4, 0, 3, 6), Tile(0, 1))
    (slice(2, 4, None), slice(0, 3, None))
    """
    rows, cols = (slice(one.before(part), one.extent(part)) for one, part in zip((tiled.rows, tiled.cols), tile))
    return rows, cols


@dataclass(frozen=True)
class Blocks:
    """Blocks between any cuts. Each block belongs to any rank, which stores it in an array of its own.

    Parameters
    ----------
    row_cuts, col_cuts : sequence of int
        First row (column) of each block, from 0 on, and at the end the number of rows (columns).
    owners : sequence of sequence of int
        Rank of each block: a list for each row of blocks.
    order : str
        "C" (default) or "F": whether arrays are stored by rows or by columns. Other arrays are moved more slowly.

    Attributes
    ----------
    shape : tuple of int
        Number of rows and of columns of the matrix.

    Raises
    ------
    LayoutError
        For wrong cuts or owners.

    Notes
    -----
    A rank has its arrays in row-major order of its blocks.

    Examples
    --------
    >>> from pmm3d import Blocks
    >>> slabs = Blocks((0, 3, 7, 8), (0, 5), [[0], [1], [0]])
    >>> slabs.tiles(0), slabs.local_shapes(0)
    ([Tile(row=0, col=0), Tile(row=2, col=0)], [(3, 5), (1, 5)])
    """

    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    order: str = "C"
    exact = True

    def __post_init__(self) -> None:
        for name in ("row_cuts", "col_cuts"):
            object.__setattr__(self, name, _cuts(name, getattr(self, name)))
        try:
            object.__setattr__(self, "owners", tuple(_ranks(row) for row in self.owners))
        except TypeError:
            raise LayoutError(f"owners of blocks are lists of ranks; got {self.owners!r}") from None
        widths, expected = {len(row) for row in self.owners} or {0}, (len(self.row_cuts) - 1, len(self.col_cuts) - 1)
        if len(self.owners) != expected[0] or widths != {expected[1]}:
            raise LayoutError(
                f"there are {expected[0]} x {expected[1]} blocks between these cuts; got the owners of "
                f"{len(self.owners)} x {'/'.join(map(str, sorted(widths)))}"
            )
        if self.order not in ("C", "F"):
            raise LayoutError(f'the order of arrays is "C", by rows, or "F", by columns; got {self.order!r}')

    @classmethod
    def rows_of(cls, counts: Sequence[int], cols: int, order: str = "C") -> Blocks:
        """Slabs of rows, as the matrices of PETSc and Trilinos are stored: rank r has the next counts[r] rows.

        Parameters
        ----------
        counts : sequence of int
            Number of rows of each rank.
        order : str
            "C" or "F": order of the arrays.

        Raises
        ------
        LayoutError
            If `counts` is not a list of whole numbers of at least 0.

        Examples
        --------
        >>> from pmm3d import Blocks
        >>> Blocks.rows_of([2, 0, 3], 4).local_shapes(2)
        [(3, 4)]
        """
        what = "counts is a list, the number of rows of each rank: comm.allgather(len(slab))"
        counts = naturals(counts, what, 0, LayoutError)
        return cls((0, *accumulate(counts)), (0, cols), tuple((rank,) for rank in range(len(counts))), order)

    @classmethod
    def of_boxes(
        cls, boxes: Sequence[Sequence[int]], shape: tuple[int, int], order: str = "C", *, base: int = 0
    ) -> Blocks:
        """One rectangle of the matrix for each rank.

        Parameters
        ----------
        boxes : sequence of (int, int, int, int)
            For each rank (first row, end of rows, first column, end of columns), counted from 0; the ends are not
            included.
        order : str
            "C" or "F": order of the arrays.
        base : int
            0 or 1: from which texts of errors count.

        Returns
        -------
        Blocks
            The blocks. If edges of other rectangles cross the rectangle of a rank, the rank has several blocks.

        Raises
        ------
        LayoutError
            If rectangles overlap, leave out an element, or are not inside the matrix.

        Examples
        --------
        >>> from pmm3d import Blocks
        >>> Blocks.of_boxes([(0, 3, 0, 4), (3, 5, 0, 1), (3, 5, 1, 4)], (5, 4)).local_shapes(0)
        [(3, 1), (3, 3)]
        """
        row_cuts, col_cuts = (_edges(boxes, size, dim, base) for dim, size in enumerate(shape))
        owners = [[-1] * (len(col_cuts) - 1) for _ in row_cuts[1:]]
        if 0 in shape:
            return cls(row_cuts, col_cuts, tuple((0,) * len(row) for row in owners), order)
        for rank, (r0, r1, c0, c1) in enumerate(boxes):
            for row in range(row_cuts.index(r0), row_cuts.index(r1)):
                for col in range(col_cuts.index(c0), col_cuts.index(c1)):
                    if (other := owners[row][col]) >= 0:
                        raise LayoutError(
                            f"element ({row_cuts[row] + base}, {col_cuts[col] + base}), counted from {base}, is in the "
                            f"blocks of rank {other} and of rank {rank}: the blocks must not overlap"
                        )
                    owners[row][col] = rank
        for row, owned in enumerate(owners):
            if -1 in owned:
                raise LayoutError(
                    f"element ({row_cuts[row] + base}, {col_cuts[owned.index(-1)] + base}), counted from {base}, is in "
                    "no rank's block: the blocks must cover the matrix"
                )
        return cls(row_cuts, col_cuts, tuple(map(tuple, owners)), order)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns of the matrix."""
        return self.row_cuts[-1], self.col_cuts[-1]

    @cached_property
    def rows(self) -> Intervals:
        return Intervals(self.row_cuts)

    @cached_property
    def cols(self) -> Intervals:
        return Intervals(self.col_cuts)

    @cached_property
    def _tiles(self) -> dict[int, list[Tile]]:
        tiles_of: dict[int, list[Tile]] = {}
        for row, owners in enumerate(self.owners):
            for col, owner in enumerate(owners):
                tiles_of.setdefault(owner, []).append(Tile(row, col))
        return tiles_of

    def most(self) -> tuple[int, int, int]:
        shapes = [self.local_shapes(rank) for rank in self._tiles]
        return (
            max((sum(rows * cols for rows, cols in each) for each in shapes), default=0),
            max((sum(rows for rows, _ in each) for each in shapes), default=0),
            max((sum(cols for _, cols in each) for each in shapes), default=0),
        )

    def tiles(self, rank: int) -> Sequence[Tile]:
        """Blocks of a rank, in row-major order."""
        return self._tiles.get(rank, [])

    def owners_of(self, tile: Tile) -> Sequence[int]:
        return (self.owners[tile.row][tile.col],)

    def sender_for(self, tile: Tile, reader: int) -> int:
        return self.owners[tile.row][tile.col]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Number of rows and of columns of each block of a rank.

        Returns
        -------
        list of tuple of int
            The shapes, in the order of `tiles`.
        """
        return [
            (self.row_cuts[row + 1] - self.row_cuts[row], self.col_cuts[col + 1] - self.col_cuts[col])
            for row, col in self.tiles(rank)
        ]

    def check_ranks(self, size: int) -> None:
        if (most := max(self._tiles, default=0)) >= size:
            raise LayoutError(f"blocks are on ranks up to {most}; the communicator has {size}")


def _edges(boxes: Sequence[Sequence[int]], size: int, dim: int, base: int) -> tuple[int, ...]:
    """Sorted starts and ends of rectangles along a dim, and both ends of the dim. Raises LayoutError if one is
    outside."""
    for rank, box in enumerate(boxes):
        low, high = box[2 * dim : 2 * dim + 2]
        if not 0 <= low <= high <= size:
            raise LayoutError(
                f"the block of rank {rank} has the {('rows', 'columns')[dim]} {low + base} to {high}, "
                f"counted from {base}, of {size}"
            )
    return tuple(sorted({0, size, *(edge for box in boxes for edge in box[2 * dim : 2 * dim + 2])})) if size else (0, 0)


def _two_numbers(name: str, value: Any, least: int) -> tuple[int, int]:
    one, other = naturals(
        value, f"{name} of a block-cyclic layout: two whole numbers of at least {least}", least, LayoutError, 2
    )
    return one, other


def _ranks(values: Any) -> tuple[int, ...]:
    return naturals(values, "ranks are whole numbers, counted from 0", 0, LayoutError)


def _cuts(name: str, values: Any) -> tuple[int, ...]:
    what = f"{name}: where blocks begin, from 0 on, in order, and the end of the last"
    cuts = naturals(values, what, 0, LayoutError)
    if len(cuts) < 2 or cuts[0] != 0 or any(low > high for low, high in pairwise(cuts)):
        raise LayoutError(f"{what}; got {values!r}")
    return cuts
