"""What is noted of a training run while it goes on: lines of its log, its record, the pace of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from .folder import RunFolder
from .pace import Pace
from .record import RunRecord
from .run import Run


class Stepped(NamedTuple):
    """A step that was done, or skipped. lr: the rate that it used;   norm   of the gradient"""

    loss: float
    norm: float
    lr: float
    rows: int


class Observer:
    """Its methods are called by all ranks; rank 0 writes. Without a log it only looks at the pace."""

    def __init__(self, run: Run, folder: RunFolder):
        self._run, self._folder, self._log = run, folder, run.log
        self._record = RunRecord(run, run.log.folder) if run.log is not None else None
        self._since, self._waited, self._rows = time.perf_counter(), 0.0, 0
        self.pace = Pace(run.grid)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """As a context, the run from its first step to its end. Collective."""
        self.pace = Pace(self._run.grid)
        log, record = self._log, self._record
        if log is None or record is None:
            yield
            return
        step = self._run.step
        self._folder.on_first(lambda: log.open(step, step + self._run.steps_left()))
        with closing(log), record.of_run():
            yield

    def stepped(self, done: Stepped, pause: bool) -> None:
        """After a step; pause: whether an epoch or the run ends with it."""
        run, step = self._run, self._run.step
        self._rows += done.rows
        if not (pause or step == 1 or step % run.recipe.log_every == 0):
            return
        since, waited, rows, self._rows = self._since, self._waited, self._rows, 0
        self._since, self._waited = time.perf_counter(), run.grid.ledger.total().waited
        elapsed = max(1e-9, self._since - since)
        if self._log is not None:
            scale = run.state.scale
            figures = {"loss": done.loss, "gradient_norm": done.norm} | (
                {} if scale is None else {"loss_scale": scale.value, "skipped": scale.skipped})
            self._log.step({"step": step, "epoch": run.loader.epoch, "lr": done.lr,
                            "samples_per_second": rows / elapsed,
                            "waiting": max(0.0, self._waited - waited) / elapsed,
                            **{name: value for name, value in figures.items() if isfinite(value)}})

    def validated(self) -> None:
        """After an evaluation."""
        if self._log is not None:
            self._log.validation(self._run.step, self._run.loader.epoch, self._run.figures)

    def saved(self, path: Path, seconds: float) -> None:
        """A checkpoint is on the disk. seconds: that the run waited for it. Collective."""
        if self._log is not None and self._run.saved is not None:
            self._log.saved(self._run.saved, path)
        if self._record is not None:
            self._record.saved(path, seconds)

    def resumed(self, facts: dict[str, Any]) -> None:
        """Before the run, which goes on from a checkpoint; facts: of `TrainState.resume`."""
        if self._record is not None and self._log is not None:
            self._log.say(f"resumed {facts['path']}, step {self._run.step}")
            self._record.resumed_from = facts["path"]
            self._record.retired = facts["retired"]
