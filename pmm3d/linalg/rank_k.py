"""ScaLAPACK's p?syrk, p?herk, p?syr2k and p?her2k: one triangle of A A^T, and of A B^T + B A^T, with about half of the
operations of the whole product. C stays in place, or the rows are halved, and products of halves are p?gemm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..arrays import Array
from ..errors import DTypeError
from ..product import Descriptor
from ..product.checks import scalar
from .stationary import Factor, add_in_place, stays
from .triangle import add_triangle, middle
from .window import Matrix, Operand, Window, checked, gemm, letter


class Term(NamedTuple):
    """alpha op(A) op(B). of_a, of_b: "N", "T" or "C"."""

    alpha: complex
    of_a: str
    a: Window
    of_b: str
    b: Window

    def part(self, rows: tuple[int, int], cols: tuple[int, int]) -> Term:
        """The product's part with these rows and columns, each as the first one and their number."""
        return self._replace(a=_lines(self.a, self.of_a == "N", *rows), b=_lines(self.b, self.of_b != "N", *cols))


def _depth(term: Term) -> int:
    return term.a.cols if term.of_a == "N" else term.a.rows


def _lines(window: Window, by_rows: bool, first: int, size: int) -> Window:
    return window.part(first, 0, size, window.cols) if by_rows else window.part(0, first, window.rows, size)


def add_products(terms: Sequence[Term], beta: complex, c: Window) -> None:
    """C = the sum of terms + beta C. Collective."""
    for alpha, of_a, a, of_b, b in terms:
        gemm(of_a, of_b, alpha, a, b, beta, c)
        beta = 1


def rank_k(uplo: str, terms: Sequence[Term], beta: complex, c: Window, hermitian: bool = False) -> None:
    """Compute one triangle of C = the sum of terms + beta C. The sum is symmetric, or Hermitian. Collective.

    uplo        "L" or "U". The other triangle of C is neither read nor changed
    hermitian   the imaginary part of the diagonal of C is not read, and becomes 0

    With C in place, a process computes the blocks on the diagonal in full, of STRIP of its columns. In halves, blocks
    of BASE rows are computed in full. Let b be STRIP, or BASE. On one process, (n^2 + n b) k of the 2 n^2 k
    operations of a term are computed, if n is b times a power of 2.
    """
    size = c.rows
    if not size:
        return
    if all(term.alpha == 0 for term in terms):
        return add_triangle(None, beta, c, uplo, hermitian)
    if stays(c, max(_depth(term) for term in terms)):
        for alpha, of_a, a, of_b, b in terms:
            add_in_place(uplo, alpha, Factor(of_a, a, 0), Factor(of_b, b, 1), beta, c, hermitian)
            beta = 1
        return
    first = middle(c)
    if not first:
        product = c.like()
        add_products(terms, 0, product)
        return add_triangle(product, beta, c, uplo, hermitian)
    halves = (0, first), (first, size - first)
    for half in halves:
        rank_k(uplo, [term.part(half, half) for term in terms], beta, _block(c, half, half), hermitian)
    rows, cols = halves[:: -1 if uplo == "L" else 1]
    add_products([term.part(rows, cols) for term in terms], beta, _block(c, rows, cols))


def _block(window: Window, rows: tuple[int, int], cols: tuple[int, int]) -> Window:
    return window.part(rows[0], cols[0], rows[1], cols[1])


def rank_k_terms(trans: str, alpha: complex, a: Window, b: Window, hermitian: bool) -> list[Term]:
    """Terms of A A^T (A^T A), if B is A, or of A B^T + B A^T. trans: "N", otherwise A and B are transposed."""
    other = "C" if hermitian else "T"
    of_a, of_b = ("N", other) if trans == "N" else (other, "N")
    terms = [Term(alpha, of_a, a, of_b, b)]
    if a is not b:
        terms.append(Term(alpha.conjugate() if hermitian else alpha, of_a, b, of_b, a))
    return terms


def psyrk(
    uplo: str,
    trans: str,
    n: int,
    k: int,
    alpha: complex,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    beta: complex,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
) -> None:
    """One triangle of C = alpha A A^T + beta C, or of alpha A^T A + beta C, block-cyclic, as ScaLAPACK's p?syrk.

    Parameters
    ----------
    uplo : str
        "L" or "U": triangle of C(ic:, jc:) that is computed. The other triangle is neither read nor written.
    trans : str
        "N": A A^T, with A(ia:, ja:) of n x k elements. "T": A^T A, of k x n elements; of real matrices also "C".
    n, k : int
        C is n x n; k is the length of the sums.
    alpha : number
        Factor of the product. If it is 0, A is not read.
    a, ia, ja, desca
        A: see `pgemm`.
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
    Collective over the context. Each process receives the rows of A that it needs for its rows and its columns of C, in
    one exchange: at most k (n / Pr + n / Pc) elements on Pr x Pc processes. A row that is needed for both is received
    twice. These copies are work memory. A process leaves out the blocks of the other triangle, so about n^2 k of the
    2 n^2 k operations of a product are computed. With a large k, or a C that is divided unevenly, the rows of C are
    halved, down to 512 rows, and each product of two halves is one `pgemm`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, psyrk
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, c = square.empty(), square.empty()
    ...     a[...], c[...] = 1, 5
    ...     psyrk("L", "N", 2, 2, 1, a, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[2, 5], [2, 2]])
    True
    """
    _update("psyrk", uplo, trans, n, k, alpha, [(a, ia, ja, desca)], beta, (c, ic, jc, descc))


def pherk(
    uplo: str,
    trans: str,
    n: int,
    k: int,
    alpha: float,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    beta: float,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
) -> None:
    """One triangle of C = alpha A A^H + beta C, or of alpha A^H A + beta C, block-cyclic, as ScaLAPACK's p?herk.

    Parameters
    ----------
    uplo
        See `psyrk`.
    trans : str
        "N": A A^H. "C": A^H A; of real matrices also "T".
    n, k
        See `psyrk`.
    alpha : float
        Factor of the product, which is real.
    a, ia, ja, desca
        See `psyrk`.
    beta : float
        Factor of C, which is real.
    c, ic, jc, descc
        See `psyrk`. The imaginary part of the diagonal of C is not read, and becomes 0. As in BLAS, nothing changes if
        beta is 1 and alpha or k is 0.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `psyrk`, and DTypeError for complex factors.

    Notes
    -----
    Operations and messages are those of `psyrk`. Matrices may be real.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pherk
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, c = square.empty("complex64"), square.empty("complex64")
    ...     a[...], c[...] = 1j, 5
    ...     pherk("U", "C", 2, 2, 1, a, 1, 1, square, 1, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[7, 7], [5, 7]])
    True
    """
    _update("pherk", uplo, trans, n, k, alpha, [(a, ia, ja, desca)], beta, (c, ic, jc, descc))


def psyr2k(
    uplo: str,
    trans: str,
    n: int,
    k: int,
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
    """One triangle of C = alpha (A B^T + B A^T) + beta C, block-cyclic, as ScaLAPACK's p?syr2k.

    Parameters
    ----------
    uplo
        See `psyrk`.
    trans : str
        "N": A B^T + B A^T. "T": A^T B + B^T A; of real matrices also "C".
    n, k
        See `psyrk`.
    alpha : number
        Factor of both products. If it is 0, A and B are not read.
    a, ia, ja, desca, b, ib, jb, descb
        A and B, of one shape: see `psyrk`.
    beta, c, ic, jc, descc
        See `psyrk`.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `psyrk`.

    Notes
    -----
    Twice the operations and messages of `psyrk`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, psyr2k
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, b, c = square.empty(), square.empty(), square.empty()
    ...     a[...], b[...], c[...] = 1, 3, 5
    ...     psyr2k("L", "N", 2, 1, 1, a, 1, 1, square, b, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[6, 5], [6, 6]])
    True
    """
    _update("psyr2k", uplo, trans, n, k, alpha, [(a, ia, ja, desca), (b, ib, jb, descb)], beta, (c, ic, jc, descc))


def pher2k(
    uplo: str,
    trans: str,
    n: int,
    k: int,
    alpha: complex,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    b: Array,
    ib: int,
    jb: int,
    descb: Descriptor,
    beta: float,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
) -> None:
    """One triangle of C = alpha A B^H + conj(alpha) B A^H + beta C, block-cyclic, as ScaLAPACK's p?her2k.

    Parameters
    ----------
    uplo
        See `psyrk`.
    trans : str
        "N": A B^H and B A^H. "C": A^H B and B^H A; of real matrices also "T".
    n, k
        See `psyrk`.
    alpha : number
        Factor of the first product. The factor of the second one is its conjugate.
    a, ia, ja, desca, b, ib, jb, descb
        See `psyr2k`.
    beta : float
        Factor of C, which is real.
    c, ic, jc, descc
        See `pherk`. The imaginary part of the diagonal of C is not read, and becomes 0.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `psyrk`, and DTypeError for a complex beta.

    Notes
    -----
    Twice the operations and messages of `psyrk`. Matrices may be real.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pher2k
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, b, c = square.empty("complex64"), square.empty("complex64"), square.empty("complex64")
    ...     a[...], b[...], c[...] = 1j, 3, 5
    ...     pher2k("L", "N", 2, 1, 1j, a, 1, 1, square, b, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[-6, 5], [-6, -6]])
    True
    """
    _update("pher2k", uplo, trans, n, k, alpha, [(a, ia, ja, desca), (b, ib, jb, descb)], beta, (c, ic, jc, descc))


def _update(
    what: str,
    uplo: str,
    trans: str,
    n: int,
    k: int,
    alpha: complex,
    sources: Sequence[Matrix],
    beta: complex,
    target: Matrix,
) -> None:
    """Check the arguments of a routine, and compute the triangle. `sources` and `target`: array, i, j, descriptor."""
    hermitian, shapes = what.startswith("pher"), {"N": (n, k), "T": (k, n), "C": (k, n)}
    shape = shapes.get(str(trans).upper(), (0, 0))  # of a wrong letter, which the body refuses
    operands = [Operand(name, *source, *shape) for name, source in zip("AB", sources)]
    with checked(what, [*operands, Operand("C", *target, n, n, True)], uplo, trans, alpha, beta) as windows:
        uplo, dtype, c = letter(what, "uplo", uplo, "LU"), windows[0].dtype, windows[-1]
        letters = "NTC" if not dtype.startswith("complex") else "NC" if hermitian else "NT"
        trans = letter(what, "trans", trans, letters)
        alpha, beta = scalar("alpha", alpha, dtype, what), scalar("beta", beta, dtype, what)
        for name, value in (("alpha", alpha), ("beta", beta))[len(sources) - 1 if hermitian else 2 :]:
            if isinstance(value, complex):
                raise DTypeError(f"{what}: {name} is {value!r}; it must be real, or the result is not Hermitian")
    if hermitian and beta == 1 and (alpha == 0 or k == 0):
        return
    rank_k(uplo, rank_k_terms(trans, alpha, windows[0], windows[len(sources) - 1], hermitian), beta, c, hermitian)
