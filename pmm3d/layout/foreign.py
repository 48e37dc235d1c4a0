"""Layouts of other libraries and codes, as tiles: block-cyclic as in ScaLAPACK, and blocks between any cuts."""

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
    """ScaLAPACK's layout: blocks of mb x nb, dealt out in turns to Pr x Pc processes, each of which stores its own by
    columns, in one array.

    shape          rows and columns of the matrix
    blocks         (mb, nb)
    process_grid   (Pr, Pc)
    numbering      "R": process (p, q) is number p Pc + q, as BLACS has them in row-major order; "C": p + q Pr
    first          (rsrc, csrc): the process row and column of the first block
    ranks          of the communicator, of each number; 0, 1, ... if left out
    start          (row, column) from which on, counted from 0, the matrix is meant, as `sub` has it

    Arrays may have more rows, and columns, than are stored: the leading dimension is each array's own. Raises
    LayoutError for what cannot be.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", matrix_shape(self.shape))
        for name, least in (("blocks", 1), ("process_grid", 1), ("first", 0), ("start", 0)):
            object.__setattr__(self, name, _two_numbers(name, getattr(self, name), least))
        if self.numbering not in ("R", "C"):
            raise LayoutError(f'the numbering of a process grid is "R", by rows, or "C", by columns; got '
                              f"{self.numbering!r}")
        if not all(first < size for first, size in zip(self.first, self.process_grid)):
            raise LayoutError(f"the first block is on process {self.first} of a process grid of {self._grid}: they are "
                              "counted from 0")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", _ranks(self.ranks))
            if len(set(self.ranks)) < len(self.ranks) or len(self.ranks) != self._processes:
                raise LayoutError(f"a process grid of {self._grid} has {self._processes} ranks, each once; got "
                                  f"{self.ranks}")

    def sub(self, row: int, col: int, rows: int, cols: int) -> BlockCyclic:
        """The part of that many rows and columns from row and col on, counted from 0, in the same arrays. Raises
        LayoutError where it is not within the matrix."""
        check_window(self.shape, row, col, rows, cols)
        return replace(self, shape=(rows, cols), start=(self.start[0] + row, self.start[1] + col))

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
        return [(self.rows.extent(row), self.cols.extent(col)) for row, col in self.tiles(rank)]

    def check_ranks(self, size: int) -> None:
        if (needed := 1 + max(self.ranks or (self._processes - 1,))) > size:
            raise LayoutError(f"a process grid of {self._grid} on ranks up to {needed - 1} does not fit a communicator "
                              f"of {size}")

    @property
    def _processes(self) -> int:
        return self.process_grid[0] * self.process_grid[1]

    @property
    def _grid(self) -> str:
        return f"{self.process_grid[0]} x {self.process_grid[1]}"


@dataclass(frozen=True)
class Blocks:
    """Blocks between any cuts, each on any rank, which stores it in an array of its own.

    row_cuts, col_cuts   where blocks begin, from 0 on, and the number of rows, or columns, at the end
    owners               of each block the rank: a list for each row of blocks, and in it a rank for each column
    order                "C" or "F": whether the arrays lie by rows or by columns; others are moved more slowly

    A rank has its arrays in the order of the rows of blocks, in each of them in that of the columns. Raises LayoutError
    for what cannot be.

        >>> slabs = Blocks((0, 3, 7, 8), (0, 5), [[0], [1], [0]])
        >>> slabs.tiles(0), slabs.local_shapes(0)
        ([Tile(row=0, col=0), Tile(row=2, col=0)], [(3, 5), (1, 5)])
    """

    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    order: str = "C"

    def __post_init__(self) -> None:
        for name in ("row_cuts", "col_cuts"):
            object.__setattr__(self, name, _cuts(name, getattr(self, name)))
        try:
            object.__setattr__(self, "owners", tuple(_ranks(row) for row in self.owners))
        except TypeError:
            raise LayoutError(f"owners of blocks are lists of ranks; got {self.owners!r}") from None
        found, expected = {len(row) for row in self.owners} or {0}, (len(self.row_cuts) - 1, len(self.col_cuts) - 1)
        if len(self.owners) != expected[0] or found != {expected[1]}:
            raise LayoutError(f"there are {expected[0]} x {expected[1]} blocks between these cuts; got the owners of "
                              f"{len(self.owners)} x {'/'.join(map(str, sorted(found)))}")
        if self.order not in ("C", "F"):
            raise LayoutError(f'the order of arrays is "C", by rows, or "F", by columns; got {self.order!r}')

    @classmethod
    def rows_of(cls, counts: Sequence[int], cols: int, order: str = "C") -> Blocks:
        """Block rows: rank r has the next counts[r] rows, whole, as matrices of PETSc and of Trilinos lie.

            >>> Blocks.rows_of([2, 0, 3], 4).local_shapes(2)
            [(3, 4)]
        """
        return cls((0, *accumulate(counts)), (0, cols), tuple((rank,) for rank in range(len(counts))), order)

    @classmethod
    def of_boxes(cls, boxes: Sequence[Sequence[int]], shape: tuple[int, int], order: str = "C") -> Blocks:
        """One rectangle of the matrix a rank: rank r has the rows boxes[r][0] to boxes[r][1] and the columns
        boxes[r][2] to boxes[r][3], counted from 0, the ends not included. Where the edges of other ranks' rectangles
        cross that of a rank, it is several blocks.

        Raises LayoutError if the rectangles overlap, or leave out an element, or are not within the matrix.

            >>> Blocks.of_boxes([(0, 3, 0, 4), (3, 5, 0, 1), (3, 5, 1, 4)], (5, 4)).local_shapes(0)
            [(3, 1), (3, 3)]
        """
        row_cuts, col_cuts = (_edges(boxes, size, dim) for dim, size in enumerate(shape))
        owners = [[-1] * (len(col_cuts) - 1) for _ in row_cuts[1:]]
        if 0 in shape:
            return cls(row_cuts, col_cuts, tuple((0,) * len(row) for row in owners), order)
        for rank, (r0, r1, c0, c1) in enumerate(boxes):
            for row in range(row_cuts.index(r0), row_cuts.index(r1)):
                for col in range(col_cuts.index(c0), col_cuts.index(c1)):
                    if (other := owners[row][col]) >= 0:
                        raise LayoutError(f"element ({row_cuts[row]}, {col_cuts[col]}) is in the blocks of rank "
                                          f"{other} and of rank {rank}: the blocks must not overlap")
                    owners[row][col] = rank
        for row, owned in enumerate(owners):
            if -1 in owned:
                raise LayoutError(f"element ({row_cuts[row]}, {col_cuts[owned.index(-1)]}) is in no rank's block: the "
                                  "blocks must cover the matrix")
        return cls(row_cuts, col_cuts, tuple(map(tuple, owners)), order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_cuts[-1], self.col_cuts[-1]

    @cached_property
    def rows(self) -> Intervals:
        return Intervals(self.row_cuts)

    @cached_property
    def cols(self) -> Intervals:
        return Intervals(self.col_cuts)

    @cached_property
    def _tiles(self) -> dict[int, list[Tile]]:
        found: dict[int, list[Tile]] = {}
        for row, owners in enumerate(self.owners):
            for col, owner in enumerate(owners):
                found.setdefault(owner, []).append(Tile(row, col))
        return found

    def most(self) -> tuple[int, int, int]:
        shapes = [self.local_shapes(rank) for rank in self._tiles]
        return (max((sum(rows * cols for rows, cols in each) for each in shapes), default=0),
                max((sum(rows for rows, _ in each) for each in shapes), default=0),
                max((sum(cols for _, cols in each) for each in shapes), default=0))

    def tiles(self, rank: int) -> Sequence[Tile]:
        return self._tiles.get(rank, [])

    def owners_of(self, tile: Tile) -> Sequence[int]:
        return (self.owners[tile.row][tile.col],)

    def sender_for(self, tile: Tile, reader: int) -> int:
        return self.owners[tile.row][tile.col]

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        return [(self.row_cuts[row + 1] - self.row_cuts[row], self.col_cuts[col + 1] - self.col_cuts[col])
                for row, col in self.tiles(rank)]

    def check_ranks(self, size: int) -> None:
        if (most := max(self._tiles, default=0)) >= size:
            raise LayoutError(f"blocks are on ranks up to {most}; the communicator has {size}")


def _edges(boxes: Sequence[Sequence[int]], size: int, dim: int) -> tuple[int, ...]:
    """Where rectangles begin and end along a dim, with both ends of the dim. Raises LayoutError."""
    for rank, box in enumerate(boxes):
        low, high = box[2 * dim : 2 * dim + 2]
        if not 0 <= low <= high <= size:
            raise LayoutError(f"the block of rank {rank} has the {('rows', 'columns')[dim]} {low} to {high}, counted "
                              f"from 0, of {size}")
    return tuple(sorted({0, size, *(edge for box in boxes for edge in box[2 * dim : 2 * dim + 2])})) if size else (0, 0)


def _two_numbers(name: str, value: Any, least: int) -> tuple[int, int]:
    one, other = naturals(value, f"{name} of a block-cyclic layout: two whole numbers of at least {least}", least,
                          LayoutError, 2)
    return one, other


def _ranks(values: Any) -> tuple[int, ...]:
    return naturals(values, "ranks are whole numbers, counted from 0", 0, LayoutError)


def _cuts(name: str, values: Any) -> tuple[int, ...]:
    what = f"{name}: where blocks begin, from 0 on, in order, and the end of the last"
    cuts = naturals(values, what, 0, LayoutError)
    if len(cuts) < 2 or cuts[0] != 0 or any(low > high for low, high in pairwise(cuts)):
        raise LayoutError(f"{what}; got {values!r}")
    return cuts
