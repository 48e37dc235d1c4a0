"""The gathered block of a weight in memory that the ranks of a node share: one copy for all of them."""

from __future__ import annotations

from ..arrays import Array
from ..comm import Grid, Pending
from ..comm.algorithms import meeting
from ..comm.transport import Collective, Link
from ..errors import GridError, LayoutError
from ..layout import itemsize
from .compute import Form

SHARED = "shared weights"


def check_can_share(grid: Grid, form: Form) -> None:
    """Raises GridError, LayoutError, on every rank, where the ranks along z cannot share the block of such a weight."""
    from ..comm.windows import can_share

    remedy = "Leave Overlap(shared_weights=True) out, or"
    if grid.dry_run is not None:
        raise LayoutError("shared weights: a dry run has no memory to share, and its prediction would not hold. "
                          f"{remedy} predict without it")
    if form.library.name != "numpy":
        raise LayoutError(f"shared weights: they are arrays of numpy; these are of {form.library.kind}. "
                          f'{remedy} make the network with library="numpy"')
    if not can_share(grid, "z"):
        raise GridError(f"shared weights: ranks along z are on several nodes of grid {grid.shape}, or in containers "
                        f"of their own. {remedy} make the grid so that z stays in a node: ranks run fastest along x")


class OneCopy:
    """The block that the ranks along z gather, once for those of a node: each writes its shard there, and all read.

    Made collectively over the grid. Raises, on every rank, GridError, LayoutError, OutOfMemoryError.
    """

    def __init__(self, grid: Grid, form: Form):
        from ..comm.windows import shared_array

        with grid.together(SHARED):
            check_can_share(grid, form)
        counts, columns = form.counts("z"), form.local_shape[1]
        row, mine = itemsize(form.dtype) * columns, grid.z.index
        with grid.together(SHARED, always=True):
            whole = shared_array(grid, grid.z, [row * count for count in counts])
        self._grid = grid
        self._filling: Pending | None = None
        self.block: Array = whole[: row * sum(counts)].view(form.dtype).reshape(sum(counts), columns)
        first = sum(counts[:mine])
        self._own = self.block[first : first + counts[mine]]

    def fill(self, shard: Array) -> Pending:
        """Begin to bring the shards' present values into the block: once no rank reads what was there, each writes its
        own, and when all have, the block is there. No bytes travel."""
        if self._filling is not None:  # one that was begun for values that are out of date
            self._filling.wait()

        def steps(link: Link) -> Collective[Array]:
            yield from meeting(link)
            self._own[...] = shard
            yield from meeting(link)
            return self.block

        with self._grid.ledger.phase("gather W"):
            self._filling = self._grid.z.begin("read in place", steps)
        return self._filling
