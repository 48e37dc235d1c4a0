"""Optimizers whose state is spread like the weights, and over the data axis too if asked (ZeRO-1); schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import cos, pi, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from ..arrays import Array
from ..errors import Pmm3dError
from ..layout import Layout, offsets
from ..product import DistMatrix
from .compute import array_namespace, chunks, computing
from .gradients import State
from .parameter import Parameter

__all__ = ["SGD", "Adam", "AdamW", "Cosine", "Optimizer", "Schedule", "Step"]


class Optimizer:
    """Changes parameters by their gradients. Subclasses name their state arrays and say how to change a slice.

    parameters       of one network
    lr               learning rate; schedules change it
    weight_decay     see the subclass
    shard_over_data  ZeRO-1: each rank along data keeps the state of, and changes, only its part of each parameter;
                     gradients are reduce-scattered over data and the weights gathered after the step: the bytes of an
                     all-reduce, 1/Gdata of the state, bitwise the same weights
    steps            how many there were
    missed           parameter -> how many of them it had no gradient in

    Raises Pmm3dError, on every rank, for numbers that make no sense.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Optimizer(nn.Linear(grid, 3, 2).parameters(), lr=0.1).state()
        {'kind': 'Optimizer', 'steps': 0, 'lr': 0.1, 'missed': {}}
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, parameters: Iterable[Parameter], lr: float, *, weight_decay: float = 0.0,
                 shard_over_data: bool = False):
        self.parameters = list(parameters)
        if not self.parameters:
            raise Pmm3dError(f"{type(self).__name__} has no parameters: pass net.parameters()")
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise Pmm3dError(f"{type(self).__name__}: {name} is a number of at least 0; got {value!r}")
        self.grid = self.parameters[0].grid
        self.lr, self.weight_decay, self.steps, self.changes = lr, weight_decay, 0, 0
        self.shard_over_data = shard_over_data and self.grid.data.size > 1
        self.missed: Counter[Parameter] = Counter()
        self._state: dict[Parameter, list[Array]] = {}
        for parameter in self.parameters:
            parameter.accumulated.owners.add(self._splits(parameter))

    def step(self) -> None:
        """Change every parameter that has a gradient, and let the gradients go. Collective. Raises Pmm3dError, on every
        rank and with the weights as they were, for gradients that are not summed yet (see `no_sync`)."""
        filled, gathers = self._filled(), []
        self.steps += 1
        self.missed.update(set(self.parameters).difference(filled))
        with self.grid.ledger.phase("optimizer"):
            for parameter in filled:
                with computing(self.grid, "update"):
                    self._change(parameter)
                parameter.version += 1
                if self._splits(parameter):
                    own, whole = self._own(parameter, parameter.shard), parameter.shard.reshape(-1)
                    gathers.append(self.grid.data.gather_into(own, whole, parameter.accumulated.data_counts))
            for gather in gathers:
                gather.wait()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients, as `step` does too."""
        for parameter in self.parameters:
            parameter.grad = None

    def update(self, xp: ModuleType, weight: Array, gradient: Array, *state: Array) -> None:
        """Change a slice of a parameter, and of its state, in place. xp: the namespace of the arrays; `self.changes`:
        how often the parameter has been changed, this time included."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it changes weights: define update")

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> state, as a checkpoint takes them: "optimizer/0.weight/momentum"."""
        return {f"optimizer/{parameter.name}/{name}":
                DistMatrix(self.grid, array, parameter.shape, self._layout(parameter))
                for parameter in self.parameters for name, array in zip(self.state_names, self._states(parameter))}

    def state(self) -> dict[str, Any]:
        """What else a checkpoint needs; JSON-able."""
        missed = {parameter.name: times for parameter, times in self.missed.items()}
        return {"kind": type(self).__name__, "steps": self.steps, "lr": self.lr, "missed": missed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave. Raises Pmm3dError if that was another kind of optimizer."""
        if state["kind"] != type(self).__name__:
            raise Pmm3dError(f"the state is of {state['kind']}; this optimizer is {type(self).__name__}")
        self.steps, self.lr, missed = state["steps"], state["lr"], state.get("missed", {})
        self.missed = Counter({each: missed[each.name] for each in self.parameters if each.name in missed})

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the whole network. Collective: one number from each rank."""
        total, here = 0.0, self.grid.shape.position(self.grid.rank)
        for parameter in self._filled():
            own = self._own(parameter, self._gradient(parameter))
            counts = parameter.library.has_data and self._layout(parameter).is_first(here)
            for chunk in chunks(own.shape[0]) if counts else ():
                part = parameter.library.astype(own[chunk], "float64")
                total += float((part * part).sum())
        with self.grid.ledger.phase("optimizer"):
            return sqrt(float(self.grid.everyone.all_reduce(np.array([total]), agreed=True).wait()[0]))

    def clip(self, norm: float) -> float:
        """Scale all gradients so that their 2-norm over the whole grid is at most `norm`; returns what it was."""
        if not norm > 0:
            raise Pmm3dError(f"clip: the norm is a positive number; got {norm!r}")
        before = self.gradient_norm()
        if before > norm:
            for parameter in self._filled():
                array, record = self._gradient(parameter), parameter.accumulated
                (self._own(parameter, array) if record.split else array.reshape(-1))[...] *= norm / before
        return before

    def _filled(self) -> list[Parameter]:
        """The parameters that have a gradient, summed over all ranks."""
        states = {parameter: parameter.accumulated.state for parameter in self.parameters}
        unfit = next((each for each, state in states.items()
                      if state not in (State.EMPTY, State.SUMMED) or each.accumulated.waiting), None)
        if unfit is not None:
            raise Pmm3dError(f"{type(self).__name__}: the gradient of {unfit.name or 'a parameter'} is not summed over "
                             "the ranks: the last backward pass before a step must be outside of no_sync, and a queue "
                             "of defer_weights drained; after one that ended with an error, zero_grad() forgets it")
        return [parameter for parameter, state in states.items() if state is State.SUMMED]

    def _gradient(self, parameter: Parameter) -> Array:
        """The summed gradient, in an array like the parameter's shard; brought together along data if others left it
        split, and this optimizer needs all of it."""
        record = parameter.accumulated
        if record.split and not self._splits(parameter):
            flat, counts = record.array.reshape(-1), parameter.accumulated.data_counts
            start, stop = offsets(counts)[self.grid.data.index :][:2]
            self.grid.data.gather_into(flat[start:stop], flat, counts).wait()
            record.split = False
        return record.array

    def _change(self, parameter: Parameter) -> None:
        xp, self.changes = array_namespace(parameter.shard), self.steps - self.missed[parameter]
        arrays = [self._own(parameter, array) for array in (parameter.shard, self._gradient(parameter))]
        arrays += [array.reshape(-1) for array in self._states(parameter)]
        for chunk in chunks(arrays[0].shape[0]) if parameter.library.has_data else ():
            self.update(xp, *(array[chunk] for array in arrays))

    def _own(self, parameter: Parameter, array: Array) -> Array:
        """The part that this rank changes of an array that is like the parameter's shard; flat."""
        flat, index = array.reshape(-1), self.grid.data.index
        if not self._splits(parameter):
            return flat
        return flat[slice(*offsets(parameter.accumulated.data_counts)[index : index + 2])]

    def _states(self, parameter: Parameter) -> list[Array]:
        """The local state arrays of a parameter, zero at first, shaped like the part that this rank changes."""
        if parameter not in self._state:
            box = self._layout(parameter).box(parameter.shape, self.grid.shape, self.grid.coords)
            with self.grid.ledger.holding("state"):
                self._state[parameter] = [parameter.library.empty(box.shape, parameter.dtype) for _ in self.state_names]
            for array in self._state[parameter]:
                array[...], parameter.has_state = 0, True
        return self._state[parameter]

    def _layout(self, parameter: Parameter) -> Layout:
        return parameter.accumulated.split_layout if self._splits(parameter) else parameter.layout

    def _splits(self, parameter: Parameter) -> bool:
        """Whether each rank along data changes a part of it only: not where data splits the parameter itself."""
        return self.shard_over_data and "data" not in parameter.layout.splitting


class SGD(Optimizer):
    """v = momentum v + g;  w = w - lr v, or w - lr (g + momentum v) with nesterov. g has weight_decay w added.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     SGD(nn.Linear(grid, 3, 2).parameters(), lr=0.1, momentum=0.9).state_names
        ('momentum',)
    """

    def __init__(self, parameters: Iterable[Parameter], lr: float, momentum: float = 0.0, *, nesterov: bool = False,
                 **options: Any):
        super().__init__(parameters, lr, **options)
        if not 0 <= momentum < 1 or (nesterov and not momentum):
            raise Pmm3dError(f"SGD: momentum is at least 0 and below 1, and above 0 for nesterov; got {momentum!r}")
        self.momentum, self.nesterov = momentum, nesterov
        self.state_names = ("momentum",) if momentum else ()

    def update(self, xp: ModuleType, weight: Array, gradient: Array, *state: Array) -> None:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weight
        if state:
            velocity = state[0]
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        weight -= self.lr * gradient


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015), with weight_decay w added to the gradient. Its correction for the first steps counts,
    for each parameter, the steps in which it had a gradient.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     list(Adam(nn.Linear(grid, 3, 2, bias=False).parameters(), shard_over_data=True).matrices())
        ['optimizer/weight/mean', 'optimizer/weight/square']
    """

    state_names = ("mean", "square")
    decoupled = False

    def __init__(self, parameters: Iterable[Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, **options: Any):
        super().__init__(parameters, lr, **options)
        if not all(0 <= beta < 1 for beta in betas):
            raise Pmm3dError(f"{type(self).__name__}: betas are at least 0 and below 1; got {betas!r}")
        self.betas, self.eps = betas, eps

    def update(self, xp: ModuleType, weight: Array, gradient: Array, *state: Array) -> None:
        (mean, square), (first, second) = state, self.betas
        if self.decoupled:
            weight *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weight
        mean *= first
        mean += (1 - first) * gradient
        square *= second
        square += (1 - second) * gradient * gradient
        scale = sqrt(1 - second**self.changes)
        weight -= (self.lr / (1 - first**self.changes)) * mean / (xp.sqrt(square) / scale + self.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): w = (1 - lr weight_decay) w before each step.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     AdamW(nn.Linear(grid, 3, 2).parameters()).weight_decay
        0.01
    """

    decoupled = True

    def __init__(self, parameters: Iterable[Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, *, weight_decay: float = 0.01, **options: Any):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)


class Schedule:
    """Sets an optimizer's learning rate; call step() after each of its steps. This one keeps it constant.

    warm_up   steps in which the rate rises linearly from 1/warm_up of the optimizer's to the whole of it

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Schedule(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), warm_up=4).optimizer.lr
        0.25
    """

    def __init__(self, optimizer: Optimizer, warm_up: int = 0):
        self.optimizer, self.warm_up, self.count, self.base = optimizer, warm_up, 0, optimizer.lr
        self._set()

    def factor(self, steps: int) -> float:
        """Of the optimizer's rate, `steps` steps after the warm-up."""
        return 1.0

    def step(self) -> None:
        self.count += 1
        self._set()

    def _set(self) -> None:
        if self.count < self.warm_up:
            self.optimizer.lr = self.base * (self.count + 1) / self.warm_up
        else:
            self.optimizer.lr = self.base * self.factor(self.count - self.warm_up)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON-able."""
        return {"count": self.count, "base": self.base}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count, self.base = state["count"], state["base"]
        self._set()


class Cosine(Schedule):
    """Half a cosine from the whole rate to `floor` of it, `steps` steps after the start, warm-up included.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     round(Cosine(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), steps=10).factor(5), 12)
        0.5
    """

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0):
        self.length, self.floor = max(1, steps - warm_up), floor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        done = min(1.0, steps / self.length)
        return self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done))


class Step(Schedule):
    """The rate times `factor` every `every` steps.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Step(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), every=10, factor=0.5).factor(25)
        0.25
    """

    def __init__(self, optimizer: Optimizer, every: int, factor: float = 0.1, warm_up: int = 0):
        self.every, self.ratio = every, factor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        return self.ratio ** (steps // self.every)
