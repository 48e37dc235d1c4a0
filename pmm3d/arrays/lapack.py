"""Routines of LAPACK and of level 3 BLAS for one triangle, on arrays in host memory.

They are those of SciPy, called through ctypes: any leading dimension, without copies, and without importing
scipy.linalg.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .blas_library import scalar, scipy_routine

Gemm = Callable[[np.ndarray, np.ndarray, np.ndarray, complex, complex], None]
LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
ARGUMENTS = {"trsm": ("cython_blas", 11), "potrf": ("cython_lapack", 5), "trtri": ("cython_lapack", 6)}
"""Module of SciPy and number of arguments of each routine."""


LEAF = 64
"""Largest triangle that is solved or inverted by one call. Most operations are then products, which are faster: the
triangular solve of a BLAS may have a third of the speed of its GEMM."""


def trsm(side: str, uplo: str, op: str, diag: str, alpha: complex, a: np.ndarray, b: np.ndarray) -> None:
    """B = alpha op(A)^-1 B ("L"), or alpha B op(A)^-1 ("R"), of arrays stored by columns."""
    m, n = b.shape
    if 0 in b.shape:
        return
    _call("trsm", b.dtype.name, side, uplo, op, diag, m, n, scalar(b.dtype.name, alpha), *_stored(a), *_stored(b))


def potrf(uplo: str, a: np.ndarray) -> int:
    """Overwrite a triangle of an array stored by columns with its Cholesky factor; return INFO.

    NaN on the diagonal of the factor is an error too, which not every LAPACK reports.
    """
    info = ctypes.c_int()
    _call("potrf", a.dtype.name, uplo, len(a), *_stored(a), ctypes.byref(info))
    unknown = np.flatnonzero(np.isnan(a.diagonal()))
    return info.value or (int(unknown[0]) + 1 if len(unknown) else 0)


def trtri(uplo: str, diag: str, a: np.ndarray) -> int:
    """Overwrite a triangle of an array stored by columns with its inverse; return INFO."""
    info = ctypes.c_int()
    _call("trtri", a.dtype.name, uplo, diag, len(a), *_stored(a), ctypes.byref(info))
    return info.value


def solve(triangle: np.ndarray, x: np.ndarray, left: bool, lower: bool, unit: bool, alpha: complex, gemm: Gemm) -> None:
    """X = alpha T^-1 X, or alpha X T^-1 if not `left`, by halves. Arrays are stored by columns or by rows.

    gemm   function (A, B, C, alpha, beta) that computes C = alpha A B + beta C
    """
    size = len(triangle)
    if size <= LEAF:
        if not _by_columns(x):
            triangle, x, left, lower = triangle.T, x.T, not left, not lower
        uplo, side, diag = "UL"[lower], "RL"[left], "NU"[unit]
        if _by_columns(triangle):
            trsm(side, uplo, "N", diag, alpha, triangle, x)
        else:
            trsm(side, "LU"[lower], "T", diag, alpha, triangle.T, x)
        return
    middle = (size // 2 + LEAF - 1) // LEAF * LEAF
    halves = slice(0, middle), slice(middle, size)
    first, then = halves if lower == left else halves[::-1]
    mine, others = (x[first], x[then]) if left else (x[:, first], x[:, then])
    solve(triangle[first, first], mine, left, lower, unit, alpha, gemm)
    if left:
        gemm(triangle[then, first], mine, others, -1, alpha)
    else:
        gemm(mine, triangle[first, then], others, -1, alpha)
    solve(triangle[then, then], others, left, lower, unit, 1, gemm)


def invert(triangle: np.ndarray, unit: bool, gemm: Gemm) -> None:
    """Overwrite a lower triangle, stored by columns with zeros above, with its inverse. Its diagonal is not 0."""
    size = len(triangle)
    if size <= LEAF:
        trtri("L", "NU"[unit], triangle)
        return
    middle = (size // 2 + LEAF - 1) // LEAF * LEAF
    first, then, below = triangle[:middle, :middle], triangle[middle:, middle:], triangle[middle:, :middle]
    for half in (first, then):
        invert(half, unit, gemm)
    product = np.empty(below.shape, below.dtype, order="F")
    gemm(then, below, product, 1, 0)
    gemm(product, first, below, -1, 0)


def _by_columns(array: np.ndarray) -> bool:
    return array.strides[0] == array.itemsize or len(array) == 1


def _call(name: str, dtype: str, *arguments: Any) -> None:
    passed = [
        each.encode() if isinstance(each, str) else ctypes.byref(ctypes.c_int(each)) if isinstance(each, int) else each
        for each in arguments
    ]
    _routine(name, dtype)(*passed)


def _stored(array: np.ndarray) -> tuple[Any, int]:
    """Address and leading dimension of an array stored by columns."""
    rows, cols = array.shape
    steps = array.strides
    if rows > 1 and steps[0] != array.itemsize:
        raise ValueError(f"an array with the strides {steps} is not stored by columns")
    return ctypes.c_void_p(array.ctypes.data), max(1, rows, steps[1] // array.itemsize if cols > 1 else 1)


@cache
def _routine(name: str, dtype: str) -> Any:
    module, arguments = ARGUMENTS[name]
    return scipy_routine(module, LETTERS[dtype] + name, [ctypes.c_void_p] * arguments)
