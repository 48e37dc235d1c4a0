"""ScaLAPACK's p?gemr2d, p?tran and p?geadd: copies, transposes and sums of parts of block-cyclic matrices."""

from __future__ import annotations

from typing import Any

from ..arrays import Array, check_matrix_dtype, library_of
from ..errors import GridError, LayoutError
from ..layout import natural
from .blacs import Descriptor, check_descriptor, compared
from .checks import array_signature
from .redistribution import check_leading, checked_factors, checked_operation, part_of, planned, transposed
from .tiles import checked_arrays, elements


def pgemr2d(
    m: int, n: int, a: Array, ia: int, ja: int, desca: Descriptor, b: Array, ib: int, jb: int, descb: Descriptor
) -> None:
    """B(ib:, jb:) = A(ia:, ja:), m x n, between block-cyclic matrices of any two contexts, as ScaLAPACK's p?gemr2d.

    Parameters
    ----------
    m, n : int
        Number of rows and of columns that are copied.
    a : array
        Array of this rank, as of `pgemm`.
    ia, ja : int
        First row and column, counted from 1.
    desca : Descriptor
        Layout of A.
    b, ib, jb, descb
        B, in the same way. Elements are copied bit by bit.

    Raises
    ------
    LayoutError
        On every rank, if a part is not inside its matrix, or if arrays do not fit or overlap.
    DTypeError
        On every rank, for mixed types.
    GridError
        On every rank, if the contexts are not over the same ranks.

    Notes
    -----
    Collective. One exchange: each rank receives the elements that it did not store.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pgemr2d
    >>> with BlacsContext(shape=(1, 1)) as one, BlacsContext(one.grid, (1, 1), ranks=[one.grid.size - 1]) as other:
    ...     source, target = one.descriptor(3, 3, 2, 2), other.descriptor(4, 4, 1, 1)
    ...     a, b = source.empty(), target.empty()
    ...     a[...], b[...] = 7, 0
    ...     pgemr2d(2, 3, a, 1, 1, source, b, 3, 2, target)
    ...     b.tolist() in ([[]], [[0, 0, 0, 0], [0, 0, 0, 0], [0, 7, 7, 7], [0, 7, 7, 7]])
    True
    """
    _add("pgemr2d", "N", m, n, 1, a, ia, ja, desca, 0, b, ib, jb, descb, name="B")


def ptran(
    m: int,
    n: int,
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
    """C(ic:, jc:) = beta C(ic:, jc:) + alpha A(ia:, ja:)^T, block-cyclic, as ScaLAPACK's p?tran.

    Parameters
    ----------
    m, n : int
        C is m x n, and A is n x m.
    alpha : number
        Factor of A. If it is 0, A is not read, and nothing is sent.
    a : array
        Array of this rank, as of `pgemm`.
    ia, ja : int
        First row and column, counted from 1.
    desca : Descriptor
        Layout of A. Both descriptors belong to one context.
    beta : number
        Factor of C. If it is 0, C is not read.
    c, ic, jc, descc
        C, in the same way. Its other elements do not change.

    Raises
    ------
    LayoutError
        On every rank, if a part is not inside its matrix, if an array does not fit its descriptor, or if the two parts
        share memory, as in a transpose in place.
    DTypeError
        On every rank, for mixed types, and for factors that cannot scale matrices of the type.
    GridError
        On every rank, for descriptors of several contexts.

    Notes
    -----
    Collective. One exchange: each rank receives the elements that it did not store. The context's grid caches the plans
    of the last 64 exchanges.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptran
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 1, 1)
    ...     a, c = square.empty(), square.empty()
    ...     a[...], c[...] = [[1, 2], [3, 4]][: square.local_rows], 1
    ...     ptran(2, 2, 10, a, 1, 1, square, 1, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[11, 31], [21, 41]])
    True
    """
    _add("ptran", "T", m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc)


def ptranu(
    m: int,
    n: int,
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
    """C(ic:, jc:) = beta C(ic:, jc:) + alpha A(ia:, ja:)^T, as ScaLAPACK's p?tranu of complex matrices. See `ptran`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptranu
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, c = square.empty("complex64"), square.empty("complex64")
    ...     a[...] = [[1j, 2], [3, 4]][: square.local_rows]
    ...     ptranu(2, 2, 10, a, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[10j, 30], [20, 40]])
    True
    """
    _add("ptranu", "T", m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc)


def ptranc(
    m: int,
    n: int,
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
    """C(ic:, jc:) = beta C(ic:, jc:) + alpha A(ia:, ja:)^H, as ScaLAPACK's p?tranc of complex matrices. See `ptran`.

    A may also be real. Then the result is that of `ptran`.

    Examples
    --------
    >>> from pmm3d import BlacsContext, ptranc
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(2, 2, 2, 2)
    ...     a, c = square.empty("complex64"), square.empty("complex64")
    ...     a[...] = [[1j, 2], [3, 4]][: square.local_rows]
    ...     ptranc(2, 2, 10, a, 1, 1, square, 0, c, 1, 1, square)
    ...     c.tolist() in ([[]], [[-10j, 30], [20, 40]])
    True
    """
    _add("ptranc", "C", m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc)


def pgeadd(
    trans: str,
    m: int,
    n: int,
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
    """C(ic:, jc:) = beta C(ic:, jc:) + alpha op(A(ia:, ja:)), block-cyclic, as ScaLAPACK's p?geadd.

    Parameters
    ----------
    trans : str
        "N", "T" or "C": op(A) is A, its transpose, or its conjugate transpose.
    m, n : int
        C and op(A) are m x n.
    alpha, a, ia, ja, desca, beta, c, ic, jc, descc
        See `ptran`.

    Raises
    ------
    LayoutError, DTypeError, GridError
        As `ptran`.

    Notes
    -----
    Collective. One exchange, as in `ptran`. If A and C are divided alike and op is "N", nothing is sent.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pgeadd
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     a_form, c_form = context.descriptor(2, 3, 1, 1), context.descriptor(3, 2, 2, 2)
    ...     a, c = a_form.empty(), c_form.empty()
    ...     a[...], c[...] = 2, 1
    ...     pgeadd("T", 3, 2, 3, a, 1, 1, a_form, -1, c, 1, 1, c_form)
    ...     bool((c == 5).all())
    True
    """
    _add("pgeadd", trans, m, n, alpha, a, ia, ja, desca, beta, c, ic, jc, descc)


def _add(
    what: str,
    trans: Any,
    m: Any,
    n: Any,
    alpha: Any,
    a: Any,
    ia: Any,
    ja: Any,
    desca: Any,
    beta: Any,
    c: Any,
    ic: Any,
    jc: Any,
    descc: Any,
    name: str = "C",
) -> None:
    """C = beta C + alpha op(A) for m x n parts of block-cyclic matrices. Collective. name: name of C in errors."""
    first = check_descriptor(what, desca if isinstance(desca, Descriptor) else descc)
    grid, (_, dtype, kind) = first.context.grid, array_signature(a)
    passed = m, n, ia, ja, ic, jc, *map(compared, (desca, descc))
    with grid.collective_call(what, trans, *passed, dtype, kind, alpha, beta):
        for each in (desca, descc):
            check_descriptor(what, each).context._check_open()
        _check_contexts(what, desca, descc)
        op = checked_operation(what, "trans", trans)
        m, n = (natural(size, f"{what}: sizes are whole numbers of at least 0", 0, LayoutError) for size in (m, n))
        library = library_of(a)
        check_matrix_dtype(dtype, library, labels=True)
        factors = checked_factors(what, op, alpha, beta, dtype)
        source = part_of(what, "A", ia, ja, desca, *((m, n) if op == "N" else (n, m)))
        target = part_of(what, name, ic, jc, descc, m, n)
        sources = checked_arrays(f"{what}: A", a, source, grid, library, dtype)
        read = elements(source, sources, grid.rank)
        targets = checked_arrays(f"{what}: {name}", c, target, grid, library, dtype, read)
        check_leading(what, "A", sources, desca)
        check_leading(what, name, targets, descc)
    move = planned(grid, transposed(source, op), target, dtype, library)
    with grid.ledger.phase("redistribute"):
        turned = sources if op == "N" else [array.T for array in sources]
        move.start(library, turned, targets, factors=[factors]).wait()


def _check_contexts(what: str, desca: Descriptor, descc: Descriptor) -> None:
    """Raise GridError if the descriptors are of several contexts. Those of p?gemr2d are over the same ranks."""
    if what != "pgemr2d" and desca.context is not descc.context:
        raise GridError(f"{what}: the descriptors are of two contexts. pgemr2d moves a matrix between contexts")
    if not desca.context.grid.same_processes(descc.context.grid):
        raise GridError(
            "pgemr2d: the two contexts are over different ranks, or these in another order: make both on one "
            "communicator, which has all the ranks of both"
        )
