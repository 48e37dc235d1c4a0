"""Offload of the states of an optimizer: they are in a store between steps, and in three buffers during a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple
from weakref import proxy

from ..arrays import Array, NumpyLibrary
from ..arrays.slots import Slot
from ..layout import aligned, itemsize
from ..product import DistMatrix
from .optimizer_state import Part, StateForm
from .parameter import Parameter
from .store import Place, Store

if TYPE_CHECKING:
    from .optimizer import Batch, Optimizer

PIECE_BYTES = 2**25
"""Bytes of the states that are updated at a time, if the optimizer updates each element by itself: 32 MiB."""
MASTER = "master weight"
"""Name of a master weight among the states."""
BUFFERS = 3
"""One that is filled, one that is updated, and one that is written back."""


class Piece(Part):
    """Consecutive elements of a part of a parameter, which are updated at a time.

    shared   the gradient of the whole part, once a piece needed it
    """

    def __init__(self, part: Part, chunk: slice, shared: list[Array]):
        vars(self).update(vars(part))
        self._whole, self._chunk, self._shared = part, chunk, shared
        self.size = chunk.stop - chunk.start
        self.work = part.work * self.size // max(1, part.size)

    def gradient(self, copied: bool = False) -> Array:
        if not self._shared:
            self._shared.append(self._whole.gradient())
        own = self._shared[0][self._chunk]
        return self.library.copy(own) if copied else own

    def stored(self) -> Array:
        return self._whole.stored()[self._chunk]

    def weight(self) -> Array:
        return self._whole.weight()[self._chunk] if self.staged is None else self.staged


class Move(NamedTuple):
    """A state array, or consecutive elements of it, in a place of the store.

    name       of the state;   shape, dtype   of the array in memory;   offset   in the buffer, in bytes
    """

    parameter: Parameter
    name: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    offset: int


class Unit(NamedTuple):
    """States that are in memory at the same time. nbytes: of their buffer."""

    parts: Batch
    moves: Sequence[Move]
    library: NumpyLibrary
    nbytes: int


Numbered = tuple[int, Unit]
"""A unit, and its number in a step, which determines its buffer."""


class OffloadedState(NamedTuple):
    """A state of a parameter in a store.

    shape, dtype   of this rank's part;   slot   of the store
    step           elements of a piece;   places   one for each piece, in the slot
    """

    shape: tuple[int, int]
    dtype: str
    slot: Slot
    step: int
    places: Sequence[Place]


class OffloadedStates:
    """The states of an optimizer in a store.

    buffers   library that allocates memory -> buffers of equal sizes for the states of units, at most `BUFFERS`
    """

    def __init__(self, optimizer: Optimizer, store: Store):
        self.store, self._optimizer = store, proxy(optimizer)
        self.buffers = dict[NumpyLibrary, list[Array]]()
        self._held = dict[Parameter, dict[str, OffloadedState]]()
        self._units = list[list[Unit]]()
        self._queue, self._coming, self._leaving = deque[Numbered](), deque[Numbered](), deque[Numbered]()
        self._now: Mapping[Parameter, dict[str, Array]] = {}

    def prepare(self, parts: Batch, viewed: bool = False) -> dict[Parameter, dict[str, Array]]:
        """Make places for the states of parts, and agree that the store has all its bytes. Collective. Return, if
        viewed, states over the memory of the store, for checkpoints."""
        views = dict[Parameter, dict[str, Array]]()
        for part, options in parts:
            try:
                forms = self._optimizer.state_forms(part.parameter, options)
                states = self._states(part, forms)
                if viewed:
                    views[part.parameter] = {name: self._view(part, states[name]) for name in forms}
            except OSError as error:
                self.store._note(f"no room for states: {error.strerror or error}; nothing is lost")
        self.store._agree()
        return views

    def arrays(self, part: Part, forms: Mapping[str, StateForm]) -> dict[str, Array]:
        """States of a part in an update, in memory."""
        now = self._now[part.parameter]
        return {name: now[name] for name in forms}

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin a step, and the first get. Raises the problems of the store on every rank. Collective."""
        self._finish()
        self.prepare([each for batch in batches for each in batch])
        self._units = [self._units_of(batch) for batch in batches]
        units = [unit for of_batch in self._units for unit in of_batch]
        for unit in units:
            self._allocate(unit.library.memory, max(each.nbytes for each in units), min(BUFFERS, len(units)))
        self._queue.extend(enumerate(units))
        self._get_next()

    def change(self, number: int, factor: float, keep_gradients: bool) -> None:
        """Update the parameters of a batch. Meanwhile the next states are got, and the last ones are put."""
        for _ in self._units[number]:
            unit = self._coming.popleft()
            moves = self._arrays_of(unit)
            for move, array in moves:
                move.place.end_get(array)
            while len(self._leaving) > BUFFERS - 2:
                self._end_put()
            self._get_next()
            self._now = {part.parameter: {} for part, _ in unit[1].parts}
            for move, array in moves:
                self._now[move.parameter][move.name] = array
            for part, _ in unit[1].parts:
                part.staged = self._now[part.parameter].get(MASTER)
                part.staged = None if part.staged is None else part.staged.reshape(-1)
            try:
                self._optimizer._change(unit[1].parts, factor, keep_gradients)
            finally:
                self._now = {}
                for part, _ in unit[1].parts:
                    part.staged = None
                for move, array in moves:
                    move.place.begin_put(array)
                self._leaving.append(unit)

    def end(self) -> None:
        """End a step. Raises the problems of the store on every rank. Collective."""
        self._finish()
        self.store._agree("weights were changed")

    def _finish(self) -> None:
        """Wait for all transfers."""
        self._queue.clear()
        while self._coming:
            for move, array in self._arrays_of(self._coming.popleft()):
                move.place.end_get(array)
        while self._leaving:
            self._end_put()

    def _get_next(self) -> None:
        if self._queue:
            self._coming.append(self._queue.popleft())
            for move, array in self._arrays_of(self._coming[-1]):
                move.place.begin_get(array)

    def _end_put(self) -> None:
        for move, array in self._arrays_of(self._leaving.popleft()):
            move.place.end_put(array)

    def _arrays_of(self, numbered: Numbered) -> list[tuple[Move, Array]]:
        """The moves of a unit, with their arrays in a buffer."""
        number, unit = numbered
        buffer = self.buffers[unit.library.memory][number % BUFFERS]
        return [(each, unit.library.view(buffer[each.offset :], each.shape, each.dtype)) for each in unit.moves]

    def _allocate(self, memory: NumpyLibrary, nbytes: int, number: int) -> None:
        held = self.buffers.get(memory, [])
        if len(held) < number or held[0].nbytes < nbytes:
            held.clear()  # free them first
            with self._optimizer.grid.ledger.holding("state"):
                self.buffers[memory] = [memory.empty((nbytes,), "uint8") for _ in range(number)]

    def _units_of(self, batch: Batch) -> list[Unit]:
        """Units of a batch: pieces of a part that is cut, and other parts together, up to `PIECE_BYTES`."""
        units, room = list[Unit](), 0
        for part, options in batch:
            states, shared = self._states(part, self._optimizer.state_forms(part.parameter, options)), list[Array]()
            step = min((each.step for each in states.values() if len(each.places) > 1), default=max(1, part.size))
            for number in range(max(1, -(-part.size // step))):
                chunk = slice(number * step, min((number + 1) * step, part.size))
                own = part if step >= part.size else Piece(part, chunk, shared)
                moves, offset = list[Move](), 0
                for name, each in states.items():
                    shape = each.shape if own is part else (own.size,)
                    moves.append(Move(part.parameter, name, each.places[number], shape, each.dtype, offset))
                    offset += aligned(prod(shape) * itemsize(each.dtype))
                if units and own is part and offset <= room:
                    parts, before, library, used = units.pop()
                    moves = [*before, *(move._replace(offset=used + move.offset) for move in moves)]
                    units.append(Unit([*parts, (part, options)], moves, library, used + offset))
                else:
                    units.append(Unit([(own, options)], moves, part.library, offset))
                room = PIECE_BYTES - units[-1].nbytes if own is part else 0
        return units

    def _states(self, part: Part, forms: Mapping[str, StateForm]) -> dict[str, OffloadedState]:
        """States of a part in the store. New ones are zero. Raises OSError if there is no room."""
        parameter, optimizer, held = part.parameter, self._optimizer, self._held.setdefault(part.parameter, {})
        self.store._check_arrays(part.library)
        moves_master = part.has_master and self.store._slots.on_host
        if moves_master:
            parameter._master_in(part.layout)  # make it, or note values that were written to the parameter
        names = [*forms, MASTER] if moves_master else [*forms]
        if not held.keys() >= {*names}:
            optimizer._check_forms(forms)
            shapes = part.forms_here(forms)
            if moves_master:
                shapes[MASTER] = part.shape, part.types.master
            cut = optimizer._updates_elements() and all(form[:2] == (None, None) for form in forms.values())
            elements = PIECE_BYTES // max(1, sum(itemsize(dtype) for _, dtype in shapes.values()))
            piece = max(1, min(part.slice_size, elements))
            step = max(1, elements // piece) * piece
            if held and cut:
                step = next(iter(held.values())).step
            for name, (shape, dtype) in shapes.items():
                if name not in held:
                    size, starts = prod(shape), range(0, part.size, step) if cut and part.size else (0,)
                    slot = self.store._slots.slot(size * itemsize(dtype))
                    places = [Place(self.store, slot, start * itemsize(dtype), 0) for start in starts]
                    state = OffloadedState(shape, dtype, slot, step if cut else size, places)
                    if name == MASTER:
                        self._move_master(part, state)
                    held[name] = state
            parameter.has_state = True
        return {name: held[name] for name in names}

    def _move_master(self, part: Part, state: OffloadedState) -> None:
        """Move a master weight to the store. It is then an array over the memory of the store."""
        parameter, view = part.parameter, self._view(part, state)
        assert parameter.master is not None
        view[...] = parameter.master.local
        parameter.master = DistMatrix(parameter.grid, view, parameter.shape, part.layout)
        parameter.master_is_stored = True

    def _view(self, part: Part, state: OffloadedState) -> Array:
        """Array over the memory of a state in the store."""
        self._finish()
        array = self.store._slots.view(state.slot, state.shape, state.dtype, part.library)
        flat = array.reshape(-1)
        for number, place in enumerate(state.places):
            if place.kept is not None:
                start = number * state.step
                value = place.kept if isinstance(place.kept, int) else place.kept.reshape(-1)
                flat[start : start + state.step] = value
                place.kept = None
        return array
