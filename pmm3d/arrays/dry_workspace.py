"""The workspace of a dry run: hands out arrays without data, and counts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import prod

from ..layout import itemsize
from .dry import DryArray, DryLibrary
from .dry_run import DryRun, Held
from .numpy_library import Array, NumpyLibrary
from .workspace import Pool, Ticket, Workspace


class DryWorkspace(Workspace):
    """Arrays of `array` are "activations" of the run, those of `take`, `borrow` and `slab` its "workspace". Buffers are
    found, kept and dropped as with data, so that `allocated` is what the same calls allocate there. Arrays of a library
    with data are made and not counted."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def array(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        if not isinstance(library, DryLibrary):
            return library.empty(shape, dtype)
        counted = self.counted(shape, dtype, library)
        if not counted:
            return library.array(shape, dtype, self._run.hold(prod(shape) * itemsize(dtype), "activations"))
        ticket = self._buffer(counted, Pool(library.memory, True))
        loan = _Lent(self._run, counted, ticket, self._returned)
        return library.view(DryArray(ticket.flat.elements, "uint8", library, loan), shape, dtype)

    def take(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> tuple[Array, Ticket]:
        nbytes = prod(shape) * itemsize(dtype)
        if not isinstance(library, DryLibrary):
            flat = library.empty((nbytes,), "uint8")
            return library.view(flat, shape, dtype), Ticket(Pool(library, False), flat, [])
        ticket = self._buffer(nbytes, Pool(library.memory, False))
        held = self._run.hold(nbytes, "workspace")
        flat = DryArray(ticket.flat.elements, "uint8", library, held)
        return library.view(flat, shape, dtype), ticket._replace(flat=flat)

    def give(self, ticket: Ticket) -> None:
        if ticket.pool.memory.has_data:
            return
        if ticket.flat.held is not None:
            ticket.flat.held.end()
        super().give(ticket)

    def rehearse(self, sizes: Iterable[int], library: NumpyLibrary) -> None:
        """Counts as so much workspace at once."""
        sizes = list(sizes)
        super().rehearse(sizes, library)
        self._run.hold(sum(sizes), "workspace").end()

    def _fresh(self, nbytes: int, pool: Pool) -> Array:
        return pool.memory.temporary((nbytes,), "uint8")  # type: ignore[attr-defined]


class _Lent(Held):
    """Bytes of an array of `array`, whose buffer goes back when nobody refers to it any more."""

    __slots__ = ("_returned", "_ticket")

    def __init__(self, run: DryRun, nbytes: int, ticket: Ticket, returned: deque[tuple[Ticket, int]]) -> None:
        super().__init__(run, "activations", nbytes)
        self._ticket, self._returned = ticket, returned

    def __del__(self) -> None:
        self._returned.append((self._ticket, self._nbytes))
        self.end()
