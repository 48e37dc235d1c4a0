"""What optimizers share: groups of parameters, state that is spread like the weights, and over the data axis too if
asked (ZeRO-1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import inf, isfinite, prod, sqrt
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np

from ..arrays import Array, parallel_rows
from ..arrays.numpy_library import DEVICE_ELEMENTS
from ..comm import Pending
from ..errors import Pmm3dError, hint
from ..layout import Layout, offsets
from ..product import DistMatrix
from .clipping import check_clip, check_finite, clipping
from .compute import PER_ELEMENT, array_namespace, computing
from .kernels import OnePass
from .masters import REMAINDER, carry, forget_written, joined, part, state_name
from .parameter import Parameter
from .torch_kernels import has_kernel

Group = dict[str, Any]
""""params", and the options that they are changed with: "lr", "weight_decay" and those of the kind of optimizer."""
Parameters = Iterable[Parameter] | Iterable[Mapping[str, Any]]


SHARDED = ("states", "gradients")
"""Of what each rank along data keeps its part only: ZeRO-1, and ZeRO-2."""


class Option:
    """An option of which each group of parameters has its own value: that of the group under way, else of the first.

        >>> class Lion(Optimizer):
        ...     beta = Option()
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Optimizer | None, owner: type) -> Any:
        return self if optimizer is None else optimizer.group[self._name]

    def __set__(self, optimizer: Optimizer, value: Any) -> None:
        optimizer.group[self._name] = value


class Optimizer:
    """Changes parameters by their gradients. Subclasses name their options and state arrays, and say how to change a
    slice.

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
    groups           dicts of "params" and of all options; may be changed between steps, by all ranks
    group            the first, or the one that is being changed: `lr` and the like are its
    steps            how many there were
    missed           parameter -> how many of them it had no gradient in

    A subclass passes options of its own to this __init__ by name. Known are the parameters of its __init__ and the
    options that it declares as class attributes: with `momentum = Option()`, `self.momentum` is the group's value.

    Raises Pmm3dError, on every rank, for unknown options and for numbers that make no sense.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     net = nn.Linear(grid, 3, 2)
        ...     opt = Optimizer([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}], lr=0.1)
        ...     opt.state(), opt.lr, opt.groups[1]["lr"]
        ({'kind': 'Optimizer', 'steps': 0, 'lr': 0.1, 'states': [], 'missed': {}}, 0.1, 0.2)
    """

    state_names: tuple[str, ...] = ()
    decoupled = False
    """Whether weight_decay shrinks the weight beside the step, or is a part of the gradient."""
    takes_remainders = False
    """Whether `update` reads the weight for nothing but weight_decay, and only adds to it: it is then given, on devices
    of torch, what a weight of low precision lacks in its place. Of a subclass that defines `update` again it is to be
    said again."""
    in_threads = False
    """Whether `update` may be called on several threads at once, for slices of arrays of numpy: it then changes nothing
    but what it is given. Of a subclass that defines `update` again it is to be said again."""
    lr, weight_decay, decay_vectors = Option(), Option(), Option()

    def __init__(self, parameters: Parameters, lr: float, *, weight_decay: float = 0.0, decay_vectors: bool = True,
                 shard_over_data: bool | str = False, **options: Any):
        self.groups = self._grouped(list(parameters), {"lr": lr, "weight_decay": weight_decay,
                                                       "decay_vectors": decay_vectors, **options})
        for group in reversed(self.groups):
            self.group = group
            self.check_options()
        self.parameters: list[Parameter] = [each for group in self.groups for each in group["params"]]
        self._check_parameters()
        self.grid = self.parameters[0].grid
        self.steps = self.changes = 0
        if shard_over_data not in (False, True, *SHARDED):
            raise Pmm3dError(f'{type(self).__name__}: shard_over_data is False, "states" (or True) or "gradients"; got '
                             f"{shard_over_data!r}")
        self.shard_over_data = bool(shard_over_data) and self.grid.data.size > 1
        self.missed: Counter[Parameter] = Counter()
        self._state: dict[Parameter, list[Array]] = {}
        self._noted, self._left = 0, dict[Parameter, tuple[object, ...]]()
        self.grid.attached.setdefault(Optimizer, WeakSet()).add(self)
        for parameter in self.parameters:
            buffer = parameter.accumulated
            buffer.split_over = "data" if self._splits(parameter) else ""
            buffer.scattered = self._splits(parameter) and shard_over_data == "gradients"

    def __init_subclass__(cls) -> None:
        """What a class says of its update does not hold for one that comes before it, be it from a mixin: that is what
        is done on a device too, with the weights themselves."""
        super().__init_subclass__()
        for name in ("one_pass", "takes_remainders", "in_threads"):
            first = next(each for each in cls.__mro__ if {"update", name} & vars(each).keys())
            if name not in vars(first):
                setattr(cls, name, getattr(Optimizer, name))

    def _grouped(self, given: list[Any], options: dict[str, Any]) -> list[Group]:
        groups = given if given and all(isinstance(each, Mapping) for each in given) else [{"params": given}]
        declared = [name for name in dir(type(self)) if isinstance(getattr(type(self), name), Option)]
        taken = {name for kind in type(self).__mro__ for name in signature(getattr(kind, "__init__")).parameters}
        own = sorted(options.keys() & taken - {*declared})
        self._check_known("", options, [*declared, *own, "shard_over_data"])
        for group in groups:
            self._check_known(", in a group of parameters", group, ["params", *declared, *own])
        return [{**options, **group, "params": list(group.get("params", ()))} for group in groups]

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

    def check_options(self) -> None:
        """Raises Pmm3dError for options of `group` that make no sense."""
        for name in ("lr", "weight_decay"):
            if not 0 <= self.group[name] < inf:
                raise Pmm3dError(f"{type(self).__name__}: {name} is a number of at least 0; got {self.group[name]!r}")

    def step(self, *, check: bool = False, factor: float = 1.0) -> None:
        """Change every parameter that has a gradient, and let the gradients go. Collective.

        factor  the gradients are multiplied with it on the way, the same on all ranks: to clip them, or to take a
                loss's scale off
        check   find the gradient's norm first (one number from each rank), and raise NonFiniteGradientError where it is
                infinite or NaN. Without it such a gradient enters the weights, as in torch, but for `clip`, which looks

        The gradients serve as work memory: an array that was taken from one before may be another after the step, and
        after one that an `update` ended with an error they are to be forgotten (`zero_grad`).

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
            for parameter in self._in_groups(filled):
                self.changes = self.steps - self.missed[parameter]
                self._change(parameter, factor)
                gathers += self._spread(parameter)
            for gather in gathers:
                gather.wait()
        self._left.update((parameter, parameter.written) for parameter in filled if parameter.precision.has_master)
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
                  "state": [array for each in all_there for kept in each._state.values() for array in kept]}
        self.grid.ledger.memory.update((kind, sum(each.nbytes for each in held)) for kind, held in arrays.items())

    def skip(self) -> None:
        """A step in which no parameter is changed: it counts as one without gradients, which are let go."""
        self._filled()
        self.steps += 1
        self.missed.update(self.parameters)
        self.zero_grad()

    def _spread(self, parameter: Parameter) -> list[Pending]:
        """A parameter was changed: begin to bring what the ranks along data changed of it to all of them."""
        parameter.version += 1
        if not self._splits(parameter):
            return []
        own, whole = self._own(parameter, parameter.shard), parameter.shard.reshape(-1)
        return [self.grid.data.all_gather_into(own, whole, parameter.accumulated.counts("data"))]

    def _in_groups(self, filled: set[Parameter]) -> Iterator[Parameter]:
        """Those parameters, each while `group` has the options that it is changed with."""
        first = self.groups[0]
        try:
            for group in self.groups:
                without = group if group["decay_vectors"] else {**group, "weight_decay": 0.0}
                for parameter in group["params"]:
                    self.group = without if parameter.is_vector else group
                    if parameter in filled:
                        yield parameter
        finally:
            self.group = first

    def zero_grad(self) -> None:
        """Forget the gradients, as `step` does too."""
        for parameter in self.parameters:
            parameter.grad = None

    def update(self, xp: ModuleType, weight: Array, gradient: Array, *state: Array) -> None:
        """Change a slice of a parameter and of its state, in place. xp: the namespace of the arrays; `self.changes`:
        how often the parameter has been changed, this time included. A parameter of low precision comes in float64,
        with all that was ever added to it, and is rounded after."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it changes weights: define update")

    def one_pass(self) -> OnePass | None:
        """The same as the formula of a kernel, of the group under way; None if there is none."""
        return None

    def names_of(self, parameter: Parameter) -> tuple[str, ...]:
        """Of the state arrays that this parameter has."""
        return self.state_names

    def matrices(self, paths: Mapping[str, Parameter] | None = None, stored: Collection[str] = ()
                 ) -> dict[str, DistMatrix]:
        """Return the state arrays by name, for a checkpoint: "optimizer/0.weight/momentum". A parameter of low
        precision also has "optimizer/0.weight/remainder", its difference from the float32 weight.

        paths    the network's `named_parameters()`; None: each parameter's `name`
        stored   names in a checkpoint that is to be loaded

        A frozen parameter without a state is left out, unless `stored` has a state of it. Raises Pmm3dError, without
        `paths`, if two parameters have the same name.
        """
        return {state_name(path, name): DistMatrix(self.grid, array, parameter.shape, self._layout(parameter))
                for path, parameter in self._by_path(paths).items()
                if parameter.requires_grad or parameter in self._state or self._is_stored(path, parameter, stored)
                for name, array in zip([*self.names_of(parameter), REMAINDER], self._states(parameter))}

    def state(self, paths: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Return the other facts that a checkpoint needs; JSON-able. paths: as in `matrices`."""
        missed = {path: self.missed[each] for path, each in self._by_path(paths).items()} if self.missed else {}
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
        begin = {path for path, each in named.items() if stored is not None and self.names_of(each)
                 and not self._is_stored(path, each, stored)}
        self.missed = +Counter({each: self.steps if path in begin else missed.get(path, 0)
                                for path, each in named.items()})

    def _is_stored(self, path: str, parameter: Parameter, stored: Collection[str]) -> bool:
        """Whether there is a state of the parameter among these names of a checkpoint."""
        return any(state_name(path, name) in stored for name in (*self.names_of(parameter), REMAINDER))

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

    def own_square(self) -> float:
        """This rank's part of the square of the 2-norm of all gradients: their sum over all ranks is the whole. Moves
        nothing, unless another optimizer left gradients split over data."""
        return float(sum(map(self._own_square, self._filled()), 0.0))

    def _own_square(self, parameter: Parameter) -> Any:
        """Of one parameter; on a device it stays there."""
        own, here = self._gradient(parameter), self.grid.shape.position(self.grid.rank)
        counts = self._layout(parameter).is_first(here)
        return parameter.library.square_sum(own) if counts else 0.0

    def non_finite(self) -> str:
        """Which gradients are not finite, in words. Collective: a number for each parameter from each rank."""
        filled = self._filled()
        squares = np.array([float(self._own_square(parameter)) for parameter in filled])
        total = self.grid.everyone.all_reduce(squares, agreed=True).wait()
        wrong = [parameter.name or "a parameter" for parameter, square in zip(filled, total) if not isfinite(square)]
        if not wrong:
            return "all gradients are finite"
        return f"the gradient of {wrong[-1]} is not finite" + (
            f", the last one in the network of {len(wrong)}" if len(wrong) > 1 else "")

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the whole network. Collective: one number from each rank."""
        square = np.array([self.own_square()])
        with self.grid.ledger.phase("optimizer"):
            return sqrt(float(self.grid.everyone.all_reduce(square, agreed=True).wait()[0]))

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

    def _change(self, parameter: Parameter, factor: float) -> None:
        """Change a parameter by its gradient times a factor."""
        gradient = self._gradient(parameter)
        with computing(self.grid, "update", PER_ELEMENT * prod(parameter.form.local_shape)):
            self._move(parameter, factor, gradient, self._states(parameter)[: len(self.names_of(parameter))])

    def _move(self, parameter: Parameter, factor: float, gradient: Array, states: Sequence[Array]) -> None:
        """Change this rank's part of a parameter by what `update` makes of a flat array and states."""
        library, weight = parameter.library, self._own(parameter, parameter.shard)
        states = [array.reshape(-1) for array in states]
        remainder = self._states(parameter)[-1].reshape(-1) if parameter.precision.has_master else None
        formula = self.one_pass()
        if formula is not None and formula.change(library, factor, weight, gradient, remainder, states):
            return
        if not library.has_data:
            changed = [weight, *states, *([] if remainder is None else [remainder]), *([gradient] * (factor != 1))]
            library.passed(type(self).__name__.lower(), gradient, *changed, *changed)
            return
        written = remainder is not None and self._left.get(parameter) != parameter.written

        def change(chunk: slice) -> None:
            self._change_slice(parameter, factor, weight[chunk], gradient[chunk],
                               None if remainder is None else remainder[chunk], [array[chunk] for array in states],
                               written)

        parallel_rows(library, change, weight.shape, library.slice_elements or DEVICE_ELEMENTS, self.in_threads)

    def _change_slice(self, parameter: Parameter, factor: float, weight: Array, gradient: Array,
                      remainder: Array | None, states: list[Array], written: bool) -> None:
        """By `update`. The gradient is let go after the step: it may be scaled where it is."""
        xp, library, types = array_namespace(weight), parameter.library, parameter.precision
        if library.dtype(gradient) != types.master:
            gradient = library.astype(gradient, types.master)
        if factor != 1:
            gradient *= factor
        if remainder is None:
            self.update(xp, weight, gradient, *states)
            return
        if self.takes_remainders and has_kernel(library, gradient, remainder, *states):
            if written:
                forget_written(library, weight, remainder)
            self._change_remainder(parameter, weight, gradient, remainder, states)
            return
        exact = joined(library, weight, remainder)
        self.update(xp, exact, gradient, *states)
        part(library, exact, weight, remainder)

    def _change_remainder(self, parameter: Parameter, weight: Array, gradient: Array, remainder: Array,
                          states: list[Array]) -> None:
        """By torch's kernels, for which the remainder is the weight; that takes in what it then has too much of."""
        library, group, decay = parameter.library, self.group, self.weight_decay
        if decay and self.decoupled:
            remainder.mul_(1 - self.lr * decay).add_(weight, alpha=-self.lr * decay)
        elif decay:
            gradient.add_(weight, alpha=decay).add_(remainder, alpha=decay)
        try:
            self.group = {**group, "weight_decay": 0.0}
            self.update(library.xp, remainder, gradient, *states)
        finally:
            self.group = group
        fresh, change = (self.grid.workspace.array(tuple(each.shape), library.dtype(each), library)
                         for each in (weight, remainder))
        carry(library.xp, weight, remainder, fresh, change)

    def _own(self, parameter: Parameter, array: Array) -> Array:
        """The part that this rank changes of an array that is like the parameter's shard; flat."""
        flat = array.reshape(-1)
        if not self.shard_over_data or not self._splits(parameter):
            return flat
        index = self.grid.data.index
        return flat[slice(*offsets(parameter.accumulated.counts("data"))[index : index + 2])]

    def _states(self, parameter: Parameter) -> list[Array]:
        """The local state arrays of a parameter, zero at first, shaped like the part that this rank changes; the last
        one is what that part lacks of the weights that are changed, if these are of another type."""
        if parameter not in self._state:
            types, library = parameter.precision, parameter.library
            shape = self._layout(parameter).box(parameter.shape, self.grid.shape, self.grid.coords).shape
            with self.grid.ledger.holding("state"):
                states = [library.empty(shape, types.master)
                          for _ in range(len(self.names_of(parameter)) + types.has_master)]
            for array in states:
                array[...], parameter.has_state = 0, True
            self._state[parameter] = states
        return self._state[parameter]

    def _layout(self, parameter: Parameter) -> Layout:
        return parameter.accumulated.split_layout("data") if self._splits(parameter) else parameter.layout

    def _splits(self, parameter: Parameter) -> bool:
        """Whether each rank along data changes a part of it only: not where data splits the parameter itself."""
        return self.shard_over_data and "data" not in parameter.layout.splitting
