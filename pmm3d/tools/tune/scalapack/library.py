"""Routines of ScaLAPACK for comparisons, by ctypes.

The library must be built for the MPI that mpi4py has loaded: for example, Debian's libscalapack-openmpi under Debian's
mpirun, in an environment without its own MPI (.venv-embed, from `make embed`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

import numpy as np
from mpi4py import MPI

from ....errors import Pmm3dError

LIBRARIES = "libscalapack-openmpi.so", "libscalapack-openmpi.so.2.2", "libscalapack.so"
LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}


class Scalapack:
    """The library.

    file   its path; default: one of LIBRARIES
    """

    def __init__(self, file: str = "") -> None:
        self._library = _loaded([file] if file else LIBRARIES)
        self._library.Csys2blacs_handle.argtypes = [c_void_p]

    def context(self, comm: MPI.Intracomm, shape: tuple[int, int], order: str = "R") -> Blacs:
        """A process grid on the first ranks of a communicator. Collective."""
        return Blacs(self._library, comm, shape, order)

    def run(self, name: str, dtype: str, *arguments: object) -> int:
        """Call p?NAME, such as p?potrf, and return its INFO; 0 if it has none.

        arguments   in its order, without INFO: letters, whole numbers, factors as float or complex, a matrix as (array,
                    i, j, descriptor), and other arrays. Arrays are those of this rank, in Fortran order
        """
        words, letters, info = list[object](), 0, c_int()
        for each in arguments:
            words += [_word(word, dtype) for word in (each if isinstance(each, tuple) else (each,))]
            letters += isinstance(each, str)
        routine = getattr(self._library, f"p{LETTERS[dtype]}{name}_")
        routine(*words, byref(info), *[c_size_t(1)] * letters)
        return info.value


class Blacs:
    """A BLACS context. number: its number; -1 on a rank that is not in it."""

    def __init__(self, library: ctypes.CDLL, comm: MPI.Intracomm, shape: tuple[int, int], order: str):
        self._library, number = library, c_int(library.Csys2blacs_handle(_comm(comm)))
        library.Cblacs_gridinit(byref(number), c_char_p(order.encode()), c_int(shape[0]), c_int(shape[1]))
        self.number = number.value

    def descriptor(self, m: int, n: int, mb: int, nb: int, rsrc: int, csrc: int, lld: int) -> np.ndarray:
        return np.array([1, self.number, m, n, mb, nb, rsrc, csrc, lld], np.int32)

    def close(self) -> None:
        if self.number >= 0:
            self._library.Cblacs_gridexit(c_int(self.number))
            self.number = -1


def _comm(comm: MPI.Intracomm) -> c_void_p:
    """The representation of an MPI_Comm in C: a pointer in Open MPI, a number in MPICH."""
    return c_void_p(MPI._handleof(comm))


def _word(argument: object, dtype: str) -> object:
    """A pointer to an argument, as Fortran passes it."""
    if isinstance(argument, str):
        return c_char_p(argument.encode())
    if isinstance(argument, int):
        return byref(c_int(argument))
    array = argument if isinstance(argument, np.ndarray) else np.array([argument], dtype)
    return array.ctypes.data_as(c_void_p)  # which keeps the array


def _loaded(names: Sequence[str]) -> ctypes.CDLL:
    """Load the first library that is found. Raises Pmm3dError if there is none, or if it uses another MPI."""
    for name in names:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError as error:
            missing = error
    else:
        raise Pmm3dError(
            f"there is no ScaLAPACK ({missing}). On Debian: apt-get install libscalapack-openmpi-dev; elsewhere name "
            "the file: pmm3d tune scalapack /path/to/libscalapack.so"
        )
    text, length = ctypes.create_string_buffer(MPI.MAX_LIBRARY_VERSION_STRING), c_int()
    library.MPI_Get_library_version(text, byref(length))
    if (theirs := text.value.decode()) != (ours := MPI.Get_library_version().rstrip("\0")):
        raise Pmm3dError(
            f"{library._name} uses {theirs.splitlines()[0]}, and mpi4py {ours.splitlines()[0]}. Start a Python whose "
            "mpi4py uses the MPI of ScaLAPACK, such as that of .venv-embed (make embed)"
        )
    return library
