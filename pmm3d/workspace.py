"""Work arrays that are used again and again."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from math import prod

import numpy as np

from .arrays import NumpyLibrary, itemsize

SMALL_BYTES = 2**12


class Workspace:
    """Work arrays that are used again and again: first touch of fresh memory costs more than the copy into it.

    A returned buffer serves the next request of about its size, so a steady state allocates nothing.

    allocated   bytes held, in use or not
    lent        bytes of the arrays of `array` that are in use now;   most_lent: the most there were at once
    """

    def __init__(self):
        self._free: dict = {}
        self._lock = threading.Lock()
        self._back: deque = deque()
        self._resting: dict = {}
        self._rehearsed: set = set()
        self.allocated = self.lent = self.most_lent = 0

    def array(self, shape, dtype: str, library):
        """An array with arbitrary contents whose memory comes back by itself once nobody refers to it any more.

        Device memory comes from the library's own pool. Rounded up to eighths of a power of two, so that arrays of
        about one size serve each other.
        """
        size = self.size_of(shape, dtype, library)
        if size == 0:
            return library.empty(shape, dtype)
        with self._lock:
            self._take_back()
            resting = self._resting.setdefault(size, [])
            flat = resting.pop() if resting else None
            self.lent += size
            self.most_lent = max(self.most_lent, self.lent)
        if flat is None:
            flat = NumpyLibrary().empty((size,), "uint8")
            self.allocated += size
        return library.over(np.asarray(_Loan(flat, self._back)), shape, dtype)

    def size_of(self, shape, dtype: str, library) -> int:
        """Bytes that `array` counts for such an array; 0 for small ones and device memory, which others keep."""
        nbytes = prod(shape) * itemsize(dtype)
        return _rounded(nbytes) if nbytes >= SMALL_BYTES and library.on_host else 0

    def in_use(self) -> int:
        """Bytes of the arrays of `array` that somebody refers to."""
        with self._lock:
            self._take_back()
        return self.lent

    def _take_back(self) -> None:
        """What has come back since: by a queue, since memory may come back in any thread and at any moment."""
        while self._back:
            flat = self._back.popleft()
            self.lent -= flat.shape[0]
            self._resting[flat.shape[0]].append(flat)

    def take(self, shape, dtype: str, library):
        """(array, ticket): an array with arbitrary contents, and what `give` wants back."""
        nbytes = prod(shape) * itemsize(dtype)
        with self._lock:
            flat = self._reuse(nbytes, self._free.setdefault(library, []))
        if flat is None:
            flat = library.empty((nbytes,), "uint8")
            self.allocated += nbytes
        return library.view(flat, shape, dtype), (library, flat)

    def _reuse(self, nbytes: int, free: list):
        """The smallest free buffer that fits and is not far too large. If there is none, the largest of the smaller
        ones is dropped: a larger one takes its place."""
        sizes = [flat.shape[0] for flat in free]
        fitting = [size for size in sizes if nbytes <= size <= max(4 * nbytes, 2**20)]
        if fitting:
            return free.pop(sizes.index(min(fitting)))
        smaller = [size for size in sizes if size < nbytes]
        if smaller:
            self.allocated -= free.pop(sizes.index(max(smaller))).shape[0]
        return None

    def give(self, ticket) -> None:
        library, flat = ticket
        with self._lock:
            self._free[library].append(flat)

    @contextmanager
    def borrow(self, shape, dtype: str, library):
        """As a context: the array, given back at its end."""
        array, ticket = self.take(shape, dtype, library)
        try:
            yield array
        finally:
            self.give(ticket)

    def rehearse(self, sizes, library) -> None:
        """Take work arrays of these sizes (bytes) at once and give them back, if they were not rehearsed before: from
        then on it does not depend on the speed of messages whether memory must be found."""
        sizes = tuple(sorted(sizes, reverse=True))
        if sizes not in self._rehearsed:
            self._rehearsed.add(sizes)
            for ticket in [self.take((size,), "uint8", library)[1] for size in sizes]:
                self.give(ticket)

    def clear(self) -> None:
        """Forget the buffers that are not in use."""
        with self._lock:
            self._take_back()
            for free in (*self._free.values(), *self._resting.values()):
                self.allocated -= sum(flat.shape[0] for flat in free)
                free.clear()


class _Loan:
    """Memory that goes home when the last array over it is gone."""

    __slots__ = ("__array_interface__", "_flat", "_home")

    def __init__(self, flat, home: deque):
        self._flat, self._home = flat, home
        self.__array_interface__ = flat.__array_interface__

    def __del__(self):
        self._home.append(self._flat)


def _rounded(nbytes: int) -> int:
    step = max(1, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
