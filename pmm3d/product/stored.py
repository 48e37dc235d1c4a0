"""The part of a matrix that one rank stores: the shard, and its place in the matrix."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..arrays import Array, NumpyLibrary, library_of
from ..comm import Compared, Grid
from ..errors import GridError, LayoutError
from ..layout import Box, Layout, Placement, RaggedRows

if TYPE_CHECKING:
    from typing import Self

EVERYTHING = slice(None), slice(None)


class Window(NamedTuple):
    """Memory that the ranks of an axis on one node share: the shards of all ranks of the axis, in order, C-contiguous.

    Shards of other nodes are copies, made by the last product that read them.
    """

    axis: str
    block: Array


class Uncompared:
    """Base class of matrices and tensors: `==` and `bool` raise TypeError. Objects are hashed by identity.

    `x == x` is True, because weak dictionaries compare keys so.
    """

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        raise TypeError(
            "a distributed matrix has no == and no truth value: (a - b).norm() == 0 compares all elements "
            "(a collective call), a is b compares objects, a is not None tests whether there is a matrix"
        )

    def __bool__(self) -> bool:
        return self.__eq__(None)

    __hash__ = object.__hash__


class StoredMatrix(Uncompared):
    """The part of a DistMatrix that one rank stores.

    grid, layout, shape, dtype, memory, order, conjugated   see DistMatrix
    base      matrix whose memory this view reads; the matrix itself if it is not a view
    window    memory in which the ranks of an axis read each other's shards, if `memory` is part of it; else None
    fills     number of writes in place; caches compare it
    """

    fills = 0
    window: Window | None = None
    _base: StoredMatrix | None = None

    def __init__(
        self,
        grid: Grid,
        memory: Array,
        shape: tuple[int, int],
        layout: Layout,
        order: str = "C",
        conjugated: bool = False,
    ):
        self.grid, self._memory, self.layout, self.order, self.conjugated = grid, memory, layout, order, conjugated
        self.shape = shape[0] if isinstance(shape[0], RaggedRows) else int(shape[0]), int(shape[1])
        self.library = library_of(memory)
        grid.everyone.choose_transport(self.library)
        self.dtype = self.library.dtype(memory)

    @property
    def base(self) -> StoredMatrix:
        """Matrix whose memory this view reads. The matrix itself if it is not a view."""
        return self if self._base is None else self._base

    @property
    def memory(self) -> Array:
        """Shard of this rank as it is stored. For a conjugated view, the elements before conjugation."""
        base = self._base
        if base is None:
            return self._memory
        return base._memory if self.order == base.order else base._memory.T

    @property
    def local(self) -> Array:
        """Shard of this rank. For a conjugated view, a new array at each access, which must not be written to."""
        return self._part(EVERYTHING) if self.conjugated else self.memory

    @local.setter
    def local(self, array: Array) -> None:
        if self.conjugated:
            raise LayoutError(
                "the shard of a conjugated view (.H) is not written to; write to the matrix that it is "
                "a view of, or to redistribute(layout), which is a copy"
            )
        library = library_of(array)
        if library != self.library or library.dtype(array) != self.dtype or array.shape != self.memory.shape:
            raise LayoutError(
                f"the new shard is {tuple(array.shape)} {library.dtype(array)} of {library.name}; this "
                f"matrix needs {tuple(self.memory.shape)} {self.dtype} of {self.library.name}. Convert "
                "it, or make a new matrix: DistMatrix.from_local"
            )
        if self.window is not None and self._place_of(array) != self._place_of(self.memory):
            raise LayoutError(
                "the shard of a matrix in shared memory stays where it is: write into it, matrix.local[...] = array"
            )
        self.base._memory = flipped(library.as_input(flipped(array, self.order)), self.base.order)

    def _place_of(self, array: Array) -> tuple[Any, ...]:
        """Address, shape and strides of an array of this library."""
        return self.library.address(array), tuple(array.shape), tuple(self.library.strides(array))

    def _check_shard(self) -> None:
        """Raise LayoutError if torch (`.data`) replaced the storage of the shard by storage that a shard cannot
        have."""
        memory, shape = self.memory, self.box.shape
        is_lazy = not self.library.as_stored(memory)
        if tuple(memory.shape) != shape or self.library.dtype(memory) != self.dtype or is_lazy:
            raise LayoutError(
                f"the shard of {self} is now {tuple(memory.shape)} {self.library.dtype(memory)}"
                f"{', a lazy conjugate' * is_lazy}; it must be {shape} {self.dtype}. A shard may be "
                "replaced by one of the same shape and type, matrix.local = array, or make a new matrix: "
                "DistMatrix.from_local"
            )

    def _part(self, within: tuple[slice, slice]) -> Array:
        """Part of the shard, by slices of its rows and columns: a view, or a copy for a conjugated view."""
        part = self.memory[within]
        if not self.conjugated:
            return part
        return flipped(self.library.conjugate(flipped(part, self.order)), self.order)

    @property
    def writable(self) -> bool:
        """Whether writing into `local` changes the matrix."""
        return not self.conjugated and self.library.writable(self.memory)

    @property
    def box(self) -> Box:
        """Rows and columns of the matrix that this rank stores."""
        return self.layout.box(self.shape, self.grid.shape, self.grid.coords)

    @property
    def T(self) -> Self:
        """The transpose, a view of the same memory."""
        return self._transposed(self.conjugated)

    @property
    def H(self) -> Self:
        """The conjugate transpose, a view of the same memory. Products conjugate it in the BLAS. `local` is a copy."""
        return self._transposed(self.conjugated != self.dtype.startswith("complex"))

    def has_layout(self, layout: Layout) -> bool:
        """Whether this layout stores the same elements on each rank of the grid as the layout of the matrix.

        Two layouts that compare unequal may be the same on a grid, because axes of one rank split nothing. Layouts
        whose units have an effect are the same only if their units are equal.

        Parameters
        ----------
        layout : Layout
            The other layout.

        Returns
        -------
        bool
            The same on every rank. Nothing is sent.

        Raises
        ------
        LayoutError
            On this rank, if the grid has no such axis.

        Notes
        -----
        To compare two layouts without a matrix: `one.on(grid.shape) == other.on(grid.shape)`.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid, Layout
        >>> with Grid(shape="fsdp") as grid:
        ...     a = DistMatrix.ones(grid, (2, 3), layout=Layout("z"))
        ...     c = a @ a.T
        ...     c.layout, c.layout == a.layout, c.has_layout(a.layout)
        (Layout(rows=('z', 'y'), cols=('x',)), False, True)
        """
        return self.layout.on(self.grid.shape) == layout.on(self.grid.shape)

    def _transposed(self, conjugated: bool) -> Self:
        order = "F" if self.order == "C" else "C"
        transposed = type(self)(self.grid, self.memory.T, self.shape[::-1], self.layout.T, order, conjugated)
        transposed._base, transposed._memory, transposed.window = self.base, None, self.window
        return transposed

    @property
    def _alias(self) -> Self:
        """A matrix over the same memory, which does not keep this object alive."""
        made = self._over(self._stored, self.layout, self.grid)
        made.window = self.window
        return made

    @property
    def resolved(self) -> Self:
        """This matrix, or a copy if it is a conjugated view. Nothing is sent."""
        return type(self)(self.grid, self.local, self.shape, self.layout, self.order) if self.conjugated else self

    def _placement(self) -> Placement:
        """Owners of each element. Raises LayoutError for partial sums, because no rank stores their elements."""
        return Placement(self.shape, self.layout.on(self.grid.shape), self.grid.shape, self.order)

    @property
    def _stored(self) -> Array:
        """The shard as a C-contiguous array, before conjugation."""
        return flipped(self.memory, self.order)

    def _zero_unless_first(self) -> Self:
        """Fill the shard with zeros, unless this rank is the first along each axis of partial sums."""
        if self.grid.coords is not None and any(getattr(self.grid.coords, axis) for axis in self.layout.sums):
            self.memory[...] = 0
        return self

    def _filled(self) -> None:
        """Note that a piece of the shard was read from a file."""

    def _stored_shape(self, layout: Layout, grid: Grid) -> tuple[int, int]:
        """Shape of the C-contiguous array that stores this rank's shard in another layout."""
        rows, cols = shards(self.shape, layout, grid).box(grid.rank).shape
        return (rows, cols) if self.order == "C" else (cols, rows)

    def _over(self, memory: Array, layout: Layout, grid: Grid) -> Self:
        """A matrix in another layout whose shard is in that memory, with the shape, type, order and conjugation of this
        one.
        """
        return type(self)(grid, flipped(memory, self.order), self.shape, layout, self.order, self.conjugated)

    def _empty_in(self, layout: Layout, grid: Grid, dtype: str | None = None) -> Self:
        """A new matrix of this shape and order, and of this type by default; its elements are arbitrary."""
        shape = shards(self.shape, layout, grid).box(grid.rank).shape
        memory = new_array(self.library, shape, dtype or self.dtype, self.order)
        return type(self)(grid, memory, self.shape, layout, self.order)

    @cached_property
    def _signature(self) -> Compared:
        """Properties that must be equal on all ranks. Ranks have devices of their own."""
        return Compared(
            (self.shape, self.dtype, str(self.layout), self.grid.shape, self.order, self.conjugated, self.library.kind)
        )

    @property
    def shared(self) -> str:
        """Axis whose ranks share the memory of their shards; empty if they do not."""
        return "" if self.window is None else self.window.axis

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError(
            "a distributed matrix lives on the ranks of its Grid: it can be neither copied nor pickled. "
            "gather() makes an array of it and DistMatrix.from_global a matrix of that; pmm3d.io writes "
            "checkpoints"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.shape[0]} x {self.shape[1]} {self.dtype} ({self.library.name}), "
            f"{self.layout} on grid {self.grid.shape}>"
        )


def shards(shape: Any, layout: Any, grid: Grid, order: str = "C") -> Placement:
    """Owners of the shards of a matrix. Raises LayoutError for an invalid shape or layout.

    A shard of partial sums has the size of a shard of their sum.
    """
    if isinstance(layout, Layout):
        layout.check_axes(grid.shape)
        layout = layout.summed
    return Placement(shape, layout, grid.shape, order)


def flipped(array: Array, order: str) -> Array:
    """The array, or its transpose for order "F". Converts a shard to the C-contiguous array that stores it, and
    back."""
    return array if order == "C" else array.T


def new_array(library: NumpyLibrary, shape: tuple[int, int], dtype: str, order: str) -> Array:
    """New array with arbitrary elements, by rows (order "C") or by columns."""
    return library.empty(shape, dtype) if order == "C" else library.empty(shape[::-1], dtype).T
