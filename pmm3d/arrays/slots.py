"""Memory apart from that of arrays, in slots: of a file, of pinned memory for arrays on a device, or of a dry run."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from math import prod
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from ..layout import itemsize
from .libraries import library_of
from .numpy_library import Array, NumpyLibrary, numpy_type
from .threads import LoneThread

PAGE = mmap.ALLOCATIONGRANULARITY
"""Slots begin at multiples of this number of bytes, so that they can be mapped."""
LARGEST_WRITE = 2**30
"""Bytes of a call of pwrite or pread. Linux moves less than 2 GiB in a call."""


class Slot:
    """A place in a store. It is free again when the last reference to it is gone.

    start   first byte in the file;   nbytes   size in bytes;   memory   pinned memory, or None in a file
    """

    __slots__ = ("__weakref__", "_free", "memory", "nbytes", "start")

    def __init__(self, start: int, nbytes: int, free: list[tuple[int, Any]], memory: Any = None):
        self.start, self.nbytes, self.memory, self._free = start, nbytes, memory, free

    def __del__(self) -> None:
        self._free.append((self.start, self.memory))


class Transfer:
    """A copy to a slot or from it. `wait` returns its error, or None."""

    __slots__ = ("_array", "_copy", "_done", "error")

    def __init__(self, copy: Callable[[Any], None], array: Any):
        self._copy, self._array, self._done = copy, array, threading.Event()
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        try:
            self._copy(self._array)
        except Exception as error:
            self.error = error.with_traceback(None)  # the frames refer to the array
        finally:
            self._array = None
            self._done.set()

    def wait(self) -> Exception | None:
        self._done.wait()
        return self.error


class Slots:
    """Slots of memory apart from that of arrays. This class has none: its slots are those of a dry run.

    Sizes of slots are rounded up to 8 sizes between powers of two, and to pages, so that arrays of similar sizes use
    one slot in turn. A steady state makes no new slot.

    capacity    bytes of all slots, in use or not
    written, read           bytes of all transfers to slots, and from them
    write_seconds, read_seconds   seconds in which they were under way

        >>> slots = Slots()
        >>> slot = slots.slot(5000)
        >>> slot.nbytes % PAGE, slots.capacity == slot.nbytes
        (0, True)
    """

    on_host = True

    def __init__(self) -> None:
        self.capacity = self.written = self.read = 0
        self.write_seconds = self.read_seconds = 0.0
        self._free = defaultdict[int, list[tuple[int, Any]]](list)

    def slot(self, nbytes: int) -> Slot:
        """Return a free slot of at least this size. Raises OSError if there is no room for a new one."""
        size = rounded(nbytes)
        free = self._free[size]
        if free:
            start, memory = free.pop()
        else:
            start, memory = self.capacity, self._grow(size)
            self.capacity += size
        return Slot(start, size, free, memory)

    def write(self, slot: Slot, array: Array, offset: int = 0) -> Transfer:
        """Begin to copy a contiguous array to a slot, from byte `offset` on. It must not change until the end."""
        self.written += int(array.nbytes)
        return self._begin(slot, array, offset, True)

    def read_into(self, slot: Slot, array: Array, offset: int = 0) -> Transfer:
        """Begin to fill a contiguous array from a slot, from byte `offset` on."""
        self.read += int(array.nbytes)
        return self._begin(slot, array, offset, False)

    def view(self, slot: Slot, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        """Return an array on the host over the memory of a slot, after all transfers that have begun. It keeps a slot
        of a file."""
        return library.temporary(shape, dtype)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise OSError if the slots do not exist any more."""

    def close(self) -> None:
        """Give the memory back."""

    def _grow(self, nbytes: int) -> Any:
        return None

    def _begin(self, slot: Slot, array: Array, offset: int, writes: bool) -> Transfer:
        transfer = Transfer(lambda array: None, None)
        transfer.run()
        return transfer


class FileSlots(Slots):
    """Slots in a file, which has no name, so that it disappears with the process. One thread makes the copies in their
    order, without the GIL.

    folder   folder on this node
    """

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder
        self._file, name = tempfile.mkstemp(prefix="pmm3d-", dir=folder)
        os.unlink(name)
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = LoneThread(target=_copy_all, args=(self._queue,), name="pmm3d store", daemon=True)
        self._thread.start()

    def view(self, slot: Slot, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        if 0 in shape:
            return library.empty(shape, dtype)
        self.check()
        last = Transfer(lambda array: None, None)
        self._queue.put(last)  # a copy to an array that used the slot before may be under way
        last.wait()
        memory = _Mapped(self._file, prod(shape) * itemsize(dtype), offset=slot.start)
        memory.slot = slot
        return library.over_numpy(np.ndarray(shape, numpy_type(dtype), memory), dtype)

    def check(self) -> None:
        if (size := os.fstat(self._file).st_size) < self.capacity:
            raise OSError(errno.EIO, f"the file has {size:,} of {self.capacity:,} bytes: it was truncated")

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            os.close(self._file)
            self._file = -1

    def _grow(self, nbytes: int) -> None:
        self.check()  # a file that grows again hides that it was truncated
        os.posix_fallocate(self._file, self.capacity, nbytes)  # a full disk is seen now, and not while arrays are gone

    def _begin(self, slot: Slot, array: Array, offset: int, writes: bool) -> Transfer:
        start = slot.start + offset
        transfer = Transfer(lambda data: (self._write if writes else self._read)(start, data), bytes_of(array))
        self._queue.put(transfer)
        return transfer

    def _write(self, start: int, data: np.ndarray) -> None:
        begun, done, view = perf_counter(), 0, memoryview(data)  # type: ignore[arg-type]
        while done < len(view):
            done += os.pwrite(self._file, view[done : done + LARGEST_WRITE], start + done)
        self.write_seconds += perf_counter() - begun

    def _read(self, start: int, data: np.ndarray) -> None:
        begun, done, view = perf_counter(), 0, memoryview(data)  # type: ignore[arg-type]
        while done < len(view):
            count = os.preadv(self._file, [view[done : done + LARGEST_WRITE]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the file ends before byte {start + len(view):,}: it was truncated")
            done += count
        self.read_seconds += perf_counter() - begun


class _Mapped(mmap.mmap):
    """Memory of a slot, which it keeps."""

    slot: Slot


class HostSlots(Slots):
    """Slots in pinned memory of the host, for arrays on a device. Copies are in the order of the current stream, so
    they need no waits. They have not run on a device so far.

    library   library of the arrays
    """

    on_host = False

    def __init__(self, library: NumpyLibrary):
        super().__init__()
        self.library = library

    def view(self, slot: Slot, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        self.library.synchronize()
        if dtype == "bfloat16":
            from .torch_library import TorchLibrary

            return TorchLibrary().view(slot.memory, shape, dtype)
        return np.ndarray(shape, dtype, slot.memory)

    def _grow(self, nbytes: int) -> Any:
        return self.library.pinned().empty((nbytes,), "uint8")

    def _begin(self, slot: Slot, array: Array, offset: int, writes: bool) -> Transfer:
        memory = slot.memory[offset : offset + int(array.nbytes)]
        copy = self.library.to_host if writes else self.library.from_host
        transfer = Transfer(lambda array: copy(array, memory), array)
        transfer.run()
        return transfer


def rounded(nbytes: int) -> int:
    """Return the size of a slot for this number of bytes.

    >>> [rounded(number * PAGE) // PAGE for number in (0, 1, 15, 17, 100)]
    [1, 1, 15, 18, 104]
    """
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE


def bytes_of(array: Array) -> np.ndarray:
    """Return the bytes of a contiguous array on the host as a flat uint8 array, which keeps the array alive."""
    return np.asarray(_Bytes(array)) if array.nbytes else np.empty(0, np.uint8)


class _Bytes:
    """The memory of an array, for numpy."""

    def __init__(self, array: Array):
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (int(array.nbytes),),
            "data": (library_of(array).address(array), False),
        }


def _copy_all(queue: SimpleQueue[Transfer | None]) -> None:
    """Function of the thread that copies. It refers to nothing else, so the store can be garbage-collected."""
    transfer: Transfer | None = None
    while True:
        transfer = None  # the array may be freed while the thread waits
        transfer = queue.get()
        if transfer is None:
            return
        transfer.run()
