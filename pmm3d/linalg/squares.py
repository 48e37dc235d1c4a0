"""A A^T, A A^H and A B^T + B A^T of distributed matrices, with half of the operations of the products."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Layout, without_order
from ..product import DistMatrix, matmul
from ..product.checks import check_numbers, check_operands, no_matrix, scalar, signature_of
from ..product.relayout import ascending, summed
from .matrix_triangle import keep_triangle, make_real, mirror, transposed
from .window import letter

LEAST_ROWS = 512
"""Smallest number of rows of a block on the diagonal. Smaller blocks cost more time than they save."""
LEAST_DEPTH = 1024
"""Smallest k for which only half is computed. For a smaller k, a product takes less time than the copies of C."""
MOST_HALVINGS = 3
"""Largest number of times that the rows are halved: then 9/16 of the product is computed. Each halving gathers
operands once more."""


def syrk(
    a: DistMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
    uplo: str = "L",
    full: bool = True,
) -> DistMatrix:
    """C = alpha A A^T + beta C, exactly symmetric, with about half of the operations of the product.

    Parameters
    ----------
    alpha, beta : number
        Factors, as in `matmul`.
    out : DistMatrix, (m, m), or None
        C, in any layout, which is overwritten. Default: a new matrix in Layout.C.
    uplo : str
        "L" or "U": the triangle of C that is computed. If beta is not 0, only this triangle is read, as in BLAS.
    full : bool
        Write the mirror image to the other triangle. False: the other triangle of `out` does not change, and that of a
        new matrix is zero.

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
    the product is computed in full, because copies would take more time than they save.

    Each part of A is copied to the ranks that multiply it (phase "submatrix" of the ledger). For the mirror image, each
    rank receives its part of both triangles of C^T ("redistribute"). Operands are gathered for each halving.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, syrk
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     syrk(a).gather(), syrk(a, uplo="U", full=False).gather().tolist()
    (array([[ 5.,  8.],
           [ 8., 14.]]), [[5.0, 8.0], [0.0, 14.0]])
    """
    return _rank_k("syrk", a, alpha, beta, out, uplo, full)


def herk(
    a: DistMatrix,
    *,
    alpha: float = 1,
    beta: float = 0,
    out: DistMatrix | None = None,
    uplo: str = "L",
    full: bool = True,
) -> DistMatrix:
    """C = alpha A A^H + beta C, exactly Hermitian, with real numbers on the diagonal.

    Parameters
    ----------
    alpha, beta : float
        Factors, which are real.
    out, uplo, full
        See `syrk`. The imaginary part of the diagonal of C is not read.

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
    return _rank_k("herk", a, alpha, beta, out, uplo, full)


def syr2k(
    a: DistMatrix,
    b: DistMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    out: DistMatrix | None = None,
    uplo: str = "L",
) -> DistMatrix:
    """C = alpha (A B^T + B A^T) + beta C, exactly symmetric, with half of the operations of the two products.

    Parameters
    ----------
    b : DistMatrix
        B, of the shape of A.
    alpha, beta : number
        Factors, as in `matmul`.
    out : DistMatrix, (m, m), or None
        C, in any layout, which is overwritten. Default: a new matrix in Layout.C.
    uplo : str
        "L" or "U": the triangle of C that is read if beta is not 0. Both triangles are written.

    Raises
    ------
    LayoutError
        If shapes do not fit.
    DTypeError, DisagreementError
        As `matmul`.

    Notes
    -----
    One product, P = alpha A B^T, and P + P^T. Each rank receives the elements of P^T that it adds (phase "redistribute"
    of the ledger).

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, syr2k
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 3), lambda i, j: i + j)
    ...     syr2k(a, DistMatrix.ones(grid, (2, 3))).gather()
    array([[ 6.,  9.],
           [ 9., 12.]])
    """
    return _rank_2k("syr2k", a, b, alpha, beta, out, uplo)


def her2k(
    a: DistMatrix, b: DistMatrix, *, alpha: complex = 1, beta: float = 0, out: DistMatrix | None = None, uplo: str = "L"
) -> DistMatrix:
    """C = alpha A B^H + conj(alpha) B A^H + beta C, exactly Hermitian, with real numbers on the diagonal.

    Parameters
    ----------
    a, b
        See `syr2k`.
    alpha : number
        Factor of A B^H. The factor of B A^H is its conjugate.
    beta : float
        Factor of C, which is real.
    out, uplo
        See `syr2k`. The imaginary part of the diagonal of C is not read.

    Raises
    ------
    LayoutError, DTypeError, DisagreementError
        As `syr2k`, and DTypeError for a complex beta.

    Notes
    -----
    Operations and messages are those of `syr2k`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, her2k
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 1), lambda i, j: i + 1j, dtype="complex128")
    ...     her2k(a, DistMatrix.ones(grid, (2, 1), dtype="complex128"), alpha=1j).gather()
    array([[-2.+0.j, -2.-1.j],
           [-2.+1.j, -2.+0.j]])
    """
    return _rank_2k("her2k", a, b, alpha, beta, out, uplo)


def _rank_k(
    what: str, a: DistMatrix, alpha: complex, beta: complex, out: DistMatrix | None, uplo: str, full: bool
) -> DistMatrix:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    grid, hermitian = a.grid, what == "herk"
    with grid.engine.guard:
        with grid.collective_call(what, a._signature, signature_of(out), alpha, beta, uplo, full):
            uplo = _checked(what, a, a, alpha, beta, out, uplo, ("alpha", "beta") if hermitian else ())
            if not isinstance(full, bool):
                raise LayoutError(f"{what}: full is True or False; got {full!r}")
        if hermitian and out is not None and beta != 0:
            make_real(out)
        c = _triangle(ascending(summed(a, alpha)), alpha, beta, hermitian, out, uplo, full)
        if full:
            mirror(c, uplo, hermitian)
        elif hermitian:
            make_real(c)
    return c


def _rank_2k(
    what: str, a: DistMatrix, b: DistMatrix, alpha: complex, beta: complex, out: DistMatrix | None, uplo: str
) -> DistMatrix:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    grid, hermitian = a.grid, what == "her2k"
    with grid.engine.guard:
        with grid.collective_call(what, a._signature, signature_of(b), signature_of(out), alpha, beta, uplo):
            uplo = _checked(what, a, b, alpha, beta, out, uplo, ("beta",) if hermitian else ())
        a, b = (ascending(summed(each, alpha)) for each in (a, b))
        product = matmul(a, transposed(b, hermitian), alpha=alpha)
        total = product + transposed(product, hermitian)
        if hermitian:
            make_real(total)
        if out is None:
            return total
        if beta != 0:
            mirror(out, uplo, hermitian)
            total = total.add(out, beta)
        return out.set_submatrix(slice(None), slice(None), total)


def _checked(
    what: str, a: DistMatrix, b: Any, alpha: complex, beta: complex, out: Any, uplo: str, real: tuple[str, ...]
) -> str:
    """Return `uplo` as a capital. Raises an error for wrong arguments. real: names of the factors that must be real."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        scalar(name, value, a.dtype, what)
        if name in real and not isinstance(value, Real):
            raise DTypeError(f"{what}: {name} is {value!r}; it must be real, or the result is not Hermitian")
    check_numbers(what, a)
    uplo = letter(what, "uplo", uplo, "LU")
    check_operands(a, b, out, beta, what)
    if a.shape != b.shape:
        raise LayoutError(
            f"{what}: A is {a.shape[0]} x {a.shape[1]}, B is {b.shape[0]} x {b.shape[1]}: pass equal shapes"
        )
    if out is not None and out.shape != (a.shape[0], a.shape[0]):
        raise LayoutError(f"{what}: out is {out.shape[0]} x {out.shape[1]}; the result is {a.shape[0]} x {a.shape[0]}")
    if out is not None and (layout := without_order(out.layout)) != out.layout:
        raise LayoutError(
            f"{what}: the layout of out has an order of rows. Pass an out in {layout}, and redistribute it"
        )
    return uplo


def _triangle(
    a: DistMatrix, alpha: complex, beta: complex, hermitian: bool, out: DistMatrix | None, uplo: str, full: bool
) -> DistMatrix:
    """Compute one triangle of C = alpha A A^T + beta C. If `full`, the other one is arbitrary; otherwise it does not
    change, or is zero in a new matrix. Collective."""
    rows, depth = a.shape
    halvings = [number for number in range(1, MOST_HALVINGS + 1) if rows >> number >= LEAST_ROWS]
    if depth < LEAST_DEPTH or alpha == 0:
        halvings = []
    if not halvings and (full or out is None):
        whole = matmul(a, transposed(a, hermitian), alpha=alpha, beta=beta, out=out)
        if not full:
            keep_triangle(whole, uplo)
        return whole
    c = type(a).zeros(a.grid, (rows, rows), dtype=a.dtype, layout=Layout.C, library=a.library) if out is None else out
    every = slice(None)
    for below, left_of in _blocks(0, rows, len(halvings)):
        mine, others = (below, left_of) if uplo == "L" else (left_of, below)
        left = a.submatrix(mine, every, Layout.A)
        right = left if mine == others else a.submatrix(others, every, Layout.B.T)
        old = c.submatrix(mine, others, Layout.C) if beta != 0 else None
        block = matmul(left, transposed(right, hermitian), alpha=alpha, beta=beta, out=old)
        if mine == others and not full:
            keep_triangle(block, uplo, c.submatrix(mine, others, block.layout))
        c.set_submatrix(mine, others, block)
    return c


def _blocks(start: int, stop: int, halvings: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of the blocks on and below the diagonal, which are computed."""
    if not halvings:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield slice(middle, stop), slice(start, middle)
    yield from _blocks(start, middle, halvings - 1)
    yield from _blocks(middle, stop, halvings - 1)
