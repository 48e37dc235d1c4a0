"""The 2-norm of gradients, clipping, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import isfinite, sqrt
from numbers import Real
from typing import Any

import numpy as np

from ..comm import Grid
from ..errors import Pmm3dError
from .parameter import Parameter, of_stages


class NonFiniteGradientError(Pmm3dError):
    """The gradient is infinite or NaN. It changed no weight."""


def clipping(norm: float, clip: float | None) -> float:
    """Factor by which gradients of this 2-norm are multiplied, so that their norm is at most `clip`. None: no limit.

    Raises NonFiniteGradientError if the norm is infinite or NaN and there is a limit.
    """
    if clip is None:
        return 1.0
    check_finite(norm)
    return clip / norm if norm > clip else 1.0


def check_clip(norm: float | None) -> None:
    """Raise Pmm3dError unless the largest norm is positive, or None."""
    if norm is not None and not (isinstance(norm, Real) and norm > 0):
        raise Pmm3dError(
            f"clip: the largest norm of the gradient is a positive number, or None for no limit; got {norm!r}"
        )


def check_finite(norm: float) -> None:
    """Raise NonFiniteGradientError if the norm is infinite or NaN."""
    if not isfinite(norm):
        raise NonFiniteGradientError(
            f"the gradient's norm is {norm}: no weight was changed. Look at the loss and the "
            "inputs, try a smaller learning rate or a warm-up; zero_grad() discards it"
        )


def norm_of(grid: Grid, local_norm_squared: float) -> float:
    """2-norm of gradients, from this rank's part of its square. Collective: one number from each rank."""
    with grid.ledger.phase("optimizer"):
        return sqrt(float(grid.everyone.all_reduce(np.array([local_norm_squared]), agreed=True).wait()[0]))


def non_finite(optimizer: Any, own_squares: Mapping[Parameter, Any]) -> str:
    """Name the last parameter of the whole network whose gradient is not finite. Collective.

    own_squares: this rank's part of the square of the norm of each gradient.
    """
    squares = np.array([float(square) for square in own_squares.values()])
    squares = optimizer.grid.everyone.all_reduce(squares, agreed=True).wait()
    own = [each.name or "a parameter" for each, square in zip(own_squares, squares) if not isfinite(square)]
    wrong = [*chain(*of_stages(optimizer, own))]
    if not wrong:
        return "all gradients are finite"
    return f"the gradient of {wrong[-1]} is not finite" + (
        f", the last one in the network of {len(wrong)}" if len(wrong) > 1 else ""
    )
