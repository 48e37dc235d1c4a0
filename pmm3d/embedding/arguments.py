"""Arguments from C: addresses, characters and numbers, all passed as integers."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..errors import DTypeError, GridError, LayoutError
from ..layout import Layout, itemsize

TYPES = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
REALS = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "complex64": ctypes.c_float,
    "complex128": ctypes.c_double,
}
REALS_OF = {"complex64": "float32", "complex128": "float64"}
NAMED_LAYOUTS = {"A": Layout.A, "B": Layout.B, "C": Layout.C}
NO_COMM = -1
CHARACTERS = "kind", "transa", "transb", "trans", "uplo", "side", "diag", "order"
"""Arguments that are characters. "kind" is named "type" in embed/pmm3d.h."""
ADDRESSES = "layout", "alpha", "beta", "desca", "descb", "descc"
"""Arguments that are addresses of a text, a number or a descriptor."""
NO_INTEGER = -(2**63 - 1)
"""In Fortran, in place of a value that is no integer of 4 or 8 bytes."""
REFUSED = {
    "-": "a section of an array with gaps, such as a(1:n, :), which cannot be used in place: pass a whole array, or "
    "whole columns",
    "#": "an array of three dimensions or more: pass whole columns of it, such as a(:, :, 1), or its first element",
}
"""In place of the type of an array in Fortran, and what the array is."""
DESCRIPTOR = "M", "N", "MB", "NB", "RSRC", "CSRC"
MATRICES = "a", "b", "c", "matrix", "source", "target"
"""Arguments that are numbers of matrices. If a call has the descriptor of one, it is an address."""
NUMBERS = {"gx", "gy", "gz", "rows", "columns", "m", "n", "k", "ia", "ja", "ib", "jb", "ic", "jc", "nrhs"}


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
    twice = next((axis for axis in "xyz" if text.count(axis) > 1), "")
    if twice:
        raise LayoutError(
            f"the layout {text!r} names the axis {twice} twice: an axis cuts the rows or the columns, once"
        )
    return Layout(tuple(rows), tuple(columns))


def dtype_named(kind: int) -> str:
    """Raises DTypeError."""
    dtype = TYPES.get(chr(kind & 0xFF).lower())
    if dtype is None:
        raise DTypeError(f"the type is 's', 'd', 'c' or 'z', as in the BLAS; got {shown(kind)}")
    return dtype


def order_named(order: int) -> str:
    """Raises LayoutError."""
    name = letter(order)
    if name not in ("C", "F"):
        raise LayoutError(f"the order is 'C', by rows, or 'F', by columns; got {shown(order)}")
    return name


def letter(character: int) -> str:
    return chr(character & 0xFF).upper()


def shown(character: int) -> str:
    return f"the character {chr(character & 0xFF)!r} ({character & 0xFF})"


def shown_arguments(
    names: Iterable[str], values: Sequence[int], matrices: Mapping[int, Any], reals: Collection[str] = ()
) -> list[str]:
    """Texts of the arguments that ranks have in common, such as "m=100", with the names of embed/pmm3d.h. Never raises.

    Instead of the number of a matrix, its properties are shown. Addresses, other numbers of objects, this rank's block,
    and the context and the leading dimension in a descriptor are left out, because they may differ between ranks.

    names      names of the arguments in the `Host`
    matrices   number -> matrix of the caller
    reals      numbers that are real also if matrices are complex
    """
    given = dict(zip(names, values))
    return [
        f"{'type' if name == 'kind' else name}={_shown(name, given, matrices, reals)}"
        for name in given
        if name in {*CHARACTERS, *MATRICES, *ADDRESSES, *NUMBERS} and f"desc{name}" not in given
    ]


def _shown(name: str, given: Mapping[str, int], matrices: Mapping[int, Any], reals: Collection[str]) -> str:
    value = given[name]
    if name in CHARACTERS:
        return repr(chr(value & 0xFF))
    if name in MATRICES:
        return in_short(matrices[value]) if value in matrices else f"{value} (no matrix)"
    if name not in ADDRESSES:
        return str(value)
    if value == 0:
        return "NULL"
    if name == "layout":
        return repr(text_at(name, value))
    if name.startswith("desc"):
        entries = zip(DESCRIPTOR, integers_at(value, 9, given["width"])[2:8])
        return f"({', '.join(f'{entry} {number}' for entry, number in entries)})"
    kind, result = given.get("kind"), matrices.get(given.get("c", 0))
    dtype = getattr(result, "dtype", None) if kind is None else TYPES.get(chr(kind & 0xFF).lower())
    return "unknown" if dtype is None else str(scalar_at(name, value, 0, dtype, name in reals))


def in_short(matrix: Any) -> str:
    """('d', 100 x 90, zx/y, 'C'): type, shape, layout and order of a matrix."""
    (rows, columns), layout = matrix.shape, matrix.layout
    [kind] = [kind for kind, dtype in TYPES.items() if dtype == matrix.dtype]
    return f"({kind!r}, {rows} x {columns}, {''.join(layout.rows)}/{''.join(layout.cols)}, {matrix.order!r})"


def array_at(name: str, address: int, shape: tuple[int, int], dtype: str, order: str, library: NumpyLibrary) -> Array:
    """View the caller's memory as an array of a library, without a copy. Raises LayoutError for a NULL pointer to
    elements."""
    stored = shape if order == "C" else shape[::-1]
    if 0 in shape:
        array = library.empty(stored, dtype)
    elif address == 0:
        raise LayoutError(f"{name} is a NULL pointer to {shape[0]} x {shape[1]} elements")
    else:
        memory = Pointer(address, shape[0] * shape[1] * itemsize(dtype))
        array = library.view(np.asarray(memory) if library.on_host else library.over_device(memory), stored, dtype)
    return array if order == "C" else array.T


def integers_at(address: int, count: int, width: int) -> list[int]:
    """Read integers of `width` bytes, 4 or 8."""
    return list(({4: ctypes.c_int32, 8: ctypes.c_int64}[width] * count).from_address(address))


def box_at(address: int, base: int) -> list[int]:
    """Read the box of a block: row start, row end, column start, column end. base: from which starts count, 0 or 1.
    Raises LayoutError."""
    check_address("box", address)
    box = integers_at(address, 4, 8)
    check_integers(*box)
    return [box[0] - base, box[1], box[2] - base, box[3]]


def check_integers(*values: int) -> None:
    if NO_INTEGER in values:
        raise LayoutError("sizes and boxes are integers of 4 or 8 bytes: declare them with such a type")


def scalar_at(name: str, address: int, kind: int, dtype: str, is_real: bool = False) -> Any:
    """Read one element, or a real number of its precision. Raises LayoutError, and DTypeError if `kind`, its type as a
    letter, is another type."""
    check_address(name, address)
    dtype = REALS_OF.get(dtype, dtype) if is_real else dtype
    check_type(name, kind, dtype, "a real factor of this routine" if is_real else "the matrix")
    real = REALS[dtype]
    if dtype.startswith("complex"):
        return complex(*(real * 2).from_address(address))
    return real.from_address(address).value


def check_type(name: str, kind: int, dtype: str, of: str = "the matrix") -> None:
    """Raise DTypeError if a type, as a letter, is known and is not that of the matrices, and LayoutError if the letter
    is that of an array which cannot be used."""
    if chr(kind) in REFUSED:
        raise LayoutError(f"{name} is {REFUSED[chr(kind)]}")
    if kind and TYPES.get(letter(kind).lower()) != dtype:
        wanted = next(known for known, full in TYPES.items() if full == dtype)
        given = f"has the type '{chr(kind)}'" if chr(kind) in TYPES else "has none of the types 's', 'd', 'c' and 'z'"
        raise DTypeError(f"{name} {given}, and {of} has the type '{wanted}': declare {name} with that type")


class Pointer:
    """Bytes of the caller's memory in the form of the array interfaces of NumPy and of CUDA."""

    def __init__(self, address: int, nbytes: int):
        described = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.__array_interface__ = self.__cuda_array_interface__ = described
