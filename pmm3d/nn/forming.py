"""How gradients and results come into the layout that is wanted: begun as soon as they are there, strip by strip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add as plus
from typing import Any

from ..arrays import Array, Slab
from ..comm import Axis, Departures, Pending
from ..layout import Layout, offsets, part_range, part_sizes
from ..layout.layout import unit_of
from ..model.schedule import all_reduce_volume, reduce_volume
from ..product.relayout import relayout
from .compute import Form
from .contract import EVERYTHING, Part, Product, natural, route
from .elementwise import map_elementwise
from .parallel import Parallel


class Coming:
    """A gradient that is there, or under way."""

    def __init__(self, array: Array, pending: Sequence[Any] = (), strips: Sequence[slice] = ()):
        self._array, self._pending, self._strips = array, list(pending), strips

    def each(self) -> Iterator[Array]:
        """Its strips of rows, each as soon as it is there."""
        for pending, strip in zip(self._pending, self._strips):
            pending.wait()
            yield self._array[strip]
        if not self._strips:
            yield self.wait()

    def wait(self) -> Array:
        for pending in self._pending:
            found = pending.wait()
            if self._array is None:
                self._array = found
        self._pending = []
        return self._array

    def add(self, form: Form, part: Part) -> None:
        """Add another gradient of the same tensor."""
        other = brought(form, part).wait()
        self._array = map_elementwise(form, "add", plus, self.wait(), other)


def brought(form: Form, part: Part) -> Coming:
    """A rule's part on its way into the layout of the tensor, whose gradient is the same on ranks that hold the same
    part of it, or a partial sum."""
    found, wanted = natural(form, part), form.layout.summed
    if isinstance(found, Product):
        return formed(form, found, wanted)
    if found.layout == wanted:
        return Coming(found.array)
    with form.grid.ledger.phase("relayout"):
        return Coming(None, [relayout(form.grid, found.array, form.shape, found.layout, wanted)])


def formed(form: Form, product: Product, wanted: Layout) -> Coming:
    """A product, on its way into a layout: in strips of rows, each begun as soon as it is computed, where that is one
    sum over one axis."""
    grid = form.grid
    kind, axis = route(product.layout, wanted, grid.shape)
    if kind == "all_reduce":
        return _summed_in_strips(form, product, axis)
    if kind == "reduce_scatter" and Parallel.of(grid).overlap.decomposes(grid.axis(axis), grid.hosts):
        return _scattered_by_ranks(form, product, axis, wanted)
    if kind == "reduce_scatter":
        return _scattered_in_strips(form, product, axis, wanted)
    out = form.new(product.shape)
    product.fill(out, 0, EVERYTHING)
    if kind == "stay":
        return Coming(out)
    with grid.ledger.phase(product.phase):
        return Coming(None, [relayout(grid, out, form.shape, product.layout, wanted)])


def _summed_in_strips(form: Form, product: Product, name: str) -> Coming:
    grid, axis, (rows, cols) = form.grid, form.grid.axis(name), product.shape
    parallel, out, sums = Parallel.of(grid), form.new(product.shape), list[Pending]()
    strips = parallel.overlap.row_strips(rows, cols, form.dtype, grid.hosts)
    size = (strips[0].stop - strips[0].start) * cols
    work = all_reduce_volume(size, form.dtype, axis.size, axis.index, axis.node_map).work
    parallel.gradients.note_work("rows", len(strips) * [work], 1)
    for strip in strips:
        product.fill(out[strip], 0, strip)
        with grid.ledger.phase(product.phase):
            sums.append(axis.all_reduce_into(out[strip], out[strip]))
        if not parallel.overlap.oar:
            sums[-1].wait()
    return Coming(out, sums, strips)


def _owned(form: Form, product: Product, axis: Axis, wanted: Layout) -> list[int]:
    """Rows of a product that each rank of the axis keeps."""
    unit = unit_of(wanted.units[0], axis.name)
    return [unit * units for units in part_sizes(product.shape[0] // unit, axis.size)]


def _scattered_by_ranks(form: Form, product: Product, name: str, wanted: Layout) -> Coming:
    """The rows of other ranks are multiplied first, and each rank's leave as soon as they are done."""
    grid, axis, cols = form.grid, form.grid.axis(name), product.shape[1]
    owned = _owned(form, product, axis, wanted)
    own = owned[axis.index]
    nbytes = reduce_volume(owned, axis.index, cols, form.dtype, axis.node_map).work
    work = Slab(grid.workspace.array((nbytes,), "uint8", form.library), form.library)
    rows = Departures(axis, form.new(product.shape), owned, work, form.new((own, cols)))
    for start, stop in rows.blocks:
        product.fill(rows.partial[start:stop], 0, slice(start, stop))
        with grid.ledger.phase(product.phase):
            rows.done()
    if not Parallel.of(grid).overlap.oar:
        rows.wait()
        return Coming(rows.out)
    return Coming(None, [rows])


def _scattered_in_strips(form: Form, product: Product, name: str, wanted: Layout) -> Coming:
    """Each strip has a piece of the rows of every rank of the axis, so that all of them receive all the time."""
    grid, axis, (rows, cols) = form.grid, form.grid.axis(name), product.shape
    parallel, sums, work, owned = Parallel.of(grid), list[Pending](), list[int](), _owned(form, product, axis, wanted)
    out, starts = form.new((owned[axis.index], cols)), offsets(owned)
    strips = len(parallel.overlap.row_strips(rows, cols, form.dtype, grid.hosts))
    for strip in range(strips):
        pieces = [part_range(size, strips, strip) for size in owned]
        counts = [stop - start for start, stop in pieces]
        partial, edges = form.new((sum(counts), cols)), offsets(counts)
        if strips == 1:
            product.fill(partial, 0, EVERYTHING)
        for rank, (start, stop) in enumerate(pieces if strips > 1 else ()):
            product.fill(partial[edges[rank] : edges[rank + 1]], 0, slice(starts[rank] + start, starts[rank] + stop))
        work.append(reduce_volume(counts, axis.index, cols, form.dtype, axis.node_map).work)
        with grid.ledger.phase(product.phase):
            sums.append(axis.reduce_scatter_into(partial, out[slice(*pieces[axis.index])], counts))
        if not parallel.overlap.oar:
            sums[-1].wait()
    parallel.gradients.note_work("rows", work, 1)
    return Coming(out, sums, [slice(*part_range(owned[axis.index], strips, strip)) for strip in range(strips)])
