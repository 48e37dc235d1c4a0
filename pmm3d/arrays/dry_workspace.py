"""The workspace of a dry run: hands out arrays without data, and counts them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ..layout import itemsize
from .dry import DryArray, DryLibrary
from .dry_run import DryRun
from .numpy_library import Array, NumpyLibrary
from .workspace import Loan, Pool, Ticket, Workspace


class DryWorkspace(Workspace):
    """A workspace without data. The run counts arrays of `array` as "activations", and those of `take`, `borrow` and
    `slab` as "workspace".

    Buffers are reused and dropped as with data, so the same calls give the same `allocated`. Arrays of a library with
    data are allocated, and not counted.
    """

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def array(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        if isinstance(library, DryLibrary):
            if self.counted(shape, dtype, library):
                return super().array(shape, dtype, library)
            return library.array(shape, dtype, self._run.hold(prod(shape) * itemsize(dtype), "activations"))
        return library.empty(shape, dtype)

    def take(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> tuple[Array, Ticket]:
        nbytes = prod(shape) * itemsize(dtype)
        if isinstance(library, DryLibrary):
            _, ticket = super().take(shape, dtype, library)
            ticket.flat.held = self._run.hold(nbytes, "workspace")
        else:
            ticket = Ticket(Pool(library), library.empty((nbytes,), "uint8"))
        return library.view(ticket.flat, shape, dtype), ticket

    def give(self, ticket: Ticket) -> None:
        if isinstance(ticket.flat, DryArray) and ticket.flat.held is not None:
            ticket.flat.held.end()
            ticket.flat.held = None
        super().give(ticket)

    def rehearse(self, sizes: Iterable[int], library: NumpyLibrary) -> None:
        sizes = list(sizes)
        super().rehearse(sizes, library)
        self._run.hold(sum(sizes), "workspace").end()

    def _fresh(self, nbytes: int, memory: NumpyLibrary) -> Array:
        return memory.temporary((nbytes,), "uint8")  # type: ignore[attr-defined]

    def _lend(self, ticket: Ticket, loan: Loan, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        held = loan, self._run.hold(loan.nbytes, "activations")
        return library.view(DryArray(ticket.flat.elements, "uint8", ticket.flat.library, held), shape, dtype)
