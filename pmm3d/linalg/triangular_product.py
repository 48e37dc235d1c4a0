"""ScaLAPACK's p?trmm: a triangular matrix times a matrix, with about half of the operations of p?gemm. Each process
leaves out the zeros, or the triangle is halved, and products with halves are p?gemm."""

from __future__ import annotations

from ..arrays import Array
from ..product import Descriptor
from ..product.checks import scalar
from .stationary import multiply_in_place, stays
from .triangle import middle, triangle
from .window import Operand, Window, checked, gemm, letter


def triangular_product(side: str, uplo: str, op: str, diag: str, alpha: complex, a: Window, b: Window) -> None:
    """B = alpha op(A) B, or alpha B op(A) with side "R". Only a triangle of A is read. Collective.

    If A has n rows, the products read (n^2 + n b) / 2 of its n^2 elements. `rank_k` defines b.
    """
    size, left = a.rows, side == "L"
    if not size or not min(b.shape):
        return
    if alpha != 0 and stays(b, size):
        return multiply_in_place(side, uplo, op, diag, alpha, a, b)
    first = middle(a)
    if alpha == 0 or not first:
        block = a if alpha == 0 else triangle(a, uplo, diag)
        of, factors = ((op, "N"), (block, b)) if left else (("N", op), (b, block))
        return gemm(*of, alpha, *factors, 0, b)  # pgemm copies a factor that C overwrites
    halves = (0, first), (first, size - first)
    panels = [b.part(at, 0, rows, b.cols) if left else b.part(0, at, b.rows, rows) for at, rows in halves]
    below = (uplo == "L") == (op == "N")  # whether op(A) is lower triangular
    changed, read = (1, 0) if below == left else (0, 1)  # the panel with two terms is computed while the other is old
    (row, rows), (col, cols) = halves[:: -1 if uplo == "L" else 1]
    rest = a.part(row, col, rows, cols)
    for number in (changed, read):
        at, rows = halves[number]
        triangular_product(side, uplo, op, diag, alpha, a.part(at, at, rows, rows), panels[number])
        if number == changed:
            of, factors = ((op, "N"), (rest, panels[read])) if left else (("N", op), (panels[read], rest))
            gemm(*of, alpha, *factors, 1, panels[changed])


def ptrmm(
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
    """B = alpha op(A) B, or alpha B op(A), with a triangular A, block-cyclic, as ScaLAPACK's p?trmm.

    Parameters
    ----------
    side : str
        "L": op(A) B, with A(ia:, ja:) of m x m elements. "R": B op(A), with n x n elements.
    uplo : str
        "L" or "U": triangle of A that is read. The other triangle counts as zeros.
    transa : str
        "N", "T" or "C": op(A) is A, its transpose, or its conjugate transpose.
    diag : str
        "U": the diagonal of A is not read, and counts as ones. "N": it is read.
    m, n : int
        Rows and columns of B(ib:, jb:), which is overwritten.
    alpha : number
        Factor. If it is 0, A and B are not read.
    a, ia, ja, desca, b, ib, jb, descb
        A and B: see `pgemm`.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`, and LayoutError for other letters.

    Notes
    -----
    Collective over the context. Each process receives the lines of A and B that it needs for its part of the result, in
    one exchange: with side "L" at most m (m / Pr + n / Pc) elements on Pr x Pc processes. These copies are work memory.
    A process leaves out the zeros, so about half of the operations of a product with a full A are computed. If B is
    narrow, or divided unevenly, A is halved, down to 512 rows, and each product with a half is one `pgemm`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptrmm
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, b = square.empty(), square.empty()
    ...     a[...], b[...] = 3, 1
    ...     ptrmm("L", "L", "N", "U", 2, 2, 1, a, 1, 1, square, b, 1, 1, square)
    ...     b.tolist() in ([[]], [[1, 1], [4, 4]])
    True
    """
    order, what = {"L": m, "R": n}.get(str(side).upper(), 0), "ptrmm"  # 0 of a wrong letter, which the body refuses
    operands = Operand("A", a, ia, ja, desca, order, order), Operand("B", b, ib, jb, descb, m, n, True)
    with checked(what, operands, side, uplo, transa, diag, alpha) as windows:
        side, uplo = letter(what, "side", side, "LR"), letter(what, "uplo", uplo, "LU")
        transa, diag = letter(what, "transa", transa, "NTC"), letter(what, "diag", diag, "NU")
        alpha = scalar("alpha", alpha, windows[0].dtype, what)
    triangular_product(side, uplo, transa, diag, alpha, *windows)
