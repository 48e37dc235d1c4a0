"""torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ..errors import Pmm3dError
from ..layout import itemsize, multiplied_in
from . import blas, blas_choice
from .device_library import PinnedHost, StreamMemory
from .numpy_library import HUGE_PAGE, Array, NumpyLibrary, numpy_type
from .streams import Device, DeviceMemory, TorchStream
from .sums import WorkArrays, check_gemm_types, rounded_gemm, scale, widened_gemm
from .torch_rounding import EXACT, ON_DEVICE, ON_HOST, TF32


@cache
def _torch() -> ModuleType:
    return import_module("torch")


@dataclass(frozen=True)
class TorchLibrary(NumpyLibrary):
    """torch tensors. GEMM is torch.addmm, or the BLAS that PMM3D_BLAS names for tensors on the host."""

    device: str = "cpu"
    name: ClassVar[str] = "torch"

    @property
    def kind(self) -> str:
        return "torch" if self.on_host else f"torch:{self.device.partition(':')[0]}"

    @cached_property
    def on_host(self) -> bool:  # type: ignore[override]
        return self.device == "cpu"

    @property
    def gemm_copies(self) -> bool:  # type: ignore[override]
        return self.on_host

    @property
    def slice_elements(self) -> int | None:  # type: ignore[override]
        return NumpyLibrary.slice_elements if self.on_host else None

    @property
    def xp(self) -> ModuleType:
        return _torch()

    @property
    def memory(self) -> NumpyLibrary:
        if self.on_host:
            return NumpyLibrary()
        here = self.current_stream()
        return StreamMemory(self, here.device, here.key)

    def _torch_dtype(self, dtype: str) -> Any:
        return getattr(self.xp, dtype)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        nbytes = prod(shape) * itemsize(dtype)
        if self.on_host and nbytes >= HUGE_PAGE:
            return self.view(NumpyLibrary().empty((nbytes,), "uint8"), shape, dtype)
        return self.xp.empty(tuple(shape), dtype=self._torch_dtype(dtype), device=self.device)

    def view(self, flat: Array, shape: tuple[int, ...], dtype: str) -> Array:
        if 0 in shape:
            return self.empty(shape, dtype)  # torch cannot view an empty array as another type
        if isinstance(flat, np.ndarray):
            return self.over_numpy(np.ndarray(shape, numpy_type(dtype), flat), dtype)
        return flat[: prod(shape) * itemsize(dtype)].view(self._torch_dtype(dtype)).view(tuple(shape))

    def over_numpy(self, array: np.ndarray, dtype: str) -> Array:
        made = self.xp.from_numpy(array)
        return made.view(self.xp.bfloat16) if dtype == "bfloat16" else made

    def over_device(self, memory: Any) -> Array:
        return self.xp.as_tensor(memory, device=self.device)

    def words(self, start: int, stop: int) -> Array:
        return self.xp.arange(start, stop, dtype=self.xp.int64, device=self.device)

    def special(self, name: str) -> Callable[[Array], Array]:
        return getattr(self.xp.special, name)

    def strides(self, array: Array) -> tuple[int, ...]:
        return array.stride()

    def address(self, array: Array) -> int:
        return array.data_ptr()

    def device_of(self, array: Array) -> int | None:
        return array.device.index

    def check_device(self) -> None:
        if self.kind != "torch:cuda":
            return
        device_count, number = self.xp.cuda.device_count(), self.xp.device(self.device).index or 0
        if not 0 <= number < device_count:  # torch truncates a device number to 8 bits
            raise Pmm3dError(
                f"library 'torch:{self.device}': torch finds {device_count} CUDA devices here. nvidia-smi and "
                'CUDA_VISIBLE_DEVICES show why; library="torch" works on the host'
            )

    def take_device(self, local_rank: int) -> int | None:
        if self.device != "cuda":
            return None
        number = local_rank % self.xp.cuda.device_count()
        self.xp.cuda.set_device(number)
        return number

    def current_device(self) -> Device | None:
        if self.kind != "torch:cuda":
            return None
        cuda, number = self.xp.cuda, self.current_stream().device
        properties = cuda.get_device_properties(number)
        return Device(number, properties.name, _pci_of(properties), cuda.device_count())

    def device_memory(self) -> DeviceMemory | None:
        if self.kind != "torch:cuda":
            return None
        free, total = self.xp.cuda.mem_get_info(self.device)
        return DeviceMemory(free, total, self.xp.cuda.memory_reserved(self.device))

    def writable(self, array: Array) -> bool:
        return not array.requires_grad and (not array.is_inference() or bool(self.xp.is_inference_mode_enabled()))

    def synchronize(self) -> None:
        if not self.on_host:
            self.xp.cuda.current_stream(self.device).synchronize()

    def current_stream(self) -> TorchStream:
        return TorchStream(self.xp.cuda, self.xp.cuda.current_stream(self.device))

    def new_stream(self) -> TorchStream:
        return TorchStream(self.xp.cuda, self.xp.cuda.Stream(self.device))

    def astype(self, array: Array, dtype: str) -> Array:
        return array.to(self._torch_dtype(dtype))

    def copy(self, array: Array) -> Array:
        made = self.empty(tuple(array.shape), self.dtype(array))
        made[...] = array.detach()
        return made

    def as_strided(self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Array:
        return self.xp.as_strided(array, shape, strides, array.storage_offset() + first)

    def as_input(self, array: Array, *, strided: bool = False) -> Array:
        return super().as_input(_untracked(array), strided=strided)

    def as_stored(self, array: Array) -> bool:
        return not (array.is_conj() or array.is_neg())

    def conjugate(self, array: Array) -> Array:
        return self.xp.conj_physical(array)

    def conjugate_in_place(self, array: Array) -> None:
        array.conj_physical_()

    def from_numpy(self, array: np.ndarray, dtype: str) -> Array:
        host = self.xp.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
        return host.to(device=self.device, dtype=self._torch_dtype(dtype))

    def to_numpy(self, array: Array) -> np.ndarray:
        host = array.detach().resolve_conj().resolve_neg().cpu()
        return (host.float() if self.dtype(array) == "bfloat16" else host).numpy()

    def pinned(self) -> NumpyLibrary:
        return PinnedHost(self)

    def to_host(self, array: Array, host: np.ndarray) -> None:
        self.xp.from_numpy(host).copy_(array.reshape(-1).view(self.xp.uint8), non_blocking=True)

    def from_host(self, array: Array, host: np.ndarray) -> None:
        array.view(-1).view(self.xp.uint8).copy_(self.xp.from_numpy(host), non_blocking=True)

    def pinned_bytes(self, nbytes: int) -> np.ndarray:
        return self.xp.empty(nbytes, dtype=self.xp.uint8, pin_memory=not self.on_host).numpy()

    def square_sum(self, array: Array) -> Any:
        if not self.on_host or self.dtype(array).startswith("complex"):
            return super().square_sum(array)
        flat, total, dot = array.detach().reshape(-1), 0.0, self.xp.dot
        step = NumpyLibrary.slice_elements or 1
        for start in range(0, flat.shape[0], step):
            part = flat[start : start + step].double()
            total += dot(part, part).item()
        return total

    def square_sums(self, rows: Array) -> Array:
        wide = {"dtype": self.xp.float32} if rows.dtype.itemsize == 2 else {}
        return self.xp.linalg.vector_norm(rows, dim=1, **wide).double().square()

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
        dtype, of_result = self.dtype(a), self.dtype(c)
        check_gemm_types(dtype, self.dtype(b), of_result)
        if 0 in c.shape:
            return
        if alpha == 0 or not a.shape[1]:
            scale(self, c, beta)
            return
        if (wide := multiplied_in(dtype, of_result, self.on_host, rounded)) != dtype:
            widened_gemm(self, a, b, c, alpha, beta, work, wide, conjugated)
            return
        try:  # torch would copy matrices that `arranged` rejects
            blas.arranged(
                (a.shape, a.stride()), (b.shape, b.stride()), (c.shape, c.stride()), conjugated, blas.LP64_LARGEST
            )
        except blas.TooLarge:
            self._in_pieces(
                a, b, c, alpha, beta, work, blas.LP64_LARGEST, tf32=tf32, conjugated=conjugated, rounded=rounded
            )
            return
        if conjugated != blas.AS_THEY_ARE:
            a, b = (array.conj() if flag else array for array, flag in zip((a, b), conjugated))
        a, b, c = _untracked(a), _untracked(b), _untracked(c)
        if self.on_host and dtype == of_result in blas.DTYPES and self.blas_file:
            blas.gemm(dtype, self._matrix(a), self._matrix(b), self._matrix(c), alpha, beta, conjugated)
        elif dtype == of_result:
            self._multiply(a, b, c, alpha, beta, tf32)
        elif self.on_host:
            rounded_gemm(self, a, b, c, alpha, beta, work)
        else:
            self.xp.addmm(c, a, b, beta=beta, alpha=alpha, out=c, out_dtype=c.dtype)

    def _at_once(
        self, dtypes: tuple[str, str], a: Array, b: Array, c: Array, alpha: complex, beta: complex, tf32: bool
    ) -> bool:
        if (self.on_host and dtypes[0] != dtypes[1]) or multiplied_in(*dtypes, self.on_host) != dtypes[0]:
            return False
        blas.arranged(*blas.items(*map(self._matrix, (a, b, c))).matrices, largest=blas.LP64_LARGEST)
        with self.xp.no_grad():
            if self.on_host and dtypes[0] in blas.DTYPES and self.blas_file:
                return super()._at_once(dtypes, a, b, c, alpha, beta, tf32)
            if dtypes[0] == dtypes[1]:
                self._multiply(a, b, c, alpha, beta, tf32)
            else:
                self.xp.baddbmm(c, a, b, beta=beta, alpha=alpha, out=c, out_dtype=c.dtype)
        return True

    @property
    def blas_file(self) -> str:
        """File of the BLAS that PMM3D_BLAS names; "" if it names SciPy's or none. torch then uses its own BLAS."""
        return blas_choice.blas_file()

    def columns(self, array: Array, index: Array) -> Array:
        return self.xp.index_select(array, 1, index)

    def add_columns(self, out: Array, index: Array, rows: Array, work: WorkArrays) -> None:
        if not self.on_host:
            out.T.index_put_((index,), rows, accumulate=True)
            return
        columns, places = index.unique(return_inverse=True)
        wide = rows.float() if rows.dtype.itemsize == 2 else rows
        sums = self.xp.zeros((len(columns), rows.shape[1]), dtype=wide.dtype).index_add_(0, places, wide)
        out.index_add_(1, columns, sums.T.to(out.dtype))

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
        if self.blas_file:
            return super().bound_gemm(a, b, c, alpha, beta, work, conjugated=conjugated)
        if conjugated != blas.AS_THEY_ARE:
            return partial(self.gemm, a, b, c, alpha, beta, work, conjugated=conjugated)
        return partial(self.gemm_of_forms(a, b, c, alpha, beta, work), a, b, c)

    def gemm_of_forms(
        self, a: Array, b: Array, c: Array, alpha: complex, beta: complex, work: WorkArrays
    ) -> Callable[[Array, Array, Array], None]:
        by_calls = super().gemm_of_forms(a, b, c, alpha, beta, work)
        if self.blas_file:
            return by_calls
        try:
            shapes = ((each.shape, each.stride()) for each in (a, b, c))
            blas.arranged(*shapes, blas.AS_THEY_ARE, blas.LP64_LARGEST)
        except blas.TooLarge:
            return by_calls
        addmm, setting = self.xp.addmm, self.xp.backends.mkldnn.matmul

        def multiply(a: Array, b: Array, c: Array) -> None:
            addmm(c, a, b, beta=beta, alpha=alpha, out=c)

        def multiply_exactly(a: Array, b: Array, c: Array) -> None:
            if ON_HOST.is_exact(setting):
                addmm(c, a, b, beta=beta, alpha=alpha, out=c)
            else:
                by_calls(a, b, c)

        return multiply_exactly if self.dtype(a) in ("float32", "complex64") else multiply

    def _multiply(self, a: Array, b: Array, c: Array, alpha: complex, beta: complex, tf32: bool) -> None:
        """Multiply arrays of one type. Factors of float32 are exact, or tf32 on a device, whatever torch's settings."""
        multiply = self.xp.addmm if c.ndim == 2 else self.xp.baddbmm
        if self.dtype(a) not in ("float32", "complex64"):
            multiply(c, a, b, beta=beta, alpha=alpha, out=c)
            return
        backends, rounding = self.xp.backends, ON_HOST if self.on_host else ON_DEVICE
        setting = backends.mkldnn.matmul if self.on_host else backends.cuda.matmul
        if self.on_host and rounding.is_exact(setting):  # on the host, no thread needs another value
            multiply(c, a, b, beta=beta, alpha=alpha, out=c)
            return
        rounding.hold(setting, TF32 if tf32 and not self.on_host else EXACT)
        try:
            multiply(c, a, b, beta=beta, alpha=alpha, out=c)
        finally:
            rounding.release(setting)


def _untracked(array: Array) -> Array:
    """Return the array detached from torch's autograd, which must not record the GEMM."""
    return array.detach() if array.requires_grad else array


def _pci_of(properties: Any) -> str:
    """Return the PCI address (torch 2.7 or later), or the UUID of the device."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return str(getattr(properties, "uuid", ""))
