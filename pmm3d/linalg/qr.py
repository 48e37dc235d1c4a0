"""QR factorisation of tall matrices by products and Cholesky factors: CholeskyQR2, and with shifts."""

from __future__ import annotations

from math import frexp, inf, isfinite, ldexp, sqrt

import numpy as np

from ..arrays import lapack
from ..errors import DTypeError, LayoutError, NotPositiveDefiniteError, Pmm3dError
from ..layout import Layout, without_order
from ..product import DistMatrix
from ..product.checks import no_matrix
from ..product.pblas import DTYPES
from .panels import solve_in_place
from .positive_definite import factorised
from .rank_k import rank_k, rank_k_terms
from .squares import herk
from .systems import check_no_dry_run, keep_triangle
from .triangular import solved
from .window import Window, context_of, from_matrix, gemm, to_matrix

GATHERED = 1024
"""Largest number of columns for which each rank factorises the whole Gram matrix."""
NEAR = 0.5
"""Largest |A^H A - I|_F at which one pass without a shift makes the columns orthogonal to rounding."""
MOST_PASSES = 12


def cholesky_qr(a: DistMatrix, *, shifted: bool | str = "auto") -> tuple[DistMatrix, DistMatrix]:
    """A = Q R of a tall matrix, by CholeskyQR2, with shifted passes first if A is ill-conditioned.

    Parameters
    ----------
    a : DistMatrix, (m, n) with m >= n
        A, in any layout.
    shifted : bool or str
        "auto" (default): a pass whose A^H A has no Cholesky factor is repeated with a shift. True: the first pass has a
        shift. False: no pass has one.

    Returns
    -------
    q : DistMatrix, (m, n)
        Q with orthonormal columns, in the layout of A.
    r : DistMatrix, (n, n)
        R, upper triangular with a positive diagonal, in Layout.C.

    Raises
    ------
    NotPositiveDefiniteError
        If the columns of A are linearly dependent to rounding; and with `shifted=False`, for a condition of A above
        about u^(-1/2), with the unit roundoff u.
    Pmm3dError
        If A contains NaN or infinity, or its norm is infinite.
    LayoutError
        If m < n.
    DTypeError, GridError, DisagreementError
        As `cholesky`.

    Notes
    -----
    A pass is G = A^H A, G = R^H R, Q = A R^-1, and |Q^H Q - I| is about u c^2 for the condition c of A. Passes are
    repeated on Q until |A^H A - I| before a pass is at most 1/2: usually two passes. A shifted pass factorises G + s I,
    with s = 11 (m n + n (n + 1)) u |G|_F, and reduces the condition. With fewer than 1024 columns a pass has 3 m n^2
    operations, because G is computed in full, and with more about 2 m n^2. If |G|_F overflows or underflows, G is
    computed again of A times a power of 2.

    With up to 1024 columns, an A whose columns are divided is moved, so that its rows are divided over all ranks. Any
    other A stays where it is, also if few ranks have it. Then no row is sent: each pass reduces and gathers the n x n
    elements of G, and each rank factorises G. With more columns, A is moved to a block-cyclic layout, and G is
    factorised there, as by `ppotrf` and `ptrsm`.

    Sources: Y. Yamamoto et al., ETNA 44, 306 (2015); T. Fukaya et al., SIAM J. Sci. Comput. 42, A477 (2020).

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, cholesky_qr
    >>> with Grid() as grid:
    ...     q, r = cholesky_qr(DistMatrix.from_function(grid, (4, 1), lambda i, j: 2 + 0 * i))
    ...     q.gather().T, r.gather()
    (array([[0.5, 0.5, 0.5, 0.5]]), array([[4.]]))
    """
    if not isinstance(a, DistMatrix):
        raise Pmm3dError(no_matrix("a", a, "cholesky_qr"))
    grid = a.grid
    with grid.engine.guard:
        with grid.collective_call("cholesky_qr", a._signature, shifted):
            check_no_dry_run("cholesky_qr", a)
            if a.dtype not in DTYPES:
                raise DTypeError(f"cholesky_qr: matrices are of {', '.join(DTYPES)}; this one is {a.dtype}")
            if a.shape[0] < a.shape[1]:
                raise LayoutError(
                    f"cholesky_qr: A is {a.shape[0]} x {a.shape[1]}; it needs at least as many rows as columns. To "
                    "factorise its rows, pass a.H"
                )
            if not isinstance(shifted, bool) and shifted != "auto":
                raise LayoutError(f'cholesky_qr: shifted is "auto", True or False; got {shifted!r}')
        layout = without_order(a.layout.summed)
        passes = Slabs(a, layout) if a.shape[1] <= GATHERED else Cyclic(a)
        away, size = passes.gram()
        smallest = sqrt(np.finfo(a.dtype).tiny / np.finfo(a.dtype).eps)
        factor = 1.0
        if not smallest <= size < inf and (factor := _power_of_2(a)) != 1:
            passes.scale(factor)
            away, size = passes.gram()
        _orthogonalise(passes, shifted, away, size)
        q, r = passes.results(layout)
        return q, r if factor == 1 else r.scale(1 / factor)


def _power_of_2(a: DistMatrix) -> float:
    """A power of 2 with which A has a norm near 1; or 1 if A is 0. Collective."""
    size = a.norm()
    with a.grid.collective_call("cholesky_qr", always=True):
        if not isfinite(size):
            raise Pmm3dError(
                f"cholesky_qr: the norm of A is {size}: elements of A are NaN or infinite, or the norm overflows. "
                "Check A, or scale it"
            )
    most = np.finfo(a.dtype).maxexp - 2
    return ldexp(1.0, max(-most, min(most, -frexp(size)[1]))) if size else 1.0


def _orthogonalise(passes: Slabs | Cyclic, shifted: bool | str, away: float, size: float) -> None:
    """Do passes until the columns are orthonormal. away, size: those of the first Gram matrix. Collective."""
    m, n = passes.shape
    unit = float(np.finfo(passes.dtype).eps) / 2
    shift = shifted is True
    for _ in range(MOST_PASSES):
        added = 11 * (m * n + n * (n + 1)) * unit * size
        info = passes.divide(added if shift else 0.0)
        if info and not shift and shifted is not False:
            shift = True
            info = passes.divide(added)
        if info:
            break
        if away <= NEAR and not shift:
            return
        shift = False
        away, size = passes.gram()
    with passes.grid.collective_call("cholesky_qr", always=True):
        error = NotPositiveDefiniteError(
            f"cholesky_qr: A^H A is not positive definite in {passes.dtype}: the columns of A are linearly dependent "
            "to rounding" + ('. With shifted="auto" a larger condition is possible' if shifted is False else "")
        )
        if info:
            error.info = info
        raise error


class Slabs:
    """Passes on slabs of rows: each rank has the whole Gram matrix."""

    def __init__(self, a: DistMatrix, layout: Layout):
        self.grid, self.dtype, self.shape = a.grid, a.dtype, a.shape
        if layout.cols:
            layout = Layout(("z", "y", "x"))
        self._q = a.redistribute(layout)  # a copy
        self._r = np.eye(a.shape[1], dtype=a.dtype)

    def scale(self, factor: float) -> None:
        self._q.scale(factor)

    def gram(self) -> tuple[float, float]:
        """Compute the Gram matrix G; return |G - I|_F and |G|_F."""
        gram = herk(self._q.H)
        self._gram = np.asarray(gram.library.to_numpy(gram.gather()))
        return float(np.linalg.norm(self._gram - np.eye(len(self._gram)))), float(np.linalg.norm(self._gram))

    def divide(self, shift: float) -> int:
        """A = A R^-1, with G + shift I = R^H R. Return INFO: if it is not 0, A is unchanged."""
        n, factor = len(self._gram), np.array(self._gram, order="F")
        factor[np.diag_indices(n)] += shift
        info = lapack.potrf("U", factor)
        most = int(self.grid.comm.largest(n + 1 - info if info else 0))
        if most:
            return n + 1 - most
        library, slab = self._q.library, self._q.memory
        factor = np.triu(factor)
        if 0 not in slab.shape:
            solve_in_place(library, factor, slab, False, False, False, 1, self.grid.workspace)
        self._q.fills += 1
        self._r = np.triu(factor @ self._r)
        return 0

    def results(self, layout: Layout) -> tuple[DistMatrix, DistMatrix]:
        r = DistMatrix.from_global(self.grid, self._q.library.from_numpy(self._r, self.dtype), layout=Layout.C)
        return (self._q if self._q.layout == layout else self._q.redistribute(layout)), r


class Cyclic:
    """Passes on a block-cyclic copy: the Gram matrix is divided, and factorised by all ranks."""

    def __init__(self, a: DistMatrix):
        self.grid, self.dtype, self.shape = a.grid, a.dtype, a.shape
        self._matrix = a
        self._q = from_matrix(a, context_of(a.grid))
        self._r: Window | None = None

    def scale(self, factor: float) -> None:
        for rows, cols, _, _ in self._q.own():
            self._q.array[rows, cols] *= factor

    def gram(self) -> tuple[float, float]:
        """Compute the Gram matrix G; return |G - I|_F and |G|_F."""
        n, q = self.shape[1], self._q
        made = q.descriptor.context.descriptor(n, n, q.descriptor.mb, q.descriptor.nb)
        array = q.library.empty((made.local_cols, max(1, made.local_rows)), self.dtype).T
        self._gram = Window(array, made, 0, 0, n, n)
        rank_k("U", rank_k_terms("C", 1, q, q, True), 0, self._gram, True)
        sums = np.zeros(2)
        for rows, cols, i, j in self._gram.own():
            above, on = i[:, None] < j, i[:, None] == j
            own = np.where(above | on, q.library.to_numpy(self._gram.array[rows, cols]), 0)
            weights = 1.0 + above  # an element above the diagonal has a mirror image
            sums += [(weights * abs(each) ** 2).sum() for each in (own - on, own)]
        away, size = np.sum(self.grid.comm.allgather(sums), axis=0)
        return sqrt(away), sqrt(size)

    def divide(self, shift: float) -> int:
        """A = A R^-1, with G + shift I = R^H R. Return INFO: if it is not 0, A is unchanged."""
        gram, library = self._gram.like(), self._q.library
        gram.array[...] = self._gram.array
        for rows, cols, i, j in gram.own():
            gram.array[rows, cols] += shift * library.from_numpy((i[:, None] == j).astype(gram.dtype), gram.dtype)
        if info := factorised(gram, "U"):
            return info
        keep_triangle(gram, "U")
        solved("R", "U", "N", "N", 1, gram, self._q)
        if self._r is not None:
            product = gram.like()
            gemm("N", "N", 1, gram, self._r, 0, product)
            keep_triangle(product, "U")
            gram = product
        self._r = gram
        return 0

    def results(self, layout: Layout) -> tuple[DistMatrix, DistMatrix]:
        a, (m, n) = self._matrix, self.shape
        assert self._r is not None
        q, r = (
            type(a).empty(a.grid, shape, dtype=a.dtype, layout=kind, library=a.library, order=order)
            for shape, kind, order in (((m, n), layout, a.order), ((n, n), Layout.C, "C"))
        )
        return to_matrix(self._q, q), to_matrix(self._r, r)
