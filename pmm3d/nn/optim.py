"""Optimizers whose state is spread like the weights, and over the data axis too if asked (ZeRO-1); schedules."""

from __future__ import annotations

from math import cos, pi, sqrt

import array_api_compat

from ..arrays import NumpyLibrary
from ..comm.collectives import gather_parts
from ..errors import Pmm3dError
from ..layout import Layout, offsets
from ..product import DistMatrix
from .dense import computing
from .parameter import Parameter
from .parts import split_counts
from .tensor import CHUNK


class Optimizer:
    """Changes parameters by their gradients. Subclasses name their state arrays and say how to change a slice.

    parameters       of one network
    lr               learning rate; schedules change it
    weight_decay     see the subclass
    shard_over_data  ZeRO-1: each rank along data keeps the state of, and changes, only its part of each parameter;
                     gradients are reduce-scattered over data and the weights gathered after the step: the bytes of an
                     all-reduce, 1/Gdata of the state, bitwise the same weights
    steps            how many there were
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, parameters, lr: float, *, weight_decay: float = 0.0, shard_over_data: bool = False):
        self.parameters: list[Parameter] = list(parameters)
        if not self.parameters:
            raise Pmm3dError(f"{type(self).__name__} has no parameters: pass net.parameters()")
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise Pmm3dError(f"{type(self).__name__}: {name} is a number of at least 0; got {value!r}")
        self.grid = self.parameters[0].grid
        self.lr, self.weight_decay, self.steps = lr, weight_decay, 0
        self.shard_over_data = shard_over_data and self.grid.data.size > 1
        self._state: dict[Parameter, list] = {}
        for parameter in self.parameters:
            parameter.split_over_data = self.shard_over_data

    def step(self) -> None:
        """Change every parameter that has a gradient, and let the gradients go. Collective."""
        self.steps += 1
        gathers = []
        with self.grid.ledger.phase("optimizer"):
            for parameter in self.parameters:
                if parameter.filled:
                    with computing(self.grid, "update"):
                        self._change(parameter)
                    parameter.version += 1
                    if self.shard_over_data:
                        gathers.append(self._gather(parameter))
            for gather in gathers:
                gather.wait()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients. `step` does so itself."""
        for parameter in self.parameters:
            parameter.grad = None

    def _change(self, parameter: Parameter) -> None:
        xp = array_api_compat.array_namespace(parameter.local)
        start, stop = self._own(parameter)
        weight, gradient = (array.reshape(-1)[start:stop] for array in (parameter.local, parameter.gradient))
        state = [array.reshape(-1) for array in self._states(parameter)]
        for low in range(0, stop - start, CHUNK):
            part = slice(low, low + CHUNK)
            self.update(xp, weight[part], gradient[part], *(array[part] for array in state))

    def update(self, xp, weight, gradient, *state) -> None:
        """Change a slice of a parameter, and of its state, in place."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it changes weights: define update")

    def _own(self, parameter: Parameter) -> tuple[int, int]:
        """The range of the flat local block that this rank changes."""
        if not self.shard_over_data:
            return 0, parameter.value.local.reshape(-1).shape[0]
        starts = offsets(split_counts(parameter))
        return starts[self.grid.data.index], starts[self.grid.data.index + 1]

    def _gather(self, parameter: Parameter):
        counts, flat, (start, stop) = split_counts(parameter), parameter.local.reshape(-1), self._own(parameter)
        library = parameter.library
        return self.grid.data.begin(
            "all_gather", lambda link: gather_parts(link, library, flat[start:stop], flat, counts)
        )

    def _states(self, parameter: Parameter) -> list:
        """The local state arrays of a parameter, zero at first, shaped like the part that this rank changes."""
        if parameter not in self._state:
            box = self._layout(parameter).box(parameter.shape, self.grid.shape, self.grid.coords)
            arrays = [parameter.library.empty(box.shape, parameter.dtype) for _ in self.state_names]
            for array in arrays:
                array[...] = 0
            self._state[parameter] = arrays
            parameter.placed = parameter.placed or bool(arrays)
        return self._state[parameter]

    def _layout(self, parameter: Parameter) -> Layout:
        return parameter.split() if self.shard_over_data else parameter.layout

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> state, as a checkpoint takes them: "optimizer/0.weight/momentum"."""
        return {
            f"optimizer/{parameter.name}/{name}": DistMatrix(self.grid, array, parameter.shape, self._layout(parameter))
            for parameter in self.parameters
            for name, array in zip(self.state_names, self._states(parameter))
        }

    def state(self) -> dict:
        """What else a checkpoint needs; JSON-able."""
        return {"kind": type(self).__name__, "steps": self.steps, "lr": self.lr}

    def load_state(self, state: dict) -> None:
        if state["kind"] != type(self).__name__:
            raise Pmm3dError(f"the state is of {state['kind']}; this optimizer is {type(self).__name__}")
        self.steps, self.lr = state["steps"], state["lr"]

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the whole network. Collective: one number from each rank."""
        total = 0.0
        for parameter in self.parameters:
            if parameter.filled and self._counts(parameter):
                start, stop = self._own(parameter)
                total += _square_sum(parameter.library, parameter.gradient.reshape(-1)[start:stop])
        library = NumpyLibrary()
        array = library.empty((1,), "float64")
        array[0] = total
        with self.grid.ledger.phase("optimizer"):
            return sqrt(float(self.grid.everyone.all_reduce(array, agreed=True).wait()[0]))

    def _counts(self, parameter: Parameter) -> bool:
        """Whether this rank's part is counted here: one of the ranks that hold the same."""
        return self._layout(parameter).is_first(self.grid.coords)

    def clip(self, norm: float) -> float:
        """Scale all gradients so that their 2-norm over the whole grid is at most `norm`; returns what it was."""
        if not norm > 0:
            raise Pmm3dError(f"clip: the norm is a positive number; got {norm!r}")
        found = self.gradient_norm()
        if found > norm:
            for parameter in self.parameters:
                if parameter.filled:
                    start, stop = self._own(parameter)
                    flat = parameter.gradient.reshape(-1)[start:stop]
                    flat *= norm / found
        return found


class SGD(Optimizer):
    """v = momentum v + g;  w = w - lr v, or w - lr (g + momentum v) with nesterov. g has weight_decay w added."""

    def __init__(self, parameters, lr: float, momentum: float = 0.0, *, nesterov: bool = False, **options):
        super().__init__(parameters, lr, **options)
        if not 0 <= momentum < 1 or (nesterov and not momentum):
            raise Pmm3dError(f"SGD: momentum is at least 0 and below 1, and above 0 for nesterov; got {momentum!r}")
        self.momentum, self.nesterov = momentum, nesterov
        self.state_names = ("momentum",) if momentum else ()

    def update(self, xp, weight, gradient, *state):
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weight
        if state:
            velocity = state[0]
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        weight -= self.lr * gradient


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015), with weight_decay w added to the gradient."""

    state_names = ("mean", "square")
    decoupled = False

    def __init__(self, parameters, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, **options):
        super().__init__(parameters, lr, **options)
        if not all(0 <= beta < 1 for beta in betas):
            raise Pmm3dError(f"{type(self).__name__}: betas are at least 0 and below 1; got {betas!r}")
        self.betas, self.eps = tuple(betas), eps

    def update(self, xp, weight, gradient, *state):
        mean, square = state
        first, second = self.betas
        if self.weight_decay and not self.decoupled:
            gradient = gradient + self.weight_decay * weight
        if self.weight_decay and self.decoupled:
            weight *= 1 - self.lr * self.weight_decay
        mean *= first
        mean += (1 - first) * gradient
        square *= second
        square += (1 - second) * gradient * gradient
        scale = sqrt(1 - second**self.steps)
        weight -= (self.lr / (1 - first**self.steps)) * mean / (xp.sqrt(square) / scale + self.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): w = (1 - lr weight_decay) w before each step."""

    decoupled = True

    def __init__(self, parameters, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, *,
                 weight_decay: float = 0.01, **options):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)


class Schedule:
    """Sets an optimizer's learning rate; call step() after each of its steps.

    warm_up   steps in which the rate rises linearly from 1/warm_up of the optimizer's to the whole of it
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

    def state(self) -> dict:
        return {"count": self.count, "base": self.base}

    def load_state(self, state: dict) -> None:
        self.count, self.base = state["count"], state["base"]
        self._set()


class Cosine(Schedule):
    """Half a cosine from the whole rate to `floor` of it, `steps` steps after the start, warm-up included."""

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0):
        self.length, self.floor = max(1, steps - warm_up), floor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        done = min(1.0, steps / self.length)
        return self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done))


class Step(Schedule):
    """The rate times `factor` every `every` steps."""

    def __init__(self, optimizer: Optimizer, every: int, factor: float = 0.1, warm_up: int = 0):
        self.every, self.ratio = every, factor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        return self.ratio ** (steps // self.every)


def _square_sum(library, flat) -> float:
    xp = array_api_compat.array_namespace(flat)
    total = 0.0
    for start in range(0, flat.shape[0], CHUNK):
        part = library.astype(flat[start : start + CHUNK], "float64")
        total += float(xp.sum(part * part))
    return total
