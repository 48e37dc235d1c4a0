"""GEMM on host memory through a BLAS: any leading dimension, alpha and beta, no copies, no GIL.

The BLAS is called through ctypes. NumPy's matmul has no beta, and scipy.linalg.blas copies arrays that are not
contiguous, so neither can accumulate into a submatrix. `blas_choice` selects the BLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

from ..layout import itemsize
from .blas_choice import chosen as chosen
from .blas_library import DTYPES as OF_ROUTINES
from .blas_library import LENGTHS, Routine, integer, scalar
from .blas_library import LP64_LARGEST as LP64_LARGEST

Matrix = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(address, shape, strides in elements)."""
Strides = tuple[tuple[int, ...], ...]
"""(shape, strides in elements)."""
Conjugated = tuple[bool, bool]
"""Whether the conjugate of A, and that of B, is multiplied."""
AS_THEY_ARE: Conjugated = (False, False)

ROUTINES = {dtype: name for name, dtype in OF_ROUTINES.items()}
DTYPES = frozenset(ROUTINES)


class TooLarge(ValueError):
    """A size or a leading dimension is larger than the integers of the BLAS: multiply in pieces (`pieces`)."""


class Arranged(NamedTuple):
    """Arguments of a GEMM for a column-major BLAS.

    swapped          whether A and B are swapped, to compute the transpose of C
    a_read, b_read   operations on the first and the second operand after the swap: "N", "T", or "C" (transposed and
                     conjugated)
    m, n, k          sizes after the swap
    lda, ldb, ldc    leading dimensions after the swap
    """

    swapped: bool
    a_read: str
    b_read: str
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int


class Items(NamedTuple):
    """Batches A, B and C of matrices.

    number     number of matrices in a batch
    matrices   (shape, strides) of one matrix of A, of B and of C
    strides    strides between consecutive matrices of A, of B and of C, in elements
    """

    number: int
    matrices: tuple[Strides, Strides, Strides]
    strides: tuple[int, int, int]


class _Call(NamedTuple):
    """The arguments of a GEMM without the addresses, its routine, and whether A and B are swapped."""

    routine: Routine
    swapped: bool
    first: tuple[Any, ...]
    lda: Any
    ldb: Any
    beta: Any
    ldc: Any


def _readings(shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, int]:
    """Return the operations ("N", "T" or both) with which a column-major BLAS can read a matrix, and the leading
    dimension for each. Strides are in elements."""
    (rows, cols), (row_stride, col_stride) = shape, strides
    if 0 in shape:
        return {"N": max(1, rows), "T": max(1, cols)}
    leading_dims = {}
    if (row_stride == 1 or rows <= 1) and (col_stride >= rows or cols <= 1):
        leading_dims["N"] = max(1, rows, col_stride if cols > 1 else 1)
    if (col_stride == 1 or cols <= 1) and (row_stride >= cols or rows <= 1):
        leading_dims["T"] = max(1, cols, row_stride if rows > 1 else 1)
    if not leading_dims:
        raise ValueError(f"BLAS needs one dim of stride 1; strides {strides} of a {rows} x {cols} matrix have none")
    return leading_dims


def _read(matrix: Strides, conjugated: bool) -> tuple[str, int] | None:
    """Return the operation with which BLAS reads A or B, and its leading dimension. None if BLAS cannot conjugate the
    matrix."""
    readings = _readings(*matrix)
    if conjugated:
        return ("C", readings["T"]) if "T" in readings else None
    return next(iter(readings.items()))


def gemm(
    dtype: str, a: Matrix, b: Matrix, c: Matrix, alpha: complex, beta: complex, conjugated: Conjugated = AS_THEY_ARE
) -> None:
    """Compute C = alpha A B + beta C. If beta is 0, C is not read. The GIL is released during the call.

    A conjugated matrix must be stored in the other order than C: column-major if C is row-major. The reason is that
    BLAS conjugates only operands that it transposes.

    Raises ValueError for a matrix without a dim of stride 1, and for a conjugated matrix in the order of C. Raises
    TooLarge for sizes and leading dimensions above 2^31 - 1 (LP64 BLAS) or 2^63 - 1 (ILP64).
    """
    bound_gemm(dtype, a, b, c, alpha, beta, conjugated)()


def gemm_batched(dtype: str, a: Matrix, b: Matrix, c: Matrix, alpha: complex, beta: complex) -> None:
    """Call `gemm` for each item of arrays of three dims. Errors, as of `gemm`, are raised before the first item."""
    (at_a, at_b, at_c), item, size = (a[0], b[0], c[0]), items(a, b, c), itemsize(dtype)
    call = _call(dtype, *item.matrices, alpha, beta, AS_THEY_ARE, chosen().largest)
    of_a, of_b, of_c = item.strides
    step_a, step_b, step_c = size * of_a, size * of_b, size * of_c
    for _ in range(item.number):
        first, second = (at_b, at_a) if call.swapped else (at_a, at_b)
        call.routine(*call.first, first, call.lda, second, call.ldb, call.beta, at_c, call.ldc, *LENGTHS)
        at_a, at_b, at_c = at_a + step_a, at_b + step_b, at_c + step_c


def bound_gemm(
    dtype: str, a: Matrix, b: Matrix, c: Matrix, alpha: complex, beta: complex, conjugated: Conjugated = AS_THEY_ARE
) -> Callable[[], None]:
    """Return a function that repeats this `gemm`. The arrays must keep their addresses."""
    if 0 in c[1]:
        return lambda: None
    call = _call(dtype, a[1:], b[1:], c[1:], alpha, beta, conjugated, chosen().largest)
    a_address, b_address = (b[0], a[0]) if call.swapped else (a[0], b[0])
    return partial(
        call.routine, *call.first, a_address, call.lda, b_address, call.ldb, call.beta, c[0], call.ldc, *LENGTHS
    )


def items(a: Matrix, b: Matrix, c: Matrix) -> Items:
    """Return the matrices in the arrays A, B and C of three dims."""
    matrices = (a[1][1:], a[2][1:]), (b[1][1:], b[2][1:]), (c[1][1:], c[2][1:])
    return Items(c[1][0], matrices, (a[2][0], b[2][0], c[2][0]))


@lru_cache(maxsize=1024)
def arranged(
    a: Strides, b: Strides, c: Strides, conjugated: Conjugated = AS_THEY_ARE, largest: int | None = None
) -> Arranged:
    """Return the GEMM of matrices with these (shape, strides). Raises ValueError as `gemm` does.

    largest   limit of the BLAS for sizes and leading dimensions; larger ones raise TooLarge. None: no limit
    """
    for order, ldc in _readings(*c).items():
        swapped = order == "T"
        first, second = (_transposed(b), _transposed(a)) if swapped else (a, b)
        one, other = _read(first, conjugated[swapped]), _read(second, conjugated[not swapped])
        if one is not None and other is not None:
            arrangement = Arranged(
                swapped, one[0], other[0], first[0][0], second[0][1], first[0][1], one[1], other[1], ldc
            )
            if largest is not None and max(arrangement[3:]) > largest:
                raise TooLarge(f"{arrangement}: larger than {largest}")
            return arrangement
    raise ValueError(
        f"BLAS conjugates a matrix only if it also transposes it. With strides {a[1]} of A, {b[1]} of B "
        f"and {c[1]} of C, a conjugated matrix (A, B: {conjugated}) would not be transposed"
    )


def pieces(a: Strides, b: Strides, c: Strides, largest: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the parts of m, n and k into which a GEMM that is `TooLarge` is divided. Parts of k are in ascending order.

    A dim whose stride is larger than `largest` is divided into single rows or columns. Memory can hold only few of
    them.

        >>> [depth for _, _, depth in pieces(((1, 5), (5, 1)), ((5, 1), (1, 1)), ((1, 1), (1, 1)), 3)]
        [slice(0, 3, None), slice(3, 6, None)]
    """
    (m, k), n = a[0], b[0][1]
    strides = ((m, a[1][0], c[1][0]), (n, b[1][1], c[1][1]), (k, a[1][1], b[1][0]))
    steps = [(size, 1 if max(both) > largest else largest) for size, *both in strides]
    yield from product(*([slice(start, start + step) for start in range(0, size, step)] for size, step in steps))


@lru_cache(maxsize=1024)
def _call(
    dtype: str, a: Strides, b: Strides, c: Strides, alpha: complex, beta: complex, conjugated: Conjugated, largest: int
) -> _Call:
    """Return the GEMM of matrices with these (shape, strides), with arguments that ctypes accepts."""
    arrangement = arranged(a, b, c, conjugated, largest)
    sizes = map(integer, (arrangement.m, arrangement.n, arrangement.k))
    first = arrangement.a_read.encode(), arrangement.b_read.encode(), *sizes, scalar(dtype, alpha)
    return _Call(
        chosen().routines[ROUTINES[dtype]],
        arrangement.swapped,
        first,
        integer(arrangement.lda),
        integer(arrangement.ldb),
        scalar(dtype, beta),
        integer(arrangement.ldc),
    )


def _transposed(matrix: Strides) -> Strides:
    shape, strides = matrix
    return shape[::-1], strides[::-1]
