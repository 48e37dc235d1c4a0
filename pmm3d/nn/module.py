"""A network, or a part of one: what it is made of, by name, and what it takes from files."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from typing import TYPE_CHECKING, Any

from ..arrays import Array, library_of
from ..comm import Grid
from ..errors import LayoutError, NoGridError, Pmm3dError, hint
from ..io.matrices import differences, form_in_words
from ..layout import LOW_PRECISION, PIPE, Layout, batch_layout, transitions
from ..layout.layout import layout_of, unit_of
from ..product import DistMatrix
from ..product.construct import Library
from .dry import Facts, dry_grid
from .parameter import Parameter, of_stages
from .tape import Tape, no_grad
from .tensor import Tensor, as_tensor

logger = logging.getLogger("pmm3d.nn")
REAL = {*LOW_PRECISION, "float32", "float64"}


class Module:
    """A part of a network. Subclasses set `grid`, have parameters and modules as attributes, and define
    forward(x: Tensor) -> Tensor, or with several tensors that go in, or a tuple of tensors that come out.

    What is learned is found in attributes that are a Parameter or a Module, and in lists, tuples and dicts of them, at
    any depth: "blocks.0.weight", "heads.value.weight". It is not found in a function or its closure. Sets, and objects
    that are no Modules, are refused where they hold any: their parameters would not be trained.

    training   whether dropout acts; see `train` and `evaluating`
    calls      only of a layer that draws random numbers: how often it was called, which is all they depend on

        >>> from pmm3d import nn
        >>> with Grid(shape="ddp") as grid:
        ...     list(nn.Residual(nn.Linear(grid, 3, 3)).named_parameters())
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
        """Return the layers as a tree with sizes and layouts, and the number of parameters. Nothing is sent.

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
        """A line for each parameter, module and function of this module; above: the modules that contain it."""
        for name, part in (item for attribute in self.attributes() for item in _items(*attribute)):
            title = f"{indent}{name}: " if name else indent
            if isinstance(part, Parameter):
                yield title + ", ".join([f"{part.shape[0]} x {part.shape[1]}", *_in_words(part.layout)])
            elif isinstance(part, Module):
                yield title + type(part).__name__
                yield from part._tree(indent + "  ", (*above, part)) if part not in above else ()
            elif callable(part):
                yield title + getattr(part, "__name__", type(part).__name__)

    def __call__(self, *inputs: Tensor | DistMatrix, **options: Any) -> Any:
        """What `forward` returns for these tensors or matrices, such as a batch (m, features). options: those that
        `forward` has."""
        tensors = [as_tensor(x) for x in inputs]
        made = self.forward(*tensors, **options)
        look = tensors[0].tape.inspect if tensors else None
        if look is not None:
            for out in made if isinstance(made, tuple) else (made,):
                look(self, out)
        return made

    @property
    def whole(self) -> Grid:
        """The grid of all ranks that hold a part of the network: `grid`, except of a `Pipeline`."""
        return self.grid

    def forward(self, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say what it computes: define forward(self, x)")

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of whatever this module holds."""
        return iter(vars(self).items())

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """(name, module or parameter) of the attributes, those in lists and dicts with their indices and keys."""
        return ((path, item) for name, value in self.attributes() for path, item in _items(name, value)
                if isinstance(item, (Module, Parameter)))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(name, module) of this one and all below it; one that is used twice has its first name."""
        return self._below(prefix, set())

    def _below(self, prefix: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
        if self not in seen:
            seen.add(self)
            yield prefix, self
            for name, child in self.children():
                if isinstance(child, Module):
                    yield from child._below(f"{prefix}.{name}".strip("."), seen)

    def named_parameters(self) -> dict[str, Parameter]:
        """Return the parameters by their paths in this module, in order. One used twice has its first path.

        The call also sets each parameter's `name`, which error messages contain. A path with fewer steps than the
        present name does not replace it, so the name is the path in the outermost module that was asked.

        Raises Pmm3dError for parameters that are held where they are not found, and for two of one path.
        """
        named, names = dict[str, Parameter](), dict[Parameter, str]()
        for prefix, module in self.named_modules():
            _check_nothing_hides(module)
            for name, child in module.children():
                if isinstance(child, Parameter) and child not in names:
                    names[child] = name = f"{prefix}.{name}".lstrip(".")
                    if named.setdefault(name, child) is not child:
                        raise Pmm3dError(f"{type(module).__name__}: two parameters are named {name!r}: the keys of a "
                                         "dict must differ as text, and from the names of attributes")
        for child, name in names.items():
            if name.count(".") >= child.name.count("."):
                child.name = name
        return named

    def parameters(self) -> list[Parameter]:
        return list(self.named_parameters().values())

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> values of the parameters, as a checkpoint takes them: of low precision the master weights, once an
        optimizer made them. See `loaded`."""
        return {name: parameter.in_checkpoint for name, parameter in self.named_parameters().items()}

    def loaded(self) -> None:
        """Take what was written to the values in `matrices`. Collective."""
        for parameter in self.parameters():
            parameter.loaded()

    def state_dict(self) -> dict[str, DistMatrix]:
        """Name -> values of the parameters, for a checkpoint or an export: of a network that is cut in stages, those of
        this rank's. See `matrices`; they are no copies."""
        return self.matrices()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Take the values of parameters by name. Collective.

        state    matrices in any layout, on any grid over the processes of `grid`; or arrays of the whole, which all
                 ranks hold, those of vectors 1 x n or n long. Other real types are converted, as torch does. For a
                 network that is cut in stages, it has this rank's parameters or those of all stages
        strict   whether the names must be those of the parameters; else the others stay as they are

        Master weights, once an optimizer made them, take the values with all their digits.

        Returns (parameters that the state lacks, names that no parameter has); none if strict. Raises LayoutError, on
        every rank and before anything is changed, for other names, shapes, types or processes.

            >>> import numpy as np; from pmm3d import nn
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
        with self.whole.collective_call("load_state_dict", strict), \
                self.grid.collective_call("load_state_dict", sorted(map(str, own))):
            _check_state(named, own, strict)
        for name, parameter in named.items():
            if name in own:
                parameter.assign(_matrix_for(parameter, own[name]))
        return [name for name in named if name not in own], [name for name in own if name not in named]

    def gather(self, name: str) -> Array:
        """Return the values of a parameter, as `state_dict` has them, as an array on every rank of `whole`, whichever
        stage holds it. Collective. Raises Pmm3dError, on every rank, if there is no parameter of that name."""
        own = self.matrices()
        stages = of_stages(self, {each: (matrix.shape, matrix.dtype) for each, matrix in own.items()})
        holders = [index for index, held in enumerate(stages) if name in held]
        with self.whole.collective_call("gather", name, always=True):
            if not holders:
                raise Pmm3dError(f"gather: no parameter is named {name!r}{hint(name, set[str]().union(*stages))}")
        array: Any = own[name].gather() if name in own else None
        if len(stages) == 1:
            return array
        (shape, dtype), pipe = stages[holders[0]][name], self.whole.axis(PIPE)
        if pipe.index != holders[0]:
            array = self.parameters()[0].library.empty((0,), dtype)
        counts = [prod(shape) * (index == holders[0]) for index in range(pipe.size)]
        return pipe.all_gather(array.reshape(-1), counts=counts).wait().reshape(shape)

    def requires_grad_(self, on: bool = True) -> Module:
        """Freeze all parameters (False), or let them learn again; see `Parameter.requires_grad_`. Returns the module.
        Collective."""
        parameters = self.parameters()
        with self.grid.collective_call("requires_grad_", *[parameter.name for parameter in parameters], on):
            pass
        for parameter in parameters:
            parameter._learn(on)
        return self

    def place(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        """Move parameters to where an input with these columns needs no relayout. Collective; called when a network is
        made.

        columns   layout of the input, of its columns only; None: unknown
        placed    layers whose place is known already: the first input of a layer decides

        Returns the same of the output. A layer of your own that says nothing of it returns None: `settle` finds out.
        """
        return None

    def train(self, on: bool = True) -> Module:
        """Let dropout act from now on, or not (False). Returns the module."""
        for _, module in self.named_modules():
            module.training = on
        return self

    def eval(self) -> Module:
        """The same as train(False). As in torch, operations are still noted for a backward pass; see `evaluating`."""
        return self.train(False)

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

    def settle(self, features: int, dtype: str | None = None, library: Library | None = None) -> Any:
        """Move the parameters of each layer to where its input is. Collective. A dry run of `forward`, on one row,
        finds out where: only weights are sent. Call it once a network of your own is made: layers that are not in a
        `Sequential` or an `MLP` do not know where their input will be. A layer whose input is elsewhere brings the
        input to its weight in each step.

        features         columns of the input
        dtype, library   of the input; those of the first parameter if left out, float32 for one of low precision

        Returns `nn.dry.Facts`: the shape of the output of this row, its layout, which the output of any batch has, and
        its type; a tuple of them if there are several outputs. `forward` computes on copies of this module's attributes
        without data: it must take matrices from these, not from the closure of a lambda, and must not choose by values.
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
        """Move the parameters to the layouts of those of the same names in a copy of this network, or of a larger one
        that it is a part of. Collective."""
        layouts = {name: parameter.layout for name, parameter in twin.named_parameters().items()}
        for name, parameter in self.named_parameters().items():
            if parameter.layout != layouts[name]:
                parameter.move(layouts[name])

    def _without_data(self, dry: Grid) -> Module:
        """A copy on a grid without data, of the modules with their lists and dicts. Matrices and parameters have the
        same shapes and layouts; other attributes are shared."""
        memo: dict[int, Any] = {id(self.grid): dry}
        for _, module in self.named_modules():
            for _, value in (item for name in vars(module) for item in _items(name, vars(module)[name])):
                if isinstance(value, (Tensor, DistMatrix)):
                    matrix = Facts.of(value).on(dry)
                    copied: Any = matrix if isinstance(value, DistMatrix) else Tensor(matrix)
                    memo[id(value)] = Parameter(matrix, value.precision) if isinstance(value, Parameter) else copied
                elif not isinstance(getattr(value, "__self__", value), Module):  # its methods are those of the copy
                    memo.setdefault(id(value), value)
        return deepcopy(self, memo)

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
        found = {child for _, module in self.named_modules() for _, child in module.children()
                 if isinstance(child, Parameter)}
        return sum(rows * cols for rows, cols in (parameter.shape for parameter in found))


def entered(layer: Module, x: Tensor, columns: Layout) -> None:
    """Called by a layer that takes the columns of its input x in the layout `columns`, before it uses x. In
    `Module.settle` the layer moves to where x is. In any other pass that sends x to the layer, the first rank logs it,
    once for each grid."""
    tape, grid = x.tape, x.grid
    held = layout_of((), x.layout.cols, (), (1, x.layout.units[1]))
    if tape.placed is not None:
        layer.place(held, tape.placed)
    elif held != columns and not tape.has_warned and grid.dry_run is None:
        steps = transitions(held, columns, grid.shape, (1, x.shape[1]))
        tape.has_warned = any(step.kind != "slice" for step in steps)
        if tape.has_warned and grid.rank == 0:
            logger.warning("%s: each step sends the input of this layer between ranks: the input's columns are in %s, "
                           "the layer's in %s. Call net.settle(features) once the network is made, or give the layer "
                           "the axis of its input's columns (cols=). Further layers are not logged",
                           type(layer).__name__, held, columns)


def _in_words(layout: Layout) -> Iterator[str]:
    """Which axes split rows and columns."""
    for dim, axes, unit in zip(("rows", "columns"), (layout.rows, layout.cols), layout.units):
        if axes:
            units = sorted({unit_of(unit, axis) for axis in axes}, reverse=True)
            yield f"{dim} over {', '.join(axes)}" + f" in units of {', '.join(map(str, units))}" * (units != [1])


def _items(name: str, value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """A value, or what lists, tuples and dicts hold at any depth."""
    if not isinstance(value, (dict, list, tuple)):
        yield name, value
    elif not any(value is other for other in above):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _items(f"{name}.{key}", item, (*above, value))


def _check_nothing_hides(module: Module) -> None:
    """Raises Pmm3dError for a parameter or module within something that is not searched."""
    kinds = Module, Parameter
    for name, value in (item for attribute in module.attributes() for item in _items(*attribute)):
        held = value if isinstance(value, (set, frozenset, deque)) else getattr(value, "__dict__", {}).values()
        if not isinstance(value, kinds) and any(isinstance(each, kinds) for each in held):
            raise Pmm3dError(f"{type(module).__name__}.{name} is a {type(value).__name__} that holds parameters or "
                             "modules where they are not found, and would not be trained: keep them in a list or a "
                             "dict, or make it a Module")


def _check_state(named: Mapping[str, Parameter], state: Mapping[str, Any], strict: bool) -> None:
    """Raises LayoutError if `Module.load_state_dict` cannot take the values."""
    both = [name for name in named if name in state]
    wanted = {name: form_in_words(named[name].shape, named[name].dtype) for name in (named if strict else both)}
    given = {name: _given(named[name], state[name]) if name in named else "" for name in (state if strict else both)}
    if text := differences(wanted, given):
        raise LayoutError(f"load_state_dict: the state is of another network. {text}")
    for name in both:
        value = state[name]
        if isinstance(value, DistMatrix) and not value.grid.same_processes(named[name].grid):
            raise LayoutError(f"load_state_dict: {name!r} is on a grid over other processes, or in another order: save "
                              "a checkpoint of it, and load that (nn.exchange.load_weights)")


def _given(parameter: Parameter, value: Any) -> str:
    """As the parameter is described, if the value fits."""
    dtype = value.dtype if isinstance(value, DistMatrix) else library_of(value).dtype(value)
    shape = (1, *value.shape) if len(value.shape) == 1 and parameter.shape[0] == 1 else tuple(value.shape)
    return form_in_words(shape, parameter.dtype if {dtype, parameter.dtype} <= REAL else dtype)


def _matrix_for(parameter: Parameter, value: Any) -> DistMatrix:
    """The values in new memory, of the type of `in_checkpoint` and of the parameter's library."""
    given, box = value if isinstance(value, DistMatrix) else parameter, parameter.box
    array = value.local if given is value else value.reshape(*given.shape)[box.r0 : box.r1, box.c0 : box.c1]
    library, dtype = library_of(array), parameter.dtype if parameter.master is None else parameter.master.dtype
    if library == parameter.library:
        local = library.copy(library.astype(array, dtype))
    else:
        local = parameter.library.from_numpy(library.to_numpy(array), dtype)
    return DistMatrix(given.grid, local, given.shape, given.layout)
