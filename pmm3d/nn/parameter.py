"""What a network learns: tensors whose gradient stays from step to step, and how ranks share them."""

from __future__ import annotations

from ..arrays import Array
from ..errors import LayoutError
from ..layout import FIRST, Layout, itemsize, offsets, part_sizes
from ..product import DistMatrix
from .compute import in_chunks
from .tensor import Node, Tensor


class Parameter(Tensor):
    """A tensor that a network learns: a weight, its rows sharded over z within those of another axis, or a vector.

    name             its path in the network, as in "2.weight"
    version          counts the changes of its values
    gradient         local array, kept from step to step;   filled: whether it holds one;   synced: whether it is summed
                     over all ranks that hold other rows of the batch
    split_over_data  whether the optimizer's state, and with it the summed gradient, is split over data (ZeRO-1)
    has_state        whether an optimizer has a state for it, in its present layout

        >>> from pmm3d import Grid, Layout
        >>> with Grid(shape="fsdp") as grid:
        ...     Parameter(DistMatrix.random(grid, (4, 2), layout=Layout(("y", "z"), "x"))).gathered_layout.rows
        ('y',)
    """

    def __init__(self, value: DistMatrix):
        self.name, self.version = "", 0
        self.gradient: Array = None
        self.filled = self.synced = self.split_over_data = self.has_state = False
        super().__init__(value, requires_grad=True)

    @property
    def is_vector(self) -> bool:
        """One row for all rows of a batch (a bias): whole on all ranks of z."""
        return not self.layout.rows

    @property
    def gathered_layout(self) -> Layout:
        """Of a weight once its shards along z are together."""
        return Layout(self.layout.rows[:-1], self.layout.cols)

    def z_counts(self) -> list[int]:
        """Rows of a weight's gathered block that each rank along z holds."""
        rows, _ = self.gathered_layout.box(self.shape, self.grid.shape, self.grid.coords).shape
        return part_sizes(rows, self.grid.z.size)

    def data_counts(self) -> list[int]:
        """Elements of the shard in each part that the data axis splits it into, one after the other."""
        rows, cols = self._value.local.shape
        if self.is_vector:
            return part_sizes(cols, self.grid.data.size)
        return [part * cols for part in part_sizes(rows, self.grid.data.size)]

    def largest(self, layout: Layout) -> int:
        """Bytes of the largest rank's shard in a layout."""
        return layout.box(self.shape, self.grid.shape, FIRST).size * itemsize(self.dtype)

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

        gradients = self.tape.parallel.gradients
        (gradients.vector if self.is_vector else gradients.matrix)(self, add)

    def landing(self) -> tuple[Array, int]:
        """(array, beta): where the next part of the gradient goes, and what it is added to: beta times the array."""
        if self.gradient is None:
            self.gradient = self.library.empty(tuple(self._value.local.shape), self.dtype)
        if self.filled and self.synced:
            self._keep_once()
        beta = int(self.filled)
        self.synced, self.filled = False, True
        return self.gradient, beta

    def _keep_once(self) -> None:
        """A gradient that is summed already must count once in the next sum: one rank keeps it, the others start from
        zero."""
        flat, index = self.gradient.reshape(-1), self.grid.data.index
        start, stop = 0, flat.shape[0] * (index == 0)
        if self.split_over_data:
            start, stop = offsets(self.data_counts())[index : index + 2]
        if self.is_vector and self.grid.z.index:
            start = stop = 0
        flat[:start] = 0
        flat[stop:] = 0

    def split(self) -> Layout:
        """The layout if the data axis splits it too: the rows of a matrix, the columns of a vector."""
        if self.is_vector:
            return Layout(self.layout.rows, (*self.layout.cols, "data"))
        return Layout((*self.layout.rows, "data"), self.layout.cols)

    def assign(self, value: DistMatrix) -> None:
        """Take the values of a matrix of the same shape, in whatever layout. Collective."""
        with self.grid.together("assign", self.name, value.shape, value.dtype):
            if value.shape != self.shape or value.dtype != self.dtype:
                raise LayoutError(
                    f"{self.name or 'the parameter'} is {self.shape} {self.dtype}; got {value.shape} {value.dtype}"
                )
        value.redistribute(self.layout, self.grid, out=self._value)
        self.version += 1

    def move(self, layout: Layout) -> None:
        """Live in another layout from now on. Collective; not once there is a gradient or a state for it."""
        with self.grid.together("move", self.name, layout):
            if self.gradient is not None or self.has_state:
                raise LayoutError(
                    f"{self.name or 'a parameter'} has a gradient or an optimizer's state in {self.layout} and cannot "
                    f"move to {layout} any more. Call net.settle(features) once the network is made, before a "
                    "checkpoint is loaded, or give each layer the axis of its input's columns (cols=)"
                )
        self._take(self._value.redistribute(layout))
        self.node = Node(self.form, leaf=self)
        self.version += 1
