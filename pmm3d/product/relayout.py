"""Relayout of arrays from one layout to another, by one collective for each axis; and copies of submatrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from numbers import Complex
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..arrays import Array, Factors, Slab, check_output, library_of
from ..comm import (
    Awaited,
    Grid,
    Pending,
    all_gather_work,
    all_reduce_work,
    assign,
    call,
    following,
    one_thread,
    reduce_scatter_work,
    work_bytes,
)
from ..errors import LayoutError
from ..layout import (
    Box,
    Coords,
    GridShape,
    Layout,
    Placement,
    RaggedRows,
    Step,
    transitions,
    whole_number,
    without_order,
)
from ..model.schedule import all_to_all
from .checks import check_alike, check_out, signature_of
from .stored import StoredMatrix, new_array, shards
from .tiles import TileMove

if TYPE_CHECKING:
    from typing import Self

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Leg = Callable[..., Pending]
"""leg(after=..., work=...) begins a step that sends messages."""


def relayout(
    grid: Grid,
    local: Array,
    shape: tuple[int, int],
    source: Layout,
    target: Layout,
    *,
    after: Sequence[Awaited] = (),
    out: Array | None = None,
) -> Relayout:
    """Begin to bring this rank's part of a matrix into another layout on the same grid.

    Parameters
    ----------
    local : array
        Shard of this rank in the source layout; of partial sums its own one.
    shape : tuple of int
        Number of rows and of columns of the matrix, the same on every rank.
    source, target : Layout
        The layouts, the same on every rank.
    after : sequence of Pending
        Wait for these first. Pass them on all ranks or on none.
    out : array or None
        The result, C-contiguous and apart from `local`. Default: a new array, or a view of `local` if nothing is sent.

    Returns
    -------
    Relayout
        Its `wait()` returns this rank's part in the target layout.

    Raises
    ------
    LayoutError
        If a layout does not fit the grid or the shape. On this rank alone, if `out` does not fit, is read-only, or
        shares memory with `local`.
    MemoryError
        On this rank alone, before a message is sent. `DistMatrix.redistribute` agrees on memory first.

    Notes
    -----
    The steps are those of `pmm3d.layout.transitions.transitions`. Let G be the number of ranks along the axis of a
    step. Each rank receives

        gather          (G-1)/G of the larger block          all_reduce      2 (G-1)/G of the block
        reduce_scatter  (G-1)/G of the larger block          all_to_all      (G-1)/G of the block
        slice           nothing                              move            elements that it did not store
        zero_others     nothing

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
    library = library_of(local)
    local = library.as_input(local, strided=True)
    if out is not None:
        box = target.box(shape, grid.shape, grid.coords)
        check_output(library, "relayout", out, local, result=(box.shape, library.dtype(local)))
    steps = transitions(source, target, grid.shape, shape)
    if not any(step.kind == "move" for step in steps):
        return Relayout(grid, local, shape, source, target, out).begin(after)
    if grid.engine.recorder is not None:
        return _recorded_move(grid, local, shape, source, target, after, out)
    with grid.collective_call("relayout", shape, str(source), str(target), library.dtype(local), library.kind):
        prepared = Relayout(grid, local, shape, source, target, out)
    return prepared.begin(after)


def _recorded_move(
    grid: Grid,
    local: Array,
    shape: tuple[int, int],
    source: Layout,
    target: Layout,
    after: Sequence[Awaited],
    out: Array | None,
) -> Relayout:
    """Carry out a relayout with a move as one instruction of a recorded step."""
    for awaited in after:
        awaited.wait()
    if out is None:
        library, box = library_of(local), target.box(shape, grid.shape, grid.coords)
        out = grid.workspace.array(box.shape, library.dtype(local), library)

    def move(local: Array, out: Array) -> None:
        relayout(grid, local, shape, source, target, out=out).wait()

    call(grid.engine, move, local, out)
    return Relayout(grid, out, shape, target, target)


class Relayout:
    """A relayout; see `relayout`. The constructor allocates memory, and sends nothing. `begin` sends, also repeatedly.

    work   bytes of work memory
    """

    def __init__(
        self, grid: Grid, local: Array, shape: tuple[int, int], source: Layout, target: Layout, out: Array | None = None
    ):
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

    @property
    def awaited(self) -> Sequence[Awaited]:
        """The collectives of the last step."""
        return self._awaited

    def raise_error(self) -> None:
        for awaited in self._awaited:
            awaited.raise_error()

    def wait(self) -> Array:
        """Wait for all steps, and return this rank's part in the target layout."""
        for awaited in self._awaited:
            awaited.wait()
        return self._result if self._out is None else self._out

    def _copy_out(self, out: Array) -> None:
        """Copy the result to `out`, if the last step sends nothing. After pending steps, a message to itself copies."""
        if self._awaited and self._grid.coords is not None:
            axis = self._grid.axis(self._steps[-1].axis if self._steps else "x")
            rows = [len(out) if rank == axis.index else 0 for rank in range(axis.size)]
            self._awaited = [axis._all_to_all_into(self._result, out, rows, rows, after=self._awaited)]
        else:
            assign(self._grid.engine, out, self._result)

    def _add(self, step: Step, before: Layout) -> None:
        """Add a step. A step without messages is applied at once."""
        coords = self._grid.coords
        here, there = (layout.box(self._shape, self._grid.shape, coords) for layout in (before, step.layout))
        if step.kind == "slice":
            self._result = self._result[there.within(here)]
        elif step.kind == "zero_others":
            if getattr(coords, step.axis):
                self._result = self._new(there)
                assign(self._grid.engine, self._result, 0)
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
            return partial(axis._all_reduce_into, array, out), all_reduce_work(
                array.shape, dtype, axis.size, axis.index, axis.node_map
            )
        regions = _regions(step, before, self._shape, grid.shape, grid.coords)
        if step.kind == "gather":
            counts = _extents(regions, dim)
            work = all_gather_work(out.shape, dtype, counts, axis.index, dim, axis.node_map)
            return partial(axis._all_gather_into, array, out, counts, dim=dim), work
        if step.kind == "reduce_scatter":
            counts = _extents(regions, dim)
            work = reduce_scatter_work(library, array, counts, axis.index, dim, axis.node_map)
            return partial(axis._reduce_scatter_into, array, out, counts, dim=dim), work
        theirs = _regions(step, before, self._shape, grid.shape, grid.coords, receives=True)
        sent, received, dims = _extents(regions, 1 - dim), _extents(theirs, dim), (1 - dim, dim)
        work = work_bytes(all_to_all(tuple(sent), tuple(received), axis.index), library, array, out, dims)
        return partial(axis._all_to_all_into, array, out, sent, received, dims=dims), work

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
def _regions(
    step: Step, before: Layout, shape: tuple[int, int], grid: GridShape, coords: Coords, receives: bool = False
) -> tuple[Box, ...]:
    """Boxes of the ranks along the axis of a step: after the step, or before it for a gather or if `receives`.

    The boxes after the step are the parts that this rank sends; those before it are the parts that it receives.
    """
    layout = before if receives or step.kind == "gather" else step.layout
    return tuple(layout.box(shape, grid, coords.at(step.axis, index)) for index in range(getattr(grid, step.axis)))


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
    relayout = Relayout(grid, matrix._stored, shape, *layouts, out._stored if same else None)
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
            out._zero_unless_first()
        if matrix.conjugated != out.conjugated:
            library.conjugate_in_place(out._stored)

    return fill


def refill(matrix: StoredMatrix, out: StoredMatrix, work: Slab, rounds: int) -> None:
    """Fill `out`, of the same shape, type and order, in another layout on the same grid, in `rounds` rounds.
    Collective."""
    move = TileMove(matrix.grid, matrix._placement(), out._placement(), matrix.dtype, rounds=rounds)
    with matrix.grid.ledger.phase("redistribute"):
        move.start(matrix.library, [matrix.memory], [out.memory], work=work).wait()


def summed(matrix: Matrix, alpha: Any = 1) -> Matrix:
    """Return the matrix, or the sum of its partial sums in `layout.summed`. The sum is collective.

    alpha   factor by which the caller multiplies the sum; if 0, nothing is sent, and elements are arbitrary
    """
    if not isinstance(matrix, StoredMatrix) or not matrix.layout.sums:
        return matrix
    if isinstance(alpha, Complex) and alpha == 0:
        return matrix._over(matrix._stored, matrix.layout.summed, matrix.grid)
    return in_layout(matrix, matrix.layout.summed, "the sum of partial sums")


def ascending(matrix: Matrix) -> Matrix:
    """Return the matrix, or a copy in a layout without an order of rows. Partial sums are summed first. The copy and
    the sum are collective."""
    matrix = summed(matrix)
    layout = without_order(matrix.layout)
    return matrix if layout is matrix.layout else in_layout(matrix, layout, "the rows in ascending order")


def in_layout(matrix: Matrix, layout: Layout, what: str) -> Matrix:
    """Matrix over the same memory if it has this layout, else a copy in this layout. The copy is collective.

    what   name of the operation in error messages
    """
    if matrix.has_layout(layout):
        return matrix._over(matrix._stored, layout, matrix.grid)
    with ExitStack() as borrowed:
        with matrix.grid.collective_call(what, matrix._signature, layout):
            bring = brought(matrix, layout, borrowed)
        return bring()


def brought(matrix: Matrix, layout: Layout, borrowed: ExitStack) -> Callable[[], Matrix]:
    """`in_layout` as a function, which sends when it is called. `borrowed` frees its work memory."""
    grid = matrix.grid
    if matrix.has_layout(layout):
        return lambda: matrix._over(matrix._stored, layout, grid)
    grid.transport.check_place(matrix.library, matrix.memory)
    memory = matrix.library.empty(matrix._stored_shape(layout, grid), matrix.dtype)
    there = matrix._over(memory, layout, grid)
    fill = redistribution(matrix, there, borrowed)

    def bring() -> Matrix:
        fill()
        return there

    return bring


class Submatrices(StoredMatrix):
    """Methods that copy rows and columns of a matrix."""

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            "a DistMatrix is not indexed. a.submatrix(slice(0, 3), slice(None)) is a copy of rows and "
            "columns (a collective call), a.local the shard of this rank, a.gather() the whole array"
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError(
            "a DistMatrix is not indexed. a.set_submatrix(slice(0, 3), slice(None), b) writes rows and "
            "columns (a collective call), a.local[...] = array the shard of this rank"
        )

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

        Raises
        ------
        LayoutError
            For other slices.

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
        with grid.collective_call("submatrix", self._signature, _slice_signature(rows), _slice_signature(cols), layout):
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
                factors = [Factors(conjugated=a.conjugated)]
                move.start(a.library, [a.memory], [made.memory], work=work, factors=factors).wait()
        return made._zero_unless_first()

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
            For other slices or shapes; if this matrix is read-only, a conjugated view, or one of partial
            sums; and if it shares memory with A.
        DTypeError, GridError
            If types or grids differ.

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
        slices = _slice_signature(rows), _slice_signature(cols)
        with grid.collective_call("set_submatrix", self._signature, signature_of(a), *slices):
            window = _window("set_submatrix", self, rows, cols)
            check_alike("set_submatrix", self, a, window.shape, "A")
            check_out("set_submatrix", self, a, name="the matrix")
            if self.layout.on(grid.shape).sums:
                raise LayoutError(
                    f"set_submatrix: the matrix is of partial sums, {self.layout}, of which no rank has "
                    "the elements; bring it to its sum first: redistribute(layout.summed)"
                )
        a = summed(a)
        with ExitStack() as borrowed:
            with grid.collective_call("set_submatrix", always=True):
                move = TileMove(grid, a._placement(), _part(self, window), a.dtype, operation="submatrix")
                work = borrowed.enter_context(grid.workspace.slab(move.work, library))
            with grid.ledger.phase("submatrix"):
                factors = [Factors(conjugated=a.conjugated)]
                move.start(library, [a.memory], [self.memory], work=work, factors=factors).wait()
        self.fills += 1
        return self


def _part(matrix: StoredMatrix, window: Box) -> Placement:
    return matrix._placement().sub(window.r0, window.c0, *window.shape)


def _slice_signature(part: Any) -> Any:
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
        raise LayoutError(
            f"{what}: {dim} are a slice without step within 0 and {size}, as slice(0, {size}); got {part!r}"
        )
    return start, stop
