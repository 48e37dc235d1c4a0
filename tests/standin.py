"""A stand-in for cupy: arrays with nothing but the CUDA array interface, over host memory, behind a lazy stream.

Every operation on arrays only joins the stream's queue, and its result holds rubbish until someone synchronises, as on
a device that is slow to start. A message that leaves, or a result that is read, without synchronisation is wrong.
"""

import threading
from types import SimpleNamespace

import numpy as np

RUBBISH = 0xA5


class Stream:
    """Operations asked for and not yet done. synchronised counts the calls of `synchronize`."""

    def __init__(self):
        self.synchronised = 0
        self._queue = []
        self._lock = threading.RLock()

    def enqueue(self, operation) -> None:
        with self._lock:
            self._queue.append(operation)

    def run(self) -> None:
        with self._lock:
            queue, self._queue = self._queue, []
            for operation in queue:
                operation()

    def synchronize(self) -> None:
        self.synchronised += 1
        self.run()


STREAM = Stream()
DEVICES = 2


class Device:
    """taken: the numbers of the devices that were made the current one."""

    taken: list = []

    def __init__(self, number: int):
        self.number = number

    def use(self) -> None:
        self.taken.append(self.number)


cuda = SimpleNamespace(get_current_stream=lambda: STREAM, alloc_pinned_memory=bytearray, Device=Device,
                       runtime=SimpleNamespace(getDeviceCount=lambda: DEVICES))


class Memory:
    """Bytes of the device. pointer is where MPI would find them."""

    def __init__(self, nbytes: int):
        self.bytes = np.full(max(1, nbytes), RUBBISH, np.uint8)
        self.pointer = self.bytes.ctypes.data


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

    def _new(self, shape, dtype, fill):
        made = empty(shape, dtype, type(self))
        STREAM.enqueue(lambda: fill(made._host))
        return made

    def reshape(self, *shape):
        reshaped = self._host.reshape(*shape)
        if np.may_share_memory(reshaped, self._host):
            return self._view(reshaped)
        return self._new(reshaped.shape, self.dtype, lambda made: np.copyto(made, self._host.reshape(made.shape)))

    def view(self, dtype):
        return self._view(self._host.view(dtype))

    def astype(self, dtype):
        return self._new(self.shape, dtype, lambda made: np.copyto(made, self._host, casting="unsafe"))

    def set(self, host):
        if not isinstance(host, np.ndarray):
            raise TypeError(f"set takes a numpy array, not {type(host).__name__}")
        STREAM.run()
        self._host[...] = host

    def __getitem__(self, key):
        return self._view(self._host[key])

    def __setitem__(self, key, value):
        target, source = self._host[key], _host_of(value)
        STREAM.enqueue(lambda: np.copyto(target, source, casting="unsafe"))

    def __add__(self, other):
        first, second = self._host, _host_of(other)
        return self._new(self.shape, np.result_type(first, second), lambda made: np.add(first, second, out=made))

    def __rmul__(self, factor):
        return self._new(self.shape, self.dtype, lambda made: np.multiply(self._host, factor, out=made))

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
    made.set(value)
    return made


def array(value, order="C", kind=ndarray):
    return value._new(value.shape, value.dtype, lambda made: np.copyto(made, value._host))


def asnumpy(value, out=None):
    STREAM.run()
    if out is None:
        return value._host.copy()
    out[...] = value._host
    return out


def matmul(first, second, out):
    a, b, c = first._host, second._host, out._host
    STREAM.enqueue(lambda: np.matmul(a, b, out=c))


def add(first, second, out):
    a, b, c = _host_of(first), _host_of(second), out._host
    STREAM.enqueue(lambda: np.add(a, b, out=c, casting="same_kind"))


def multiply(first, second, out):
    a, b, c = _host_of(first), _host_of(second), out._host
    STREAM.enqueue(lambda: np.multiply(a, b, out=c))


def conj(value):
    return value._new(value.shape, value.dtype, lambda made: np.conjugate(value._host, out=made))
