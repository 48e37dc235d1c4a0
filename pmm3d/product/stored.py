"""What a rank stores of a matrix: the shard, and where it belongs."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

from ..arrays import Array, NumpyLibrary, library_of
from ..comm import Compared, Grid
from ..errors import GridError, LayoutError
from ..layout import Box, Layout, Placement, RaggedRows

Stored = TypeVar("Stored", bound="StoredMatrix")
EVERYTHING = slice(None), slice(None)


class Window(NamedTuple):
    """Memory that the ranks of an axis on one node share: the shards of all its ranks one after the other, which is the
    block, C-contiguous. Those of other nodes are as the last product that read them brought them."""

    axis: str
    block: Array


class StoredMatrix:
    """A matrix of which each rank of a grid stores a shard.

    grid, layout, shape (rows, columns), dtype (a name such as "float32")
    memory    this rank's shard, an array of `library`; C-contiguous, or the transpose of a C-contiguous array where
              `order` is "F" (after .T). Where the matrix is `conjugated` (after .H), the conjugates of its elements
    base      the matrix of which this one is a view, whose memory it reads; the matrix itself if it is no view
    window    the memory in which the ranks of an axis see each other's shards, if `memory` lies in one
    fills     how often it was the `out` of a product or of `redistribute`, whose messages no array library counts
    """

    fills = 0
    window: Window | None = None
    _base: StoredMatrix | None = None

    def __init__(self, grid: Grid, memory: Array, shape: tuple[int, int], layout: Layout, order: str = "C",
                 conjugated: bool = False):
        self.grid, self._memory, self.layout, self.order, self.conjugated = grid, memory, layout, order, conjugated
        self.shape = shape[0] if isinstance(shape[0], RaggedRows) else int(shape[0]), int(shape[1])
        self.library = library_of(memory)
        grid.everyone.choose_transport(self.library)
        self.dtype = self.library.dtype(memory)

    @property
    def base(self) -> StoredMatrix:
        return self if self._base is None else self._base

    @property
    def memory(self) -> Array:
        base = self._base
        if base is None:
            return self._memory
        return base._memory if self.order == base.order else base._memory.T

    @property
    def local(self) -> Array:
        """This rank's shard: `memory`; of a conjugated view a new array at each access, to be read and not written."""
        return self.part(EVERYTHING) if self.conjugated else self.memory

    @local.setter
    def local(self, array: Array) -> None:
        if self.conjugated:
            raise LayoutError("the shard of a conjugated view (.H) is not written to; write to the matrix that it is "
                              "a view of, or to redistribute(layout), which is a copy")
        if self.window is not None and self.place_of(array) != self.place_of(self.memory):
            raise LayoutError("the shard of a matrix in shared memory stays where it is: write into it, "
                              "matrix.local[...] = array")
        library = library_of(array)
        if library != self.library or library.dtype(array) != self.dtype or array.shape != self.memory.shape:
            raise LayoutError(f"the new shard is {tuple(array.shape)} {library.dtype(array)} of {library.name}; this "
                              f"matrix needs {tuple(self.memory.shape)} {self.dtype} of {self.library.name}. Convert "
                              "it, or make a new matrix: DistMatrix.from_local")
        stored = flipped(array, self.order)
        if not library.is_contiguous(stored):
            stored = library.copy(stored)
        self.base._memory = flipped(stored, self.base.order)

    def place_of(self, array: Array) -> tuple[Any, ...]:
        """Where an array of this library lies in memory: address, shape, strides."""
        return self.library.address(array), tuple(array.shape), tuple(self.library.strides(array))

    def check_shard(self) -> None:
        """Raises LayoutError if torch replaced the storage of the shard (`.data`) by one of another shape or type."""
        memory, shape = self.memory, self.box.shape
        if tuple(memory.shape) != shape or self.library.dtype(memory) != self.dtype:
            raise LayoutError(f"the shard of {self} is now {tuple(memory.shape)} {self.library.dtype(memory)}; it must "
                              f"be {shape} {self.dtype}. A shard may be replaced by one of the same shape and type, or "
                              "make a new matrix: DistMatrix.from_local")

    def part(self, within: tuple[slice, slice]) -> Array:
        """A part of the shard, by its rows and columns there: of a conjugated view a copy, else a view."""
        part = self.memory[within]
        if not self.conjugated:
            return part
        return flipped(self.library.conjugate(flipped(part, self.order)), self.order)

    @property
    def writable(self) -> bool:
        """Whether what is written to `local` is in the matrix."""
        return not self.conjugated and self.library.writable(self.memory)

    @property
    def box(self) -> Box:
        """Which rows and columns of the matrix `local` holds."""
        return self.layout.box(self.shape, self.grid.shape, self.grid.coords)

    @property
    def T(self: Stored) -> Stored:
        """The transpose: a view, nothing moves."""
        return self._transposed(self.conjugated)

    @property
    def H(self: Stored) -> Stored:
        """The conjugate transpose: a view, nothing moves. Its elements are conjugated where they are read: by the BLAS
        in a product, on their way to a file, by each access to `local`, which then is an array of its own."""
        return self._transposed(self.conjugated != self.dtype.startswith("complex"))

    def _transposed(self: Stored, conjugated: bool) -> Stored:
        order = "F" if self.order == "C" else "C"
        transposed = type(self)(self.grid, self.memory.T, self.shape[::-1], self.layout.T, order, conjugated)
        transposed._base, transposed._memory, transposed.window = self.base, None, self.window
        return transposed

    @property
    def resolved(self: Stored) -> Stored:
        """This matrix; of a conjugated view a copy, which can be written to. Nothing moves."""
        return type(self)(self.grid, self.local, self.shape, self.layout, self.order) if self.conjugated else self

    def placement(self) -> Placement:
        """Who holds what. Raises LayoutError for partial sums, of which nobody has the elements."""
        return Placement(self.shape, self.layout.on(self.grid.shape), self.grid.shape, self.order)

    @property
    def stored(self) -> Array:
        """The shard as it lies in memory, C-contiguous, not conjugated."""
        return flipped(self.memory, self.order)

    def keep_one(self: Stored) -> Stored:
        """Of the ranks that are to hold partial sums of a matrix, and hold it whole, the first keeps it, the others'
        become zero."""
        if self.grid.coords is not None and any(getattr(self.grid.coords, axis) for axis in self.layout.sums):
            self.memory[...] = 0
        return self

    def stored_shape(self, layout: Layout, grid: Grid) -> tuple[int, int]:
        """The shape of this rank's shard in another layout, as it lies in memory."""
        rows, cols = shards(self.shape, layout, grid).box(grid.rank).shape
        return (rows, cols) if self.order == "C" else (cols, rows)

    def over(self: Stored, memory: Array, layout: Layout, grid: Grid) -> Stored:
        """A matrix of the same shape, type and order in another layout, conjugated if this one is, whose shard is in
        that memory."""
        return type(self)(grid, flipped(memory, self.order), self.shape, layout, self.order, self.conjugated)

    def empty_in(self: Stored, layout: Layout, grid: Grid, dtype: str | None = None) -> Stored:
        """A new matrix of this shape and order, of this type if it is left out; arbitrary elements."""
        shape = shards(self.shape, layout, grid).box(grid.rank).shape
        memory = new_array(self.library, shape, dtype or self.dtype, self.order)
        return type(self)(grid, memory, self.shape, layout, self.order)

    @cached_property
    def signature(self) -> Compared:
        """What must be the same on all ranks: of the array library the kind, for each rank has its own device."""
        return Compared((self.shape, self.dtype, str(self.layout), self.grid.shape, self.order, self.conjugated,
                         self.library.kind))

    @property
    def shared(self) -> str:
        """The axis whose ranks see each other's shards; empty if they do not."""
        return "" if self.window is None else self.window.axis

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError("a distributed matrix lives on the ranks of its Grid: it can be neither copied nor pickled. "
                        "gather() makes an array of it and DistMatrix.from_global a matrix of that; pmm3d.io writes "
                        "checkpoints")

    def __repr__(self) -> str:
        return (f"<{type(self).__name__} {self.shape[0]} x {self.shape[1]} {self.dtype} ({self.library.name}), "
                f"{self.layout} on grid {self.grid.shape}>")


def shards(shape: Any, layout: Any, grid: Grid, order: str = "C") -> Placement:
    """Where the shards of a matrix lie: of partial sums, each is as large as that of their sum. Raises LayoutError."""
    if isinstance(layout, Layout):
        layout.check_axes(grid.shape)
        layout = layout.summed
    return Placement(shape, layout, grid.shape, order)


def flipped(array: Array, order: str) -> Array:
    """The array, or its transpose if the order is by columns ("F"): from a shard to the C-contiguous array that stores
    it, and back."""
    return array if order == "C" else array.T


def new_array(library: NumpyLibrary, shape: tuple[int, int], dtype: str, order: str) -> Array:
    """A new array, by rows or by columns; arbitrary elements."""
    return library.empty(shape, dtype) if order == "C" else library.empty(shape[::-1], dtype).T
