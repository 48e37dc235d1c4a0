"""One interface for the arrays of several libraries, and its implementation for numpy.

Arithmetic uses the functions of each library. The interface contains the operations that differ: allocation, addresses,
synchronisation, and the GEMM with accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ..layout import LOW_PRECISION, itemsize, multiplied_in
from . import blas
from .streams import Device, DeviceMemory, Stream
from .sums import WorkArrays, check_gemm_types, scale, widened_gemm

Array = Any
"""A numpy.ndarray, torch.Tensor or cupy.ndarray. They have no common type."""
HUGE_PAGE = 2**21
"""Bytes of a huge page on x86-64, and on Arm with pages of 4 KiB."""
ADDRESSED = 2**62
"""Limit for the bytes of an array, because numpy computes sizes in 64 bits."""
NUMPY_ADVISES = 2**22
"""Bytes from which numpy asks the kernel for huge pages."""
SUMMED = 2**14
"""Elements whose squares one block of device threads adds up. torch adds in float32 or a wider own type."""
SQUARED = 2**13
"""Elements whose squares numpy adds at a time. Memory of larger work arrays would be new in each call."""
DEVICE_ELEMENTS = 2**24
"""Elements that a device processes at a time in operations with temporaries of 8 bytes or more per element."""


@cache
def numpy_type(dtype: str) -> np.dtype:
    """Return numpy's type for the memory of elements of this type.

    >>> str(numpy_type("float32")), str(numpy_type("bfloat16"))
    ('float32', 'int16')
    """
    return np.dtype("int16" if dtype == "bfloat16" else dtype)


@dataclass(frozen=True)
class NumpyLibrary:
    """numpy arrays. The other libraries override the methods that differ.

    >>> library = NumpyLibrary()
    >>> array = library.empty((2, 3), "float32")
    >>> library.dtype(array), library.strides(array.T), library.is_contiguous(array.T)
    ('float32', (1, 3), False)
    """

    name: ClassVar[str] = "numpy"
    gemm_copies: ClassVar[bool] = True
    """Whether `gemm` needs work arrays for operands of low precision. The BLAS of a device needs none."""
    slice_elements: ClassVar[int | None] = 2**16
    """Elements that elementwise loops process at a time, so that they and their temporaries stay in a core's cache.
    None: all elements, because each call on a device costs as much time as a million elements."""
    has_data: ClassVar[bool] = True
    """Whether arrays have values. Arrays of a dry run have none."""
    on_host: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """Name for `library_named` that is the same on all ranks: without the number of a device."""
        return self.name

    @property
    def xp(self) -> ModuleType:
        """The module with the library's functions."""
        return np

    @property
    def memory(self) -> NumpyLibrary:
        """The library that allocates the flat uint8 arrays for `view`. In host memory it is numpy for all libraries."""
        return self

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array with arbitrary contents. Large arrays start on a huge page, for fewer TLB misses."""
        nbytes = prod(shape) * itemsize(dtype)
        if nbytes < HUGE_PAGE:
            return np.empty(shape, dtype)
        if nbytes > ADDRESSED:
            raise MemoryError(f"Unable to allocate {nbytes / 2**40:.3g} TiB")
        pages = np.empty(max(nbytes + HUGE_PAGE, NUMPY_ADVISES), np.uint8)
        start = -self.address(pages) % HUGE_PAGE
        return self.view(pages[start:], shape, dtype)

    def made(self, shape: tuple[int, ...], dtype: str, values: Callable[[], np.ndarray]) -> Array:
        """Return an array of the values of values(), a numpy array of this shape. A dry run does not call values()."""
        return self.from_numpy(values(), dtype)

    def words(self, start: int, stop: int) -> Array:
        """Return the integers from start to stop - 1 as uint64, or as int64 if the library cannot compute with
        uint64."""
        return self.xp.arange(start, stop, dtype="uint64")

    def special(self, name: str) -> Callable[[Array], Array]:
        """Return the library's own version of a function of scipy.special ("expit", "ndtr", "ndtri")."""
        return getattr(import_module("scipy.special"), name)

    def fused(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return an elementwise function as one kernel, if the library can compile it. Keep the result for later
        calls."""
        return function

    def view(self, flat: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array over the first bytes of a flat uint8 array of `memory`. It keeps that array alive."""
        return np.ndarray(shape, dtype, flat)

    def over_numpy(self, array: np.ndarray, dtype: str) -> Array:
        """Return an array over the memory of a numpy array of type `numpy_type(dtype)`. It keeps that array alive."""
        return array

    def over_device(self, memory: Any) -> Array:
        """Device libraries only: return a flat uint8 array over the memory that an object describes by the CUDA array
        interface. It keeps the object alive."""
        raise NotImplementedError

    def dtype(self, array: Array) -> str:
        return dtype_name(array.dtype)

    def strides(self, array: Array) -> tuple[int, ...]:
        """Return the strides in elements."""
        return _in_elements(array.strides, array.itemsize)

    def address(self, array: Array) -> int:
        return array.__array_interface__["data"][0]

    def writable(self, array: Array) -> bool:
        return array.flags.writeable

    def device_of(self, array: Array) -> int | None:
        """Return the number of the array's device; None on the host."""
        return None

    def is_contiguous(self, array: Array) -> bool:
        """Whether the elements are stored in C order without gaps."""
        if isinstance(array, np.ndarray) and array.flags.c_contiguous:
            return True
        expected = 1
        for size, stride in zip(reversed(array.shape), reversed(self.strides(array))):
            if size > 1 and stride != expected:
                return 0 in array.shape
            expected *= size
        return True

    def share_memory(self, one: Array, other: Array) -> bool:
        """Whether two arrays have a byte in common."""
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return np.shares_memory(one, other)
        return np.shares_memory(np.asarray(_Elements(self, one)), np.asarray(_Elements(self, other)))

    def check_device(self) -> None:
        """Raise Pmm3dError if this process has no device of the library. Creates no context on the device."""

    def take_device(self, local_rank: int) -> int | None:
        """See `pmm3d.arrays.take_device`."""
        return None

    def current_device(self) -> Device | None:
        """Return the device on which this thread allocates arrays of the library; None on the host."""
        return None

    def device_memory(self) -> DeviceMemory | None:
        """Return the free and the total memory of the current device; None on the host."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has completed all work in the current stream. On the host: do nothing."""

    def current_stream(self) -> Stream:
        """Device libraries only: return this thread's current stream on its current device."""
        raise NotImplementedError

    def new_stream(self) -> Stream:
        """Device libraries only: return a new stream on the current device that does not wait for other streams."""
        raise NotImplementedError

    def astype(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy."""
        made = self.empty(array.shape, self.dtype(array))
        made[...] = array
        return made

    def as_strided(self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Array:
        """Return a view from an element on, by default the first. Strides, and `first`, which counts from the start of
        the array's memory, are in elements. The view must not exceed the array's memory."""
        size, flags = array.itemsize, array.flags
        steps = tuple([size * stride for stride in strides])
        if flags.c_contiguous or flags.f_contiguous:  # faster than numpy's as_strided
            return np.ndarray(shape, array.dtype, array if flags.c_contiguous else array.T, size * first, steps)
        as_strided = np.lib.stride_tricks.as_strided
        return as_strided(as_strided(array, (first + 1,), (size,))[first:], shape, steps)

    def as_input(self, array: Array, *, strided: bool = False) -> Array:
        """Return an array that a caller passed, as memory of its values: the array itself, or a copy.

        Every function that reads a caller's array passes it through this method. The result is `as_stored`. It is
        C-contiguous, or has any strides if `strided` is True. A torch tensor is detached from autograd. Raises
        DTypeError for elements without a size, such as objects.

            >>> NumpyLibrary().as_input(np.arange(3, dtype=">i8")[::-1]).tobytes() == np.arange(3)[::-1].tobytes()
            True
        """
        itemsize(self.dtype(array))
        fits = self.as_stored(array) and (strided or self.is_contiguous(array))
        return array if fits else self.copy(array)

    def as_stored(self, array: Array) -> bool:
        """Whether memory contains the values themselves: in native byte order, at strides of whole elements, and not as
        a conjugated or negated view."""
        return (
            isinstance(array, np.ndarray)
            and array.dtype.isnative
            and (array.flags.c_contiguous or not any(stride % array.itemsize for stride in array.strides))
        )

    def conjugate(self, array: Array) -> Array:
        """Return the conjugates as a new array."""
        return self.xp.conj(array)

    def passed(self, name: str, *arrays: Array) -> None:
        """In a dry run: record that an operation of this name read or wrote these arrays. Otherwise do nothing."""

    def conjugate_in_place(self, array: Array) -> None:
        self.xp.conj(array, out=array)

    def from_numpy(self, array: np.ndarray, dtype: str) -> Array:
        return np.require(array, dtype, ["C", "W"])

    def to_numpy(self, array: Array) -> np.ndarray:
        return array

    def pinned(self) -> NumpyLibrary:
        """Return the library whose empty(shape, "uint8") allocates pinned host memory, for the fastest device
        copies."""
        return NumpyLibrary()

    def to_host(self, array: Array, host: np.ndarray) -> None:
        """Copy an array's bytes into flat uint8 host memory. For device arrays: pinned memory, in the current
        stream."""
        host[...] = array.reshape(-1).view("uint8")

    def from_host(self, array: Array, host: np.ndarray) -> None:
        """Fill an array from the bytes in flat uint8 host memory; the inverse of `to_host`."""
        array.reshape(-1).view("uint8")[...] = host

    def square_sum(self, array: Array) -> Any:
        """Return the sum of squares of the elements in float64. For a device array: a 0-d array on the device."""
        if self.dtype(array).startswith("complex"):
            return self.square_sum(array.real) + self.square_sum(array.imag)
        flat, total = array.reshape(-1), 0.0
        if self.slice_elements is None:
            rows = flat.shape[0] // SUMMED
            full_rows, rest = flat[: rows * SUMMED].reshape(rows, SUMMED), flat[rows * SUMMED :].reshape(1, -1)
            return sum((self.square_sums(part).sum() for part in (full_rows, rest) if 0 not in part.shape), total)
        for start in range(0, flat.shape[0], SQUARED):
            part = self.astype(flat[start : start + SQUARED], "float64")
            total += np.add.reduce(part * part)
        return total

    def square_sums(self, rows: Array) -> Array:
        """Device arrays only: return the sum of squares of each row in float64, in one pass without work arrays."""
        raise NotImplementedError

    def gemm(
        self,
        a: Array,
        b: Array,
        c: Array,
        alpha: complex,
        beta: complex,
        work: WorkArrays,
        *,
        tf32: bool = False,
        conjugated: blas.Conjugated = blas.AS_THEY_ARE,
        rounded: bool = False,
    ) -> None:
        """Compute C = alpha A B + beta C. C may be of a wider type than A and B (`layout.WIDER`).

        work         Workspace that lends work arrays, for copies of A and B in a wider type (`widened_gemm`)
        tf32         whether a device may round float32 factors to 10 bits of mantissa
        conjugated   whether the conjugate of A, and that of B, is multiplied
        rounded      whether the product of bfloat16 may be rounded before it is added to a float32 C. Without that,
                     bfloat16 is multiplied in float32 on the host, which is slower if the processor multiplies bfloat16

        As in BLAS: if alpha or k is 0, A and B are not read, and C = beta C. If beta is 0, C is not read. Matrices that
        exceed the integers of the BLAS are multiplied in pieces.

        Raises DTypeError for other types. Raises ValueError for matrices without a dim of stride 1, and for a
        conjugated matrix in the storage order of C, which BLAS cannot read.
        """
        dtype, of_result = dtype_name(a.dtype), dtype_name(c.dtype)
        check_gemm_types(dtype, dtype_name(b.dtype), of_result)
        if alpha == 0 or not a.shape[1]:
            scale(self, c, beta)
        elif (wide := multiplied_in(dtype, of_result)) != dtype:
            widened_gemm(self, a, b, c, alpha, beta, work, wide, conjugated)
        else:
            try:
                blas.gemm(dtype, _strides(a), _strides(b), _strides(c), alpha, beta, conjugated)
            except blas.TooLarge:
                self._in_pieces(a, b, c, alpha, beta, work, blas.chosen().largest, conjugated=conjugated)

    def _in_pieces(
        self,
        a: Array,
        b: Array,
        c: Array,
        alpha: complex,
        beta: complex,
        work: WorkArrays,
        largest: int,
        **options: Any,
    ) -> None:
        """Call `gemm` for parts whose sizes and leading dimensions are at most `largest`."""
        strides_of = [self._matrix(array)[1:] for array in (a, b, c)]
        for rows, cols, depth in blas.pieces(strides_of[0], strides_of[1], strides_of[2], largest):
            self.gemm(a[rows, depth], b[depth, cols], c[rows, cols], alpha, 1 if depth.start else beta, work, **options)

    def gemm_batched(
        self, a: Array, b: Array, c: Array, alpha: complex, beta: complex, work: WorkArrays, *, tf32: bool = False
    ) -> None:
        """Compute C[i] = alpha A[i] B[i] + beta C[i] for arrays of three dims (items, rows, columns).

        Strides of items are as for `gemm`. The stride between items of A, or of B, may be 0: one matrix for all items.
        Raises ValueError for shapes that do not fit together, and the errors of `gemm`.

            >>> library, heads = NumpyLibrary(), np.ones((5, 2, 3)).transpose(1, 0, 2)  # of 5 tokens, 2 heads
            >>> scores = library.empty((2, 5, 5), "float64")
            >>> library.gemm_batched(heads, heads.transpose(0, 2, 1), scores, 1, 0, None)
            >>> scores.sum().item()
            150.0
        """
        shapes = tuple(a.shape), tuple(b.shape), tuple(c.shape)
        if [*map(len, shapes)] != 3 * [3] or shapes[1:] != (
            (*shapes[0][::2], shapes[1][2]),
            (*shapes[0][:2], shapes[1][2]),
        ):
            raise ValueError(
                "gemm_batched: A (items, m, k), B (items, k, n) and C (items, m, n) do not fit together: "
                f"{shapes[0]}, {shapes[1]}, {shapes[2]}"
            )
        dtype = self.dtype(a)
        dtypes = dtype, dtype if c.dtype == a.dtype else self.dtype(c)
        check_gemm_types(dtype, dtype if b.dtype == a.dtype else self.dtype(b), dtypes[1])
        try:
            if alpha != 0 and 0 not in (*shapes[0], *shapes[2]) and self._at_once(dtypes, a, b, c, alpha, beta, tf32):
                return
        except blas.TooLarge:
            pass
        for item in range(shapes[2][0]):
            self.gemm(a[item], b[item], c[item], alpha, beta, work, tf32=tf32)

    def _at_once(
        self, dtypes: tuple[str, str], a: Array, b: Array, c: Array, alpha: complex, beta: complex, tf32: bool
    ) -> bool:
        """Multiply all items of three nonempty arrays. For types whose items need `gemm` one by one: return False, and
        do nothing."""
        if dtypes[0] != dtypes[1] or dtypes[0] not in blas.DTYPES:
            return False
        blas.gemm_batched(dtypes[0], self._matrix(a), self._matrix(b), self._matrix(c), alpha, beta)
        return True

    def columns(self, array: Array, index: Array) -> Array:
        """Return the columns of a matrix with these indices."""
        return array[:, index]

    def add_columns(self, out: Array, index: Array, rows: Array, work: WorkArrays) -> None:
        """Add row i of `rows` to column index[i] of `out`. Rows for one column are summed in ascending order of i; low
        precision is summed in float32.

            >>> library, out = NumpyLibrary(), np.zeros((2, 3))
            >>> library.add_columns(out, np.array([2, 0, 2]), np.array([[1.0, 2], [3, 4], [5, 6]]), None)
            >>> out.tolist()
            [[3.0, 0.0, 6.0], [4.0, 0.0, 8.0]]
        """
        if len(index):
            order = np.argsort(index, kind="stable")
            starts = np.flatnonzero(np.diff(index[order], prepend=-1))
            wide = "float32" if self.dtype(rows) in LOW_PRECISION else self.dtype(rows)
            out[:, index[order[starts]]] += np.add.reduceat(self.astype(rows, wide)[order], starts, axis=0).T

    def bound_gemm(
        self,
        a: Array,
        b: Array,
        c: Array,
        alpha: complex,
        beta: complex,
        work: WorkArrays,
        *,
        conjugated: blas.Conjugated = blas.AS_THEY_ARE,
    ) -> Callable[[], None]:
        """Return a function that repeats this `gemm` on the host. The three arrays have one type, not of low precision,
        and must keep their addresses."""
        check_gemm_types(self.dtype(a), self.dtype(b), self.dtype(c))
        try:
            return blas.bound_gemm(
                self.dtype(c), self._matrix(a), self._matrix(b), self._matrix(c), alpha, beta, conjugated
            )
        except blas.TooLarge:
            return lambda: self.gemm(a, b, c, alpha, beta, work, conjugated=conjugated)

    def gemm_of_forms(
        self, a: Array, b: Array, c: Array, alpha: complex, beta: complex, work: WorkArrays
    ) -> Callable[[Array, Array, Array], None]:
        """Return a function of (a, b, c) that repeats this `gemm` for arrays of the same types, shapes and strides."""
        return lambda a, b, c: self.gemm(a, b, c, alpha, beta, work)

    @property
    def blas_file(self) -> str:
        """File of the BLAS for arrays on the host; "" for SciPy's. Loads the BLAS."""
        return blas.chosen().file

    def _matrix(self, array: Array) -> blas.Matrix:
        if type(array) is np.ndarray:
            return array.__array_interface__["data"][0], array.shape, _in_elements(array.strides, array.itemsize)
        return self.address(array), tuple(array.shape), self.strides(array)


def _strides(array: np.ndarray) -> blas.Matrix:
    return array.__array_interface__["data"][0], array.shape, _in_elements(array.strides, array.itemsize)


class _Elements:
    """Addresses of the elements of an array of any library, for numpy. numpy does not read the elements."""

    def __init__(self, library: NumpyLibrary, array: Array):
        size = itemsize(library.dtype(array))
        strides = tuple(size * stride for stride in library.strides(array))
        address = library.address(array) if 0 not in array.shape else 0
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(array.shape),
            "strides": strides,
            "typestr": f"|V{size}",
            "data": (address, True),
        }


@lru_cache(maxsize=1024)
def _in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple([stride // size for stride in strides])


@cache
def dtype_name(dtype: Any) -> str:
    """Return the name, such as "float32", of a numpy or torch dtype or of a name. Cached, because numpy is slow."""
    text = str(dtype).removeprefix("torch.")
    if text == "bfloat16" or text != str(dtype):
        return text
    numpys = np.dtype(dtype)
    return "object" if numpys.hasobject else numpys.name
