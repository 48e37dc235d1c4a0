"""The state of an optimizer: names in checkpoints, forms of state arrays, and the shard that a rank updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..arrays import Array, dtype_named
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm import Grid, Pending
from ..errors import Pmm3dError
from ..layout import Layout, itemsize, offsets
from ..layout.layout import layout_of
from .compute import PER_ELEMENT, array_namespace, stacked
from .feedback import FEEDBACK
from .gradient_buffer import replica_axis as replica_axis
from .parameter import Parameter
from .statistics import sum_over

STATE, AVERAGE = "optimizer/", "ema/"
"""Beginnings of names in a checkpoint: of state arrays of optimizers, and of averages of weights (`EMA`)."""


def is_state(name: str) -> bool:
    """Whether a matrix of this name in a checkpoint is a state array of an optimizer."""
    return name.startswith(STATE)


def is_average(name: str) -> bool:
    """Whether a matrix of this name in a checkpoint is an average of a weight."""
    return name.startswith(AVERAGE)


def average_name(parameter: str) -> str:
    """Name of the average of a parameter in a checkpoint."""
    return AVERAGE + parameter


def names_of_weights(stored: Collection[str], ema: bool) -> dict[str, str]:
    """Parameter -> name of its values in a checkpoint. ema: those of the average, if there is one."""
    weights = [name for name in stored if not name.startswith((STATE, AVERAGE, FEEDBACK))]
    return {name: average_name(name) if ema and average_name(name) in stored else name for name in weights}


def state_name(parameter: str, state: str) -> str:
    """Name of a state array of a parameter in a checkpoint."""
    return f"{STATE}{parameter}/{state}"


def note_memory(grid: Grid) -> None:
    """Record in the ledger the bytes of weights, gradients and states of all optimizers and averages of the grid, which
    `grid.attached` contains under this function."""
    held = [each for holder in grid.attached[note_memory] for each in holder._held().items()]
    own = {parameter for parameter, _ in held}
    arrays = {
        "weights": [each.shard for each in own],
        "gradients": [each.grad_buffer.array for each in own if each.grad_buffer.array is not None],
        "state": [array for _, states in held for array in states]
        + [each.master.local for each in own if each.master is not None and not each.master_is_stored]
        + [
            array
            for each in own
            for buffer in (each.grad_buffer, *each.grad_buffer.apart.values())
            if buffer.feedback
            for array in buffer.feedback.arrays
        ],
    }
    grid.ledger.memory.update((kind, sum(each.nbytes for each in held)) for kind, held in arrays.items())


class StateForm(NamedTuple):
    """Shape and type of a state array of a parameter. Its first values are zeros.

    Parameters
    ----------
    rows, cols : int or None
        None (default): as many as the parameter has, and on the same ranks. A number: all of them on each rank.
    dtype : str or None
        Element type, such as "int8". Default: the type of the master weight.

    Examples
    --------
    >>> from pmm3d.nn.optim import StateForm
    >>> row_factor, column_factor, number = StateForm(cols=1), StateForm(rows=1), StateForm(1, 1)
    >>> row_factor.shape((8, 6)), column_factor.shape((8, 6)), number.shape((8, 6))
    ((8, 1), (1, 6), (1, 1))
    """

    rows: int | None = None
    cols: int | None = None
    dtype: str | None = None

    def shape(self, whole: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the state of a parameter.

        Parameters
        ----------
        whole : tuple of int
            Rows and columns of the parameter.
        """
        return whole[0] if self.rows is None else self.rows, whole[1] if self.cols is None else self.cols

    def layout(self, of: Layout) -> Layout:
        """Layout of the state, if `of` is the layout of the part of a parameter that ranks update."""
        rows, cols = of.rows if self.rows is None else (), of.cols if self.cols is None else ()
        return layout_of(rows, cols, (), (of.units[0] if rows else 1, of.units[1] if cols else 1))


LIKE_WEIGHT = StateForm()


class Part:
    """The part of a parameter that this rank updates. It is made anew if the parameter moves to another layout.

    layout      layout of the gradient, of states and of the master weight
    is_split    whether each rank along data updates another part
    shape       rows and columns of this rank;   size   their product;   work   number of operations of an update
    slice_size  largest number of elements in a call of `update`
    is_first    whether this rank is the first of those that update these elements
    casts       whether the gradient has another type than the weight that is updated
    gradient_bytes   bytes of an element of the gradient
    is_low      whether the states have the form that `states` of the optimizer names
    staged      the master weight in memory while it is updated, if a store holds it (`Optimizer.offload`)
    """

    is_low = False
    staged: Array | None = None

    def __init__(self, parameter: Parameter, is_split: bool):
        grid, buffer = parameter.grid, parameter.grad_buffer
        self.parameter, self.spec, self.is_split = parameter, parameter.spec, is_split
        self.library, self.types = parameter.library, parameter.precision
        self._axis = replica_axis(parameter.layout)
        self.layout = buffer.split_layout(self._axis) if is_split else parameter.layout
        box = self.layout.box(parameter.shape, grid.shape, grid.coords)
        self.shape, self.size, self.work = box.shape, prod(box.shape), PER_ELEMENT * prod(self.spec.local_shape)
        self.slice_size = self.library.slice_elements or DEVICE_ELEMENTS
        self.is_first = self.layout.is_first(grid.shape.position(grid.rank))
        self.is_vector, self.has_master = parameter.is_vector, self.types.has_master
        self.casts, self.gradient_bytes = self.types.gradient != self.types.master, itemsize(buffer.spec.dtype)
        self._counts, self._own, self._within = list[int](), None, None
        self._equal: Layout | None = None
        """A layout that was found equal to `layout`."""
        if is_split:
            self._counts, index = buffer.counts(self._axis), grid.axis(self._axis).index
            self._own = slice(*offsets(self._counts)[index : index + 2])
            self._within = box.within(parameter.box)

    def forms_here(self, forms: Mapping[str, StateForm]) -> dict[str, tuple[tuple[int, int], str]]:
        """Name -> (shape, type) of this rank's part of a state."""
        made, grid = dict[str, tuple[tuple[int, int], str]](), self.parameter.grid
        for name, form in forms.items():
            shape, layout = form.shape(self.parameter.shape), form.layout(self.layout)
            dtype = dtype_named(form.dtype) if form.dtype else self.types.master
            made[name] = layout.box(shape, grid.shape, grid.coords).shape, dtype
        return made

    def gradient(self, copied: bool = False) -> Array:
        """This rank's part of the summed gradient as a flat array, or a copy of it, without waiting. Collective if the
        gradient has another layout."""
        buffer = self.parameter.grad_buffer
        array = buffer.array
        if buffer.layout is not self.layout and buffer.layout is not self._equal:
            if buffer.layout == self.layout:
                self._equal = buffer.layout
            else:
                array = buffer.in_layout(self.layout)
        own = (array if tuple(array.shape) == self.shape else array[self._within]).reshape(-1)
        return self.library.copy(own) if copied else own

    def stored(self) -> Array:
        """This rank's part of the parameter as a flat array, which may be written to."""
        value = self.parameter._value
        flat = (value._memory if value._base is None else value.local).reshape(-1)
        return flat if self._own is None else flat[self._own]

    def weight(self) -> Array:
        """This rank's part of the master weight, or of the parameter if it has none, as a flat array."""
        if self.staged is not None:
            return self.staged
        return self.parameter._master_in(self.layout).local.reshape(-1) if self.has_master else self.stored()

    def all_gather(self) -> Pending:
        """Begin to all-gather the parts that the ranks along data updated."""
        axis = self.parameter.grid.axis(self._axis)
        return axis._all_gather_into(self.stored(), self.parameter.shard.reshape(-1), self._counts)


@dataclass
class Shard:
    """The rows and columns of a parameter that this rank updates, for `Optimizer.update_shard`.

    Attributes
    ----------
    weight, gradient : Array
        Matrices of one shape, in the type of the master weight. The gradient may be changed.
    state : dict
        Name -> this rank's part of a state array.
    options : mapping
        As in `Optimizer.update`.
    shape : tuple of int
        Rows and columns of the whole parameter.

    Notes
    -----
    Arrays are of numpy, torch or cupy. Ranks that hold the same part of a parameter must compute the same update.

    Examples
    --------
    Gradient descent that divides by the root mean square of the gradient of a parameter:

    >>> import numpy as np, pmm3d
    >>> from pmm3d import nn
    >>> from pmm3d.layout import batch_layout
    >>> class Normalized(nn.optim.Optimizer):
    ...     defaults = {}
    ...     def update_shard(self, shard):
    ...         mean = shard.sum(shard.gradient**2) / (shard.shape[0] * shard.shape[1])
    ...         shard.weight[...] -= shard.options["lr"] * shard.gradient / mean**0.5
    >>> with pmm3d.Grid() as grid:
    ...     net = nn.Linear(grid, 3, 2, seed=0, bias=False)
    ...     before = net.weight.gather()
    ...     ones = pmm3d.DistMatrix.from_global(grid, np.ones((8, 3), "float32"), layout=batch_layout())
    ...     nn.sum(nn.sum(net(ones), 0), 1).backward()
    ...     Normalized(net.parameters(), 0.1).step()
    ...     bool(np.allclose(before - net.weight.gather(), 0.1))
    True
    """

    weight: Array
    gradient: Array
    state: dict[str, Array]
    options: Mapping[str, Any]
    parameter: Parameter
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole parameter."""
        return self.parameter.shape

    def sum(self, array: Array, dim: int | None = None) -> Array:
        """Sum over all ranks of the parameter, which begin with the sums of their shards. Collective.

        Parameters
        ----------
        array : Array
            Array of the shape of `weight`; or, with a dim, a factor that has this rank's rows (dim 0) or columns.
        dim : int or None
            0: sums of columns, (1, cols). 1: sums of rows, (rows, 1). None (default): the sum of all elements, (1, 1).
        """
        own = array_namespace(array).sum(self._checked(array, dim), axis=dim, keepdims=True)
        return sum_over(self.parameter.grid, own, self._axes(dim))

    def max(self, array: Array, dim: int | None = None) -> Array:
        """Largest element over all ranks of the parameter. Collective.

        Parameters
        ----------
        array, dim
            As in `sum`.
        """
        xp, own = array_namespace(array), self._checked(array, dim)
        dims = (0, 1) if dim is None else (dim,)
        if all(own.shape[each] for each in dims):
            for each in dims:
                own = xp.max(own, axis=each, keepdims=True)
        else:
            own = xp.sum(own, axis=dims, keepdims=True) - float("inf")
        for name in self._axes(dim):
            along = self.parameter.grid.axis(name)
            own = xp.max(stacked(along, own), axis=0) if along.size > 1 else own
        return own

    def _axes(self, dim: int | None) -> tuple[str, ...]:
        return self.layout.splitting if dim is None else (self.layout.rows, self.layout.cols)[dim]

    def _checked(self, array: Array, dim: int | None) -> Array:
        # A wrong shape may fit on ranks with one column.
        with self.parameter.grid.collective_call("a sum or maximum of a Shard", dim):
            if any(array.shape[each] != self.weight.shape[each] for each in ((0, 1) if dim is None else (dim,))):
                raise Pmm3dError(
                    f"a sum over {'rows and columns' if dim is None else ('rows', 'columns')[dim]} needs an array of "
                    f"this rank's part of them, {tuple(self.weight.shape)}; got {tuple(array.shape)}. The sum of a "
                    "factor needs a dim: 0 for one number a row, 1 for one number a column"
                )
        return array
