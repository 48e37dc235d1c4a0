"""The Cholesky factorisation, and systems of equations with its factor, as ScaLAPACK's p?potrf, p?potrs and p?posv."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, lapack
from ..layout.foreign import Spread
from ..product import Descriptor
from ..product.multiply import run_gemm
from .panels import Exchange, PanelPlan, View, on_diagonal_and_below, planned, replace_where
from .triangular import solved
from .window import Operand, Window, checked, letter

LEAF = 128
"""Largest number of columns of a block on the diagonal that is computed in full, although half is written."""
UPDATE_BYTES = 512
"""Bytes of an Update, with its slices and numbers."""


def ppotrf(uplo: str, n: int, a: Array, ia: int, ja: int, desca: Descriptor) -> int:
    """A = L L^H or U^H U, the Cholesky factorisation of a block-cyclic matrix, in place, as ScaLAPACK's p?potrf.

    Parameters
    ----------
    uplo : str
        "L" or "U": the triangle of A that is read, and overwritten with L or U. The other one is not accessed.
    n : int
        Number of rows and columns of A(ia:, ja:).
    a, ia, ja, desca
        A, as in `pgemm`.

    Returns
    -------
    int
        0; or the order of the first leading minor that is not positive or contains NaN. A is then partly overwritten.
        The same on all ranks.

    Raises
    ------
    LayoutError, DTypeError, DisagreementError
        As `pgemm`.

    Notes
    -----
    Collective over the context. For each panel of up to 256 columns, its diagonal block is sent to all ranks, each of
    which factorises it. The rest of the panel is dealt over the process grid, solved, and sent to the processes whose
    part of A it changes. Each rank receives about n^2 / 2 (1 / Pr + 1 / Pc + 1 / P) + 256 n elements on Pr x Pc
    processes (P = Pr Pc). n^3 / 3 operations in all. The context caches the messages of a size.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ppotrf
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a = square.empty()
    ...     a[...] = [[4, 0], [2, 5]][: a.shape[0]] if a.size else 0
    ...     info = ppotrf("L", 2, a, 1, 1, square)
    ...     info, a.tolist() in ([[]], [[2, 0], [1, 2]])
    (0, True)
    """
    with checked("ppotrf", [Operand("A", a, ia, ja, desca, n, n, True)], uplo) as (window,):
        uplo = letter("ppotrf", "uplo", uplo, "LU")
    return factorised(window, uplo)


def ppotrs(
    uplo: str,
    n: int,
    nrhs: int,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    b: Array,
    ib: int,
    jb: int,
    descb: Descriptor,
) -> int:
    """Solve A X = B with the factor of A that `ppotrf` made, as ScaLAPACK's p?potrs. X overwrites B.

    Parameters
    ----------
    uplo : str
        "L" or "U": the triangle of the factor.
    n, nrhs : int
        A is n x n, B is n x nrhs.
    a, ia, ja, desca, b, ib, jb, descb
        The factor and B, as in `pgemm`.

    Returns
    -------
    int
        0.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`.

    Notes
    -----
    Two calls of `ptrsm`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ppotrs
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square, column = context.descriptor(2, 2, 2, 2), context.descriptor(2, 1, 2, 2)
    ...     a, b = square.empty(), column.empty()
    ...     a[...] = [[2, 0], [1, 2]][: a.shape[0]] if a.size else 0
    ...     b[...] = 8
    ...     info = ppotrs("L", 2, 1, a, 1, 1, square, b, 1, 1, column)
    ...     info, b.tolist() in ([[]], [[1.5], [1]])
    (0, True)
    """
    operands = Operand("A", a, ia, ja, desca, n, n), Operand("B", b, ib, jb, descb, n, nrhs, True)
    with checked("ppotrs", operands, uplo) as (factor, x):
        uplo = letter("ppotrs", "uplo", uplo, "LU")
    solved_by_factor(factor, uplo, x)
    return 0


def pposv(
    uplo: str,
    n: int,
    nrhs: int,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    b: Array,
    ib: int,
    jb: int,
    descb: Descriptor,
) -> int:
    """Solve A X = B for a positive definite A, as ScaLAPACK's p?posv. A is overwritten as by `ppotrf`, and B with X.

    Parameters
    ----------
    uplo : str
        "L" or "U": the triangle of A that is read, and overwritten with the factor.
    n, nrhs : int
        A is n x n, B is n x nrhs.
    a, ia, ja, desca, b, ib, jb, descb
        A and B, as in `pgemm`.

    Returns
    -------
    int
        INFO of `ppotrf`. If it is not 0, B is unchanged.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`.

    Notes
    -----
    `ppotrf` and `ppotrs`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pposv
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square, column = context.descriptor(2, 2, 2, 2), context.descriptor(2, 1, 2, 2)
    ...     a, b = square.empty(), column.empty()
    ...     a[...] = [[4, 0], [2, 5]][: a.shape[0]] if a.size else 0
    ...     b[...] = 8
    ...     info = pposv("L", 2, 1, a, 1, 1, square, b, 1, 1, column)
    ...     info, b.tolist() in ([[]], [[1.5], [1]])
    (0, True)
    """
    operands = Operand("A", a, ia, ja, desca, n, n, True), Operand("B", b, ib, jb, descb, n, nrhs, True)
    with checked("pposv", operands, uplo) as (factor, x):
        uplo = letter("pposv", "uplo", uplo, "LU")
    if info := factorised(factor, uplo):
        return info
    solved_by_factor(factor, uplo, x)
    return 0


def factorised(window: Window, uplo: str) -> int:
    """Overwrite a triangle of a window with its Cholesky factor. Return INFO. Collective."""
    view = View(window, uplo == "U")  # A^T = L L^H if and only if A = U^H U with U = L^T
    return planned(view, "potrf", lambda: CholeskyPlan(view))(view.array)


def solved_by_factor(factor: Window, uplo: str, b: Window) -> None:
    """B = A^-1 B, with the Cholesky factor of A. Collective."""
    for op in "NC" if uplo == "L" else "CN":
        solved("L", uplo, op, "N", 1, factor, b)


class CholeskyPlan(PanelPlan):
    """A = L L^H. Only the lower triangle of a view is accessed. Right-looking: each panel changes the matrix right of
    it."""

    def __init__(self, view: View):
        super().__init__(view, view.shape[0])
        cyclic, size = self.cyclic, self.size
        dealt, self._dealt = self.dealt(0)
        self.take(self.whole(self.width), dealt, *[Spread(cyclic, of, 0, self.width) for of in (0, 1)])
        self._masks = dict[tuple[int, int], np.ndarray]()
        self.steps = list[Step]()
        for low, high in self.panels:
            width, rest = high - low, size - high
            block = cyclic.sub(low, low, width, width), self.whole(width)
            if not rest:
                self.steps.append(Step(low, high, self.move(block)))
            else:
                panel, below = cyclic.sub(high, low, rest, width), cyclic.sub(high, high, rest, rest)
                slab = dealt.sub(high, 0, rest, width)
                deal = self.move(block, (panel, slab))
                spread = self.move(*[(slab, Spread(below, of, 0, width)) for of in (0, 1)])
                self.steps.append(Step(low, high, deal, spread, self._triangle(high, size)))
        updates = UPDATE_BYTES * sum(len(step.updates) for step in self.steps)
        own = updates + sum(mask.nbytes for mask in self._masks.values())
        self._local_bytes = int(self.grid.comm.largest(own))

    @property
    def table_bytes(self) -> int:
        return super().table_bytes + self._local_bytes

    def _triangle(self, low: int, high: int) -> list[Update]:
        """Updates of the lower triangle low:high on this rank, by halves."""
        rows, cols = self.rows.within(low, high), self.cols.within(low, high)
        i, j = self.rows.numbered(rows), self.cols.numbered(cols)
        if not len(i) or not len(j) or i[-1] < j[0]:
            return []
        if high - low > LEAF:
            middle = low + max(1, (high - low) // LEAF // 2) * LEAF
            below = Update(self.rows.within(middle, high), self.cols.within(low, middle), None)
            own = [below] if below.rows.start < below.rows.stop and below.cols.start < below.cols.stop else []
            return self._triangle(low, middle) + own + self._triangle(middle, high)
        mask = None
        if i[0] < j[-1]:
            mask = self._masks.setdefault((low, high), i[:, None] >= j)
        return [Update(rows, cols, mask)]

    def __call__(self, a: Array) -> int:
        info, conjugates = 0, self.dtype.startswith("complex")
        with self.arrays() as (diagonal, slab, of_rows, of_cols):
            for low, high, deal, spread, updates in self.steps:
                width = high - low
                whole, part = diagonal[:width, :width], slab[:, :width]
                self.send(deal, (a, whole), *([(a, part)] if spread else []))
                factor = np.asfortranarray(self.library.to_numpy(whole))
                if not info:  # otherwise the messages only keep the ranks together
                    failed = lapack.potrf("L", factor)
                    info = low + failed if failed else 0
                self.store(a, factor, low, on_diagonal_and_below)
                if spread is None:
                    break
                if not info:
                    of_part = factor.conj().T if conjugates else factor.T
                    self.solve(of_part, part[self._dealt.within(high, self.size)], False, False, False)
                rows, cols = of_rows[:, :width], of_cols[:, :width]
                self.send(spread, (part, rows), (part, cols))
                if not info:
                    below = self.rows.within(high, self.size)
                    for here, there in self.cols.runs(low, high):
                        a[below, here] = rows[below, there]
                    if conjugates:
                        self.library.conjugate_in_place(cols)
                    run_gemm(self.grid, partial(self._update, updates, a, rows, cols.T))
        return self.least(info)

    def _update(self, updates: Sequence[Update], a: Array, of_rows: Array, of_cols: Array) -> None:
        """A -= (panel) (panel)^H of these parts."""
        gemm, work = self.library.gemm, self.grid.workspace
        for rows, cols, mask in updates:
            factors, here = (of_rows[rows], of_cols[:, cols]), a[rows, cols]
            if mask is None:
                gemm(*factors, here, -1, 1, work)
            else:
                change = self.library.empty(tuple(here.shape)[::-1], self.dtype).T
                gemm(*factors, change, 1, 0, work)
                replace_where(self.library, here, here - change, mask)


class Update(NamedTuple):
    """A product of parts of a panel that is subtracted from these rows and columns of this rank's array.

    mask   elements that are changed. None: all
    """

    rows: slice
    cols: slice
    mask: np.ndarray | None


class Step(NamedTuple):
    """A panel low:high of columns.

    deal     exchange of the diagonal block, and of the panel below it
    spread   exchange of the panel after the solve. None in the last step, which has nothing below the block
    """

    low: int
    high: int
    deal: Exchange
    spread: Exchange | None = None
    updates: Sequence[Update] = ()
