"""States of optimizers in 8 or 16 bits. An update reads rows of them as float32, and stores the rows again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np

from ..arrays import Array, parallel_rows, random
from ..comm import Grid
from ..errors import DTypeError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .compute import array_namespace
from .optimizer_state import Part, note_memory
from .parameter import Parameter
from .seeds import Seeds, derived

LEAST = 4096
"""A matrix with fewer elements, on all ranks together, keeps states of float32."""
BLOCK = 256
"""Columns of a block, which has a scale of its own."""
SIGNED, UNSIGNED = 127, 255
"""Largest codes of a block with negative numbers, and of a block without them."""
SMALLEST = 2.0**-94
"""Smallest scale. Decoded numbers are then at least 2^-126, so float32 keeps all of their digits."""
QUIET = 0x7FC0
"""A NaN of bfloat16."""
CODING = 64
"""Bytes of memory whose pass takes about as long as the coding of an element of a state: benchmarks/states.py."""


class LowState(ABC):
    """This rank's part of a state array. Several threads may read and store different rows at once.

    number   of the state among the states of the parameter
    coded    element type of the codes
    shape    rows and columns of the part;   nbytes: of the memory that it takes now
    """

    coded = "uint8"
    scales: Array = None
    _values: Array = None

    def __init__(self, part: Part, number: int):
        parameter, self._grid = part.parameter, part.parameter.grid
        self.library, self.number, self.shape, self._slice = part.library, number, part.shape, part.slice_size
        self._box = part.layout.box(parameter.shape, self._grid.shape, self._grid.coords)
        self._columns, self._name = parameter.shape[1], parameter.name
        self.codes = self._zeros(self.shape, self.coded)

    def _zeros(self, shape: tuple[int, int], dtype: str) -> Array:
        made = self.library.empty(shape, dtype)
        made[...] = 0
        return made

    @property
    def nbytes(self) -> int:
        return sum(int(each.nbytes) for each in (self.codes, self.scales, self._values) if each is not None)

    def read(self, rows: slice) -> Array:
        """Rows as a new array of float32. If the state is open, as a view."""
        if self._values is not None:
            return self._values[rows]
        made = self.library.empty((rows.stop - rows.start, self.shape[1]), "float32")
        if self.library.has_data:
            self._read(rows, made)
        return made

    def opened(self) -> Array:
        """All elements as an array of float32. Writes to it count until `close`."""
        if self._values is None:
            with self._grid.ledger.holding("state"):
                made = self.library.empty(self.shape, "float32")
            self._by_rows(lambda rows: self._read(rows, made[rows]))
            self._values = made
            note_memory(self._grid)
        return self._values

    def close(self) -> None:
        """Store the array of `opened`, and drop it. Without writes, the values are the same as before."""
        values, self._values = self._values, None
        if values is not None:
            stored = self.library.as_input(values)
            self._by_rows(lambda rows: self.store(rows, stored[rows], self.words(rows, 0)))
            note_memory(self._grid)

    def _by_rows(self, work: Callable[[slice], None]) -> None:
        if self._box.size and self.library.has_data:
            parallel_rows(self.library, work, self.shape, self._slice)

    def words(self, rows: slice, step: int) -> Array:
        """Return random bits to round rows of this state, and of states with the same number // 4, or None."""
        return None

    @abstractmethod
    def _read(self, rows: slice, out: Array) -> None:
        """Decode rows."""

    @abstractmethod
    def store(self, rows: slice, values: Array, words: Array) -> None:
        """Replace rows. values: contiguous; words: from `words`."""


class BlockState(LowState):
    """A state in 8 bits: a code for each element, and a scale of float32 for each block of 256 columns of a row.

    A block consists of the columns from a multiple of 256 of the whole matrix on. The blocks at the edges of a part
    may be smaller. With s the largest magnitude of a block, a code c stands for s (c / 127)^4 with the sign of c. In a
    block without negative numbers it stands for s (c / 255)^4; its scale is stored as -s. Numbers other than 0 have
    other codes than 0, so a mean square does not become 0 before its gradients do. Encoding a decoded block changes
    nothing. A block with a number that is not finite becomes NaN.
    """

    def __init__(self, part: Part, number: int):
        super().__init__(part, number)
        c0, c1, cols = self._box.c0, self._box.c1, self.shape[1]
        head = min(-c0 % BLOCK, cols)
        self._parts, last = list[tuple[slice, slice]](), 0
        for start, stop in pairwise(sorted({0, head, max(head, cols - c1 % BLOCK), cols})):
            first, last = last, last - (start - stop) // BLOCK
            self._parts.append((slice(start, stop), slice(first, last)))
        self.scales = self._zeros((self.shape[0], last), "float32")

    def _pieces(self, rows: slice, values: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Values, codes and scales of rows, as arrays of (rows, blocks, columns of a block)."""
        for cols, blocks in self._parts:
            form = rows.stop - rows.start, blocks.stop - blocks.start, -1
            yield values[:, cols].reshape(form), self.codes[rows, cols].reshape(form), self.scales[rows, blocks, None]

    def _codes_of(self, unsigned: Array) -> tuple[Array, Array]:
        """The code of 0 and the largest code above it, for blocks with or without negative numbers."""
        shift = self.library.astype(unsigned, "float32") * (UNSIGNED - SIGNED)
        return UNSIGNED - SIGNED - shift, shift + SIGNED

    def _read(self, rows: slice, out: Array) -> None:
        for root, codes, scales in self._pieces(rows, out):
            zero, most = self._codes_of(scales <= 0)
            root[...] = codes
            root -= zero
            root /= most
            size = self.library.xp.abs(root)
            root *= size
            size *= size
            root *= size
            root *= self.library.xp.abs(scales)

    def store(self, rows: slice, values: Array, words: Array) -> None:
        library, xp, largest_of = self.library, self.library.xp, array_namespace(values).max
        for block, codes, scales in self._pieces(rows, values):
            negative, root = (block < 0).view(xp.uint8), xp.abs(block)
            largest = largest_of(root, axis=-1, keepdims=True)
            unsigned = largest_of(negative, axis=-1, keepdims=True) == 0
            zero, most = self._codes_of(unsigned)
            with np.errstate(invalid="ignore"):  # infinite numbers, and casts of NaN
                largest = xp.clip(largest, SMALLEST, None)
                largest += largest - largest  # NaN, if it is infinite
                root /= largest
                xp.sqrt(root, out=root)
                xp.sqrt(root, out=root)
                root *= most
                root += 0.5
                code = library.astype(library.astype(root, "int32"), "uint8")  # torch is slow without int32
            xp.maximum(code, (block != 0).view(xp.uint8), out=code)
            minus = -negative  # 255 for a negative number, whose code is zero - code
            code ^= minus
            code -= minus
            code += library.astype(zero, "uint8")
            codes[...] = code
            scales[...] = xp.where(unsigned, -largest, largest)


class RoundedState(LowState):
    """A state in bfloat16. A number is rounded up or down at random, so that the mean of the rounded numbers is the
    number itself.

    The random bits depend on the seed of the grid, the name of the parameter, the number of the state, the step and the
    row and column in the whole matrix only, so they are the same on every grid. Numbers of bfloat16 do not change.
    """

    coded = "int16"

    def words(self, rows: slice, step: int) -> Array:
        (r0, _, c0, c1), library = self._box, self.library
        numbers = library.words(r0 + rows.start, r0 + rows.stop)
        seed = derived(Seeds.of(self._grid).seed, crc32(self._name.encode())) + self.number // 4
        return random.bits(random.indices(library, numbers, self._columns, c0, c1), seed, step)

    def _read(self, rows: slice, out: Array) -> None:
        bits = out.view(self.library.xp.int32)
        bits[...] = self.codes[rows]
        bits <<= 16

    def store(self, rows: slice, values: Array, words: Array) -> None:
        rounded = random.sixteen(self.library, words, self.number % 4)
        rounded += values.view(self.library.xp.int32)
        rounded >>= 16
        rounded[values != values] = QUIET
        self.codes[rows] = rounded


LOW_STATES: dict[str, type[LowState]] = {"int8": BlockState, "bfloat16": RoundedState}
"""Value of `states` of an optimizer -> form of its states."""


def check_states(name: str, states: str, elementwise: bool, parameters: Iterable[Parameter]) -> None:
    """Raise an error if the states of an optimizer of this name cannot have the form that `states` names."""
    if states not in ("", *LOW_STATES):
        known = " or ".join(f'"{each}"' for each in LOW_STATES)
        raise Pmm3dError(f'{name}: states is {known}, or "" for the type of the master weight; got {states!r}')
    if states and not elementwise:
        raise Pmm3dError(
            f"{name}: states = {states!r} is for optimizers that change each element by itself, such as AdamW, "
            f'Lion and SGD, and {name} reads whole rows or matrices: leave states out, or use shard_over_data="states"'
        )
    for each in parameters if states else ():
        if each.precision.master != "float32":
            raise DTypeError(
                f"{name}: states = {states!r} is for master weights of float32, and that of {each.name} is "
                f"{each.precision.master}: leave states out"
            )


def store(states: Sequence[LowState], rows: slice, values: Sequence[Array], step: int) -> None:
    """Store rows of the states of a parameter after its update in a step. values: flat arrays."""
    words = dict[int, Array]()  # a word has the bits of four states
    for state, each in zip(states, values):
        four = state.number // 4
        words[four] = words[four] if four in words else state.words(rows, step)
        state.store(rows, each.reshape(-1, state.shape[1]), words[four])


class StateMatrix(DistMatrix):
    """A state in 8 or 16 bits as a matrix of float32, for checkpoints.

    `local` is a copy of the whole shard, which the next step, or the next load, stores again. A checkpoint reads the
    shard without it, and fills one matrix at a time.
    """

    _state: LowState | None = None

    @classmethod
    def of(cls, grid: Grid, state: LowState, shape: tuple[int, int], layout: Layout) -> StateMatrix:
        made = cls(grid, state.codes, shape, layout)
        made._state, made.dtype = state, "float32"
        return made

    @property
    def _memory(self) -> Array:
        return self._own if self._state is None else self._state.opened()

    @_memory.setter
    def _memory(self, array: Array) -> None:
        if self._state is None:
            self._own = array
        else:
            self._state._values = array

    def _part(self, within: tuple[slice, slice]) -> Array:
        if self._state is None:
            return super()._part(within)
        return self._state.read(slice(*within[0].indices(self._state.shape[0])[:2]))[:, within[1]]

    @property
    def writable(self) -> bool:
        return self._state is not None or super().writable

    def _filled(self) -> None:
        if self._state is not None:
            self._state.close()
