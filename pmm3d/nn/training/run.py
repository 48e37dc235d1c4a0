"""What a training run trains, on what, and how far it is: what its loop works on and its record tells of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..layers import Module
from ..optim import Optimizer, Schedule
from .passes import Loss, Passes
from .run_log import METRICS, RunLog, curve, read_metrics
from .signals import Signals

if TYPE_CHECKING:
    from ...io import Checkpoints, Loader


@dataclass
class Run:
    """The fields are explained where the loop is: `Trainer`."""

    network: Module
    optimizer: Optimizer
    loader: Loader
    loss: str | Loss
    epochs: int
    schedule: Schedule | None = None
    validation: Loader | None = None
    evaluate_every: int = 0
    checkpoints: Checkpoints | None = None
    checkpoint_every: int = 0
    accumulate: int = 1
    clip: float | None = None
    log: RunLog | None = None
    log_every: int = 10
    settings: dict[str, Any] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    passes: Passes = field(default_factory=Passes)

    def __post_init__(self) -> None:
        self.grid = self.network.grid
        self._saved: int | None = None

    def steps_left(self) -> int:
        """To the end of the last epoch."""
        batches, state = len(self.loader), self.loader.state()
        rest, epoch = (-(-count // self.accumulate) for count in (batches - state["batch"], batches))
        return max(0, rest + (self.epochs - state["epoch"] - 1) * epoch)

    def describe(self) -> str:
        """What is about to be trained, in a line."""
        if not self.steps_left():
            return f"nothing left to train: {self.epochs} epochs are done"
        return (f"training {self.network.size:,} parameters on grid {self.grid.shape}, {self.grid.size} ranks: "
                f"{len(self.loader)} batches an epoch, epochs {self.loader.epoch + 1} to {self.epochs}")

    def summary(self) -> str:
        """What came out, on rank 0."""
        lines = [f"{self.step} steps, {self.loader.epoch} epochs"]
        lines += [f"validation {name}: {value:.4f}" for name, value in self.figures.items()]
        if self._saved is not None and self.checkpoints is not None:
            lines.append(f"checkpoint of step {self._saved} in {self.checkpoints.folder}")
        if self.log is not None:
            metrics = self.log.folder / METRICS
            values = [line["loss"] for line in read_metrics(metrics) if "loss" in line]
            lines.append(f"loss {curve(values)} from {values[0]:.3g} to {values[-1]:.3g}" if values else "no loss yet")
            lines.append(f"curves in {self.log.folder / 'curves.png'}, figures in {metrics}; "
                         f"a page of all: pmm3d report {self.log.folder}")
        return "\n".join(lines)
