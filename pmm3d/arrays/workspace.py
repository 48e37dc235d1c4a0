"""Reusable work arrays, because the first touch of fresh memory takes longer than the copy into it."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import finalize

import numpy as np

from ..layout import itemsize
from ..layout.dtypes import CACHE_LINE
from .numpy_library import Array, NumpyLibrary, numpy_type

Lent = TypeVar("Lent")
SMALL_BYTES = 2**12
"""`array` allocates smaller arrays directly and does not count them: the pool would take as long."""
WASTED_BYTES = 2**16
"""A buffer of up to this size serves any request that fits; a larger one serves requests of at least half its size."""


class Pool:
    """Buffers that can serve the same requests.

    memory   the library that allocates the buffers
    lends    whether the buffers are for `array`. Work arrays have a pool of their own, because their number in flight
             depends on the network. With a shared pool, `Workspace.allocated` would depend on the network too
    free     (bytes, a unique number, buffer) of each free buffer, in order
    sizes    bytes of each buffer, free or in use, in order
    """

    __slots__ = ("free", "lends", "memory", "sizes")

    def __init__(self, memory: NumpyLibrary, lends: bool = False):
        self.memory, self.lends = memory, lends
        self.free, self.sizes = list[tuple[int, int, Array]](), list[int]()

    def give(self, flat: Array) -> None:
        insort(self.free, (flat.shape[0], id(flat), flat))


class Ticket(NamedTuple):
    """A buffer in use, and its pool."""

    pool: Pool
    flat: Array


class Arena:
    """Buffers for the arrays of recorded steps (`Workspace.apart`), which are not freed while the arena is used: a step
    that is replayed writes to the same addresses. Steps that do not overlap in time share an arena. It is freed with
    the last of them.

    buffers   all buffers;   pools   as those of a Workspace;   taken   the list of `noting`, or None

        >>> work = Workspace()
        >>> arena = Arena(work)
        >>> with work.apart(arena):
        ...     array = work.array((1024, 1024), "float64", NumpyLibrary())
        >>> [each.nbytes for each in arena.buffers], work.allocated
        ([8388608], 8388608)
    """

    def __init__(self, workspace: Workspace) -> None:
        self.buffers, self.pools = list[Array](), dict[tuple[NumpyLibrary, bool], Pool]()
        self.taken: list[tuple[int, int]] | None = None
        finalize(self, _subtract, workspace, self.buffers).atexit = False

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """As a context: a list that gets (address, bytes) of the memory of each new array."""
        self.taken = taken = list[tuple[int, int]]()
        try:
            yield taken
        finally:
            self.taken = None


def _subtract(workspace: Workspace, buffers: list[Array]) -> None:
    workspace.allocated -= sum(each.nbytes for each in buffers)


class Workspace:
    """Pools of buffers; a steady state allocates nothing.

    A request takes the smallest free buffer that is large enough, unless it is far too large. If there is none, a
    buffer is allocated. If no buffer in use has a suitable size either, the largest smaller free buffer is freed first.

    Attributes
    ----------
    allocated
        Bytes of all buffers, in use or not.
    lent
        Bytes of the arrays of `array` that are alive.
    most_lent
        Largest value of `lent` so far.
    trace
        Object whose methods lent(address, bytes, whether of `array`) and returned(address, bytes of `array`) are called
        for each array, or None.

    Examples
    --------
    >>> work = Workspace()
    >>> with work.borrow((1024, 1024), "float64", NumpyLibrary()) as array:
    ...     array.shape, work.allocated
    ((1024, 1024), 8388608)
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[NumpyLibrary, bool], Pool] = {}
        self._lock = threading.Lock()
        self._returned: deque[tuple[Ticket, int]] = deque()
        self._rehearsed: set[tuple[NumpyLibrary, tuple[int, ...]]] = set()
        self._arena: Arena | None = None
        self.trace: Any = None
        self.allocated = self.lent = self.most_lent = 0

    def array(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        """Return an array with arbitrary contents. Its buffer is reused after the last reference to the array is gone.

        Device memory comes from the library's own pool, except in an arena.
        """
        nbytes = self.counted(shape, dtype, library)
        if nbytes == 0:
            return library.empty(shape, dtype)
        ticket = self._buffer(nbytes, library.memory, lends=True)
        return self._lend(ticket, Loan(ticket, nbytes, self._returned), shape, dtype, library)

    def counted(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> int:
        """Return the bytes that `array` counts for such an array; 0 for small arrays, and for device memory that is not
        in an arena."""
        nbytes = prod(shape) * itemsize(dtype)
        return nbytes if nbytes >= SMALL_BYTES and (library.on_host or self._arena is not None) else 0

    def in_use(self) -> int:
        """Return the bytes of the arrays of `array` that are alive."""
        with self._lock:
            self._collect()
        return self.lent

    def take(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> tuple[Array, Ticket]:
        """Return an array with arbitrary contents, and its ticket for `give`."""
        ticket = self._buffer(prod(shape) * itemsize(dtype), library.memory)
        return library.view(ticket.flat, shape, dtype), ticket

    def give(self, ticket: Ticket) -> None:
        with self._lock:
            if self.trace is not None:
                self.trace.returned(ticket.pool.memory.address(ticket.flat), 0)
            ticket.pool.give(ticket.flat)

    def borrow(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Borrowed[Array]:
        """As a context: an array, whose buffer is released at the end."""
        array, ticket = self.take(shape, dtype, library)
        return Borrowed(self, ticket, array)

    def slab(self, nbytes: int, library: NumpyLibrary) -> Borrowed[Slab]:
        """As a context: memory for the work arrays of one call."""
        flat, ticket = self.take((nbytes,), "uint8", library)
        return Borrowed(self, ticket, Slab(flat, library))

    def rehearse(self, sizes: Iterable[int], library: NumpyLibrary) -> None:
        """Allocate buffers for simultaneous work arrays of these sizes, in bytes. Then `allocated` does not depend on
        the speed of messages. Each new buffer replaces a smaller one that is free. A repeated call with the same sizes
        does nothing."""
        memory, wanted, taken = library.memory, tuple(sorted(sizes, reverse=True)), list[Ticket]()
        if (memory, wanted) in self._rehearsed:
            return
        try:
            for size in wanted:
                taken.append(self._buffer(size, memory, replaces=True))
        finally:
            for ticket in taken:
                self.give(ticket)
        self._rehearsed.add((memory, wanted))

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._collect()
            self._rehearsed.clear()
            for pool in self._pools.values():
                while pool.free:
                    self._drop(pool, -1)

    @contextmanager
    def apart(self, arena: Arena) -> Iterator[None]:
        """As a context: `array` uses the buffers of an arena, which grows if necessary."""
        pools, own = self._pools, arena.pools
        self._pools = {**{key: pool for key, pool in pools.items() if not key[1]}, **own}
        self._arena = arena
        try:
            yield
        finally:
            self._arena = None
            made, self._pools = self._pools, {key: pool for key, pool in pools.items() if key[1]}
            for key, pool in made.items():
                (own if key[1] else self._pools)[key] = pool

    def _buffer(self, nbytes: int, memory: NumpyLibrary, lends: bool = False, replaces: bool = False) -> Ticket:
        with self._lock:
            if self._returned:
                self._collect()
            if (pool := self._pools.get((memory, lends))) is None:
                pool = self._pools[memory, lends] = Pool(memory, lends)
            free, sizes, most = pool.free, pool.sizes, max(2 * nbytes, WASTED_BYTES)
            index = bisect_left(free, (nbytes,))
            if index < len(free) and free[index][0] <= most:
                flat = free.pop(index)[2]
            else:
                place = bisect_left(sizes, nbytes)
                arena = self._arena if lends else None
                if index and arena is None and (replaces or place == len(sizes) or sizes[place] > most):
                    self._drop(pool, index - 1)
                flat = self._fresh(nbytes, memory)
                if arena is not None:
                    arena.buffers.append(flat)
                insort(sizes, nbytes)
                self.allocated += nbytes
            if lends:
                if self._arena is not None and self._arena.taken is not None:
                    self._arena.taken.append((memory.address(flat), nbytes))
                self.lent += nbytes
                self.most_lent = max(self.most_lent, self.lent)
            if self.trace is not None:
                self.trace.lent(memory.address(flat), nbytes, lends)
        return Ticket(pool, flat)

    def _drop(self, pool: Pool, index: int) -> None:
        size = pool.free.pop(index)[0]
        self.allocated -= size
        pool.sizes.remove(size)

    def _fresh(self, nbytes: int, memory: NumpyLibrary) -> Array:
        return memory.empty((nbytes,), "uint8")

    def _lend(self, ticket: Ticket, loan: Loan, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        """Return an array over the buffer. The array keeps the loan alive."""
        if not ticket.pool.memory.on_host:
            interface = {"data": (library.address(ticket.flat), False), "shape": (loan.nbytes,), "typestr": "|u1"}
            loan.__cuda_array_interface__ = {**interface, "version": 3}
            return library.view(library.over_device(loan), shape, dtype)
        loan.__array_interface__ = {
            "data": ticket.flat.__array_interface__["data"],
            "shape": shape,
            "version": 3,
            "typestr": numpy_type(dtype).str,
        }
        return library.over_numpy(np.asarray(loan), dtype)

    def _collect(self) -> None:
        """Move the buffers of deleted arrays to their pools. A queue holds them, because any thread may delete
        arrays."""
        while self._returned:
            ticket, nbytes = self._returned.popleft()
            self.lent -= nbytes
            if self.trace is not None:
                self.trace.returned(ticket.pool.memory.address(ticket.flat), nbytes)
            ticket.pool.give(ticket.flat)


class Loan:
    """Token that returns a buffer to its workspace when the last reference to the token is gone."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "_returned", "_ticket", "nbytes")
    __array_interface__: dict[str, Any]
    __cuda_array_interface__: dict[str, Any]

    def __init__(self, ticket: Ticket, nbytes: int, returned: deque[tuple[Ticket, int]]) -> None:
        self._ticket, self.nbytes, self._returned = ticket, nbytes, returned

    def __del__(self) -> None:
        self._returned.append((self._ticket, self.nbytes))


class Borrowed(Generic[Lent]):
    """As a context: `lent`, an array or a Slab, whose buffer is released at the end. A class is faster than a
    generator: a step uses dozens.

        >>> borrowed = Workspace().slab(64, NumpyLibrary())
        >>> with borrowed as slab:
        ...     slab is borrowed.lent, slab.left
        (True, 64)
    """

    __slots__ = ("_ticket", "_workspace", "lent")

    def __init__(self, workspace: Workspace, ticket: Ticket, lent: Lent):
        self._workspace, self._ticket, self.lent = workspace, ticket, lent

    def __enter__(self) -> Lent:
        return self.lent

    def __exit__(self, *_: object) -> None:
        self._workspace.give(self._ticket)


class Slab:
    """The work memory of one call. Arrays are allocated in it one after the other, each on a cache line. Its size is
    the planned number of bytes: the sum of `layout.aligned` over the arrays.

        >>> with Workspace().slab(128, NumpyLibrary()) as slab:
        ...     slab.array((2, 3), "float64").shape, slab.array((4,), "float32").shape
        ((2, 3), (4,))
    """

    def __init__(self, flat: Array, library: NumpyLibrary):
        self._flat, self._library, self._used = flat, library, 0

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the next array, with arbitrary contents."""
        return self._library.view(self._next(prod(shape) * itemsize(dtype)), shape, dtype)

    def slab(self, nbytes: int) -> Slab:
        """Return a slab of the next bytes."""
        return Slab(self._next(nbytes), self._library)

    @property
    def left(self) -> int:
        """Number of remaining bytes."""
        return int(self._flat.shape[0]) - self._used

    def rest(self) -> Slab:
        """Return a slab of all remaining bytes."""
        return self.slab(self.left)

    def again(self) -> Slab:
        """Return a slab of the same memory, from its start."""
        return Slab(self._flat, self._library)

    @contextmanager
    def borrow(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Iterator[Array]:
        """As a context: the next array. At the end, its memory is free for the next array."""
        before = self._used
        try:
            yield library.view(self._next(prod(shape) * itemsize(dtype)), shape, dtype)
        finally:
            self._used = before

    def _next(self, nbytes: int) -> Array:
        start = self._used
        self._used = start - -nbytes // CACHE_LINE * CACHE_LINE  # as `aligned`, without a call for each array
        if start + nbytes > self._flat.shape[0]:
            raise MemoryError(f"a call takes more work memory than the {self._flat.shape[0]:,} bytes planned for it")
        return self._flat[start : start + nbytes]
