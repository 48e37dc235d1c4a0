"""Arrays of the stand-ins for cupy: the CUDA array interface and cupy's operators, on lazy streams.

An operation is only added to the queue of the current stream (`standin_streams`). Its result contains RUBBISH until
the host waits for it, as on a slow device. Memory belongs to a device, and freed memory to the stream that allocated
it. Operations do not accept host arrays, except numbers.
"""

import sys
from functools import cache
from numbers import Number
from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
from standin_streams import LOCK, Device, get_current_stream

RUBBISH = 0xA5


class Memory:
    """Bytes of the current device, which the host can access. pointer: their address for MPI."""

    def __init__(self, nbytes: int):
        self.queue = get_current_stream().queue
        self.bytes, self.pointer = self.found(max(1, nbytes))
        with LOCK:
            Memory.known.add(self)

    known = WeakSet()

    @staticmethod
    def at(pointer: int, nbytes: int) -> tuple[np.ndarray, int]:
        """(Memory of the current device that contains `nbytes` bytes at a pointer, their offset in it)."""
        with LOCK:
            known = list(Memory.known)
        for memory in known:
            offset = pointer - memory.pointer
            if offset >= 0 and offset + nbytes <= len(memory.bytes):
                assert memory.queue.device == get_current_stream().queue.device, "a pointer of another device"
                return memory.bytes, offset
        raise AssertionError("an address outside of the device's memory")

    def found(self, nbytes: int) -> tuple[np.ndarray, int]:
        """(New bytes as the device accesses them, their address for MPI)."""
        host = np.full(nbytes, RUBBISH, np.uint8)
        return host, host.ctypes.data

    def __del__(self):
        """Overwrite the memory, in the order of its stream, because a later allocation could use it."""
        freed = self.bytes
        self.queue.add(lambda: freed.fill(RUBBISH), writes=[freed])


class Described(Memory):
    """Memory that an object describes by the CUDA array interface. An object with `__del__` owns it."""

    def __init__(self, owner):
        self.queue, self.owner = get_current_stream().queue, owner
        described = owner.__cuda_array_interface__
        assert described["typestr"] == "|u1" and described.get("strides") is None
        self.pointer, [nbytes] = described["data"][0], described["shape"]
        memory, offset = Memory.at(self.pointer, nbytes)
        self.bytes = memory[offset : offset + nbytes]

    def __del__(self):
        if hasattr(self.owner, "__del__"):
            super().__del__()


def enqueue(work, reads=(), writes=()) -> None:
    """Add work on arrays to the current stream."""
    queue = get_current_stream().queue
    for array in (*reads, *writes):
        if isinstance(array, DeviceArray) and array._memory.queue.device != queue.device:
            raise ValueError(f"the array is on device {array._memory.queue.device}, the current one is {queue.device}")
    queue.add(work, *([_host_of(array) for array in arrays] for arrays in (reads, writes)))


def _host_of(array):
    return array._host if isinstance(array, DeviceArray) else array


class DeviceArray:
    """A device array with the operations that pmm3d uses. memory_kind: class of its memory."""

    memory_kind = Memory
    __hash__ = None

    def __init__(self, host: np.ndarray, memory: Memory):
        self._host, self._memory = host, memory

    @property
    def __cuda_array_interface__(self):
        offset = self._host.ctypes.data - self._memory.bytes.ctypes.data
        described = {name: self._host.__array_interface__[name] for name in ("shape", "strides", "typestr")}
        return {**described, "version": 3, "data": (self._memory.pointer + offset, not self._host.flags.writeable)}

    data = property(lambda self: SimpleNamespace(ptr=self.__cuda_array_interface__["data"][0]))
    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    device = property(lambda self: Device(self._memory.queue.device))
    T = property(lambda self: self._view(self._host.T))
    real = property(lambda self: self._view(self._host.real))
    imag = property(lambda self: self._view(self._host.imag))

    def _view(self, host):
        return type(self)(host, self._memory)

    def reshape(self, *shape):
        reshaped = self._host.reshape(*shape)
        if np.may_share_memory(reshaped, self._host):
            return self._view(reshaped)
        return lazily(_reshaped, self, shape=reshaped.shape)

    def swapaxes(self, one, other):
        return self._view(self._host.swapaxes(one, other))

    def view(self, dtype):
        return self._view(self._host.view(dtype))

    def astype(self, dtype):
        return lazily(_converted, self, dtype=np.dtype(dtype))

    def set(self, host):
        if not isinstance(host, np.ndarray):
            raise TypeError(f"set takes a numpy array, not {type(host).__name__}")
        target = self._host
        enqueue(lambda: np.copyto(target, host), [host], [self])

    def get(self):
        return asnumpy(self)

    def clip(self, low=None, high=None):
        return lazily(np.clip, self, low, high)

    def __getitem__(self, key):
        indices = _indices(key)
        if not indices:
            return self._view(_view_of(self._host, key))
        made = empty(
            self._host[_resolved(key, lambda index: np.zeros(index.shape, np.intp))].shape, self.dtype, type(self)
        )
        source, target = self._host, made._host
        enqueue(lambda: np.copyto(target, source[_resolved(key, _host_of)]), [self, *indices], [made])
        return made

    def __setitem__(self, key, value):
        _check_no_host_array(value)
        target, source, indices = self._host, _host_of(value), _indices(key)
        written = target if indices else _view_of(target, key)
        if not indices:
            np.broadcast_shapes(np.shape(source), written.shape)

        def work():
            target[_resolved(key, _host_of)] = source

        enqueue(work, [*indices, *([value] if isinstance(value, DeviceArray) else [])], [self._view(written)])

    def __len__(self):
        return len(self._host)

    def __array_namespace__(self, api_version=None):
        return sys.modules[type(self).__module__]

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        """For operands that are numbers of numpy, and for functions of cupyx.scipy.special."""
        return lazily(ufunc, *inputs, **options) if method == "__call__" else NotImplemented

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def item(self):
        return asnumpy(self).item()

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())


def _view_of(host: np.ndarray, key) -> np.ndarray:
    """A view, also for an index of one element."""
    keys = key if isinstance(key, tuple) else (key,)
    return host[key] if any(part is ... for part in keys) else host[(*keys, ...)]


def _reshaped(array, shape):
    return array.reshape(shape)


def _converted(array, dtype):
    return array.astype(dtype)


def _indices(key) -> list[DeviceArray]:
    return [part for part in (key if isinstance(key, tuple) else (key,)) if isinstance(part, DeviceArray)]


def _resolved(key, of):
    """The key, with of(array) in place of each device array."""
    if isinstance(key, tuple):
        return tuple(_resolved(part, of) for part in key)
    return of(key) if isinstance(key, DeviceArray) else key


def _check_no_host_array(value) -> None:
    if isinstance(value, np.ndarray):
        raise TypeError("unsupported type numpy.ndarray: a device array does not mix with host arrays")


def lazily(function, *inputs, out=None, **options):
    """Add numpy's function(*inputs, **options) to the current stream. The result is a new array, or `out`."""
    for value in inputs:
        _check_no_host_array(value)
    arrays, hosts = [value for value in inputs if isinstance(value, DeviceArray)], list(map(_host_of, inputs))
    shape, dtype = _result_of(function, tuple(map(_described, inputs)), tuple(options.items()))
    if out is None:
        out = empty(shape, dtype, type(arrays[0]))
    elif np.broadcast_shapes(shape, out.shape) != out.shape or not np.can_cast(dtype, out.dtype, "same_kind"):
        raise TypeError(f"{dtype} {shape} does not fit into {out.dtype} {out.shape}")
    target = out._host
    enqueue(lambda: np.copyto(target, function(*hosts, **options), casting="unsafe"), arrays, [out])
    return out


def _described(value):
    """Properties of an input that determine the type and the shape of a result."""
    return (value.shape, value.dtype) if isinstance(value, DeviceArray) else (None, value, type(value))


@cache
def _result_of(function, described, options):
    """(shape, dtype) of a result, computed for arrays of ones or, if they are indices, of zeros."""
    given = [
        np.broadcast_to(np.asarray(each[1].kind in "fc", each[1]), each[0]) if each[0] is not None else each[1]
        for each in described
    ]
    with np.errstate(all="ignore"):
        result = np.asarray(function(*given, **dict(options)))
    return result.shape, result.dtype


def empty(shape, dtype=np.float64, kind=DeviceArray):
    shape, dtype = (shape,) if isinstance(shape, Number) else tuple(shape), np.dtype(dtype)
    nbytes = dtype.itemsize * int(np.prod(shape))
    memory = kind.memory_kind(nbytes)
    return kind(memory.bytes[:nbytes].view(dtype).reshape(shape), memory)


def asnumpy(value, out=None, *, blocking=True):
    source, target = value._host, np.empty(value.shape, value.dtype) if out is None else out
    enqueue(lambda: np.copyto(target, source), [value], [target])
    if blocking:
        get_current_stream().synchronize()
    return target
