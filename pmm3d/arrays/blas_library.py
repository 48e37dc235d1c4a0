"""A BLAS that is called through ctypes: SciPy's, MKL of the extra `pmm3d[mkl]`, or any shared library.

`blas_choice` selects it. A BLAS other than SciPy's is loaded in addition to those of numpy and SciPy, and its GEMMs are
checked before they are used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import Pmm3dError, install_command
from ..thread_counts import asked_threads

SCIPY, MKL = "scipy", "mkl"
DTYPES = {"sgemm": "float32", "dgemm": "float64", "cgemm": "complex64", "zgemm": "complex128"}
SYMBOLS = (
    ("{}_", False),
    ("{}", False),
    ("scipy_{}_", False),
    ("{}_64_", True),
    ("{}_64", True),
    ("scipy_{}_64_", True),
)
"""Names by which a library may export a routine, and whether integers of that routine have 64 bits (ILP64)."""
LP64_LARGEST, ILP64_LARGEST = 2**31 - 1, 2**63 - 1
ARGUMENTS = [ctypes.c_void_p] * 13 + [ctypes.c_size_t] * 2
"""Argument types of a GEMM in Fortran. The last two are the lengths of its two strings."""
LENGTHS = ctypes.c_size_t(1), ctypes.c_size_t(1)
LOADED_BYTES, THREAD_BYTES = 2**26, 3 * 2**25
"""Bytes of address space that OpenBLAS reserves when it is loaded, and bytes for each thread."""
MKL_SEQUENTIAL, MKL_GNU = 1, 3
"""Threading layers of MKL: sequential, and libgomp."""
MKL_CBWR_AUTO = 2
"""Bits of a result do not depend on the alignment of the arrays (MKL's conditional numerical reproducibility)."""
SIZES, SIZES_OF_THREADS = (37, 29, 131), (257, 263, 259)
"""m, n and k of the GEMMs that check a BLAS. They are odd and larger than the register block of any kernel. The second
sizes are large enough that several threads share the work."""
Routine = Any
"""A ctypes function."""


class BlasLibrary(NamedTuple):
    """A BLAS that is loaded.

    file      path of its shared library; "" for SciPy's
    largest   limit for sizes and leading dimensions
    refused   error of the BLAS that was selected without PMM3D_BLAS and cannot be used; "" otherwise
    """

    name: str
    file: str
    routines: dict[str, Routine]
    largest: int
    refused: str = ""


@cache
def named_blas(asked: str) -> BlasLibrary:
    """Load and check "mkl", or the shared library at a path. The loader searches for a file name without a folder.

    Raises Pmm3dError if the library cannot be loaded, if it lacks sgemm, dgemm, cgemm or zgemm, or if their results are
    wrong. Raises MemoryError if a limit leaves too little address space.
    """
    _check_room()
    file = mkl_file() if asked == MKL else asked
    if not file:
        raise Pmm3dError(
            "PMM3D_BLAS=mkl: MKL cannot be loaded here. Install it in this environment: "
            f"{install_command(MKL)}. To use another MKL, set PMM3D_BLAS to the path of its libmkl_rt.so"
        )
    try:
        handle = ctypes.CDLL(file, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise Pmm3dError(
            f"PMM3D_BLAS={asked}: no such BLAS can be loaded here ({error}). It is one of scipy, mkl, "
            "auto, or the path of a shared library"
        ) from None
    if hasattr(handle, "MKL_Set_Threading_Layer"):
        _set_mkl(handle, asked)
    entry_points = {name: _routine(handle, name) for name in DTYPES}
    if lacking := [name for name, routine in entry_points.items() if routine is None]:
        raise Pmm3dError(
            f"PMM3D_BLAS={asked}: {handle._name} has no {', '.join(lacking)}, by any of the usual names. "
            "Name the library itself, not one that it is a part of"
        )
    routines = {name: routine for name, (routine, _) in entry_points.items()}  # type: ignore[misc]
    wide = all(is_wide for _, is_wide in entry_points.values())  # type: ignore[misc]
    library = BlasLibrary(
        asked, file_of(routines["dgemm"]) or handle._name, routines, ILP64_LARGEST if wide else LP64_LARGEST
    )
    for name in DTYPES:
        _check(library, name)
    return library


@cache
def mkl_file() -> str:
    """Return the path of MKL in the lib folder of this environment, if PyPI's package `mkl` is installed; else ""."""
    for file in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so.*")):
        from importlib.metadata import PackageNotFoundError, version  # slow, and needed only if the file exists

        with suppress(PackageNotFoundError):
            return str(file) if version("mkl") else ""
    return ""


def _set_mkl(handle: ctypes.CDLL, asked: str) -> None:
    """Set the threads of an MKL before its first GEMM, unless the environment sets them.

    MKL shares libgomp with torch. With MKL's default, libiomp5, a torch that is loaded afterwards would use libiomp5
    too. If libgomp is already loaded, libiomp5 gives wrong products. Raises Pmm3dError if there is no libgomp.
    """
    threads = asked_threads()
    if "MKL_THREADING_LAYER" not in os.environ:
        if threads > 1:
            try:  # MKL ends the process if it finds none
                ctypes.CDLL("libgomp.so.1")
            except OSError:
                raise Pmm3dError(
                    f"PMM3D_BLAS={asked}: MKL needs libgomp.so.1 for {threads} threads, and it is not "
                    "installed (apt-get install libgomp1). Or set OMP_NUM_THREADS=1"
                ) from None
        handle.MKL_Set_Threading_Layer(MKL_GNU if threads > 1 else MKL_SEQUENTIAL)
    handle.MKL_Set_Dynamic(0)
    handle.MKL_Set_Num_Threads(threads)
    if "MKL_CBWR" not in os.environ:
        handle.MKL_CBWR_Set(MKL_CBWR_AUTO)


def _routine(handle: ctypes.CDLL, name: str) -> tuple[Routine, bool] | None:
    for pattern, wide in SYMBOLS:
        with suppress(AttributeError):
            routine = getattr(handle, pattern.format(name))
            routine.restype, routine.argtypes = None, ARGUMENTS
            return routine, wide
    return None


class _Symbol(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def file_of(routine: Routine) -> str:
    """Return the path of the library that contains a routine; "" if the system has no dladdr."""
    symbol, this = _Symbol(), ctypes.CDLL(None)
    if hasattr(this, "dladdr") and this.dladdr(ctypes.cast(routine, ctypes.c_void_p), ctypes.byref(symbol)):
        return os.path.realpath(os.fsdecode(symbol.file or b""))
    return ""


def _check(library: BlasLibrary, name: str) -> None:
    """Raise Pmm3dError unless GEMMs of integers are exact, for each pair of operations, and multithreaded."""
    dtype, random = DTYPES[name], np.random.default_rng(1)
    reads = "NTC" if dtype.startswith("complex") else "NT"
    forms = [(a_read, b_read, SIZES) for a_read in reads for b_read in reads]
    for a_read, b_read, (m, n, k) in [*forms, ("N", "N", SIZES_OF_THREADS)][: None if asked_threads() > 1 else -1]:
        a, b, c = (_integers(random, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        wanted = 2 * (a @ b) - c
        stored_a, stored_b = _stored(a, a_read), _stored(b, b_read)
        computed = np.asfortranarray(c)
        call(library.routines[name], dtype, a_read, b_read, (m, n, k), 2, stored_a, stored_b, -1, computed)
        if not np.array_equal(computed, wanted):
            raise Pmm3dError(
                f"PMM3D_BLAS={library.name}: {name} of {library.file} gives wrong results ({a_read}"
                f"{b_read}, {m} x {n} x {k}); it is not used. Another release of it, or another BLAS"
            )


def _integers(random: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return random integers that are small enough that sums of their products are exact in float32."""
    real, imaginary = random.integers(-4, 5, (2, *shape))
    return (real + 1j * imaginary if dtype.startswith("complex") else real).astype(dtype)


def _stored(matrix: np.ndarray, read: str) -> np.ndarray:
    """Return a column-major array that BLAS reads as the matrix with the operation `read`. Its leading dimension is
    larger than its number of rows."""
    stored = {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[read]
    padded = np.zeros((stored.shape[0] + 3, stored.shape[1]), matrix.dtype, order="F")
    padded[: stored.shape[0]] = stored
    return padded[: stored.shape[0]]


def call(
    routine: Routine,
    dtype: str,
    a_read: str,
    b_read: str,
    sizes: tuple[int, int, int],
    alpha: complex,
    a: np.ndarray,
    b: np.ndarray,
    beta: complex,
    c: np.ndarray,
) -> None:
    """Compute C = alpha A B + beta C for column-major arrays."""
    lead = (array.strides[1] // array.itemsize for array in (a, b, c))
    lda, ldb, ldc = map(integer, lead)
    routine(
        a_read.encode(),
        b_read.encode(),
        *map(integer, sizes),
        scalar(dtype, alpha),
        a.ctypes.data,
        lda,
        b.ctypes.data,
        ldb,
        scalar(dtype, beta),
        c.ctypes.data,
        ldc,
        *LENGTHS,
    )


def integer(value: int) -> Any:
    """Return a reference to an integer, for Fortran: 64 bits, of which an LP64 BLAS reads the lower 32."""
    return ctypes.byref(ctypes.c_int64(value) if sys.byteorder == "little" else ctypes.c_int(value))


def scalar(dtype: str, value: complex) -> Any:
    """Return a reference to a number: one real number, or two for complex types."""
    real = ctypes.c_float if dtype in ("float32", "complex64") else ctypes.c_double
    if not dtype.startswith("complex"):
        return ctypes.byref(real(value.real))
    value = complex(value)
    return ctypes.byref((real * 2)(value.real, value.imag))


def scipy_blas() -> BlasLibrary:
    """Return the BLAS of SciPy, whose function pointers scipy.linalg.cython_blas exports."""
    routines = {name: scipy_routine("cython_blas", name, ARGUMENTS) for name in DTYPES}
    return BlasLibrary(SCIPY, "", routines, LP64_LARGEST)


def scipy_routine(module: str, name: str, arguments: Sequence[Any]) -> Routine:
    """Return a routine of SciPy's "cython_blas" or "cython_lapack", with these types of its arguments."""
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = _cython_module(module).__pyx_capi__[name]
    return ctypes.CFUNCTYPE(None, *arguments)(get_pointer(capsule, get_name(capsule)))


@cache
def _cython_module(own: str) -> ModuleType:
    """Load a module of scipy.linalg, such as cython_blas, without scipy.linalg, because that import opens 250 more
    files per rank.

    The module imports the package scipy, as usual. Its own entry in sys.modules is removed, so a later import of
    scipy.linalg is complete. It has the same routines.
    """
    name, scipy, module = f"scipy.linalg.{own}", PathFinder.find_spec("scipy"), None
    if name in sys.modules or scipy is None or scipy.submodule_search_locations is None:
        return import_module(name)
    _check_room()
    try:
        spec = PathFinder.find_spec(own, [str(Path(folder, "linalg")) for folder in scipy.submodule_search_locations])
        module = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    except Exception:  # a build of scipy with other files: use the normal import below
        pass
    finally:
        if module is not None and sys.modules.get(name) is module:
            del sys.modules[name]
    return import_module(name)


def _check_room() -> None:
    """Raise MemoryError if a limit leaves OpenBLAS too little address space, because OpenBLAS would retry for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    needed = LOADED_BYTES + THREAD_BYTES * asked_threads()
    try:
        mmap.mmap(-1, needed).close()
    except OSError:
        raise MemoryError(
            f"the BLAS needs {needed >> 20} MiB of address space, and the limit of this process leaves "
            "less: raise it (ulimit -v), or set OPENBLAS_NUM_THREADS=1"
        ) from None
