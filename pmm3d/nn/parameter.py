"""What a network learns: tensors whose gradient stays from step to step."""

from __future__ import annotations

from weakref import ref

from ..arrays import Array
from ..comm import Axis
from ..errors import LayoutError
from ..layout import FIRST, Layout, itemsize, part_sizes
from ..product import DistMatrix
from .contract import Part
from .gradients import Accumulated, State
from .tape import Node
from .tensor import Tensor


class Parameter(Tensor):
    """A tensor that a network learns, in any layout: a weight, its rows sharded over z within those of another axis; a
    vector; a table.

    name         its path in the network, as in "2.weight"
    version      counts the changes of its values
    accumulated  its gradient, and how far its sums are;   grad   the same as a DistMatrix
    has_state    whether an optimizer has a state for it, in its present layout

    What is written to `local` or `value.local`, or to an array that was taken from them, counts from the next pass on:
    once they were handed out, the shards are gathered anew in each.

        >>> from pmm3d import Grid
        >>> with Grid(shape="fsdp") as grid:
        ...     Parameter(DistMatrix.random(grid, (4, 2), layout=Layout(("y", "z"), "x"))).gathered_layout.rows
        ('y',)
    """

    name = ""
    version = 0
    has_state = handed_out = False

    def __init__(self, value: DistMatrix):
        self.accumulated = Accumulated(ref(self))
        self._owners: set[bool] = set()
        super().__init__(value, requires_grad=True)

    @property
    def value(self) -> DistMatrix:
        self.handed_out = True
        return self._value

    @property
    def stored(self) -> DistMatrix:
        """The value, to read from, or to write to by who counts up `version`."""
        return self._value

    @property
    def shard(self) -> Array:
        """The shard, as `stored`."""
        return self._value.local

    @property
    def is_vector(self) -> bool:
        """One row for all rows of a batch: a bias."""
        return self.shape[0] == 1 and not self.layout.rows

    @property
    def gathered_layout(self) -> Layout:
        """Of a weight once its shards along z are together."""
        return Layout(tuple(axis for axis in self.layout.rows if axis != "z"), self.layout.cols)

    @property
    def split_layout(self) -> Layout:
        """If the data axis splits it too: the rows of a matrix, the columns of a vector."""
        rows, cols = self.layout.rows, self.layout.cols
        return Layout(rows, (*cols, "data")) if self.is_vector else Layout((*rows, "data"), cols)

    def row_counts(self, axis: Axis) -> list[int]:
        """Rows that each rank along an axis holds, the last one that splits the rows, of all that they hold."""
        outer = Layout(tuple(name for name in self.layout.rows if name != axis.name), self.layout.cols)
        rows, _ = outer.box(self.shape, self.grid.shape, self.grid.coords).shape
        return part_sizes(rows, axis.size)

    def data_counts(self) -> list[int]:
        """Elements of the shard in each part that the data axis splits it into, one after the other."""
        rows, cols = self.shard.shape
        size, width = (cols, 1) if self.is_vector else (rows, cols)
        return [part * width for part in part_sizes(size, self.grid.data.size)]

    def largest(self, layout: Layout) -> int:
        """Bytes of the largest rank's shard in a layout."""
        return layout.box(self.shape, self.grid.shape, FIRST).size * itemsize(self.dtype)

    def owned(self, split: bool) -> None:
        """An optimizer changes it from now on, each rank along data its own part only (split) or the whole shard. The
        sum of gradients is split over data if no optimizer needs it whole."""
        self._owners.add(split)

    @property
    def wants_split(self) -> bool:
        return self._owners == {True}

    @property
    def grad(self) -> DistMatrix | None:
        """None, or the gradient in the layout that it is in: the parameter's, also split over data for an optimizer
        that shards its state, or with the sums that `no_sync` left to be done."""
        record = self.accumulated
        if record.state is State.EMPTY:
            return None
        if record.state is State.OPEN:
            return DistMatrix(self.grid, record.array, self.shape, Layout(self.layout.rows, self.layout.cols, record.sums))
        box = record.layout.box(self.shape, self.grid.shape, self.grid.coords)
        return DistMatrix(self.grid, record.array[box.within(self.box)], self.shape, record.layout)

    @grad.setter
    def grad(self, value: DistMatrix | None) -> None:
        if value is not None:
            raise LayoutError("a parameter's grad can be set to None only, which forgets it")
        self.accumulated.state = State.EMPTY

    def receive(self, part: Part) -> None:
        """Take a part of the gradient; the queue of `defer_weights` may have it first."""
        parallel = self.tape.parallel
        if parallel.deferred is None:
            parallel.gradients.add(self, part)
        else:
            parallel.deferred(self, part)

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
            if self.accumulated.array is not None or self.has_state:
                raise LayoutError(f"{self.name or 'a parameter'} has a gradient or an optimizer's state in "
                                  f"{self.layout} and cannot move to {layout} any more. Call net.settle(features) once "
                                  "the network is made, before a checkpoint is loaded, or give each layer the axis of "
                                  "its input's columns (cols=)")
        self._take(self._value.redistribute(layout))
        self.node = Node(self.form, leaf=self)
        self.version += 1
