"""The training loop: steps, validation, checkpoints, signals, resumption. A loop of one's own: `apps/train_fc.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CheckpointError, Pmm3dError
from ...product import DistMatrix
from ..optim import NonFiniteGradientError
from ..tape import unchanged
from .feed import Feed
from .finite import NonFiniteLossError, first_non_finite
from .folder import RunFolder
from .observer import Observer, Stepped
from .passes import Batch, Evaluation, Passes, facts_of, loss_named, train_step
from .run import Run
from .signals import END

if TYPE_CHECKING:
    from ...io import Loader


class Trainer(Run):
    """Trains a network on the batches of a loader.

    state         the TrainState: network, optimizer, schedule, loader and, of float16, loss scale, as in a loop of
                  one's own
    recipe        how to train: `Recipe`
    validation    a second loader, or None
    checkpoints   a `pmm3d.io.Checkpoints`, or None
    log           a RunLog, or None
    settings      what else a checkpoint is to remember; JSON-able
    signals       the `Signals` that note what came before the run

    step, figures   steps done; the last validation's figures
    request         after `run`: END or above (`signals`) if a signal ended it
    passes, saved   what this run did so far; the step of its newest checkpoint, None if there is none

    SIGUSR1, on any rank, has a checkpoint written after the step, or the batch of a validation, under way; SIGTERM and
    SIGINT have one written and end the run. The folder of the log (or that of the checkpoints) belongs to this job
    while it runs: another one that wants it gets a FolderInUseError. `run`, `resume` and `owning` are collective.

        >>> import h5py, tempfile; from mpi4py import MPI
        >>> from pmm3d import Grid, nn; from pmm3d.io import DataSet; from pmm3d.nn import optim
        >>> from pmm3d.nn.training import Recipe, TrainState
        >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
        ...     with h5py.File(folder + "/data.h5", "w") as file:
        ...         file["x"], file["y"] = np.ones((8, 3)), np.ones((8, 1))
        ...     net = nn.MLP(grid, [3, 1])
        ...     with DataSet(grid, folder + "/data.h5") as data:
        ...         state = TrainState(net, optim.SGD(net.parameters(), lr=0.1), loader=data.loader(4))
        ...         Trainer(state, Recipe("mse", epochs=2)).run()
        True
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss, self._held = loss_named(self.recipe.loss), 0.0
        owner = self.log if self.log is not None else self.checkpoints
        self._folder = RunFolder(self.grid, owner.folder if owner is not None else None)
        self._observer = Observer(self, self._folder)
        self._feed = Feed(self, self._observer)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """As a context: the folder belongs to this job (`RunFolder.owning`), and signals are noted. `run` enters it by
        itself; what goes before that in the same folder, such as `resume`, may be put into it too."""
        with self._folder.owning(), self.signals:
            yield

    def resume(self, path: str | os.PathLike[str] | None = None, accept: Collection[str] = ()) -> bool:
        """Go on from a checkpoint, or from the newest good one; False if there is none. On any grid. See
        `TrainState.resume`."""
        if self.checkpoints is None:
            raise Pmm3dError("resume: the trainer has no checkpoints to resume from")
        facts = self.state.resume(self.checkpoints, path, accept=accept, settings=self.settings)
        if facts is None:
            return False
        self.saved = self.step
        self._observer.resumed(facts)
        return True

    def run(self) -> bool:
        """Train to the end of the last epoch, or of the budget in steps; False if a signal ended it before. A
        checkpoint is written in both cases. Raises NonFiniteLossError, or NonFiniteGradientError where a scale of the
        loss is of no help, and what the loader raises, on every rank."""
        self.passes = Passes()
        with self.owning(), np.errstate(over="ignore", invalid="ignore"), self._observer.of_run():
            try:
                self.request = self._train()
            except Pmm3dError as error:
                if error.everywhere:  # all ranks are here: what was saved before is not lost
                    with suppress(CheckpointError):
                        self._finish()
                raise
            self._finish()
        return self.request < END

    def _train(self) -> int:
        """The most urgent request at the end: END or above if a signal ended the run."""
        request = self._feed.ask(self.loader)
        if request:
            self.save(wait=True)
        while not self.done and request < END:
            for rows in self._groups():
                done = self._step(rows)
                pause = self.spent or self.loader.batch == len(self.loader)
                self._observer.stepped(done, pause)
                self._wrote(None if self.checkpoints is None else self.checkpoints.poll())
                request = self._feed.wanted()
                if self.validation is not None and self._due(self.recipe.evaluate_every, pause):
                    request = max(request, self._validate(self.validation, request))
                if request or self._due(self.recipe.checkpoint_every, pause):
                    self.save(wait=request > 0)
                if request >= END:
                    return request
            request = self._feed.wanted()
            if request:
                self.save(wait=True)
        if request < END:
            self.save()
        return request

    def _due(self, every: int, pause: bool) -> bool:
        return self.step % every == 0 if every else pause

    def _groups(self) -> Iterator[list[int]]:
        """The rows of the batches of each step of the rest of the epoch; then the next one begins."""
        loader = self.loader
        while (left := len(loader) - loader.batch) > 0 and not self.spent:
            yield [loader.rows(loader.batch + index) for index in range(min(self.recipe.accumulate, left))]
        if left == 0:
            self._feed.begin_epoch(loader)

    def _step(self, rows: list[int]) -> Stepped:
        state, taken, lr = self.state, [], self.state.optimizer.lr

        def batches() -> Iterator[Batch]:
            while True:
                x, y = self._feed.take(self.loader)
                taken.append(facts_of(x, y))
                yield x, y

        try:
            value, norm = train_step(state.network, state.optimizer, self._loss, rows, batches(), self.recipe.clip,
                                     partial(self._feed.agreed, self.loader), self._check_step, state.scale)
        except NonFiniteGradientError:
            self.passes.note("skipped", *taken)
            raise
        self.passes.note("step" if state.scale is None or not state.scale.in_a_row else "skipped", *taken)
        if state.schedule is not None:
            state.schedule.step()
        return Stepped(value, norm, lr, sum(rows))

    def _validate(self, validation: Loader, request: int) -> int:
        """The most urgent request by its end; a checkpoint for it is on the disk as soon as what was evaluated so far
        shows that the weights are sound."""
        network = self.state.network
        evaluation, x = Evaluation(network, self._loss, self.recipe.metrics), None
        with network.evaluating(), unchanged(self.grid):
            while validation.batch < len(validation):
                request = max(request, self._feed.ask(validation))
                if request and x is not None and self.saved != self.step:
                    self._judge(evaluation, x)
                    self.save(wait=True)
                x, y = self._feed.take(validation)
                evaluation.add(x, y)
                self.passes.note("batch", facts_of(x, y))
            validation.next_epoch()
            self.figures = self._judge(evaluation, x)
        self._observer.validated()
        return request

    def _judge(self, evaluation: Evaluation, x: DistMatrix | None) -> dict[str, float]:
        """The figures so far; raises NonFiniteLossError if their loss is not finite. x: of the last batch."""
        figures = evaluation.figures()
        self.passes.note("evaluated")
        self._check(x, f"step {self.step}: the validation's loss is", figures["loss"])
        return figures

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of everything, once a step. wait: until it is on the disk, if the checkpoints are written
        in the background."""
        if self.checkpoints is None:
            return
        if self.saved != self.step:
            self._finish()
            begun = time.perf_counter()
            path = self.state.save(self.checkpoints, settings=self.settings)
            self.saved, self._held = self.step, time.perf_counter() - begun
            self._wrote(None if self.checkpoints.background else path)
        if wait:
            self._finish()

    def _finish(self) -> None:
        """Wait for the checkpoint that is written in the background."""
        begun = time.perf_counter()
        path = self.checkpoints.finish() if self.checkpoints is not None else None
        self._held += time.perf_counter() - begun
        self._wrote(path)

    def _wrote(self, path: Path | None) -> None:
        """Note a checkpoint that is on the disk now, if there is one."""
        if path is not None:
            self._observer.saved(path, self._held)

    def _check_step(self, x: DistMatrix, what: str, value: float) -> None:
        self._check(x, f"step {self.step + 1}: {what}", value)

    def _check(self, x: DistMatrix | None, what: str, value: float) -> None:
        """Raise NonFiniteLossError that names what in the network went wrong first, if the value says so."""
        if isfinite(value):
            return
        where = first_non_finite(self.state.network, x) if x is not None else ""
        with self.grid.collective_call("training"):
            newest = self.checkpoints.latest() if self.checkpoints is not None else None
            kept = f"The newest checkpoint, {newest}, is from before. " if newest is not None else ""
            raise NonFiniteLossError(f"{what} {value}. {where} The weights are those of step {self.step}. {kept}Try a "
                                     "smaller learning rate, a warm-up, or clipping")
