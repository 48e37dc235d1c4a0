"""Reports of a training run: lines of the log, warnings about stragglers, and the record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .log import logger, on_first

LOOK_SECONDS = 10.0
"""Seconds between two searches for stragglers. A search gathers one number from each rank."""
SLOW, WAITED = 2.0, 0.25
"""A straggler is busy at least SLOW times as long as the median, and others wait at least this share of the time."""


class Stepped(NamedTuple):
    """A step that was taken or skipped. norm: of the gradient; lr: learning rate of the step."""

    loss: float
    norm: float
    lr: float
    rows: int


class Reporter:
    """Reports of a Trainer's run. All ranks call the methods; rank 0 writes. Without a log there are only warnings
    about stragglers."""

    def __init__(self, run: Any):
        self._run, self._log, self._record = run, run.log, None
        if run.log is not None:
            from .record import RunRecord  # needs pydantic

            self._record = RunRecord(run, run.log.folder)
        self._since, self._waited, self._rows = time.perf_counter(), 0.0, 0
        self._told = set[int]()
        self._looked, self._waited_then = 0.0, 0.0

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Context of the run from its first step to its end. Collective."""
        run, log, record = self._run, self._log, self._record
        self._looked, self._waited_then = time.perf_counter(), self._waited_for_messages()
        if record is None:
            yield
            return
        on_first(run.grid, log.folder, lambda: log.open(run.step, run.step + run.steps_left()))
        with closing(log), record.of_run():
            yield

    def stepped(self, done: Stepped, pause: bool) -> None:
        """Report a step. pause: whether an epoch or the run ends with it."""
        run, step = self._run, self._run.step
        self._rows += done.rows
        if self._log is None or not (pause or step == 1 or step % run.recipe.log_every == 0):
            return
        since, waited, rows, self._rows = self._since, self._waited, self._rows, 0
        self._since, self._waited = time.perf_counter(), run.grid.ledger.total().waited
        elapsed, scale = max(1e-9, self._since - since), run.state.scale
        figures = {"loss": done.loss, **run.loader.data.of_loss(done.loss), "gradient_norm": done.norm} | (
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
            }
        )

    def validated(self) -> None:
        """Report an evaluation."""
        if self._log is not None:
            self._log.validation(self._run.step, self._run.loader.epoch, self._run.figures)

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

    def straggler_due(self) -> bool:
        """Return whether a search for stragglers is due, on rank 0."""
        grid = self._run.grid
        return grid.rank == 0 and grid.size > 1 and time.perf_counter() - self._looked > LOOK_SECONDS

    def look_for_stragglers(self) -> None:
        """Warn about a rank that others wait for, once for each rank. Collective."""
        grid, now, waited = self._run.grid, time.perf_counter(), self._waited_for_messages()
        seconds, everyones = now - self._looked, grid.comm.gather(max(0.0, waited - self._waited_then))
        self._looked, self._waited_then = now, waited
        if everyones is None:
            return
        rank, ratio, longer = slowest(seconds, everyones)
        if rank not in self._told and ratio >= SLOW and longer >= WAITED * seconds:
            self._told.add(rank)
            logger.warning(
                f"rank {grid.everyone.ranks[rank]} (host {grid.host_of(rank)}) is {ratio:.1f} times slower "
                f"than the median: others waited {longer:.0f} of the last {seconds:.0f} s for it"
            )

    def _waited_for_messages(self) -> float:
        """Return the seconds of waiting for other ranks, without the loader."""
        return sum(entry.waited for key, entry in self._run.grid.ledger.entries.items() if key.axis)


def slowest(seconds: float, waited: Sequence[float]) -> tuple[int, float, float]:
    """Return (the rank that waited least, its busy time divided by the median, by how many seconds the others waited
    longer on average). waited: seconds that each rank waited for messages, of `seconds`."""
    rank = min(range(len(waited)), key=waited.__getitem__)
    busy = [max(1e-9, seconds - each) for each in waited]
    others = (sum(waited) - waited[rank]) / max(1, len(waited) - 1)
    return rank, busy[rank] / median(busy), others - waited[rank]
