"""Updates of optimizers by kernels of a library: one pass over weight, gradient and state.

Each function changes the arrays of `Optimizer.update` and returns True, or returns False if the library has no kernel
for them; the optimizer's expressions then do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import Any

from ..arrays import Array, NumpyLibrary, library_of

TYPES = ("float32", "float64")
"""Element types of the kernels."""
ADAM = "T h = g + decay * w; m = first * m + fresh_first * h; v = second * v + fresh_second * h * h; "
ADAM += "w -= loss * w + rate * m / (sqrt(v) / scale + eps);"


def adam(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any], decoupled: bool) -> bool:
    """Adam, or AdamW (decoupled)."""
    library, kind = _kernels_of(weight)
    (first, second), decay, step = options["betas"], options["weight_decay"], options["step"]
    if kind == "torch":
        kernel = library.xp.ops.aten._fused_adamw_ if decoupled else library.xp.ops.aten._fused_adam_
        count = library.xp.full((), float(step), device=weight.device)
        kernel([weight], [gradient], [state[0]], [state[1]], [], [count], lr=options["lr"], beta1=first, beta2=second,
               weight_decay=decay, eps=options["eps"], amsgrad=False, maximize=False)
    elif kind == "cupy":
        _run(library, ADAM, {"m": state[0], "v": state[1]}, weight, gradient, {
            "decay": 0.0 if decoupled else decay, "loss": options["lr"] * decay if decoupled else 0.0,
            "first": first, "fresh_first": 1 - first, "second": second, "fresh_second": 1 - second,
            "rate": options["lr"] / (1 - first**step), "scale": sqrt(1 - second**step), "eps": options["eps"]})
    return bool(kind)


def sgd(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any]) -> bool:
    """SGD, with and without momentum."""
    library, kind = _kernels_of(weight, on_host=not options["momentum"])
    lr, momentum, decay, nesterov = (options[name] for name in ("lr", "momentum", "weight_decay", "nesterov"))
    if kind == "torch":
        library.xp.ops.aten._fused_sgd_([weight], [gradient], list(state) if momentum else [], lr=lr, momentum=momentum,
                                        weight_decay=decay, dampening=0.0, nesterov=nesterov, maximize=False,
                                        is_first_step=False)
    elif kind == "cupy":
        push = f"m = momentum * m + h; w -= rate * {'(h + momentum * m)' if nesterov else 'm'};"
        _run(library, f"T h = g + decay * w; {push if momentum else 'w -= rate * h;'}",
             {"m": state[0]} if momentum else {}, weight, gradient,
             {"decay": decay, "rate": lr, **({"momentum": momentum} if momentum else {})})
    return bool(kind)


def _kernels_of(weight: Array, on_host: bool = False) -> tuple[NumpyLibrary, str]:
    """The library of an array, and which kernels change it: "torch", "cupy", or "" for none.

    on_host   whether torch's kernel for the host rounds each element alike, wherever a slice begins and ends
    """
    library = library_of(weight)
    there = library.name == "cupy" or (library.name == "torch" and (on_host or not library.on_host))
    return library, library.name if there and library.dtype(weight) in TYPES else ""


def _run(library: NumpyLibrary, formula: str, state: Mapping[str, Array], weight: Array, gradient: Array,
         numbers: Mapping[str, float]) -> None:
    """Run a formula in C++ on the elements w of the weight, g of the gradient, and of the state. Numbers come ready: in
    float32, 1 - beta would lose digits."""
    _kernel(library, formula, tuple(state), tuple(numbers))(gradient, *numbers.values(), weight, *state.values())


@cache
def _kernel(library: NumpyLibrary, formula: str, states: Sequence[str], numbers: Sequence[str]) -> Callable[..., Any]:
    """A kernel of (gradient, *numbers, weight, *states). T is the type of all of them."""
    inputs, outputs = (", ".join(f"T {name}" for name in names) for names in (("g", *numbers), ("w", *states)))
    return library.xp.ElementwiseKernel(inputs, outputs, formula, "pmm3d_update")
