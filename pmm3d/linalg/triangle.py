"""Triangles of windows: copies of one triangle with zeros or its mirror image, and sums into one triangle."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..layout import Transposed
from ..product.redistribution import planned
from .window import Window

BASE = 512
"""Largest number of rows of a square window that is not halved. Its product is computed in full."""
Elements = tuple[list[Array], np.ndarray, np.ndarray]
"""This rank's elements of several windows, as views, and their rows and columns in the windows."""


def together(*windows: Window) -> Iterator[Elements]:
    """Yield the elements that this rank stores of windows that are divided alike. Nothing if there are none."""
    for places in zip(*(window.own() for window in windows)):
        views = [window.array[rows, cols] for window, (rows, cols, _, _) in zip(windows, places)]
        yield views, places[0][2], places[0][3]


def in_triangle(library: NumpyLibrary, uplo: str, i: np.ndarray, j: np.ndarray, strict: bool = False) -> Array:
    """Return an array of booleans, stored by columns: whether the elements are in a triangle. strict: without the
    diagonal."""
    rows, cols = i[None, :], j[:, None] + (strict if uplo == "L" else -strict)
    return library.from_numpy(rows >= cols if uplo == "L" else rows <= cols, "bool").T


def middle(window: Window) -> int:
    """Return the row at which a square window is halved, or 0 if it is not halved. If it is large enough, each process
    has as many rows of the first half as any other one; and as many columns, if the window begins on the diagonal."""
    size, cyclic = window.rows, window.cyclic
    if size <= BASE:
        return 0
    (mb, nb), (rows, cols) = cyclic.blocks, cyclic.process_grid
    for unit in (lcm(mb * rows, nb * cols), lcm(mb, nb)):
        found = (2 * window.row + size + unit) // (2 * unit) * unit - window.row
        if size <= 4 * found <= 3 * size:
            return found
    return size // 2


def triangle(a: Window, uplo: str, diag: str = "N") -> Window:
    """Return a copy of a square window, divided as it, with zeros in the other triangle. No messages.

    diag   "U": ones on the diagonal. The diagonal of A is not read
    """
    copy, library, unit = a.like(), a.library, diag == "U"
    for (source, target), i, j in together(a, copy):
        target[...] = library.xp.where(in_triangle(library, uplo, i, j, unit), source, 0)
        if unit:
            target[diagonal_of(library, i, j)] = 1
    return copy


def mirrored(a: Window, uplo: str, hermitian: bool) -> Window:
    """Return a copy, divided as A, of a symmetric or Hermitian matrix of which one triangle is read. The imaginary part
    of the diagonal of a Hermitian matrix is not read. Each rank receives the mirror image of what it stores.
    Collective."""
    copy, grid, library = a.like(), a.grid, a.library
    held = len(a.cyclic.tiles(grid.rank))
    move = planned(grid, Transposed(a.cyclic), copy.cyclic, a.dtype, library)
    with grid.ledger.phase("redistribute"):
        move.start(library, [a.array.T] * held, [copy.array] * held).wait()
    for (source, target), i, j in together(a, copy):
        image = library.conjugate(target) if hermitian else target
        target[...] = library.xp.where(in_triangle(library, uplo, i, j), source, image)
        if hermitian:
            make_diagonal_real(library, target, i, j)
    return copy


def add_triangle(product: Window | None, beta: complex, c: Window, uplo: str, hermitian: bool) -> None:
    """Compute C = product + beta C in one triangle of C. The other triangle is neither read nor changed. No messages.

    product     divided as C; it is changed. None: zeros
    hermitian   the imaginary part of the diagonal is not read, and becomes 0
    """
    for views, i, j in together(c) if product is None else together(c, product):
        add_in_triangle(c.library, 0 if product is None else views[1], beta, views[0], uplo, (i, j), hermitian)


def add_in_triangle(
    library: NumpyLibrary,
    added: Array,
    beta: complex,
    c: Array,
    uplo: str,
    at: tuple[np.ndarray, np.ndarray],
    hermitian: bool,
) -> None:
    """`add_triangle` of a block of this rank. at: rows and columns of the elements. added: an array or 0."""
    named, total = in_triangle(library, uplo, *at), added
    if beta != 0:
        old = library.xp.where(named, c, 0)
        if hermitian:
            make_diagonal_real(library, old, *at)
        total = total + beta * old
    c[...] = library.xp.where(named, total, c)
    if hermitian:
        make_diagonal_real(library, c, *at)


def make_diagonal_real(library: NumpyLibrary, array: Array, i: np.ndarray, j: np.ndarray) -> None:
    """Set the imaginary part of elements on the diagonal to 0."""
    if library.dtype(array).startswith("complex"):
        places = diagonal_of(library, i, j)
        array[places] = array[places].real + 0j


def diagonal_of(library: NumpyLibrary, i: np.ndarray, j: np.ndarray) -> tuple[Array, Array]:
    """Return the rows and columns in an array of the elements on the diagonal."""
    _, rows, cols = np.intersect1d(i, j, assume_unique=True, return_indices=True)
    return library.from_numpy(rows, "int64"), library.from_numpy(cols, "int64")
