"""Array libraries, by array or by name. Libraries that are not used are not loaded."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from numbers import Number
from typing import Any

import numpy as np

from ..errors import DTypeError, LayoutError, Pmm3dError, install_command
from ..layout import LABEL_DTYPE, MATRIX_DTYPES
from .numpy_library import Array, NumpyLibrary, dtype_name

NUMPY = NumpyLibrary()


def library_of(array: Array) -> NumpyLibrary:
    """Return the library of an array.

    Raises DTypeError for other objects, and for subclasses of numpy.ndarray with further meaning: a mask, a unit, or
    the operators of a numpy.matrix would be lost.

        >>> library_of(np.zeros(3)).name
        'numpy'
    """
    if type(array) is np.ndarray:
        return NUMPY
    if isinstance(array, (np.ndarray, np.generic)):
        _check_plain(array)
        return NUMPY
    if (dry := sys.modules.get(f"{__package__}.dry")) is not None and isinstance(array, dry.DryArray):
        return array.library
    if "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
        return _of_torch(array.device, array.layout, array.__class__)
    module = type(array).__module__.partition(".")[0]
    if module == "cupy" or hasattr(array, "__cuda_array_interface__"):  # cupy before 14 lacks the interface on ROCm
        from .device_library import DeviceLibrary

        return DeviceLibrary(module)
    remedy = ". Make an array of it: numpy.array(values)" if isinstance(array, (list, tuple, Number)) else ""
    raise DTypeError(f"{type(array).__name__} is none of numpy.ndarray, torch.Tensor, cupy.ndarray{remedy}")


@cache
def _of_torch(device: Any, layout: Any, kind: type) -> NumpyLibrary:
    from .torch_library import TorchLibrary

    if layout is not sys.modules["torch"].strided or hasattr(kind, "__tensor_flatten__") or device.type == "meta":
        raise DTypeError(
            f"a {kind.__name__} of {layout} on the device {device} has no memory with all its elements: "
            "make a plain tensor, as by tensor.to_dense() of a sparse tensor, or by full_tensor() of a "
            "DTensor"
        )
    return TorchLibrary(str(device))


def _check_plain(array: np.ndarray | np.generic) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise DTypeError("a masked array has masked elements, and a matrix has none: use array.filled(value)")
    if not isinstance(array, (np.memmap, np.generic)):
        raise DTypeError(
            f"{type(array).__name__} is a subclass of numpy.ndarray with its own meaning, which would be "
            "lost: use numpy.asarray(array)"
        )


def check_output(
    library: NumpyLibrary,
    what: object,
    out: Array,
    *sources: Array,
    name: str = "out",
    strided: bool = False,
    result: tuple[tuple[int, ...], str] | None = None,
) -> None:
    """Raise LayoutError if results cannot be written to an array that a caller passed, while `sources` are read.

    Every function that writes to a caller's array passes it through this function. `NumpyLibrary.as_input` is for
    arrays that are read.

    library      library of the sources and of the result
    what, name   the operation and the array, in the error message
    strided      whether the array may have gaps
    result       shape and type of the result, which the array must have; None if the caller has compared them

        >>> check_output(NUMPY, "all_gather", np.empty(3), np.ones(3))
    """
    problem, theirs = "", library_of(out)
    if theirs != library or result not in (None, (tuple(out.shape), library.dtype(out))):
        shape, dtype = result or (out.shape, library.dtype(out))
        problem = (
            f"is {tuple(out.shape)} {theirs.dtype(out)} ({theirs.name}); the result is {shape} {dtype} ({library.name})"
        )
    elif not library.writable(out):
        problem = "is read-only, and would be overwritten"
    elif not library.as_stored(out):
        problem = (
            "is no plain array: it has another byte order, is a field of packed records, or is a lazy conjugate "
            "of torch"
        )
    elif not library.is_contiguous(out) and (not strided or _overlaps_itself(library, out)):
        problem = "has elements that share memory" if strided else "is not C-contiguous, and messages need that"
    elif any(library.share_memory(source, out) for source in sources):
        problem = "shares memory with an array that is read or written at the same time"
    if problem:
        raise LayoutError(f"{what}: {name} {problem}. Pass another array, such as a copy")


def _overlaps_itself(library: NumpyLibrary, array: Array) -> bool:
    """Whether elements share memory. Also True if runs of elements interleave, which no slice of an array does."""
    extent = 1
    for stride, size in sorted(zip(map(abs, library.strides(array)), array.shape)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def library_named(name: str | NumpyLibrary) -> NumpyLibrary:
    """Return the library "numpy", "torch" (host), "torch:DEVICE" or "cupy". A library is returned unchanged.

    Raises Pmm3dError for an unknown name, and if the library is not installed.

        >>> library_named("numpy").on_host
        True
    """
    if isinstance(name, NumpyLibrary):
        return name
    kind, _, device = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name == "numpy":
        return NUMPY
    if kind not in ("torch", "cupy") and not hasattr(sys.modules.get(kind), "cuda"):
        raise Pmm3dError(f"unknown array library {name!r}; there are numpy, torch, torch:DEVICE and cupy")
    try:
        import_module(kind)
    except ImportError as error:
        raise Pmm3dError(f"{kind} arrays need {kind}: {install_command(kind)} ({error})") from None
    if kind == "torch":
        from .torch_library import TorchLibrary

        try:
            import_module("torch").device(device or "cpu")
        except RuntimeError:
            raise Pmm3dError(f"unknown array library {name!r}: torch has no device of that name") from None
        return TorchLibrary(device or "cpu")
    from .device_library import DeviceLibrary

    return DeviceLibrary(kind)


def library_here(name: str | NumpyLibrary) -> NumpyLibrary:
    """As `library_named`; also raises Pmm3dError if this process has no such device. Creates no context on it.

    >>> library_here("numpy").kind
    'numpy'
    """
    library = library_named(name)
    library.check_device()
    return library


def take_device(name: str | NumpyLibrary, local_rank: int) -> int | None:
    """Make a device the current device of its library, and return its number; None for libraries on the host.

    `name` is that of `library_named`. If it has a number, as in "torch:cuda:1", the current device does not change, and
    None is returned. `local_rank` is the rank of this process on its node (`Grid.local_rank`).

    Local rank r takes device r of its visible devices (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES). If there are fewer
    devices than ranks, ranks share devices. All devices of a node must be visible to all its ranks. If each rank sees
    one device, as with a launcher's GPU binding, MPI cannot copy between devices (open-mpi/ompi#11949). Raises
    Pmm3dError if there is no such device.

        >>> take_device("numpy", local_rank=3)
    """
    return library_here(name).take_device(local_rank)


def library_of_error(error: BaseException) -> NumpyLibrary | None:
    """Return the device library that raised an out-of-memory error; None if host memory was exhausted.

    >>> library_of_error(MemoryError("Unable to allocate")) is None
    True
    """
    module = {"cupy_backends": "cupy"}.get(top := type(error).__module__.partition(".")[0], top)
    if module == "torch":
        return library_named("torch:cuda") if type(error).__name__ == "OutOfMemoryError" else None
    return library_named(module) if hasattr(sys.modules.get(module), "cuda") else None


def library_kind(library: Any) -> str:
    """Return the name, without a device number, that must be the same on all ranks. Never raises.

    >>> library_kind("torch:cuda:1"), library_kind("torch:cpu"), library_kind(NumpyLibrary())
    ('torch:cuda', 'torch', 'numpy')
    """
    if isinstance(library, NumpyLibrary):
        return library.kind
    kind, *device = str(library).split(":")
    return f"{kind}:{device[0]}" if device and device[0] not in ("", "cpu") else kind


def dtype_named(dtype: Any) -> str:
    """Return the name, such as "float32", of a numpy dtype or type, a torch dtype, or another name ("f4").

    Raises DTypeError for other objects.

        >>> dtype_named("f4"), dtype_named(np.complex64), dtype_named("bfloat16")
        ('float32', 'complex64', 'bfloat16')
    """
    try:
        return dtype_name(dtype if str(dtype).startswith("torch.") or dtype == "bfloat16" else np.dtype(dtype or ""))
    except (TypeError, ValueError, SyntaxError):
        raise DTypeError(f'{dtype!r} names no element type; one is named as in "float32"') from None


def check_matrix_dtype(dtype: str, library: NumpyLibrary, labels: bool = False) -> str:
    """Return the dtype. Raises DTypeError if matrices of the library, or labels, cannot have this type.

    >>> check_matrix_dtype("float32", NumpyLibrary())
    'float32'
    """
    usable = [name for name in MATRIX_DTYPES if name != "bfloat16" or library.name == "torch"]
    usable += [LABEL_DTYPE] if labels else []
    if dtype not in usable:
        remedy = 'take library="torch" or "torch:cuda" for it' if dtype == "bfloat16" else "Convert first"
        raise DTypeError(f"{library.name} matrices have the types {', '.join(usable)}; got {dtype}. {remedy}")
    return dtype
