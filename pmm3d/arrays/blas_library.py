"""Which BLAS multiplies on the host: the one that SciPy carries, or the one that PMM3D_BLAS names.

Sites have better ones than a wheel: `PMM3D_BLAS=mkl`, `PMM3D_BLAS=/opt/blis/lib/libblis.so`. One that is named is
loaded for itself, beside those of numpy and SciPy, and its GEMMs are checked once before they are trusted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import Pmm3dError
from ..thread_counts import asked_threads

VARIABLE = "PMM3D_BLAS"
SCIPY = "scipy"
"""The default: see `scipy_blas`."""


class Known(NamedTuple):
    """A BLAS by name: its files, best first, and variables that name its place (environment modules set them)."""

    files: tuple[str, ...]
    places: tuple[str, ...] = ()


KNOWN = {
    "mkl": Known(("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so.1", "libmkl_rt.so"), ("MKLROOT",)),
    "blis": Known(("libblis-mt.so.5", "libblis-mt.so.4", "libblis.so.5", "libblis.so.4", "libblis.so.3",
                   "libblis-mt.so", "libblis.so"), ("BLIS_DIR", "AOCL_ROOT")),
    "openblas": Known(("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so"), ("OPENBLAS_DIR", "OpenBLAS_HOME")),
    "flexiblas": Known(("libflexiblas.so.3", "libflexiblas.so"), ("FLEXIBLAS_DIR", "EBROOTFLEXIBLAS")),
    "libsci": Known(("libsci_gnu_mp.so", "libsci_gnu.so", "libsci_cray_mp.so", "libsci_cray.so", "libsci_nvidia_mp.so",
                     "libsci_amd_mp.so"), ("CRAY_LIBSCI_PREFIX_DIR", "CRAY_PE_LIBSCI_PREFIX_DIR")),
    "nvpl": Known(("libnvpl_blas_lp64_gomp.so.0", "libnvpl_blas_lp64_seq.so.0", "libnvpl_blas_lp64_gomp.so"),
                  ("NVPL_ROOT",)),
    "armpl": Known(("libarmpl_lp64_mp.so", "libarmpl_lp64.so"), ("ARMPL_DIR", "ARMPL_ROOT")),
}
BELOW = ("lib", "lib64", "lib/intel64", ".")
DTYPES = {"sgemm": "float32", "dgemm": "float64", "cgemm": "complex64", "zgemm": "complex128"}
SYMBOLS = (("{}_", False), ("{}", False), ("scipy_{}_", False), ("{}_64_", True), ("{}_64", True),
           ("scipy_{}_64_", True))
"""By which a library may export a routine, and whether its integers then have 64 bits (ILP64)."""
LP64_LARGEST, ILP64_LARGEST = 2**31 - 1, 2**63 - 1
ARGUMENTS = [ctypes.c_void_p] * 13 + [ctypes.c_size_t] * 2
"""Of a GEMM in Fortran: behind them the lengths of its two texts."""
LENGTHS = ctypes.c_size_t(1), ctypes.c_size_t(1)
LOADED_BYTES, THREAD_BYTES = 2**26, 3 * 2**25
"""Address space that an OpenBLAS takes when it is loaded, besides for each thread."""
SHORT_SPIN = "OPENBLAS_THREAD_TIMEOUT", "16"
"""Threads of OpenBLAS wait for the next GEMM on their cores for so many cycles, as a power of 2, unless the environment
says otherwise: 20 us. With the 20 ms that it takes by itself no other thread of the rank has a core between GEMMs."""
SIZES = 37, 29, 131
"""m, n and k of the GEMMs by which a BLAS is checked: odd, beyond the registers of any kernel."""
Routine = Any
"""A function of ctypes."""


class BlasLibrary(NamedTuple):
    """A BLAS that can be called. file: where it was loaded from; "" for SciPy's.

    largest   dims and leading dimensions that it takes
    """

    name: str
    file: str
    routines: dict[str, Routine]
    largest: int


def asked_for() -> str:
    """What PMM3D_BLAS names; "scipy" where it names nothing."""
    return os.environ.get(VARIABLE) or SCIPY


@cache
def chosen() -> BlasLibrary:
    """The BLAS of this process, for as long as it lives. Raises Pmm3dError as `named_blas` does, and MemoryError where
    a limit leaves it too little address space."""
    asked, (name, value) = asked_for(), SHORT_SPIN
    with environment({name: os.environ.get(name, value)}):
        return scipy_blas() if asked == SCIPY else named_blas(asked)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """As a context: the environment of this process has these variables, which a library reads when it is loaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None) if text is None else os.environ.update({name: text})


def blas_file() -> str:
    """Where the BLAS of this process is from, if PMM3D_BLAS names one; else ""."""
    return "" if asked_for() == SCIPY else chosen().file


@cache
def named_blas(asked: str) -> BlasLibrary:
    """The BLAS of a name of KNOWN, or of a path, loaded and checked.

    Raises Pmm3dError if there is none, if it lacks one of sgemm, dgemm, cgemm and zgemm, or if they are wrong.
    """
    _check_room()
    handle, tried = None, []
    for candidate in _candidates(asked):
        try:
            handle = ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_LOCAL)
            break
        except OSError as error:
            tried.append(str(error))
    if handle is None:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: no such BLAS can be loaded here ({tried[0]}). It is one of "
                         f"{', '.join([SCIPY, 'auto', *KNOWN])}, or the path of a shared library")
    found = {name: _routine(handle, name) for name in DTYPES}
    if lacking := [name for name, routine in found.items() if routine is None]:
        raise Pmm3dError(f"PMM3D_BLAS={asked}: {handle._name} has no {', '.join(lacking)}, by any of the usual names. "
                         "Name the library itself, not one that it is a part of")
    routines = {name: routine for name, (routine, _) in found.items()}  # type: ignore[misc]
    wide = all(is_wide for _, is_wide in found.values())  # type: ignore[misc]
    library = BlasLibrary(asked, file_of(routines["dgemm"]) or handle._name, routines,
                          ILP64_LARGEST if wide else LP64_LARGEST)
    for name in DTYPES:
        _check(library, name)
    return library


def _candidates(asked: str) -> Iterator[str]:
    """Paths and names for the loader: where modules and this environment have it, then where the system looks."""
    if asked not in KNOWN:
        yield asked if "/" in asked else f"./{asked}"
        return
    known = KNOWN[asked]
    places = [Path(os.environ[variable]) for variable in known.places if os.environ.get(variable)]
    folders = [place / below for place in places for below in BELOW] + [Path(sys.prefix, "lib")]
    yield from (str(folder / file) for folder in folders for file in known.files if (folder / file).exists())
    yield from known.files


def _routine(handle: ctypes.CDLL, name: str) -> tuple[Routine, bool] | None:
    for pattern, wide in SYMBOLS:
        with suppress(AttributeError):
            routine = getattr(handle, pattern.format(name))
            routine.restype, routine.argtypes = None, ARGUMENTS
            return routine, wide
    return None


class _Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]


def file_of(routine: Routine) -> str:
    """The library that a routine is in; "" where the system does not tell."""
    found, this = _Symbol(), ctypes.CDLL(None)
    if hasattr(this, "dladdr") and this.dladdr(ctypes.cast(routine, ctypes.c_void_p), ctypes.byref(found)):
        return os.path.realpath(os.fsdecode(found.file or b""))
    return ""


def _check(library: BlasLibrary, name: str) -> None:
    """Raises Pmm3dError unless GEMMs of every form, of small whole numbers, come out exactly."""
    (m, n, k), dtype, random = SIZES, DTYPES[name], np.random.default_rng(1)
    complex_ = dtype.startswith("complex")
    for a_read in "NTC" if complex_ else "NT":
        for b_read in "NTC" if complex_ else "NT":
            a, b, c = (_integers(random, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
            wanted = 2 * (a @ b) - c
            stored_a, stored_b = _stored(a, a_read), _stored(b, b_read)
            found = np.asfortranarray(c)
            call(library.routines[name], dtype, a_read, b_read, (m, n, k), 2, stored_a, stored_b, -1, found)
            if not np.array_equal(found, wanted):
                raise Pmm3dError(f"PMM3D_BLAS={library.name}: {name} of {library.file} gives wrong results ({a_read}"
                                 f"{b_read}, {m} x {n} x {k}); it is not used. Another release of it, or another BLAS")


def _integers(random: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Small enough that sums of products of them are exact in float32."""
    real, imaginary = random.integers(-4, 5, (2, *shape))
    return (real + 1j * imaginary if dtype.startswith("complex") else real).astype(dtype)


def _stored(matrix: np.ndarray, read: str) -> np.ndarray:
    """By columns, so that a BLAS that reads it so sees the matrix, with a leading dimension beyond its rows."""
    stored = {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[read]
    whole = np.zeros((stored.shape[0] + 3, stored.shape[1]), matrix.dtype, order="F")
    whole[: stored.shape[0]] = stored
    return whole[: stored.shape[0]]


def call(routine: Routine, dtype: str, a_read: str, b_read: str, sizes: tuple[int, int, int], alpha: complex,
         a: np.ndarray, b: np.ndarray, beta: complex, c: np.ndarray) -> None:
    """C = alpha A B + beta C of arrays that lie by columns."""
    lead = (array.strides[1] // array.itemsize for array in (a, b, c))
    lda, ldb, ldc = map(integer, lead)
    routine(a_read.encode(), b_read.encode(), *map(integer, sizes), scalar(dtype, alpha), a.ctypes.data, lda,
            b.ctypes.data, ldb, scalar(dtype, beta), c.ctypes.data, ldc, *LENGTHS)


def integer(value: int) -> Any:
    """By reference, as Fortran wants it: 64 bits, of which a BLAS of 32 reads the lower ones."""
    return ctypes.byref(ctypes.c_int64(value) if sys.byteorder == "little" else ctypes.c_int(value))


def scalar(dtype: str, value: complex) -> Any:
    """By reference: one real number, or two."""
    real = ctypes.c_float if dtype in ("float32", "complex64") else ctypes.c_double
    if not dtype.startswith("complex"):
        return ctypes.byref(real(value.real))
    value = complex(value)
    return ctypes.byref((real * 2)(value.real, value.imag))


def scipy_blas() -> BlasLibrary:
    """scipy.linalg.cython_blas publishes the BLAS of the installation as function pointers."""
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsules = {name: _cython_blas().__pyx_capi__[name] for name in DTYPES}
    prototype = ctypes.CFUNCTYPE(None, *ARGUMENTS)
    routines = {name: prototype(get_pointer(capsule, get_name(capsule))) for name, capsule in capsules.items()}
    return BlasLibrary(SCIPY, "", routines, LP64_LARGEST)


@cache
def _cython_blas() -> ModuleType:
    """The module scipy.linalg.cython_blas, loaded without scipy.linalg, which would have each rank open 250 files more.

    It imports the package scipy itself, as any import does. Its own entry in sys.modules is removed: a later import of
    scipy.linalg is a whole one, with the same routines.
    """
    name, scipy, module = "scipy.linalg.cython_blas", PathFinder.find_spec("scipy"), None
    if name in sys.modules or scipy is None or scipy.submodule_search_locations is None:
        return import_module(name)
    _check_room()
    try:
        spec = PathFinder.find_spec("cython_blas", [str(Path(folder, "linalg")) for folder
                                                    in scipy.submodule_search_locations])
        module = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    except Exception:  # a scipy of another build: as anyone would load it
        pass
    finally:
        if module is not None and sys.modules.get(name) is module:
            del sys.modules[name]
    return import_module(name)


def _check_room() -> None:
    """Raises MemoryError where a limit leaves an OpenBLAS too little address space: it would try to get it for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    needed = LOADED_BYTES + THREAD_BYTES * asked_threads()
    try:
        mmap.mmap(-1, needed).close()
    except OSError:
        raise MemoryError(f"the BLAS needs {needed >> 20} MiB of address space, and the limit of this process leaves "
                          "less: raise it (ulimit -v), or set OPENBLAS_NUM_THREADS=1") from None
