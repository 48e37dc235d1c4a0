"""Networks of consecutive layers: Sequential, MLP, and residual connections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..comm import Grid
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout
from ..product.constructors import Library
from . import functional
from .arithmetic import add
from .dense import OTHER
from .layers import Dropout, Layer, LayerNorm, Linear
from .module import Module
from .parameter import Parameter
from .precision import Precision
from .recompute import Recompute, Recomputed
from .recompute_budget import Budget, Chosen, Group
from .seeds import check_grid, derived, seed_of
from .tensor import Tensor


class Sequential(Module):
    """Sequence of layers, or of functions of tensors.

    Parameters
    ----------
    *layers : Module or callable
        Each layer takes the result of the layer before. A tuple becomes several arguments.

    Raises
    ------
    Pmm3dError
        If a layer is neither a Module nor a function.

    Notes
    -----
    Parameters are named "0.weight", "2.bias", and so on. The parameters of each layer except the first are moved to the
    layout of the layer's input, so no input is relaid out.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Sequential(grid, nn.Linear(grid, 3, 4), nn.relu, nn.Linear(grid, 4, 2))
    ...     list(net.named_parameters())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    replays = True
    budget: Budget | Chosen | None = None

    def __init__(self, grid: Grid, *layers: Layer):
        check_grid("Sequential", grid)
        self.grid, self.layers = grid, list(layers)
        for index, layer in enumerate(layers):
            if not callable(layer):
                raise Pmm3dError(
                    f"Sequential: {index} is a {type(layer).__name__}, neither a layer nor a function: "
                    "pass a layer, or a function such as nn.gelu"
                )
        learned = {
            module
            for _, module in self.named_modules()
            for _, child in module.children()
            if isinstance(child, Parameter) and child.has_state
        }
        self._assign_layout(None, learned)

    def _numbered(self) -> Iterator[tuple[str, Layer]]:
        """Yield (name, layer) of all layers and functions."""
        return ((str(index), layer) for index, layer in enumerate(self.layers))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        yield from self._numbered()
        yield from ((name, value) for name, value in super()._attributes() if name != "layers")

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        for layer in self.layers:
            if isinstance(layer, Module):
                columns = layer._assign_layout(columns, placed)
            elif columns is not None and layer not in functional.ACTIVATIONS.values():
                columns = Layout((), columns.cols)  # a function may change the number of columns
        return columns

    def _slice(self, begin: int, end: int) -> Sequential:
        """Return a network of some of these layers, in their present layouts."""
        part = Sequential.__new__(Sequential)
        part.grid, part.layers = self.grid, self.layers[begin:end]
        return part

    def forward(self, *inputs: Tensor) -> Any:
        for layer in self.layers if self.budget is None else self.budget.layers(self, inputs):
            made: Any = layer(*inputs)
            inputs = made if isinstance(made, tuple) else (made,)
        return inputs if len(inputs) > 1 else inputs[0]


class Block(Sequential):
    """Layers that are numbered from `first`. Names of parameters do not depend on dropout and recompute.

    >>> with Grid(shape="ddp") as grid:
    ...     names = [list(MLP(grid, [3, 4, 2], dropout=p, recompute=again).named_parameters())
    ...              for p in (0, 0.5) for again in (False, True)]
    ...     names[0], names[0] == names[1] == names[2] == names[3]
    (['0.weight', '0.bias', '2.weight', '2.bias'], True)
    """

    replays = True

    def __init__(self, grid: Grid, *layers: Layer, first: int = 0):
        self.first = first
        super().__init__(grid, *layers)

    def _numbered(self) -> Iterator[tuple[str, Layer]]:
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
        """Number of the next layer."""
        return self.first + sum(not isinstance(layer, Dropout) for layer in self.layers)


class MLP(Block):
    """Linear layers with an activation after each of them except the last.

    Parameters
    ----------
    sizes : sequence of int
        Columns of the input, of each hidden layer, and of the output.
    activation : callable or str
        A function such as nn.gelu, or its name: "relu" (default), "gelu", "gelu_tanh", "tanh", "silu", "sigmoid".
    bias : bool
        Whether layers have a bias. Default: True.
    norm : bool
        Whether a LayerNorm precedes each activation. Default: False.
    dropout : float
        Probability of dropout after each activation. Default: 0.
    recompute : bool, int or str
        True or "full": each hidden layer keeps only its input, and is computed again in the backward pass. k: every
        k-th hidden layer does so. A number of bytes, such as "512 MiB": as many hidden layers as necessary, so that
        the arrays for the backward pass, with the output of the network, take at most these bytes. Default: False.
    activations : str
        "replicated" (default) or "sharded" (sequence parallelism), as in `linear`.
    seed : int or None
        Seed of the initial values and of dropout. Default: the next seed of the grid (`manual_seed`).
    dtype : str
        Element type of the parameters. Default: "float32".
    library : str or None
        Array library of the parameters. Default: the library of the grid.
    precision : str, Precision or None
        "float32", "tf32", "bfloat16", "float16", "float64", or a `Precision`. Default: `dtype`.

    Raises
    ------
    LayoutError
        For fewer than two sizes, and for sizes below 1.
    Pmm3dError
        For an unknown activation, and for values out of range.

    Notes
    -----
    The input is (m, sizes[0]), with rows over data and z. The output is (m, sizes[-1]). Successive layers exchange x
    and y, so activations are not relaid out. Messages are the same as of `linear`.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.MLP(grid, [8, 16, 3], nn.gelu, norm=True)
    ...     net(DistMatrix.random(grid, (5, 8), dtype="float32")).shape, net.size
    ((5, 3), 227)
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        sizes: Sequence[int],
        activation: Layer | str = functional.relu,
        *,
        bias: bool = True,
        norm: bool = False,
        dropout: float = 0.0,
        recompute: bool | int | str = False,
        activations: str = "replicated",
        seed: int | None = None,
        dtype: str = "float32",
        library: Library | None = None,
        precision: Precision | str | None = None,
    ):
        check_grid("MLP", grid)
        if len(sizes) < 2:
            raise LayoutError(
                f"MLP: sizes must contain at least the columns of the input and of the output, got {list(sizes)}"
            )
        dropout = functional.check_probability("MLP: dropout", dropout)
        activation = functional.activation_named(activation) if isinstance(activation, str) else activation
        made, cols, number, policy = list[Layer](), "y", 0, Recomputed.named(recompute)
        groups = list[Group]()
        if policy.attention:
            raise Pmm3dError('MLP: recompute="selective" recomputes attention, which an MLP lacks: use "full"')
        seed = seed_of(grid, seed)
        options: dict[str, Any] = {"dtype": dtype, "library": library, "precision": precision}
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            layers: list[Layer] = [
                Linear(
                    grid,
                    inputs,
                    outputs,
                    bias,
                    seed=derived(seed, index),
                    cols=cols,
                    activations=activations,
                    **options,
                )
            ]
            cols = OTHER[cols]
            if index < len(sizes) - 2:
                layers += [LayerNorm(grid, outputs, cols=cols, **options)] * bool(norm) + [activation]
                layers += [Dropout(grid, dropout, derived(seed, 1000 + index))] * (dropout > 0)
                layers = [Recompute(Block(grid, *layers, first=number))] if policy.includes(index) else layers
                number += 2 + norm
            groups.append(Group(len(made), len(made) + len(layers), index < len(sizes) - 2))
            made += layers
        super().__init__(grid, *made)
        if policy.budget is not None:
            self.budget = Budget(grid, policy.budget, groups)

    @property
    def output_layout(self) -> Layout:
        """Layout of the output."""
        last = [module for _, module in self.named_modules() if isinstance(module, Linear)][-1]
        (k, _), (n,), units = last.weight.layout.rows, last.weight.layout.cols, last.weight.layout.units
        return Layout(("data", "z", k) if last.activations == "sharded" else ("data", "z"), n, units=(1, units[1]))


class Residual(Module):
    """x + module(x), or x + module(x, *others).

    Parameters
    ----------
    module : Module
        Its result has the shape of x.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.Residual(nn.Dropout(grid, 0))(DistMatrix.from_function(grid, (1, 2), lambda i, j: j)).gather()
    array([[0., 2.]])
    """

    replays = True

    def __init__(self, module: Module):
        self.grid, self.module = module.grid, module

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        of_module = self.module._assign_layout(columns, placed)
        return of_module if columns is None else columns

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return add(x, self.module(x, *others))
