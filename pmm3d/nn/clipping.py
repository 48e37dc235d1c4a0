"""The norm of gradients: what they are clipped with, and the error where it is not finite."""

from __future__ import annotations

from math import isfinite

from ..errors import Pmm3dError


class NonFiniteGradientError(Pmm3dError):
    """The gradient is infinite or not a number; no weight was changed by it."""


def clipping(norm: float, clip: float | None) -> float:
    """What a gradient of that 2-norm is multiplied with, so that it has at most the other one."""
    return clip / norm if clip and norm > clip else 1.0


def check_clip(norm: float) -> None:
    """Raises Pmm3dError for what gradients cannot be clipped to."""
    if not norm > 0:
        raise Pmm3dError(f"clip: the norm is a positive number; got {norm!r}")


def check_finite(norm: float) -> None:
    if not isfinite(norm):
        raise NonFiniteGradientError(f"the gradient's norm is {norm}: no weight was changed. Look at the loss and the "
                                     "inputs, try a smaller learning rate or a warm-up; zero_grad() forgets it")
