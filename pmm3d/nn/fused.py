"""Updates of optimizers by kernels of torch: one pass over weight, gradient and state.

Each function changes the arrays of calls of `Optimizer.update` whose options differ in "step" only, and returns True.
It returns False if there is no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import Array, NumpyLibrary
from .optimizer import Slice

TYPES = ("float32", "float64")
"""Element types of the kernels."""
VECTORS = 64
"""Number of elements that is a multiple of the vector length of any processor."""


def adam(library: NumpyLibrary, slices: Sequence[Slice], decoupled: bool) -> bool:
    """Update by Adam, or by AdamW if `decoupled`."""
    weight, _, _, options = slices[0]
    if library.name != "torch" or library.dtype(weight) not in TYPES:
        return False
    aten, full = library.xp.ops.aten, library.xp.full
    kernel = aten._fused_adamw_ if decoupled else aten._fused_adam_
    counts = {step: full((), float(step), device=weight.device) for step in {each["step"] for *_, each in slices}}

    def change(w: list[Array], g: list[Array], m: list[Array], v: list[Array], steps: list[Array]) -> None:
        kernel(
            w,
            g,
            m,
            v,
            [],
            steps,
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    _in_vectors(library, change, [(w, g, *state, counts[each["step"]]) for w, g, state, each in slices])
    return True


def sgd(library: NumpyLibrary, slices: Sequence[Slice]) -> bool:
    """Update by SGD, with or without momentum."""
    weight, _, _, options = slices[0]
    if library.name != "torch" or library.dtype(weight) not in TYPES:
        return False

    def change(w: list[Array], g: list[Array], velocity: Sequence[Array] = ()) -> None:
        library.xp.ops.aten._fused_sgd_(
            w,
            g,
            list(velocity),
            lr=options["lr"],
            momentum=options["momentum"],
            weight_decay=options["weight_decay"],
            dampening=0.0,
            nesterov=options["nesterov"],
            maximize=False,
            is_first_step=False,
        )

    _in_vectors(library, change, [(w, g, *(state if options["momentum"] else ())) for w, g, state, _ in slices])
    return True


def _in_vectors(library: NumpyLibrary, change: Callable[..., None], slices: Sequence[tuple[Array, ...]]) -> None:
    """Call change(weights, gradients, ...), a kernel of torch, for the arrays and 0-d arrays of slices.

    On the host, the kernel rounds the elements after the last whole vector differently. These are copied into a whole
    vector, so the bits do not depend on the bounds of a slice.
    """
    rows, copied = list[Sequence[Any]](), list[tuple[Array, Array]]()
    for arrays in slices:
        size = arrays[0].shape[0]
        rest = size % VECTORS if library.on_host else 0
        if rest < size:
            rows.append([each[: size - rest] if each.ndim else each for each in arrays] if rest else arrays)
        if rest:
            last = [each[size - rest :] for each in arrays if each.ndim]
            vectors = library.xp.zeros((len(last), VECTORS), dtype=arrays[0].dtype).unbind()
            rows.append([*vectors, *arrays[len(last) :]])
            copied += [(array, vector[:rest]) for array, vector in zip(last, vectors)]
    for array, own in copied:
        own.copy_(array)
    if rows:
        change(*map(list, zip(*rows)))
    for array, own in copied:
        array.copy_(own)
