"""GEMM on device memory through the cuBLAS that cupy binds: any leading dimension, alpha and beta, no copies.

cublasGemmEx, or cublasGemmStridedBatchedEx for three dims, multiplies all types. Sums are accumulated in float32 or
wider, also for float16 operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import blas

_TYPES = {
    "float16": ("CUDA_R_16F", "CUBLAS_COMPUTE_32F", "float32"),
    "float32": ("CUDA_R_32F", "CUBLAS_COMPUTE_32F", "float32"),
    "float64": ("CUDA_R_64F", "CUBLAS_COMPUTE_64F", "float64"),
    "complex64": ("CUDA_C_32F", "CUBLAS_COMPUTE_32F", "complex64"),
    "complex128": ("CUDA_C_64F", "CUBLAS_COMPUTE_64F", "complex128"),
}
"""Element type -> (CUDA's name of the type, CUDA's name of the type of its sums, type of alpha and beta)."""
TF32 = "CUBLAS_COMPUTE_32F_FAST_TF32"
_OPERATIONS = {"N": "CUBLAS_OP_N", "T": "CUBLAS_OP_T", "C": "CUBLAS_OP_C"}


def gemm(
    cuda: Any,
    dtypes: tuple[str, str],
    a: blas.Matrix,
    b: blas.Matrix,
    c: blas.Matrix,
    alpha: complex,
    beta: complex,
    tf32: bool = False,
    conjugated: blas.Conjugated = blas.AS_THEY_ARE,
) -> None:
    """Compute C = alpha A B + beta C in the current stream. If beta is 0, C is not read. Three dims: batches.

    cuda     cupy.cuda
    dtypes   (type of A and B, type of C): equal, or float16 and float32
    tf32     whether float32 and complex64 factors may be rounded to 10 bits of mantissa

    Raises ValueError as `blas.gemm` does. Raises TooLarge for sizes, numbers of items and leading dimensions above
    2^31 - 1.
    """
    if 0 in c[1]:
        return
    items = blas.items(a, b, c) if len(c[1]) == 3 else blas.Items(1, (a[1:], b[1:], c[1:]), (0, 0, 0))
    if items.number > blas.LP64_LARGEST:
        raise blas.TooLarge(f"{items.number} items: more than {blas.LP64_LARGEST}")
    call, library = blas.arranged(*items.matrices, conjugated, blas.LP64_LARGEST), cuda.cublas
    operands, sums, scalar = _TYPES[dtypes[0]]
    if tf32 and scalar in ("float32", "complex64") and dtypes[0] == scalar:
        sums = TF32
    of_operands, of_result = (getattr(cuda.runtime, name) for name in (operands, _TYPES[dtypes[1]][0]))
    scalars, order = np.array([alpha, beta], scalar), (1, 0) if call.swapped else (0, 1)
    first, second = ((a, b)[which][0] for which in order)
    arrays = [(first, of_operands, call.lda), (second, of_operands, call.ldb), (c[0], of_result, call.ldc)]
    if len(c[1]) == 3:
        steps = *(items.strides[which] for which in order), items.strides[2]
        multiply, number = library.gemmStridedBatchedEx, [items.number]
        one, other, into = ((*array, step) for array, step in zip(arrays, steps))
    else:
        multiply, number = library.gemmEx, []
        one, other, into = arrays  # type: ignore[assignment]
    multiply(
        cuda.device.get_cublas_handle(),
        *(getattr(library, _OPERATIONS[read]) for read in (call.a_read, call.b_read)),
        call.m,
        call.n,
        call.k,
        scalars[:1].ctypes.data,
        *one,
        *other,
        scalars[1:].ctypes.data,
        *into,
        *number,
        getattr(library, sums),
        library.CUBLAS_GEMM_DEFAULT,
    )
