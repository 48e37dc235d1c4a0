"""Products of float16, whose rounding errors add up: they go through float32. Which types a product has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

from ..errors import DTypeError
from ..layout import LOW_PRECISION, MATRIX_DTYPES
from .threads import by_rows, copy_into


class WorkArrays(Protocol):
    """What lends work arrays: a Workspace."""

    def borrow(self, shape: tuple[int, ...], dtype: str, library: Any) -> AbstractContextManager[Any]: ...


@cache
def check_gemm_types(a: str, b: str, c: str) -> None:
    """Raises DTypeError for types of A, B and C that no BLAS multiplies together: it would read one as another."""
    if a not in MATRIX_DTYPES or a != b or (c != a and (c != "float32" or a not in LOW_PRECISION)):
        raise DTypeError(f"gemm: A is {a}, B {b} and C {c}. The three are of one type of {', '.join(MATRIX_DTYPES)}; C "
                         "may be float32 where A and B are float16 or bfloat16. Convert first")


def widened_gemm(library: Any, a: Any, b: Any, c: Any, alpha: complex, beta: complex, work: WorkArrays) -> None:
    """float16 operands through float32 copies; C is float16 or a float32 accumulator."""
    with work.borrow(a.shape, "float32", library) as wide_a, work.borrow(b.shape, "float32", library) as wide_b:
        copy_into(library, a, wide_a)
        copy_into(library, b, wide_b)
        if library.dtype(c) == "float32":
            library.gemm(wide_a, wide_b, c, alpha, beta, work)
            return
        with work.borrow(c.shape, "float32", library) as wide_c:
            if beta != 0:
                copy_into(library, c, wide_c)
            library.gemm(wide_a, wide_b, wide_c, alpha, beta, work)
            copy_into(library, wide_c, c)


def scale(library: Any, c: Any, beta: complex) -> None:
    """C = beta C, rounded once. If beta is 0, C is not read.

        >>> import numpy as np
        >>> from pmm3d.arrays import NumpyLibrary
        >>> c = np.ones((1, 2))
        >>> scale(NumpyLibrary(), c, 3)
        >>> c
        array([[3., 3.]])
    """
    if not library.has_data:
        library.passed("scale", c, *([] if beta == 0 else [c]))
    elif beta == 0:
        c[...] = 0
    elif beta != 1 and library.dtype(c) in LOW_PRECISION:
        by_rows(library, lambda part: library.astype(part, "float32") * beta, c, c)
    elif beta != 1:
        library.xp.multiply(c, beta, out=c)
