"""The 2-norm of gradients, limits of it, and which gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import numpy as np

from ..comm import Grid
from ..errors import Pmm3dError
from .parameter import Parameter


class NonFiniteGradientError(Pmm3dError):
    """The gradient is infinite or not a number; no weight was changed by it."""


def clipping(norm: float, clip: float | None) -> float:
    """Factor by which gradients of this 2-norm are multiplied, so that their norm is at most `clip`."""
    return clip / norm if clip and norm > clip else 1.0


def check_clip(norm: float) -> None:
    """Raises Pmm3dError for a norm to which gradients cannot be clipped."""
    if not norm > 0:
        raise Pmm3dError(f"clip: the norm is a positive number; got {norm!r}")


def check_finite(norm: float) -> None:
    """Raises NonFiniteGradientError for a norm that is infinite or NaN."""
    if not isfinite(norm):
        raise NonFiniteGradientError(f"the gradient's norm is {norm}: no weight was changed. Look at the loss and the "
                                     "inputs, try a smaller learning rate or a warm-up; zero_grad() forgets it")


def norm_of(grid: Grid, own_square: float) -> float:
    """The 2-norm of gradients. Collective: one number from each rank.

    own_square   this rank's part of the square of the norm
    """
    with grid.ledger.phase("optimizer"):
        return sqrt(float(grid.everyone.all_reduce(np.array([own_square]), agreed=True).wait()[0]))


def non_finite(grid: Grid, parameters: Sequence[Parameter], squares: Sequence[float]) -> str:
    """Name the parameters whose gradients are not finite, in words. Collective: a number for each from each rank.

    squares   this rank's part of the square of the 2-norm of each gradient
    """
    total = grid.everyone.all_reduce(np.array(squares), agreed=True).wait()
    wrong = [parameter.name or "a parameter" for parameter, square in zip(parameters, total) if not isfinite(square)]
    if not wrong:
        return "all gradients are finite"
    return f"the gradient of {wrong[-1]} is not finite" + (
        f", the last one in the network of {len(wrong)}" if len(wrong) > 1 else "")
