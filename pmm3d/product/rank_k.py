"""A A^T and A A^H. About half of the product is computed, and the other half is mirrored."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

import numpy as np

from ..arrays import parallel_rows
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Layout, without_order
from .checks import check_numbers, check_operands, no_matrix, scalar, signature_of
from .matmul_plan import matmul
from .matrix import DistMatrix
from .reductions import diagonals
from .relayout import ascending, in_layout, summed

LEAST_ROWS = 512
"""Smallest number of rows of a block on the diagonal. Smaller blocks cost more time than they save."""
LEAST_DEPTH = 1024
"""Smallest k for which only half is computed. For a smaller k, a product takes less time than the copies of C."""
MOST_HALVINGS = 3
"""Largest number of times that the rows are halved: then 9/16 of the product is computed. Each halving gathers
operands once more."""
MIRRORED = 256
"""Rows and columns of a tile that is mirrored at a time. Both sides of a tile fit the cache of a core."""


def syrk(
    a: DistMatrix, *, alpha: complex = 1, beta: complex = 0, out: DistMatrix | None = None, uplo: str = "L"
) -> DistMatrix:
    """C = alpha A A^T + beta C, exactly symmetric, with about half of the operations of the product.

    Parameters
    ----------
    alpha, beta : number
        Factors, as in `matmul`.
    out : DistMatrix, (m, m), or None
        C, in any layout, which is overwritten. Default: a new matrix in Layout.C.
    uplo : str
        "L" or "U": the triangle of C that is read if beta is not 0, as in BLAS. Both triangles are written.

    Raises
    ------
    LayoutError
        If C does not fit.
    DTypeError, DisagreementError
        As `matmul`.

    Notes
    -----
    The rows of A are halved up to three times, while blocks have at least 512 rows. Products of different parts are
    computed once, and products on the diagonal in full: 3/4, 5/8 or 9/16 of the operations of A A^T. With k below 1024
    the product is computed in full, and mirrored, because copies would take more time than they save.

    Each part of A is copied to the ranks that multiply it (phase "submatrix" of the ledger). The part below the
    diagonal is sent once to the place of its mirror image ("redistribute"). Operands are gathered for each halving.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, syrk
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     syrk(a).gather()
    array([[ 5.,  8.],
           [ 8., 14.]])
    """
    return _rank_k("syrk", a, alpha, beta, out, uplo)


def herk(
    a: DistMatrix, *, alpha: float = 1, beta: float = 0, out: DistMatrix | None = None, uplo: str = "L"
) -> DistMatrix:
    """C = alpha A A^H + beta C, exactly Hermitian, with real numbers on the diagonal.

    Parameters
    ----------
    alpha, beta : float
        Factors, which are real.
    out, uplo
        See `syrk`.

    Raises
    ------
    LayoutError, DTypeError, DisagreementError
        As `syrk`, and DTypeError for complex factors.

    Notes
    -----
    Operations and messages are those of `syrk`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, herk
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 1), lambda i, j: i + 1j, dtype="complex128")
    ...     herk(a).gather()
    array([[1.+0.j, 1.+1.j],
           [1.-1.j, 2.+0.j]])
    """
    return _rank_k("herk", a, alpha, beta, out, uplo)


def _rank_k(what: str, a: DistMatrix, alpha: complex, beta: complex, out: DistMatrix | None, uplo: str) -> DistMatrix:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    grid, hermitian = a.grid, what == "herk"
    with grid.engine.guard:
        with grid.collective_call(what, a._signature, signature_of(out), alpha, beta, uplo):
            for name, value in (("alpha", alpha), ("beta", beta)):
                scalar(name, value, a.dtype, what)
                if hermitian and not isinstance(value, Real):
                    raise DTypeError(f"herk: {name} is {value!r}; it must be real, or the result is not Hermitian")
            check_numbers(what, a)
            if uplo not in ("L", "U"):
                raise LayoutError(f'{what}: uplo is "L" or "U", the triangle of out that is read; got {uplo!r}')
            check_operands(a, a, out, beta, what)
            if out is not None and out.shape != (a.shape[0], a.shape[0]):
                raise LayoutError(
                    f"{what}: out is {out.shape[0]} x {out.shape[1]}; the result is {a.shape[0]} x {a.shape[0]}"
                )
            if out is not None and (layout := without_order(out.layout)) != out.layout:
                raise LayoutError(
                    f"{what}: the layout of out has an order of rows. Pass an out in {layout}, and redistribute it"
                )
        if out is not None and beta != 0 and uplo == "U":
            _mirror(out, False, hermitian)
        out = _lower(ascending(summed(a, alpha)), alpha, beta, hermitian, out)
        _mirror(out, True, hermitian)
    return out


def _lower(a: DistMatrix, alpha: complex, beta: complex, hermitian: bool, out: DistMatrix | None) -> DistMatrix:
    """Compute C = alpha A A^T + beta C in the blocks on and below the diagonal. Other elements are arbitrary.
    Collective."""
    rows, depth = a.shape
    halvings = [number for number in range(1, MOST_HALVINGS + 1) if rows >> number >= LEAST_ROWS]
    if not halvings or depth < LEAST_DEPTH or alpha == 0:
        return matmul(a, _transposed(a, hermitian), alpha=alpha, beta=beta, out=out)
    c = type(a).zeros(a.grid, (rows, rows), dtype=a.dtype, layout=Layout.C, library=a.library) if out is None else out
    every = slice(None)
    for mine, others in _blocks(0, rows, len(halvings)):
        left = a.submatrix(mine, every, Layout.A)
        right = left if mine == others else a.submatrix(others, every, Layout.B.T)
        block = None if beta == 0 else c.submatrix(mine, others, Layout.C)
        c.set_submatrix(mine, others, matmul(left, _transposed(right, hermitian), alpha=alpha, beta=beta, out=block))
    return c


def _transposed(matrix: DistMatrix, hermitian: bool) -> DistMatrix:
    return matrix.H if hermitian else matrix.T


def _blocks(start: int, stop: int, halvings: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of the blocks on and below the diagonal, which are computed."""
    if not halvings:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield slice(middle, stop), slice(start, middle)
    yield from _blocks(start, middle, halvings - 1)
    yield from _blocks(middle, stop, halvings - 1)


def _mirror(c: DistMatrix, lower: bool, hermitian: bool) -> None:
    """Copy the elements on one side of the diagonal to the other side. lower: the source is below. Collective."""
    transposed, box, library = in_layout(_transposed(c, hermitian), c.layout, "syrk"), c.box, c.library
    here, there = (c.memory, transposed.memory) if lower else (c.memory.T, transposed.memory.T)
    first_row, first_col = (box.r0, box.c0) if lower else (box.c0, box.r0)
    read = library.conjugate if transposed.conjugated else lambda part: part
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
        library.passed("mirror", c._stored, transposed._stored)
    if hermitian and c.dtype.startswith("complex"):
        for diagonal, _ in diagonals(c):
            diagonal[...] = diagonal.real * 1  # torch refuses to write one complex element from its own real part
    c.fills += 1
