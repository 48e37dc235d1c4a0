"""Panels of block-cyclic matrices: the moves and the local operations of blocked algorithms, step by step.

An algorithm works on a `View`: a window, or its transpose. So each algorithm is written for one triangle and one side.
A panel of some columns (or rows) is dealt over all processes for its triangular solve (`slabs`), and then sent to each
process that multiplies with it (`Spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, Workspace, lapack
from ..layout import BlockCyclic, GridShape, Layout, Placement, Tiled, aligned, itemsize
from ..layout.distribution import Cyclic, Tile
from ..product.blacs import plan_bytes
from ..product.multiply import run_gemm
from ..product.tiles import TileMove
from .window import Window

Plan = TypeVar("Plan", bound="PanelPlan")
PANEL = 256
"""Largest number of columns of a panel."""
MOST_RUNS = 16
"""Largest number of runs of a process in a panel that are copied run by run."""


@dataclass(frozen=True)
class ByRows(BlockCyclic):
    """The transpose of a block-cyclic matrix, in the transposes of its arrays."""

    order = "C"


def slabs(matrix: BlockCyclic, dim: int, width: int) -> BlockCyclic:
    """A panel with the rows (`dim` 0) or the columns (1) of a matrix, dealt over all of its processes.

    The lines of a process row (or column) are dealt over its own processes, so the panel is sent inside process rows.
    If there are too few blocks, the lines are cut into equal parts.
    """
    own, total, size = matrix.process_grid[dim], matrix.process_grid[0] * matrix.process_grid[1], matrix.shape[dim]
    places = [divmod(part, own)[::-1] for part in range(total)]
    ranks = [matrix.owners_of(Tile(*(place[::-1] if dim else place)))[0] for place in places]
    block, first, start = matrix.blocks[dim], matrix.first[dim], matrix.start[dim]
    if block * total > size:
        block, first, start = max(1, -(-size // total)), 0, 0
    pair = partial(_turned, transposed=dim == 1)
    return type(matrix)(
        pair((size, width)), pair((block, width)), pair((total, 1)), "R", pair((first, 0)), ranks, pair((start, 0))
    )


class OwnLines:
    """The rows (or columns) of a matrix that this rank stores: their numbers in the matrix, and their places in the
    array."""

    def __init__(self, lines: Cyclic, part: int | None):
        self.start = self.stop = 0
        self.numbers = np.arange(0)
        if part is not None:
            self.start, self.stop = lines.before(part), lines.extent(part)
            local = np.arange(self.start, self.stop)
            turns = local // lines.block * lines.parts + (part - lines.first) % lines.parts
            self.numbers = turns * lines.block + local % lines.block - lines.offset

    def within(self, low: int, high: int) -> slice:
        """Places of the lines low:high."""
        first, last = np.searchsorted(self.numbers, (low, high))
        return slice(self.start + int(first), self.start + int(last))

    def numbered(self, places: slice) -> np.ndarray:
        return self.numbers[places.start - self.start : places.stop - self.start]

    def runs(self, low: int, high: int) -> list[tuple[slice, Any]]:
        """Places of the lines low:high, and their numbers from `low` on: as slices if there are few runs."""
        places = self.within(low, high)
        numbers = self.numbered(places) - low
        if not len(numbers):
            return []
        edges = [0, *(np.flatnonzero(np.diff(numbers) > 1) + 1).tolist(), len(numbers)]
        if len(edges) > MOST_RUNS:
            return [(places, numbers)]
        return [
            (slice(places.start + begin, places.start + end), slice(int(numbers[begin]), int(numbers[end - 1]) + 1))
            for begin, end in pairwise(edges)
        ]


class View:
    """A window, or its transpose: its layout, and this rank's array.

    cyclic   the layout. The array begins in the first round of blocks of the window: what is before is skipped
    """

    def __init__(self, window: Window, transposed: bool = False):
        whole, self.context, self.grid = window.cyclic, window.descriptor.context, window.grid
        self.library, self.dtype = window.library, window.dtype
        grid = whole.process_grid
        starts = [start % (block * grid[0] * grid[1]) for start, block in zip(whole.start, whole.blocks)]
        skipped = [(old - new) // parts for old, new, parts in zip(whole.start, starts, grid)]
        turned = partial(_turned, transposed=transposed)
        self.cyclic = (ByRows if transposed else BlockCyclic)(
            turned(whole.shape),
            turned(whole.blocks),
            turned(grid),
            "RC"[whole.numbering == "R"] if transposed else whole.numbering,
            turned(whole.first),
            whole.ranks,
            turned((starts[0], starts[1])),
        )
        self.array = window.array
        if self.cyclic.tiles(self.grid.rank):
            self.array = self.array[skipped[0] :, skipped[1] :]
        if transposed:
            self.array = self.array.T

    @property
    def shape(self) -> tuple[int, int]:
        return self.cyclic.shape


def _turned(pair: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return (pair[1], pair[0]) if transposed else pair


class Exchange(NamedTuple):
    """A move of several panels at a time.

    held   for each panel, whether this rank has a part of the source, and of the target
    """

    move: TileMove
    held: list[tuple[bool, ...]]


class PanelPlan:
    """An algorithm that goes through a matrix panel by panel: its moves, and its work arrays. A context caches it.

    view       the matrix that is overwritten
    places     rows and columns of it that this rank stores
    panels     (first, end) of the columns of each panel
    """

    def __init__(self, view: View, size: int):
        self.grid, self.library, self.dtype, self.cyclic = view.grid, view.library, view.dtype, view.cyclic
        self.width, self.size = max(1, min(PANEL, size)), size
        self.panels = [(low, min(size, low + self.width)) for low in range(0, size, self.width)]
        row, col = next(iter(self.cyclic.tiles(self.grid.rank)), (None, None))
        self.rows, self.cols = OwnLines(self.cyclic.rows, row), OwnLines(self.cyclic.cols, col)
        self._shapes, self._moves = list[tuple[int, int]](), list[TileMove]()

    @property
    def table_bytes(self) -> int:
        """Bound of the bytes of the tables. The same on all ranks, because they end plans by it."""
        return plan_bytes(self.grid.size, max([move.rounds for move in self._moves], default=1)) * len(self._moves)

    def _end(self) -> None:
        """Do nothing: the moves are freed with the plan."""

    def take(self, *targets: Tiled) -> None:
        """Take a work array for the panels of each tiling. It may be empty on a rank."""
        for tiled in targets:
            self._shapes.append(next(iter(tiled.local_shapes(self.grid.rank)), (0, 0)))

    def move(self, *pairs: tuple[Tiled, Tiled]) -> Exchange:
        """Plan an exchange of a step: (source, target) of each panel, which are sent in the same messages."""
        (source, target), *others = pairs
        made = Exchange(
            TileMove(self.grid, source, target, self.dtype, others=others),
            [tuple(bool(tiled.tiles(self.grid.rank)) for tiled in pair) for pair in pairs],
        )
        self._moves.append(made.move)
        return made

    def whole(self, size: int) -> Placement:
        """Tiling of a block on the diagonal that every rank has."""
        return Placement((size, size), Layout(), GridShape(self.grid.size, 1, 1), self.cyclic.order)

    @contextmanager
    def arrays(self) -> Iterator[list[Array]]:
        """As a context: the work arrays, stored in the order of the matrix. Collective."""
        nbytes = sum([aligned(rows * cols * itemsize(self.dtype)) for rows, cols in self._shapes])
        with ExitStack() as borrowed:
            with self.grid.collective_call("panels", always=True):
                slab = borrowed.enter_context(self.grid.workspace.slab(nbytes, self.library))
                self.grid.workspace.rehearse([max([move.work for move in self._moves], default=0)], self.library)
            by_rows = self.cyclic.order == "C"
            yield [
                slab.array(shape, self.dtype) if by_rows else slab.array(shape[::-1], self.dtype).T
                for shape in self._shapes
            ]

    def dealt(self, dim: int) -> tuple[BlockCyclic, OwnLines]:
        """Tiling of a panel that is dealt over all processes, and the lines of this rank."""
        tiled = slabs(self.cyclic, dim, self.width)
        part = next((tile[dim] for tile in tiled.tiles(self.grid.rank)), None)
        return tiled, OwnLines(tiled.cols if dim else tiled.rows, part)

    def least(self, info: int) -> int:
        """The least INFO of all ranks that is not 0; or 0. Collective."""
        with self.grid.ledger.phase("info"):
            most = int(self.grid.comm.largest(self.size + 1 - info if info else 0))
        return self.size + 1 - most if most else 0

    def send(self, exchange: Exchange, *arrays: tuple[Array, Array]) -> None:
        """Do an exchange of these (source, target) arrays. Collective."""
        sources, targets = (
            [pair[side] for pair, held in zip(arrays, exchange.held, strict=True) if held[side]] for side in (0, 1)
        )
        with self.grid.ledger.phase("redistribute"):
            exchange.move.start(self.library, sources, targets).wait()

    def multiply(self, a: Array, b: Array, c: Array, alpha: complex, beta: complex) -> None:
        """C = alpha A B + beta C of arrays of this rank."""
        if 0 not in c.shape:
            run_gemm(self.grid, partial(self.library.gemm, a, b, c, alpha, beta, self.grid.workspace))

    def solve(self, triangle: np.ndarray, slab: Array, left: bool, lower: bool, unit: bool, alpha: complex = 1) -> None:
        """X = alpha T^-1 X if `left`, or alpha X T^-1, of an array of this rank."""
        if 0 not in slab.shape:
            work = self.grid.workspace
            run_gemm(self.grid, partial(solve_in_place, self.library, triangle, slab, left, lower, unit, alpha, work))

    def store(self, array: Array, whole: np.ndarray, low: int, named: Callable[[Any, Any], Any] | None) -> None:
        """Copy the elements of a block on the diagonal, which every rank has, to their places in the matrix.

        low     first row and column of the block
        named   function of the numbers of rows and of columns: which elements are written
        """
        high = low + whole.shape[0]
        rows, cols = self.rows.within(low, high), self.cols.within(low, high)
        i, j = self.rows.numbered(rows) - low, self.cols.numbered(cols) - low
        if len(i) and len(j):
            here, there = array[rows, cols], self.library.from_numpy(whole[np.ix_(i, j)], self.dtype)
            replace_where(self.library, here, there, named(i[:, None], j) if named else None)


def replace_where(library: NumpyLibrary, here: Array, there: Any, named: np.ndarray | None) -> None:
    """Write the elements of an array, or a number, to the places that are named, or to all."""
    here[...] = there if named is None else library.xp.where(library.from_numpy(named, "bool"), there, here)


def on_diagonal_and_below(i: Any, j: Any) -> Any:
    return i >= j


def below_diagonal(i: Any, j: Any) -> Any:
    return i > j


def planned(view: View, key: Hashable, make: Callable[[], Plan]) -> Plan:
    """The plan of an algorithm for matrices of these layouts. The context of the matrix caches it. Collective."""
    context, key = view.context, (key, view.cyclic, view.dtype, view.library.kind)
    plan: Plan = context.plans.get(key) or context._cache(key, make)
    context.plans.move_to_end(key)
    return plan


def solve_in_place(
    library: NumpyLibrary,
    triangle: np.ndarray,
    x: Array,
    left: bool,
    lower: bool,
    unit: bool,
    alpha: complex,
    work: Workspace,
) -> None:
    """X = alpha T^-1 X if `left`, or alpha X T^-1, of an array of this rank. T is in host memory.

    By substitution on the host. On a device, X is multiplied with the inverse of T.
    """
    if library.on_host:
        lapack.solve(triangle, library.to_numpy(x), left, lower, unit, alpha, host_gemm(work))
        return
    turned = triangle if lower else triangle.T
    inverse = inverted(turned, unit, work)
    factor = library.from_numpy(np.ascontiguousarray(inverse if lower else inverse.T), library.dtype(x))
    x[...] = alpha * (factor @ x if left else x @ factor)


def inverted(triangle: np.ndarray, unit: bool, work: Workspace) -> np.ndarray:
    """The inverse of a lower triangle, with zeros above, in a new array."""
    inverse = np.asfortranarray(np.tril(triangle))
    if unit:
        np.fill_diagonal(inverse, 1)
    lapack.invert(inverse, unit, host_gemm(work))
    return inverse


def host_gemm(work: Workspace) -> lapack.Gemm:
    library = NumpyLibrary()
    return lambda a, b, c, alpha, beta: library.gemm(a, b, c, alpha, beta, work)
