"""Rows and columns of a matrix as a matrix of their own, and back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

from ..arrays import Slab
from ..comm.guard import one_thread
from ..errors import LayoutError
from ..layout import Box, Layout, Part, whole_number
from ..model.move import Move
from .checks import check_alike, check_written, signature_of
from .redistribute import memory_to_move, move
from .relayout import summed
from .stored import StoredMatrix, shards

Matrix = TypeVar("Matrix", bound=StoredMatrix)


class Submatrices(StoredMatrix):
    """Copies of rows and columns."""

    @one_thread
    def submatrix(self: Matrix, rows: slice, cols: slice, layout: Layout | None = None) -> Matrix:
        """A copy of A[rows, cols], a matrix of its own.

        rows, cols   slices without step, within the matrix: slice(10, 20), slice(None)
        layout       of the copy; that of this matrix if left out

        Each rank receives what it is to have and did not hold, from one rank a piece, phase "submatrix" of the ledger;
        a matrix of partial sums is brought to its sum first. Raises, on every rank, LayoutError for other slices.

            >>> from pmm3d import DistMatrix, Grid
            >>> with Grid() as grid:
            ...     a = DistMatrix.from_function(grid, (4, 4), lambda i, j: 10 * i + j)
            ...     a.submatrix(slice(1, 3), slice(2, None)).gather()
            array([[12., 13.],
                   [22., 23.]])
        """
        grid = self.grid
        with grid.together("submatrix", self.signature, _told(rows), _told(cols), layout):
            window = _window("submatrix", self, rows, cols)
            layout = self.layout if layout is None else layout
            target = shards(window.shape, layout, grid)
        a = summed(self)
        with ExitStack() as borrowed:
            with grid.together("submatrix", always=True):
                grid.transport.check_place(a.library, a.memory)
                plan = Move(Part(a.placement(), window), target, a.dtype)
                work, rounds = borrowed.enter_context(memory_to_move(plan, grid, a.library))
                box = target.box(grid.rank).shape
                memory = a.library.empty(box if a.order == "C" else box[::-1], a.dtype)
            made = type(self)(grid, memory if a.order == "C" else memory.T, window.shape, layout, a.order)
            _move("submatrix", a, plan, a.memory[_inside(a, window)], made.memory, work, rounds)
        if a.conjugated:
            a.library.conjugate_in_place(made.stored)
        return made.keep_one()

    @one_thread
    def set_submatrix(self: Matrix, rows: slice, cols: slice, a: StoredMatrix) -> Matrix:
        """B[rows, cols] = A, in place.

        rows, cols   as of `submatrix`
        a            of that shape and of the type of this matrix, in any layout on the same grid

        Returns the matrix. What it moves: as `submatrix`. Raises, on every rank: LayoutError for other slices or
        shapes, where this matrix is read-only, a conjugated view, one of partial sums, or has memory in common with A;
        DTypeError, GridError.
        """
        grid, library = self.grid, self.library
        with grid.together("set_submatrix", self.signature, signature_of(a), _told(rows), _told(cols)):
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
            with grid.together("set_submatrix", always=True):
                target = shards(self.shape, self.layout, grid)
                plan = Move(a.placement(), Part(target, window), a.dtype)
                work, rounds = borrowed.enter_context(memory_to_move(plan, grid, library))
            part = self.memory[_inside(self, window)]
            _move("submatrix", a, plan, a.memory, part, work, rounds)
        if a.conjugated:
            library.conjugate_in_place(part)
        self.fills += 1
        return self


def _move(phase: str, a: StoredMatrix, plan: Move, local: Any, out: Any, work: Slab, rounds: int) -> None:
    moving = lambda link: move(link, a.library, local, plan, out, work, rounds, a.order)
    with a.grid.ledger.phase(phase):
        a.grid.everyone.begin(phase, moving, library=a.library).wait()


def _inside(matrix: StoredMatrix, window: Box) -> tuple[slice, slice]:
    """Which part of this rank's shard lies in the window."""
    return (matrix.box & window).within(matrix.box)


def _told(part: Any) -> Any:
    return (part.start, part.stop, part.step) if isinstance(part, slice) else f"a {type(part).__name__}"


def _window(what: str, matrix: StoredMatrix, rows: Any, cols: Any) -> Box:
    """Raises LayoutError for what are no slices of it."""
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
