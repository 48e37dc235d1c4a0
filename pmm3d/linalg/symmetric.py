"""ScaLAPACK's p?symm and p?hemm: products with a symmetric or Hermitian matrix, of which one triangle is read."""

from __future__ import annotations

from ..arrays import Array
from ..product import Descriptor
from ..product.checks import scalar
from .triangle import mirrored
from .window import Matrix, Operand, Window, checked, gemm, letter


def symmetric_product(
    side: str, uplo: str, alpha: complex, a: Window, b: Window, beta: complex, c: Window, hermitian: bool = False
) -> None:
    """C = alpha A B + beta C, or alpha B A + beta C with side "R". One triangle of A is read. Collective."""
    full = a if alpha == 0 else mirrored(a, uplo, hermitian)
    left, right = (full, b) if side == "L" else (b, full)
    gemm("N", "N", alpha, left, right, beta, c)


def psymm(
    side: str,
    uplo: str,
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
    beta: complex,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
) -> None:
    """C = alpha A B + beta C, or alpha B A + beta C, with a symmetric A, block-cyclic, as ScaLAPACK's p?symm.

    Parameters
    ----------
    side : str
        "L": A B, with A(ia:, ja:) of m x m elements. "R": B A, with n x n elements.
    uplo : str
        "L" or "U": triangle of A that is read.
    m, n : int
        Rows and columns of B(ib:, jb:) and C(ic:, jc:).
    alpha : number
        Factor of the product. If it is 0, A and B are not read.
    a, ia, ja, desca, b, ib, jb, descb
        A and B: see `pgemm`.
    beta : number
        Factor of C. If it is 0, C is not read.
    c, ic, jc, descc
        C: see `pgemm`. It is written in place.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`, and LayoutError for other letters.

    Notes
    -----
    Collective over the context. Each rank makes a copy of its part of A, with both triangles, and receives the mirror
    image of what it stores. The product is a `pgemm`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, psymm
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, b, c = square.empty(), square.empty(), square.empty()
    ...     if context.row == 0:
    ...         a[...], b[...] = [[1, float("nan")], [2, 3]], 1
    ...     psymm("L", "L", 2, 2, 1, a, 1, 1, square, b, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[3, 3], [5, 5]])
    True
    """
    _multiply("psymm", side, uplo, m, n, alpha, (a, ia, ja, desca), (b, ib, jb, descb), beta, (c, ic, jc, descc))


def phemm(
    side: str,
    uplo: str,
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
    beta: complex,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
) -> None:
    """C = alpha A B + beta C, or alpha B A + beta C, with a Hermitian A, block-cyclic, as ScaLAPACK's p?hemm.

    Parameters
    ----------
    side, uplo, m, n, alpha, a, ia, ja, desca, b, ib, jb, descb, beta, c, ic, jc, descc
        See `psymm`. The imaginary part of the diagonal of A is not read.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `psymm`.

    Notes
    -----
    Operations and messages are those of `psymm`. Matrices may be real.

    Examples
    --------
    >>> from pmm3d import BlacsContext, phemm
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, b, c = square.empty("complex64"), square.empty("complex64"), square.empty("complex64")
    ...     if context.row == 0:
    ...         a[...], b[...] = [[1, float("nan")], [2j, 3]], 1
    ...     phemm("L", "L", 2, 2, 1, a, 1, 1, square, b, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[1 - 2j, 1 - 2j], [3 + 2j, 3 + 2j]])
    True
    """
    _multiply("phemm", side, uplo, m, n, alpha, (a, ia, ja, desca), (b, ib, jb, descb), beta, (c, ic, jc, descc))


def _multiply(
    what: str, side: str, uplo: str, m: int, n: int, alpha: complex, a: Matrix, b: Matrix, beta: complex, c: Matrix
) -> None:
    order = {"L": m, "R": n}.get(str(side).upper(), 0)  # 0 of a wrong letter, which the body refuses
    operands = Operand("A", *a, order, order), Operand("B", *b, m, n), Operand("C", *c, m, n, True)
    with checked(what, operands, side, uplo, alpha, beta) as windows:
        side, uplo = letter(what, "side", side, "LR"), letter(what, "uplo", uplo, "LU")
        alpha, beta = (
            scalar(name, value, windows[0].dtype, what) for name, value in (("alpha", alpha), ("beta", beta))
        )
    symmetric_product(side, uplo, alpha, windows[0], windows[1], beta, windows[2], what == "phemm")
