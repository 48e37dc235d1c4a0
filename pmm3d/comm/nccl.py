"""NCCL through cupy's binding, for arrays of cupy and of torch: torch has none for messages from rank to rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

from ..arrays import Array, NumpyLibrary
from ..arrays.streams import Stream
from ..errors import Pmm3dError
from ..layout import itemsize

ID_BYTES = 4096
"""Room for a pickled id, of 128 bytes or as many numbers."""


class Nccl:
    """The communicator of an axis, whose messages are asked of a stream: nothing here waits.

    Ranks that ask for exchanges in different orders wait for each other for ever on the device: `Axis` keeps the order.
    """

    def __init__(self, binding: Any, size: int, identity: bytes, rank: int):
        self._binding = binding
        self._comm = binding.NcclCommunicator(size, pickle.loads(identity), rank)

    def exchange(self, library: NumpyLibrary, stream: Stream, sends: Sequence[tuple[int, Array]],
                 receives: Sequence[tuple[int, Array]]) -> None:
        """All messages at once, in the stream; arrays without gaps, of which empty ones are not sent."""
        self._binding.groupStart()
        try:
            for call, messages in ((self._comm.recv, receives), (self._comm.send, sends)):
                for peer, array in messages:
                    if nbytes := prod(array.shape) * itemsize(library.dtype(array)):
                        call(library.address(array), nbytes, self._binding.NCCL_UINT8, peer, stream.key)
        finally:
            self._binding.groupEnd()

    def close(self) -> None:
        self._comm.destroy()


def binding_for(library: NumpyLibrary) -> Any:
    """cupy's module nccl (or that of a module with cupy's names). Raises Pmm3dError where it does not work."""
    name = getattr(library, "module", "cupy")
    try:
        cuda = import_module(name).cuda
        found = getattr(cuda, "nccl", None) or import_module(f"{name}.cuda.nccl")
        problem = "" if found.available else "its NCCL could not be loaded"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise Pmm3dError(f"device_transport nccl: {name}.cuda.nccl does not work here: {problem}. It moves the arrays "
                         "of torch too. pip install cupy-cuda13x nvidia-nccl-cu13 (of the driver's CUDA), or "
                         "PMM3D_TRANSPORT=auto")
    return found


def new_identity(binding: Any) -> bytes:
    """What the ranks of a communicator must share, of ID_BYTES."""
    return pickle.dumps(binding.get_unique_id()).ljust(ID_BYTES, b"\0")
