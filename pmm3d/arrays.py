"""One face for numpy, torch and cupy arrays. Arithmetic goes through each library's own names (array-api-compat);
what differs is here: allocation, addresses, synchronisation, the GEMM with accumulation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod

import array_api_compat
import numpy as np

from . import blas
from .errors import DTypeError, Pmm3dError

MATRIX_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
LOW_PRECISION = ("float16", "bfloat16")
HUGE_PAGE = 2**21
NUMPY_ADVISES = 2**22
"""Bytes from which numpy asks the kernel for huge pages."""
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


@dataclass(frozen=True)
class NumpyLibrary:
    """numpy arrays. The other libraries override what differs."""

    name = "numpy"
    on_host = True

    @property
    def xp(self):
        return np

    def empty(self, shape, dtype: str):
        """Arbitrary contents. Large arrays start on a huge page, for fewer TLB misses."""
        nbytes = prod(shape) * itemsize(dtype)
        if nbytes < HUGE_PAGE:
            return np.empty(shape, dtype)
        pages = np.empty(max(nbytes + HUGE_PAGE, NUMPY_ADVISES), np.uint8)
        start = -self.address(pages) % HUGE_PAGE
        return self.view(pages[start:], shape, dtype)

    def view(self, flat, shape, dtype: str):
        """An array of this shape and dtype over the first bytes of a flat uint8 buffer."""
        return flat[: prod(shape) * itemsize(dtype)].view(dtype).reshape(shape)

    def over(self, flat: np.ndarray, shape, dtype: str):
        """An array of this library over the first bytes of flat uint8 host memory, which it keeps alive."""
        return self.view(flat, shape, dtype)

    def dtype(self, array) -> str:
        return _dtype_name(array.dtype)

    def strides(self, array) -> tuple[int, ...]:
        """In elements."""
        size = array.itemsize
        return tuple(stride // size for stride in array.strides)

    def address(self, array) -> int:
        return array.__array_interface__["data"][0]

    def writable(self, array) -> bool:
        return array.flags.writeable

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it; nothing to do on the host."""

    def astype(self, array, dtype: str):
        return array.astype(dtype)

    def copy(self, array):
        """A C-contiguous copy."""
        made = self.empty(array.shape, self.dtype(array))
        made[...] = array
        return made

    def plain(self, array):
        """The array, or a copy of it, such that its bytes in C order are its values."""
        return array if is_contiguous(self, array) and self._as_stored(array) else self.copy(array)

    def _as_stored(self, array) -> bool:
        return array.dtype.isnative

    def conjugate(self, array):
        return self.xp.conj(array)

    def from_numpy(self, array, dtype: str):
        return np.require(array, dtype, ["C", "W"])

    def to_numpy(self, array):
        return array

    def pinned(self) -> NumpyLibrary:
        """The library whose empty(shape, "uint8") gives host memory that the device copies to and from fastest."""
        return NumpyLibrary()

    def to_host(self, array, host) -> None:
        """Copy an array's bytes into flat uint8 host memory."""
        host[...] = array.reshape(-1).view("uint8")

    def from_host(self, array, host) -> None:
        """Fill an array from the bytes in flat uint8 host memory."""
        array.reshape(-1).view("uint8")[...] = host

    def gemm(self, a, b, c, alpha, beta, work) -> None:
        """C = alpha A B + beta C, with work arrays from the Workspace `work`.

        float16 is widened to float32, multiplied, and rounded once.
        """
        if self.dtype(a) == "float16":
            _widened_gemm(self, a, b, c, alpha, beta, work)
        else:
            blas.gemm(self.dtype(c), *(self._matrix(x) for x in (a, b, c)), alpha, beta)

    def _matrix(self, array):
        return self.address(array), tuple(array.shape), self.strides(array)


@dataclass(frozen=True)
class TorchLibrary(NumpyLibrary):
    """torch tensors. Those in host memory use the same BLAS as numpy; bfloat16 and devices use torch.addmm."""

    device: str = "cpu"
    name = "torch"

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    @property
    def xp(self):
        return import_module("torch")

    def _torch_dtype(self, dtype: str):
        return getattr(self.xp, dtype)

    def empty(self, shape, dtype):
        nbytes = prod(shape) * itemsize(dtype)
        if self.on_host and nbytes >= HUGE_PAGE:
            return self.view(self.xp.from_numpy(NumpyLibrary().empty((nbytes,), "uint8")), shape, dtype)
        return self.xp.empty(tuple(shape), dtype=self._torch_dtype(dtype), device=self.device)

    def view(self, flat, shape, dtype):
        return flat[: prod(shape) * itemsize(dtype)].view(self._torch_dtype(dtype)).view(tuple(shape))

    def over(self, flat, shape, dtype):
        return self.view(self.xp.from_numpy(flat), shape, dtype)

    def dtype(self, array):
        return _dtype_name(array.dtype)

    def strides(self, array):
        return array.stride()

    def address(self, array):
        return array.data_ptr()

    def writable(self, array):
        return not array.requires_grad

    def synchronize(self):
        if not self.on_host:
            self.xp.cuda.current_stream(self.device).synchronize()

    def astype(self, array, dtype):
        return array.to(self._torch_dtype(dtype))

    def copy(self, array):
        made = self.empty(tuple(array.shape), self.dtype(array))
        made[...] = array.detach()
        return made

    def plain(self, array):
        return super().plain(array.detach() if array.requires_grad else array)

    def _as_stored(self, array):
        return not (array.is_conj() or array.is_neg())

    def conjugate(self, array):
        return self.xp.conj_physical(array)

    def from_numpy(self, array, dtype):
        host = self.xp.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
        return host.to(device=self.device, dtype=self._torch_dtype(dtype))

    def to_numpy(self, array):
        host = array.detach().cpu()
        return (host.float() if self.dtype(array) == "bfloat16" else host).numpy()

    def pinned(self):
        return PinnedHost(self)

    def to_host(self, array, host):
        self.xp.from_numpy(host).copy_(array.reshape(-1).view(self.xp.uint8))

    def from_host(self, array, host):
        array.view(-1).view(self.xp.uint8).copy_(self.xp.from_numpy(host))

    def pinned_bytes(self, nbytes: int):
        return self.xp.empty(nbytes, dtype=self.xp.uint8, pin_memory=not self.on_host).numpy()

    def gemm(self, a, b, c, alpha, beta, work):
        if self.on_host and self.dtype(a) != "bfloat16":
            super().gemm(a, b, c, alpha, beta, work)
        elif self.dtype(a) == self.dtype(c):
            self.xp.addmm(c, a, b, beta=beta, alpha=alpha, out=c)
        else:
            _rounded_gemm(self, a, b, c, alpha, beta, work)


@dataclass(frozen=True)
class DeviceLibrary(NumpyLibrary):
    """cupy, or any module with cupy's names whose arrays expose the CUDA array interface."""

    module: str = "cupy"
    name = "cupy"
    on_host = False

    @property
    def xp(self):
        return import_module(self.module)

    def empty(self, shape, dtype):
        return self.xp.empty(tuple(shape), dtype=dtype)

    def dtype(self, array):
        return _dtype_name(array.dtype)

    def strides(self, array):
        return tuple(stride // array.itemsize for stride in array.strides)

    def address(self, array):
        return array.__cuda_array_interface__["data"][0]

    def writable(self, array):
        return not array.__cuda_array_interface__["data"][1]

    def synchronize(self):
        self.xp.cuda.get_current_stream().synchronize()

    def copy(self, array):
        return self.xp.array(array, order="C")

    def from_numpy(self, array, dtype):
        return self.xp.asarray(np.ascontiguousarray(array, dtype))

    def to_numpy(self, array):
        return self.xp.asnumpy(array)

    def pinned(self):
        return PinnedHost(self)

    def to_host(self, array, host):
        self.xp.asnumpy(array.reshape(-1).view("uint8"), out=host)

    def from_host(self, array, host):
        array.reshape(-1).view("uint8").set(host)

    def pinned_bytes(self, nbytes: int):
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def gemm(self, a, b, c, alpha, beta, work):
        if self.dtype(a) != self.dtype(c):
            _rounded_gemm(self, a, b, c, alpha, beta, work)
        elif alpha == 1 and beta == 0:
            self.xp.matmul(a, b, out=c)
        else:
            with work.borrow(c.shape, self.dtype(c), self) as product:
                self.xp.matmul(a, b, out=product)
                self.xp.multiply(product, alpha, out=product)
                _scale(self, c, beta)
                self.xp.add(c, product, out=c)


@cache
def _dtype_name(dtype) -> str:
    """ "float32" of a numpy or torch dtype; numpy takes microseconds to work its own out."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else np.dtype(dtype).name


@dataclass(frozen=True)
class PinnedHost(NumpyLibrary):
    """Host memory as numpy arrays, pinned by the library of a device."""

    of: NumpyLibrary = NumpyLibrary()

    def empty(self, shape, dtype):
        return self.of.pinned_bytes(shape[0])


def _widened_gemm(library, a, b, c, alpha, beta, work) -> None:
    """float16 operands through float32 copies; C is float16 or a float32 accumulator."""
    with work.borrow(a.shape, "float32", library) as wide_a, work.borrow(b.shape, "float32", library) as wide_b:
        wide_a[...] = a
        wide_b[...] = b
        if library.dtype(c) == "float32":
            return library.gemm(wide_a, wide_b, c, alpha, beta, work)
        with work.borrow(c.shape, "float32", library) as wide_c:
            if beta != 0:
                wide_c[...] = c
            library.gemm(wide_a, wide_b, wide_c, alpha, beta, work)
            c[...] = wide_c


def _rounded_gemm(library, a, b, c, alpha, beta, work) -> None:
    """Low-precision product, rounded once, added to a float32 accumulator C."""
    with work.borrow(c.shape, library.dtype(a), library) as product:
        library.gemm(a, b, product, 1, 0, work)
        _scale(library, c, beta)
        c += alpha * library.astype(product, "float32")


def _scale(library, c, beta) -> None:
    if beta == 0:
        c[...] = 0
    elif beta != 1:
        library.xp.multiply(c, beta, out=c)


def itemsize(dtype: str) -> int:
    return ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize


def library_of(array):
    """The library that an array belongs to."""
    if array_api_compat.is_numpy_array(array):
        return NumpyLibrary()
    if array_api_compat.is_torch_array(array):
        return TorchLibrary(str(array.device))
    if hasattr(array, "__cuda_array_interface__"):
        return DeviceLibrary(type(array).__module__.partition(".")[0])
    raise DTypeError(f"{type(array).__name__} is none of numpy.ndarray, torch.Tensor, cupy.ndarray")


def library_named(name):
    """The library called "numpy", "torch" (host), "torch:DEVICE" or "cupy"; a library passes through.

    Raises Pmm3dError if there is none of that name or it is not installed.
    """
    if not isinstance(name, str):
        return name
    kind, _, device = name.partition(":")
    if kind == "numpy":
        return NumpyLibrary()
    if kind not in ("torch", "cupy") and kind not in sys.modules:
        raise Pmm3dError(f"unknown array library {name!r}; there are numpy, torch, torch:DEVICE and cupy")
    try:
        import_module(kind)
    except ImportError as error:
        raise Pmm3dError(f'{kind} arrays need {kind}: pip install "pmm3d[{kind}]" ({error})') from None
    return TorchLibrary(device or "cpu") if kind == "torch" else DeviceLibrary(kind)


def check_matrix_dtype(dtype: str, library) -> str:
    """The dtype, if matrices of that library can have it."""
    if dtype not in MATRIX_DTYPES or (dtype == "bfloat16" and library.name != "torch"):
        usable = [name for name in MATRIX_DTYPES if name != "bfloat16" or library.name == "torch"]
        raise DTypeError(f"{library.name} matrices have the types {', '.join(usable)}; got {dtype}. Convert first")
    return dtype


def is_contiguous(library, array) -> bool:
    """Whether the elements lie in C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(library.strides(array))):
        if size > 1 and stride != expected:
            return 0 in array.shape
        expected *= size
    return True


def overlap(library, one, other) -> bool:
    """Whether the memory of two contiguous (or transposed contiguous) arrays meets."""
    starts = [library.address(array) if 0 not in array.shape else 0 for array in (one, other)]
    ends = [start + prod(array.shape) * itemsize(library.dtype(array)) for start, array in zip(starts, (one, other))]
    return max(starts) < min(ends)


def sum_in_order(library, parts, out, beta=0) -> None:
    """out = beta out + parts[0] + parts[1] + ..., in that order; low precision is added up in float32.

    All arrays are 2D and of one shape; `out` may be strided. Works through slices of rows that stay in the cache.
    """
    rows, cols = out.shape
    step = max(1, 2**15 // max(1, cols)) if library.on_host else max(1, rows)
    low = library.dtype(out) in LOW_PRECISION
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        if low:
            total = sum((library.astype(part[chunk], "float32") for part in parts[1:]),
                        library.astype(parts[0][chunk], "float32"))
            out[chunk] = total if beta == 0 else beta * library.astype(out[chunk], "float32") + total
        else:
            _sum_chunk(library, [part[chunk] for part in parts], out[chunk], beta)


def _sum_chunk(library, parts, out, beta) -> None:
    add = library.xp.add
    if beta != 0:
        _scale(library, out, beta)
        parts = [out, *parts]
    if len(parts) == 1:
        out[...] = parts[0]
        return
    add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        add(out, part, out=out)
