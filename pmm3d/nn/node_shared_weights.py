"""The gathered block of a weight in memory that the ranks of a node share: one copy for all of them."""

from __future__ import annotations

import weakref
from typing import Any

from ..arrays import Array, Workspace
from ..comm import Collective, Grid, Link, Pending, run_schedule, wait_for_all
from ..errors import GridError, LayoutError
from ..layout import itemsize, offsets, part_sizes
from ..model.schedule import shared_all_gather
from .compute import Form

SHARED = "shared weights"


def check_can_share(grid: Grid, form: Form) -> None:
    """Raises GridError, LayoutError, on every rank, if the ranks along the axis that shards such a weight (z) cannot
    share its block."""
    from ..comm import ranks_that_share

    remedy = "Leave Overlap(shared_weights=True) out, or"
    if form.library.kind not in ("numpy", "torch"):
        raise LayoutError(f"shared weights: they are arrays on the host; these are of {form.library.kind}. "
                          f'{remedy} make the network with library="numpy" or "torch"')
    axis = form.layout.rows[-1]
    if not ranks_that_share(grid, axis):
        raise GridError(f"shared weights: ranks along {axis} lie on several nodes of grid {grid.shape}, and not as "
                        f"many on each next to each other, or in containers of their own. {remedy} make the grid so "
                        f"that {axis} stays in a node, or fills nodes evenly: ranks run fastest along x")


class NodeSharedBlock:
    """The block that ranks gather along the axis that shards a weight (z), once for those of a node: each writes its
    shard there, and all read. On several nodes each rank brings in what the ranks with its number in other nodes have:
    a link carries each byte once, and none is held twice in a node. Of the workspace's `allocated` each rank of a node
    has an equal part.

    Made collectively over the grid. Raises, on every rank, GridError, LayoutError, OutOfMemoryError.
    """

    def __init__(self, grid: Grid, form: Form):
        from ..comm import ranks_that_share

        with grid.collective_call(SHARED):
            check_can_share(grid, form)
        self._axis = grid.axis(form.layout.rows[-1])
        counts, columns = form.counts(self._axis.name), form.local_shape[1]
        nbytes, per_node = itemsize(form.dtype) * columns * sum(counts), ranks_that_share(grid, self._axis.name)
        with grid.collective_call(SHARED, always=True):
            whole = self._room(grid, form.library, nbytes, per_node)
        self._grid, self._library, self._counts = grid, form.library, counts
        self._per_node = per_node
        self._filling: Pending | None = None
        self.block: Array = form.library.view(whole, (sum(counts), columns), form.dtype)

    def _room(self, grid: Grid, library: Any, nbytes: int, per_node: int) -> Array:
        """So many bytes for each node; in a dry run as many that are not there."""
        from ..comm import one_for_each_node

        own = part_sizes(nbytes, per_node)[self._axis.index % per_node]
        if grid.dry_run is None:
            whole = one_for_each_node(grid, self._axis, nbytes, per_node)
        else:
            whole = library.array((nbytes,), "uint8", grid.dry_run.hold(own, "workspace"))
        grid.workspace.allocated += own
        weakref.finalize(self, _less, grid.workspace, own).atexit = False
        return whole

    def fill(self, shard: Array) -> Pending:
        """Begin to bring the shards' present values into the block: once no rank of the node reads what was there, each
        writes its own, and what comes from other nodes; when all have, it is there. In a node no bytes travel."""
        if self._filling is not None:  # one that was begun for values that are out of date
            self._filling.wait()

        def steps(link: Link) -> Collective[Array]:
            start, stop = offsets(self._counts)[link.rank :][:2]
            yield from wait_for_all(link, self._per_node)
            self.block[start:stop] = shard
            schedule = shared_all_gather(tuple(self._counts), link.rank, self._per_node)
            return (yield from run_schedule(link, self._library, schedule, self.block, self.block))

        with self._grid.ledger.phase("gather W"):
            name = "read in place" if self._per_node == self._axis.size else "all_gather"
            self._filling = self._axis.begin(name, steps)
        return self._filling


def _less(workspace: Workspace, nbytes: int) -> None:
    workspace.allocated -= nbytes
