"""Updates of optimizers by kernels of torch: one pass over weight, gradient and state.

Each function changes the arrays of `Optimizer.update` and returns True, or returns False if there is no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arrays import Array, NumpyLibrary, library_of

TYPES = ("float32", "float64")
"""Element types of the kernels."""
VECTORS = 64
"""Number of elements that is a multiple of the vector length of any processor."""


def adam(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any], decoupled: bool) -> bool:
    """Update by Adam, or by AdamW if `decoupled`."""
    library = _library_with_kernels(weight)
    if library is None:
        return False
    kernel = library.xp.ops.aten._fused_adamw_ if decoupled else library.xp.ops.aten._fused_adam_
    count = library.xp.full((), float(options["step"]), device=weight.device)

    def change(w: Array, g: Array, m: Array, v: Array) -> None:
        kernel(
            [w],
            [g],
            [m],
            [v],
            [],
            [count],
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    _in_vectors(library, change, weight, gradient, *state)
    return True


def sgd(weight: Array, gradient: Array, state: Sequence[Array], options: Mapping[str, Any]) -> bool:
    """Update by SGD, with or without momentum."""
    library = _library_with_kernels(weight)
    if library is None:
        return False

    def change(w: Array, g: Array, *velocity: Array) -> None:
        library.xp.ops.aten._fused_sgd_(
            [w],
            [g],
            list(velocity),
            lr=options["lr"],
            momentum=options["momentum"],
            weight_decay=options["weight_decay"],
            dampening=0.0,
            nesterov=options["nesterov"],
            maximize=False,
            is_first_step=False,
        )

    _in_vectors(library, change, weight, gradient, *(state if options["momentum"] else ()))
    return True


def _library_with_kernels(weight: Array) -> NumpyLibrary | None:
    """Library of an array if it has kernels for the array's type: torch. Otherwise None."""
    library = library_of(weight)
    return library if library.name == "torch" and library.dtype(weight) in TYPES else None


def _in_vectors(library: NumpyLibrary, change: Callable[..., None], *arrays: Array) -> None:
    """Call change(*arrays), a kernel of torch.

    On the host, the kernel rounds the elements after the last whole vector differently. These are copied into a whole
    vector, so the bits do not depend on the bounds of a slice.
    """
    size = arrays[0].shape[0]
    in_full_vectors = size - size % VECTORS if library.on_host else size
    if in_full_vectors:
        change(*(array[:in_full_vectors] for array in arrays))
    if in_full_vectors < size:
        last = library.xp.zeros((len(arrays), VECTORS), dtype=arrays[0].dtype)
        for array, copy in zip(arrays, last):
            copy[: size - in_full_vectors] = array[in_full_vectors:]
        change(*last)
        for array, copy in zip(arrays, last):
            array[in_full_vectors:] = copy[: size - in_full_vectors]
