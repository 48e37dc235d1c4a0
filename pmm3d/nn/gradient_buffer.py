"""The gradient of a parameter: its array, its current layout, and the layout that the optimizer needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ..arrays import Array, add_up, library_of
from ..comm import Feedback, Pending, assign, call
from ..errors import Pmm3dError
from ..layout import EXPERT_DATA, FIRST, Layout, is_folded, itemsize
from ..layout.layout import layout_of
from ..product.relayout import relayout
from .compute import TensorSpec
from .precision import Precision

Leaf = Any
"""A tensor that is not the result of an operation. For a Parameter, `grad_buffer` is a `GradientBuffer`."""

FAILED = (
    "backward: an earlier backward pass ended with an error and left incomplete gradients: discard them first "
    "(optimizer.zero_grad())"
)


def replica_axis(layout: Layout) -> str:
    """Axis over which the state of a parameter can be sharded: that of the ranks along data with the same shard.

    >>> replica_axis(Layout("y", "x")), replica_axis(Layout(("expert:2", "y"), "x"))
    ('data', 'expert_data')
    """
    return EXPERT_DATA if any(map(is_folded, layout.splitting)) else "data"


@dataclass(eq=False)
class GradientBuffer:
    """The gradient of a parameter. It is kept from step to step.

    of          spec of the parameter
    array       memory of the gradient; `local` is the valid part
    layout      None: there is no gradient. Else the layout of `local`; the sums over the axes in `sums` have not begun
    pending     the last collective that writes to the array
    split_over  axis over which the optimizer splits the gradient (ZeRO-1, ZeRO-2), or ""
    scattered   whether each backward pass reduce-scatters over `split_over` (ZeRO-2)
    incoming    for a scattered gradient, buffer of the contributions of the current backward pass
    is_open     whether `step` must refuse: a contribution was added under `no_sync`, and not summed since
    queues      queues of `defer_weights` that hold contributions
    scales      factors of the losses
    feedback    what compressed sums have not contained yet, or None
    apart       stage -> buffer of a tied weight for a later stage of this rank
    """

    of: TensorSpec
    precision: Precision
    array: Array = None
    layout: Layout | None = None
    pending: Pending | None = None
    split_over: str = ""
    scattered: bool = False
    incoming: GradientBuffer | None = None
    is_open: bool = False
    failed: bool = False
    queues: set[object] = field(default_factory=set)
    scales: set[float] = field(default_factory=set)
    feedback: Feedback | None = None
    apart: dict[int, GradientBuffer] = field(default_factory=dict)
    times_forgotten: int = 0

    @cached_property
    def spec(self) -> TensorSpec:
        """Spec of the gradient: the type of the gradient, and the parameter's layout."""
        return self.of.typed(self.precision.gradient)

    @cached_property
    def message(self) -> TensorSpec:
        """Spec of a contribution: the type of messages, and the parameter's layout."""
        return self.of.typed(self.precision.communication)

    @property
    def target(self) -> Layout:
        """Layout of the gradient that the optimizer needs."""
        return self.split_layout(self.split_over) if self.split_over else self.spec.layout

    @property
    def open(self) -> GradientBuffer:
        """Buffer to which contributions are added: `incoming` of a scattered gradient, else this buffer."""
        if not self.scattered:
            return self
        if self.incoming is None:
            self.incoming = GradientBuffer(self.of, self.precision, self.spec.new())
        return self.incoming

    @property
    def sums(self) -> tuple[str, ...]:
        """Axes over which the sums of the gradient have not begun."""
        return () if self.layout is None else self.layout.sums

    @property
    def local(self) -> Array:
        """The part of `array` that is this rank's part in `layout`."""
        assert self.layout is not None
        grid, home = self.spec.grid, self.spec.layout
        box = self.layout.box(self.spec.shape, grid.shape, grid.coords)
        if tuple(self.array.shape) == box.shape:
            return self.array
        return self.array[box.within(home.box(self.spec.shape, grid.shape, grid.coords))]

    def split_layout(self, axis: str) -> Layout:
        """The parameter's layout, with the rows of a matrix or the columns of a vector also split over an axis."""
        rows, cols, units = self.spec.layout.rows, self.spec.layout.cols, self.spec.layout.units
        if self.spec.is_vector:
            return layout_of(rows, (*cols, axis), (), units)
        return layout_of((*rows, axis), cols, (), units)

    def counts(self, axis: str) -> list[int]:
        """Number of elements of each part into which the axis splits the shard. Parts are consecutive."""
        if axis not in self._counts:
            dim, spec = int(self.spec.is_vector), self.spec
            width = 1 if dim else spec.local_shape[1]
            split = spec.like(spec.shape, self.split_layout(axis))
            self._counts[axis] = [part * width for part in split.counts(axis, dim)]
        return self._counts[axis]

    @cached_property
    def _counts(self) -> dict[str, list[int]]:
        return {}

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest shard of any rank."""
        return self.spec.layout.box(self.spec.shape, self.spec.grid.shape, FIRST).size * itemsize(self.spec.dtype)

    @cached_property
    def largest_share(self) -> int:
        """Bytes of the gradient on a rank, for an expert the mean over the ranks that share the experts."""
        apart = self.spec.grid.shape.expert if any(map(is_folded, self.spec.layout.rows)) else 1
        return self.largest // apart

    def wait(self) -> None:
        """Wait for the sums in progress. Raises Pmm3dError after a backward pass that ended with an error."""
        self.check()
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                pending.wait()
            except BaseException:
                self.fail()
                raise

    def check(self) -> None:
        """Raise Pmm3dError after a backward pass that ended with an error."""
        if self.failed:
            raise Pmm3dError(FAILED)

    def fail(self) -> None:
        """Mark the gradient as failed, after a backward pass or a sum that ended with an error."""
        self.failed, self.array, self.layout, self.pending, self.incoming = True, None, None, None, None
        self.is_open = False
        self.forget_feedback()

    def forget_feedback(self) -> None:
        """Discard what compressed sums have not contained yet."""
        if self.feedback is not None:
            self.feedback.forget()

    def use(self) -> None:
        """Note that a step of an optimizer used the gradient."""
        for each in (self, *self.apart.values()):
            if each.feedback is not None:
                each.feedback.commit()

    def forget(self) -> None:
        """Discard the gradient. Waits for sums in progress, because they write to the array."""
        if self.pending is not None and not self.failed:
            self.wait()
        for each in (self, *self.apart.values()):
            if each.feedback is not None and each.pending is None:
                each.feedback.undo()
        self.failed, self.layout, self.incoming, self.is_open = False, None, None, False
        self.times_forgotten += 1
        self.queues.clear()
        self.scales.clear()

    def full_array(self) -> Array:
        """Return memory for a gradient in the parameter's layout. It is reused in each step."""
        if self.array is None or tuple(self.array.shape) != self.spec.local_shape:
            self.array = self.new_array(self.spec.local_shape)
        return self.array

    def new_array(self, shape: tuple[int, int]) -> Array:
        """Return new memory of the gradient's type."""
        with self.spec.grid.ledger.holding("gradients"):
            return self.spec.library.empty(shape, self.spec.dtype)

    def accumulate(self, sums: tuple[str, ...]) -> tuple[Array, int, bool]:
        """Prepare to add a contribution with partial sums over the axes `sums`. Return (array, beta, adds).

        If `adds`, this rank computes array = beta array + contribution. If the gradient has partial sums along an axis
        and the contribution does not, only the first rank along this axis adds it.
        """
        if self.layout is None:
            self.full_array()
            self.layout, beta = self._with(sums), 0
        else:
            self._reopen(sums)
            beta = 1
        coords = self.spec.grid.coords
        return self.array, beta, not any(getattr(coords, axis) for axis in self.layout.sums if axis not in sums)

    def _with(self, sums: tuple[str, ...]) -> Layout:
        """The parameter's layout, with partial sums."""
        return layout_of(self.spec.layout.rows, self.spec.layout.cols, sums, self.spec.layout.units)

    def _reopen(self, sums: tuple[str, ...]) -> None:
        """Add axes of partial sums to the gradient. The first rank keeps the values, and the others set zeros."""
        assert self.layout is not None
        grid, before, home = self.spec.grid, self.layout, self.spec.layout
        split = [axis for axis in before.splitting if axis not in home.splitting]
        more = [axis for axis in sums if axis not in (*before.sums, *split)]
        if not more and (before.sums or not split):
            return
        self.wait()
        own, array = self.local.reshape(-1), self.full_array()
        start = sum(self.counts(split[0])[: grid.axis(split[0]).index]) if split else 0
        stop, flat = start + own.shape[0], array.reshape(-1)
        if flat.shape[0] > own.shape[0]:
            assign(grid.engine, flat[start:stop], own)
        if any(grid.axis(axis).index for axis in more):
            start = stop = 0
        assign(grid.engine, flat[:start], 0)
        assign(grid.engine, flat[stop:], 0)
        self.layout = self._with(grid.shape.in_order({*before.sums, *split, *more}))

    def note_sum(self, axis: str) -> None:
        """Note that the sum over an axis has begun."""
        self.layout = self._with(tuple([other for other in self.sums if other != axis]))

    def note_last_sum(self, scatter: str = "") -> None:
        """Note that all sums have begun. If `scatter` is an axis, the last one is a reduce-scatter over it."""
        if not self.scattered:
            self.layout = self.split_layout(scatter) if scatter else self.spec.layout
        elif self.incoming is not None:
            incoming, self.incoming = self.incoming, None
            if not scatter and incoming.layout is not None:
                incoming.note_last_sum()
                part = incoming.in_layout(self.target)
                array, beta = self.scattered_array()
                self.wait()  # because the sum of the previous pass writes to the array
                written = {"updates" if beta else "writes": [array]}
                call(self.spec.grid.engine, partial(_add, beta), array, part, **written)
        self.is_open = bool(self.sums)

    def scattered_array(self) -> tuple[Array, int]:
        """Return (array, beta) for a reduce-scatter into the target layout: array = beta array + sum."""
        grid, target = self.spec.grid, self.target
        beta = 0 if self.layout is None else 1
        shape = target.box(self.spec.shape, grid.shape, grid.coords).shape
        if beta and self.layout != target:
            self._replaced()
            self.array = self.spec.library.copy(self.in_layout(target))
        elif self.array is None or tuple(self.array.shape) != shape:
            self.array = self.new_array(shape)
        self.layout = target
        return self.array, beta

    def in_layout(self, layout: Layout) -> Array:
        """Return this rank's part of the summed gradient in a layout. Collective if the gradient has another layout."""
        self.wait()
        assert self.layout is not None
        if layout == self.layout:
            return self.local
        array = relayout(self.spec.grid, self.local, self.spec.shape, self.layout, layout).wait()
        if layout == self.spec.layout:
            self._replaced()
            self.array, self.layout = array, layout
        return array

    def _replaced(self) -> None:
        """Note that the gradient moves to other memory, which a recorded step does not repeat."""
        if (recorder := self.spec.grid.engine.recorder) is not None:
            recorder.refuse("a gradient moves to another layout")


def _add(beta: int, array: Array, part: Array) -> None:
    add_up(library_of(array), [part], array, beta)
