"""The stand-in of standin.py, in memory that only an MPI with support for devices can access.

It needs the stand-in CUDA driver: see test_driver_memory.py.
"""

from driver_memory import DriverMemory, copied_on_devices  # noqa: F401
from standin_arrays import DeviceArray
from standin_names import names


class ndarray(DeviceArray):
    memory_kind = DriverMemory


globals().update(names(ndarray))
