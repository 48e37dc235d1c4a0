"""Updates of optimizers by kernels of a library: one pass over weight, gradient and state.

Each function changes the arrays of `Optimizer.update` and returns True, or returns False if there is no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import Any

from ..arrays import Array, NumpyLibrary, library_of

TYPES = ("float32", "float64")
"""Element types of the kernels."""
VECTORS = 64
"""Number of elements that is a multiple of the vector length of any processor."""
ADAM = "T h = g + decay * w; m = first * m + fresh_first * h; v = second * v + fresh_second * h * h; "
ADAM += "w -= loss * w + rate * m / (sqrt(v) / scale + eps);"


def adam(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any], decoupled: bool) -> bool:
    """Update by Adam, or by AdamW if `decoupled`."""
    library, kind = _kernels_of(weight)
    (first, second), decay, step = options["betas"], options["weight_decay"], options["step"]
    if kind == "torch":
        kernel = library.xp.ops.aten._fused_adamw_ if decoupled else library.xp.ops.aten._fused_adam_
        count = library.xp.full((), float(step), device=weight.device)

        def change(w: Array, g: Array, m: Array, v: Array) -> None:
            kernel(
                [w],
                [g],
                [m],
                [v],
                [],
                [count],
                lr=options["lr"],
                beta1=first,
                beta2=second,
                weight_decay=decay,
                eps=options["eps"],
                amsgrad=False,
                maximize=False,
            )

        _in_vectors(library, change, weight, gradient, *state)
    elif kind == "cupy":
        _run(
            library,
            ADAM,
            {"m": state[0], "v": state[1]},
            weight,
            gradient,
            {
                "decay": 0.0 if decoupled else decay,
                "loss": options["lr"] * decay if decoupled else 0.0,
                "first": first,
                "fresh_first": 1 - first,
                "second": second,
                "fresh_second": 1 - second,
                "rate": options["lr"] / (1 - first**step),
                "scale": sqrt(1 - second**step),
                "eps": options["eps"],
            },
        )
    return bool(kind)


def sgd(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any]) -> bool:
    """Update by SGD, with or without momentum."""
    library, kind = _kernels_of(weight)
    lr, momentum, decay, nesterov = (options[name] for name in ("lr", "momentum", "weight_decay", "nesterov"))
    if kind == "torch":

        def change(w: Array, g: Array, *velocity: Array) -> None:
            library.xp.ops.aten._fused_sgd_(
                [w],
                [g],
                list(velocity),
                lr=lr,
                momentum=momentum,
                weight_decay=decay,
                dampening=0.0,
                nesterov=nesterov,
                maximize=False,
                is_first_step=False,
            )

        _in_vectors(library, change, weight, gradient, *(state if momentum else ()))
    elif kind == "cupy":
        push = f"m = momentum * m + h; w -= rate * {'(h + momentum * m)' if nesterov else 'm'};"
        _run(
            library,
            f"T h = g + decay * w; {push if momentum else 'w -= rate * h;'}",
            {"m": state[0]} if momentum else {},
            weight,
            gradient,
            {"decay": decay, "rate": lr, **({"momentum": momentum} if momentum else {})},
        )
    return bool(kind)


def _kernels_of(weight: Array) -> tuple[NumpyLibrary, str]:
    """Return the library of an array, and the name of its kernels: "torch", "cupy", or "" for none."""
    library = library_of(weight)
    return library, library.name if library.name in ("torch", "cupy") and library.dtype(weight) in TYPES else ""


def _in_vectors(library: NumpyLibrary, change: Callable[..., None], *arrays: Array) -> None:
    """Call change(*arrays), a kernel of torch.

    On the host, the kernel rounds the elements after the last whole vector differently. These are copied into a whole
    vector, so the bits do not depend on the bounds of a slice.
    """
    size = arrays[0].shape[0]
    whole = size - size % VECTORS if library.on_host else size
    if whole:
        change(*(array[:whole] for array in arrays))
    if whole < size:
        last = library.xp.zeros((len(arrays), VECTORS), dtype=arrays[0].dtype)
        for array, copy in zip(arrays, last):
            copy[: size - whole] = array[whole:]
        change(*last)
        for array, copy in zip(arrays, last):
            array[whole:] = copy[: size - whole]


def _run(
    library: NumpyLibrary,
    formula: str,
    state: Mapping[str, Array],
    weight: Array,
    gradient: Array,
    numbers: Mapping[str, float],
) -> None:
    """Run a formula in C++ on the elements w of the weight, g of the gradient, and of the state.

    The numbers are computed in Python, because 1 - beta would lose digits in float32.
    """
    _kernel(library, formula, tuple(state), tuple(numbers))(gradient, *numbers.values(), weight, *state.values())


@cache
def _kernel(library: NumpyLibrary, formula: str, states: Sequence[str], numbers: Sequence[str]) -> Callable[..., Any]:
    """Kernel with the arguments (gradient, *numbers, weight, *states), which are all of type T."""
    inputs, outputs = (", ".join(f"T {name}" for name in names) for names in (("g", *numbers), ("w", *states)))
    return library.xp.ElementwiseKernel(inputs, outputs, formula, "pmm3d_update")
