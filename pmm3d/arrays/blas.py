"""GEMM on host memory through the BLAS that SciPy carries: any leading dimension, alpha and beta, no copies, no GIL.

scipy.linalg.cython_blas publishes the BLAS of the installation as function pointers; ctypes calls them. NumPy's matmul
has no beta, and scipy.linalg.blas copies what is not contiguous, so neither can accumulate into a part of a matrix.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

Matrix = tuple[int, tuple[int, ...], tuple[int, ...]]
Lying = tuple[tuple[int, ...], ...]
"""(address, shape, strides in elements)."""
Conjugated = tuple[bool, bool]
"""Whether A and B stand for their conjugates."""
AS_THEY_ARE: Conjugated = (False, False)

_ROUTINES = {
    "float32": ("sgemm", ctypes.c_float, 1),
    "float64": ("dgemm", ctypes.c_double, 1),
    "complex64": ("cgemm", ctypes.c_float, 2),
    "complex128": ("zgemm", ctypes.c_double, 2),
}
DTYPES = frozenset(_ROUTINES)
LARGEST = 2**31 - 1
"""Of a BLAS whose integers have 32 bits."""
LOADED_BYTES, THREAD_BYTES = 2**26, 3 * 2**25
"""Address space that an OpenBLAS takes when it is loaded, besides for each thread."""
THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@cache
def _cython_blas() -> ModuleType:
    """The module scipy.linalg.cython_blas, loaded alone, behind scipy's back.

    `import scipy.linalg` would have each rank open 250 files more, most of them needless for this module. It asks for a
    parent package, so an empty one stands in for scipy while it is loaded. Nothing of that stays: a later import of
    scipy is a whole one, over the same routines.
    """
    name, before, spec = "scipy.linalg.cython_blas", set(sys.modules), PathFinder.find_spec("scipy")
    if name in before or spec is None or spec.submodule_search_locations is None:
        return import_module(name)
    _check_room()
    stand_in = ModuleType("scipy")
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules.setdefault("scipy", stand_in)
    try:
        spec = PathFinder.find_spec(name, [str(Path(folder, "linalg")) for folder in stand_in.__path__])
        module = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    except Exception:  # a scipy of another build: as anyone would load it
        pass
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.startswith("scipy") and loaded not in before]:
            del sys.modules[loaded]
    return import_module(name)


def _check_room() -> None:
    """Raises MemoryError where a limit leaves an OpenBLAS too little address space: it would try to get it for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    asked = [int(text) for text in map(os.environ.get, THREAD_COUNTS) if text and text.isdecimal()]
    needed = LOADED_BYTES + THREAD_BYTES * min([*asked[:1], os.cpu_count() or 1])
    try:
        mmap.mmap(-1, needed).close()
    except OSError:
        raise MemoryError(f"the BLAS needs {needed >> 20} MiB of address space, and the limit of this process leaves "
                          "less: raise it (ulimit -v), or set OPENBLAS_NUM_THREADS=1") from None


@cache
def _routine(name: str) -> Callable[..., None]:
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = _cython_blas().__pyx_capi__[name]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(get_pointer(capsule, get_name(capsule)))


class Arranged(NamedTuple):
    """A GEMM as a column-major BLAS sees it: whether A and B change places (C is transposed), how each of the two reads
    then ("N", "T", "C": transposed and conjugated), sizes and leading dimensions."""

    swapped: bool
    a_read: str
    b_read: str
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int


class _Call(NamedTuple):
    """A GEMM but for the addresses: its routine, whether A and B change places, and the other arguments."""

    routine: Callable[..., None]
    swapped: bool
    first: tuple[Any, ...]
    lda: Any
    ldb: Any
    beta: Any
    ldc: Any


def _readings(shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, int]:
    """How a matrix with these strides (in elements) reads as a column-major one, N, T or either, with its leading
    dimension."""
    (rows, cols), (row_stride, col_stride) = shape, strides
    if 0 in shape:
        return {"N": max(1, rows), "T": max(1, cols)}
    found = {}
    if (row_stride == 1 or rows <= 1) and (col_stride >= rows or cols <= 1):
        found["N"] = max(1, rows, col_stride if cols > 1 else 1)
    if (col_stride == 1 or cols <= 1) and (row_stride >= cols or rows <= 1):
        found["T"] = max(1, cols, row_stride if rows > 1 else 1)
    if not found:
        raise ValueError(f"BLAS needs one dim of stride 1; strides {strides} of a {rows} x {cols} matrix have none")
    return found


def _read(matrix: Lying, conjugated: bool) -> tuple[str, int] | None:
    """How BLAS reads A or B, and the leading dimension; None where it cannot conjugate it."""
    readings = _readings(*matrix)
    if conjugated:
        return ("C", readings["T"]) if "T" in readings else None
    return next(iter(readings.items()))


def gemm(dtype: str, a: Matrix, b: Matrix, c: Matrix, alpha: complex, beta: complex,
         conjugated: Conjugated = AS_THEY_ARE) -> None:
    """C = alpha A B + beta C; beta = 0 does not read C. A conjugated matrix lies the other way than C, for BLAS
    conjugates what it transposes: by columns where C lies by rows.

    Raises ValueError for matrices that have no dim of stride 1, and for a conjugated one that lies as C does. Dims and
    leading dimensions are at most 2^31 - 1 (LP64 BLAS). The GIL is free during the call.
    """
    if 0 in c[1]:
        return
    call = _call(dtype, a[1:], b[1:], c[1:], alpha, beta, conjugated)
    a_address, b_address = (b[0], a[0]) if call.swapped else (a[0], b[0])
    call.routine(*call.first, a_address, call.lda, b_address, call.ldb, call.beta, c[0], call.ldc)


@lru_cache(maxsize=1024)
def arranged(a: Lying, b: Lying, c: Lying, conjugated: Conjugated = AS_THEY_ARE) -> Arranged:
    """The GEMM of matrices with these (shape, strides). Raises ValueError as `gemm` does."""
    for order, ldc in _readings(*c).items():
        swapped = order == "T"
        first, second = (_transposed(b), _transposed(a)) if swapped else (a, b)
        reads = _read(first, conjugated[swapped]), _read(second, conjugated[not swapped])
        if reads[0] is not None and reads[1] is not None:
            return _arranged(swapped, reads[0], reads[1], (first[0][0], second[0][1], first[0][1]), ldc)
    raise ValueError(f"BLAS conjugates only what it transposes; strides {a[1]} of A, {b[1]} of B and {c[1]} of C "
                     f"leave it a conjugated matrix (A, B: {conjugated}) that lies as C does")


def _arranged(swapped: bool, a: tuple[str, int], b: tuple[str, int], sizes: tuple[int, int, int], ldc: int) -> Arranged:
    (a_read, lda), (b_read, ldb), (m, n, k) = a, b, sizes
    if max(m, n, k, lda, ldb, ldc) > LARGEST:
        raise ValueError(f"local GEMM {m} x {n} x {k} (leading dimensions {lda}, {ldb}, {ldc}) exceeds 2^31 - 1")
    return Arranged(swapped, a_read, b_read, m, n, k, lda, ldb, ldc)


@lru_cache(maxsize=1024)
def _call(dtype: str, a: Lying, b: Lying, c: Lying, alpha: complex, beta: complex, conjugated: Conjugated) -> _Call:
    """Of matrices with these (shape, strides)."""
    found, (name, real, parts) = arranged(a, b, c, conjugated), _ROUTINES[dtype]
    sizes = [_integer(size) for size in (found.m, found.n, found.k)]
    first = found.a_read.encode(), found.b_read.encode(), *sizes, _scalar(real, parts, alpha)
    return _Call(_routine(name), found.swapped, first, _integer(found.lda), _integer(found.ldb),
                 _scalar(real, parts, beta), _integer(found.ldc))


def _transposed(matrix: Lying) -> Lying:
    shape, strides = matrix
    return shape[::-1], strides[::-1]


def _integer(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


def _scalar(real: Any, parts: int, value: complex) -> Any:
    if parts == 1:
        return ctypes.byref(real(value))
    value = complex(value)
    return ctypes.byref((real * 2)(value.real, value.imag))
