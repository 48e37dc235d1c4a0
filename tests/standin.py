"""A stand-in for cupy in host memory. Pointers to its arrays are valid on the host and for MPI.

Messages and results without synchronisation contain wrong data: see `standin_arrays`.
"""

from standin_arrays import DeviceArray
from standin_names import names
from standin_streams import DEVICES, HERE, Device, Stream, get_current_stream  # noqa: F401


class ndarray(DeviceArray):
    pass


globals().update(names(ndarray))
