"""Work arrays that are used again and again."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import prod

from .arrays import itemsize


class Workspace:
    """Work arrays that are used again and again: first touch of fresh memory costs more than the copy into it.

    A returned buffer serves the next request of about its size, so a steady state allocates nothing.

    allocated   bytes held, in use or not
    """

    def __init__(self):
        self._free: dict = {}
        self._lock = threading.Lock()
        self.allocated = 0

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

    def clear(self) -> None:
        """Forget the buffers that are not in use."""
        with self._lock:
            for free in self._free.values():
                self.allocated -= sum(flat.shape[0] for flat in free)
                free.clear()
