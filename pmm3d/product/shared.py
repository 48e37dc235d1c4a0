"""Matrices with shards in memory that the ranks of a node share."""

from __future__ import annotations

from math import prod
from typing import Any

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..errors import GridError, LayoutError
from ..layout import AXES, Layout, Placement, itemsize
from .checks import signature_of
from .stored import Window

HOW = "leave shared=True out, or"


def axes_in_node(grid: Grid) -> frozenset[str]:
    """Axes of more than one rank whose ranks are all on one node. The same on all ranks."""
    from ..comm import can_share

    if grid.dry_run is not None:
        return frozenset()
    return frozenset(name for name in AXES if getattr(grid.shape, name) > 1 and can_share(grid, name))


def shared_sums(grid: Grid, axis: str, nbytes: int) -> list[Array]:
    """Return shared memory for partial sums of C: at least `nbytes` for each rank along an axis. Collective.

    The memory is reallocated if it is too small, and freed with the grid. Raises OutOfMemoryError or GridError on
    every rank.
    """
    if shared_sums not in grid.attached:
        grid.attached[shared_sums] = dict[str, list[Array]]()
        grid._at_close(grid.attached[shared_sums].clear)
    memory: dict[str, list[Array]] = grid.attached[shared_sums]
    held = memory[axis][0].shape[0] if axis in memory else 0
    if held < nbytes:
        from ..comm import shared_array

        with grid.collective_call("matmul", always=True):
            along = grid.axis(axis)
            window = shared_array(grid, along, [nbytes] * along.size)
        memory[axis] = [window[start : start + nbytes] for start in range(0, nbytes * along.size, nbytes)]
        grid.workspace.allocated += nbytes - held
    return memory[axis]


def sharing_axis(grid: Grid, layout: Layout, library: NumpyLibrary) -> str:
    """Axis over which a product gathers a matrix in this layout. The ranks of the axis share the shards.

    Raises LayoutError or GridError, on every rank, if they cannot share them.
    """
    from ..comm import ranks_that_share  # imported only if memory is shared

    if not library.on_host or grid.dry_run is not None:
        raise LayoutError(
            f"shared: matrices in shared memory are arrays on the host; these are of {library.kind}. "
            f'{HOW} use library="numpy" or "torch"'
        )
    if len(layout.rows) != 2 or len(layout.cols) > 1 or layout.sums:
        raise LayoutError(
            f"shared: rows are split by one axis and shared by the ranks of a second, as in Layout.A and "
            f"Layout.B; this is {layout}. {HOW} take such a layout, or the transpose of one that has it"
        )
    axis = layout.rows[1]
    if not ranks_that_share(grid, axis):
        raise GridError(
            f"shared: ranks along {axis} are on several nodes of grid {grid.shape}, and not as many on "
            f"each next to each other, or in containers of their own. {HOW} make the grid so that {axis} "
            "stays in a node, or fills nodes evenly: ranks run fastest along x"
        )
    return axis


def window_of(grid: Grid, axis: str, placement: Placement, dtype: str, library: NumpyLibrary) -> tuple[Window, Array]:
    """Window of a matrix, and this rank's shard in it. Each node of the axis has a block. Collective along the axis."""
    from ..comm import one_for_each_node, ranks_that_share, shared_array

    members, size = grid._ranks_along([axis]), itemsize(dtype)
    shapes = [placement.box(rank).shape for rank in members]
    if len(shapes) == 1:
        local = library.empty(shapes[0], dtype)
        return Window(axis, local), local
    parts, per_node = [size * prod(shape) for shape in shapes], ranks_that_share(grid, axis)
    memory = (
        shared_array(grid, grid.axis(axis), parts)
        if per_node == len(members)
        else one_for_each_node(grid, grid.axis(axis), sum(parts), per_node)
    )
    rows, columns = [shape[0] for shape in shapes], shapes[0][1]
    block = library.view(memory, (sum(rows), columns), dtype)
    first = sum(rows[: grid.axis(axis).index])
    return Window(axis, block), block[first : first + rows[grid.axis(axis).index]]


def shared_room(matrix: Any, layout: Layout, grid: Any, out: Any) -> Any:
    """New DistMatrix of the shape and order of `matrix`, in shared memory. Collective."""
    with matrix.grid.collective_call("redistribute", matrix._signature, layout, signature_of(out), True):
        if out is not None:
            raise LayoutError("redistribute: out= has its memory, and shared= asks for new: leave one of them out")
    options: Any = {"dtype": matrix.dtype, "library": matrix.library, "shared": True}
    if matrix.order == "C":
        return type(matrix).empty(grid, matrix.shape, layout=layout, **options)
    transposed = layout.T if isinstance(layout, Layout) else layout
    return type(matrix).empty(grid, matrix.shape[::-1], layout=transposed, **options).T
