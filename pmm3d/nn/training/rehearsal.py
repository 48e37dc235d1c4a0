"""What a training run is to move and to hold: by a dry run of its own network, optimizer and loss."""

from __future__ import annotations

from contextlib import ExitStack

from ...comm import Entry, Grid, Key
from ...errors import Pmm3dError
from ..dry import dry_grid, memory, twin, untouched
from ..layers import Module
from ..loss_scale import LossScale
from ..optim import Optimizer
from ..tape import unchanged
from .agreed import step_agreement
from .passes import Evaluation, Event, Loss, Metrics, Passes, loss_named, train_step

Volume = dict[Key, Entry]


class Foretold(LossScale):
    """Of a step of which it is known whether it was taken."""

    def __init__(self, taken: bool):
        super().__init__()
        self._taken = taken

    def takes(self, norm: float) -> bool:
        return self._taken


class Rehearsal:
    """Does on a grid without data what a trainer does on its own.

    network, optimizer   on a dry grid;   loss, metrics   as of a trainer;   clip, scaled   whether gradients are
    """

    def __init__(self, network: Module, optimizer: Optimizer, loss: str | Loss, clip: bool = False,
                 metrics: Metrics | None = None, scaled: bool = False):
        self.network, self.optimizer, self.grid = network, optimizer, network.grid
        self._loss, self._metrics = loss_named(loss), metrics
        self._clip, self._scaled = 1.0 if clip else None, scaled
        self._evaluation: Evaluation | None = None
        self._evaluating = ExitStack()
        self._last = self._step = Event("")
        self._moved: dict[tuple[Event | None, Event], Volume] = {}

    def run(self, event: Event) -> None:
        batches = [(x.on(self.grid), y.on(self.grid)) for x, y in event.batches]
        if event.what in ("step", "skipped"):
            self._evaluating.close()
            scale = Foretold(event.what == "step") if self._scaled else None
            train_step(self.network, self.optimizer, self._loss, event.rows, batches, self._clip, scale=scale)
            self._step = event
        elif event.what == "batch":
            if self._last.what != "batch" or self._evaluation is None:
                self._evaluating.enter_context(self.network.evaluating())
                self._evaluating.enter_context(unchanged(self.grid))
                self._evaluation = Evaluation(self.network, self._loss, self._metrics)
            self._evaluation.add(*batches[0])
        elif event.what == "evaluated" and self._evaluation is not None:
            self._evaluation.figures()
        elif event.what == "asked":
            step_agreement(self.grid)
        self._last = event if batches else self._last

    def moved(self, before: Event | None, event: Event) -> Volume:
        """What the event moves after another one, as the ledger counts it."""
        if (before, event) not in self._moved:
            if before is not None and before != self._last:
                self._come_to(before)
            settle(self.grid)
            self.grid.ledger.reset()
            self.run(event)
            settle(self.grid)
            self._moved[before, event] = dict(self.grid.ledger.entries)
            self.grid.ledger.reset()  # what is run next counts into other entries
        return self._moved[before, event]

    def _come_to(self, event: Event) -> None:
        """To where everything is as after that event."""
        if event.what == "batch":
            self.run(self._step)
            self.run(event._replace(first=True))
        if not event.first:
            self.run(event)

    def volume(self, passes: Passes) -> Volume:
        """Of all that a trainer did."""
        total: Volume = {}
        for (before, event), times in passes.counts.items():
            for key, entry in self.moved(before, event).items():
                if key.axis:
                    total.setdefault(key, Entry()).__iadd__(
                        Entry(times * entry.calls, times * entry.sent, times * entry.received))
        self.grid.dry_run.actions.clear()  # type: ignore[union-attr]
        return total


def settle(grid: Grid) -> None:
    """Bring what is under way to its end; of a dry grid."""
    for pending in grid.engine.under_way():
        pending.wait()


class Model:
    """What a run on a grid with data is to move and hold; `problem` says why it cannot be told, if it cannot."""

    def __init__(self, network: Module, optimizer: Optimizer, loss: str | Loss, clip: bool,
                 metrics: Metrics | None = None, scaled: bool = False):
        self._grid, self._options = network.grid, (network, optimizer, loss, clip, metrics, scaled)
        self._rehearsal: Rehearsal | None = None
        self.problem = ""

    def volume(self, passes: Passes) -> Volume:
        """By axis, phase and operation; empty if it cannot be told."""
        if not passes.steps or self.problem:
            return {}
        network, optimizer, loss, clip, metrics, scaled = self._options
        try:
            if self._rehearsal is None:
                copies = twin((network, optimizer), dry_grid(self._grid))
                self._rehearsal = Rehearsal(*copies, loss, clip, metrics, scaled)
            with untouched(self._grid):
                return self._rehearsal.volume(passes)
        except Exception as error:  # whatever a network of one's own asks of values that are not there
            self.problem = str(error) if isinstance(error, Pmm3dError) else f"{type(error).__name__}: {error}"
            return {}

    def memory(self) -> dict[str, int]:
        """Bytes by kind, once `volume` was asked for; empty if it cannot be told."""
        if self._rehearsal is None or self.problem:
            return {}
        return memory(self._rehearsal.grid)
