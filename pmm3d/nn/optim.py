"""Optimizers, and schedules of their learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Any

from ..arrays import Array
from ..errors import Pmm3dError
from . import fused
from .adam import Adam, AdamW
from .gradient_norm import NonFiniteGradientError
from .loss_scale import LossScale
from .muon import Muon
from .optimizer import Optimizer, Options, Parameters

__all__ = ["SGD", "Adam", "AdamW", "Cosine", "LossScale", "Muon", "NonFiniteGradientError", "Optimizer", "Schedule",
           "Step"]


class SGD(Optimizer):
    """v = momentum v + g;  w = w - lr v, or w - lr (g + momentum v) with nesterov. g has weight_decay w added.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     SGD(nn.Linear(grid, 3, 2).parameters(), lr=0.1, momentum=0.9).state_names
        ('momentum',)
    """

    defaults = {"momentum": 0.0, "nesterov": False}

    def __init__(self, parameters: Parameters, lr: float, momentum: float = 0.0, **options: Any):
        super().__init__(parameters, lr, momentum=momentum, **options)
        self.state_names = ("momentum",) if any(group["momentum"] for group in self.groups) else ()

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        momentum = options["momentum"]
        if not 0 <= momentum < 1 or (options["nesterov"] and not momentum):
            raise Pmm3dError(f"SGD: momentum is at least 0 and below 1, and above 0 for nesterov; got {momentum!r}")

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        if fused.sgd(weight, gradient, state, options):
            return
        momentum, decay = options["momentum"], options["weight_decay"]
        if decay:
            gradient = gradient + decay * weight
        if momentum:
            velocity = state[0]
            velocity *= momentum
            velocity += gradient
            gradient = gradient + momentum * velocity if options["nesterov"] else velocity
        weight -= options["lr"] * gradient


class Schedule:
    """Sets an optimizer's learning rate, of each group that group's own; call step() after each of its steps. This one
    keeps it constant.

    warm_up   steps in which the rate rises linearly from 1/warm_up of the optimizer's to the whole of it

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     Schedule(SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), warm_up=4).optimizer.lr
        0.25
    """

    def __init__(self, optimizer: Optimizer, warm_up: int = 0):
        self.optimizer, self.warm_up, self.count = optimizer, warm_up, 0
        self.bases = [group["lr"] for group in optimizer.groups]
        self._set()

    def factor(self, steps: int) -> float:
        """Of the optimizer's rate, `steps` steps after the warm-up."""
        return 1.0

    def step(self) -> None:
        self.count += 1
        self._set()

    def end_at(self, steps: int) -> None:
        """Have it come to its end, if it has one, so many steps after the start."""

    def _set(self) -> None:
        for group, base in zip(self.optimizer.groups, self.bases):
            if self.count < self.warm_up:
                group["lr"] = base * (self.count + 1) / self.warm_up
            else:
                group["lr"] = base * self.factor(self.count - self.warm_up)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON-able."""
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave: how many steps there were. The rates stay those of the optimizer as it was made."""
        self.count = state["count"]
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

    def end_at(self, steps: int) -> None:
        self.length = max(1, steps - self.warm_up)
        self._set()

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
