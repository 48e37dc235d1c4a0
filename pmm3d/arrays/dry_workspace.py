"""The workspace of a dry run: hands out arrays without data, and counts them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ..layout import itemsize
from .dry import DryLibrary
from .dry_run import DryRun
from .numpy_library import Array, NumpyLibrary
from .workspace import Pool, Ticket, Workspace


class DryWorkspace(Workspace):
    """Arrays of `array` are "activations" of the run, those of `take`, `borrow` and `slab` its "workspace". Arrays of a
    library with data are made and not counted."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def array(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> Array:
        made = self._made(shape, dtype, library, "activations")
        self.lent, self.most_lent = self.in_use(), self._run.most.get("activations", 0)
        return made

    def counted(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> int:
        return prod(shape) * itemsize(dtype)

    def in_use(self) -> int:
        return self._run.held.get("activations", 0)

    def take(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary) -> tuple[Array, Ticket]:
        flat = self._made((prod(shape) * itemsize(dtype),), "uint8", library, "workspace")
        self.allocated = self._run.most.get("workspace", 0)
        return library.view(flat, shape, dtype), Ticket(Pool(library, False), flat)

    def give(self, ticket: Ticket) -> None:
        if not ticket.pool.memory.has_data:
            ticket.flat.held.end()

    def rehearse(self, sizes: Iterable[int], library: NumpyLibrary) -> None:
        """Counts as so much workspace at once."""
        self._run.hold(sum(sizes), "workspace").end()

    def clear(self) -> None:
        """Nothing is kept that is not in use."""

    def _made(self, shape: tuple[int, ...], dtype: str, library: NumpyLibrary, kind: str) -> Array:
        if not isinstance(library, DryLibrary):
            return library.empty(shape, dtype)
        return library.array(shape, dtype, self._run.hold(prod(shape) * itemsize(dtype), kind))
