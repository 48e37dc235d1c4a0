"""What libpmm3d.so (embed/) calls in the Python that it started: objects by number, arguments as integers."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
from mpi4py import MPI

from ..comm import Grid
from ..errors import (
    DisagreementError,
    DTypeError,
    GridError,
    LayoutError,
    MemoryLimitError,
    OutOfMemoryError,
    Pmm3dError,
)
from ..layout import Layout
from ..product import BlacsContext, Descriptor, DistMatrix, Redistribution, matmul, pgemm, pgemr2d

TYPES = {"s": "float32", "d": "float64", "c": "complex64", "z": "complex128"}
REALS = {"float32": ctypes.c_float, "float64": ctypes.c_double, "complex64": ctypes.c_float,
         "complex128": ctypes.c_double}
NAMED_LAYOUTS = {"A": Layout.A, "B": Layout.B, "C": Layout.C}
NO_COMM = -1
KEPT_DESCRIPTORS = 256
"""Of a context; all go when there would be more."""
CODES = ((DisagreementError, 2), ((MemoryLimitError, OutOfMemoryError, MemoryError), 3), (Pmm3dError, 1))
OTHER = 8
"""The codes of embed/pmm3d.h."""


class Answer(NamedTuple):
    """code, whether all ranks have this error, its text, and up to four numbers."""

    code: int
    everywhere: bool
    text: str
    results: Sequence[int]


@runtime_checkable
class Kept(Protocol):
    """What a caller knows by a number."""

    def close(self) -> None: ...


class Held:
    """A matrix that the caller knows by a number, and its transposes, the same each time: products that are repeated
    are known by them."""

    def __init__(self, matrix: DistMatrix):
        self.matrix, self.grid = matrix, matrix.grid

    def close(self) -> None:
        """The memory is the caller's, and nothing else is held."""

    @cached_property
    def transposed(self) -> DistMatrix:
        return self.matrix.T

    @cached_property
    def conjugated(self) -> DistMatrix:
        return self.matrix.H

    def operand(self, op: int) -> DistMatrix:
        """op(A). Raises LayoutError."""
        match letter(op):
            case "N":
                return self.matrix
            case "T":
                return self.transposed
            case "C":
                return self.conjugated
        raise LayoutError(f"transa and transb are 'N', 'T' or 'C'; got {shown(op)}")


class Part(NamedTuple):
    """This rank's of a block-cyclic matrix."""

    descriptor: Descriptor
    local: np.ndarray


class HeldContext:
    """A context, and the descriptors that it was used with."""

    def __init__(self, context: BlacsContext):
        self.context, self.grid = context, context.grid
        self._descriptors: dict[tuple[int, ...], Descriptor] = {}

    def close(self) -> None:
        """Collective."""
        self.context.close()

    def part(self, name: str, address: int, numbers: int, dtype: str) -> Part:
        """Raises LayoutError."""
        check_address(f"the descriptor of {name}", numbers)
        values = tuple((ctypes.c_int * 9).from_address(numbers))
        key = values[:1] + values[2:]
        if key not in self._descriptors:
            if len(self._descriptors) == KEPT_DESCRIPTORS:
                self._descriptors.clear()
            self._descriptors[key] = self._made(name, values)
        descriptor = self._descriptors[key]
        if address == 0 and descriptor.local_rows == 0:
            return Part(descriptor, descriptor.empty(dtype))
        return Part(descriptor, array_at(name, address, (descriptor.lld or 0, descriptor.local_cols), dtype, "F"))

    def _made(self, name: str, values: tuple[int, ...]) -> Descriptor:
        if not any(values[1:8:2]):
            raise LayoutError(f"the descriptor of {name} is {values}: as of integers of 8 bytes. They are of 4: compile "
                              "without -i8 or -fdefault-integer-8, or copy it")
        return self.context.from_array(values)


class Host:
    """The objects of a caller, and what it does with them. Arguments are those of embed/pmm3d.h, addresses and
    characters as integers."""

    def __init__(self) -> None:
        self._objects: dict[int, Kept] = {}
        self._last = 0

    def call(self, name: str, arguments: Sequence[int]) -> Answer:
        """A method by its name. Never raises."""
        try:
            found: Callable[..., tuple[int, ...] | None] = getattr(self, name)
            return Answer(0, False, "", found(*arguments) or ())
        except BaseException as error:
            code = next((code for kinds, code in CODES if isinstance(error, kinds)), OTHER)
            text = f"{type(error).__name__}: {error}" if isinstance(error, Pmm3dError) else traceback.format_exc()
            return Answer(code, getattr(error, "everywhere", False), text, ())

    def grid(self, comm: int, gx: int, gy: int, gz: int, out: int) -> tuple[int]:
        """Collective."""
        auto = gx == gy == gz == 0
        with errors_returned(communicator(comm)) as parent:
            grid = Grid(parent, "auto" if auto else (gx, gy, gz))
        try:
            with grid.together("pmm3d_grid", always=True):
                check_address("grid", out)
        except Pmm3dError:
            grid.close()
            raise
        return (self._keep(grid),)

    def grid_shape(self, number: int, out: int) -> tuple[int, ...]:
        check_address("shape", out)
        shape = self._found(number, Grid).shape
        return shape.x, shape.y, shape.z

    def box(self, number: int, layout: int, rows: int, columns: int, out: int) -> tuple[int, ...]:
        check_address("box", out)
        grid = self._found(number, Grid)
        return layout_named(layout).box((rows, columns), grid.shape, grid.coords)

    def matrix(self, number: int, kind: int, rows: int, columns: int, layout: int, order: int, shard: int,
               out: int) -> tuple[int]:
        """Collective."""
        grid = self._found(number, Grid)
        try:
            check_address("matrix", out)
            if rows < 0 or columns < 0:
                raise LayoutError(f"a matrix has 0 rows and columns or more; got {rows} x {columns}")
            placed, dtype, lies = layout_named(layout), dtype_named(kind), order_named(order)
            shape = placed.box((rows, columns), grid.shape, grid.coords).shape
            local = array_at("shard", shard, shape, dtype, lies)
        except Pmm3dError as error:
            refuse(grid, "DistMatrix.from_local", error)
        return (self._keep(Held(DistMatrix.from_local(grid, local, (rows, columns), layout=placed, order=lies))),)

    def matmul(self, transa: int, transb: int, alpha: int, a: int, b: int, beta: int, c: int) -> None:
        """Collective."""
        grid = self._grid_of(a, b, c)
        try:
            held_a, held_b, held_c = (self._found(number, Held) for number in (a, b, c))
            first, second, out = held_a.operand(transa), held_b.operand(transb), held_c.matrix
            factors = scalar_at("alpha", alpha, out.dtype), scalar_at("beta", beta, out.dtype)
        except Pmm3dError as error:
            refuse(grid, "matmul", error)
        matmul(first, second, out=out, alpha=factors[0], beta=factors[1])

    def redistribute(self, source: int, target: int) -> None:
        """Collective."""
        grid = self._grid_of(source, target)
        try:
            origin, out = self._found(source, Held).matrix, self._found(target, Held).matrix
        except Pmm3dError as error:
            refuse(grid, "redistribute", error)
        if origin.order == out.order or origin.shape != out.shape:
            origin.redistribute(out.layout, out.grid, out=out)
        else:
            out.memory[...] = origin.redistribute(out.layout, out.grid).memory

    def context(self, comm: int, rows: int, columns: int, order: int, out: int) -> tuple[int]:
        """Collective."""
        with errors_returned(communicator(comm)) as parent:
            context = BlacsContext(parent, (rows, columns), letter(order))
        try:
            with context.grid.together("pmm3d_context", always=True):
                check_address("context", out)
        except Pmm3dError:
            context.close()
            raise
        return (self._keep(HeldContext(context)),)

    def pgemm(self, number: int, kind: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, ia: int,
              ja: int, desca: int, b: int, ib: int, jb: int, descb: int, beta: int, c: int, ic: int, jc: int,
              descc: int) -> None:
        """Collective."""
        context: HeldContext = self._found(number, HeldContext)
        try:
            dtype = dtype_named(kind)
            of_a, of_b, of_c = (context.part(*each, dtype) for each in (("a", a, desca), ("b", b, descb), ("c", c, descc)))
            factors = scalar_at("alpha", alpha, dtype), scalar_at("beta", beta, dtype)
        except Pmm3dError as error:
            refuse(context.grid, "pgemm", error)
        pgemm(letter(transa), letter(transb), m, n, k, factors[0], of_a.local, ia, ja, of_a.descriptor, of_b.local, ib, jb,
              of_b.descriptor, factors[1], of_c.local, ic, jc, of_c.descriptor)

    def pgemr2d(self, kind: int, m: int, n: int, a: int, ia: int, ja: int, desca: int, contexta: int, b: int, ib: int,
                jb: int, descb: int, contextb: int) -> None:
        """Collective."""
        grid = self._grid_of(contexta, contextb)
        try:
            dtype = dtype_named(kind)
            of_a = self._found(contexta, HeldContext).part("a", a, desca, dtype)
            of_b = self._found(contextb, HeldContext).part("b", b, descb, dtype)
        except Pmm3dError as error:
            refuse(grid, "pgemr2d", error)
        pgemr2d(m, n, of_a.local, ia, ja, of_a.descriptor, of_b.local, ib, jb, of_b.descriptor)

    def from_block_cyclic(self, context: int, a: int, desca: int, matrix: int) -> None:
        """Collective."""
        held, part = self._cyclic("from_block_cyclic", matrix, context, a, desca)
        moved = Redistribution(held.grid, part.descriptor.cyclic, held.layout, dtype=held.dtype, order=held.order)
        moved(part.local, held.memory)

    def to_block_cyclic(self, matrix: int, context: int, a: int, desca: int) -> None:
        """Collective."""
        held, part = self._cyclic("to_block_cyclic", matrix, context, a, desca)
        moved = Redistribution(held.grid, held.layout, part.descriptor.cyclic, dtype=held.dtype, order=held.order)
        moved(held.memory, part.local)

    def _cyclic(self, what: str, matrix: int, context: int, a: int, desca: int) -> tuple[DistMatrix, Part]:
        """Raises on all ranks of the matrix, or of the context. Collective."""
        grid = self._grid_of(matrix, context)
        try:
            held: DistMatrix = self._found(matrix, Held).matrix
            within: HeldContext = self._found(context, HeldContext)
            if not held.grid.same_processes(within.grid):
                raise GridError(f"{what}: the context is over other ranks than the matrix, or these in another order: make "
                                "both on one communicator")
            return held, within.part("a", a, desca, held.dtype)
        except Pmm3dError as error:
            refuse(grid, "Redistribution", error)

    def free(self, number: int, pointer: int) -> None:
        """Collective, of a grid or a context."""
        check_address("object", pointer)
        self._found(number, Kept).close()
        del self._objects[number]

    def finalize(self, _: int) -> None:
        """Collective."""
        while self._objects:
            self._objects.popitem()[1].close()

    def _keep(self, made: Kept) -> int:
        self._last += 1
        self._objects[self._last] = made
        return self._last

    def _found(self, number: int, kind: Any) -> Any:
        found = self._objects.get(number)
        if not isinstance(found, kind):
            wanted = {Grid: "grid", Held: "matrix", HeldContext: "context"}.get(kind, "object")
            is_there = "there is no such object, or it was freed" if found is None else f"it is {described(found)}"
            raise GridError(f"{number} names no {wanted} of this process: {is_there}")
        return found

    def _grid_of(self, *numbers: int) -> Grid | None:
        """That of the first matrix or context that there is."""
        held = (self._objects.get(number) for number in numbers)
        return next((each.grid for each in held if isinstance(each, (Held, HeldContext))), None)


def described(found: object) -> str:
    return "a grid" if isinstance(found, Grid) else "a matrix" if isinstance(found, Held) else "a context"


def refuse(grid: Grid | None, what: str, error: Exception) -> NoReturn:
    """Raise it on all ranks of the grid, which are in that operation; where no grid is known, here."""
    if grid is not None:
        with grid.together(what, always=True):
            raise error
    raise error


def communicator(handle: int) -> MPI.Intracomm:
    """The caller's. Raises GridError."""
    comm = MPI.COMM_NULL if handle == NO_COMM else MPI.Comm.f2py(handle)
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise GridError("the communicator is MPI_COMM_NULL, or no intracommunicator of this process's MPI: pass one that "
                        "this process belongs to")
    return comm


@contextmanager
def errors_returned(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """What is made of the communicator meanwhile returns MPI's errors, which the caller's own may end the process with."""
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
    if text in NAMED_LAYOUTS:
        return NAMED_LAYOUTS[text]
    rows, slash, columns = text.partition("/")
    if not slash or set(rows + columns) - set("xyz"):
        raise LayoutError(f'a layout is "A", "B", "C", or the axes x, y, z that cut the rows, a slash, and those that cut '
                          f'the columns, as "zx/y"; got {text!r}')
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
    """The caller's memory as an array, nothing is copied. Raises LayoutError for a NULL pointer to elements."""
    if 0 in shape:
        return np.empty(shape, dtype, order="F" if order == "F" else "C")
    check_address(name, address)
    pointer = Pointer(address, shape if order == "C" else shape[::-1], np.dtype(dtype))
    array = np.asarray(pointer)
    return array if order == "C" else array.T


def scalar_at(name: str, address: int, dtype: str) -> Any:
    """One element. Raises LayoutError."""
    check_address(name, address)
    kind = REALS[dtype]
    if dtype.startswith("complex"):
        return complex(*(kind * 2).from_address(address))
    return kind.from_address(address).value


class Pointer:
    """Memory, as numpy's array interface has it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype):
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}
