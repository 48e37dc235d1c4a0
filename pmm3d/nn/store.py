"""Stores for offload: memory of a rank apart from that of its arrays, shared by saved arrays and optimizer states."""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

from ..arrays import Array, NumpyLibrary, library_of
from ..arrays.slots import FileSlots, HostSlots, Slot, Slots, Transfer
from ..comm import Grid
from ..errors import Pmm3dError
from .optimizer_state import note_memory
from .tape import Tape

REMEDY = "Free space in the folder of the store, or name another one"
LOST = "arrays are lost, so go back to a checkpoint"


class Problem(NamedTuple):
    """A problem of a store. is_loss: whether arrays are lost."""

    text: str
    is_loss: bool


class Store:
    """Memory for offload: a file of each rank, or pinned memory of the host for arrays on a device. Collective.

    Parameters
    ----------
    grid : Grid
        The grid of the network; `pipeline.grid` for a `Pipeline`. Every stage makes a store. It closes when the grid
        closes, or when your program drops it.
    folder : path
        An existing folder on a fast disk of this node; ranks may name different folders. Default: memory of the host,
        which works for arrays on a device only.
    library : str, array library or None
        Without a folder: library of the arrays, such as "torch:cuda". Default: that of the grid.

    Attributes
    ----------
    grid : Grid
        The grid.
    folder : str
        The folder, or "".

    Raises
    ------
    Pmm3dError
        On every rank, if a rank cannot make a file in its folder.

    Notes
    -----
    The file has no name, so that it disappears with the process, also after an abort. Its space is reserved before an
    array is given up. A thread copies by pwrite and pread, through the page cache of the operating system.
    `memory["store"]` of the ledger is the capacity of all stores at the last step.

    An error of a copy does not end a rank alone. Arrays that cannot be put stay in memory. The next step of an
    optimizer raises the error on every rank, before it changes a weight. If arrays are lost, the gradients of all
    optimizers have failed: `zero_grad` discards them.

    Examples
    --------
    >>> import tempfile
    >>> from pmm3d import Grid, nn
    >>> with tempfile.TemporaryDirectory() as folder, Grid(shape="ddp") as grid:
    ...     store = nn.Store(grid, folder)
    ...     store.written, store.capacity
    (0, 0)
    """

    def __init__(self, grid: Grid, folder: str | os.PathLike[str] = "", library: str | NumpyLibrary | None = None):
        self.grid, self.folder = grid, os.fspath(folder)
        self._problem: Problem | None = None
        self._slots = Slots()
        try:
            with grid.parent.collective_call("Store", bool(self.folder), always=True):
                self._slots = self._opened(library)
        except BaseException:
            self._slots.close()  # on the ranks that have a file
            raise
        grid._at_close(finalize(self, self._slots.close))
        grid.attached.setdefault(Slots, WeakSet()).add(self)

    def _opened(self, library: str | NumpyLibrary | None) -> Slots:
        if self.grid.dry_run is not None:
            return Slots()
        if not self.folder:
            of_arrays = self.grid.library(library)
            if of_arrays.on_host:
                raise Pmm3dError(
                    f"Store: memory of the host is a store for arrays on a device, and {of_arrays.kind} arrays are on "
                    "the host: name a folder on a fast disk (memory.store)"
                )
            return HostSlots(of_arrays)
        try:
            return FileSlots(self.folder)
        except OSError as error:
            raise Pmm3dError(
                f"Store: cannot make a file in the folder {self.folder}: {error.strerror or error}. Make the folder on "
                "each node, or name another one"
            ) from None

    @property
    def written(self) -> int:
        """Bytes that this rank has put into the store so far; in a dry run, those that it would put."""
        return self._slots.written

    @property
    def read(self) -> int:
        """Bytes that this rank has got from the store so far; in a dry run, those that it would get."""
        return self._slots.read

    @property
    def capacity(self) -> int:
        """Bytes of this rank in the store, in use or not. A steady state does not increase them."""
        return self._slots.capacity

    def _check_arrays(self, library: NumpyLibrary) -> None:
        """Raise Pmm3dError for arrays that the store cannot hold. The error is the same on all ranks."""
        if library.has_data and library.on_host != self._slots.on_host:
            raise Pmm3dError(
                "Store: a file holds arrays of the host, and memory of the host those on a device; these are "
                f"{library.kind} arrays"
            )

    def _place(self, nbytes: int) -> Place | None:
        """A free place, or None if there is no room, which `_agree` reports."""
        try:
            return Place(self, self._slots.slot(nbytes))
        except OSError as error:
            self._note(f"no room for {nbytes:,} more bytes: {error.strerror or error}; nothing is lost")
            return None

    def _note(self, what: str, is_loss: bool = False) -> None:
        """Note a problem for `_agree`. is_loss: whether arrays are lost."""
        where = f"in {self.folder}" if self.folder else "of host memory"
        if self._problem is None or (is_loss and not self._problem.is_loss):
            text = f"the store {where} has failed: {what}{f'; {LOST}' * is_loss}. {REMEDY}"
            self._problem = Problem(text, is_loss)

    def _agree(self, what: str = "no weight was changed") -> None:
        """Raise the first problem on every rank, once. Collective over all stages. what: consequence for the step.

        After a loss, all gradients of the grid have failed, because lost arrays were zero in the backward pass.
        """
        self.grid.ledger.memory["store"] = sum(each.capacity for each in self.grid.attached[Slots])
        try:
            self._slots.check()
        except OSError as error:
            self._problem = None  # it is a consequence
            self._note(str(error.strerror), True)
        problem, self._problem = self._problem, None
        try:
            with self.grid.parent.collective_call("offload", what, always=True):
                if problem is not None:
                    raise Pmm3dError(f"{problem.text}. In this step {what}")
        except Pmm3dError:
            if self.grid.parent.comm.largest(problem is not None and problem.is_loss):
                for buffer in [
                    each.grad_buffer for of in self.grid.attached.get(note_memory, ()) for each in of._held()
                ]:
                    if buffer.layout is not None:
                        buffer.fail()
            raise


def agree_on_stores(grid: Grid, later: Store | None) -> None:
    """Raise the problems of stores of saved arrays on every rank. Collective if there are such stores, which are those
    in use now and when it was called before. later: a store whose problems are raised afterwards."""
    stores: list[Store] = grid.attached.get(Store, [])
    for store in stores:
        if store is not later:
            store._agree()
    stores[:] = [store for store in stores if store is getattr(Tape.of(grid).pack, "store", None)]


class Place:
    """A place in a store, and the transfer that is under way there.

    Its methods are instructions of recorded steps: with the arrays of a step, they move the same bytes in each replay.

    start   first byte in the slot
    kept    contents in memory: an array that could not be written, a number for all elements, or None
    """

    __slots__ = ("_transfer", "kept", "slot", "start", "store")

    def __init__(self, store: Store, slot: Slot, start: int = 0, kept: Any = None):
        self.store, self.slot, self.start, self.kept = store, slot, start, kept
        self._transfer: Transfer | None = None

    def begin_put(self, array: Array) -> None:
        """Begin to copy an array to the place."""
        self._priced(array)
        self.kept, self._transfer = None, self.store._slots.write(self.slot, array, self.start)

    def end_put(self, array: Array) -> None:
        """Wait for `begin_put`. After an error, keep a copy of the array."""
        if (error := self._wait()) is not None:
            self.kept = library_of(array).copy(array)
            self.store._note(f"{error}; the arrays are still in memory")

    def begin_get(self, array: Array) -> None:
        """Begin to fill an array from the place."""
        if self.kept is None:
            self._priced(array)
            self._transfer = self.store._slots.read_into(self.slot, array, self.start)

    def end_get(self, array: Array) -> None:
        """Wait for `begin_get`. After an error, the array is zero, and the step will fail."""
        error, value = self._wait(), self.kept
        if error is not None:
            self.store._note(str(error), True)
            value = 0
        if value is not None:
            array[...] = value

    def _priced(self, array: Array) -> None:
        with self.store.grid.ledger.passing("offload"):
            library_of(array).passed("offload", array)

    def _wait(self) -> Exception | None:
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return None
        if not transfer.done:
            with self.store.grid.engine.background():
                transfer.wait()
        return transfer.error
