"""What a network learns: tensors whose gradient stays from step to step."""

from __future__ import annotations

from ..arrays import Array
from ..errors import LayoutError
from ..layout import Layout
from ..product import DistMatrix
from .compute import in_chunks
from .shard import ParameterShard
from .tensor import Node, Tensor


class Parameter(ParameterShard, Tensor):
    """A tensor that a network learns: a weight, its rows sharded over z within those of another axis, or a vector.

    name             its path in the network, as in "2.weight"
    version          counts the changes of its values
    gradient         local array, kept from step to step;   filled: whether it holds one;   synced: whether it is summed
                     over all ranks that hold other rows of the batch
    split_over_data  whether the optimizer's state, and with it the summed gradient, is split over data (ZeRO-1)
    has_state        whether an optimizer has a state for it, in its present layout

        >>> from pmm3d import Grid
        >>> with Grid(shape="fsdp") as grid:
        ...     Parameter(DistMatrix.random(grid, (4, 2), layout=Layout(("y", "z"), "x"))).gathered_layout.rows
        ('y',)
    """

    def __init__(self, value: DistMatrix):
        super().__init__(value, requires_grad=True)

    @property
    def grad(self) -> DistMatrix | None:
        return self.form.matrix(self.gradient) if self.filled else None

    @grad.setter
    def grad(self, value: DistMatrix | None) -> None:
        self.filled = self.synced = False

    def receive(self, gradient: Array) -> None:
        """Add this rank's part of a gradient, which a rule returned: of its rows of the batch, shaped like a vector's
        shard or like a weight's gathered block (see `gathered_layout`)."""

        def add(out: Array, beta: int) -> None:
            in_chunks((lambda old, new: old + new) if beta else (lambda old, new: new), out, out, gradient)

        self.tape.parallel.gradients.add(self, add)

    def assign(self, value: DistMatrix) -> None:
        """Take the values of a matrix of the same shape, in whatever layout. Collective."""
        with self.grid.together("assign", self.name, value.shape, value.dtype):
            if value.shape != self.shape or value.dtype != self.dtype:
                raise LayoutError(f"{self.name or 'the parameter'} is {self.shape} {self.dtype}; got {value.shape} "
                                  f"{value.dtype}")
        value.redistribute(self.layout, self.grid, out=self._value)
        self.version += 1

    def move(self, layout: Layout) -> None:
        """Live in another layout from now on. Collective; not once there is a gradient or a state for it."""
        with self.grid.together("move", self.name, layout):
            if self.gradient is not None or self.has_state:
                raise LayoutError(f"{self.name or 'a parameter'} has a gradient or an optimizer's state in "
                                  f"{self.layout} and cannot move to {layout} any more. Call net.settle(features) once "
                                  "the network is made, before a checkpoint is loaded, or give each layer the axis of "
                                  "its input's columns (cols=)")
        self._take(self._value.redistribute(layout))
        self.node = Node(self.form, leaf=self)
        self.version += 1
