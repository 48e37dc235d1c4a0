"""Relayout of arrays from one layout to another, by one collective for each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from numbers import Complex
from typing import Any, TypeVar

from ..arrays import Array, Slab, library_of
from ..comm import (
    Awaited,
    Grid,
    Pending,
    all_gather_work,
    all_reduce_work,
    following,
    reduce_scatter_work,
    work_bytes,
)
from ..layout import Box, Coords, GridShape, Layout, Placement, RaggedRows, Step, transitions
from ..model.schedule import all_to_all
from .stored import StoredMatrix, shards
from .tiles import TileMove

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Leg = Callable[..., Pending]
"""leg(after=..., work=...) begins a step that sends messages."""


def relayout(grid: Grid, local: Array, shape: tuple[int, int], source: Layout, target: Layout, *,
             after: Sequence[Awaited] = (), out: Array | None = None) -> Relayout:
    """Begin to bring this rank's part of a matrix into another layout on the same grid.

    Parameters
    ----------
    grid : Grid
        The grid.
    local : array
        Shard of this rank in the source layout; of partial sums its own one.
    shape : tuple of int
        Number of rows and of columns of the matrix, the same on every rank.
    source, target : Layout
        The layouts, the same on every rank.
    after : sequence of Pending
        Calls that must end before `local` may be read: on all ranks, or on none.
    out : array or None
        The result, without gaps. Default: a new array, or a view of `local` if nothing is sent.

    Returns
    -------
    Relayout
        Its `wait()` returns this rank's part in the target layout.

    Raises
    ------
    LayoutError
        If a layout does not fit the grid or the shape.
    MemoryError
        On this rank alone, before a message is sent. `DistMatrix.redistribute` agrees on memory first.

    Notes
    -----
    The steps are those of `pmm3d.layout.transitions.transitions`. Let G be the number of ranks along the axis of a
    step. Each rank receives

        gather          (G-1)/G of the larger block          all_reduce      2 (G-1)/G of the block
        reduce_scatter  (G-1)/G of the larger block          all_to_all      (G-1)/G of the block
        slice, keep     nothing                              move            elements that it did not store

    `pmm3d.model.schedule` contains the exact numbers. Each step sums low precision in float32 and rounds once. All
    steps begin here, in the same order on all ranks, and run in the background. Nothing is compared among the ranks,
    except for a step "move": all ranks of the grid agree on its arguments and memory.

    The adjoint is the relayout back, of gradients. The gradient of a replicated matrix is replicated, and so is the
    gradient of each partial sum. So R* runs from target.summed to source.summed. <R x, y> = <x, R* y>, where each
    product is summed over the ranks that store different elements.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import Grid, Layout
    >>> with Grid() as grid:
    ...     part = np.ones((4, 2)) if grid.rank == 0 else np.zeros((4, 2))
    ...     relayout(grid, part, (4, 2), Layout(sums=("x", "y", "z")), Layout()).wait().sum()
    np.float64(8.0)
    """
    steps = transitions(source, target, grid.shape, shape)
    if not any(step.kind == "move" for step in steps):
        return Relayout(grid, local, shape, source, target, out).begin(after)
    library = library_of(local)
    with grid.collective_call("relayout", shape, str(source), str(target), library.dtype(local), library.kind):
        prepared = Relayout(grid, local, shape, source, target, out)
    return prepared.begin(after)


class Relayout:
    """A relayout; see `relayout`. The constructor allocates memory, and sends nothing. `begin` sends.

    work   bytes of work memory
    """

    def __init__(self, grid: Grid, local: Array, shape: tuple[int, int], source: Layout, target: Layout,
                 out: Array | None = None):
        self._grid, self._shape, self._out = grid, shape, out
        self._library = library_of(local)
        self._dtype = self._library.dtype(local)
        self._steps = transitions(source, target, grid.shape, shape)
        rows = source.on(grid.shape).rows
        if isinstance(shape[0], RaggedRows) and any(step.layout.rows != rows for step in self._steps):
            shape[0].refuse()
        self._legs: list[Leg] = []
        self._awaited: Sequence[Awaited] = ()
        self._result, self.work = local, 0
        layout = source.on(grid.shape)
        for step in self._steps:
            if grid.coords is not None or step.kind == "move":
                self._add(step, layout)
            layout = step.layout

    def begin(self, after: Sequence[Awaited] = (), work: Slab | None = None) -> Relayout:
        """Begin all steps. work: memory of `self.work` bytes (default: each step allocates its own). Collective."""
        self._awaited = after
        for leg in self._legs:
            self._awaited = [leg(after=self._awaited, work=None if work is None else work.again())]
        if self._out is not None and self._result is not self._out:
            self._copy_out(self._out)
        return self

    @property
    def done(self) -> bool:
        return all(awaited.done for awaited in self._awaited)

    def wait(self) -> Array:
        """Wait for all steps, and return this rank's part in the target layout."""
        for awaited in self._awaited:
            awaited.wait()
        return self._result

    def _copy_out(self, out: Array) -> None:
        """Copy the result to `out`, if the last step sends nothing. After pending steps, a message to itself copies."""
        if self._awaited and self._grid.coords is not None:
            axis = self._grid.axis(self._steps[-1].axis if self._steps else "x")
            rows = [len(out) if rank == axis.index else 0 for rank in range(axis.size)]
            self._awaited = [axis.all_to_all_into(self._result, out, rows, rows, after=self._awaited)]
        else:
            out[...] = self._result
        self._result = out

    def _add(self, step: Step, before: Layout) -> None:
        """Add a step. A step without messages is applied at once."""
        coords = self._grid.coords
        here, there = (layout.box(self._shape, self._grid.shape, coords) for layout in (before, step.layout))
        if step.kind == "slice":
            self._result = self._result[there.within(here)]
        elif step.kind == "keep":
            if getattr(coords, step.axis):
                self._result = self._new(there)
                self._result[...] = 0
        else:
            wanted = self._out is not None and step is self._steps[-1]
            recv_buffer = self._out if wanted else self._new(there)
            leg, work = self._leg(step, before, self._result, recv_buffer)
            self._legs.append(leg)
            self._result, self.work = recv_buffer, max(self.work, work)

    def _new(self, box: Box) -> Array:
        return self._grid.workspace.array(box.shape, self._dtype, self._library)

    def _leg(self, step: Step, before: Layout, array: Array, out: Array) -> tuple[Leg, int]:
        """Function that begins a step with messages, and the bytes of work memory of the step."""
        grid, library, dtype, dim = self._grid, self._library, self._dtype, step.dim
        if step.kind == "move":
            return self._move(before, step.layout, array, out)
        axis = grid.axis(step.axis)
        if step.kind == "all_reduce":
            return partial(axis.all_reduce_into, array, out), \
                all_reduce_work(array.shape, dtype, axis.size, axis.index, axis.node_map)
        regions = _regions(step, before, self._shape, grid.shape, grid.coords)
        if step.kind == "gather":
            counts = _extents(regions, dim)
            work = all_gather_work(out.shape, dtype, counts, axis.index, dim, axis.node_map)
            return partial(axis.all_gather_into, array, out, counts, dim=dim), work
        if step.kind == "reduce_scatter":
            counts = _extents(regions, dim)
            work = reduce_scatter_work(library, array, counts, axis.index, dim, axis.node_map)
            return partial(axis.reduce_scatter_into, array, out, counts, dim=dim), work
        theirs = _regions(step, before, self._shape, grid.shape, grid.coords, receives=True)
        sent, received, dims = _extents(regions, 1 - dim), _extents(theirs, dim), (1 - dim, dim)
        work = work_bytes(all_to_all(tuple(sent), tuple(received), axis.index), library, array, out, dims)
        return partial(axis.all_to_all_into, array, out, sent, received, dims=dims), work

    def _move(self, before: Layout, after: Layout, array: Array, out: Array) -> tuple[Leg, int]:
        """`_leg` of a move between all ranks. Along the axes of remaining partial sums, ranks receive from ranks with
        the same coordinate, as if these were replicas."""
        grid, library = self._grid, self._library
        source, target = (Placement(self._shape, layout.summed, grid.shape) for layout in (before, after))
        move = TileMove(grid, source, target, self._dtype)

        def begin(after: Sequence[Awaited], work: Slab | None) -> Pending:
            moving = lambda link: move.moving(link, library, [array], [out], work=work)
            return grid.everyone.begin("redistribute", following(after, moving), library=library)

        return begin, move.work


@lru_cache(maxsize=1024)
def _regions(step: Step, before: Layout, shape: tuple[int, int], grid: GridShape, coords: Coords,
             receives: bool = False) -> tuple[Box, ...]:
    """Boxes of the ranks along the axis of a step: after the step, or before it for a gather or if `receives`.

    The boxes after the step are the parts that this rank sends; those before it are the parts that it receives.
    """
    layout = before if receives or step.kind == "gather" else step.layout
    return tuple(layout.box(shape, grid, coords._replace(**{step.axis: index}))
                 for index in range(getattr(grid, step.axis)))


def _extents(boxes: Sequence[Box], dim: int) -> list[int]:
    return [box.shape[dim] for box in boxes]


def redistribution(matrix: StoredMatrix, out: StoredMatrix, borrowed: ExitStack) -> Callable[[], None]:
    """Function that fills `out`, of the same shape, type and order, from `matrix`. Collective. `borrowed` frees memory.

    `out` has another layout, on this grid or another grid over the same processes.
    """
    grid, library, same = matrix.grid, matrix.library, out.grid.shape == matrix.grid.shape
    target = out.layout if same else matrix.layout.summed
    layouts = (matrix.layout, target) if matrix.order == "C" else (matrix.layout.T, target.T)
    shape = matrix.shape if matrix.order == "C" else matrix.shape[::-1]
    relayout = Relayout(grid, matrix.stored, shape, *layouts, out.stored if same else None)
    work = borrowed.enter_context(grid.workspace.slab(relayout.work, library))
    if not same:
        sides = [shards(matrix.shape, *side, matrix.order) for side in ((target, grid), (out.layout, out.grid))]
        move = TileMove(grid, sides[0], sides[1], matrix.dtype)
        memory = borrowed.enter_context(grid.workspace.slab(move.work, library))

    def fill() -> None:
        with grid.ledger.phase("redistribute"):
            here = relayout.begin(work=work).wait()
        if not same:
            local = here if matrix.order == "C" else here.T
            with grid.ledger.phase("redistribute"):
                move.start(library, [local], [out.memory], work=memory).wait()
            out.keep_one()
        if matrix.conjugated != out.conjugated:
            library.conjugate_in_place(out.stored)

    return fill


def refill(matrix: StoredMatrix, out: StoredMatrix, work: Slab, rounds: int) -> None:
    """Fill `out`, of the same shape, type and order, in another layout on the same grid, in `rounds` rounds.
    Collective."""
    move = TileMove(matrix.grid, matrix.placement(), out.placement(), matrix.dtype, rounds=rounds)
    with matrix.grid.ledger.phase("redistribute"):
        move.start(matrix.library, [matrix.memory], [out.memory], work=work).wait()


def summed(matrix: Matrix, alpha: Any = 1) -> Matrix:
    """Return the matrix, or the sum of its partial sums in `layout.summed`. The sum is collective.

    alpha   factor by which the caller multiplies the sum; if 0, nothing is sent, and elements are arbitrary
    """
    if not isinstance(matrix, StoredMatrix) or not matrix.layout.sums:
        return matrix
    if isinstance(alpha, Complex) and alpha == 0:
        return matrix.over(matrix.stored, matrix.layout.summed, matrix.grid)
    return in_layout(matrix, matrix.layout.summed, "the sum of partial sums")


def has_layout(matrix: StoredMatrix, layout: Layout) -> bool:
    """Whether the layout of the matrix is equivalent to `layout` on its grid."""
    return matrix.layout.on(matrix.grid.shape) == layout.on(matrix.grid.shape)


def in_layout(matrix: Matrix, layout: Layout, what: str) -> Matrix:
    """Matrix over the same memory if it has this layout, else a copy in this layout. The copy is collective.

    what   name of the operation in error messages
    """
    if has_layout(matrix, layout):
        return matrix.over(matrix.stored, layout, matrix.grid)
    with ExitStack() as borrowed:
        with matrix.grid.collective_call(what, matrix.signature, layout):
            bring = brought(matrix, layout, borrowed)
        return bring()


def brought(matrix: Matrix, layout: Layout, borrowed: ExitStack) -> Callable[[], Matrix]:
    """`in_layout` as a function, which sends when it is called. `borrowed` frees its work memory."""
    grid = matrix.grid
    if has_layout(matrix, layout):
        return lambda: matrix.over(matrix.stored, layout, grid)
    grid.transport.check_place(matrix.library, matrix.memory)
    memory = matrix.library.empty(matrix.stored_shape(layout, grid), matrix.dtype)
    there = matrix.over(memory, layout, grid)
    fill = redistribution(matrix, there, borrowed)

    def bring() -> Matrix:
        fill()
        return there

    return bring
