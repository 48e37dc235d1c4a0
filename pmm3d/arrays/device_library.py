"""cupy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ..errors import Pmm3dError
from ..layout import itemsize, multiplied_in
from . import blas, cublas
from .numpy_library import Array, NumpyLibrary
from .streams import CupyStream, Device, DeviceMemory
from .sums import WorkArrays, check_gemm_types, scale, widened_gemm

ONE_HOT = 4096
"""Columns of the one-hot matrices in `DeviceLibrary.add_columns`."""


@dataclass(frozen=True)
class DeviceLibrary(NumpyLibrary):
    """cupy, or a module with the same functions whose arrays have the CUDA array interface."""

    module: str = "cupy"
    name: ClassVar[str] = "cupy"
    gemm_copies: ClassVar[bool] = False
    slice_elements: ClassVar[int | None] = None

    @property
    def kind(self) -> str:
        return self.module

    @property
    def on_host(self) -> bool:  # type: ignore[override]
        return False

    @property
    def xp(self) -> ModuleType:
        return import_module(self.module)

    @property
    def memory(self) -> NumpyLibrary:
        here = self.current_stream()
        return StreamMemory(self, here.device, here.key)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self.xp.empty(tuple(shape), dtype=dtype)

    def special(self, name: str) -> Callable[[Array], Array]:
        return getattr(import_module("cupyx.scipy.special" if self.module == "cupy" else "scipy.special"), name)

    def fused(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return self.xp.fuse(function)

    def view(self, flat: Array, shape: tuple[int, ...], dtype: str) -> Array:
        return flat[: prod(shape) * itemsize(dtype)].view(dtype).reshape(shape)

    def over_device(self, memory: Any) -> Array:
        return self.xp.asarray(memory)

    def address(self, array: Array) -> int:
        return array.data.ptr

    def device_of(self, array: Array) -> int | None:
        return array.device.id

    def check_device(self) -> None:
        why = "there are 0"
        try:
            if self.xp.cuda.runtime.getDeviceCount():
                return
        except RuntimeError as error:  # CUDA without a driver
            why = str(error)
        raise Pmm3dError(
            f"library {self.kind!r}: {self.module} finds no CUDA device here ({why}). nvidia-smi shows "
            'whether there is one, with its driver; library="numpy" works on the host'
        )

    def take_device(self, local_rank: int) -> int:
        cuda = self.xp.cuda
        number = local_rank % cuda.runtime.getDeviceCount()
        cuda.Device(number).use()
        return number

    def current_device(self) -> Device:
        runtime = self.xp.cuda.runtime
        number = runtime.getDevice()
        name = runtime.getDeviceProperties(number)["name"]
        return Device(
            number,
            name.decode() if isinstance(name, bytes) else name,
            runtime.deviceGetPCIBusId(number),
            runtime.getDeviceCount(),
        )

    def device_memory(self) -> DeviceMemory:
        free, total = self.xp.cuda.runtime.memGetInfo()
        return DeviceMemory(free, total, self.xp.get_default_memory_pool().total_bytes())

    def writable(self, array: Array) -> bool:
        interface = getattr(array, "__cuda_array_interface__", None)
        return interface is None or not interface["data"][1]

    def as_stored(self, array: Array) -> bool:
        return True

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def current_stream(self) -> CupyStream:
        cuda = self.xp.cuda
        return CupyStream(cuda, cuda.runtime.getDevice(), cuda.get_current_stream())

    def new_stream(self) -> CupyStream:
        cuda = self.xp.cuda
        return CupyStream(cuda, cuda.runtime.getDevice(), cuda.Stream(non_blocking=True))

    def copy(self, array: Array) -> Array:
        return self.xp.array(array, order="C")

    def as_strided(self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Array:
        as_strided, size = self.xp.lib.stride_tricks.as_strided, array.itemsize
        start = as_strided(array, (first + 1,), (size,))[first:] if first else array
        return as_strided(start, shape, tuple(size * stride for stride in strides))

    def from_numpy(self, array: np.ndarray, dtype: str) -> Array:
        return self.xp.asarray(np.ascontiguousarray(array, dtype))

    def to_numpy(self, array: Array) -> np.ndarray:
        return self.xp.asnumpy(array)

    def pinned(self) -> NumpyLibrary:
        return PinnedHost(self)

    def to_host(self, array: Array, host: np.ndarray) -> None:
        self.xp.asnumpy(array.reshape(-1).view("uint8"), out=host, blocking=False)

    def from_host(self, array: Array, host: np.ndarray) -> None:
        array.reshape(-1).view("uint8").set(host)

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def square_sums(self, rows: Array) -> Array:
        return _square_sums(self)(rows, axis=1)

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
        types = self.dtype(a), self.dtype(c)
        check_gemm_types(types[0], self.dtype(b), types[1])
        if alpha == 0 or not a.shape[1]:
            scale(self, c, beta)
            return
        if (wide := multiplied_in(*types, on_host=False)) != types[0]:
            widened_gemm(self, a, b, c, alpha, beta, work, wide, conjugated)
            return
        try:
            cublas.gemm(
                self.xp.cuda, types, self._matrix(a), self._matrix(b), self._matrix(c), alpha, beta, tf32, conjugated
            )
        except blas.TooLarge:
            self._in_pieces(a, b, c, alpha, beta, work, blas.LP64_LARGEST, tf32=tf32, conjugated=conjugated)

    def _at_once(
        self, dtypes: tuple[str, str], a: Array, b: Array, c: Array, alpha: complex, beta: complex, tf32: bool
    ) -> bool:
        if multiplied_in(*dtypes, on_host=False) != dtypes[0]:
            return False
        cublas.gemm(self.xp.cuda, dtypes, self._matrix(a), self._matrix(b), self._matrix(c), alpha, beta, tf32)
        return True

    def add_columns(self, out: Array, index: Array, rows: Array, work: WorkArrays) -> None:
        """Multiply by blocks of a one-hot matrix, because atomic additions have no fixed order."""
        if not len(index):
            return
        for start in range(0, out.shape[1], ONE_HOT):
            part = out[:, start : start + ONE_HOT]
            columns = self.astype(self.words(start, start + part.shape[1]), "int64")
            self.gemm(rows.T, self.astype(index[:, None] == columns[None, :], self.dtype(rows)), part, 1, 1, work)


@cache
def _square_sums(library: DeviceLibrary) -> Any:
    return library.xp.ReductionKernel(
        "T x", "float64 y", "double(x) * double(x)", "a + b", "y = a", "0", "pmm3d_square_sums", reduce_type="double"
    )


@dataclass(frozen=True)
class StreamMemory(NumpyLibrary):
    """Device memory for one stream. Released memory can be reused at once, because a stream executes its work in order.
    Another stream would not wait for that work."""

    of: Any
    device: int
    key: int

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self.of.empty(shape, dtype)

    def address(self, array: Array) -> int:
        return self.of.address(array)

    @property
    def on_host(self) -> bool:  # type: ignore[override]
        return False


@dataclass(frozen=True)
class PinnedHost(NumpyLibrary):
    """Pinned host memory as numpy arrays. The library of a device allocates it."""

    of: Any

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self.of.pinned_bytes(shape[0])
