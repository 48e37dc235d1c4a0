"""Products of which each process computes its own part, from copies of the lines of both factors that it needs. Blocks
outside of a triangle of the result, or of a triangular factor, are left out. All factors are sent in one exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, library_of
from ..comm import Grid
from ..layout import aligned, itemsize
from ..layout.foreign import Spread, near_start
from ..product.multiply import run_gemm
from ..product.redistribution import planned
from .triangle import add_in_triangle, diagonal_of, in_triangle, together
from .window import Window

STRIP = 256
"""Rows or columns of a process that are multiplied at a time. Of a strip, the block on the diagonal is computed in
full."""
MOST_RECEIVED = 2
"""Largest ratio of the elements that a process receives to those of a product in three dims."""
SMALL = 2**21
"""Operations of a product that is computed in this way although its matrix is divided unevenly."""


class Factor(NamedTuple):
    """op(A), the left (`of` 0) or right (1) factor of a product. op: "N", "T" or "C"."""

    op: str
    window: Window
    of: int


def stays(c: Window, depth: int) -> bool:
    """Whether a product is computed in this way: C is divided evenly, over most ranks, and no process receives many
    more elements than with a product in three dims, whose matrices are moved to another grid.

    depth   length of the sums
    """
    (rows, cols), cyclic, ranks = c.shape, c.cyclic, c.grid.size
    processes = cyclic.process_grid[0] * cyclic.process_grid[1]
    most, height, width = cyclic.most()
    operations = rows * cols * depth
    even = 2 * processes > ranks and most * processes <= 2 * rows * cols
    received, moved = depth * (height + width), (rows * depth + depth * cols + rows * cols) / ranks
    return operations <= SMALL or (even and received <= MOST_RECEIVED * (moved + 3 * (operations / ranks) ** (2 / 3)))


@contextmanager
def lines_of(c: Window, *factors: Factor) -> Iterator[list[Array]]:
    """As a context: arrays of the lines of factors that this rank's part of C needs, after op, but not conjugated.
    They are in work memory and may be changed. Empty on ranks without a part of C. Collective."""
    grid, library, dtype, rank = c.grid, c.library, c.dtype, c.grid.rank
    near, needed = near_start(c.cyclic), list[Spread]()
    for op, window, of in factors:
        dim = int((op == "N") == bool(of))
        needed.append(Spread(near, of, dim, window.shape[1 - dim]))
    first, *others = [(each.window.cyclic, there) for each, there in zip(factors, needed)]
    move = planned(grid, *first, dtype, library, others)
    shapes = [there.local_shapes(rank) for there in needed]
    nbytes = sum(aligned(rows * cols * itemsize(dtype)) for own in shapes for rows, cols in own)
    with ExitStack() as work:
        with grid.collective_call("gathering factors", always=True):
            slab = work.enter_context(grid.workspace.slab(nbytes, library))
        arrays = [[slab.array((cols, rows), dtype).T for rows, cols in own] for own in shapes]
        with grid.ledger.phase("redistribute"):
            stored = [each.window.array for each in factors for _ in each.window.cyclic.tiles(rank)]
            move.start(library, stored, [array for own in arrays for array in own]).wait()
        found = list[Array]()
        for each, there, own in zip(factors, needed, arrays):
            for array, tile in zip(own, there.tiles(rank)):
                lines = slice((near.rows, near.cols)[each.of].before(tile[there.dim]), None)
                here = array[:, lines] if there.dim else array[lines]
                found.append(here if each.op == "N" else here.T)
        yield found


def add_in_place(
    uplo: str, alpha: complex, a: Factor, b: Factor, beta: complex, c: Window, hermitian: bool = False
) -> None:
    """Compute one triangle of C = alpha op(A) op(B) + beta C: see `rank_k.rank_k`. Collective."""
    multiply = partial(_multiply, c.grid, conjugated=(a.op == "C", b.op == "C"))
    with lines_of(c, a, b) as found:
        for (view,), i, j in together(c):
            left, right = found
            for start in range(0, len(j), STRIP):
                strip = slice(start, start + STRIP)
                first, last = j[strip][0], j[strip][-1]
                before, after = int(np.searchsorted(i, first)), int(np.searchsorted(i, last, "right"))
                crossed, full = slice(before, after), slice(after, None) if uplo == "L" else slice(0, before)
                multiply(left[full], right[:, strip], view[full, strip], alpha, beta)
                block = c.library.empty((len(j[strip]), after - before), c.dtype).T
                multiply(left[crossed], right[:, strip], block, alpha, 0)
                add_in_triangle(c.library, block, beta, view[crossed, strip], uplo, (i[crossed], j[strip]), hermitian)


def multiply_in_place(side: str, uplo: str, op: str, diag: str, alpha: complex, a: Window, b: Window) -> None:
    """B = alpha op(A) B, or alpha B op(A) with side "R": see `triangular_product`. Collective."""
    lower, unit, order, by_rows = (uplo == "L") == (op == "N"), diag == "U", a.rows, side == "L"
    given = (Factor(op, a, 0), Factor("N", b, 1)) if by_rows else (Factor("N", b, 0), Factor(op, a, 1))
    multiply = partial(_multiply, b.grid, conjugated=(given[0].op == "C", given[1].op == "C"))
    named = "L" if lower else "U"
    with lines_of(b, *given) as found:
        for (view,), i, j in together(b):
            left, right = found
            lines = i if by_rows else j
            for start in range(0, len(lines), STRIP):
                strip = slice(start, start + STRIP)
                numbers = lines[strip]
                crossed = np.arange(numbers[0], numbers[-1] + 1)
                inner = slice(int(crossed[0]), int(crossed[-1]) + 1)
                read = slice(0, inner.stop) if lower == by_rows else slice(inner.start, order)
                block, at = (
                    (left[strip, inner], (numbers, crossed)) if by_rows else (right[inner, strip], (crossed, numbers))
                )
                block[...] = b.library.xp.where(in_triangle(b.library, named, at[0], at[1], unit), block, 0)
                if unit:
                    block[diagonal_of(b.library, *at)] = 1
                if by_rows:
                    multiply(left[strip, read], right[read], view[strip], alpha, 0)
                else:
                    multiply(left[:, read], right[read, strip], view[:, strip], alpha, 0)


def _multiply(
    grid: Grid, a: Array, b: Array, c: Array, alpha: complex, beta: complex, *, conjugated: tuple[bool, bool]
) -> None:
    """C = alpha A B + beta C, of arrays of this rank."""
    if not all(c.shape):
        return
    library, into, of_c = library_of(c), c, beta
    row_stride, col_stride = library.strides(c)
    if row_stride != 1 or col_stride < c.shape[0]:
        into, of_c = library.empty(tuple(c.shape)[::-1], library.dtype(c)).T, 0
    with grid.engine.guard:
        run_gemm(grid, partial(library.gemm, a, b, into, alpha, of_c, grid.workspace, conjugated=conjugated))
    if into is not c:
        c[...] = into if beta == 0 else into + beta * c
