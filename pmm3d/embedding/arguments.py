"""Arguments from C: addresses, characters and numbers, all passed as integers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import DTypeError, GridError, LayoutError
from ..layout import Layout

TYPES = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
REALS = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "complex64": ctypes.c_float,
    "complex128": ctypes.c_double,
}
NAMED_LAYOUTS = {"A": Layout.A, "B": Layout.B, "C": Layout.C}
NO_COMM = -1


def communicator(handle: int) -> MPI.Intracomm:
    """Return the caller's communicator. Raises GridError."""
    comm = MPI.COMM_NULL if handle == NO_COMM else MPI.Comm.f2py(handle)
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError(
            "the communicator is MPI_COMM_NULL, or no intracommunicator of this process's MPI: pass one "
            "that this process belongs to"
        )
    return comm


@contextmanager
def errors_returned(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """Make the communicator, and those created from it, return MPI errors. The caller's error handler may abort."""
    before = comm.Get_errhandler()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        yield comm
    finally:
        comm.Set_errhandler(before)
        before.Free()


def check_address(name: str, address: int) -> None:
    if address == 0:
        raise LayoutError(f"{name} is a NULL pointer")


def text_at(name: str, address: int) -> str:
    check_address(name, address)
    return ctypes.string_at(address).decode(errors="replace")


def layout_named(address: int) -> Layout:
    """ "A", "B", "C", or the axes of the rows and of the columns: "zx/y". Raises LayoutError."""
    text = text_at("layout", address).strip()
    if text.upper() in NAMED_LAYOUTS:
        return NAMED_LAYOUTS[text.upper()]
    rows, slash, columns = text.lower().partition("/")
    if not slash or set(rows + columns) - set("xyz"):
        raise LayoutError(
            'a layout is "A", "B", "C", or the axes x, y, z that cut the rows, a slash, and those that '
            f'cut the columns, as "zx/y"; got {text!r}'
        )
    return Layout(tuple(rows), tuple(columns))


def dtype_named(kind: int) -> str:
    """Raises DTypeError."""
    found = TYPES.get(chr(kind & 0xFF).lower())
    if found is None:
        raise DTypeError(f"the type is 's', 'd', 'c' or 'z', as in the BLAS; got {shown(kind)}")
    return found


def order_named(order: int) -> str:
    """Raises LayoutError."""
    found = letter(order)
    if found not in ("C", "F"):
        raise LayoutError(f"the order is 'C', by rows, or 'F', by columns; got {shown(order)}")
    return found


def letter(character: int) -> str:
    return chr(character & 0xFF).upper()


def shown(character: int) -> str:
    return f"the character {chr(character & 0xFF)!r} ({character & 0xFF})"


def array_at(name: str, address: int, shape: tuple[int, int], dtype: str, order: str) -> np.ndarray:
    """View the caller's memory as an array, without a copy. Raises LayoutError for a NULL pointer to elements."""
    if 0 in shape:
        return np.empty(shape, dtype, order="F" if order == "F" else "C")
    if address == 0:
        raise LayoutError(
            f"{name} is a NULL pointer; in Fortran, it is a section of an array with gaps, such as a(1:n, :), which "
            "cannot be used in place: pass a whole array, or whole columns"
        )
    pointer = Pointer(address, shape if order == "C" else shape[::-1], np.dtype(dtype))
    array = np.asarray(pointer)
    return array if order == "C" else array.T


def box_at(address: int) -> list[int]:
    """Read the box of a block: row start, row end, column start, column end. Raises LayoutError."""
    check_address("box", address)
    return list((ctypes.c_int64 * 4).from_address(address))


def scalar_at(name: str, address: int, kind: int, dtype: str) -> Any:
    """Read one element. Raises LayoutError, and DTypeError if `kind`, its type as a letter, is another type."""
    check_address(name, address)
    check_type(name, kind, dtype)
    real = REALS[dtype]
    if dtype.startswith("complex"):
        return complex(*(real * 2).from_address(address))
    return real.from_address(address).value


def check_type(name: str, kind: int, dtype: str) -> None:
    """Raise DTypeError if a type, as a letter, is known and is not that of the matrices."""
    if kind and TYPES.get(letter(kind).lower()) != dtype:
        wanted = next(known for known, full in TYPES.items() if full == dtype)
        given = f"has the type '{chr(kind)}'" if chr(kind) in TYPES else "has none of the types 's', 'd', 'c' and 'z'"
        raise DTypeError(f"{name} {given}, and the matrix has the type '{wanted}': declare {name} with that type")


class Pointer:
    """Memory in the form of NumPy's array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype):
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}
