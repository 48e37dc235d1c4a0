"""Memory of a stand-in CUDA driver. The host has no access rights to its pages: only MPI can follow the pointers.

The driver's IPC handles contain the data that a process needs to map the same pages. The stand-in computes on this
second mapping.
"""

import ctypes
import mmap
from collections import defaultdict

import numpy as np
from standin_arrays import Memory
from standin_streams import set_device

DRIVER = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
CONTEXT = ctypes.c_void_p(0x1000)
PAGES, BLOCK = 2**21, 2**9
"""Smallest request to the driver in bytes. The sizes of its blocks are multiples of this number."""


class Handle(ctypes.Structure):
    """The 64 bytes that cuIpcGetMemHandle of the stand-in driver writes."""

    _fields_ = [
        ("process", ctypes.c_int),
        ("file", ctypes.c_int),
        ("size", ctypes.c_size_t),
        ("rest", ctypes.c_char * 48),
    ]


class Pool:
    """A pool of the driver's memory, as in cupy: a freed block is used again by the stream that had it."""

    def __init__(self):
        self._free, self._bytes, self._pointer, self._left = defaultdict(list), None, 0, 0

    def take(self, queue, nbytes: int) -> tuple[np.ndarray, int]:
        size = -(-nbytes // BLOCK) * BLOCK
        if free := self._free[queue, size]:
            return free.pop()
        if size > self._left:
            self._more(max(size, PAGES))
        start, self._left = len(self._bytes) - self._left, self._left - size
        return self._bytes[start : start + size], self._pointer + start

    def give(self, queue, bytes: np.ndarray, pointer: int) -> None:
        self._free[queue, len(bytes)].append((bytes, pointer))

    def _more(self, nbytes: int) -> None:
        pointer, handle = ctypes.c_uint64(), Handle()
        assert DRIVER.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)) == 0
        assert DRIVER.cuIpcGetMemHandle(ctypes.byref(handle), pointer) == 0
        self._bytes = np.frombuffer(mmap.mmap(handle.file, handle.size), np.uint8)
        self._pointer, self._left = pointer.value, handle.size


class DriverMemory(Memory):
    pool = Pool()

    def found(self, nbytes):
        bind()
        return self.pool.take(self.queue, nbytes)

    def __del__(self):
        super().__del__()
        self.pool.give(self.queue, self.bytes, self.pointer)


def bind() -> None:
    """Create a context for this thread, as calls of CUDA's runtime do."""
    assert DRIVER.cuCtxSetCurrent(CONTEXT) == 0


def copied_on_devices() -> int:
    """Bytes that the driver copied from device to device. Only MPI requests such copies."""
    return (ctypes.c_long * 4).in_dll(DRIVER, "fake_bytes")[2]


set_device.told.append(bind)
set_device(0)  # before MPI_Init: without a context, Open MPI does not copy from device to device
