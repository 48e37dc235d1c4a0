"""Layers: each holds its parameters, spread over the grid, and turns a tensor into another one.

Any function of one tensor is a layer too (`nn.relu`). A network of one's own is a `Module` with layers as attributes
and a `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, random
from ..comm import Grid
from ..errors import GridError, LayoutError, NoGridError, Pmm3dError
from ..layout import Layout, batch_layout
from ..product import DistMatrix
from ..product.matrix import Library, Shape
from . import functional
from .arithmetic import add
from .dense import ACTIVATIONS, OTHER, linear, weight_layout
from .parameter import Parameter
from .printed import printed
from .tape import Tape, no_grad, outside, propagate
from .tensor import Tensor, as_tensor

Layer = Callable[[Tensor], Tensor]
State = tuple[dict[str, int], "dict[Module, bool]"]
"""Of a network: `Module.random_state`, and which modules train."""


class Module:
    """A part of a network. Subclasses set `grid`, have parameters and modules as attributes (or in lists), and
    define forward(x: Tensor) -> Tensor.

    training   whether dropout acts; see `train` and `evaluating`
    calls      only of a layer that draws random numbers: how often it was called, which is all they depend on

        >>> with Grid(shape="ddp") as grid:
        ...     list(Residual(Linear(grid, 3, 3)).named_parameters())
        ['module.weight', 'module.bias']
    """

    grid: Grid
    training = True
    calls: int

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "grid":
                raise NoGridError(f"{type(self).__name__} does not say on which grid it is: set self.grid = grid in "
                                  "its __init__")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        """The layers as a tree, with sizes and layouts; the number of parameters last."""
        return printed(self)

    def __call__(self, x: Tensor | DistMatrix) -> Tensor:
        """The output for a batch: a Tensor or DistMatrix of shape (m, features)."""
        x = as_tensor(x)
        out = self.forward(x)
        if x.tape.inspect is not None:
            x.tape.inspect(self, out)
        return out

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what it computes: define forward(self, x)")

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """(name, module or parameter) of the attributes, lists with their indices."""
        for name, value in vars(self).items():
            items = enumerate(value) if isinstance(value, (list, tuple)) else ()
            for path, item in [(name, value), *((f"{name}.{index}", item) for index, item in items)]:
                if isinstance(item, (Module, Parameter)):
                    yield path, item

    def shown(self) -> Iterator[tuple[str, Any]]:
        """(name, part) of what a print of the network shows."""
        return self.children()

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(name, module) of this one and all below it."""
        yield prefix, self
        for name, child in self.children():
            if isinstance(child, Module):
                yield from child.named_modules(f"{prefix}.{name}".lstrip("."))

    def named_parameters(self) -> dict[str, Parameter]:
        """Name -> parameter, in order; parameters learn their names here. One used twice has its first name."""
        named: dict[Parameter, str] = {}
        for prefix, module in self.named_modules():
            for name, child in module.children():
                if isinstance(child, Parameter) and child not in named:
                    named[child] = child.name = f"{prefix}.{name}".lstrip(".")
        return {name: parameter for parameter, name in named.items()}

    def parameters(self) -> list[Parameter]:
        return list(self.named_parameters().values())

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> values of the parameters, as a checkpoint takes them. To be read; see `loaded`."""
        return {name: parameter.stored for name, parameter in self.named_parameters().items()}

    def loaded(self) -> None:
        """To be called once the values in `matrices` were written to."""
        for parameter in self.parameters():
            parameter.version += 1

    def train(self, on: bool = True) -> Module:
        """Whether dropout acts from now on; returns the module."""
        for _, module in self.named_modules():
            module.training = on
        return self

    @contextmanager
    def evaluating(self) -> Iterator[Module]:
        """In this context nothing is dropped out and nothing is noted for a backward pass."""
        before = {module: module.training for _, module in self.named_modules()}
        self.train(False)
        try:
            with no_grad(self.grid):
                yield self
        finally:
            for module, training in before.items():
                module.training = training

    def settle(self, features: int, dtype: str = "float32", library: Library = "numpy") -> Tensor:
        """Run on one row of zeros, so that every layer has the layout of what comes in; returns the output, in the
        layout of any batch's. Collective; before loading a checkpoint into one's own network."""
        row = DistMatrix.from_function(self.grid, (1, features), lambda i, j: 0 * (i + j), dtype=dtype,
                                       layout=batch_layout("y"), library=library)
        with self.evaluating():
            return self(row)

    def random_state(self) -> dict[str, int]:
        """Name -> how often each layer with random numbers was called; JSON-able. All that their numbers depend on."""
        return {name: module.calls for name, module in self.named_modules() if hasattr(module, "calls")}

    def set_random_state(self, state: dict[str, int]) -> None:
        for name, module in self.named_modules():
            if name in state:
                module.calls = state[name]

    @property
    def size(self) -> int:
        """Number of parameters of the whole network."""
        return sum(rows * cols for rows, cols in (parameter.shape for parameter in self.parameters()))


def parameter(grid: Grid, shape: Shape, layout: Layout, *, seed: int = 0, bound: float = 0.0, value: float = 0.0,
              dtype: str = "float32", library: Library = "numpy") -> Parameter:
    """Uniform in (-bound, bound) about `value`; the same numbers on every grid. Collective.

    Raises GridError if the grid leaves ranks idle.
    """
    if grid.size != grid.shape.size:
        raise GridError(f"grid {grid.shape} leaves ranks of {grid.size} idle; a network needs a grid of all ranks")
    with grid.ledger.holding("weights"):
        made = DistMatrix.random(grid, shape, seed=seed, dtype=dtype, layout=layout, library=library)
    made.local[...] = made.local * bound + value
    return Parameter(made)


class Linear(Module):
    """x W + b; see `functional.linear` for layouts and volumes.

    inputs, outputs   columns of x and of the result
    seed              of the initial values, uniform in +-1/sqrt(inputs) as in torch; give each layer its own
    cols              the axis that splits the columns of x. If x comes with another one the first time, the layer moves
    activations       "replicated", or "sharded": the rows of the result also over the axis that is summed over
    unit              columns of the result that no cut parts: those of a head. A projection to queries, keys and
                      values, head by head (outputs = heads * 3 * size, unit = 3 * size), is cut between heads

    Raises LayoutError where outputs are no multiple of the unit.

        >>> with Grid(shape="ddp") as grid:
        ...     Linear(grid, 3, 2)(DistMatrix.random(grid, (5, 3), dtype="float32")).shape
        (5, 2)
    """

    def __init__(self, grid: Grid, inputs: int, outputs: int, bias: bool = True, *, seed: int = 0, cols: str = "y",
                 activations: str = "replicated", unit: int = 1, dtype: str = "float32", library: Library = "numpy"):
        _check_sizes("Linear", inputs=inputs, outputs=outputs, unit=unit)
        if outputs % unit:
            raise LayoutError(f"Linear: the {outputs} outputs are no multiple of the unit, the {unit} columns of one "
                              "head: pass outputs = heads * unit")
        if activations not in ACTIVATIONS:
            raise Pmm3dError(f'Linear: activations are "replicated" or "sharded"; got {activations!r}')
        self.grid, self.activations, self._has_input = grid, activations, False
        options: dict[str, Any] = {"bound": inputs**-0.5, "dtype": dtype, "library": library}
        self.weight = parameter(grid, (inputs, outputs), weight_layout(cols, (1, unit)), seed=derived(seed, 0),
                                **options)
        self.bias: Parameter | None = None
        if bias:
            across = Layout((), OTHER[cols], units=(1, unit))
            self.bias = parameter(grid, (1, outputs), across, seed=derived(seed, 1), **options)

    def forward(self, x: Tensor) -> Tensor:
        """The first input's columns say where the layer is from then on."""
        (cols, first), self._has_input = (x.layout.cols, not self._has_input), True
        units = x.layout.units[1], self.weight.layout.units[1]
        if first and len(cols) == 1 and cols[0] in OTHER and self.weight.layout != weight_layout(cols[0], units):
            self.weight.move(weight_layout(cols[0], units))
            if self.bias is not None:
                self.bias.move(Layout((), OTHER[cols[0]], units=(1, units[1])))
        return linear(x, self.weight, self.bias, activations=self.activations)


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * gain + bias over the columns; see `functional.layer_norm`.

        >>> with Grid(shape="ddp") as grid:
        ...     list(LayerNorm(grid, 4).matrices())
        ['gain', 'bias']
    """

    def __init__(self, grid: Grid, features: int, eps: float = 1e-5, *, cols: str = "y", dtype: str = "float32",
                 library: Library = "numpy"):
        _check_sizes("LayerNorm", features=features)
        self.grid, self.eps, self._has_input = grid, eps, False
        self.gain = parameter(grid, (1, features), Layout((), cols), value=1.0, dtype=dtype, library=library)
        self.bias = parameter(grid, (1, features), Layout((), cols), dtype=dtype, library=library)

    def forward(self, x: Tensor) -> Tensor:
        wanted = Layout((), x.layout.cols, units=(1, x.layout.units[1]))
        first, self._has_input = not self._has_input, True
        if first and wanted.cols and wanted != self.gain.layout:
            self.gain.move(wanted)
            self.bias.move(wanted)
        return functional.layer_norm(x, self.gain, self.bias, self.eps)


class Dropout(Module):
    """Zeroes each element with probability p while training. Masks depend on the seed, the number of the call, and
    the row and column in the whole batch, so they are the same on every grid.

        >>> with Grid(shape="ddp") as grid:
        ...     Dropout(grid, 0.5)(DistMatrix.from_function(grid, (1, 4), lambda i, j: 0 * j + 1)).gather()
        array([[2., 0., 2., 0.]])
    """

    def __init__(self, grid: Grid, p: float = 0.5, seed: int = 0):
        if not 0 <= p < 1:
            raise Pmm3dError(f"Dropout: p is a probability below 1; got {p}")
        self.grid, self.p, self.seed, self.calls = grid, p, seed, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        return functional.dropout(x, self.p, self.seed, self.calls)


class Sequential(Module):
    """Layers, or functions of one tensor, one after the other. Parameters are named "0.weight", "2.bias", ...

        >>> with Grid(shape="ddp") as grid:
        ...     list(Sequential(grid, Linear(grid, 3, 4), functional.relu, Linear(grid, 4, 2)).named_parameters())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    def __init__(self, grid: Grid, *layers: Layer):
        self.grid, self.layers = grid, list(layers)
        for index, layer in enumerate(layers):
            if not callable(layer):
                raise Pmm3dError(f"Sequential: {index} is a {type(layer).__name__}, neither a layer nor a function")

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        return ((name, layer) for name, layer in self.shown() if isinstance(layer, Module))

    def shown(self) -> Iterator[tuple[str, Any]]:
        return ((str(index), layer) for index, layer in enumerate(self.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MLP(Sequential):
    """Linear layers with an activation between them, none after the last.

    sizes        columns of the input, of each hidden layer, of the output
    activation   a function such as nn.gelu
    norm         a LayerNorm before each activation;   dropout   its probability, after each activation
    recompute    keep only each hidden layer's input, and compute the rest again in the backward pass
    activations  "replicated" over the axis that a layer sums over, or "sharded" over it too (sequence parallelism)

        >>> with Grid(shape="ddp") as grid:
        ...     MLP(grid, [8, 16, 3], functional.gelu, norm=True).size
        227
    """

    def __init__(self, grid: Grid, sizes: Sequence[int], activation: Layer = functional.relu, *, bias: bool = True,
                 norm: bool = False, dropout: float = 0.0, recompute: bool = False,
                 activations: str = "replicated", seed: int = 0, dtype: str = "float32",
                 library: Library = "numpy"):
        if len(sizes) < 2:
            raise LayoutError(f"MLP: sizes name at least the columns of the input and of the output; got {list(sizes)}")
        made, cols = list[Layer](), "y"
        options: dict[str, Any] = {"dtype": dtype, "library": library}
        for index, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
            layers: list[Layer] = [Linear(grid, inputs, outputs, bias, seed=derived(seed, index), cols=cols,
                                          activations=activations, **options)]
            cols = OTHER[cols]
            if index < len(sizes) - 2:
                layers += [LayerNorm(grid, outputs, cols=cols, **options)] * norm + [activation]
                layers += [Dropout(grid, dropout, derived(seed, 1000 + index))] * (dropout > 0)
                layers = [Recompute(Sequential(grid, *layers))] if recompute else layers
            made += layers
        super().__init__(grid, *made)

    @property
    def output_layout(self) -> Layout:
        """The layout of what the network gives for a batch."""
        last = [module for _, module in self.named_modules() if isinstance(module, Linear)][-1]
        (k, _), (n,), units = last.weight.layout.rows, last.weight.layout.cols, last.weight.layout.units
        return Layout(("data", "z", k) if last.activations == "sharded" else ("data", "z"), n, units=(1, units[1]))


class Residual(Module):
    """x + module(x).

        >>> with Grid(shape="ddp") as grid:
        ...     Residual(Dropout(grid, 0))(DistMatrix.from_function(grid, (1, 2), lambda i, j: j)).gather()
        array([[0., 2.]])
    """

    def __init__(self, module: Module):
        self.grid, self.module = module.grid, module

    def forward(self, x: Tensor) -> Tensor:
        return add(x, self.module(x))


class Recompute(Module):
    """A part of a network of which only the input is kept; the rest is computed again in the backward pass
    (activation checkpointing, Chen et al. 2016). `grid.ledger.memory["recompute saves"]` has the bytes not kept.

        >>> with Grid(shape="ddp") as grid:
        ...     list(Recompute(Linear(grid, 3, 4)).named_parameters())
        ['weight', 'bias']
    """

    def __init__(self, module: Module):
        self.grid, self.module = module.grid, module

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        return iter(())

    def shown(self) -> Iterator[tuple[str, Any]]:
        yield "module", self.module

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """The part has the name of what recomputes it."""
        yield prefix, self
        yield from self.module.named_modules(prefix)

    def forward(self, x: Tensor) -> Tensor:
        tape = x.tape
        if not tape.recording:
            return self.module(x)
        state, first = self._state(), next(tape.numbers)
        with tape.set(keeping=False):
            out = self.module(x)
        form, node, outer = x.form, x.node, outside(out.node, first)

        def rule(gradient: Array, value: Array) -> list[Array]:
            again = self._again(Tensor(form.matrix(value), node=node), state, gradient)
            return [again.get(parent.number) for parent in outer]

        return x.made(out.shard, outer, rule, keep=[x.shard], shape=out.shape, layout=out.layout)

    def _state(self) -> State:
        """What a forward pass depends on besides its input and the parameters."""
        return self.module.random_state(), {module: module.training for _, module in self.module.named_modules()}

    def _set_state(self, state: State) -> None:
        self.module.set_random_state(state[0])
        for module, training in state[1].items():
            module.training = training

    def _again(self, x: Tensor, state: State, gradient: Array) -> dict[int, Array]:
        """Forward once more, as it was, then backward through what was made here: number -> gradient of what was made
        before and went in. Parameters take theirs at once."""
        tape, workspace, memory = Tape.of(self.grid), self.grid.workspace, self.grid.ledger.memory
        held, now, first = workspace.in_use(), self._state(), next(tape.numbers)
        self._set_state(state)
        try:
            with tape.set(recording=True, phase="recompute"):
                out = self.module(x)
        finally:
            self._set_state(now)
        node, output = out.node, workspace.counted(out.form.local_shape, out.dtype, out.library)
        memory["recompute saves"] = memory.get("recompute saves", 0) + workspace.in_use() - held - output
        del out, x
        if node is None:
            return {}
        return {number: coming.wait() for number, coming in propagate(node, gradient, first).items()}


def derived(seed: int, stream: int) -> int:
    """A seed of its own for each stream of a seed."""
    return int(random.bits(np.zeros(1, np.uint64), seed, stream)[0] >> np.uint64(1))


def _check_sizes(what: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise LayoutError(f"{what}: {name} is a number of columns, at least 1; got {size!r}")
