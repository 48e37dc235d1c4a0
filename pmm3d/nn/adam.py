"""The change that Adam makes to a slice of a parameter."""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary
from .kernels import OnePass
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
