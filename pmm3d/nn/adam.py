"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any

from ..arrays import Array, library_of
from ..errors import Pmm3dError
from . import fused
from .optimizer import Optimizer, Options, Parameters


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015), with weight_decay w added to the gradient. Its correction for the first steps counts,
    for each parameter, the steps in which it had a gradient.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     list(Adam(nn.Linear(grid, 3, 2, bias=False).parameters(), shard_over_data=True).matrices())
        ['optimizer/weight/mean', 'optimizer/weight/square']
    """

    state_names: tuple[str, ...] = ("mean", "square")
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8}
    decoupled = False
    """Whether weight_decay shrinks the weight beside the step, or is a part of the gradient."""

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, **options: Any):
        super().__init__(parameters, lr, betas=betas, eps=eps, **options)

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        betas, eps = options["betas"], options["eps"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise Pmm3dError(f"{type(self).__name__}: betas are two numbers of at least 0 and below 1; got {betas!r}")
        if not 0 <= eps < inf:
            raise Pmm3dError(f"{type(self).__name__}: eps is a number of at least 0; got {eps!r}")

    def update(self, weight: Array, gradient: Array, state: Sequence[Array], options: Options) -> None:
        """With two arrays of the slice's size beside those that are given; three if the gradient is decayed."""
        if fused.adam(weight, gradient, state, options, self.decoupled):
            return
        (first, second), lr, decay, step = (options[name] for name in ("betas", "lr", "weight_decay", "step"))
        (mean, square), xp = state, library_of(weight).xp
        if self.decoupled and decay:
            weight *= 1 - lr * decay
        elif decay:
            gradient = gradient + decay * weight
        work = (1 - first) * gradient
        mean *= first
        mean += work
        xp.multiply(gradient, 1 - second, out=work)
        work *= gradient
        square *= second
        square += work
        xp.sqrt(square, out=work)
        work /= sqrt(1 - second**step)
        work += options["eps"]
        change = lr / (1 - first**step) * mean
        change /= work
        weight -= change


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): w = (1 - lr weight_decay) w before each step.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     AdamW(nn.Linear(grid, 3, 2).parameters()).groups[0]["weight_decay"]
        0.01
    """

    decoupled = True

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, *, weight_decay: float = 0.01, **options: Any):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)
