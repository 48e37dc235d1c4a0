"""Recipe of a training: loss, length, and intervals of validation, log and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from ...errors import Pmm3dError
from ..gradient_norm import check_clip
from ..loss import check_smoothing
from .evaluation import Loss, Metrics


@dataclass(frozen=True)
class Recipe:
    """Loss and length of a training, and its intervals of validation, log and checkpoints.

    Parameters
    ----------
    loss : str or callable
        Name of a loss of `pmm3d.nn`, such as "cross_entropy" or "mse", or a function (output, y) -> Tensor, 1 x 1, a
        mean over the rows.
    epochs, steps : int or None
        Passes over the loader's rows, and steps of the optimizer. The run ends when one of them is reached. One may be
        None (default).
    clip : float or None
        Largest 2-norm of the gradient. Default: no limit.
    metrics : mapping
        Name -> function (output, y) -> number or 1 x 1 tensor of a batch, for validation. Default: none.
    evaluate_every, checkpoint_every : int
        Steps between validations and between checkpoints. 0 (default): after each epoch.
    log_every : int
        Steps between lines of the log. Default: 10. The first step, and the last step of an epoch, also have a line.

    trace_memory : int
        Number of the step whose memory is recorded (`nn.trace_memory`). 0 (default): none.
    patience : int or None
        Number of validations in a row without a smaller loss, after which the run ends early. Default: it does not.
    label_smoothing : float
        Argument of `nn.cross_entropy`, which steps use and validations do not. Default: 0.

    Raises
    ------
    Pmm3dError
        For a run without an end, and for values out of range.

    Examples
    --------
    >>> from pmm3d.nn.training import Recipe
    >>> Recipe("mse", steps=100).epochs is None
    True
    """

    loss: str | Loss
    epochs: int | None = None
    steps: int | None = None
    clip: float | None = None
    metrics: Metrics = field(default_factory=dict)
    evaluate_every: int = 0
    checkpoint_every: int = 0
    log_every: int = 10
    trace_memory: int = 0
    patience: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise Pmm3dError("Recipe: a training needs an end: set epochs, steps, or both")
        for name in ("log_every", "epochs", "steps", "evaluate_every", "checkpoint_every", "patience", "trace_memory"):
            value, least = getattr(self, name), int(name in ("log_every", "patience"))
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < least):
                raise Pmm3dError(f"Recipe: {name} must be a whole number of at least {least}; got {value!r}")
        check_clip(self.clip)
        check_smoothing("Recipe", self.label_smoothing)
