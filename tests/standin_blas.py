"""cuBLAS of the stand-ins for cupy: cublasGemmEx with pointers, sizes and leading dimensions, column-major."""

from ctypes import c_char
from types import SimpleNamespace

import numpy as np
from standin_arrays import Memory
from standin_streams import get_current_stream

HANDLE = 0x1AB
TYPES = {"CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_C_32F": 4, "CUDA_C_64F": 5}
OF_TYPE = {0: "float32", 1: "float64", 2: "float16", 4: "complex64", 5: "complex128"}
"""Element types by CUDA's numbers."""
COMPUTE = {"CUBLAS_COMPUTE_32F": 68, "CUBLAS_COMPUTE_64F": 70, "CUBLAS_COMPUTE_32F_FAST_TF32": 77}
SUMS = {68: ("float16", "float32", "complex64"), 77: ("float32", "complex64"), 70: ("float64", "complex128")}
OPERATIONS = {"CUBLAS_OP_N": 0, "CUBLAS_OP_T": 1, "CUBLAS_OP_C": 2}


def gemmEx(
    handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm
):
    """cupy_backends.cuda.libs.cublas.gemmEx. Low precision is summed in float32."""
    assert handle == HANDLE and algorithm == -1 and a_type == b_type
    of_operands, of_result = OF_TYPE[a_type], OF_TYPE[c_type]
    assert of_operands in SUMS[compute] and of_result in (of_operands, "float32")
    scalar = "float32" if of_operands == "float16" else of_operands
    alpha, beta = (
        np.frombuffer((c_char * np.dtype(scalar).itemsize).from_address(at), scalar)[0].item() for at in (alpha, beta)
    )
    first = _columns(a, of_operands, (k, m) if transa else (m, k), lda)
    second = _columns(b, of_operands, (n, k) if transb else (k, n), ldb)
    result = _columns(c, of_result, (m, n), ldc)

    def work():
        left, right = _read(first, transa), _read(second, transb)
        total = alpha * (_to_sum(left, compute, scalar) @ _to_sum(right, compute, scalar))
        result[...] = total if beta == 0 else total + beta * result

    gemmEx.calls.append((of_operands, of_result, compute))
    get_current_stream().queue.add(work, [first, second], [result])


gemmEx.calls = []


def gemmStridedBatchedEx(
    handle,
    transa,
    transb,
    m,
    n,
    k,
    alpha,
    a,
    a_type,
    lda,
    a_step,
    b,
    b_type,
    ldb,
    b_step,
    beta,
    c,
    c_type,
    ldc,
    c_step,
    items,
    compute,
    algorithm,
):
    """cupy_backends.cuda.libs.cublas.gemmStridedBatchedEx, one item after the other."""
    sizes = [np.dtype(OF_TYPE[kind]).itemsize for kind in (a_type, b_type, c_type)]
    for item in range(items):
        at_a, at_b, at_c = (
            start + item * step * size for start, step, size in zip((a, b, c), (a_step, b_step, c_step), sizes)
        )
        gemmEx(
            handle,
            transa,
            transb,
            m,
            n,
            k,
            alpha,
            at_a,
            a_type,
            lda,
            at_b,
            b_type,
            ldb,
            beta,
            at_c,
            c_type,
            ldc,
            compute,
            algorithm,
        )
    gemmStridedBatchedEx.calls.append(items)


gemmStridedBatchedEx.calls = []


def _columns(pointer, dtype, shape, leading):
    """The column-major matrix at a pointer."""
    rows, cols = shape
    assert leading >= max(1, rows), f"a leading dimension of {leading} for {rows} rows"
    dtype, reach = np.dtype(dtype), (cols - 1) * leading + rows if rows and cols else 0
    memory, offset = (np.empty(0, np.uint8), 0) if not reach else Memory.at(pointer, reach * dtype.itemsize)
    return np.ndarray(shape, dtype, memory, offset, (dtype.itemsize, leading * dtype.itemsize))


def _read(matrix, operation):
    return (matrix, matrix.T, matrix.T)[operation] if operation != 2 else matrix.conj().T


def _to_sum(matrix, compute, scalar):
    """The matrix in the type of the sums. TF32 has 10 bits of mantissa."""
    matrix = matrix.astype(scalar)
    if compute == COMPUTE["CUBLAS_COMPUTE_32F_FAST_TF32"]:
        parts = matrix.view("uint32")
        parts &= np.uint32(0xFFFFE000)
    return matrix


cublas = SimpleNamespace(
    gemmEx=gemmEx,
    gemmStridedBatchedEx=gemmStridedBatchedEx,
    getVersion=lambda handle: {HANDLE: 130100}[handle],
    CUBLAS_GEMM_DEFAULT=-1,
    **COMPUTE,
    **OPERATIONS,
)
device = SimpleNamespace(get_cublas_handle=lambda: HANDLE)
