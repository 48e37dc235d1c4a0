"""Orthogonal factors and signs of matrices by Newton-Schulz iterations, which consist of products."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from numbers import Real
from typing import NamedTuple

import numpy as np

from ..arrays import by_rows
from ..comm import Grid
from ..errors import DTypeError, Pmm3dError
from ..layout import LOW_PRECISION, Layout, natural
from .checks import check_numbers, check_out, check_square, no_matrix, signature_of
from .matmul_plan import matmul
from .matrix import DistMatrix
from .multiply import plan_for
from .reductions import diagonals
from .relayout import summed

Coefficients = tuple[float, float, float]

CUBIC: Coefficients = (1.5, -0.5, 0.0)
"""Coefficients of Newton-Schulz. Singular values in (0, 3^(1/2)) converge to 1, finally quadratically."""
QUINTIC: Coefficients = (1.875, -1.25, 0.375)
"""Coefficients of the next order. Singular values converge cubically."""
MUON: Coefficients = (3.4445, -4.7750, 2.0315)
"""Coefficients of K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks" (2024).

A step multiplies small singular values by 3.4. Values in 0.68 to 1.2 remain in this range, and do not converge."""
SMALLEST = 1e-7
"""Smallest number by which a matrix is divided to normalize it."""
SIGNS = ", or has eigenvalues that are far from real, or no eigenvectors that are well apart"


class Polar(NamedTuple):
    """A = U H, the result of `polar`.

    Attributes
    ----------
    u : DistMatrix
        U: its columns are orthonormal, or its rows if A has more columns than rows.
    h : DistMatrix
        H: Hermitian and positive semidefinite.
    errors : list of float
        |X^H X - I|_F before each step; the last one is that of U.
    """

    u: DistMatrix
    h: DistMatrix
    errors: list[float]


class Sign(NamedTuple):
    """The result of `matrix_sign`.

    Attributes
    ----------
    sign : DistMatrix
        S, with S^2 = I. It commutes with A.
    errors : list of float
        |X^2 - I|_F before each step; the last one is that of S.
    """

    sign: DistMatrix
    errors: list[float]


def newton_schulz(a: DistMatrix, coefficients: Sequence[Coefficients], *, out: DistMatrix | None = None) -> DistMatrix:
    """An approximate orthogonal factor of A by a given number of Newton-Schulz steps.

    Parameters
    ----------
    a : DistMatrix, (m, n)
        A, in any layout. A layout that `matmul` takes without redistribution costs least.
    coefficients : sequence of (float, float, float)
        (p, q, r) of each step X = X (p I + q X^H X + r (X^H X)^2). The first X is A / |A|_F.
    out : DistMatrix, (m, n), or None
        Matrix that is overwritten; it may be `a`. Default: a new matrix in the layout of A.

    Returns
    -------
    DistMatrix, (m, n)
        The last X, bitwise the same on all ranks and in each run.

    Raises
    ------
    DTypeError
        For float16 and bfloat16, in which X^H X has too few digits.
    Pmm3dError
        For coefficients that are not triples of numbers. Other errors: see `matmul`.

    Notes
    -----
    A step makes three products: 2 s^2 (2 l + s) operations, where s = min(m, n) and l = max(m, n). If r is 0, it makes
    two products. Messages are those of `matmul`, in its phases of the ledger; |A|_F is phase "norm". Transposes of wide
    matrices are multiplied; they are views. The work memory of the grid holds two matrices like A, and three of s x s,
    over all ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, newton_schulz
    >>> from pmm3d.product.orthogonal import MUON, QUINTIC
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (3, 2), lambda i, j: 1.0 + i * j)
    ...     u = newton_schulz(a, [MUON] * 3 + [QUINTIC] * 4).gather()
    ...     np.allclose(u.T @ u, np.eye(2), atol=1e-6)
    True
    """
    grid = _grid_of("newton_schulz", a)
    with grid.collective_call("newton_schulz", signature_of(a), signature_of(out), list(coefficients)):
        _check_type("newton_schulz", a)
        _check_coefficients("newton_schulz", coefficients)
        if not coefficients:
            raise Pmm3dError("newton_schulz: no coefficients, so no step: pass a triple (p, q, r) for each")
        if out is None:
            out = type(a)(a.grid, a.library.empty(a.box.shape, a.dtype), a.shape, a.layout.summed)
        elif not isinstance(out, DistMatrix) or out.shape != a.shape:
            raise Pmm3dError(f"newton_schulz: out is {out!r}; it must be a DistMatrix of {a.shape[0]} x {a.shape[1]}")
        check_out("newton_schulz", out)
    a, last = summed(a), len(coefficients) - 1
    factor = 1 / max(_checked_norm("newton_schulz", a), SMALLEST)
    x = _times(a, factor, out if a is out and last else None)
    x, target = (x.T, out.T) if a.shape[0] < a.shape[1] else (x, out)
    for index, each in enumerate(coefficients):
        x = _applied(x, _product(x.H, x), each, target if index == last else None)
    return out


def polar(a: DistMatrix, *, first: Sequence[Coefficients] = (), most: int = 120) -> Polar:
    """A = U H, the polar decomposition, by Newton-Schulz steps to the precision of the type.

    Parameters
    ----------
    a : DistMatrix, (m, n)
        A, of full rank, in any layout.
    first : sequence of (float, float, float)
        Coefficients of the first steps, as of `newton_schulz`. `[MUON] * 6` multiplies small singular values by 3.4 in
        each step, for three products. The other steps, X (3 I - X^H X) / 2, multiply them by 1.5, for two products.
    most : int
        Largest number of steps.

    Returns
    -------
    Polar
        (u, h, errors): U in the layout of A, H in that of a product, and the error before each step.

    Raises
    ------
    Pmm3dError
        If the steps do not converge, because A is singular or not finite. Also in a dry run, which has
        no values.
    DTypeError
        For float16 and bfloat16.

    Notes
    -----
    The first X is A / |A|_F, divided by |X^H X|_F^(1/2): no singular value is above 1. The iteration ends one step
    after |X^H X - I|_F is below the square root of the type's epsilon, because that step squares the error. It takes
    about log(c) / log(1.5) + 5 steps for a condition number c. Messages are those of `matmul`.

    Source: N. Higham, "Functions of Matrices", SIAM 2008, chapter 8.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, polar
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 2), lambda i, j: (3.0 + j) * (i != j))
    ...     u, h, errors = polar(a)
    ...     u.gather().round(9) + 0.0, h.gather().round(9) + 0.0
    (array([[0., 1.],
           [1., 0.]]), array([[3., 0.],
           [0., 4.]]))
    """
    x, errors = _iterated("polar", a, first, most)
    u = x.redistribute(a.layout.summed)
    h = matmul(u.H, a)
    return Polar(u, (h + h.H).scale(0.5), errors)


def matrix_sign(a: DistMatrix, *, first: Sequence[Coefficients] = (), most: int = 120) -> Sign:
    """S = A (A^2)^(-1/2), the sign of a square matrix, by Newton-Schulz steps X (3 I - X^2) / 2.

    Parameters
    ----------
    first, most
        See `polar`.

    Returns
    -------
    Sign
        (sign, errors): S in the layout of A, and the error before each step.

    Raises
    ------
    Pmm3dError, DTypeError
        As `polar`.

    Notes
    -----
    Scale, end and messages are those of `polar`, with X^2 in place of X^H X. The steps converge if A is Hermitian and
    not singular: S has the eigenvectors of A, and the signs of its eigenvalues. For other matrices they converge if all
    scaled eigenvalues are real, or close to +1 or -1.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, matrix_sign
    >>> with Grid() as grid:
    ...     a = DistMatrix.from_function(grid, (2, 2), lambda i, j: 3.0 * j - 4 * i * j + 2 * (i + j == 0))
    ...     matrix_sign(a).sign.gather().round(9)
    array([[ 1.,  2.],
           [ 0., -1.]])
    """
    x, errors = _iterated("matrix_sign", a, first, most)
    return Sign(x.redistribute(a.layout.summed), errors)


def _grid_of(what: str, a: object) -> Grid:
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, what))
    return a.grid


def _check_type(what: str, a: DistMatrix) -> None:
    check_numbers(what, a)
    if a.dtype in LOW_PRECISION:
        raise DTypeError(f"{what}: {a.dtype} has too few digits for the sums of X^H X; make a float32 matrix of it")


def _check_coefficients(what: str, coefficients: Sequence[Coefficients]) -> None:
    for each in coefficients:
        if not isinstance(each, tuple) or len(each) != 3 or not all(isinstance(number, Real) for number in each):
            raise Pmm3dError(
                f"{what}: the coefficients of a step are a tuple of three numbers, (p, q, r); got {each!r}"
            )


def _iterated(what: str, a: DistMatrix, first: Sequence[Coefficients], most: int) -> tuple[DistMatrix, list[float]]:
    """Limit X of `polar` or `matrix_sign`, in work memory, and the error before each step. Collective."""
    grid, is_polar = _grid_of(what, a), what == "polar"
    with grid.collective_call(what, signature_of(a), list(first), most):
        _check_type(what, a)
        _check_coefficients(what, first)
        if grid.dry_run is not None:
            raise Pmm3dError(
                f"{what}: the number of steps depends on values, which Grid.dry does not have. Use "
                "newton_schulz, whose number of steps is an argument"
            )
        natural(most, f"{what}: most is a number of steps, at least 1", 1, Pmm3dError)
        if not is_polar:
            check_square(what, a)
    wide = is_polar and a.shape[0] < a.shape[1]
    a = summed(a.T if wide else a)
    norm = _checked_norm(what, a)
    x, errors, enough = _times(a, 1 / norm if norm else 1.0), list[float](), sqrt(np.finfo(a.dtype).eps)
    for step in range(most + 1):
        squared = _product(x.H if is_polar else x, x)
        if step == 0 and (bound := squared.norm()) > 0:
            _times(x, bound**-0.5, out=x)
            _times(squared, 1 / bound, out=squared)
        errors.append(_plus(-1, _times(squared, 1)).norm())
        if not isfinite(errors[-1]) or (step and errors[-2] < enough):
            break
        if step < most:
            x = _applied(x, squared, first[step] if step < len(first) else CUBIC)
    with a.grid.collective_call(what, always=True):
        if not errors[-1] < enough:
            raise Pmm3dError(
                f"{what}: |X^2 - I|_F is {errors[-1]:.3g} after {len(errors) - 1} steps: A is singular, "
                "or nearly so" + SIGNS * (not is_polar)
            )
    return x.T if wide else x, errors


def _checked_norm(what: str, a: DistMatrix) -> float:
    """Return |A|_F. Raises Pmm3dError, on every rank, if the type cannot represent its inverse. Collective.

    Singular matrices are detected by the iteration, not here.
    """
    norm = a.norm()
    largest = float(np.finfo("float32" if a.dtype in LOW_PRECISION else a.dtype).max)
    with a.grid.collective_call(what, always=True):
        if norm > largest or 0 < norm < 1 / largest:
            raise Pmm3dError(
                f"{what}: |A|_F is {norm:.3g}, out of the range in which {a.dtype} has an inverse of it: "
                "scale A by a number first, which changes neither U nor the sign"
            )
    return norm


def _applied(
    x: DistMatrix, squared: DistMatrix, coefficients: Coefficients, out: DistMatrix | None = None
) -> DistMatrix:
    """Return X (p I + q S + r S^2), in `out` or in work memory. If r is 0, S is overwritten. Collective."""
    p, q, r = coefficients
    factor = _product(squared, _plus(q, _times(squared, r))) if r else _times(squared, q, out=squared)
    _plus(p, factor)
    return _product(x, factor) if out is None else matmul(x, factor, out=out)


def _product(a: DistMatrix, b: DistMatrix) -> DistMatrix:
    """Return A B, in work memory. Collective."""
    layout = plan_for(a, b, None, None, None).c_layout
    return matmul(a, b, out=_room(a, (a.shape[0], b.shape[1]), layout))


def _plus(number: float, a: DistMatrix) -> DistMatrix:
    """Add `number` to the diagonal of A in place, and return A."""
    for diagonal, _ in diagonals(a):
        diagonal[...] += number
    return a


def _times(a: DistMatrix, factor: float, out: DistMatrix | None = None) -> DistMatrix:
    """Return factor A, in `out` or in work memory."""
    room = _room(a, a.shape, a.layout) if out is None else out
    by_rows(a.library, lambda part: factor * part, room.memory, a.local, name="scale")
    return room


def _room(like: DistMatrix, shape: tuple[int, int], layout: Layout) -> DistMatrix:
    """Matrix in work memory, with arbitrary elements."""
    grid = like.grid
    local = grid.workspace.array(layout.box(shape, grid.shape, grid.coords).shape, like.dtype, like.library)
    return type(like)(grid, local, shape, layout)
