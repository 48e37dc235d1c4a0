"""Triangular and positive definite systems of distributed matrices, by the routines for block-cyclic matrices."""

from __future__ import annotations

from typing import Any

from ..comm import Grid
from ..errors import DTypeError, GridError, LayoutError, NotPositiveDefiniteError, Pmm3dError
from ..layout import without_order
from ..product import DistMatrix
from ..product.checks import check_alike, check_out, check_square, no_matrix, scalar, signature_of
from ..product.pblas import DTYPES
from .panels import replace_where
from .positive_definite import factorised, solved_by_factor
from .triangular import inverted_in_place, solved
from .window import Window, context_of, from_matrix, letter, to_matrix


def trsm(
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
    """X with op(A) X = alpha B, or X op(A) = alpha B, for a triangular A.

    Parameters
    ----------
    a : DistMatrix, square
        A, in any layout.
    b : DistMatrix
        B, in any layout.
    side : str
        "L": op(A) X = alpha B. "R": X op(A) = alpha B.
    uplo : str
        "L" or "U": triangle of A that is read.
    op : str
        "N", "T" or "C": op(A) is A, its transpose, or its conjugate transpose.
    diag : str
        "U": the diagonal of A is not read, and counts as ones. "N": it is read.
    alpha : number
        Factor of B.
    out : DistMatrix or None
        Matrix of the shape of B that is overwritten; it may be `b`. Default: a new matrix in the layout of B.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `matmul`, and LayoutError for other letters, and for an A that is not square. GridError in a dry run.

    Notes
    -----
    A and B are moved to block-cyclic layouts, and X back (phase "redistribute" of the ledger). Operations and messages
    in between are those of `ptrsm`.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, trsm
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[2.0, np.nan], [1.0, 2.0]]))
    ...     trsm(a, DistMatrix.full(grid, (2, 1), 8.0)).gather()
    array([[4.],
           [2.]])
    """
    grid = _grid_of("trsm", a)
    with grid.engine.guard:
        with grid.collective_call(
            "trsm", a._signature, signature_of(b), signature_of(out), side, uplo, op, diag, alpha
        ):
            side, uplo = letter("trsm", "side", side, "LR"), letter("trsm", "uplo", uplo, "LU")
            op, diag = letter("trsm", "op", op, "NTC"), letter("trsm", "diag", diag, "NU")
            _check("trsm", a, b, out, side)
            alpha = scalar("alpha", alpha, a.dtype, "trsm")
        context = context_of(grid)
        x = from_matrix(b, context)
        solved(side, uplo, op, diag, alpha, from_matrix(a, context), x)
        return to_matrix(x, _made_like(b) if out is None else out)


def cholesky(a: DistMatrix, uplo: str = "L", *, out: DistMatrix | None = None) -> DistMatrix:
    """L with A = L L^H, or U with A = U^H U: the Cholesky factor of a positive definite matrix.

    Parameters
    ----------
    a : DistMatrix, square
        A, in any layout.
    uplo : str
        "L" or "U": triangle of A that is read, and the factor that is returned. Its other triangle is zero.
    out : DistMatrix or None
        Matrix of the shape of A that is overwritten; it may be `a`. Default: a new matrix in the layout of A.

    Raises
    ------
    NotPositiveDefiniteError
        If A is not positive definite, or its triangle contains NaN. Its attribute `info` is the order of the first such
        leading minor. `out` is then unchanged.
    LayoutError, DTypeError, GridError, DisagreementError
        As `matmul`, and LayoutError for an A that is not square. GridError in a dry run.

    Notes
    -----
    A is moved to a block-cyclic layout, and the factor back (phase "redistribute" of the ledger). Operations and
    messages in between are those of `ppotrf`.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, cholesky
    >>> with Grid() as grid:
    ...     cholesky(DistMatrix.from_global(grid, np.array([[4.0, 2.0], [2.0, 5.0]]))).gather()
    array([[2., 0.],
           [1., 2.]])
    """
    grid = _grid_of("cholesky", a)
    with grid.engine.guard:
        with grid.collective_call("cholesky", a._signature, signature_of(out), uplo):
            uplo = letter("cholesky", "uplo", uplo, "LU")
            _check("cholesky", a, a, out, "L")
        window = from_matrix(a, context_of(grid))
        info = factorised(window, uplo)
        with grid.collective_call("cholesky", always=True):
            check_info("cholesky: A", info)
        keep_triangle(window, uplo)
        return to_matrix(window, _made_like(a) if out is None else out)


def cholesky_solve(factor: DistMatrix, b: DistMatrix, uplo: str = "L", *, out: DistMatrix | None = None) -> DistMatrix:
    """X with A X = B, from the Cholesky factor of A.

    Parameters
    ----------
    factor : DistMatrix
        Result of `cholesky`. Only its triangle is read.
    b : DistMatrix
        B, in any layout.
    uplo : str
        "L" or "U": triangle of the factor.
    out : DistMatrix or None
        Matrix of the shape of B that is overwritten; it may be `b`. Default: a new matrix in the layout of B.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `trsm`.

    Notes
    -----
    Two triangular systems. Messages: see `trsm`; the matrices are moved once.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, cholesky, cholesky_solve
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[4.0, 2.0], [2.0, 5.0]]))
    ...     cholesky_solve(cholesky(a), DistMatrix.full(grid, (2, 1), 8.0)).gather()
    array([[1.5],
           [1. ]])
    """
    grid = _grid_of("cholesky_solve", factor)
    with grid.engine.guard:
        with grid.collective_call("cholesky_solve", factor._signature, signature_of(b), signature_of(out), uplo):
            uplo = letter("cholesky_solve", "uplo", uplo, "LU")
            _check("cholesky_solve", factor, b, out, "L")
        context = context_of(grid)
        x = from_matrix(b, context)
        solved_by_factor(from_matrix(factor, context), uplo, x)
        return to_matrix(x, _made_like(b) if out is None else out)


def triangular_inverse(a: DistMatrix, uplo: str = "L", diag: str = "N", *, out: DistMatrix | None = None) -> DistMatrix:
    """The inverse of a triangular matrix. Its other triangle is zero.

    Parameters
    ----------
    a : DistMatrix, square
        A, in any layout.
    uplo : str
        "L" or "U": triangle of A that is read.
    diag : str
        "U": the diagonal of A is not read, and counts as ones. "N": it is read.
    out : DistMatrix or None
        Matrix of the shape of A that is overwritten; it may be `a`. Default: a new matrix in the layout of A.

    Raises
    ------
    Pmm3dError
        If an element on the diagonal is 0. `out` is then unchanged.
    LayoutError, DTypeError, GridError, DisagreementError
        As `trsm`.

    Notes
    -----
    A is moved to a block-cyclic layout, and its inverse back (phase "redistribute" of the ledger). Operations and
    messages in between are those of `ptrtri`.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, triangular_inverse
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_global(grid, np.array([[2.0, np.nan], [1.0, 2.0]]))
    ...     triangular_inverse(a).gather()
    array([[ 0.5 ,  0.  ],
           [-0.25,  0.5 ]])
    """
    grid = _grid_of("triangular_inverse", a)
    with grid.engine.guard:
        with grid.collective_call("triangular_inverse", a._signature, signature_of(out), uplo, diag):
            uplo, diag = (letter("triangular_inverse", *each) for each in (("uplo", uplo, "LU"), ("diag", diag, "NU")))
            _check("triangular_inverse", a, a, out, "L")
        window = from_matrix(a, context_of(grid))
        info = inverted_in_place(window, uplo, diag)
        with grid.collective_call("triangular_inverse", always=True):
            if info:
                raise Pmm3dError(
                    f"triangular_inverse: A is singular: element {info} of its diagonal, counted from 1, is 0"
                )
        keep_triangle(window, uplo, unit=diag == "U")
        return to_matrix(window, _made_like(a) if out is None else out)


def check_info(what: str, info: int) -> None:
    """Raise NotPositiveDefiniteError for the INFO of a Cholesky factorisation that is not 0."""
    if info:
        error = NotPositiveDefiniteError(
            f"{what} is not positive definite: its leading minor of order {info} is not. Check that it is symmetric "
            "(Hermitian) and has no NaN. If rounding is the reason, add a small multiple of the identity, as "
            "add_identity does"
        )
        error.info = info
        raise error


def keep_triangle(window: Window, uplo: str, unit: bool = False) -> None:
    """Write zeros to the other triangle of a window, and with `unit` ones to its diagonal. No messages."""
    for rows, cols, i, j in window.own():
        here, i = window.array[rows, cols], i[:, None]
        replace_where(window.library, here, 0, i < j if uplo == "L" else i > j)
        if unit:
            replace_where(window.library, here, 1, i == j)


def _grid_of(what: str, a: Any) -> Grid:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    return a.grid


def _made_like(matrix: DistMatrix) -> DistMatrix:
    """A new matrix in the layout of this one, without partial sums and without an order of rows."""
    return type(matrix).empty(
        matrix.grid,
        matrix.shape,
        dtype=matrix.dtype,
        layout=without_order(matrix.layout.summed),
        library=matrix.library,
        order=matrix.order,
    )


def _check(what: str, a: DistMatrix, b: Any, out: Any, side: str) -> None:
    """Raise an error for operands that do not fit. b: B, or A if there is none."""
    check_no_dry_run(what, a)
    for matrix in (a, b):
        check_alike(what, a, matrix, matrix.shape if isinstance(matrix, DistMatrix) else None)
    check_square(what, a)
    if a.dtype not in DTYPES:
        raise DTypeError(f"{what}: matrices are of {', '.join(DTYPES)}, as LAPACK's; these are {a.dtype}")
    order, name = (b.shape[0], "rows") if side == "L" else (b.shape[1], "columns")
    if order != a.shape[0]:
        raise LayoutError(f"{what}: A is {a.shape[0]} x {a.shape[0]}, and B has {order} {name}: they must be equal")
    if out is not None:
        check_alike(what, b, out, name="out")
        check_out(what, out)
        if out.layout.on(out.grid.shape).sums:
            raise LayoutError(f"{what}: out has partial sums, {out.layout}: pass an out in out.layout.summed")


def check_no_dry_run(what: str, a: DistMatrix) -> None:
    """Raise GridError for a matrix of a dry run."""
    if a.grid.dry_run is not None:
        raise GridError(
            f"{what}: a dry run has no block-cyclic matrices. Leave this step out of it; with the same numbers of "
            "operations, matmul(a, a) costs about as much"
        )
