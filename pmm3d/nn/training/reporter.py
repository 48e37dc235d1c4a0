"""Reports of a training run: lines of the log, and the record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ..experts import Load, Router
from ..module import Module
from ..parameter import of_stages
from .log import on_first


class Stepped(NamedTuple):
    """A step that was taken or skipped. norm: of the gradient; lr: learning rate of the step."""

    loss: float
    norm: float
    lr: float
    rows: int


class Reporter:
    """Reports of a Trainer's run. All ranks call the methods; rank 0 writes. Without a log they do
    nothing."""

    def __init__(self, run: Any):
        self._run, self._log, self._record = run, run.log, None
        if run.log is not None:
            from .record import RunRecord  # needs pydantic

            self._record = RunRecord(run, run.log.folder)
        self._since, self._waited, self._rows = time.perf_counter(), 0.0, 0

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Context of the run from its first step to its end. Collective."""
        run, log, record = self._run, self._log, self._record
        if record is None:
            yield
            return
        on_first(run.grid, log.folder, lambda: log.open(run.step, run.step + run.steps_left()))
        with closing(log), record.of_run():
            yield

    def stepped(self, done: Stepped, pause: bool) -> None:
        """Report a step. pause: whether an epoch or the run ends with it. done: without rows if the step was reported
        before, but may have no line."""
        run, step = self._run, self._run.step
        self._rows += done.rows
        if self._log is None or not self._rows or not (pause or step == 1 or step % run.recipe.log_every == 0):
            return
        since, waited, rows, self._rows = self._since, self._waited, self._rows, 0
        self._since, self._waited = time.perf_counter(), run.grid.ledger.total().waited
        elapsed, scale = max(1e-9, self._since - since), run.state.scale
        others = {} if run.recipe.label_smoothing else run.loader.data.of_loss(done.loss)
        loads = loads_of(run.state.network)
        figures = {"loss": done.loss, **others, "gradient_norm": done.norm, **_balance([*loads.values()])} | (
            {} if scale is None else {"loss_scale": scale.value, "skipped": scale.skipped}
        )
        self._log.step(
            {
                "step": step,
                "epoch": run.loader.epoch,
                "lr": done.lr,
                "samples_per_second": rows / elapsed,
                "waiting": max(0.0, self._waited - waited) / elapsed,
                **{name: value for name, value in figures.items() if isfinite(value)},
                **({"experts": {name: each.load.counts.tolist() for name, each in loads.items()}} if loads else {}),
            }
        )

    def validated(self) -> None:
        """Report an evaluation."""
        if self._log is not None:
            run = self._run
            self._log.validation(run.step, run.loader.epoch, run.figures, run.state.ema is not None)

    def saved(self, path: Path, seconds: float) -> None:
        """Report a checkpoint that is on the disk. seconds: waiting time of the run. Collective."""
        if self._record is not None and self._run.saved is not None:
            self._log.saved(self._run.saved, path)
            self._record.saved(path, seconds)

    def resumed(self, facts: dict[str, Any]) -> None:
        """Report that the run continues from a checkpoint. facts: as returned by `TrainState.resume`."""
        if self._record is not None:
            self._log.say(f"resumed {facts['path']}, step {self._run.step}")
            self._record.resumed_from, self._record.retired = facts["path"], facts["retired"]


class OfRouter(NamedTuple):
    """Load of a router's experts in the last step. drops: whether a capacity drops tokens."""

    load: Load
    drops: bool


def loads_of(network: Module) -> dict[str, OfRouter]:
    """Name -> load of each router that had tokens in training, for all stages. Collective if there are several
    stages."""
    own = {
        name: OfRouter(module.last, module.capacity is not None and module.choice == "tokens")
        for name, module in network.named_modules()
        if isinstance(module, Router) and module.last is not None
    }
    return {name: load for stage in of_stages(network, own) for name, load in stage.items()}


def _balance(loads: Sequence[OfRouter]) -> dict[str, float]:
    """Figures of the loads: the largest number of tokens of an expert over the mean; with a capacity, the share of the
    assignments that it dropped; with losses of routers, their sum. No figures without tokens."""
    totals = [int(each.load.counts.sum()) for each in loads]
    if not totals or not min(totals):
        return {}
    figures = {"imbalance": max(float(each.load.counts.max() / each.load.counts.mean()) for each in loads)}
    if any(each.drops for each in loads):
        figures["dropped"] = sum(each.load.dropped for each in loads) / sum(totals)
    if penalty := sum(each.load.penalty for each in loads):
        figures["router_loss"] = penalty
    return figures
