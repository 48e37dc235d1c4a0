"""Dynamic loss scaling, which keeps float16 gradients within the range of the type."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from ..errors import Pmm3dError
from .gradient_norm import NonFiniteGradientError, check_clip, clipping, norm_of
from .optimizer import Optimizer
from .parallel import BackwardSync

MOST_IN_A_ROW = 50
"""Number of skipped steps in a row after which the cause is not the scale."""


class LossScale:
    """Dynamic scale of a loss, for gradients of float16.

    Parameters
    ----------
    start : float
        First scale. Default: 2^16.
    every : int
        Number of good steps in a row after which the scale is doubled. A skipped step halves it. Default: 200.
    most, least : float
        Bounds of the scale. Default: 2^24 and 1.

    Attributes
    ----------
    value : float
        Scale of the next step, for `loss.backward(scale=scale.value)`.
    skipped, in_a_row : int
        Number of skipped steps in all, and since the last good step.

    Raises
    ------
    Pmm3dError
        For values out of range.

    Notes
    -----
    A step whose gradient is not finite is skipped on all ranks: it changes only the scale and the number of steps.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     net, x = nn.Linear(grid, 3, 2, precision="float16"), DistMatrix.random(grid, (4, 3), dtype="float32")
    ...     optimizer, scale = optim.AdamW(net.parameters()), optim.LossScale(start=2.0**30, most=2.0**30)
    ...     for _ in range(20):
    ...         nn.mse(net(x), DistMatrix.random(grid, (4, 2), dtype="float32")).backward(scale=scale.value)
    ...         took = scale.step(optimizer, clip=1.0)
    ...     took, 0 < scale.skipped < 20, scale.value == 2.0 ** (30 - scale.skipped)
    (True, True, True)
    """

    def __init__(self, start: float = 2.0**16, every: int = 200, most: float = 2.0**24, least: float = 1.0):
        if not 0 < least <= start <= most or not isfinite(most) or every < 1:
            raise Pmm3dError(
                "LossScale: 0 < least <= start <= most, and every is at least 1; got least = "
                f"{least!r}, start = {start!r}, most = {most!r}, every = {every!r}"
            )
        self.value, self.every, self.most, self.least = float(start), every, most, least
        self.good = self.skipped = self.in_a_row = self._passes = 0

    def _update(self, norm: float) -> bool:
        """Set the scale of the next step. Return whether a step whose gradient has this 2-norm is taken."""
        if isfinite(norm):
            self.good, self.in_a_row = self.good + 1, 0
            if self.good % self.every == 0:
                self.value = min(self.most, 2 * self.value)
            return True
        self.good, self.in_a_row, self.skipped = 0, self.in_a_row + 1, self.skipped + 1
        self.value = max(self.least, self.value / 2)
        return False

    def step(self, *optimizers: Optimizer, clip: float | None = None, keep_gradients: bool = False) -> bool:
        """Take, or skip, the step of all optimizers that share a backward pass. Collective: one number from each rank.

        Parameters
        ----------
        optimizers : Optimizer
            All of them take the step, or none does.
        clip : float or None
            Largest 2-norm of the gradient of all their parameters. Default: no limit.
        keep_gradients : bool
            As in `Optimizer.step`: the gradients without the scale. A skipped step drops them. Call `zero_grad` before
            the next backward pass, whose gradients have the scale. Default: False.

        Raises
        ------
        Pmm3dError
            On every rank, for a second step after one backward pass, and for gradients of another scale.
        NonFiniteGradientError
            On every rank, if it is the fiftieth skipped step in a row.
        """
        check_clip(clip)
        self._check(optimizers)
        norm = norm_of(optimizers[0].parent_grid, sum(optimizer._local_norm_squared() for optimizer in optimizers))
        return self._conclude(optimizers, norm / self.value, clip, keep_gradients)

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise Pmm3dError("LossScale.step needs at least one optimizer: scale.step(optimizer)")
        passes = BackwardSync.of(optimizers[0].grid).passes
        if not passes:
            raise Pmm3dError(
                "LossScale.step: there was no backward pass yet: call loss.backward(scale=scale.value) first"
            )
        if passes == self._passes:
            raise Pmm3dError(
                "LossScale.step: a second step after one backward pass is refused, because the first step "
                "may have changed the scale: call scale.step(first, second) for several optimizers"
            )
        records = [parameter.grad_buffer for optimizer in optimizers for parameter in optimizer.parameters]
        for other in {scale for record in records for scale in record.scales} - {self.value}:
            raise Pmm3dError(
                f"LossScale.step: the gradients have the scale {other:g}, and this scale is "
                f"{self.value:g}: call loss.backward(scale=scale.value) in each backward pass of the step, and "
                "before it zero_grad() of the optimizer if gradients of an earlier step were kept (keep_gradients=True)"
            )
        self._passes = passes

    def _conclude(self, optimizers: Sequence[Optimizer], norm: float, clip: float | None, keep_gradients: bool) -> bool:
        """Take or skip the step as `step`, if the 2-norm of the gradients without the scale is known."""
        scale = self.value
        if self._update(norm):
            for optimizer in optimizers:
                optimizer.step(factor=clipping(norm, clip) / scale, keep_gradients=keep_gradients)
            return True
        fatal = self.in_a_row >= MOST_IN_A_ROW
        where = "; ".join(optimizer._non_finite() for optimizer in optimizers if fatal)
        for optimizer in optimizers:
            optimizer._skip()
        if fatal:
            raise NonFiniteGradientError(
                f"{self.in_a_row} steps in a row were skipped, because float16 gradients were not finite, the last "
                f"at a loss scale of {scale:g}: {where}. These steps changed no weight. Look at the loss and the "
                'inputs, try a smaller learning rate or a warm-up, or precision = "bfloat16"'
            )
        return False

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, for JSON."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the scale and the numbers of steps. `every` and the bounds do not change."""
        self.value = min(self.most, max(self.least, float(state["value"])))
        self.good, self.skipped, self.in_a_row = (int(state[name]) for name in ("good", "skipped", "in_a_row"))
