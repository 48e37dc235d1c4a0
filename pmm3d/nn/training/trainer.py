"""The training loop: steps, evaluation, checkpoints, signals, resumption. A loop of one's own: `apps/train_fc.py`."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from ...errors import Pmm3dError
from ...io.lock import RunLock
from .. import loss as losses
from ..layers import Module
from ..optim import Optimizer, Schedule
from ..tensor import Tape, no_sync
from ..volume import Passes
from .record import RunRecord
from .run_log import RunLog, curve, read_metrics
from .signals import END, Signals

LOSSES = {"cross_entropy": losses.cross_entropy, "mse": losses.mse, "mae": losses.mae}


class NonFiniteLossError(Pmm3dError):
    """The loss is infinite or not a number; the text names the step and where it began. No weight was changed by it."""


@dataclass
class Trainer:
    """Trains a network on the batches of a loader.

    network, optimizer, schedule   as in a loop of one's own; schedule may be None
    loader        gives (x, y) DistMatrices; `pmm3d.io.Loader`
    loss          "cross_entropy", "mse", "mae", or a function (output, y) -> Tensor
    epochs        passes over the loader's rows
    validation    a second loader, or None;   evaluate_every  in steps, 0: after each epoch
    checkpoints   a `pmm3d.io.Checkpoints`, or None;   checkpoint_every  in steps, 0: after each epoch
    micro_batches batches of the loader that make one step; their gradients are summed over data once
    clip          largest 2-norm of the gradient, or None
    log           a RunLog, or None;   log_every  in steps, besides the first step and the last of each epoch
    settings      what else a checkpoint is to remember; JSON-able
    signals       the `Signals` that note what came before the run
    step, figures steps done; the last validation's figures
    passes        what this run did so far

    SIGUSR1, on any rank, has a checkpoint written after the step, or the batch of an evaluation, under way; SIGTERM has
    one written and ends the run. The folder of the log (or that of the checkpoints) belongs to this job while it runs:
    another one that wants it gets a FolderInUseError. `run`, `resume` and `owning` are collective.
    """

    network: Module
    optimizer: Optimizer
    loader: object
    loss: object
    epochs: int
    schedule: Schedule | None = None
    validation: object = None
    evaluate_every: int = 0
    checkpoints: object = None
    checkpoint_every: int = 0
    micro_batches: int = 1
    clip: float | None = None
    log: RunLog | None = None
    log_every: int = 10
    settings: dict = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    step: int = 0
    figures: dict = field(default_factory=dict)
    passes: Passes = field(default_factory=Passes)

    def __post_init__(self):
        self.grid = self.network.grid
        self._loss = LOSSES.get(self.loss, self.loss)
        if not callable(self._loss):
            raise Pmm3dError(f"the loss is {', '.join(LOSSES)} or a function; got {self.loss!r}")
        self._lock = None
        self._record = RunRecord(self) if self.log is not None else None
        self._since = [time.perf_counter(), 0, 0.0]
        self._saved = None

    def run(self) -> bool:
        """Train to the end of the last epoch; False if SIGTERM ended it before. A checkpoint is written in both cases.

        Raises NonFiniteLossError and what the loader raises, on every rank.
        """
        with self.owning(), np.errstate(over="ignore", invalid="ignore"):
            if self.log is not None:
                self._on_first(lambda: self.log.open(self.step, self.step + self._steps_left()))
            self.passes = Passes()
            try:
                with self._recorded():
                    return self._epochs()
            finally:
                if self.log is not None:
                    self.log.close()

    @contextmanager
    def owning(self):
        """As a context: no other job may write into the folder, and signals are noted. `run` enters it by itself; what
        goes before that in the same folder, such as `resume`, may be put into it too.

        Raises FolderInUseError, on every rank, if another job has the folder; nothing was changed there.
        """
        if self._lock is not None or self._folder is None:
            with self.signals:
                yield
            return
        self._lock = RunLock(self._folder)
        try:
            self._on_first(self._lock.acquire)
            with self.signals:
                yield
        finally:
            self._lock.release()
            self._lock = None

    def _on_first(self, body) -> None:
        """Rank 0 does it; all ranks raise what it could not do in the folder."""
        problem = None
        if self.grid.rank == 0:
            try:
                body()
            except OSError as error:
                problem = Pmm3dError(f"the folder {self._folder} cannot be written: {error.strerror}")
            except Pmm3dError as error:
                problem = error
        problem = self.grid.comm.bcast(problem)
        with self.grid.together("training", str(self._folder)):
            if problem is not None:
                raise problem

    @property
    def _folder(self):
        return self.log.folder if self.log is not None else self.checkpoints and self.checkpoints.folder

    @contextmanager
    def _recorded(self):
        """The record of the run is begun, and says how it ended."""
        if self._record is None:
            yield
            return
        self._record.begin()
        try:
            yield
        except Exception as error:
            self._record.broke_off(error)
            raise
        self._record.write("finished" if self.loader.epoch >= self.epochs else "ended by SIGTERM")

    def _steps_left(self) -> int:
        steps = lambda batches: -(-batches // self.micro_batches)
        whole, state = len(self.loader), self.loader.state()
        return max(0, steps(whole - state["batch"]) + (self.epochs - state["epoch"] - 1) * steps(whole))

    def _epochs(self) -> bool:
        asked = self._asked()
        if asked:
            self.save()
        if asked >= END:
            return False
        while self.loader.epoch < self.epochs:
            for size, batches in self._groups():
                value, norm = self._step(size, batches)
                at_end = self.loader.state()["batch"] == len(self.loader)
                if at_end or self.step == 1 or self.step % self.log_every == 0:
                    self._tell(value, norm)
                asked = self._asked()
                if asked:
                    self.save()
                if self._due(self.evaluate_every, at_end) and self.validation is not None:
                    asked = max(asked, self._evaluate())
                if self._due(self.checkpoint_every, at_end):
                    self.save()
                if asked >= END:
                    return False
        self.save()
        return True

    def _due(self, every: int, at_end: bool) -> bool:
        return self.step % every == 0 if every else at_end

    def _groups(self):
        """(number of micro-batches, iterator over them) of each step of the rest of the epoch."""
        batches, left = iter(self.loader), len(self.loader) - self.loader.state()["batch"]
        while left > 0:
            size = min(self.micro_batches, left)
            yield size, (next(batches) for _ in range(size))
            left -= size
        for _ in batches:
            raise Pmm3dError("the loader gave more batches than its length")

    def _step(self, size: int, batches) -> tuple[float, float | None]:
        """The loss, and the norm of the gradient if it is clipped."""
        value, rows = 0.0, 0
        for index, (x, y) in enumerate(batches):
            loss = self._loss(self.network(x), y)
            loss = loss if size == 1 else loss / size
            if index < size - 1:
                with no_sync(self.grid):
                    loss.backward()
            else:
                loss.backward()
            value, rows = value + loss.item(), rows + x.shape[0]
            self.passes.trained[x.shape[0]] += 1
            if not isfinite(value):
                self._explain(x, f"the loss is {value}")
        norm = self.optimizer.clip(self.clip) if self.clip else None
        if norm is not None and not isfinite(norm):
            self._explain(x, f"the gradient's norm is {norm}")
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1
        self.passes.steps += 1
        self.passes.evaluated_last = False
        self._since[1] += rows
        return value, norm

    def _tell(self, value: float, norm: float | None) -> None:
        now, waited = time.perf_counter(), self.grid.ledger.total().waited
        begun, rows, before = self._since
        self._since = [now, 0, waited]
        if self._lock is not None:
            self._lock.beat()
        if self.log is not None:
            elapsed = max(1e-9, now - begun)
            self.log.step({"step": self.step, "epoch": self.loader.epoch, "loss": value, "lr": self.optimizer.lr,
                           "samples_per_second": rows / elapsed, "waiting": max(0.0, waited - before) / elapsed}
                          | ({} if norm is None else {"gradient_norm": norm}))

    def _evaluate(self) -> int:
        """Returns the most urgent wish that came meanwhile; a checkpoint for it is on the disk."""
        wishes = [0]

        def batches():
            for x, y in self.validation:
                yield x, y
                self.passes.evaluated[x.shape[0]] += 1
                if self._lock is not None:
                    self._lock.beat()
                wishes.append(self._asked())
                if wishes[-1]:
                    self.save()

        self.figures = evaluate(self.network, batches(), self._loss)
        self.passes.evaluations += 1
        self.passes.evaluated_last = True
        if self.log is not None:
            self.log.validation(self.step, self.loader.epoch, self.figures)
        return max(wishes)

    def save(self) -> None:
        """Write a checkpoint of everything, once a step."""
        if self.checkpoints is None or self._saved == self.step:
            return
        begun = time.perf_counter()
        path = self.checkpoints.save(self.step, self._matrices(), self._state())
        self._saved = self.step
        if self.log is not None:
            self.log.saved(self.step, path)
            self._record.saved(path, time.perf_counter() - begun)

    def resume(self, path=None) -> bool:
        """Go on from a checkpoint, or from the newest good one; False if there is none. On any grid."""
        if self.checkpoints is None:
            raise Pmm3dError("resume: the trainer has no checkpoints to resume from")
        if path is None and self.checkpoints.latest() is None:
            return False
        matrices = self._matrices()
        if path is None:
            path, state = self.checkpoints.load_latest(matrices)
        else:
            state = self.checkpoints.load(path, matrices)
        with self.grid.together("resume", str(path)):
            self.network.loaded()
            self.network.set_random_state(state["random"])
            self.optimizer.load_state(state["optimizer"])
            if self.schedule is not None:
                self.schedule.load_state(state["schedule"])
            self.loader.load_state(state["loader"])
        self.step = self._saved = state["step"]
        if self.log is not None:
            self.log.say(f"resumed {path}, step {self.step}")
            self._record.resumed(path)
        return True

    def refuse_to_overwrite(self) -> None:
        """Raise, on every rank, if there are checkpoints of an earlier run: a new run would remove them."""
        found = self.checkpoints and self.checkpoints.latest()
        with self.grid.together("training", str(found)):
            if found:
                raise Pmm3dError(f"{found} is there from an earlier run: go on with --resume auto, or choose another "
                                 "training.folder")

    def describe(self) -> str:
        """What is about to be trained, in a line."""
        if not self._steps_left():
            return f"nothing left to train: {self.epochs} epochs are done"
        return (f"training {self.network.size:,} parameters on grid {self.grid.shape}, {self.grid.size} ranks: "
                f"{len(self.loader)} batches an epoch, epochs {self.loader.epoch + 1} to {self.epochs}")

    def summary(self) -> str:
        """What came out, on rank 0."""
        lines = [f"{self.step} steps, {self.loader.epoch} epochs"]
        if self.figures:
            lines += [f"validation {name}: {value:.4f}" for name, value in self.figures.items()]
        if self._saved is not None and self.checkpoints is not None:
            lines.append(f"checkpoint of step {self._saved} in {self.checkpoints.folder}")
        if self.log is not None:
            losses = [line["loss"] for line in read_metrics(self.log.folder / "metrics.jsonl") if "loss" in line]
            lines.append(f"loss {curve(losses)} from {losses[0]:.3g} to {losses[-1]:.3g}" if losses else "no loss yet")
            lines.append(f"curves in {self.log.folder / 'curves.png'}, figures in {self.log.folder / 'metrics.jsonl'}; "
                         f"a page of all: pmm3d report {self.log.folder}")
        return "\n".join(lines)

    def _matrices(self) -> dict:
        return {**self.network.matrices(), **self.optimizer.matrices()}

    def _state(self) -> dict:
        return {
            "step": self.step,
            "optimizer": self.optimizer.state(),
            "schedule": self.schedule.state() if self.schedule is not None else None,
            "loader": self.loader.state(),
            "random": self.network.random_state(),
            "grid": list(self.grid.shape),
            "settings": self.settings,
        }

    def _asked(self) -> int:
        """The most urgent signal that any rank has had since the last time. Collective."""
        self.passes.asked += 1
        return self.signals.asked(self.grid)

    def _explain(self, x, what: str) -> None:
        """Raise NonFiniteLossError with the first place in the network where numbers went wrong."""
        where = first_non_finite(self.network, x)
        with self.grid.together("training"):
            raise NonFiniteLossError(
                f"step {self.step + 1}: {what}. {where} The weights are those of step {self.step}"
                + (f", as in {self.checkpoints.latest()}" if self.checkpoints and self._saved is not None else "")
                + ". Try a smaller learning rate, a warm-up, or clipping"
            )


def first_non_finite(network: Module, x) -> str:
    """Which parameter, input or layer has infinite numbers or NaN first. Collective."""
    grid, names = network.grid, {module: name or "the network" for name, module in network.named_modules()}
    found: list[str] = []

    def finite(value) -> bool:
        local = np.asarray(value.library.to_numpy(value.local))
        wrong = np.array([np.count_nonzero(~np.isfinite(local))], np.int64)
        return int(grid.everyone.all_reduce(wrong, agreed=True).wait()[0]) == 0

    for name, parameter in network.named_parameters().items():
        if not finite(parameter):
            return f"The parameter {name} is not finite."
    if not finite(x):
        return "The input is not finite."

    def look(module, output) -> None:
        if not found and not finite(output):
            found.append(f"The output of layer {names.get(module, '?')} ({type(module).__name__}) is not finite.")

    with Tape.of(grid).set(inspect=look), network.evaluating():
        network(x)
    return found[0] if found else "All layers' outputs are finite: it is the loss or the gradient itself."


def evaluate(network: Module, loader, loss) -> dict[str, float]:
    """Means over one pass of a loader: "loss", and "accuracy" for classes or "r2" for vectors. Collective.

    The loader must start a pass of its own and not shuffle.
    """
    total, right, rows, score = 0.0, 0.0, 0, losses.R2()
    classes = loss is losses.cross_entropy
    with network.evaluating():
        for x, y in loader:
            out = network(x)
            if classes:
                right += losses.accuracy(out, y) * x.shape[0]
            else:
                score.add(out, y)
            total += loss(out, y).item() * x.shape[0]
            rows += x.shape[0]
    return {"loss": total / max(1, rows)} | ({"accuracy": right / max(1, rows)} if classes else {"r2": score.value()})
