"""What a training run trains, by which recipe, and how far it is: what its loop works on and its record tells of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ...errors import Pmm3dError
from .metrics import METRICS
from .passes import Loss, Metrics
from .run_log import RunLog
from .signals import END, REQUESTS, Signals
from .state import TrainState

if TYPE_CHECKING:
    from ...io import Checkpoints, Loader
    from .auto_grid import Choice


@dataclass(frozen=True)
class Recipe:
    """How to train, and when to look.

    loss         "cross_entropy", "mse", "mae", or a function (output, y) -> Tensor, 1 x 1: a mean over the rows
    epochs       passes over the loader's rows;   steps   of the optimizer. The run ends at whichever comes first; one
                 of them may be None
    accumulate   batches of the loader that make one step; their gradients are summed over data once
    clip         largest 2-norm of the gradient, or None
    metrics      name -> function (output, y) -> float of a batch: in validation, besides the loss
    evaluate_every, checkpoint_every   in steps; 0: after each epoch
    log_every    in steps, besides the first step and the last of each epoch

    Raises Pmm3dError for a run without an end, and for numbers that make no sense.

        >>> Recipe("mse", steps=100).epochs is None
        True
    """

    loss: str | Loss
    epochs: int | None = None
    steps: int | None = None
    accumulate: int = 1
    clip: float | None = None
    metrics: Metrics = field(default_factory=dict)
    evaluate_every: int = 0
    checkpoint_every: int = 0
    log_every: int = 10

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise Pmm3dError("a training needs an end: epochs, steps, or both")
        for names, least in ((("accumulate", "log_every"), 1),
                             (("epochs", "steps", "evaluate_every", "checkpoint_every"), 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and (
                        not isinstance(value, Integral) or isinstance(value, bool) or value < least):
                    raise Pmm3dError(f"Recipe: {name} is a whole number of at least {least}; got {value!r}")
        if self.clip is not None and not self.clip > 0:
            raise Pmm3dError(f"Recipe: clip is a positive number, or None; got {self.clip!r}")


@dataclass
class Run:
    """The fields are explained where the loop is: `Trainer`."""

    state: TrainState
    recipe: Recipe
    validation: Loader | None = None
    checkpoints: Checkpoints | None = None
    log: RunLog | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    auto: Choice | None = None

    def __post_init__(self) -> None:
        if self.state.loader is None:
            raise Pmm3dError("a training needs batches: TrainState(loader=)")
        self.grid, self.loader = self.state.network.grid, self.state.loader
        self.figures: dict[str, float] = {}
        self.counts = Counter[str]()
        self.saved: int | None = None
        self.request = 0

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def spent(self) -> bool:
        """Whether all steps that there may be are done."""
        return self.recipe.steps is not None and self.step >= self.recipe.steps

    @property
    def done(self) -> bool:
        return self.spent or self.recipe.epochs is not None and self.loader.epoch >= self.recipe.epochs

    def steps_left(self) -> int:
        """To the end of the last epoch, or of the budget."""
        batches, state, recipe = len(self.loader), self.loader.state(), self.recipe
        left = [] if recipe.steps is None else [recipe.steps - self.step]
        if recipe.epochs is not None:
            rest, epoch = (-(-count // recipe.accumulate) for count in (batches - state["batch"], batches))
            left.append(rest + (recipe.epochs - state["epoch"] - 1) * epoch)
        return max(0, min(left))

    def describe(self) -> str:
        """What is about to be trained, in a line."""
        left, end = self.steps_left(), self.recipe.epochs
        if not left:
            done = f"{end} epochs" if not self.spent else f"{self.step} steps"
            return f"nothing left to train: {done} are done"
        until = f"epochs {self.loader.epoch + 1} to {end}" if end is not None else f"from epoch {self.loader.epoch + 1}"
        return (f"training {self.state.network.size:,} parameters on grid {self.grid.shape}, {self.grid.size} ranks: "
                f"{len(self.loader)} batches an epoch, {until}, {left} steps to go")

    def summary(self, again: str = "") -> str:
        """What came out, in lines. again: the command that resumes the run if a signal ended it."""
        lines = [f"{self.step} steps, {self.loader.epoch} epochs"]
        if self.request >= END:
            name = next(signal.name for signal, request in REQUESTS.items() if request == self.request)
            lines = [f"not finished: {name} stopped the run at step {self.step} of {self.step + self.steps_left()}"]
        lines += [f"validation {name}: {value:.4f}" for name, value in self.figures.items()]
        if self.saved is not None and self.checkpoints is not None:
            lines.append(f"checkpoint of step {self.saved} in {self.checkpoints.folder}")
        if self.request >= END and again:
            ranks = self.grid.size
            lines.append(f"to resume: {again}" if ranks == 1 else "to resume, on the same number of ranks: python -m "
                         f"pmm3d.launcher -n {ranks} -m {again} (or the site's launcher)")
        if self.request < END and self.log is not None:
            folder = self.log.folder
            lines.append(f"figures in {folder / METRICS}; a page of all: pmm3d report {folder}")
            lines.append(f"predictions: pmm3d predict {folder} FILE.h5 (or .csv) --out OUT.h5 (or .csv); weights for "
                         f"torch: pmm3d export {folder} FILE.safetensors")
        return "\n".join(lines)
