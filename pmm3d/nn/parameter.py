"""What a network learns: tensors whose gradient stays from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ..arrays import NumpyLibrary
from ..comm import Grid
from ..errors import DTypeError, LayoutError
from ..layout import Layout, transitions
from ..product import DistMatrix
from .compute import Form
from .contract import Part
from .gradient_buffer import GradientBuffer
from .precision import Precision
from .tape import Node
from .tensor import Tensor

Own = TypeVar("Own")


class Parameter(Tensor):
    """A tensor that a network learns, in any layout: a weight, its rows sharded over z within those of another axis; a
    vector; a table.

    precision      types of the values, the gradient and the master weights; None: `Precision.named` of its own type
    name           path in the outermost network that was asked for its parameters, such as "2.weight"
    version        number of changes of its values
    accumulated    its gradient, in the layout that it is in;   grad   the same as a DistMatrix
    requires_grad  whether backward passes compute its gradient; see `requires_grad_`
    has_state      whether an optimizer has a state for it, in its present layout
    master         of low precision: the weight that optimizers change, of which the value is the rounded one. None
                   before an optimizer made it
    whole          the grid of all ranks that hold a part of its network: `grid`, except in a `Pipeline`
    counts         whether norms count it: not if it is the copy of a weight that an earlier stage of a pipeline holds

    The next forward pass sees values that were written to `local`, to `value.local` or to an array taken from them: it
    gathers the shards again (unless in `nn.unchanged`).

        >>> from pmm3d import Grid
        >>> with Grid(shape="fsdp") as grid:
        ...     Parameter(DistMatrix.random(grid, (4, 2), layout=Layout(("y", "z"), "x"))).grad is None
        True
    """

    has_state, counts = False, True
    master: DistMatrix | None = None
    _rounded: tuple[object, ...] = ()
    """`written` when the value was last the rounded master."""
    accumulated: GradientBuffer
    whole: Grid

    def __init__(self, value: DistMatrix, precision: Precision | None = None):
        if value.layout.on(value.grid.shape).sums:
            raise LayoutError(f"a Parameter in {value.layout}: no rank has its values; "
                              "Parameter(value.redistribute(value.layout.summed))")
        self.precision = precision or Precision.named(value.dtype)
        self.precision.check(value.library)
        if self.precision.compute != value.dtype:
            raise DTypeError(f"a Parameter of {value.dtype} in a precision that computes in {self.precision.compute}")
        self.accumulated, self.whole = GradientBuffer(Form.of(value), self.precision), value.grid
        super().__init__(value, requires_grad=True)

    @property
    def requires_grad(self) -> bool:
        """Whether backward passes compute its gradient."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        self.requires_grad_(on)

    def requires_grad_(self, on: bool = True) -> Parameter:
        """Freeze the parameter (False), or let it learn again. Returns the parameter. Collective.

        Backward passes compute and sum no gradient for a frozen parameter. An optimizer leaves it as it is, and makes
        no state for it. A gradient that it has is forgotten.
        """
        with self.grid.collective_call("requires_grad_", self.name, on):
            pass
        self._learn(on)
        return self

    def _learn(self, on: bool) -> None:
        if not on:
            self.grad = self.accumulated.array = self.node = None
        elif self.node is None:
            self.node = Node(self.form, leaf=self)

    @property
    def stored(self) -> DistMatrix:
        """The value. A caller that writes to it counts up `version`."""
        return self._value

    @property
    def is_vector(self) -> bool:
        """Whether it is one row for all rows of a batch, such as a bias."""
        return self.form.is_vector

    @property
    def grad(self) -> DistMatrix | None:
        """None, or the gradient in the layout that it is in: the parameter's, also split over data for an optimizer
        that shards its state, or with the sums that `no_sync` left to be done. None after a pass that failed, too.
        Waits for sums that are under way."""
        buffer = self.accumulated
        if buffer.failed or buffer.layout is None:
            return None
        buffer.wait()
        return DistMatrix(self.grid, buffer.local, self.shape, buffer.layout)

    @grad.setter
    def grad(self, value: DistMatrix | None) -> None:
        if value is not None:
            raise LayoutError("a parameter's grad can be set to None only, which forgets it")
        self.tape.parallel.gradients.forget(self.accumulated)

    def receive(self, part: Part) -> None:
        """Take a part of the gradient; the queue of `defer_weights` may have it first."""
        parallel = self.tape.parallel
        if not self.requires_grad:
            return
        if parallel.deferred is None:
            parallel.gradients.add(self.accumulated, part)
        else:
            parallel.deferred(self, part)

    def assign(self, value: DistMatrix) -> None:
        """Take the values of a matrix of the same shape and type, in any layout. A master weight, if there is one, also
        takes them from a matrix of the master's type, with all digits. Collective."""
        with self.grid.collective_call("assign", self.name, value.shape, value.dtype):
            held = self.in_checkpoint if self.master is not None and value.dtype == self.master.dtype else self._value
            if value.shape != self.shape or value.dtype != held.dtype:
                raise LayoutError(f"{self.name or 'the parameter'} is {self.shape} {self.dtype}; got {value.shape} "
                                  f"{value.dtype}")
        value.redistribute(held.layout, self.grid, out=held)
        if held is self._value:
            self.version += 1
        else:
            self.loaded()

    @property
    def in_checkpoint(self) -> DistMatrix:
        """The matrix that a checkpoint holds: the master weight, or the value if no optimizer made a master. Call
        `loaded` after writing to it."""
        return self._value if self.master is None else self.master_in(self.master.layout)

    def master_in(self, layout: Layout) -> DistMatrix:
        """Return the master weight, of type `precision.master`, in this layout. An optimizer makes it from the value.

        The master takes over a value that was written to since it was rounded (`Tensor.written` lists what is seen)."""
        if self.master is None:
            box = layout.box(self.shape, self.grid.shape, self.grid.coords)
            with self.grid.ledger.holding("state"):
                local = self.library.empty(box.shape, self.precision.master)
            self.master, self.has_state = DistMatrix(self.grid, local, self.shape, layout), True
        elif self.master.layout != layout:
            self.master = self.master.redistribute(layout)
        if self._rounded != self.written:
            self.master.local[...] = self.shard[self.master.box.within(self.box)]
            self.rounded()
        return self.master

    def rounded(self) -> None:
        """Note that the value is now the rounded master."""
        self._rounded = self.written

    def loaded(self) -> None:
        """Take what was written to `in_checkpoint`: a master is rounded to the value. Collective."""
        if self.master is not None:
            local = self.library.astype(self.master.local, self.dtype)
            rounded = DistMatrix(self.grid, local, self.shape, self.master.layout)
            rounded.redistribute(self.layout, self.grid, out=self._value)
        self.version += 1
        if self.master is not None:
            self.rounded()

    def hold(self, value: DistMatrix, version: int) -> None:
        """Take another matrix of the same form in place of the value, and its version: for stale weights, of which each
        version is a matrix. A backward pass finds the version of its forward pass."""
        self._value, self.version = value, version

    def move(self, layout: Layout) -> None:
        """Move the parameter to another layout. Collective.

        Raises LayoutError, on every rank, once there was a gradient, or is an optimizer's state, in the present layout.
        """
        with self.grid.collective_call("move", self.name, layout):
            if self.accumulated.array is not None or self.accumulated.queues or self.has_state:
                raise LayoutError(f"{self.name or 'a parameter'} has a gradient or an optimizer's state in "
                                  f"{self.layout} and cannot move to {layout} any more. Call net.settle(features) once "
                                  "the network is made, before a checkpoint is loaded, or give each layer the axis of "
                                  "its input's columns (cols=)")
        if not transitions(self.layout, layout, self.grid.shape, self.shape):  # each rank's part stays as it is
            return self._become(DistMatrix(self.grid, self._value.local, self.shape, layout))
        with self.grid.ledger.holding("weights"):
            self._become(self._value.redistribute(layout))

    def _become(self, value: DistMatrix) -> None:
        self._take(value)
        self.node, before = Node(self.form, leaf=self) if self.requires_grad else None, self.accumulated
        self.accumulated = GradientBuffer(self.form, self.precision, split_over=before.split_over,
                                          scattered=before.scattered)
        self.version += 1


class StandIn(Parameter):
    """A parameter of a layer that another rank holds: it has a shape, a type and a layout, and one element of memory.
    Until the layer is dropped, it can be moved and assigned to; nothing is sent."""

    def __init__(self, grid: Grid, shape: tuple[int, int], layout: Layout, precision: Precision,
                 library: NumpyLibrary):
        super().__init__(_without_memory(grid, shape, layout, precision.compute, library), precision)

    def assign(self, value: DistMatrix) -> None:
        pass

    def move(self, layout: Layout) -> None:
        self._become(_without_memory(self.grid, self.shape, layout, self.dtype, self.library))


def _without_memory(grid: Grid, shape: tuple[int, int], layout: Layout, dtype: str, library: NumpyLibrary
                    ) -> DistMatrix:
    local = library.as_strided(library.empty((1, 1), dtype), layout.box(shape, grid.shape, grid.coords).shape, (0, 0))
    return DistMatrix(grid, local, shape, layout)


class Making(AbstractContextManager["Making"]):
    """As a context: counts the parameters that `nn.layers.parameter` makes on a grid.

    own    of each, whether it gets memory, else it is a `StandIn`; None: all do
    made   the parameters, in order
    """

    def __init__(self, grid: Grid, own: Sequence[bool] | None = None):
        self._grid, self._own, self.made = grid, own, list[Parameter]()

    @property
    def stands_in(self) -> bool:
        """Whether the next parameter is a StandIn."""
        number = len(self.made)
        return self._own is not None and number < len(self._own) and not self._own[number]

    def __enter__(self) -> Making:
        self._grid.attached[Making] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._grid.attached[Making]


def of_stages(part: Any, own: Own) -> list[Own]:
    """Return the values that the stages pass, in the order of the stages. A network that is not cut is one stage.
    Collective over `part.whole`.

    part   a Module, or an optimizer;   own: the value of this rank's stage
    """
    if part.whole is part.grid:
        return [own]
    passed = part.whole.comm.allgather(own if part.grid.rank == 0 else None)
    return [each for each in passed if each is not None]
