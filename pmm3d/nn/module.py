"""A network, or a part of one: its parameters and parts by name, and its values from files."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..comm import Grid
from ..errors import NoGridError, Pmm3dError
from ..layout import Layout, batch_layout, transitions
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from ..product.constructors import Library
from .contexts import no_grad
from .dry import Facts, dry_grid
from .gradient_buffer import GradientBuffer
from .module_values import check_state, gathered, matrix_for
from .parameter import Parameter, of_stages
from .tape import Tape
from .tensor import Tensor, as_tensor

PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of attributes that contain neither parameters nor modules."""

logger = logging.getLogger("pmm3d.nn")


class Module:
    """Network, or part of a network. Subclasses set `grid` and define `forward`.

    Attributes
    ----------
    grid : Grid
        The grid of the parameters. A subclass sets it.
    training : bool
        Whether dropout is active; see `train` and `evaluating`.

    Notes
    -----
    forward(x) takes one tensor or several, and returns a tensor or a tuple of tensors.

    Parameters are found in attributes that are a Parameter or a Module, and in lists, tuples and dicts of them, at any
    depth. Their names are paths, such as "blocks.0.weight". Parameters in the closure of a function are not found.
    Sets, and objects that are no Modules, are refused if they contain parameters.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> class Net(nn.Module):
    ...     def __init__(self, grid):
    ...         self.grid = grid
    ...         self.first, self.second = nn.Linear(grid, 3, 4), nn.Linear(grid, 4, 2, cols="x")
    ...     def forward(self, x):
    ...         return self.second(nn.relu(self.first(x)))
    >>> with Grid(shape="ddp") as grid:
    ...     net = Net(grid)
    ...     net(DistMatrix.random(grid, (5, 3), dtype="float32")).shape, list(net.named_parameters())
    ((5, 2), ['first.weight', 'first.bias', 'second.weight', 'second.bias'])
    """

    grid: Grid
    training = True
    calls: int

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "grid":
                raise NoGridError(f"{type(self).__name__} has no grid: set self.grid = grid in its __init__")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        """The layers as a tree with sizes and layouts, and the number of parameters. Nothing is sent.

        >>> from pmm3d import nn
        >>> with Grid(shape="ddp") as grid:
        ...     print(nn.MLP(grid, [8, 16, 3]))
        MLP
          0: Linear
            weight: 8 x 16, rows over y, z, columns over x
            bias: 1 x 16, columns over x
          1: relu
          2: Linear
            weight: 16 x 3, rows over x, z, columns over y
            bias: 1 x 3, columns over y
        195 parameters
        """
        return "\n".join([type(self).__name__, *self._tree("  ", (self,)), f"{self.size:,} parameters"])

    def _tree(self, indent: str, above: tuple[Module, ...]) -> Iterator[str]:
        """Yield a line for each parameter, module and function of this module. above: the modules that contain it."""
        for name, part in (item for attribute in self._attributes() for item in _items(*attribute)):
            title = f"{indent}{name}: " if name else indent
            if isinstance(part, Parameter):
                yield title + ", ".join([f"{part.shape[0]} x {part.shape[1]}", *_in_words(part.layout)])
            elif isinstance(part, Module):
                yield title + type(part).__name__
                yield from part._tree(indent + "  ", (*above, part)) if part not in above else ()
            elif callable(part):
                yield title + getattr(part, "__name__", type(part).__name__)

    replays = False
    """Whether `forward` of this very class carries out the same instructions in each call (`nn.replay`)."""
    varies = ""
    """Reason why `forward` carries out other instructions in each call, or ""."""
    selected = ""
    """Name of the attribute that a selective recomputation computes again, or ""."""
    arguments: tuple[str, ...] = ()
    """Names of attributes that are no facts, because instructions read them when they run."""

    def __call__(self, *inputs: Tensor | DistMatrix, **options: Any) -> Any:
        """Result of `forward` for these tensors or matrices. options: further arguments of `forward`."""
        tensors = [as_tensor(x) for x in inputs]
        tape = tensors[0].tape if tensors else None
        recorder = None if tape is None else tape.parallel.grid.engine.recorder
        with nullcontext() if recorder is None else recorder.in_layer(self):
            made = self.forward(*tensors, **options)
        look = None if tape is None else tape.inspect
        if look is not None:
            for out in made if isinstance(made, tuple) else (made,):
                if getattr(out, "tiled", None) is None or not out.requires_grad:  # otherwise there are no values
                    look(self, out)
        return made

    @property
    def parent_grid(self) -> Grid:
        """The grid of all ranks that hold a part of the network: `grid`, except in a `Pipeline`."""
        return self.grid

    def _facts(self) -> list[Any]:
        """Facts on which the recorded instructions of `forward` depend; see `nn.replay`."""
        facts = vars(self)
        if type(self).arguments or "_replays" in facts:
            facts = {name: facts[name] for name in facts if name not in ("_replays", *type(self).arguments)}
        return [*facts.values()]

    def _gradient_buffers(self) -> list[tuple[str, GradientBuffer]]:
        """(name of the parameter, its gradient)."""
        return [(each.name, each.grad_buffer) for each in self.parameters()]

    def _sum_tied(self, part_of: Any = None) -> None:
        """As `Pipeline._sum_tied`. Another network has no stages."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the result of the module. A subclass defines this method; users call the module."""
        raise NotImplementedError(f"{type(self).__name__} has no method forward: define forward(self, x)")

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of each attribute."""
        return iter(vars(self).items())

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """Yield (name, module or parameter) of the attributes. Names in lists and dicts have indices and keys."""
        return (
            (path, item)
            for name, value in self._attributes()
            if type(value) not in PLAIN
            for path, item in _items(name, value)
            if isinstance(item, (Module, Parameter))
        )

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of this module and all modules in it, each once, under its first name.

        Parameters
        ----------
        prefix : str
            Beginning of the names. Default: "".
        """
        return self._below(prefix, set())

    def _below(self, prefix: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
        if self not in seen:
            seen.add(self)
            yield prefix, self
            for name, child in self.children():
                if isinstance(child, Module):
                    yield from child._below(f"{prefix}.{name}".strip("."), seen)

    def named_parameters(self) -> dict[str, Parameter]:
        """Parameters by their paths in this module, in order. A parameter that is used twice has its first path.

        Returns
        -------
        dict
            Path -> Parameter. The call also sets `name` of each parameter, for error messages, to its path in the
            outermost module of which this method was called.

        Raises
        ------
        Pmm3dError
            For parameters in objects that are not searched, and for two parameters with one path.
        """
        named, names = dict[str, Parameter](), dict[Parameter, str]()
        for prefix, module in self.named_modules():
            _check_nothing_hides(module)
            for name, child in module.children():
                if isinstance(child, Parameter) and child not in names:
                    names[child] = name = f"{prefix}.{name}".lstrip(".")
                    if named.setdefault(name, child) is not child:
                        raise Pmm3dError(
                            f"{type(module).__name__}: two parameters are named {name!r}. Keys of a dict "
                            "must differ as text, and from the names of attributes"
                        )
        for child, name in names.items():
            if name.count(".") >= child.name.count("."):
                child.name = name
        return named

    def parameters(self) -> list[Parameter]:
        """List of the parameters, each once."""
        return list(self.named_parameters().values())

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> matrix of each parameter for a checkpoint, not copied. A master weight replaces a 16-bit weight.

        For a `Pipeline`, these are the parameters of this rank's stages. After you write to a matrix, call `loaded`.
        """
        return {name: parameter._in_checkpoint for name, parameter in self.named_parameters().items()}

    def loaded(self) -> None:
        """Update the parameters after values were written to `matrices`. Collective."""
        for parameter in self.parameters():
            parameter._loaded()

    def state_dict(self) -> dict[str, DistMatrix]:
        """Return the same as `matrices`."""
        return self.matrices()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Set parameters by name. Collective.

        Parameters
        ----------
        state : mapping
            Name -> DistMatrix in any layout, on any grid over the same processes; or name -> whole array, which all
            ranks hold. Real types are converted. For a `Pipeline`, parameters of this rank or of all stages.
        strict : bool
            Whether the names must be the same as of the parameters. Default: True.

        Returns
        -------
        missing, unexpected : list of str
            Parameters that the state lacks, and names that no parameter has. Both are empty if `strict`.

        Raises
        ------
        LayoutError
            On every rank and before anything is changed, for wrong names, shapes, types or processes.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     one, other = (nn.Linear(grid, 3, 2, seed=seed) for seed in (1, 2))
        ...     one.load_state_dict(other.state_dict())
        ...     one.load_state_dict({"bias": np.zeros(2), "gain": np.ones(2)}, strict=False)
        ([], [])
        (['weight'], ['gain'])
        """
        named = self.named_parameters()
        others = set[str]().union(*of_stages(self, list(named))).difference(named)
        own = {name: value for name, value in state.items() if name not in others}
        with (
            self.parent_grid.collective_call("load_state_dict", strict),
            self.grid.collective_call("load_state_dict", sorted(map(str, own))),
        ):
            check_state(named, own, strict)
        for name, parameter in named.items():
            if name in own:
                parameter.assign(matrix_for(parameter, own[name]))
        return [name for name in named if name not in own], [name for name in own if name not in named]

    def gather(self, name: str) -> Array:
        """Whole array of a parameter, on every rank of all stages. Collective.

        Raises
        ------
        Pmm3dError
            On every rank, if there is no parameter with this name.
        """
        return gathered(self, name)

    def requires_grad_(self, on: bool = True) -> Module:
        """Freeze all parameters (False) or let them learn again, and return the module. Collective.

        Parameters
        ----------
        on : bool
            Whether they learn. Default: True.
        """
        parameters = self.parameters()
        with self.grid.collective_call("requires_grad_", *[parameter.name for parameter in parameters], on):
            pass
        for parameter in parameters:
            parameter._learn(on)
        return self

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        """Move parameters so that an input with columns in this layout needs no relayout. Collective.

        columns: layout of the columns of the input, None if unknown; placed: layers that must not move again. Returns
        the layout of the columns of the output. If it is None, `settle` finds the layout.
        """
        return None

    def train(self, on: bool = True) -> Module:
        """Make dropout active (True) or inactive (False), and return the module.

        Parameters
        ----------
        on : bool
            Whether dropout is active. Default: True.
        """
        for _, module in self.named_modules():
            module.training = on
        return self

    def eval(self) -> Module:
        """Call train(False), and return the module. Operations are still recorded; see `evaluating`."""
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[Module]:
        """Context without dropout, in which operations are not recorded for a backward pass."""
        before = {module: module.training for _, module in self.named_modules()}
        self.train(False)
        try:
            with no_grad(self.grid):
                yield self
        finally:
            for module, training in before.items():
                module.training = training

    def settle(self, features: int, dtype: str | None = None, library: Library | None = None) -> Any:
        """Move the parameters of each layer to the layout of its input. Collective.

        Parameters
        ----------
        features : int
            Columns of the input.
        dtype, library : str or None
            Type and library of the input. Default: those of the first parameter; float32 if it is 16-bit.

        Returns
        -------
        nn.dry.Facts
            Shape, layout and type of the output for one row; for several outputs, a tuple of them.

        Notes
        -----
        Call it once after you make a network of your own. Layers outside of a `Sequential` or an `MLP` have a fixed
        layout, and would relay their input out in each step. A dry run of `forward` on one row finds the layouts; only
        weights are sent. In the dry run, `forward` computes on copies of the attributes without data. It must take
        matrices from attributes, and must not branch on values.
        """
        first = next(iter(self.parameters()), None)
        dtype = dtype or ("float32" if first is None else first.precision.master)
        kind = self.grid.library(library or (None if first is None else first.library)).kind
        with self.grid.collective_call("settle", features, dtype, kind), dry_grid(self.grid) as dry:
            twin = self._without_data(dry)
            row = DistMatrix.empty(dry, (1, features), dtype=dtype, layout=batch_layout("y"), library=kind)
            with twin.evaluating(), Tape.of(dry).set(placed=set()):
                made = twin(row)
        self._move_as(twin)
        return tuple([Facts.of(out) for out in made]) if isinstance(made, tuple) else Facts.of(made)

    def _move_as(self, twin: Module) -> None:
        """Move the parameters to the layouts of a copy of this network, or of a larger network. Collective."""
        layouts = {name: parameter.layout for name, parameter in twin.named_parameters().items()}
        for name, parameter in self.named_parameters().items():
            if parameter.layout != layouts[name]:
                parameter._move(layouts[name])

    def _without_data(self, dry: Grid) -> Module:
        """Copy the modules to a grid without data. Attributes that are no matrices are shared."""
        memo: dict[int, Any] = {id(self.grid): dry}
        for _, module in self.named_modules():
            for _, value in (item for name in vars(module) for item in _items(name, vars(module)[name])):
                if isinstance(value, (Tensor, DistMatrix)):
                    matrix = Facts.of(value).on(dry)
                    copied: Any = matrix if isinstance(value, DistMatrix) else Tensor(matrix)
                    memo[id(value)] = Parameter(matrix, value.precision) if isinstance(value, Parameter) else copied
                elif not isinstance(getattr(value, "__self__", value), Module):  # methods are copied with their module
                    memo.setdefault(id(value), value)
        return deepcopy(self, memo)

    def random_state(self) -> dict[str, int]:
        """Name -> number of calls of each layer with random numbers, for JSON. The next numbers depend on it."""
        return {name: module.calls for name, module in self.named_modules() if hasattr(module, "calls")}

    def set_random_state(self, state: dict[str, int]) -> None:
        """Set the numbers of calls of layers with random numbers."""
        for name, module in self.named_modules():
            if name in state and hasattr(module, "calls"):  # a Recompute has the name of its part
                module.calls = state[name]

    def after_step(self, taken: bool = True) -> None:
        """Update state that changes once a step, and not by a gradient.

        Parameters
        ----------
        taken : bool
            Whether the optimizer changed the weights. False if a `LossScale` skipped the step. Default: True.

        Notes
        -----
        `train_step` calls this method of each module after each step, also in a `Pipeline`. Call it for all
        `named_modules` in a loop of your own.
        """

    @property
    def size(self) -> int:
        """Number of parameters of the whole network."""
        parameters = {
            child
            for _, module in self.named_modules()
            for _, child in module.children()
            if isinstance(child, Parameter)
        }
        return sum(rows * cols for rows, cols in (parameter.shape for parameter in parameters))


def entered(layer: Module, x: Tensor, columns: Layout) -> None:
    """Note the input of a layer that needs its columns in the layout `columns`.

    In `Module.settle`, move the layer to the layout of the input. In other passes, the first rank logs the first
    relayout of an input on each grid.
    """
    tape, grid = x.tape, x.grid
    held = layout_of((), x.layout.cols, (), (1, x.layout.units[1]))
    if tape.placed is not None:
        layer._assign_layout(held, tape.placed)
    elif held != columns and not tape.has_warned and grid.dry_run is None:
        steps = transitions(held, columns, grid.shape, (1, x.shape[1]))
        tape.has_warned = any(step.kind != "slice" for step in steps)
        if tape.has_warned and grid.rank == 0:
            logger.warning(
                "%s: each step sends the input of this layer between ranks: the input's columns are in %s, "
                "the layer's in %s. Call net.settle(features) once the network is made, or give the layer "
                "the axis of its input's columns (cols=). Further layers are not logged",
                type(layer).__name__,
                held,
                columns,
            )


def _in_words(layout: Layout) -> Iterator[str]:
    """Yield texts about the axes that split rows and columns."""
    for dim, axes, unit in zip(("rows", "columns"), (layout.rows, layout.cols), layout.units):
        if axes:
            units = sorted({unit_of(unit, axis) for axis in axes}, reverse=True)
            yield f"{dim} over {', '.join(axes)}" + f" in units of {', '.join(map(str, units))}" * (units != [1])


def _items(name: str, value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a value, or of the items of lists, tuples and dicts at any depth."""
    if not isinstance(value, (dict, list, tuple)):
        yield name, value
    elif not any(value is other for other in above):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _items(f"{name}.{key}", item, (*above, value))


def functions_in(module: Module) -> list[str]:
    """Names of the functions in the attributes of a module, such as activations; not of modules in it."""
    parts = [part for attribute in module._attributes() for _, part in _items(*attribute)]
    return [
        getattr(part, "__name__", type(part).__name__)
        for part in parts
        if callable(part) and not isinstance(part, (Module, Parameter))
    ]


def _check_nothing_hides(module: Module) -> None:
    """Raise Pmm3dError for a parameter or module in an object that is not searched."""
    found = Module, Parameter, Grid
    for attribute, given in module._attributes():
        for name, value in () if type(given) in PLAIN else _items(attribute, given):
            if isinstance(value, found):
                continue
            held = value if isinstance(value, (set, frozenset, deque)) else getattr(value, "__dict__", {}).values()
            if any(isinstance(each, found[:2]) for each in held):
                raise Pmm3dError(
                    f"{type(module).__name__}.{name} is a {type(value).__name__}. Parameters and modules in "
                    "it are not found, so they would not be trained: keep them in a list or a dict, or make "
                    "it a Module"
                )
