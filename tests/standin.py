"""A stand-in for cupy: arrays with nothing but the CUDA array interface, over host memory, behind lazy streams.

Every operation on arrays only joins the queue of the current stream (`standin_streams`), and its result holds rubbish
until someone waits for it, as on a device that is slow to start. A message that leaves, or a result that is read,
without synchronisation is wrong. Memory belongs to a device, and what is freed serves the stream that asked for it.
"""

import os
from types import SimpleNamespace

import numpy as np
from standin_streams import DEVICES, HERE, Device, Event, Stream, get_current_stream

RUBBISH = 0xA5
cuda = SimpleNamespace(
    Device=Device,
    Event=Event,
    Stream=Stream,
    get_current_stream=get_current_stream,
    alloc_pinned_memory=bytearray,
    runtime=SimpleNamespace(
        getDeviceCount=lambda: DEVICES, getDevice=lambda: HERE.device,
        getDeviceProperties=lambda number: {"name": b"stand-in"},
        deviceGetPCIBusId=lambda number: f"{os.getpid():08x}:{number:02x}",  # each process has devices of its own
    ),
)


class Memory:
    """Bytes of the current device. pointer is where MPI would find them."""

    def __init__(self, nbytes: int):
        self.bytes = np.full(max(1, nbytes), RUBBISH, np.uint8)
        self.pointer = self.bytes.ctypes.data
        self.queue = get_current_stream().queue

    def __del__(self):
        """What is asked for next gets the memory: it overwrites it, in the order of the stream that asked for it."""
        freed = self.bytes
        self.queue.add(lambda: freed.fill(RUBBISH))


def enqueue(work, *arrays) -> None:
    """Work on arrays, for the current stream."""
    queue = get_current_stream().queue
    for array in arrays:
        if isinstance(array, ndarray) and array._memory.queue.device != queue.device:
            raise ValueError(f"the array is on device {array._memory.queue.device}, the current one is {queue.device}")
    queue.add(work)


class ndarray:  # noqa: N801, as in cupy
    """What the collectives and the product ask of a device array, no more."""

    memory_kind = Memory

    def __init__(self, host: np.ndarray, memory: Memory):
        self._host, self._memory = host, memory

    @property
    def __cuda_array_interface__(self):
        offset = self._host.ctypes.data - self._memory.bytes.ctypes.data
        described = {name: self._host.__array_interface__[name] for name in ("shape", "strides", "typestr")}
        return {**described, "version": 3, "data": (self._memory.pointer + offset, not self._host.flags.writeable)}

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    T = property(lambda self: self._view(self._host.T))

    def _view(self, host):
        return type(self)(host, self._memory)

    def _new(self, shape, dtype, fill, *others):
        made = empty(shape, dtype, type(self))
        host = made._host
        enqueue(lambda: fill(host), self, *others)
        return made

    def reshape(self, *shape):
        reshaped = self._host.reshape(*shape)
        if np.may_share_memory(reshaped, self._host):
            return self._view(reshaped)
        host = self._host
        return self._new(reshaped.shape, self.dtype, lambda made: np.copyto(made, host.reshape(made.shape)))

    def view(self, dtype):
        return self._view(self._host.view(dtype))

    def astype(self, dtype):
        host = self._host
        return self._new(self.shape, dtype, lambda made: np.copyto(made, host, casting="unsafe"))

    def set(self, host):
        if not isinstance(host, np.ndarray):
            raise TypeError(f"set takes a numpy array, not {type(host).__name__}")
        target = self._host
        enqueue(lambda: np.copyto(target, host), self)

    def __getitem__(self, key):
        return self._view(self._host[key])

    def __setitem__(self, key, value):
        target, source = self._host[key], _host_of(value)
        enqueue(lambda: np.copyto(target, source, casting="unsafe"), self, value)

    def __add__(self, other):
        first, second = self._host, _host_of(other)
        dtype = np.result_type(first, second)
        return self._new(self.shape, dtype, lambda made: np.add(first, second, out=made), other)

    def __rmul__(self, factor):
        host = self._host
        return self._new(self.shape, self.dtype, lambda made: np.multiply(host, factor, out=made))

    def __iadd__(self, other):
        add(self, other, out=self)
        return self

    def __imul__(self, factor):
        multiply(self, factor, out=self)
        return self


def _host_of(value):
    if isinstance(value, np.ndarray):
        raise TypeError("unsupported type numpy.ndarray: a device array does not mix with host arrays")
    return value._host if isinstance(value, ndarray) else value


def empty(shape, dtype=np.float64, kind=ndarray):
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize * int(np.prod(shape))
    memory = kind.memory_kind(nbytes)
    return kind(memory.bytes[:nbytes].view(dtype).reshape(shape), memory)


def asarray(value, kind=ndarray):
    made = empty(value.shape, value.dtype, kind)
    made.set(value.copy())
    return made


def array(value, order="C", kind=ndarray):
    host = value._host
    return value._new(value.shape, value.dtype, lambda made: np.copyto(made, host))


def asnumpy(value, out=None, *, blocking=True):
    host, out = value._host, np.empty(value.shape, value.dtype) if out is None else out
    enqueue(lambda: np.copyto(out, host), value)
    if blocking:
        get_current_stream().synchronize()
    return out


def matmul(first, second, out):
    a, b, c = first._host, second._host, out._host
    enqueue(lambda: np.matmul(a, b, out=c), first, second, out)


def add(first, second, out):
    a, b, c = _host_of(first), _host_of(second), out._host
    enqueue(lambda: np.add(a, b, out=c, casting="same_kind"), first, second, out)


def multiply(first, second, out):
    a, b, c = _host_of(first), _host_of(second), out._host
    enqueue(lambda: np.multiply(a, b, out=c), first, second, out)


def conj(value):
    host = value._host
    return value._new(value.shape, value.dtype, lambda made: np.conjugate(host, out=made))
