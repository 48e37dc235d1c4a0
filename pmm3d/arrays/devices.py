"""Which device of its node a rank computes on."""

from __future__ import annotations

from importlib import import_module

from .device_library import DeviceLibrary
from .libraries import library_named
from .numpy_library import NumpyLibrary
from .torch_library import TorchLibrary


def take_device(name: str | NumpyLibrary, local_rank: int) -> int | None:
    """Make a device the current one of its library and return its number; None for libraries on the host.

    name         as for `library_named`; "torch:cuda:1" names its device itself and is left alone
    local_rank   of this process on its node (`Grid.local_rank`)

    Local rank r takes device r, and ranks share devices where there are fewer. All devices of a node must be visible to
    all its ranks: with one each, as a launcher's GPU binding leaves them, MPI cannot move data from device to device
    (open-mpi/ompi#11949).
    """
    library = library_named(name)
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
