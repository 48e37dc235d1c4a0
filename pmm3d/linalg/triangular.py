"""Systems of equations with a triangular matrix, and its inverse, as ScaLAPACK's p?trsm and p?trtri."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..layout.foreign import Spread
from ..product import Descriptor
from ..product.checks import scalar
from .panels import PanelPlan, View, below_diagonal, inverted, on_diagonal_and_below, planned
from .window import Operand, Window, checked, letter


def ptrsm(
    side: str,
    uplo: str,
    transa: str,
    diag: str,
    m: int,
    n: int,
    alpha: complex,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    b: Array,
    ib: int,
    jb: int,
    descb: Descriptor,
) -> None:
    """Solve op(A) X = alpha B, or X op(A) = alpha B, with a triangular A, as ScaLAPACK's p?trsm. X overwrites B.

    Parameters
    ----------
    side : str
        "L": op(A) X = alpha B. "R": X op(A) = alpha B.
    uplo : str
        "L" or "U": the triangle of A that is read.
    transa : str
        "N", "T" or "C": op(A) is A, its transpose, or its conjugate transpose.
    diag : str
        "N", or "U": the diagonal of A is 1, and is not read.
    m, n : int
        B is m x n. A is m x m or n x n.
    alpha : number
        Factor of B. If it is 0, neither A nor B is read.
    a, ia, ja, desca, b, ib, jb, descb
        A and B, as in `pgemm`. They may be disjoint parts of one matrix.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`. A singular A is not an error: X then has infinite elements or NaN, as in BLAS.

    Notes
    -----
    Collective over the context. For each panel of up to 256 rows of X, the block of A on the diagonal is sent to all
    ranks, and the rows of B are dealt over the process grid, solved, and sent to the processes that subtract their
    product with A. On Pr x Pc processes (P = Pr Pc) each rank receives about m^2 / (2 Pr) + 256 m elements of A,
    m n / P of B, and m n / Pc of X (with "R": n^2 / (2 Pc) + 256 n, m n / P, and m n / Pr). m^2 n (or m n^2)
    operations in all. The context caches the messages of a size.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptrsm
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square, column = context.descriptor(2, 2, 2, 2), context.descriptor(2, 1, 2, 2)
    ...     a, b = square.empty(), column.empty()
    ...     a[...] = [[2, 0], [1, 2]][: a.shape[0]] if a.size else 0
    ...     b[...] = 8
    ...     ptrsm("L", "L", "N", "N", 2, 1, 1, a, 1, 1, square, b, 1, 1, column)
    ...     b.tolist() in ([[]], [[4], [2]])
    True
    """
    of_a = n if isinstance(side, str) and side.upper() == "R" else m
    operands = Operand("A", a, ia, ja, desca, of_a, of_a), Operand("B", b, ib, jb, descb, m, n, True)
    with checked("ptrsm", operands, side, uplo, transa, diag, alpha) as (triangle, x):
        side, uplo, transa, diag = [
            letter("ptrsm", name, value, allowed)
            for name, value, allowed in (
                ("side", side, "LR"), ("uplo", uplo, "LU"), ("transa", transa, "NTC"), ("diag", diag, "NU"))
        ]  # fmt: skip
        alpha = scalar("alpha", alpha, triangle.dtype, "ptrsm")
    solved(side, uplo, transa, diag, alpha, triangle, x)


def ptrtri(uplo: str, diag: str, n: int, a: Array, ia: int, ja: int, desca: Descriptor) -> int:
    """A = A^-1 of a triangular matrix, in place, as ScaLAPACK's p?trtri.

    Parameters
    ----------
    uplo : str
        "L" or "U": the triangle of A that is read and overwritten. The other one is not accessed.
    diag : str
        "N", or "U": the diagonal of A is 1, and is neither read nor written.
    n : int
        Number of rows and columns of A(ia:, ja:).
    a, ia, ja, desca
        A, as in `pgemm`.

    Returns
    -------
    int
        0. If an element on the diagonal is 0, the number of the first one, from 1 on; A is then unchanged. The same on
        all ranks.

    Raises
    ------
    LayoutError, DTypeError, DisagreementError
        As `pgemm`.

    Notes
    -----
    Collective over the context. n^3 / 3 operations, panel by panel, as in `ptrsm`: each panel changes the rectangle
    beside the diagonal, so no operation is done in vain. Each rank receives about
    n^2 / 2 (1 / Pr + 1 / Pc + 1 / P) + 256 n elements on Pr x Pc processes (P = Pr Pc).

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptrtri
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a = square.empty()
    ...     a[...] = [[2, 0], [1, 2]][: a.shape[0]] if a.size else 0
    ...     info = ptrtri("L", "N", 2, a, 1, 1, square)
    ...     info, a.tolist() in ([[]], [[0.5, 0], [-0.25, 0.5]])
    (0, True)
    """
    with checked("ptrtri", [Operand("A", a, ia, ja, desca, n, n, True)], uplo, diag) as (window,):
        uplo, diag = letter("ptrtri", "uplo", uplo, "LU"), letter("ptrtri", "diag", diag, "NU")
    return inverted_in_place(window, uplo, diag)


def solved(side: str, uplo: str, op: str, diag: str, alpha: complex, triangle: Window, b: Window) -> None:
    """B = alpha op(A)^-1 B, or alpha B op(A)^-1, of windows. The arguments are checked. Collective."""
    turned = side == "R"  # X op(A) = B if and only if op(A)^T X^T = B^T
    a, x = View(triangle, (op == "N") == turned), View(b, turned)
    if 0 in x.shape:
        return
    if alpha == 0:
        for rows, cols, _, _ in b.own():
            b.array[rows, cols] = 0
        return
    forward = (uplo == "L") == ((op == "N") != turned)
    plan = planned(x, ("trsm", a.cyclic, forward), lambda: TriangularSolve(a, x, forward))
    plan(a.array, x.array, alpha, op == "C", diag == "U")


def inverted_in_place(window: Window, uplo: str, diag: str) -> int:
    """Overwrite a triangle of a window with its inverse. Return INFO. Collective."""
    view = View(window, uplo == "U")  # the inverse of A^T is the transpose of that of A
    return planned(view, "trtri", lambda: TriangularInverse(view))(view.array, diag == "U")


class TriangularSolve(PanelPlan):
    """X = A^-1 B, with a triangular A: right-looking, from the first panel of rows on, or from the last one back.

    forward   whether A is lower triangular
    """

    def __init__(self, a: View, b: View, forward: bool):
        super().__init__(b, b.shape[0])
        self._forward, n, x = forward, b.shape[1], self.cyclic
        dealt, self._dealt = self.dealt(1)
        self.take(self.whole(self.width), dealt, Spread(x, 0, 0, self.width), Spread(x, 1, 1, self.width))
        self.steps = list[Any]()
        for low, high in self.panels if forward else self.panels[::-1]:
            width = high - low
            rest, end = (high, self.size) if forward else (0, low)
            slab = dealt.sub(0, 0, width, n)
            pairs = list[Any]([(a.cyclic.sub(low, low, width, width), self.whole(width))])
            pairs.append((x.sub(low, 0, width, n), slab))
            if end > rest:
                below = Spread(x.sub(rest, 0, end - rest, n), 0, 0, width)
                pairs.append((a.cyclic.sub(rest, low, end - rest, width), below))
            deal, back = self.move(*pairs), self.move((slab, Spread(x, 1, 1, width)))
            self.steps.append((low, high, rest, end, deal, back))

    def __call__(self, a: Array, b: Array, alpha: complex, conjugated: bool, unit: bool) -> None:
        cols, mine = self.cols.within(0, self.cyclic.shape[1]), self._dealt.within(0, self.cyclic.shape[1])
        conjugated = conjugated and self.dtype.startswith("complex")
        with self.arrays() as (diagonal, slab, of_a, of_x):
            for low, high, rest, end, deal, back in self.steps:
                width = high - low
                whole, part = diagonal[:width, :width], slab[:width]
                self.send(deal, (a, whole), (b, part), *([(a, of_a[:, :width])] if end > rest else []))
                triangle = self.library.to_numpy(whole)
                self.solve(triangle.conj() if conjugated else triangle, part[:, mine], True, self._forward, unit, alpha)
                self.send(back, (part, of_x[:width]))
                for here, there in self.rows.runs(low, high):
                    b[here, cols] = of_x[there, cols]
                rows = self.rows.within(rest, end)
                factor = of_a[rows, :width]
                if conjugated and end > rest:
                    self.library.conjugate_in_place(factor)
                self.multiply(factor, of_x[:width, cols], b[rows, cols], -1, alpha)
                alpha = 1


class TriangularInverse(PanelPlan):
    """A = A^-1, of the lower triangle of a view.

    L11 is the diagonal block of a panel, L10 is left of it, L21 below it, and L20 below L10. After the panels before,
    L10 and L20 contain -L10 L00^-1 and -L20 L00^-1. Then L21 = -L21 L11^-1, L20 += L21 L10, L10 = L11^-1 L10, and
    L11 = L11^-1.
    """

    def __init__(self, view: View):
        super().__init__(view, view.shape[0])
        cyclic, size = self.cyclic, self.size
        dealt, self._dealt = self.dealt(0)
        self.take(self.whole(self.width), dealt, Spread(cyclic, 0, 0, self.width), Spread(cyclic, 1, 1, self.width))
        self.steps = list[Any]()
        for low, high in self.panels:
            width, rest = high - low, size - high
            pairs, back = list[Any]([(cyclic.sub(low, low, width, width), self.whole(width))]), None
            if rest:
                slab = dealt.sub(high, 0, rest, width)
                pairs.append((cyclic.sub(high, low, rest, width), slab))
                back = self.move((slab, Spread(cyclic.sub(high, 0, rest, size), 0, 0, width)))
            if low:
                row = cyclic.sub(low, 0, width, low)
                pairs.append((row, Spread(row, 1, 1, width)))
            self.steps.append((low, high, self.move(*pairs), back))

    def __call__(self, a: Array, unit: bool) -> int:
        if not unit and (info := self.least(self._zero_on_diagonal(a))):
            return info
        with self.arrays() as (diagonal, slab, of_rows, of_cols):
            for low, high, deal, back in self.steps:
                width = high - low
                whole, part = diagonal[:width, :width], slab[:, :width]
                rows, cols = of_rows[:, :width], of_cols[:width]
                self.send(deal, (a, whole), *([(a, part)] if back else []), *([(a, cols)] if low else []))
                triangle = self.library.to_numpy(whole)
                under, before = self.rows.within(high, self.size), self.cols.within(0, low)
                if back is not None:
                    mine = self._dealt.within(high, self.size)
                    self.solve(triangle, part[mine], False, True, unit, -1)
                    self.send(back, (part, rows))
                    for here, there in self.cols.runs(low, high):
                        a[under, here] = rows[under, there]
                    self.multiply(rows[under], cols[:, before], a[under, before], 1, 1)
                inverse = inverted(triangle, unit, self.grid.workspace)
                beside = self.rows.within(low, high)
                own = inverse[self.rows.numbered(beside) - low]
                factor = self.library.from_numpy(np.ascontiguousarray(own), self.dtype)
                if low:
                    self.multiply(factor, cols[:, before], a[beside, before], 1, 0)
                self.store(a, inverse, low, below_diagonal if unit else on_diagonal_and_below)
        return 0

    def _zero_on_diagonal(self, a: Array) -> int:
        """Number of the first element on the diagonal that is 0 and on this rank, from 1 on; or 0."""
        common, i, j = np.intersect1d(self.rows.numbers, self.cols.numbers, assume_unique=True, return_indices=True)
        if not len(common):
            return 0
        diagonal = self.library.to_numpy(a[i + self.rows.start, j + self.cols.start])
        zeros = common[diagonal == 0]
        return int(zeros[0]) + 1 if len(zeros) else 0
