"""Matrices whose shards lie in memory that the ranks of a node share."""

from __future__ import annotations

from math import prod

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..errors import GridError, LayoutError
from ..layout import Layout, Placement, itemsize
from .stored import Window

HOW = "leave shared=True out, or"


def sharing_axis(grid: Grid, layout: Layout, library: NumpyLibrary) -> str:
    """The axis over which a product gathers a matrix in that layout, whose ranks are to share it; empty if it has one
    rank. Raises LayoutError, GridError, on every rank."""
    from ..comm.windows import can_share  # by who shares only

    if library.name != "numpy" or grid.dry_run is not None:
        raise LayoutError(f"shared: matrices in shared memory are arrays of numpy; these are of {library.kind}. "
                          f"{HOW} use library=\"numpy\"")
    if len(layout.rows) != 2 or len(layout.cols) > 1 or layout.sums:
        raise LayoutError(f"shared: rows are split by one axis and shared by the ranks of a second, as in Layout.A and "
                          f"Layout.B; this is {layout}. {HOW} take such a layout, or the transpose of one that has it")
    axis = layout.rows[1]
    if getattr(grid.shape, axis) == 1:
        return ""
    if not can_share(grid, axis):
        raise GridError(f"shared: ranks along {axis} are on several nodes of grid {grid.shape}, or in containers of "
                        f"their own. {HOW} make the grid so that {axis} stays in a node: ranks run fastest along x")
    return axis


def window_of(grid: Grid, axis: str, placement: Placement, dtype: str) -> tuple[Window | None, Array]:
    """The window of a matrix, and this rank's shard in it. Collective along the axis."""
    from ..comm.windows import shared_array

    members, size = grid.axis(axis).ranks, itemsize(dtype)
    shapes = [placement.box(rank).shape for rank in members]
    whole = shared_array(grid, grid.axis(axis), [size * prod(shape) for shape in shapes])
    rows, columns = [shape[0] for shape in shapes], shapes[0][1]
    block = whole[: size * sum(rows) * columns].view(dtype).reshape(sum(rows), columns)
    first = sum(rows[: grid.axis(axis).index])
    return Window(axis, block), block[first : first + rows[grid.axis(axis).index]]
