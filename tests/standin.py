"""A stand-in for cupy, over host memory: pointers to its arrays are pointers that MPI and the host can follow.

A message that leaves, or a result that is read, without synchronisation is wrong: see `standin_arrays`.
"""

from standin_arrays import DeviceArray
from standin_names import names
from standin_streams import DEVICES, HERE, Device, Stream, get_current_stream  # noqa: F401


class ndarray(DeviceArray):  # noqa: N801, as in cupy
    pass


globals().update(names(ndarray))
