"""The stand-in of standin.py on memory that the host cannot touch and MPI with support for devices can.

Only where a stand-in CUDA driver is loaded: see test_driver_memory.py.
"""

from driver_memory import DriverMemory, copied_on_devices  # noqa: F401
from standin_arrays import DeviceArray
from standin_names import names


class ndarray(DeviceArray):  # noqa: N801, as in cupy
    memory_kind = DriverMemory


globals().update(names(ndarray))
