"""Relayouts of gradients and products that begin as soon as the values have been computed."""

from __future__ import annotations

from operator import add as plus
from typing import Any

from ..arrays import Array, Slab
from ..comm import Departures
from ..layout import Layout, part_sizes
from ..layout.layout import unit_of
from ..model.schedule import reduce_volume
from ..product.relayout import relayout
from .compute import TensorSpec
from .contract import EVERYTHING, Contribution, LazyMatrix, natural, route
from .elementwise import map_elementwise
from .parallel import BackwardSync


class PendingGradient:
    """A gradient, complete or in progress. `pending.wait()` returns the gradient, or fills the array."""

    def __init__(self, array: Array, pending: Any = None):
        self._array, self._pending = array, pending

    def wait(self) -> Array:
        if self._pending is not None:
            array, self._pending = self._pending.wait(), None
            if self._array is None:
                self._array = array
        return self._array

    def add(self, spec: TensorSpec, part: Contribution) -> None:
        """Add another gradient of the same tensor."""
        other = relayout_gradient(spec, part).wait()
        self._array = map_elementwise(spec, "add", plus, self.wait(), other)


def relayout_gradient(spec: TensorSpec, part: Contribution) -> PendingGradient:
    """Begin the relayout of a part that a rule returned, into the layout of the tensor without partial sums.

    A PendingGradient is already in this layout.
    """
    if isinstance(part, PendingGradient):
        return part
    contribution, wanted = natural(spec, part), spec.layout.summed
    if isinstance(contribution, LazyMatrix):
        return gemm_then_relayout(spec, contribution, wanted)
    if contribution.layout == wanted:
        return PendingGradient(contribution.array)
    with spec.grid.ledger.phase("relayout"):
        return PendingGradient(None, relayout(spec.grid, contribution.array, spec.shape, contribution.layout, wanted))


def gemm_then_relayout(spec: TensorSpec, product: LazyMatrix, wanted: Layout) -> PendingGradient:
    """Compute a product, and begin its relayout. Without `Overlap.oar`, wait for the relayout.

    If `Overlap._decomposes`, a reduce-scatter begins for each rank's rows. Any other relayout begins after the product.
    """
    grid, overlap = spec.grid, BackwardSync.of(spec.grid).overlap
    kind, name = route(product.layout, wanted, grid.shape)
    if kind == "reduce_scatter" and overlap._decomposes(grid.axis(name), grid.hosts):
        coming = _scattered_by_ranks(spec, product, name, wanted)
    else:
        out = spec.new(product.shape)
        product.fill(out, 0, EVERYTHING)
        with grid.ledger.phase(product.phase):
            if kind == "stay":
                coming = PendingGradient(out)
            elif kind == "all_reduce":
                coming = PendingGradient(out, grid.axis(name)._all_reduce_into(out, out))
            else:
                coming = PendingGradient(None, relayout(grid, out, spec.shape, product.layout, wanted))
    if not overlap.oar:
        coming.wait()
    return coming


def _scattered_by_ranks(spec: TensorSpec, product: LazyMatrix, name: str, wanted: Layout) -> PendingGradient:
    """Multiply the rows of other ranks first, and send the rows of each rank as soon as they have been computed."""
    grid, axis, (rows, cols) = spec.grid, spec.grid.axis(name), product.shape
    unit = unit_of(wanted.units[0], name)
    owned = [unit * units for units in part_sizes(rows // unit, axis.size)]
    nbytes = reduce_volume(owned, axis.index, cols, spec.dtype, axis.node_map).work
    work = Slab(grid.workspace.array((nbytes,), "uint8", spec.library), spec.library)
    leaving = Departures(axis, spec.new(product.shape), owned, work, spec.new((owned[axis.index], cols)))
    for start, stop in leaving.blocks:
        product.fill(leaving.partial[start:stop], 0, slice(start, stop))
        with grid.ledger.phase(product.phase):
            leaving.done()
    return PendingGradient(None, leaving)
