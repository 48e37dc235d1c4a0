"""Which device of its node a process uses, and which one that is."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NamedTuple

from .libraries import library_here, library_named
from .numpy_library import NumpyLibrary


class Device(NamedTuple):
    """number: among those that this process sees, of which there are `visible`;   pci: where it is in the node, the
    same for all processes, however they number devices."""

    number: int
    name: str
    pci: str
    visible: int


class DeviceMemory(NamedTuple):
    """Bytes of a device: free, in all, and held by this process's array library."""

    free: int
    total: int
    held: int


def take_device(name: str | NumpyLibrary, local_rank: int) -> int | None:
    """Make a device the current one of its library and return its number; None for libraries on the host.

    name         as for `library_named`; "torch:cuda:1" names its device itself and is left alone
    local_rank   of this process on its node (`Grid.local_rank`)

    Local rank r takes device r of those that it sees (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), and ranks share
    devices where there are fewer. All devices of a node must be visible to all its ranks: with one each, as a
    launcher's GPU binding leaves them, MPI cannot move data from device to device (open-mpi/ompi#11949). Raises
    Pmm3dError where there is no such device.

        >>> take_device("numpy", local_rank=3)
    """
    from .device_library import DeviceLibrary
    from .torch_library import TorchLibrary

    library = library_here(name)
    if isinstance(library, DeviceLibrary):
        cuda = import_module(library.module).cuda
        number = local_rank % cuda.runtime.getDeviceCount()
        cuda.Device(number).use()
        return number
    if isinstance(library, TorchLibrary) and library.device == "cuda":
        cuda = import_module("torch").cuda
        number = local_rank % cuda.device_count()
        cuda.set_device(number)
        return number
    return None


def device_of(library: NumpyLibrary) -> Device | None:
    """The device that arrays of the library are on in this thread; None for libraries on the host."""
    from .device_library import DeviceLibrary
    from .torch_library import TorchLibrary

    if isinstance(library, DeviceLibrary):
        runtime = library.xp.cuda.runtime
        number = runtime.getDevice()
        name = runtime.getDeviceProperties(number)["name"]
        return Device(number, name.decode() if isinstance(name, bytes) else name,
                      runtime.deviceGetPCIBusId(number), runtime.getDeviceCount())
    if isinstance(library, TorchLibrary) and library.kind == "torch:cuda":
        cuda = library.xp.cuda
        number = library.current_stream().device
        properties = cuda.get_device_properties(number)
        return Device(number, properties.name, _pci_of(properties), cuda.device_count())
    return None


def _pci_of(properties: Any) -> str:
    """torch has the numbers since 2.7; before, what tells devices apart is their UUID."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return str(getattr(properties, "uuid", ""))


def library_of_error(error: BaseException) -> NumpyLibrary | None:
    """The library of devices that an error of running out of memory comes from; None if it is about the host's."""
    module = {"cupy_backends": "cupy"}.get(top := type(error).__module__.partition(".")[0], top)
    if module == "torch":
        return library_named("torch:cuda") if type(error).__name__ == "OutOfMemoryError" else None
    return library_named(module) if hasattr(sys.modules.get(module), "cuda") else None


def device_memory(library: NumpyLibrary) -> DeviceMemory | None:
    """Of the current device; None for libraries on the host."""
    from .device_library import DeviceLibrary
    from .torch_library import TorchLibrary

    if isinstance(library, DeviceLibrary):
        free, total = library.xp.cuda.runtime.memGetInfo()
        return DeviceMemory(free, total, library.xp.get_default_memory_pool().total_bytes())
    if isinstance(library, TorchLibrary) and library.kind == "torch:cuda":
        free, total = library.xp.cuda.mem_get_info(library.device)
        return DeviceMemory(free, total, library.xp.cuda.memory_reserved(library.device))
    return None
