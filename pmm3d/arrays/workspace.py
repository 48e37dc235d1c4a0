"""Work arrays that are used again and again: first touch of fresh memory costs more than the copy into it."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..layout import aligned, itemsize
from .numpy_library import Array, NumpyLibrary

Lent = TypeVar("Lent")
SMALL_BYTES = 2**12
"""Below this `array` does not count: an allocation costs no more than the pool does."""


WASTED_BYTES = 2**16
"""A buffer serves requests of half its size, or of any if it is no larger: the rest of it lies idle meanwhile."""
Free = tuple[int, int, Array]
"""A buffer that is not in use, after its bytes, by which it is found, and a number, so that no arrays are compared."""


class Pool(NamedTuple):
    """What buffers may serve each other: those of one kind of memory, messages' apart from arrays that come back by
    themselves. How many of the former are under way depends on the speed of the network; if they took the latter's
    buffers, so would what must be allocated."""

    memory: NumpyLibrary
    returns_by_itself: bool


class Ticket(NamedTuple):
    """A buffer that was taken, and where it belongs: a pool, and the list of its free buffers."""

    pool: Pool
    flat: Array
    free: list[Free]


class Workspace:
    """Pools of buffers; a steady state allocates nothing.

    A request takes the smallest free buffer that holds it and is not far too large. If there is none, one is
    allocated. If there is none in use either, what is asked for has grown, and the new one takes the place of the
    largest of the smaller free ones, which is dropped: else those will be asked for again. Buffers come back by `give`,
    at the end of `borrow`, or, those of `array`, once nobody refers to them any more.

    allocated   bytes held, in use or not
    lent        bytes of the arrays of `array` that are in use now;   most_lent: the most there were at once

        >>> work = Workspace()
        >>> with work.borrow((1024, 1024), "float64", NumpyLibrary()) as array:
        ...     array.shape, work.allocated
        ((1024, 1024), 8388608)
    """

    def __init__(self) -> None:
        self._free: defaultdict[Pool, list[Free]] = defaultdict(list)
        self._sizes: defaultdict[Pool, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._returned: deque[tuple[Ticket, int]] = deque()
        self._rehearsed: set[tuple[NumpyLibrary, tuple[int, ...]]] = set()
        self.allocated = self.lent = self.most_lent = 0

    def array(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        """An array with arbitrary contents whose memory comes back by itself.

        Device memory comes from the library's own pool.
        """
        nbytes = self.counted(shape, dtype, library)
        if nbytes == 0:
            return library.empty(shape, dtype)
        ticket = self._buffer(nbytes, Pool(library.memory, True))
        return library.view(np.asarray(_Loan(ticket, nbytes, self._returned)), shape, dtype)

    def counted(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> int:
        """Bytes that `array` counts for such an array; 0 for small ones and device memory, which others keep."""
        nbytes = prod(shape) * itemsize(dtype)
        return nbytes if nbytes >= SMALL_BYTES and library.on_host else 0

    def in_use(self) -> int:
        """Bytes of the arrays of `array` that somebody refers to."""
        with self._lock:
            self._collect()
        return self.lent

    def take(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> tuple[Array, Ticket]:
        """An array with arbitrary contents, and what `give` wants back."""
        ticket = self._buffer(prod(shape) * itemsize(dtype), Pool(library.memory, False))
        return library.view(ticket.flat, shape, dtype), ticket

    def give(self, ticket: Ticket) -> None:
        with self._lock:
            insort(ticket.free, _entry(ticket.flat))

    def borrow(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Borrowed[Array]:
        """As a context: the array, given back at its end."""
        array, ticket = self.take(shape, dtype, library)
        return Borrowed(self, ticket, array)

    def slab(self, nbytes: int, library: NumpyLibrary) -> Borrowed[Slab]:
        """As a context: memory for the work arrays of one call."""
        flat, ticket = self.take((nbytes,), "uint8", library)
        return Borrowed(self, ticket, Slab(flat, library))

    def rehearse(self, sizes: Iterable[int], library: NumpyLibrary) -> None:
        """Take work arrays of these sizes (bytes) at once and give them back, if they were not rehearsed before: from
        then on it does not depend on the speed of messages whether memory must be found."""
        memory, wanted, taken = library.memory, tuple(sorted(sizes, reverse=True)), list[Ticket]()
        if (memory, wanted) in self._rehearsed:
            return
        try:
            for size in wanted:
                taken.append(self._buffer(size, Pool(memory, False)))
        finally:
            for ticket in taken:
                self.give(ticket)
        self._rehearsed.add((memory, wanted))

    def clear(self) -> None:
        """Forget the buffers that are not in use."""
        with self._lock:
            self._collect()
            for pool, free in self._free.items():
                for size, _, _ in free:
                    self._forget(pool, size)
                free.clear()

    def _buffer(self, nbytes: int, pool: Pool) -> Ticket:
        with self._lock:
            if self._returned:
                self._collect()
            free, sizes, most = self._free[pool], self._sizes[pool], max(2 * nbytes, WASTED_BYTES)
            index = bisect_left(free, (nbytes,))
            if index < len(free) and free[index][0] <= most:
                flat = free.pop(index)[2]
            else:
                place = bisect_left(sizes, nbytes)
                if index and (place == len(sizes) or sizes[place] > most):
                    self._forget(pool, free.pop(index - 1)[0])
                flat = self._fresh(nbytes, pool)
                insort(sizes, nbytes)
                self.allocated += nbytes
            if pool.returns_by_itself:
                self.lent += nbytes
                self.most_lent = max(self.most_lent, self.lent)
        return Ticket(pool, flat, free)

    def _forget(self, pool: Pool, size: int) -> None:
        """A buffer that is dropped."""
        self.allocated -= size
        self._sizes[pool].remove(size)

    def _fresh(self, nbytes: int, pool: Pool) -> Array:
        return pool.memory.empty((nbytes,), "uint8")

    def _collect(self) -> None:
        """Take in what has come back since: by a queue, since that happens in any thread and at any moment."""
        while self._returned:
            ticket, nbytes = self._returned.popleft()
            self.lent -= nbytes
            insort(ticket.free, _entry(ticket.flat))


class Borrowed(Generic[Lent]):
    """As a context: what lies in memory that was taken, which is given back at its end. A class, since there are dozens
    in a step."""

    __slots__ = ("_ticket", "_what", "_workspace")

    def __init__(self, workspace: Workspace, ticket: Ticket, what: Lent):
        self._workspace, self._ticket, self._what = workspace, ticket, what

    def __enter__(self) -> Lent:
        return self._what

    def __exit__(self, *_: object) -> None:
        self._workspace.give(self._ticket)


class Slab:
    """The work memory of one call, which is cut into arrays one after the other, each on a cache line. It has the bytes
    that were planned (`layout.aligned` of each array): more cannot be taken.

        >>> with Workspace().slab(128, NumpyLibrary()) as slab:
        ...     slab.array((2, 3), "float64").shape, slab.array((4,), "float32").shape
        ((2, 3), (4,))
    """

    def __init__(self, flat: Array, library: NumpyLibrary):
        self._flat, self._library, self._used = flat, library, 0

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """The next array, with arbitrary contents."""
        return self._library.view(self._next(prod(shape) * itemsize(dtype)), shape, dtype)

    def slab(self, nbytes: int) -> Slab:
        """The next piece, to be cut in turn."""
        return Slab(self._next(nbytes), self._library)

    def rest(self) -> Slab:
        """All that is left, to be cut in turn."""
        return self.slab(self._flat.shape[0] - self._used)

    def again(self) -> Slab:
        """The same memory, to be cut anew."""
        return Slab(self._flat, self._library)

    @contextmanager
    def borrow(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Iterator[Array]:
        """As a context: the next array, whose memory is the next one's again at its end."""
        before = self._used
        try:
            yield library.view(self._next(prod(shape) * itemsize(dtype)), shape, dtype)
        finally:
            self._used = before

    def _next(self, nbytes: int) -> Array:
        start, self._used = self._used, self._used + aligned(nbytes)
        if start + nbytes > self._flat.shape[0]:
            raise MemoryError(f"a call takes more work memory than the {self._flat.shape[0]:,} bytes planned for it")
        return self._flat[start : start + nbytes]


class _Loan:
    """Memory that is given back when the last array over it is gone."""

    __slots__ = ("__array_interface__", "_nbytes", "_returned", "_ticket")

    def __init__(self, ticket: Ticket, nbytes: int, returned: deque[tuple[Ticket, int]]) -> None:
        self._ticket, self._nbytes, self._returned = ticket, nbytes, returned
        self.__array_interface__: dict[str, Any] = ticket.flat.__array_interface__

    def __del__(self) -> None:
        self._returned.append((self._ticket, self._nbytes))


def _entry(flat: Array) -> Free:
    return flat.shape[0], id(flat), flat
