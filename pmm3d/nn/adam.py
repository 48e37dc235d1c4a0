"""Adam and AdamW, and the change that they make to a slice of a parameter."""

from __future__ import annotations

from math import inf, sqrt
from types import ModuleType
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary, library_of
from ..errors import Pmm3dError
from .kernels import OnePass
from .optimizer import Optimizer, Option, Parameters
from .torch_kernels import has_kernel

FORMULA = ("h = h + decay * x; m = first * m + fresh_first * h; v = second * v + fresh_second * h * h; "
           "d = loss * x + rate * m / (sqrt(v) / scale + eps);")
"""Of each element: weight x, gradient h, mean m and square v of the gradients."""


class AdamStep(NamedTuple):
    """lr, the two betas, eps and weight_decay; decoupled: as AdamW; number: how often the parameter was changed, this
    time included."""

    lr: float
    first: float
    second: float
    eps: float
    weight_decay: float
    decoupled: bool
    number: int

    def one_pass(self) -> OnePass:
        """As a kernel. What the betas lack of 1 it is given: float32 would lose digits of it."""
        rate, scale = self._rates()
        decay, loss = (0.0, self.lr * self.weight_decay) if self.decoupled else (self.weight_decay, 0.0)
        return OnePass(FORMULA, ("m", "v"), {
            "decay": decay, "loss": loss, "first": self.first, "fresh_first": 1 - self.first, "second": self.second,
            "fresh_second": 1 - self.second, "rate": rate, "scale": scale, "eps": self.eps})

    def change(self, library: NumpyLibrary, weight: Array, gradient: Array, mean: Array, square: Array) -> None:
        """Change a weight, and mean and square of its gradients, in place."""
        arrays = weight, gradient, mean, square
        if has_kernel(library, *arrays):
            self._by_torch(library.xp, *arrays)
        else:
            self._by_expressions(library, *arrays)

    def _rates(self) -> tuple[float, float]:
        return self.lr / (1 - self.first**self.number), sqrt(1 - self.second**self.number)

    def _by_expressions(self, library: NumpyLibrary, weight: Array, gradient: Array, mean: Array,
                        square: Array) -> None:
        """With two arrays of the slice's size beside those that are given; three where the gradient is decayed."""
        rate, scale = self._rates()
        if self.decoupled and self.weight_decay:
            weight *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weight
        work = (1 - self.first) * gradient
        mean *= self.first
        mean += work
        library.xp.multiply(gradient, 1 - self.second, out=work)
        work *= gradient
        square *= self.second
        square += work
        library.xp.sqrt(square, out=work)
        work /= scale
        work += self.eps
        change = rate * mean
        change /= work
        weight -= change

    def _by_torch(self, torch: Any, weight: Array, gradient: Array, mean: Array, square: Array) -> None:
        """By the kernel of torch.optim.AdamW(fused=True), or Adam's."""
        kernel = torch.ops.aten._fused_adamw_ if self.decoupled else torch.ops.aten._fused_adam_
        count = torch.full((), float(self.number), device=weight.device)
        kernel([weight], [gradient], [mean], [square], [], [count], lr=self.lr, beta1=self.first, beta2=self.second,
               weight_decay=self.weight_decay, eps=self.eps, amsgrad=False, maximize=False)


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015), with weight_decay w added to the gradient. Its correction for the first steps counts,
    for each parameter, the steps in which it had a gradient.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     list(Adam(nn.Linear(grid, 3, 2, bias=False).parameters(), shard_over_data=True).matrices())
        ['optimizer/weight/mean', 'optimizer/weight/square']
    """

    state_names: tuple[str, ...] = ("mean", "square")
    takes_remainders = in_threads = True
    betas, eps = Option(), Option()

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, **options: Any):
        super().__init__(parameters, lr, betas=betas, eps=eps, **options)

    def check_options(self) -> None:
        super().check_options()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise Pmm3dError(f"{type(self).__name__}: betas are two numbers of at least 0 and below 1; got "
                             f"{self.betas!r}")
        if not 0 <= self.eps < inf:
            raise Pmm3dError(f"{type(self).__name__}: eps is a number of at least 0; got {self.eps!r}")

    def update(self, xp: ModuleType, weight: Array, gradient: Array, *state: Array) -> None:
        self._step().change(library_of(weight), weight, gradient, *state)

    def one_pass(self) -> OnePass:
        return self._step().one_pass()

    def _step(self) -> AdamStep:
        first, second = self.betas
        return AdamStep(self.lr, first, second, self.eps, self.weight_decay, self.decoupled, self.changes)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): w = (1 - lr weight_decay) w before each step.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     AdamW(nn.Linear(grid, 3, 2).parameters()).weight_decay
        0.01
    """

    decoupled = True

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, *, weight_decay: float = 0.01, **options: Any):
        super().__init__(parameters, lr, betas, eps, weight_decay=weight_decay, **options)
