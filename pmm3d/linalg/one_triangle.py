"""Products of distributed matrices with a symmetric, Hermitian or triangular one, of which one triangle is read."""

from __future__ import annotations

from typing import Any

from ..errors import LayoutError, Pmm3dError
from ..product import DistMatrix, matmul
from ..product.checks import (
    check_alike,
    check_numbers,
    check_operands,
    check_out,
    check_square,
    no_matrix,
    scalar,
    signature_of,
)
from ..product.pblas import OPERATIONS
from ..product.relayout import ascending, summed
from .matrix_triangle import keep_triangle, mirror
from .window import letter

LEAST_ROWS = 512
"""Smallest number of rows of a strip of a triangular product. Smaller strips cost more time than they save."""
MOST_STRIPS = 8
"""Largest number of strips: then 9/16 of the operations are computed. Each strip gathers operands once more."""


def symm(
    a: DistMatrix,
    b: DistMatrix,
    side: str = "L",
    uplo: str = "L",
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
) -> DistMatrix:
    """C = alpha A B + beta C, or alpha B A + beta C, with a symmetric A of which one triangle is read.

    Parameters
    ----------
    a : DistMatrix, square
        A.
    b : DistMatrix
        B, in any layout.
    side : str
        "L": A B. "R": B A.
    uplo : str
        "L" or "U": triangle of A that is read.
    alpha, beta, out
        As in `matmul`.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `matmul`, and LayoutError for other letters, and for an A that is not square.

    Notes
    -----
    A copy of A with both triangles, and one `matmul`. Each rank receives the mirror image of its shard (phase
    "redistribute" of the ledger).

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, symm
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[1.0, np.nan], [2.0, 3.0]]))
    ...     symm(a, DistMatrix.ones(grid, (2, 1))).gather()
    array([[3.],
           [5.]])
    """
    return _symmetric("symm", a, b, side, uplo, alpha, beta, out)


def hemm(
    a: DistMatrix,
    b: DistMatrix,
    side: str = "L",
    uplo: str = "L",
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
) -> DistMatrix:
    """C = alpha A B + beta C, or alpha B A + beta C, with a Hermitian A of which one triangle is read.

    Parameters
    ----------
    a, b, side, uplo, alpha, beta, out
        See `symm`. The imaginary part of the diagonal of A is not read.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `symm`.

    Notes
    -----
    Operations and messages are those of `symm`.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, hemm
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[1, np.nan], [2j, 3]]))
    ...     hemm(a, DistMatrix.ones(grid, (2, 1), dtype="complex128")).gather()
    array([[1.-2.j],
           [3.+2.j]])
    """
    return _symmetric("hemm", a, b, side, uplo, alpha, beta, out)


def trmm(
    a: DistMatrix,
    b: DistMatrix,
    side: str = "L",
    uplo: str = "L",
    op: str = "N",
    diag: str = "N",
    *,
    alpha: complex = 1,
    out: DistMatrix | None = None,
) -> DistMatrix:
    """alpha op(A) B, or alpha B op(A), with a triangular A: about half of the operations of the product.

    Parameters
    ----------
    a : DistMatrix, square
        A.
    b : DistMatrix
        B, in any layout.
    side : str
        "L": op(A) B. "R": B op(A).
    uplo : str
        "L" or "U": triangle of A that is read. The other triangle counts as zeros.
    op : str
        "N", "T" or "C": op(A) is A, its transpose, or its conjugate transpose.
    diag : str
        "U": the diagonal of A is not read, and counts as ones. "N": it is read.
    alpha : number
        Factor. If it is 0, A and B are not read.
    out : DistMatrix or None
        Matrix of the shape of B that is overwritten; it may be `b`. Default: a new matrix in Layout.C.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `matmul`, and LayoutError for other letters, and for an A that is not square.

    Notes
    -----
    A copy of A with zeros in the other triangle. The result is divided into up to eight strips of at least 512 rows, or
    columns. Each strip is one `matmul`, without the zeros beside it: 3/4, 5/8 or 9/16 of the operations of A B. The
    operands of each strip are copied to the ranks that multiply them (phase "submatrix" of the ledger).

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, trmm
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[1.0, np.nan], [2.0, 3.0]]))
    ...     trmm(a, DistMatrix.ones(grid, (2, 1))).gather()
    array([[1.],
           [5.]])
    """
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, "trmm"))
    with a.grid.engine.guard:
        with a.grid.collective_call(
            "trmm", a._signature, signature_of(b), signature_of(out), side, uplo, op, diag, alpha
        ):
            side, uplo = _checked("trmm", a, b, side, uplo)
            op, diag = letter("trmm", "op", op, "NTC"), letter("trmm", "diag", diag, "NU")
            scalar("alpha", alpha, a.dtype, "trmm")
            if out is not None:
                check_alike("trmm", b, out, name="out")
                check_out("trmm", out, *([a] if out is b else [a, b]))
        half = summed(a, alpha)
        if alpha != 0:
            half = copied(half)
            keep_triangle(half, uplo, diag=diag)
        lower = (uplo == "L") == (op == "N")
        result = _strips(OPERATIONS[op](half), ascending(summed(b, alpha)), side, lower, alpha)
        return result if out is None else out.set_submatrix(slice(None), slice(None), result)


def copied(matrix: DistMatrix) -> DistMatrix:
    """Return a copy that is stored without an order of rows and without conjugation. Collective."""
    matrix = ascending(matrix)
    return matrix.redistribute(matrix.layout)


def _strips(half: DistMatrix, b: DistMatrix, side: str, lower: bool, alpha: complex) -> DistMatrix:
    """alpha A B, or alpha B A, of an A with zeros in one triangle. Collective."""
    order, every = half.shape[0], slice(None)
    number = MOST_STRIPS
    while order // number < LEAST_ROWS and number > 1:
        number //= 2
    if number == 1 or alpha == 0:
        return matmul(*((half, b) if side == "L" else (b, half)), alpha=alpha)
    result = None
    for strip in range(number):
        mine = slice(order * strip // number, order * (strip + 1) // number)
        read = slice(0, mine.stop) if lower == (side == "L") else slice(mine.start, order)
        if side == "L":
            part = matmul(half.submatrix(mine, read), b.submatrix(read, every), alpha=alpha)
        else:
            part = matmul(b.submatrix(every, read), half.submatrix(read, mine), alpha=alpha)
        if result is None:
            result = type(b).empty(b.grid, b.shape, dtype=b.dtype, layout=part.layout, library=b.library)
        rows, cols = (mine, every) if side == "L" else (every, mine)
        result.set_submatrix(rows, cols, part)
    assert result is not None
    return result


def _symmetric(
    what: str, a: DistMatrix, b: DistMatrix, side: str, uplo: str, alpha: complex, beta: complex, out: DistMatrix | None
) -> DistMatrix:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    with a.grid.engine.guard:
        with a.grid.collective_call(what, a._signature, signature_of(b), signature_of(out), side, uplo, alpha, beta):
            side, uplo = _checked(what, a, b, side, uplo)
            for name, value in (("alpha", alpha), ("beta", beta)):
                scalar(name, value, a.dtype, what)
            check_operands(a, b, out, beta, what, wide=True)
            if out is not None and out.shape != b.shape:
                raise LayoutError(
                    f"{what}: out is {out.shape[0]} x {out.shape[1]}; the result is {b.shape[0]} x {b.shape[1]}"
                )
        full = summed(a, alpha)
        if alpha != 0:
            full = copied(full)
            mirror(full, uplo, what == "hemm")
        return matmul(*((full, b) if side == "L" else (b, full)), alpha=alpha, beta=beta, out=out)


def _checked(what: str, a: DistMatrix, b: Any, side: str, uplo: str) -> tuple[str, str]:
    """Return `side` and `uplo` as capitals. Raises an error for operands that do not fit."""
    side, uplo = letter(what, "side", side, "LR"), letter(what, "uplo", uplo, "LU")
    check_numbers(what, a)
    check_square(what, a)
    check_alike(what, a, b, b.shape if isinstance(b, DistMatrix) else None)
    order, name = (b.shape[0], "rows") if side == "L" else (b.shape[1], "columns")
    if order != a.shape[0]:
        raise LayoutError(f"{what}: A is {a.shape[0]} x {a.shape[0]}, and B has {order} {name}: they must be equal")
    return side, uplo
