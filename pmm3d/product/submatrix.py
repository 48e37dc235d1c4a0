"""Copies of submatrices."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from ..comm import one_thread
from ..errors import LayoutError
from ..layout import Box, Layout, Placement, whole_number
from .checks import check_alike, check_written, signature_of
from .relayout import summed
from .stored import StoredMatrix, new_array, shards
from .tiles import TileMove

if TYPE_CHECKING:
    from typing_extensions import Self


class Submatrices(StoredMatrix):
    """Methods that copy rows and columns of a matrix."""

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError("a DistMatrix is not indexed. a.submatrix(slice(0, 3), slice(None)) is a copy of rows and "
                        "columns (a collective call), a.local the shard of this rank, a.gather() the whole array")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError("a DistMatrix is not indexed. a.set_submatrix(slice(0, 3), slice(None), b) writes rows and "
                        "columns (a collective call), a.local[...] = array the shard of this rank")

    __iter__ = None

    @one_thread
    def submatrix(self, rows: slice, cols: slice, layout: Layout | None = None) -> Self:
        """A copy of A[rows, cols], as a matrix of its own.

        Parameters
        ----------
        rows, cols : slice
            Slices without step, within the matrix: slice(10, 20), slice(None).
        layout : Layout or None
            Layout of the copy. Default: that of this matrix.

        Returns
        -------
        DistMatrix
            The copy.

        Raises
        ------
        LayoutError
            On every rank, for other slices.

        Notes
        -----
        Each rank receives the elements of its new shard that it did not store, phase "submatrix" of the ledger. Partial
        sums are summed first.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (4, 4), lambda i, j: 10 * i + j)
        ...     a.submatrix(slice(1, 3), slice(2, None)).gather()
        array([[12., 13.],
               [22., 23.]])
        """
        grid = self.grid
        with grid.collective_call("submatrix", self.signature, _told(rows), _told(cols), layout):
            window = _window("submatrix", self, rows, cols)
            layout = self.layout if layout is None else layout
            target = shards(window.shape, layout, grid, self.order)
        a = summed(self)
        with ExitStack() as borrowed:
            with grid.collective_call("submatrix", always=True):
                grid.transport.check_place(a.library, a.memory)
                move = TileMove(grid, _part(a, window), target, a.dtype, operation="submatrix")
                work = borrowed.enter_context(grid.workspace.slab(move.work, a.library))
                memory = new_array(a.library, target.box(grid.rank).shape, a.dtype, a.order)
            made = type(self)(grid, memory, window.shape, layout, a.order)
            with grid.ledger.phase("submatrix"):
                move.start(a.library, [a.memory], [made.memory], work=work).wait()
        if a.conjugated:
            a.library.conjugate_in_place(made.stored)
        return made.keep_one()

    @one_thread
    def set_submatrix(self, rows: slice, cols: slice, a: Self) -> Self:
        """B[rows, cols] = A, in place.

        Parameters
        ----------
        rows, cols : slice
            Slices as of `submatrix`.
        a : DistMatrix
            Matrix of that shape and of the type of this matrix, in any layout on the same grid.

        Returns
        -------
        DistMatrix
            This matrix.

        Raises
        ------
        LayoutError
            On every rank, for other slices or shapes; if this matrix is read-only, a conjugated view, or one of partial
            sums; and if it shares memory with A.
        DTypeError, GridError
            On every rank, if types or grids differ.

        Notes
        -----
        Each rank receives the elements of its shard that change and that it did not store, phase "submatrix" of the
        ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     b = DistMatrix.zeros(grid, (2, 2))
        ...     b.set_submatrix(slice(0, 1), slice(None), DistMatrix.ones(grid, (1, 2))).gather()
        array([[1., 1.],
               [0., 0.]])
        """
        grid, library = self.grid, self.library
        with grid.collective_call("set_submatrix", self.signature, signature_of(a), _told(rows), _told(cols)):
            window = _window("set_submatrix", self, rows, cols)
            check_alike("set_submatrix", self, a, window.shape, "A")
            check_written("set_submatrix", self)
            if self.layout.on(grid.shape).sums:
                raise LayoutError(f"set_submatrix: the matrix is of partial sums, {self.layout}, of which no rank has "
                                  "the elements; bring it to its sum first: redistribute(layout.summed)")
            if library.share_memory(self.memory, a.memory):
                raise LayoutError("set_submatrix: A shares memory with the matrix, which would change while it is "
                                  "read; pass A.redistribute(layout), which is a copy")
        a = summed(a)
        with ExitStack() as borrowed:
            with grid.collective_call("set_submatrix", always=True):
                move = TileMove(grid, a.placement(), _part(self, window), a.dtype, operation="submatrix")
                work = borrowed.enter_context(grid.workspace.slab(move.work, library))
            with grid.ledger.phase("submatrix"):
                move.start(library, [a.memory], [self.memory], work=work).wait()
        if a.conjugated:
            library.conjugate_in_place(self.memory[(self.box & window).within(self.box)])
        self.fills += 1
        return self


def _part(matrix: StoredMatrix, window: Box) -> Placement:
    return matrix.placement().sub(window.r0, window.c0, *window.shape)


def _told(part: Any) -> Any:
    return (part.start, part.stop, part.step) if isinstance(part, slice) else f"a {type(part).__name__}"


def _window(what: str, matrix: StoredMatrix, rows: Any, cols: Any) -> Box:
    """Box of two slices. Raises LayoutError if they are not slices of the matrix."""
    return Box(*_range(what, "rows", rows, matrix.shape[0]), *_range(what, "columns", cols, matrix.shape[1]))


def _range(what: str, dim: str, part: Any, size: int) -> tuple[int, int]:
    try:
        start = 0 if part.start is None else whole_number(part.start)
        stop = size if part.stop is None else whole_number(part.stop)
        known = part.step in (None, 1) and 0 <= start <= stop <= size
    except (AttributeError, TypeError):
        known = False
    if not known:
        raise LayoutError(f"{what}: {dim} are a slice without step within 0 and {size}, as slice(0, {size}); got "
                          f"{part!r}")
    return start, stop
