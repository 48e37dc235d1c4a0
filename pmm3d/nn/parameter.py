"""What a network learns: tensors with a gradient that stays, and a place on every grid."""

from __future__ import annotations

from ..errors import LayoutError
from ..layout import Layout, offsets
from ..product import DistMatrix
from .parts import split_counts
from .tensor import Form, Tensor, in_chunks


class Parameter(Tensor):
    """A tensor that a network learns.

    name      its place in the network, as in "2.weight"
    version   counts the changes of its values
    gradient  local array, kept from step to step;   filled: whether it holds one;   synced: whether it is summed
              over all ranks that hold other rows of the batch
    split_over_data   whether the optimizer's state, and with it the summed gradient, is split over the data axis (ZeRO-1)
    placed    whether an optimizer has a state for it, in its present layout
    """

    def __init__(self, value: DistMatrix):
        super().__init__(value, requires_grad=True)
        self.name = ""
        self.version = 0
        self.gradient = None
        self.filled = self.synced = self.split_over_data = self.placed = False

    @property
    def is_vector(self) -> bool:
        """One row for all rows of a batch (a bias): whole on all ranks of z."""
        return not self.layout.rows

    @property
    def grad(self) -> DistMatrix | None:
        if not self.filled:
            return None
        return self.form.matrix(self.gradient)

    @grad.setter
    def grad(self, value: None) -> None:
        self.filled = self.synced = False

    def receive(self, gradient) -> None:
        """Add this rank's part of a gradient, which a rule returned: of its rows of the batch, shaped like a vector's
        local block or like a weight's gathered one (see `parts.gathered`)."""
        def add(out, beta):
            in_chunks((lambda old, new: old + new) if beta else (lambda old, new: new), out, out, gradient)

        gradients = self.tape.parallel.gradients
        (gradients.vector if self.is_vector else gradients.matrix)(self, add)

    def landing(self):
        """(array, beta): where the next part of the gradient goes, and what it is added to: beta times the array."""
        if self.gradient is None:
            self.gradient = self.library.empty(tuple(self.value.local.shape), self.dtype)
        if self.filled and self.synced:
            self._keep_once()
        beta = 1 if self.filled else 0
        self.synced, self.filled = False, True
        return self.gradient, beta

    def _keep_once(self) -> None:
        """A gradient that is summed already must count once in the next sum: one rank keeps it, the others start from
        zero."""
        flat, coords = self.gradient.reshape(-1), self.grid.coords
        starts = offsets(split_counts(self))
        own = starts[coords.data : coords.data + 2] if self.split_over_data else (0, flat.shape[0] * (coords.data == 0))
        if self.is_vector and coords.z:
            own = (0, 0)
        flat[: own[0]] = 0
        flat[own[1] :] = 0

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
        value.redistribute(self.layout, self.grid, out=self.value)
        self.version += 1

    def move(self, layout: Layout) -> None:
        """Live in another layout from now on. Collective; not once there is a gradient or a state for it."""
        with self.grid.together("move", self.name, layout):
            if self.gradient is not None or self.placed:
                raise LayoutError(
                    f"{self.name or 'a parameter'} has a gradient or an optimizer's state in {self.layout} and cannot "
                    f"move to {layout} any more. Call net.settle(features) once the network is made, before a "
                    "checkpoint is loaded, or give each layer the axis of its input's columns (cols=)"
                )
        self._value = self._value.redistribute(layout)
        self.form = self.node.form = Form.of(self._value)
        self.version += 1
