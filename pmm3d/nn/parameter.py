"""Parameters: tensors that a network learns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ..arrays import NumpyLibrary
from ..comm import Grid
from ..errors import DTypeError, LayoutError
from ..layout import Layout, transitions
from ..product import DistMatrix
from .compute import TensorSpec
from .contract import Contribution
from .gradient_buffer import GradientBuffer
from .precision import Precision
from .tape import Node
from .tensor import Tensor

Own = TypeVar("Own")


class Parameter(Tensor):
    """Tensor that a network learns.

    Parameters
    ----------
    value : DistMatrix
        The values, in any layout without partial sums. A weight has rows over y, sharded over z, and columns over x.
        Values that are stored by columns, such as a transposed view, are copied.
    precision : Precision or None
        Types of the values, the gradient and the master weight. Default: the type of `value`.

    Attributes
    ----------
    name : str
        Path in a network, such as "2.weight". `Module.named_parameters` sets it.
    grad : DistMatrix or None
        The gradient.
    requires_grad : bool
        Whether backward passes compute the gradient; see `requires_grad_`.
    version : int
        Number of known changes of the values.
    master : DistMatrix or None
        Weight of higher precision, which optimizers change. The value is the rounded master weight. It is made when
        values with more digits are assigned or loaded, or by the first step of an optimizer.
    parent_grid : Grid
        The grid of all ranks that hold a part of the network: `grid`, except in a `Pipeline`.

    Raises
    ------
    LayoutError
        For a value with partial sums.
    DTypeError
        If `value` does not have the type `precision.compute`.

    Notes
    -----
    A forward pass outside of `unchanged` gathers the shards again, so it uses values that were written to `local` or
    `value.local`.

    A network that is not trained needs no master weights: freeze it, or load its weights in `nn.no_grad(grid)`. Values
    with more digits are then rounded.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="fsdp") as grid:
    ...     nn.Parameter(DistMatrix.random(grid, (4, 2), layout=Layout(("y", "z"), "x"))).grad is None
    True
    """

    has_state, in_norm, master_is_stored = False, True, False
    master: DistMatrix | None = None
    _rounded: tuple[object, ...] = ()
    """`_written` at the time when the value was last equal to the rounded master weight."""
    grad_buffer: GradientBuffer
    parent_grid: Grid

    def __init__(self, value: DistMatrix, precision: Precision | None = None):
        if value.layout.on(value.grid.shape).sums:
            raise LayoutError(
                f"a Parameter must not have partial sums, got {value.layout}: "
                "Parameter(value.redistribute(value.layout.summed))"
            )
        if value.order != "C":  # optimizers change rows in place
            value = DistMatrix(value.grid, value.library.copy(value.local), value.shape, value.layout)
        self.precision = precision or Precision.named(value.dtype)
        self.precision._check(value.library)
        if self.precision.compute != value.dtype:
            raise DTypeError(
                f"a Parameter of {value.dtype} does not fit a precision that computes in {self.precision.compute}"
            )
        self.grad_buffer, self.parent_grid = GradientBuffer(TensorSpec.of(value), self.precision), value.grid
        super().__init__(value, requires_grad=True)

    @property
    def requires_grad(self) -> bool:
        """Whether backward passes compute the gradient."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        self.requires_grad_(on)

    def requires_grad_(self, on: bool = True) -> Parameter:
        """Freeze the parameter (False) or let it learn again, and return it. Collective.

        Parameters
        ----------
        on : bool
            Whether the parameter learns. Default: True. A frozen parameter has no gradient, and optimizers do not
            change it.
        """
        with self.grid.collective_call("requires_grad_", self.name, on):
            pass
        self._learn(on)
        return self

    def _learn(self, on: bool) -> None:
        if not on:
            self.grad = self.grad_buffer.array = self.node = None
        elif self.node is None:
            self.node = Node(self.spec, leaf=self)

    @property
    def _stored(self) -> DistMatrix:
        """The value. A caller that writes to it increases `version`."""
        return self._value

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is one row that all rows of a batch share, such as a bias."""
        return self.spec.is_vector

    @property
    def grad(self) -> DistMatrix | None:
        """The gradient, or None. Waits for sums in progress.

        It has the parameter's layout. If an optimizer shards its state, the gradient is also split over data. After a
        pass in `no_sync` it has partial sums. After a pass that failed it is None.
        """
        buffer = self.grad_buffer
        if buffer.failed or buffer.layout is None:
            return None
        buffer.wait()
        return DistMatrix(self.grid, buffer.local, self.shape, buffer.layout)

    @grad.setter
    def grad(self, value: DistMatrix | None) -> None:
        if value is not None:
            raise LayoutError("a parameter's grad can be set to None only, which discards it")
        self.tape.parallel.gradients.forget(self.grad_buffer)

    def _receive(self, part: Contribution) -> None:
        """Add a part of the gradient, or put it into the queue of `defer_weights`."""
        parallel = self.tape.parallel
        if not self.requires_grad:
            return
        if parallel.deferred is None:
            parallel.gradients.add(self.grad_buffer, part)
        else:
            parallel.deferred(self, part)

    def assign(self, value: DistMatrix) -> None:
        """Set the values from a matrix. Collective.

        Parameters
        ----------
        value : DistMatrix
            Matrix of the parameter's shape, in any layout. It has the type of the parameter or of the master weight. In
            the second case, a parameter that learns keeps all digits, in its master weight.

        Raises
        ------
        LayoutError
            On every rank, for another shape or type.
        """
        with self.grid.collective_call("assign", self.name, value.shape, value.dtype):
            if value.shape != self.shape or value.dtype not in (self.dtype, self.precision.master):
                raise LayoutError(
                    f"{self.name or 'the parameter'} is {self.shape} {self.dtype}; got {value.shape} {value.dtype}"
                )
        held = self._to_fill(value.dtype)
        value = value if value.dtype == held.dtype else value.astype(held.dtype)
        value.redistribute(held.layout, self.grid, out=held)
        self._loaded()

    def _to_fill(self, dtype: str) -> DistMatrix:
        """Matrix into which values of a type are loaded: `_in_checkpoint`. Values with more digits than the parameter's
        type make the master weight, if the parameter learns and operations are recorded. Call `_loaded` afterwards."""
        has_more = self.master is None and self.precision.has_master and dtype != self.dtype
        return (
            self._master_in(self.layout)
            if has_more and self.requires_grad and self.tape.recording
            else (self._in_checkpoint)
        )

    @property
    def _in_checkpoint(self) -> DistMatrix:
        """Matrix for a checkpoint: the master weight, or else the value. Call `_loaded` after a write to the matrix."""
        return self._value if self.master is None else self._master_in(self.master.layout)

    def _master_in(self, layout: Layout) -> DistMatrix:
        """Return the master weight in a layout. The first call makes it from the value.

        If the value was written to since the master weight was rounded (`Tensor._written`), update the master weight.
        """
        if self.master is None:
            box = layout.box(self.shape, self.grid.shape, self.grid.coords)
            with self.grid.ledger.holding("state"):
                local = self.library.empty(box.shape, self.precision.master)
            self.master = DistMatrix(self.grid, local, self.shape, layout)
        elif self.master.layout != layout:
            self.master = self.master.redistribute(layout)
        if self._rounded != self._written:
            self.master.local[...] = self.shard[self.master.box.within(self.box)]
            self._note_rounded()
        return self.master

    def _note_rounded(self) -> None:
        """Note that the value is now equal to the rounded master weight."""
        self._rounded = self._written

    def _loaded(self) -> None:
        """Round the master weight to the value, after values were written to `_in_checkpoint`. Collective."""
        if self.master is not None:
            local = self.library.astype(self.master.local, self.dtype)
            rounded = DistMatrix(self.grid, local, self.shape, self.master.layout)
            rounded.redistribute(self.layout, self.grid, out=self._value)
        self.version += 1
        if self.master is not None:
            self._note_rounded()

    def _hold(self, value: DistMatrix, version: int) -> None:
        """Replace the value and its version, for stale weights."""
        self._value, self.version = value, version

    def _move(self, layout: Layout) -> None:
        """Move the parameter to another layout. Collective.

        Raises LayoutError, on every rank, if there was a gradient or if an optimizer has a state of the parameter.
        """
        with self.grid.collective_call("move", self.name, layout):
            if self.grad_buffer.array is not None or self.grad_buffer.queues or self.has_state:
                raise LayoutError(
                    f"{self.name or 'a parameter'} has a gradient or an optimizer's state in "
                    f"{self.layout} and cannot move to {layout} any more. Call net.settle(features) once "
                    "the network is made, before a checkpoint is loaded, or give each layer the axis of "
                    "its input's columns (cols=)"
                )
        master = None if self.master is None else self._in_checkpoint.redistribute(layout)
        if not transitions(self.layout, layout, self.grid.shape, self.shape):  # the parts of the ranks are the same
            self._become(DistMatrix(self.grid, self._value.local, self.shape, layout))
        else:
            with self.grid.ledger.holding("weights"):
                self._become(self._value.redistribute(layout))
        if master is not None:
            self.master = master
            self._note_rounded()

    def _become(self, value: DistMatrix) -> None:
        self._take(value)
        self.node, before = Node(self.spec, leaf=self) if self.requires_grad else None, self.grad_buffer
        self.grad_buffer = GradientBuffer(
            self.spec, self.precision, split_over=before.split_over, scattered=before.scattered
        )
        self.version += 1


class StandIn(Parameter):
    """Parameter of a layer on another rank. It has one element of memory, and sends nothing."""

    def __init__(self, grid: Grid, shape: tuple[int, int], layout: Layout, precision: Precision, library: NumpyLibrary):
        super().__init__(_without_memory(grid, shape, layout, precision.compute, library), precision)

    def assign(self, value: DistMatrix) -> None:
        pass

    def _move(self, layout: Layout) -> None:
        self._become(_without_memory(self.grid, self.shape, layout, self.dtype, self.library))


def _without_memory(
    grid: Grid, shape: tuple[int, int], layout: Layout, dtype: str, library: NumpyLibrary
) -> DistMatrix:
    local = library.as_strided(library.empty((1, 1), dtype), layout.box(shape, grid.shape, grid.coords).shape, (0, 0))
    return DistMatrix(grid, local, shape, layout)


class ParameterCollector(AbstractContextManager["ParameterCollector"]):
    """Context that collects the parameters that `nn.layers.parameter` makes on a grid.

    own: whether each of them gets memory; a parameter without memory is a `StandIn`.
    """

    def __init__(self, grid: Grid, own: Sequence[bool] | None = None):
        self._grid, self._own, self.parameters = grid, own, list[Parameter]()

    @property
    def stands_in(self) -> bool:
        """Whether the next parameter is a StandIn."""
        number = len(self.parameters)
        return self._own is not None and number < len(self._own) and not self._own[number]

    def __enter__(self) -> ParameterCollector:
        self._grid.attached[ParameterCollector] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._grid.attached[ParameterCollector]


def of_stages(part: Any, own: Own) -> list[Own]:
    """Gather a value of each stage of a Module or an optimizer. own: value of this rank's stage. Collective."""
    if part.parent_grid is part.grid:
        return [own]
    passed = part.parent_grid.comm.allgather(own if part.grid.rank == 0 else None)
    return [each for each in passed if each is not None]
