"""Parts of block-cyclic matrices, on which blocked algorithms work, and their checked arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..comm import Grid
from ..errors import DTypeError, GridError, LayoutError
from ..layout import BlockCyclic, natural
from ..product import BlacsContext, Descriptor, DistMatrix, pgemm
from ..product.blacs import check_descriptor, compared
from ..product.checks import array_signature
from ..product.pblas import DTYPES
from ..product.redistribution import check_leading, part_of, planned
from ..product.tiles import checked_arrays, elements

BLOCK = 64
"""Rows and columns of a block of the block-cyclic copy of a matrix."""
Matrix = tuple[Array, int, int, Descriptor]
"""A part of a block-cyclic matrix, as routines pass it: array, first row and column from 1, descriptor."""
OTHER_TRIANGLE = {"L": "U", "U": "L"}


@dataclass(frozen=True)
class Window:
    """A part of a block-cyclic matrix.

    array        this rank's array of the whole matrix
    row, col     first row and column of the part, counted from 0
    rows, cols   number of rows and columns of the part
    """

    array: Array
    descriptor: Descriptor
    row: int
    col: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def grid(self) -> Grid:
        return self.descriptor.context.grid

    @property
    def library(self) -> NumpyLibrary:
        return library_of(self.array)

    @property
    def dtype(self) -> str:
        return self.library.dtype(self.array)

    @property
    def cyclic(self) -> BlockCyclic:
        """Layout of the part. Arrays are those of the whole matrix."""
        return self.descriptor.cyclic.sub(self.row, self.col, self.rows, self.cols)

    def part(self, row: int, col: int, rows: int, cols: int) -> Window:
        """A part of this part, in the same array. row, col: counted from 0 in this part."""
        return replace(self, row=self.row + row, col=self.col + col, rows=rows, cols=cols)

    def like(self, rows: int | None = None, cols: int | None = None) -> Window:
        """A new matrix of arbitrary elements, of this shape or another one, that is divided as this part: element
        (i, j) is on the same process as element (i, j) of this part."""
        whole, cyclic = self.descriptor, self.cyclic
        rows, cols = self.rows if rows is None else rows, self.cols if cols is None else cols
        row, col = (
            first % (block * parts)
            for first, block, parts in zip((self.row, self.col), cyclic.blocks, cyclic.process_grid)
        )
        made = whole.context.descriptor(row + rows, col + cols, whole.mb, whole.nb, whole.rsrc, whole.csrc)
        shape = max(1, made.local_rows), made.local_cols
        return Window(self.library.empty(shape[::-1], self.dtype).T, made, row, col, rows, cols)

    def own(self) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
        """The elements of this part that this rank stores: their rows and columns in the array, as slices, and in the
        part, as numbers counted from 0. Nothing if there is none."""
        for tile in self.cyclic.tiles(self.grid.rank):
            rows, cols = self.cyclic.rows, self.cyclic.cols
            places = [_places(one, part) for one, part in zip((rows, cols), tile)]
            if all(len(numbers) for _, numbers in places):
                (own_rows, i), (own_cols, j) = places
                yield own_rows, own_cols, i, j


def _places(lines: Any, part: int) -> tuple[slice, np.ndarray]:
    """Rows (or columns) of a process: their slice of the array, and their numbers in the window."""
    numbers = [np.arange(run.start, run.stop) for run in lines.runs(part)]
    found = np.concatenate(numbers) if numbers else np.arange(0)
    return slice(lines.before(part), lines.before(part) + len(found)), found


def gemm(of_a: str, of_b: str, alpha: complex, a: Window, b: Window, beta: complex, c: Window) -> None:
    """C = alpha op(A) op(B) + beta C, of windows of one context. of_a, of_b: "N", "T" or "C". Collective."""
    k = a.cols if of_a == "N" else a.rows
    at_a, at_b, at_c = ((each.row + 1, each.col + 1, each.descriptor) for each in (a, b, c))
    pgemm(of_a, of_b, c.rows, c.cols, k, alpha, a.array, *at_a, b.array, *at_b, beta, c.array, *at_c)


def context_of(grid: Grid) -> BlacsContext:
    """A context over all ranks of a grid, on the process grid nearest to a square. The grid caches it. Collective."""
    context = grid.attached.get(BlacsContext)
    if context is None or context.closed:
        rows = max(rows for rows in range(1, isqrt(grid.size) + 1) if grid.size % rows == 0)
        context = grid.attached[BlacsContext] = BlacsContext(grid, (rows, grid.size // rows))
    return context


def from_matrix(matrix: DistMatrix, context: BlacsContext, block: int = 0) -> Window:
    """A block-cyclic copy of a matrix, on a context over the ranks of its grid. Collective.

    block   rows and columns of a block. Default: BLOCK, or less, so that each process has a part of a small matrix
    """
    size = block or max(1, min(BLOCK, max(matrix.shape) // max(context.shape)))
    descriptor = context.descriptor(*matrix.shape, size, size)
    shape = max(1, descriptor.local_rows), descriptor.local_cols
    array = matrix.library.empty(shape[::-1], matrix.dtype).T
    window = Window(array, descriptor, 0, 0, *matrix.shape)
    matrix.to_block_cyclic(descriptor.cyclic, array)
    return window


def to_matrix(window: Window, out: DistMatrix) -> DistMatrix:
    """Copy a window to a matrix on the grid of its context, and return the matrix. Collective."""
    grid, library, on_grid = window.grid, window.library, out._placement()
    move = planned(grid, window.cyclic, on_grid, window.dtype, library)
    held = [window.array] * len(window.cyclic.tiles(grid.rank))
    with grid.ledger.phase("redistribute"):
        move.start(library, held, [out.memory] * len(on_grid.tiles(grid.rank))).wait()
    out.fills += 1
    return out


class Operand(NamedTuple):
    """An argument of a routine: a part of a block-cyclic matrix as ScaLAPACK's routines pass it.

    name         name in texts of errors
    i, j         first row and column, counted from 1
    rows, cols   number of rows and columns that the routine reads or writes
    written      whether the routine writes to it
    """

    name: str
    array: Any
    i: int
    j: int
    descriptor: Any
    rows: int
    cols: int
    written: bool = False


@contextmanager
def checked(what: str, operands: Sequence[Operand], *arguments: Any) -> Iterator[list[Window]]:
    """As a context: agree on the arguments of a routine on all ranks, and give the windows. An error of the body, such
    as that of a wrong letter, is then raised on every rank. Collective.

    arguments   other arguments. These, and the sizes of the operands, must be equal on all ranks
    """
    descriptors = [each.descriptor for each in operands]
    first = next((each for each in descriptors if isinstance(each, Descriptor)), descriptors[0])
    context, (_, dtype, kind) = check_descriptor(what, first).context, array_signature(operands[0].array)
    passed = [each for one in operands for each in (one.i, one.j, one.rows, one.cols, compared(one.descriptor))]
    with context.grid.collective_call(what, *passed, *arguments, dtype, kind):
        context._check_open()
        library = library_of(operands[0].array)
        if dtype not in DTYPES:
            raise DTypeError(f"{what}: matrices are of {', '.join(DTYPES)}, as ScaLAPACK's; these are {dtype}")
        windows, used = list[Window](), list[Array]()
        for one in sorted(operands, key=lambda one: one.written):  # what is written must be apart from what is read
            if check_descriptor(what, one.descriptor).context is not context:
                raise GridError(f"{what}: the descriptors are of several contexts; pgemr2d moves a matrix between them")
            for size in (one.rows, one.cols):
                natural(size, f"{what}: sizes are whole numbers of at least 0", 0, LayoutError)
            cyclic = part_of(what, one.name, one.i, one.j, one.descriptor, one.rows, one.cols)
            sources = used if one.written else None
            own = checked_arrays(f"{what}: {one.name}", one.array, cyclic, context.grid, library, dtype, sources)
            check_leading(what, one.name, own, one.descriptor)
            used = used + elements(cyclic, own, context.grid.rank)
        for one in operands:
            windows.append(Window(one.array, one.descriptor, one.i - 1, one.j - 1, one.rows, one.cols))
        yield windows


def letter(what: str, name: str, value: Any, allowed: str) -> str:
    """A letter as a capital. Raises LayoutError if it is none of the allowed ones."""
    if not isinstance(value, str) or len(value) != 1 or value.upper() not in allowed:
        options = ", ".join(f'"{each}"' for each in allowed)
        raise LayoutError(f"{what}: {name} is one of {options}; got {value!r}")
    return value.upper()
