"""Layers: each holds its parameters, spread over the grid, and turns a tensor into another one.

Any function of one tensor is a layer too (`nn.relu`). A network of one's own is a `Module` with layers as attributes
and a `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from typing import Any

from ..comm import Grid
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout, natural
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from ..product.construct import Library, Shape
from . import functional
from .arithmetic import add, cast
from .dense import ACTIVATIONS, OTHER, linear, weight_layout
from .module import Module as Module
from .module import entered
from .parameter import Making, Parameter, StandIn
from .precision import Precision
from .recompute import Recompute, Recomputed
from .seeds import Seeds, check_grid, derived
from .tensor import Tensor

Layer = Callable[..., Any]


def parameter(grid: Grid, shape: Shape, layout: Layout, *, seed: int | None = None, bound: float = 0.0,
              deviation: float | None = None, value: float = 0.0, dtype: str = "float32",
              library: Library | None = None, precision: Precision | str | None = None) -> Parameter:
    """Return a parameter of the given shape. Its elements are uniform in (value - bound, value + bound). They are the
    same on every grid. Collective.

    deviation   standard deviation of elements that are normal, with the mean `value`; None: they are uniform
    seed        of the elements; None: the next of the grid's (`nn.manual_seed`)
    precision   its types: an `nn.Precision`, or the name of one; None: the one named `dtype`

    Raises GridError if the grid leaves ranks idle, DTypeError if the library lacks a type of the precision, and
    Pmm3dError if `deviation`, `bound` or `value` is not finite, or one of the first two is negative.
    """
    precision = Precision.of(precision, dtype)
    spread = bound if deviation is None else deviation
    if not (0 <= spread < inf and isfinite(value)):
        raise Pmm3dError(f"initial values need a finite deviation or bound, at least 0, and a finite value; got "
                         f"{spread} and {value}")
    precision.check(grid.library(library))
    check_grid("parameter", grid)
    if seed is None:
        seed = Seeds.of(grid).next() if bound or deviation else 0
    making: Making = grid.attached.get(Making) or Making(grid)
    if making.stands_in:
        made: Parameter = StandIn(grid, shape, layout, precision, grid.library(library))
    else:
        with grid.ledger.holding("weights"):
            value_of = DistMatrix.random(grid, shape, seed=seed, dtype=precision.compute, layout=layout,
                                         library=library, distribution="uniform" if deviation is None else "normal")
        value_of.local[...] = value_of.local * spread + value
        made = Parameter(value_of, precision)
    making.made.append(made)
    return made


def entering(x: Tensor, weight: Parameter) -> Tensor:
    """What comes to a layer, in the type that it computes in: a batch may be of float32, or of the master's type."""
    wider = weight.precision.has_master and x.dtype in ("float32", weight.precision.master)
    return cast(x, weight.dtype) if wider else x


def _move(moved: Parameter, layout: Layout) -> None:
    if moved.layout != layout:
        moved.move(layout)


class Linear(Module):
    """x W + b; see `dense.linear` for layouts and volumes.

    inputs, outputs   columns of x and of the result
    seed              of the initial values, uniform in +-1/sqrt(inputs) as in torch; None: the next of the grid's
                      (`nn.manual_seed`)
    deviation         standard deviation of initial weights that are normal, with biases of 0; None: uniform ones
    cols              the axis that splits the columns of x, "y" or "x". An x with others is brought there. `Sequential`
                      and `Module.settle` move the layer instead, once, when the network is made
    activations       "replicated", or "sharded": the rows of the result also over the axis that is summed over; an
                      argument of the call is for this call
    precision         "bfloat16", ..., or an `nn.Precision`. x may also be of float32
    unit              columns of the result that no cut parts: those of a head. A projection to queries, keys and
                      values, head by head (outputs = heads * 3 * size, unit = 3 * size), is cut between heads
    weight            (inputs, outputs), of another layer, which this one shares, with its place: cols and unit are then
                      those of the weight; None: one of its own

    Raises LayoutError where outputs are no multiple of the unit, or for a weight of another shape or unit.

        >>> with Grid(shape="ddp") as grid:
        ...     Linear(grid, 3, 2)(DistMatrix.random(grid, (5, 3), dtype="float32")).shape
        (5, 2)
    """

    def __init__(self, grid: Grid, inputs: int, outputs: int, bias: bool = True, *, seed: int | None = None,
                 deviation: float | None = None, cols: str = "y", activations: str = "replicated", unit: int = 1,
                 weight: Parameter | None = None, dtype: str = "float32", library: Library | None = None,
                 precision: Precision | str | None = None):
        check_grid("Linear", grid)
        check_sizes("Linear", inputs=inputs, outputs=outputs, unit=unit)
        if outputs % unit:
            raise LayoutError(f"Linear: the {outputs} outputs are no multiple of the unit, the {unit} columns of one "
                              "head: pass outputs = heads * unit")
        check_activations("Linear", activations)
        self.grid, self.activations = grid, activations
        seed = Seeds.of(grid).next() if seed is None else seed
        options: dict[str, Any] = {"dtype": dtype, "library": library, "precision": precision}
        bound = inputs**-0.5
        if weight is not None:
            of_weight = unit_of(weight.layout.units[1], weight.layout.cols[0])
            if weight.shape != (inputs, outputs) or unit not in (1, of_weight):
                raise LayoutError(f"Linear: a weight of {weight.shape[0]} x {weight.shape[1]}, its columns in units of "
                                  f"{of_weight}, for {inputs} inputs and {outputs} outputs in units of {unit}")
            cols, unit = weight.layout.rows[0], of_weight
        self.weight = weight or parameter(grid, (inputs, outputs), weight_layout(cols, (1, unit)),
                                          seed=derived(seed, 0), bound=bound, deviation=deviation, **options)
        self.bias: Parameter | None = None
        if bias:
            across = Layout((), OTHER[cols], units=(1, unit))
            self.bias = parameter(grid, (1, outputs), across, seed=derived(seed, 1),
                                  bound=bound if deviation is None else 0.0, **options)

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        unit = self.weight.layout.units[1]
        if self not in placed and columns is not None and columns.cols in (("x",), ("y",)):
            [axis] = columns.cols
            inner = unit_of(columns.units[1], axis)
            _move(self.weight, weight_layout(axis, (1 if self.weight.shape[0] % inner else inner, unit)))
            if self.bias is not None:
                _move(self.bias, Layout((), OTHER[axis], units=(1, unit)))
            placed.add(self)
        return Layout((), self.weight.layout.cols, units=(1, unit))

    def forward(self, x: Tensor, activations: str | None = None) -> Tensor:
        k, units = self.weight.layout.rows[0], self.weight.layout.units
        entered(self, x, layout_of((), (k,), (), (1, units[0])))
        return linear(entering(x, self.weight), self.weight, self.bias, activations=activations or self.activations)


class RMSNorm(Module):
    """x / sqrt(mean of x^2 + eps) * gain over the columns; see `functional.rms_norm`.

        >>> with Grid(shape="ddp") as grid:
        ...     list(RMSNorm(grid, 4).matrices())
        ['gain']
    """

    def __init__(self, grid: Grid, features: int, eps: float = 1e-6, *, cols: str = "y", dtype: str = "float32",
                 library: Library | None = None, precision: Precision | str | None = None):
        check_grid(type(self).__name__, grid)
        check_sizes(type(self).__name__, features=features)
        self.grid, self.eps = grid, eps
        self.gain = parameter(grid, (1, features), Layout((), cols), value=1.0, dtype=dtype, library=library,
                              precision=precision)

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        if self not in placed and columns is not None and columns.cols:
            if self.gain.shape[1] % unit_of(columns.units[1], columns.cols[0]):
                columns = Layout((), columns.cols)
            for _, moved in self.children():
                if isinstance(moved, Parameter):
                    _move(moved, columns)
            placed.add(self)
        return self.gain.layout

    def forward(self, x: Tensor) -> Tensor:
        entered(self, x, self.gain.layout)
        return functional.rms_norm(entering(x, self.gain), self.gain, self.eps)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(variance + eps) * gain + bias over the columns; see `functional.layer_norm`.

        >>> with Grid(shape="ddp") as grid:
        ...     list(LayerNorm(grid, 4).matrices())
        ['gain', 'bias']
    """

    def __init__(self, grid: Grid, features: int, eps: float = 1e-5, *, cols: str = "y", dtype: str = "float32",
                 library: Library | None = None, precision: Precision | str | None = None):
        super().__init__(grid, features, eps, cols=cols, dtype=dtype, library=library, precision=precision)
        self.bias = parameter(grid, (1, features), Layout((), cols), dtype=dtype, library=library, precision=precision)

    def forward(self, x: Tensor) -> Tensor:
        entered(self, x, self.gain.layout)
        return functional.layer_norm(entering(x, self.gain), self.gain, self.bias, self.eps)


class Dropout(Module):
    """Zero each element with probability p while training. A mask depends on the seed, the number of the call, and
    the row and column in the whole batch. So it is the same on every grid.

    seed   of the masks; None: the next of the grid's (`nn.manual_seed`)

        >>> with Grid(shape="ddp") as grid:
        ...     Dropout(grid, 0.5, seed=0)(DistMatrix.from_function(grid, (1, 4), lambda i, j: 0 * j + 1)).gather()
        array([[2., 0., 2., 0.]])
    """

    def __init__(self, grid: Grid, p: float = 0.5, seed: int | None = None):
        check_grid("Dropout", grid)
        if not 0 <= p < 1:
            raise Pmm3dError(f"Dropout: p is a probability below 1; got {p}")
        self.grid, self.p, self.calls = grid, p, 0
        self.seed = Seeds.of(grid).next() if seed is None else seed

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        return columns

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        return functional.dropout(x, self.p, self.seed, self.calls)


class Sequential(Module):
    """Layers, or functions of one tensor, one after the other. Parameters are named "0.weight", "2.bias", ... Those of
    a layer are moved to where the layer before leaves its output; the first layer stays where it is. Several tensors,
    or a tuple that a layer returns, are the arguments of the next layer.

        >>> with Grid(shape="ddp") as grid:
        ...     list(Sequential(grid, Linear(grid, 3, 4), functional.relu, Linear(grid, 4, 2)).named_parameters())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    def __init__(self, grid: Grid, *layers: Layer):
        check_grid("Sequential", grid)
        self.grid, self.layers = grid, list(layers)
        for index, layer in enumerate(layers):
            if not callable(layer):
                raise Pmm3dError(f"Sequential: {index} is a {type(layer).__name__}, neither a layer nor a function: "
                                 "pass a layer, or a function such as nn.gelu")
        learned = {module for _, module in self.named_modules() for _, child in module.children()
                   if isinstance(child, Parameter) and child.has_state}
        self.place(None, learned)

    def numbered(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer), functions too."""
        return ((str(index), layer) for index, layer in enumerate(self.layers))

    def attributes(self) -> Iterator[tuple[str, Any]]:
        yield from self.numbered()
        yield from ((name, value) for name, value in super().attributes() if name != "layers")

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        for layer in self.layers:
            if isinstance(layer, Module):
                columns = layer.place(columns, placed)
            elif columns is not None and layer not in functional.ACTIVATIONS.values():
                columns = Layout((), columns.cols)  # a function may leave another number of columns
        return columns

    def forward(self, *inputs: Tensor) -> Any:
        for layer in self.layers:
            made: Any = layer(*inputs)
            inputs = made if isinstance(made, tuple) else (made,)
        return inputs if len(inputs) > 1 else inputs[0]


class Block(Sequential):
    """Layers of a network, numbered from `first` so that names of parameters depend neither on dropout, which has the
    number of the layer before it, nor on what is computed again.

        >>> with Grid(shape="ddp") as grid:
        ...     names = [list(MLP(grid, [3, 4, 2], dropout=p, recompute=again).named_parameters())
        ...              for p in (0, 0.5) for again in (False, True)]
        ...     names[0], names[0] == names[1] == names[2] == names[3]
        (['0.weight', '0.bias', '2.weight', '2.bias'], True)
    """

    def __init__(self, grid: Grid, *layers: Layer, first: int = 0):
        self.first = first
        super().__init__(grid, *layers)

    def numbered(self) -> Iterator[tuple[str, Layer]]:
        number = self.first
        for layer in self.layers:
            if isinstance(layer, Recompute) and isinstance(layer.module, Block):
                yield "", layer
                number = layer.module.end
            elif isinstance(layer, Dropout):
                yield f"{number - 1}.dropout", layer
            else:
                yield str(number), layer
                number += 1

    @property
    def end(self) -> int:
        """The number of the layer after these."""
        return self.first + sum(not isinstance(layer, Dropout) for layer in self.layers)


class MLP(Block):
    """Linear layers with an activation between them, none after the last.

    sizes        columns of the input, of each hidden layer, of the output
    activation   a function such as nn.gelu, or its name: "relu", "gelu", "tanh", "silu", "sigmoid"
    norm         a LayerNorm before each activation;   dropout   its probability, after each activation
    recompute    True or "full": each hidden layer keeps only its input, and the rest is computed again in the backward
                 pass; k: every k-th hidden layer does. See `Recomputed.named`
    activations  "replicated" over the axis that a layer sums over, or "sharded" over it too (sequence parallelism)
    seed         of the whole network, each layer of which has its own; None: the next of the grid's (`nn.manual_seed`)
    precision    "float32", "tf32", "bfloat16", "float16", "float64", or an `nn.Precision`; None: that of `dtype`

        >>> with Grid(shape="ddp") as grid:
        ...     MLP(grid, [8, 16, 3], functional.gelu, norm=True).size
        227
    """

    def __init__(self, grid: Grid, sizes: Sequence[int], activation: Layer | str = functional.relu, *,
                 bias: bool = True, norm: bool = False, dropout: float = 0.0, recompute: bool | int | str = False,
                 activations: str = "replicated", seed: int | None = None, dtype: str = "float32",
                 library: Library | None = None, precision: Precision | str | None = None):
        check_grid("MLP", grid)
        if len(sizes) < 2:
            raise LayoutError(f"MLP: sizes name at least the columns of the input and of the output; got {list(sizes)}")
        activation = functional.activation_named(activation) if isinstance(activation, str) else activation
        made, cols, number, policy = list[Layer](), "y", 0, Recomputed.named(recompute)
        if policy.attention:
            raise Pmm3dError('MLP: recompute="selective" is of attention, which an MLP has none of: take "full"')
        seed = Seeds.of(grid).next() if seed is None else seed
        options: dict[str, Any] = {"dtype": dtype, "library": library, "precision": precision}
        for index, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
            layers: list[Layer] = [Linear(grid, inputs, outputs, bias, seed=derived(seed, index), cols=cols,
                                          activations=activations, **options)]
            cols = OTHER[cols]
            if index < len(sizes) - 2:
                layers += [LayerNorm(grid, outputs, cols=cols, **options)] * norm + [activation]
                layers += [Dropout(grid, dropout, derived(seed, 1000 + index))] * (dropout > 0)
                layers = [Recompute(Block(grid, *layers, first=number))] if policy.includes(index) else layers
                number += 2 + norm
            made += layers
        super().__init__(grid, *made)

    @property
    def output_layout(self) -> Layout:
        """The layout of what the network gives for a batch."""
        last = [module for _, module in self.named_modules() if isinstance(module, Linear)][-1]
        (k, _), (n,), units = last.weight.layout.rows, last.weight.layout.cols, last.weight.layout.units
        return Layout(("data", "z", k) if last.activations == "sharded" else ("data", "z"), n, units=(1, units[1]))


class Residual(Module):
    """x + module(x), or x + module(x, *others).

        >>> with Grid(shape="ddp") as grid:
        ...     Residual(Dropout(grid, 0))(DistMatrix.from_function(grid, (1, 2), lambda i, j: j)).gather()
        array([[0., 2.]])
    """

    def __init__(self, module: Module):
        self.grid, self.module = module.grid, module

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        found = self.module.place(columns, placed)
        return found if columns is None else columns

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return add(x, self.module(x, *others))


def check_sizes(what: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        natural(size, f"{what}: {name} is a whole number, at least 1", 1, LayoutError)


def check_activations(what: str, activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise Pmm3dError(f'{what}: activations are "replicated" or "sharded"; got {activations!r}')
