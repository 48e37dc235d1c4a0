"""Training loop: steps, validation, checkpoints and signals. `apps/train_fc.py` is an example of your own loop."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import Pmm3dError
from ...io.lock import RunLock
from ...product import DistMatrix
from ...text import counted, shell_command
from ..compute import override
from ..contexts import unchanged
from ..exchange import published_names
from ..feedback import compresses
from ..loss import cross_entropy, number_of_labels
from ..memory_trace import MemoryTrace, trace_memory
from ..recorded_steps import Replays
from .callbacks import SAVE, STOP, Callback, Callbacks
from .evaluation import Batch, Evaluation, first_non_finite, loss_named
from .log import AVERAGED, METRICS, RunLog, logger, on_first
from .recipe import Recipe
from .reporter import Reporter, Stepped
from .signals import END, REQUESTS, Signals
from .state import TrainState, tell_resumed
from .step import Agreed, Square, step_agreement, train_step

if TYPE_CHECKING:
    from ...io import Checkpoints, Loader


class NonFiniteLossError(Pmm3dError):
    """A loss or a gradient is infinite or NaN. It changed no weight, and no checkpoint was written.

    The message names the step, and the first layer whose numbers are not finite.
    """


@dataclass
class Trainer:
    """Trains a network on the batches of a loader.

    Parameters
    ----------
    state : TrainState
        Network, optimizer, schedule, loader, and for float16 the loss scale.
    recipe : Recipe
        Loss, length and intervals.
    validation : Loader or None
        Batches for validation. Default: none.
    checkpoints : pmm3d.io.Checkpoints or None
        Default: no checkpoints.
    log : RunLog or None
        Default: no log.
    settings : dict
        Further facts for checkpoints, for JSON. Default: none.
    signals : Signals
        Signals that were received before the run. Default: none.
    auto
        Automatic choice of the grid, for run.json. Default: none.
    best : pmm3d.io.Checkpoints or None
        For the state with the least loss of a validation. Default: none.
    callbacks : sequence of Callback
        Objects whose methods are called during the run, equal on all ranks. Default: none.
    keep_gradients : bool
        Whether the gradients of a step are readable until the next step; see `train_step`. Default: False.

    Attributes
    ----------
    step : int
        Number of steps.
    figures : dict
        Figures of the last validation.
    counts : Counter
        "steps" of this run, "skipped" ones of them, and "evaluations".
    saved : int or None
        Step of the newest checkpoint.
    memory_trace : tuple or None
        The step `recipe.trace_memory`, and its `MemoryTrace` on this rank.
    predicted_trace : callable
        Returns the prediction of `memory_trace`, or None.
    least : dict
        "loss" and "step" of the validation with the least loss, and the number of validations "since"; empty before the
        first one.

    Raises
    ------
    Pmm3dError
        For a state without a loader, for an unknown loss, and for an object that is no Callback.

    Notes
    -----
    SIGUSR1, on any rank, requests a checkpoint after the current step, or after the current batch of a validation.
    SIGTERM and SIGINT request a checkpoint and the end of the run. During the run the folder of the log, or of the
    checkpoints, belongs to this job: another job gets a FolderInUseError. A step has one all-reduce of a few numbers.
    Validations use the averages of the weights, if the state has an `EMA`.

    Examples
    --------
    >>> import h5py, numpy, tempfile
    >>> from mpi4py import MPI
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.io import DataSet
    >>> from pmm3d.nn import optim
    >>> from pmm3d.nn.training import Recipe, Trainer, TrainState
    >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
    ...     with h5py.File(folder + "/data.h5", "w") as file:
    ...         file["x"], file["y"] = numpy.ones((8, 3)), numpy.ones((8, 1))
    ...     net = nn.MLP(grid, [3, 1])
    ...     with DataSet(grid, folder + "/data.h5") as data:
    ...         state = TrainState(net, optim.SGD(net.parameters(), lr=0.1), loader=data.loader(4))
    ...         Trainer(state, Recipe("mse", epochs=2)).run()
    True
    """

    state: TrainState
    recipe: Recipe
    validation: Loader | None = None
    checkpoints: Checkpoints | None = None
    log: RunLog | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    auto: Any = None
    best: Checkpoints | None = None
    callbacks: Sequence[Callback] = ()
    keep_gradients: bool = False

    def __post_init__(self) -> None:
        if self.state.loader is None:
            raise Pmm3dError("a training needs batches: give the loader, TrainState(loader=)")
        self.grid, self.loader = self.state.network.parent_grid, self.state.loader
        self.figures: dict[str, float] = {}
        self.counts, self.request = Counter[str](), 0
        self.saved: int | None = None
        self.least: dict[str, Any] = {}
        self._held = 0.0
        self._loss = loss_named(self.recipe.loss)
        self._smoothed = loss_named(self.recipe.loss, label_smoothing=self.recipe.label_smoothing)
        self.memory_trace: tuple[int, MemoryTrace] | None = None
        self.predicted_trace: Callable[[], MemoryTrace | None] = lambda: None
        self._reporter = Reporter(self)
        self._callbacks = Callbacks(self, self.callbacks)
        self._agreed = Agreed(0.0, 0.0, 0, False)
        self._failed: dict[Loader, Exception | None] = {}
        self._lock: RunLock | None = None
        self._written, self._validating = list[Path](), False

    @property
    def step(self) -> int:
        """Number of steps."""
        return self.state.step

    @property
    def spent(self) -> bool:
        """Whether all steps of the recipe are done."""
        return self.recipe.steps is not None and self.step >= self.recipe.steps

    @property
    def done(self) -> bool:
        """Whether all steps or all epochs are done, the patience is exhausted, or a callback stopped the run."""
        spent = self.spent or (self.recipe.epochs is not None and self.loader.epoch >= self.recipe.epochs)
        return spent or self.impatient or self._callbacks.stops

    @property
    def impatient(self) -> bool:
        """Whether validations have had no smaller loss for as long as the recipe allows."""
        return self.recipe.patience is not None and self.least.get("since", 0) >= self.recipe.patience

    def stop(self) -> None:
        """Request the end of the run, as if its last step were made. For methods of a `Callback`, on any rank.

        The run is complete: `run` returns True. A resumed run continues, unless a callback stops it again.
        """
        self._callbacks.ask(STOP)

    def request_checkpoint(self) -> None:
        """Request a checkpoint after the current step. For methods of a `Callback`, on any rank.

        Raises Pmm3dError if the trainer has no checkpoints.
        """
        if self.checkpoints is None:
            raise Pmm3dError("request_checkpoint: the trainer has no checkpoints to write: give Trainer(checkpoints=)")
        self._callbacks.ask(SAVE)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Context in which the folder belongs to this job, and signals are collected. Collective.

        `run` enters the context. Enter it yourself before `resume`; it may be nested. Raises FolderInUseError, on every
        rank, if the folder belongs to another job.
        """
        owner = self.log if self.log is not None else self.checkpoints
        with self.signals:
            if owner is None or self._lock is not None:
                yield
                return
            self._lock = RunLock(owner.folder)
            try:
                on_first(self.grid, owner.folder, self._lock.acquire)
                yield
            finally:
                self._lock.release()
                self._lock = None

    def resume(self, path: str | os.PathLike[str] | None = None, accept: Collection[str] = ()) -> bool:
        """Continue from a checkpoint, by default the newest undamaged one. Collective.

        Return False if there is no checkpoint. `accept` as in `TrainState.resume`.
        """
        if self.checkpoints is None:
            raise Pmm3dError("resume: the trainer has no checkpoints to resume from")
        facts = self.state.resume(self.checkpoints, path, accept=accept, settings=self.settings)
        if facts is None:
            return False
        if self.validation is not None:
            self.validation.standardize(self.loader.scaling)
        tell_resumed(self.checkpoints, self.step, self._callbacks.load(facts), ())
        self.least = facts.get("least", {})
        if self.best is not None:
            self.best.retire(self.step)
            stored = {path.name.partition(".")[0] for path in self.best.candidates()}
            if self.least and f"step-{self.least['step']:08d}" not in stored:
                self.least = {}
        self.saved = self.step
        self._reporter.resumed(facts)
        return True

    def run(self) -> bool:
        """Train to the end of the last epoch or step, and write a checkpoint. Collective.

        Returns
        -------
        bool
            False if a signal ended the run early. True if a callback did.

        Raises
        ------
        NonFiniteLossError
            On every rank, if a loss or a gradient is not finite.
        NonFiniteGradientError
            On every rank, for float16, after too many skipped steps.
        DataError
            On every rank, if a batch could not be read.
        DisagreementError
            On every rank, if ranks have other callbacks.
        """
        self.counts.clear()
        with self.owning(), np.errstate(over="ignore", invalid="ignore"), self._reporter.of_run():
            try:
                self._callbacks.begin()
                self.request = self._train()
            except Exception as error:
                if getattr(error, "everywhere", False):  # all ranks are here, so a collective is possible
                    self._try_to_finish()
                raise
            self._finish()
            self._callbacks.call("after_run")
        self._tell_replays()
        return self.request < END

    def _tell_replays(self) -> None:
        """Log how many steps were replayed, and why not all."""
        replays = Replays.of(self.state.network)
        if self.grid.rank == 0:
            why = f": {replays.problem}" if replays.problem else ""
            logger.info("%d of %s were replayed%s", replays.replayed, counted(self.counts["steps"], "step"), why)
            if self.recipe.trace_memory > self.step:
                logger.warning(
                    "the memory of step %d was not traced: the training ended after step %d",
                    self.recipe.trace_memory,
                    self.step,
                )

    def _train(self) -> int:
        """Train, and return the most urgent request: END or above if a signal ended the run."""
        loader, recipe, part, callbacks = self.loader, self.recipe, self.grid.ledger.part, self._callbacks
        request, pause = self._agree(loader).request, True
        while request < END and not self.done:
            if request:
                self.save(wait=True)
            if loader.batch == len(loader):
                loader.next_epoch()
                request = 0 if self.done else self._agree(loader).request
                continue
            if self.callbacks:
                callbacks.call("before_step")
                if callbacks.stops:
                    break
            with part("step"):
                done = self._traced_step() if self.step + 1 == recipe.trace_memory else self._step()
            request = self._agreed.request
            if self.callbacks:
                callbacks.call("after_step", done.loss, done.norm)
            pause = self.spent or callbacks.stops or loader.batch == len(loader)
            with part("log"):
                self._reporter.stepped(done, pause)
            self._wrote(None if self.checkpoints is None else self.checkpoints.poll())
            if self._due(recipe.evaluate_every, pause):
                request = self._validate(request)
            if self._due(recipe.checkpoint_every, pause) or callbacks.saves:
                self.save()
        if request < END and not pause:  # nobody knew that the step was the last one
            with part("log"):
                self._reporter.stepped(done._replace(rows=0), True)
            if not recipe.evaluate_every:
                request = self._validate(request)
        self.save()
        return request

    def _due(self, every: int, pause: bool) -> bool:
        return self.step % every == 0 if every else pause

    def _traced_step(self) -> Stepped:
        """Take a step, and record its memory on this rank."""
        with trace_memory(self.state.network) as trace:
            done = self._step()
        self.memory_trace = self.step, trace
        return done

    def _step(self) -> Stepped:
        """Take or skip a step of the optimizer, and wait for the batches of the next one."""
        state, lr, steps = self.state, self.state.optimizer.lr, self.step
        skipped = 0 if state.scale is None else state.scale.skipped
        batches = self._take(self.loader)
        try:
            value, norm = train_step(
                state.network,
                state.optimizer,
                self._smoothed,
                batches,
                self.recipe.clip,
                agree=partial(self._agree, self.loader),
                scale=state.scale,
                ema=state.ema,
                keep_gradients=self.keep_gradients,
                check=lambda inputs, what, value: self._check(
                    inputs, f"step {self.step + 1}: {what}", value, lambda: self._has_weight([y for _, y in batches])
                ),
            )
        finally:
            self.counts["steps"] += self.step - steps
            self.counts["skipped"] += 0 if state.scale is None else state.scale.skipped - skipped
        if state.schedule is not None:
            state.schedule.step()
        return Stepped(value, norm, lr, sum(x.shape[0] for x, _ in batches))

    def _agree(self, loader: Loader, loss: float = 0.0, square: Square = 0.0) -> Agreed:
        """Wait for this rank's part of the next batch. Combine read errors, signals, loss and norm of all ranks, by one
        all-reduce."""
        with self.grid.ledger.part("agreement"):
            problem = loader.fetch()
            agreed = self._agreed = step_agreement(
                self.state.network.grid,
                loss,
                square,
                parent=self.grid,
                request=self.signals.taken(),
                failed=problem is not None,
            )
        self._failed.pop(loader, None)
        if agreed.failed:
            self._failed[loader] = problem
        return agreed

    def _take(self, loader: Loader) -> list[Batch]:
        """Return the micro-batches of a batch. Raises, on every rank, the error of a rank that could not read it."""
        if loader in self._failed:
            with self.grid.collective_call("Loader", always=True):
                if (problem := self._failed.pop(loader)) is not None:
                    raise problem
        with self.grid.ledger.part("batches"):
            return [loader.take() for _ in range(loader.left)]

    def _validate(self, request: int) -> int:
        """Evaluate if there are batches for it, and return the most urgent request."""
        if self.validation is None:
            return request
        with self.grid.ledger.part("validation"):
            request = self._evaluate(self.validation, request)
        self._wrote(None)
        self._callbacks.call("after_validation", {**self.figures})
        return request

    def _evaluate(self, validation: Loader, request: int) -> int:
        """Evaluate, and return the most urgent request. A checkpoint requested meanwhile is written after the current
        batch, if the figures so far are finite."""
        network = self.state.network
        evaluation, inputs = self._evaluation(), list[DistMatrix]()
        validation.begin_epoch()
        averaged = nullcontext() if self.state.ema is None else self.state.ema.average_parameters()
        with averaged, network.evaluating(), unchanged(network.grid), override(self, _validating=True):
            while validation.batch < len(validation):
                request = max(request, self._agree(validation).request)
                if request and inputs and self.saved != self.step:
                    self._judge(evaluation, inputs)
                    self.save(wait=True)
                batches = self._take(validation)
                evaluation.add(batches)
                inputs = [x for x, _ in batches]
            validation.next_epoch()
            self.figures = self._judge(evaluation, inputs)
            self.figures |= validation.data.of_loss(self.figures["loss"])
        self._reporter.validated()
        self._compare_with_least(self.figures["loss"])
        return request

    def _compare_with_least(self, loss: float) -> None:
        """Count validations since the least loss. Write the best checkpoint if this loss is smaller; NaN is not."""
        if self.best is None and self.recipe.patience is None:
            return
        if not loss < self.least.get("loss", inf):
            if self.least:
                self.least["since"] += 1
            return
        self.least = {"loss": loss, "step": self.step, "since": 0}
        if self.best is not None:
            with self.grid.ledger.part("checkpoint"):
                path = self.state.save(self.best, settings=self.settings, **self._extra())
                self.best.finish()
            self._written.append(path)

    def _extra(self) -> dict[str, Any]:
        """Further facts for a checkpoint. Collective."""
        return ({"least": self.least} if self.least else {}) | self._callbacks.facts()

    def _evaluation(self) -> Evaluation:
        names = self.loader.data.target_names or ()
        return Evaluation(self.state.network, self._loss, self.recipe.metrics, names)

    def _judge(self, evaluation: Evaluation, inputs: Sequence[DistMatrix]) -> dict[str, float]:
        """Return the figures so far. Raises NonFiniteLossError if their loss is not finite. inputs: of the last
        batch."""
        figures = evaluation.figures()
        self.counts["evaluations"] += 1
        what = f"step {self.step}: the validation's loss is"
        self._check(inputs, what, figures["loss"], lambda: evaluation.has_terms)
        return figures

    def _has_weight(self, labels: Sequence[DistMatrix]) -> bool:
        """Return whether a label of these micro-batches has a weight above 0 in the loss. Collective."""
        if not isinstance(self._loss, partial) or self._loss.func is not cross_entropy:
            return True
        weight, ignored = (self._loss.keywords.get(name) for name in ("weight", "ignore_index"))
        class_weights = None if weight is None else np.asarray(weight, float)
        return number_of_labels(self.state.network.grid, labels, ignored, class_weights) > 0

    def _check(self, inputs: Sequence[DistMatrix], what: str, value: float, has_weight: Callable[[], bool]) -> None:
        """Raises NonFiniteLossError if the value is not finite. has_weight: whether a label counts; called on every
        rank."""
        if isfinite(value):
            return
        if not has_weight():
            self._try_to_finish()
            with self.grid.collective_call("training"):
                raise NonFiniteLossError(
                    f"{what} {value}, because no label has a weight above 0: take a larger data.batch_size, or weights "
                    "above 0. For a validation, hold out more rows"
                )
        where = first_non_finite(self.state.network, inputs)
        self._try_to_finish()
        with self.grid.collective_call("training"):
            newest = self.checkpoints.latest() if self.checkpoints is not None else None
            remedy = f"The newest checkpoint, {newest}, is from before. " if newest is not None else ""
            raise NonFiniteLossError(
                f"{what} {value}. {where} The weights are those of step {self.step}. {remedy}Try a "
                "smaller learning rate, a warm-up, or clipping"
            )

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint, at most one a step. Collective.

        With `wait`, the checkpoint is on the disk when the call returns.
        """
        if self.checkpoints is None:
            return
        self._callbacks.saves = False
        if self.saved != self.step:
            self._finish()
            begun = time.perf_counter()
            with self.grid.ledger.part("checkpoint"):
                path = self.state.save(self.checkpoints, settings=self.settings, **self._extra())
            self.saved, self._held = self.step, time.perf_counter() - begun
            self._wrote(None if self.checkpoints.background else path)
        if wait:
            self._finish()

    def _finish(self) -> None:
        """Wait for the checkpoint that is written in the background."""
        begun = time.perf_counter()
        with self.grid.ledger.part("checkpoint"):
            path = self.checkpoints.finish() if self.checkpoints is not None else None
        self._held += time.perf_counter() - begun
        self._wrote(path)

    def _try_to_finish(self) -> None:
        """Complete the checkpoint that is written in the background, if possible, before an error ends the run."""
        try:
            self._finish()
        except Exception as error:
            if self.grid.rank == 0:
                logger.warning(f"the newest checkpoint was not written: {error}")

    def _wrote(self, path: Path | None) -> None:
        """Report a checkpoint that is now on the disk; nothing for None. Outside of validations, call
        `after_checkpoint`."""
        if path is not None:
            with self.grid.ledger.part("log"):
                self._reporter.saved(path, self._held)
            self._written.append(path)
        while self._written and not self._validating:
            self._callbacks.call("after_checkpoint", self._written.pop(0))

    def steps_left(self) -> int:
        """Return the number of steps to the end of the run, if it does not end early."""
        if self.impatient:
            return 0
        batches, position, recipe = len(self.loader), self.loader.state(), self.recipe
        left = [] if recipe.steps is None else [recipe.steps - self.step]
        if recipe.epochs is not None:
            left.append((recipe.epochs - position["epoch"]) * batches - position["batch"])
        return max(0, min(left))

    def describe(self) -> str:
        """Return a line about the training that `run` will do."""
        left, end = self.steps_left(), self.recipe.epochs
        if not left:
            done = counted(self.step, "step") if self.spent or end is None or self.impatient else counted(end, "epoch")
            return f"nothing left to train: {done} done{self._why_early()}"
        until = f"epochs {self.loader.epoch + 1} to {end}" if end is not None else f"from epoch {self.loader.epoch + 1}"
        return (
            f"training {counted(self.state.network.size, 'parameter')} on grid {self.grid.shape}, "
            f"{counted(self.grid.size, 'rank')}: {counted(len(self.loader), 'batch')} an epoch, {until}, "
            f"{counted(left, 'step')} to go"
        )

    def _why_early(self) -> str:
        number = counted(self.recipe.patience or 0, "validation")
        if self._callbacks.stops:
            return ", and a callback stopped the run"
        return f", and no smaller loss in the last {number} (training.patience)" if self.impatient else ""

    def summary(self, again: str = "") -> str:
        """Text about the result of the run.

        `again` is the command that resumes the run, which the text names if a signal ended the run.
        """
        lines = [f"{counted(self.step, 'step')}, {counted(self.loader.epoch, 'epoch')}{self._why_early()}"]
        if self.request >= END:
            name = next(signal.name for signal, request in REQUESTS.items() if request == self.request)
            lines = [f"not finished: {name} stopped the run at step {self.step} of {self.step + self.steps_left()}"]
        by = AVERAGED * (self.state.ema is not None)
        lines += [f"validation {name}: {value:.4f}{by}" for name, value in self.figures.items()]
        if self.least:
            where = "" if self.best is None else f", in {self.best.folder}"
            lines.append(f"least validation loss: {self.least['loss']:.4f}, at step {self.least['step']}{where}")
        if self.saved is not None and self.checkpoints is not None:
            lines.append(f"checkpoint of step {self.saved} in {self.checkpoints.folder}")
        if self.request >= END and again:
            ranks = self.grid.size
            same = "" if compresses(self.state.network) else f" (on {ranks}, with the bits of an unbroken run)"
            lines.append(
                f"to resume: {again}"
                if ranks == 1
                else f"to resume, on any number of ranks{same}: "
                f"python -m pmm3d.launcher -n {ranks} -m {again} (or the site's launcher)"
            )
        if self.request < END and self.log is not None:
            from ...io import TokenDataSet

            folder = self.log.folder
            lines.append(f"figures in {folder / METRICS}; a page of all: {shell_command('pmm3d', 'report', folder)}")
            if self.impatient and self.best is not None:
                folder = self.best.folder
            if isinstance(self.loader.data, TokenDataSet):
                use = f"text: {shell_command('pmm3d', 'generate', folder)} --prompt TEXT"
            else:
                files = "FILE.h5 (or .csv) --out OUT.h5 (or .csv)"
                use = f"predictions: {shell_command('pmm3d', 'predict', folder)} {files}"
            files = "FOLDER or FILE.safetensors" if published_names(self.state.network) else "FILE.safetensors"
            lines.append(f"{use}; weights for torch: {shell_command('pmm3d', 'export', folder)} {files}")
        return "\n".join(lines)
