"""Matrices whose shards lie in memory that the ranks of a node share."""

from __future__ import annotations

from math import prod

from ..arrays import Array, NumpyLibrary, Slab
from ..comm import Axis, Grid, Pending
from ..errors import GridError, LayoutError
from ..layout import Layout, Placement, itemsize
from ..model.plan import ProductPlan
from .stored import Window

READ_IN_PLACE = "read in place"
"""What the ledger calls the meetings of ranks that see each other's shards or partial sums, in place of messages."""
PAGE = 2**12
HOW = "leave shared=True out, or"


def sharing_axis(grid: Grid, layout: Layout, library: NumpyLibrary) -> str:
    """The axis over which a product gathers a matrix in that layout, whose ranks are to share it. Raises, on
    every rank, LayoutError and GridError."""
    from ..comm.windows import can_share  # by who shares only

    if library.name != "numpy" or grid.dry_run is not None:
        raise LayoutError(f"shared: matrices in shared memory are arrays of numpy; these are of {library.kind}. "
                          f"{HOW} use library=\"numpy\"")
    if len(layout.rows) != 2 or len(layout.cols) > 1 or layout.sums:
        raise LayoutError(f"shared: rows are split by one axis and shared by the ranks of a second, as in Layout.A and "
                          f"Layout.B; this is {layout}. {HOW} take such a layout, or the transpose of one that has it")
    axis = layout.rows[1]
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


class SharedWork:
    """Work memory of the ranks of an axis that see each other's.

    slabs   of each of them, of `nbytes`, to be cut anew at each access
    """

    def __init__(self, memory: Array, nbytes: int):
        self._memory, self.nbytes = memory, nbytes
        self._given_back: Pending | None = None

    @property
    def slabs(self) -> list[Slab]:
        count = self._memory.shape[0] // self.nbytes
        return [Slab(part, NumpyLibrary()) for part in self._memory[: count * self.nbytes].reshape(count, -1)]

    def take(self) -> None:
        """Wait until nobody reads what this rank wrote to it before."""
        if self._given_back is not None:
            self._given_back.wait()

    def give_back(self, axis: Axis) -> None:
        """This rank reads no more what the others wrote; the next `take` waits until all have said so."""
        self._given_back = axis.meet(READ_IN_PLACE)


def near_axes(grid: Grid) -> frozenset[str]:
    """The axes of a grid along which ranks see each other's memory; the same on all ranks."""
    from ..comm.windows import can_share

    if near_axes not in grid.attached:
        grid.attached[near_axes] = frozenset(name for name in grid.shape.names if can_share(grid, name))
    found: frozenset[str] = grid.attached[near_axes]
    return found


def shared_sums(grid: Grid, plan: ProductPlan) -> SharedWork | None:
    """Where the partial sums of C are read in place: kept with the grid, one for each axis, and grown as needed.
    Collective. Raises, on every rank, OutOfMemoryError and GridError of `pmm3d.comm.windows`."""
    if not plan.sums_shared:
        return None
    from ..comm.windows import shared_array

    if SharedWork not in grid.attached:
        grid.attached[SharedWork] = {}
        grid.at_close(grid.attached[SharedWork].clear)
    axis, kept = grid.axis(plan.roles[1]), grid.attached[SharedWork]
    nbytes = -(-max(1, plan.sums_held) // PAGE) * PAGE
    if axis.name not in kept or kept[axis.name].nbytes < nbytes:
        before = kept.pop(axis.name, None)
        with grid.together("partial sums in shared memory", nbytes, always=True):
            memory = shared_array(grid, axis, [nbytes] * axis.size)
        kept[axis.name] = SharedWork(memory, nbytes)
        grid.workspace.allocated += nbytes - (before.nbytes if before else 0)
    found: SharedWork = kept[axis.name]
    return found
