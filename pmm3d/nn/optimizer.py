"""What optimizers share: groups of parameters; state and master weights, which are sharded like the weights, and over
the data axis too if asked (ZeRO-1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any
from weakref import WeakSet

from ..arrays import Array, parallel_rows
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm import Pending
from ..errors import Pmm3dError, hint
from ..layout import Layout, offsets
from ..product import DistMatrix
from .compute import PER_ELEMENT, computing
from .gradient_norm import check_clip, check_finite, clipping, non_finite, norm_of
from .parameter import Parameter

Group = dict[str, Any]
"""Options by name ("lr", "weight_decay", ...), and "params", the parameters that they are of."""
Options = Mapping[str, Any]
"""Options of a parameter in a step: those of its group, and "step", how often it was changed, this time included."""
Parameters = Iterable[Parameter] | Iterable[Mapping[str, Any]]
COMMON = "lr", "weight_decay", "decay_vectors"
"""Options of all optimizers."""
STATE = "optimizer/"
"""How names of state arrays begin in a checkpoint."""
SHARDED = "states", "gradients"
"""Of what each rank along data keeps its part only: ZeRO-1, and ZeRO-2."""


def is_state(name: str) -> bool:
    """Whether a matrix of this name in a checkpoint is a state array of an optimizer."""
    return name.startswith(STATE)


def state_name(parameter: str, state: str) -> str:
    """Name of a state array of a parameter in a checkpoint."""
    return f"{STATE}{parameter}/{state}"


class Optimizer:
    """Changes parameters by their gradients. A subclass names its options and state arrays, and defines `update`.

    parameters       of one network; or groups of them, each a dict of "params" and of options of its own, as in torch
    lr               learning rate, of groups that have none of their own; schedules change it
    weight_decay     see the subclass; of groups that have none of their own. As in torch it acts on all parameters
    decay_vectors    whether weight_decay acts on vectors (biases, gains) too; of groups that have none of their own
    shard_over_data  "states" or True (ZeRO-1): each rank along data keeps the state of, and changes, only its part of
                     each parameter. Gradients are reduce-scattered over data once a step, and the weights gathered
                     after it: the bytes of an all-reduce, 1/Gdata of the state, bitwise the same weights.
                     "gradients" (ZeRO-2): also of a gradient each rank keeps its part only. Each backward pass
                     reduce-scatters what it adds, also in `no_sync`: with m micro-batches m reduce-scatters, and
                     1/Gdata of the memory of gradients. Weights are the same to rounding.
                     If a parameter has several optimizers, the one that was made last decides; another one gathers what
                     it needs, at more bytes
    options          those that `defaults` of the class names; of groups that have none of their own
    groups           dicts of "params" and of all options; may be changed between steps, by all ranks
    whole            the grid of all ranks that hold a part of the network: `grid`, except of a `Pipeline`
    steps            how many there were
    missed           parameter -> how many of them it had no gradient in

    A parameter of low precision has a master weight, of float32 unless its `nn.Precision` says otherwise. The optimizer
    changes the master, and rounds it to the parameter. A parameter that was written to between steps is taken over into
    the master. `Tensor.written` says what is seen: `assign`, `load_state_dict`, out=, all writes to torch arrays. After
    a write to a numpy or cupy array, count up the parameter's `version`.

    Raises Pmm3dError, on every rank, for unknown options and for numbers that make no sense.

        >>> from pmm3d import Grid, nn
        >>> class Momentum(Optimizer):
        ...     state_names, defaults = ("velocity",), {"momentum": 0.9}
        ...     def update(self, weight, gradient, state, options):
        ...         state[0] *= options["momentum"]
        ...         state[0] += gradient
        ...         weight -= options["lr"] * state[0]
        >>> with Grid(shape="ddp") as grid:
        ...     net = nn.Linear(grid, 3, 2)
        ...     opt = Momentum([{"params": [net.weight]}, {"params": [net.bias], "momentum": 0.5}], lr=0.1)
        ...     opt.lr, opt.groups[1]["momentum"], list(opt.matrices(net.named_parameters()))
        (0.1, 0.5, ['optimizer/weight/velocity', 'optimizer/bias/velocity'])
    """

    state_names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    """Name -> value of the options that this kind of optimizer has beside lr, weight_decay and decay_vectors. A default
    in the signature of `__init__` takes precedence."""

    def __init__(self, parameters: Parameters, lr: float, *, weight_decay: float = 0.0, decay_vectors: bool = True,
                 shard_over_data: bool | str = False, **options: Any):
        self.groups = self._grouped(list(parameters), {"lr": lr, "weight_decay": weight_decay,
                                                       "decay_vectors": decay_vectors, **options})
        for group in self.groups:
            self.check_options(group)
        self.parameters: list[Parameter] = [each for group in self.groups for each in group["params"]]
        self._check_parameters()
        self.grid, self.whole = self.parameters[0].grid, self.parameters[0].whole
        self.steps = 0
        if shard_over_data not in (False, True, *SHARDED):
            raise Pmm3dError(f'{type(self).__name__}: shard_over_data is False, "states" (or True) or "gradients"; got '
                             f"{shard_over_data!r}")
        self.shard_over_data = bool(shard_over_data) and self.grid.data.size > 1
        self.missed: Counter[Parameter] = Counter()
        self._state: dict[Parameter, list[Array]] = {}
        self._noted = 0
        self.grid.attached.setdefault(Optimizer, WeakSet()).add(self)
        for parameter in self.parameters:
            buffer = parameter.accumulated
            buffer.split_over = "data" if self._splits(parameter) else ""
            buffer.scattered = self._splits(parameter) and shard_over_data == "gradients"

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return self.groups[0]["lr"]

    def _grouped(self, given: list[Any], options: Group) -> list[Group]:
        groups = given if given and all(isinstance(each, Mapping) for each in given) else [{"params": given}]
        known = [*COMMON, *self.defaults]
        self._check_known("", options, [*known, "shard_over_data"])
        for group in groups:
            self._check_known(", in a group of parameters", group, ["params", *known])
        return [{**self.defaults, **options, **group, "params": list(group.get("params", ()))} for group in groups]

    def _check_known(self, where: str, given: Iterable[str], known: Sequence[str]) -> None:
        """Raises Pmm3dError for options that are not known."""
        if unknown := [f"unknown option {name}{hint(name, known)}" for name in given if name not in known]:
            raise Pmm3dError(f"{type(self).__name__}{where}: {'; '.join(unknown)}")

    def _check_parameters(self) -> None:
        name = type(self).__name__
        if not self.parameters:
            raise Pmm3dError(f"{name} has no parameters: pass net.parameters()")
        for parameter in self.parameters:
            if not isinstance(parameter, Parameter):
                raise Pmm3dError(f'{name}: parameters, or groups of them ({{"params": [...]}}), are needed; got a '
                                 f"{type(parameter).__name__}")
        parameter, times = Counter(self.parameters).most_common(1)[0]
        if times > 1:
            raise Pmm3dError(f"{name}: the parameter {parameter.name} is given {times} times; it belongs to one group, "
                             "once")

    def check_options(self, options: Options) -> None:
        """Raises Pmm3dError for options of a group that make no sense."""
        for name in ("lr", "weight_decay"):
            if not 0 <= options[name] < inf:
                raise Pmm3dError(f"{type(self).__name__}: {name} is a number of at least 0; got {options[name]!r}")

    def step(self, *, check: bool = False, factor: float = 1.0) -> None:
        """Change every parameter that has a gradient, and let the gradients go. Collective.

        factor  by which the gradients are multiplied, the same on all ranks: to clip them, or to undo the scale of a
                loss. Default: 1
        check   whether to compute the gradient's norm first (one number from each rank), and to raise
                NonFiniteGradientError if it is infinite or NaN. Without the check, such a gradient enters the weights,
                as in torch. `clip` always checks

        The gradients serve as work memory. An array that was taken from a gradient before the step has other contents
        after it. If an `update` raised an error, forget the gradients (`zero_grad`).

        Raises Pmm3dError, on every rank and with the weights as they were, for gradients that are not summed yet (see
        `no_sync`), and for a factor that is none."""
        if not 0 < factor < inf:
            raise Pmm3dError(f"step: the factor is a positive number; got {factor!r}")
        if check:
            check_finite(self.gradient_norm())
        filled, gathers = set(self._filled()), []
        self.steps += 1
        self.missed.update(parameter for parameter in self.parameters if parameter not in filled)
        with self.grid.ledger.phase("optimizer"):
            for parameter, options in self._options().items():
                if parameter in filled:
                    self._change(parameter, options, factor)
                    gathers += self._spread(parameter)
            for gather in gathers:
                gather.wait()
        for parameter in filled:
            if parameter.master is not None:
                parameter.rounded()
        self._note_memory()
        self.zero_grad()

    def _note_memory(self) -> None:
        """Bytes of what there is for the parameters of all the grid's optimizers, by kind, in the ledger's memory."""
        if len(self._state) == self._noted:
            return
        self._noted, all_there = len(self._state), list[Optimizer](self.grid.attached[Optimizer])
        own = {each for optimizer in all_there for each in optimizer.parameters}
        arrays = {"weights": [each.shard for each in own],
                  "gradients": [each.accumulated.array for each in own if each.accumulated.array is not None],
                  "state": [array for each in all_there for kept in each._state.values() for array in kept]
                  + [each.master.local for each in own if each.master is not None]}
        self.grid.ledger.memory.update((kind, sum(each.nbytes for each in held)) for kind, held in arrays.items())

    def skip(self) -> None:
        """Count a step in which no parameter is changed, as if none had a gradient, and forget the gradients."""
        self._filled()
        self.steps += 1
        self.missed.update(self.parameters)
        self.zero_grad()

    def _spread(self, parameter: Parameter) -> list[Pending]:
        """A parameter was changed: begin to gather the parts of it that the ranks along data changed."""
        parameter.version += 1
        if not self._splits(parameter):
            return []
        own, whole = self._own(parameter, parameter.shard), parameter.shard.reshape(-1)
        return [self.grid.data.all_gather_into(own, whole, parameter.accumulated.counts("data"))]

    def _options(self) -> dict[Parameter, Options]:
        """The options of each parameter in the step under way."""
        return {parameter: self.options_of(parameter, group) for group in self.groups for parameter in group["params"]}

    def options_of(self, parameter: Parameter, group: Group) -> Options:
        """Return the options that a parameter of this group is changed with."""
        spared = parameter.is_vector and not group["decay_vectors"]
        return {**group, "weight_decay": 0.0 if spared else group["weight_decay"],
                "step": self.steps - self.missed[parameter]}

    def zero_grad(self) -> None:
        """Forget the gradients, as `step` does too."""
        for parameter in self.parameters:
            parameter.grad = None

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        """Change a slice of a weight and of its state arrays, in place.

        weight, gradient, state   arrays of one shape and type, of numpy, torch or cupy; flat. The gradient may be
                                  changed. A parameter of low precision comes as its master weight
        options                   of the parameter's group; "weight_decay" is 0 if the parameter is spared; and "step",
                                  how often the parameter was changed, this time included

        It may be called by several threads at once, for different slices: change nothing but these arrays. Functions of
        their library are in `array_api_compat.array_namespace(weight)`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it changes weights: define update")

    def states(self, options: Options) -> tuple[str, ...]:
        """Return the names of the state arrays of a parameter with these options."""
        return self.state_names

    def matrices(self, paths: Mapping[str, Parameter] | None = None, stored: Collection[str] = ()
                 ) -> dict[str, DistMatrix]:
        """Return the state arrays by name, for a checkpoint: "optimizer/0.weight/momentum"; and, under their
        parameters' names, the master weights of low precision, in place of those in `Module.matrices`.

        paths    the network's `named_parameters()`; None: each parameter's `name`
        stored   names in a checkpoint that is to be loaded

        A frozen parameter without a state is left out, unless `stored` has a state of it. Raises Pmm3dError, without
        `paths`, if two parameters have the same name.
        """
        found, options = dict[str, DistMatrix](), self._options()
        for path, parameter in self._by_path(paths).items():
            names = self.states(options[parameter])
            if parameter.requires_grad or parameter in self._state or self._is_stored(path, names, stored):
                layout = self._layout(parameter)
                found |= {state_name(path, name): DistMatrix(self.grid, array, parameter.shape, layout)
                          for name, array in zip(names, self._states(parameter, options[parameter]))}
                if parameter.precision.has_master:
                    found[path] = parameter.master_in(layout)
        return found

    def state(self, paths: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Return the other facts that a checkpoint needs; JSON-able. paths: as in `matrices`."""
        named = self._by_path(paths) if self.missed else {}
        missed = {path: times for path, each in named.items() if (times := self.missed[each])}
        return {"kind": type(self).__name__, "steps": self.steps, "lr": self.lr, "states": list(self.state_names),
                "missed": missed}

    def load_state(self, state: dict[str, Any], paths: Mapping[str, Parameter] | None = None,
                   stored: Collection[str] | None = None) -> None:
        """Take the facts that `state` returned. Options (lr, weight_decay, betas, ...) stay as they were given to this
        optimizer.

        paths, stored   as in `matrices`. A parameter without a state in `stored` had no gradient in all steps

        Raises Pmm3dError if the facts are of another kind of optimizer; if they count missed gradients, as `matrices`.
        """
        if state["kind"] != type(self).__name__:
            raise Pmm3dError(f"the state is of {state['kind']}; this optimizer is {type(self).__name__}")
        self.steps, missed = state["steps"], state.get("missed", {})
        named = self._by_path(paths) if missed or stored is not None else {}
        options = self._options()
        begin = {path for path, each in named.items()
                 if stored is not None and not self._is_stored(path, self.states(options[each]), stored)}
        self.missed = +Counter({each: self.steps if path in begin else missed.get(path, 0)
                                for path, each in named.items()})

    def _is_stored(self, path: str, names: Collection[str], stored: Collection[str]) -> bool:
        """Whether there is a state of the parameter among these names of a checkpoint; of an optimizer without state,
        the parameter itself."""
        return any(state_name(path, name) in stored for name in names) if names else path in stored

    def _by_path(self, paths: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
        """Return this optimizer's parameters by their paths, or by their names if there are no paths. Raises Pmm3dError
        for two parameters of the same name."""
        if paths is not None:
            own = set(self.parameters)
            return {path: parameter for path, parameter in paths.items() if parameter in own}
        named = dict[str, Parameter]()
        for parameter in self.parameters:
            if named.setdefault(parameter.name, parameter) is not parameter:
                raise Pmm3dError(f"{type(self).__name__}: two parameters are named {parameter.name!r}, so a checkpoint "
                                 "would hold the state of one of them. Make both networks attributes of one Module, "
                                 "and pass its named_parameters() to this call")
        return named

    def local_norm_squared(self) -> float:
        """This rank's part of the square of the 2-norm of all gradients: their sum over all ranks is the whole. Moves
        nothing, unless another optimizer left gradients split over data."""
        return float(sum(self.own_squares().values(), 0.0))

    def own_squares(self) -> dict[Parameter, Any]:
        """The same of each parameter that has a gradient; on a device the numbers stay there."""
        here, squares = self.grid.shape.position(self.grid.rank), dict[Parameter, Any]()
        for parameter in self._filled():
            own, counts = self._gradient(parameter), parameter.counts and self._layout(parameter).is_first(here)
            squares[parameter] = parameter.library.square_sum(own) if counts else 0.0
        return squares

    def non_finite(self) -> str:
        """Which gradients of the whole network are not finite, in words, the same on all ranks. Collective."""
        return non_finite(self, self.own_squares())

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the whole network. Collective: one number from each rank."""
        return norm_of(self.whole, self.local_norm_squared())

    def clip(self, norm: float) -> float:
        """Scale all gradients so that their 2-norm over the whole grid is at most `norm`; returns what it was. Raises
        NonFiniteGradientError, on every rank, where that is infinite or NaN."""
        check_clip(norm)
        before = self.gradient_norm()
        check_finite(before)
        factor = clipping(before, norm)
        for parameter in self._filled() if factor != 1 else ():
            with self.grid.ledger.passing("clip"):
                parameter.accumulated.local[...] *= factor
        return before

    def _filled(self) -> list[Parameter]:
        """Wait for the sums of gradients. Return the parameters that have a gradient."""
        for parameter in self.parameters:
            buffer = parameter.accumulated
            if buffer.failed or buffer.is_open or buffer.queues:
                raise Pmm3dError(f"{type(self).__name__}: the gradient of {parameter.name or 'a parameter'} is not "
                                 "summed over the ranks: the last backward pass before a step must be outside of "
                                 "no_sync, and a queue of defer_weights drained; after one that ended with an error, "
                                 "zero_grad() forgets it")
        for parameter in self.parameters:
            parameter.accumulated.wait()
        return [parameter for parameter in self.parameters if parameter.accumulated.layout is not None]

    def _gradient(self, parameter: Parameter) -> Array:
        """This rank's part of the summed gradient, in the layout of the state; flat."""
        return parameter.accumulated.in_layout(self._layout(parameter)).reshape(-1)

    def _change(self, parameter: Parameter, options: Options, factor: float) -> None:
        """Change a parameter by its gradient times a factor."""
        gradient = self._gradient(parameter)
        with computing(self.grid, "update", PER_ELEMENT * prod(parameter.form.local_shape)):
            self._move(parameter, gradient, self._states(parameter, options), options, factor)

    def _move(self, parameter: Parameter, gradient: Array, state: Sequence[Array], options: Options,
              factor: float) -> None:
        """Change this rank's part of a parameter by `update`, and round it if it is a master weight."""
        library, types, state = parameter.library, parameter.precision, [array.reshape(-1) for array in state]
        low = self._own(parameter, parameter.shard)
        weight = parameter.master_in(self._layout(parameter)).local.reshape(-1) if types.has_master else low
        if not library.has_data:
            changed = [weight, *state, *([gradient] * (factor != 1))]
            rounded = [low] * types.has_master
            library.passed(type(self).__name__.lower(), gradient, *changed, *changed, *rounded)
            return

        def change(chunk: slice) -> None:
            part = gradient[chunk]
            if library.dtype(part) != types.master:
                part = library.astype(part, types.master)
            if factor != 1:
                part *= factor
            self.update(weight[chunk], part, [array[chunk] for array in state], options)
            if weight is not low:
                low[chunk] = weight[chunk]

        parallel_rows(library, change, weight.shape, library.slice_elements or DEVICE_ELEMENTS)

    def _own(self, parameter: Parameter, array: Array) -> Array:
        """The part that this rank changes of an array that is like the parameter's shard; flat."""
        flat, index = array.reshape(-1), self.grid.data.index
        if not self._splits(parameter):
            return flat
        return flat[slice(*offsets(parameter.accumulated.counts("data"))[index : index + 2])]

    def _states(self, parameter: Parameter, options: Options) -> list[Array]:
        """The local state arrays of a parameter, zero at first, shaped like the part that this rank changes."""
        if parameter not in self._state:
            types, library = parameter.precision, parameter.library
            shape = self._layout(parameter).box(parameter.shape, self.grid.shape, self.grid.coords).shape
            with self.grid.ledger.holding("state"):
                states = [library.empty(shape, types.master) for _ in self.states(options)]
            for array in states:
                array[...], parameter.has_state = 0, True
            self._state[parameter] = states
        return self._state[parameter]

    def _layout(self, parameter: Parameter) -> Layout:
        return parameter.accumulated.split_layout("data") if self._splits(parameter) else parameter.layout

    def _splits(self, parameter: Parameter) -> bool:
        """Whether each rank along data changes a part of it only: not where data splits the parameter itself."""
        return self.shard_over_data and "data" not in parameter.layout.splitting
