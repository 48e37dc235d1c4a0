"""The change that Adam makes to a slice of a parameter: in one pass over its arrays where they are on a device."""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary

PASS = ("w *= keep; m = first * m + (1 - first) * (g + decay * w); "
        "v = second * v + (1 - second) * (g + decay * w) * (g + decay * w); w -= rate * m / (sqrt(v) / scale + eps)")
"""Of each element: weight w, gradient g, mean m and square v of the gradients."""
NUMBERS = ("keep", "decay", "first", "second", "rate", "scale", "eps")
EXACT = ("float32", "float64")


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

    def change(self, library: NumpyLibrary, weight: Array, gradient: Array, mean: Array, square: Array) -> None:
        """Change a weight, and mean and square of its gradients, in place."""
        arrays = weight, gradient, mean, square
        types = {library.dtype(array) for array in arrays}
        if library.slice_elements is not None or len(types) > 1 or types.pop() not in EXACT:
            self._by_expressions(library, *arrays)
        elif library.name == "torch":
            self._by_torch(library.xp, *arrays)
        else:
            keep, decay = (1 - self.lr * self.weight_decay, 0.0) if self.decoupled else (1.0, self.weight_decay)
            _kernel(library)(gradient, keep, decay, self.first, self.second, *self._rates(), self.eps, weight, mean,
                             square)

    def _rates(self) -> tuple[float, float]:
        return self.lr / (1 - self.first**self.number), sqrt(1 - self.second**self.number)

    def _by_expressions(self, library: NumpyLibrary, weight: Array, gradient: Array, mean: Array,
                        square: Array) -> None:
        rate, scale = self._rates()
        if self.decoupled and self.weight_decay:
            weight *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weight
        mean *= self.first
        mean += (1 - self.first) * gradient
        square *= self.second
        square += (1 - self.second) * gradient * gradient
        weight -= rate * mean / (library.xp.sqrt(square) / scale + self.eps)

    def _by_torch(self, torch: Any, weight: Array, gradient: Array, mean: Array, square: Array) -> None:
        """By the kernel of torch.optim.AdamW(fused=True), or Adam's."""
        kernel = torch.ops.aten._fused_adamw_ if self.decoupled else torch.ops.aten._fused_adam_
        count = torch.full((), float(self.number), device=weight.device)
        kernel([weight], [gradient], [mean], [square], [], [count], lr=self.lr, beta1=self.first, beta2=self.second,
               weight_decay=self.weight_decay, eps=self.eps, amsgrad=False, maximize=False)


@cache
def _kernel(library: NumpyLibrary) -> Any:
    """PASS as a kernel of cupy."""
    inputs = ", ".join(f"T {name}" for name in ("g", *NUMBERS))
    return library.xp.ElementwiseKernel(inputs, "T w, T m, T v", PASS, "pmm3d_adam")
