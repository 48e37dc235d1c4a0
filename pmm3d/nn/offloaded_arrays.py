"""Offload of the arrays that are saved for the backward pass."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

from ..arrays import Array, NumpyLibrary, library_of
from ..comm import Grid, call
from ..errors import Pmm3dError
from .store import Place, Store
from .tape import PLAIN, Tape

LEAST = 2**20
"""Default of the smallest number of bytes of an array that is put."""
LEAVING = 2
"""Default of the number of arrays that are put and still in memory."""


class Offload:
    """Offload of the saved arrays of a grid's networks, returned by `nn.offload`.

    Attributes
    ----------
    store : Store
        The store.
    ahead : int or None
        Bytes of arrays that are got before their operations need them. None: those of the next `leaving` arrays.
    """

    replays = True

    def __init__(self, tape: Tape, store: Store, least: int, leaving: int, ahead: int | None):
        self.store, self.least, self.leaving, self.ahead = store, least, leaving, ahead
        self._tape, self._engine, self._workspace = tape, store.grid.engine, store.grid.workspace
        self._stored, self._leaving = WeakValueDictionary[int, Stored](), deque[ref[Stored]]()
        self._numbers = count()

    @property
    def facts(self) -> tuple[int | None, ...]:
        """Numbers on which a recorded step depends."""
        return self.least, self.leaving, self.ahead

    def __call__(self, name: str, array: Array) -> Any:
        """Function `Tape.pack`: put an array, or return it if it stays in memory."""
        library = library_of(array)
        self.store._check_arrays(library)
        if array.nbytes < self.least or self._tape.phase == "recompute" or not library.is_contiguous(array):
            return array
        place = self.store._place(int(array.nbytes))
        if place is None:
            if self._engine.recorder is not None:
                self._engine.recorder.refuse("the store is full")
            return array
        stored = Stored(self, place, array, library, next(self._numbers))
        self._stored[stored.number] = stored
        call(self._engine, place.begin_put, array, writes=[])
        self._leaving.append(ref(stored))
        while len(self._leaving) > self.leaving:
            if (oldest := self._leaving.popleft()()) is not None:
                oldest.release()
        return stored

    def unpack(self, packed: Any) -> Any:
        """Function `Tape.unpack`: begin to get an array, and those that were put before it."""
        if not isinstance(packed, Stored):
            return packed
        packed.begin_get()
        stored = [each for each in self._stored.values() if each.number < packed.number and each.original is None]
        stored.reverse()
        room = sum(each.nbytes for each in stored[: self.leaving]) if self.ahead is None else self.ahead
        for each in stored:
            room -= each.nbytes
            if room < 0:
                break
            each.begin_get()
        return Got(packed)


class Stored:
    """A saved array in a store: the object that `Tape.pack` returns.

    nbytes     its bytes
    number     of the array, in the order of puts
    original   the array until it is released, or None
    """

    __slots__ = ("__weakref__", "_coming", "_dtype", "_got", "_library", "_offload", "_place", "_shape", "nbytes",
                 "number", "original")  # fmt: skip

    def __init__(self, offload: Offload, place: Place, array: Array, library: NumpyLibrary, number: int):
        self._offload, self._place, self.original, self.number = offload, place, array, number
        self._library, self._shape, self._dtype = library, tuple(array.shape), library.dtype(array)
        self.nbytes = int(array.nbytes)
        self._coming: Array | None = None
        self._got: ref[Any] | None = None

    def release(self) -> None:
        """Wait for the end of the put, and release the memory. An array that is not in the store stays in memory."""
        original, self.original = self.original, None
        if original is not None:
            call(self._offload._engine, self._place.end_put, original, writes=[])

    def begin_get(self) -> None:
        """Begin to get the array, unless it is in memory or under way."""
        if self._coming is None and self.original is None and (self._got is None or self._got() is None):
            array = self._offload._workspace.array(self._shape, self._dtype, self._library)
            call(self._offload._engine, self._place.begin_get, array, writes=[array])
            self._coming = array

    def get(self) -> Array:
        """The array. Waits for the end of the copy."""
        if self.original is not None:  # the put still reads it
            array = self.original
            self.release()
        elif self._coming is not None:
            array, self._coming = self._coming, None
            call(self._offload._engine, self._place.end_get, array, updates=[array])
            store = self._offload.store
            if store._problem is not None and store not in store.grid.attached[Store]:
                raise Pmm3dError(store._problem.text)  # offload ended after the last step: no step raises it
        else:
            array = None if self._got is None else self._got()
            if array is None:
                self.begin_get()
                return self.get()
        self._got = ref(array)
        return array


class Got:
    """An array of a store, on the way to the rule that needs it."""

    __slots__ = ("_array", "_stored")

    def __init__(self, stored: Stored):
        self._stored = stored
        self._array = None if stored._got is None else stored._got()  # keep it for this rule

    def wait(self) -> Array:
        return self._stored.get() if self._array is None else self._array


def offload(
    grid: Grid, store: Store | None, *, least: int = LEAST, leaving: int = LEAVING, ahead: int | None = None
) -> Offload | None:
    """Move the arrays that operations save for the backward pass to a store, from now on.

    Parameters
    ----------
    grid : Grid
        The grid of the network; `pipeline.grid` for a `Pipeline`.
    store : Store or None
        The store. None: saved arrays stay in memory.
    least : int
        Bytes of the smallest array that is put. Default: 1 MiB.
    leaving : int
        Number of arrays that are put and still in memory. The last ones of a forward pass are not read back. Default:
        2.
    ahead : int or None
        Bytes of the arrays that are got before they are needed, besides those of the next operation. Default: those of
        the next `leaving` arrays.

    Returns
    -------
    Offload or None
        The setting, with `ahead`.

    Raises
    ------
    Pmm3dError
        For numbers out of range, for a store of another grid, and in a context that sets `Tape.pack`.

    Notes
    -----
    Arrays are put when they are saved. Memory is released at fixed points of the step: when `leaving` more arrays were
    put. So the peak of memory is the same in each step, and a dry run predicts it. Each array is written once (with
    `keep_as` twice, if only a later one of its names has a codec), and read once for each group of operations that use
    it at the same time; bits do not change. Steps are recorded as without offload: puts and gets are instructions.

    Smaller arrays, arrays with gaps, and arrays in a part that is recomputed stay in memory. Parameters are not put.
    Memory of an array is not released while your program refers to the array, such as a batch.

    Source: vDNN (Rhu et al. 2016); ZeRO-Infinity (Rajbhandari et al. 2021).

    Examples
    --------
    >>> import tempfile
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with tempfile.TemporaryDirectory() as folder, Grid(shape="ddp") as grid:
    ...     store = nn.Store(grid, folder)
    ...     nn.offload(grid, store, least=4096, leaving=0, ahead=0) is None
    ...     net = nn.MLP(grid, [64, 64, 64, 64], dtype="float32", seed=0)
    ...     x = DistMatrix.random(grid, (64 * grid.size, 64), dtype="float32")
    ...     nn.mse(net(x), x).backward()
    ...     store.written == store.read > 0
    False
    True
    """
    tape = Tape.of(grid)
    if not isinstance(tape.pack, Offload) and tape.pack is not PLAIN["pack"]:
        raise Pmm3dError("offload: Tape.pack is a function of your own. Leave its context before offload is set")
    if store is None:
        vars(tape).update(PLAIN)
        return None
    if store.grid is not grid:
        raise Pmm3dError("offload: the store is on another Grid: make Store(grid, folder) on the grid of the network")
    if least < 1 or leaving < 0 or (ahead is not None and ahead < 0):
        raise Pmm3dError(f"offload: least is at least 1, leaving and ahead at least 0; got {least}, {leaving}, {ahead}")
    made = Offload(tape, store, least, leaving, ahead)
    tape.pack, tape.unpack, tape.facts = made, made.unpack, made.facts
    if store not in (stores := grid.attached.setdefault(Store, [])):
        stores.append(store)
    return made
