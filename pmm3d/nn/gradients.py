"""Accumulation of the gradients of parameters, and the start of their sums over ranks with different rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..arrays import Array, add_up, by_rows, library_of
from ..arrays.workspace import Ticket
from ..comm import Axis, Engine, Grid, Pending, call
from ..layout import Layout, itemsize
from ..product.relayout import relayout
from .compute import TensorSpec
from .contract import EVERYTHING, Contribution, Gradient, LazyMatrix, accumulation, natural
from .data_parallel import IN_FLIGHT, PRODUCT_AXES, GradientSums
from .gradient_buffer import GradientBuffer
from .overlap import Overlap


class Gradients:
    """The gradients of a grid's parameters.

    A contribution is relaid out into the accumulation layout (for a weight, by a reduce-scatter over z) and added. The
    remaining sums produce the gradient in its target layout. They begin when the gradient has all its contributions,
    at the latest at the end of the pass. `no_sync` leaves them to a later pass. A pass does not wait for them.
    """

    def __init__(self, grid: Grid):
        self._grid, self._sums, self._partials = grid, GradientSums(grid), Partials(grid)
        self._open: dict[GradientBuffer, None] = {}
        """Gradients whose sums have not begun, in the order of their first contribution."""
        self.begin(True, Overlap(), Counter(), None)

    def begin(
        self,
        sync: bool,
        overlap: Overlap,
        uses: Counter[GradientBuffer],
        agreed: Callable[[], None] | None,
        compression: str = "",
    ) -> None:
        """Begin a backward pass. uses: number of contributions to each gradient; compression: of their sums over data.

        `agreed` is called before the first collective of the pass. It raises an error if ranks sum different gradients.
        """
        self._sync, self._overlap, self._sums.overlap, self._left = sync, overlap, overlap, Counter(uses)
        self._sums.compression = compression
        self._grid.engine.before_next = agreed

    def add(self, buffer: GradientBuffer, part: Contribution) -> None:
        """Add a contribution to a gradient."""
        buffer.check()
        contribution = natural(buffer.of, part)
        layout, kind, axis = accumulation(contribution.layout, buffer.spec.layout, self._grid.shape)
        self._sums.flush(buffer)
        self._open[buffer], buffer.is_open = None, True
        to = buffer.open
        out, beta, adds = to.accumulate(layout.sums)
        if kind == "stay" and adds:
            to.wait()
            fill(self._grid.engine, contribution, out, beta)
        elif kind == "reduce_scatter" and adds:
            self._reduce_scatter(to, contribution, self._grid.axis(axis), out, beta)
        else:
            self._relayout(to, contribution, layout, beta, adds)
        self._left[buffer] -= 1
        complete = not self._left[buffer] and self._sums_now(buffer) and not {*PRODUCT_AXES} & {*to.sums}
        if self._overlap.buckets and complete:
            self._sums.put(buffer)
            del self._open[buffer]

    def absorbed(self, buffer: GradientBuffer) -> None:
        """Note that the caller added a contribution to another one, which `add` gets later."""
        self._left[buffer] -= 1

    def _sums_now(self, buffer: GradientBuffer) -> bool:
        """Whether the sums of a gradient begin in this pass. For a scattered gradient (ZeRO-2), in every pass."""
        return buffer.scattered or (self._sync and not buffer.queues)

    def _reduce_scatter(
        self, to: GradientBuffer, part: Gradient | LazyMatrix, axis: Axis, out: Array, beta: int
    ) -> None:
        cols, counts = out.shape[1], to.spec.counts(axis.name)
        if not sum(counts):
            return
        partial = self._partials.next_array(to.message, (sum(counts), cols))
        fill(self._grid.engine, part, partial, 0)
        with self._grid.ledger.phase("reduce dW"):
            to.pending = axis._reduce_scatter_into(
                partial, out, counts, beta, after=[] if to.pending is None else [to.pending]
            )
        self._partials.busy(to.pending)
        if not self._overlap.ors:
            to.pending.wait()

    def _relayout(self, to: GradientBuffer, part: Gradient | LazyMatrix, layout: Layout, beta: int, adds: bool) -> None:
        """Relay out a contribution into a new array, and add it to the gradient if `adds`."""
        spec = to.message
        array = None if isinstance(part, LazyMatrix) else part.array
        if array is None or spec.dtype != to.of.dtype:
            array = spec.new(part.shape if isinstance(part, LazyMatrix) else tuple(part.array.shape))
            fill(self._grid.engine, part, array, 0)
        with self._grid.ledger.phase("relayout"):
            moved = relayout(self._grid, array, spec.shape, part.layout, layout).wait()
        to.wait()
        if adds:
            fill(self._grid.engine, Gradient(moved, layout), to.array, beta)

    def finish(self) -> None:
        """End a backward pass: begin the sums that have not begun, without waiting for them."""
        self._grid.engine.prepare_next()
        ready = [buffer for buffer in self._open if self._sums_now(buffer)]
        axes = {axis for buffer in ready for axis in buffer.open.sums}
        for name in PRODUCT_AXES:
            if name in axes:
                self._sums.start_sums(name, ready)
        for buffer in ready:
            self._sums.put(buffer)
        self._sums.flush()
        for buffer in ready:
            del self._open[buffer]
        self._left.clear()

    def wait_for_partials(self) -> None:
        """Wait until the memory of contributions is free, before a recorded step writes to it."""
        self._partials.wait()

    def forget(self, *buffers: GradientBuffer) -> None:
        """Discard gradients."""
        for buffer in buffers:
            if (
                buffer.layout is not None
                or buffer.pending is not None
                or buffer.incoming is not None
                or buffer.failed
                or buffer.is_open
                or buffer.queues
                or buffer.scales
            ):
                buffer.forget()
            self._open.pop(buffer, None)

    def abandon(self) -> None:
        """End a pass after an error. Mark all gradients to which it added, or would have added, as failed."""
        for buffer in (*self._left, *self._open, *self._sums.empty()):
            buffer.fail()
        self._open = {}
        self.begin(self._sync, self._overlap, Counter(), None)


def fill(engine: Engine, part: Gradient | LazyMatrix, out: Array, beta: int) -> None:
    """Compute out = beta out + part."""
    if isinstance(part, LazyMatrix):
        part.fill(out, beta, EVERYTHING)
    elif beta:
        call(engine, _added, out, part.array, updates=[out])
    else:
        call(engine, _copied, out, part.array, writes=[out])


def _added(out: Array, array: Array) -> None:
    add_up(library_of(out), [out, array], out)


def _copied(out: Array, array: Array) -> None:
    by_rows(library_of(out), lambda new: new, out, array, name="copy")


class Partials:
    """Two alternating arrays for weight gradients before their reduce-scatter.

    With a fixed number of arrays, the memory does not depend on the speed of the network. Memory of a recorded step is
    not given back, because later steps write to the same addresses.
    """

    def __init__(self, grid: Grid):
        self._grid, self._turn = grid, 0
        self._tickets: list[Ticket | None] = [None] * IN_FLIGHT
        self._sums: list[Pending | None] = [None] * IN_FLIGHT
        self._recorded: list[Ticket] = []

    def next_array(self, spec: TensorSpec, shape: tuple[int, int]) -> Array:
        """Return an array with arbitrary contents. It is reused after the collective that is passed to `busy`."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        ticket, pending = self._tickets[self._turn], self._sums[self._turn]
        if pending is not None:
            pending.wait()
        nbytes, library = shape[0] * shape[1] * itemsize(spec.dtype), spec.library
        if ticket is None or ticket.pool.memory != library.memory or ticket.flat.shape[0] < nbytes:
            if ticket is not None and not any(ticket is each for each in self._recorded):
                self._grid.workspace.give(ticket)
            _, ticket = self._grid.workspace.take((nbytes,), "uint8", library)
        self._tickets[self._turn], self._sums[self._turn] = ticket, None
        if self._grid.engine.recorder is not None and not any(ticket is each for each in self._recorded):
            self._recorded.append(ticket)
        return library.view(ticket.flat, shape, spec.dtype)

    def wait(self) -> None:
        """Wait for the collectives that read the arrays."""
        for pending in self._sums:
            if pending is not None:
                pending.wait()

    def busy(self, pending: Pending) -> None:
        """Reserve the last array of `next_array` until this collective is complete."""
        self._sums[self._turn] = pending
