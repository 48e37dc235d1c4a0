"""Triangles of a DistMatrix: mirrored to the other side of the diagonal, or kept while the other one is replaced."""

from __future__ import annotations

import numpy as np

from ..arrays import parallel_rows
from ..product import DistMatrix
from ..product.reductions import diagonals
from ..product.relayout import in_layout
from ..product.stored import flipped
from .triangle import in_triangle
from .window import OTHER_TRIANGLE

MIRRORED = 256
"""Rows and columns of a tile that is mirrored at a time. Both sides of a tile fit the cache of a core."""


def transposed(matrix: DistMatrix, hermitian: bool) -> DistMatrix:
    return matrix.H if hermitian else matrix.T


def mirror(c: DistMatrix, uplo: str, hermitian: bool) -> None:
    """Copy the elements of a triangle to the other one. The diagonal of a Hermitian matrix becomes real. Collective.

    uplo   triangle that is read
    """
    source, box, library = in_layout(transposed(c, hermitian), c.layout, "mirror"), c.box, c.library
    lower = uplo == "L"
    here, there = (c.memory, source.memory) if lower else (c.memory.T, source.memory.T)
    first_row, first_col = (box.r0, box.c0) if lower else (box.c0, box.r0)
    read = library.conjugate if source.conjugated else lambda part: part
    rows, cols = (int(size) for size in here.shape)
    tile = MIRRORED if library.on_host else max(1, rows, cols)

    def copy(part: slice) -> None:
        """Copy the elements of these rows right of the diagonal, tile by tile."""
        for left in range(0, cols, tile):
            right = min(cols, left + tile)
            if first_row + part.stop <= first_col + left:
                here[part, left:right] = read(there[part, left:right])
            elif first_row + part.start < first_col + right:
                above = library.from_numpy(above_diagonal(part, slice(left, right)), "bool")
                tiles = here[part, left:right], read(there[part, left:right])
                here[part, left:right] = library.xp.where(above, tiles[1], tiles[0])

    def above_diagonal(part: slice, columns: slice) -> np.ndarray:
        i = np.arange(first_row + part.start, first_row + part.stop)
        return i[:, None] < np.arange(first_col + columns.start, first_col + columns.stop)

    if library.has_data:
        parallel_rows(library, copy, (rows,), tile)
    else:
        library.passed("mirror", c._stored, source._stored)
    if hermitian:
        make_real(c)
    c.fills += 1


def make_real(c: DistMatrix) -> None:
    """Set the imaginary part of the diagonal to 0."""
    if c.dtype.startswith("complex"):
        for diagonal, _ in diagonals(c):
            diagonal[...] = diagonal.real * 1  # torch refuses to write one complex element from its own real part


def keep_triangle(matrix: DistMatrix, uplo: str, others: DistMatrix | None = None, diag: str = "N") -> None:
    """Replace the elements outside of a triangle by zeros, or by those of another matrix. Nothing is sent.

    others   matrix of the same layout, which may be stored in the other order
    diag     "U": the diagonal becomes ones
    """
    library, box, here = matrix.library, matrix.box, matrix._stored
    there = None if others is None else flipped(others.memory, matrix.order)
    i, j = np.arange(box.r0, box.r1), np.arange(box.c0, box.c1)
    if matrix.order == "F":
        uplo, i, j = OTHER_TRIANGLE[uplo], j, i

    def keep(part: slice) -> None:
        rest = 0 if there is None else there[part]
        named = in_triangle(library, OTHER_TRIANGLE[uplo], j, i[part]).T  # by rows, as `here`
        here[part] = library.xp.where(named, here[part], rest)

    if library.has_data:
        parallel_rows(library, keep, tuple(here.shape))
    else:
        library.passed("triangle", here, *([] if there is None else [there]))
    if diag == "U":
        for diagonal, _ in diagonals(matrix):
            diagonal[...] = 1
    matrix.fills += 1
