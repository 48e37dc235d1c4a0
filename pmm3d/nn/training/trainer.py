"""The training loop: steps, evaluation, checkpoints, signals, resumption. A loop of one's own: `apps/train_fc.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import Pmm3dError
from ...io.lock import RunLock
from ...product import DistMatrix
from ..layers import Module
from ..tape import Tape, unchanged
from ..tensor import Tensor
from .pace import Pace
from .passes import Batch, Evaluation, Loss, Passes, facts_of, loss_named, train_step
from .record import RunRecord
from .run import Run
from .signals import END


class NonFiniteLossError(Pmm3dError):
    """The loss is infinite or not a number; the text names the step and where it began. No weight was changed by it."""


class Trainer(Run):
    """Trains a network on the batches of a loader.

    network, optimizer, schedule   as in a loop of one's own; schedule may be None
    loader        gives (x, y) DistMatrices; `pmm3d.io.Loader`
    loss          "cross_entropy", "mse", "mae", or a function (output, y) -> Tensor
    epochs        passes over the loader's rows
    validation    a second loader, or None;   evaluate_every  in steps, 0: after each epoch
    checkpoints   a `pmm3d.io.Checkpoints`, or None;   checkpoint_every  in steps, 0: after each epoch
    accumulate    batches of the loader that make one step; their gradients are summed over data once
    clip          largest 2-norm of the gradient, or None
    log           a RunLog, or None;   log_every  in steps, besides the first step and the last of each epoch
    settings      what else a checkpoint is to remember; JSON-able
    signals       the `Signals` that note what came before the run
    step, figures steps done; the last validation's figures
    passes        what this run did so far

    SIGUSR1, on any rank, has a checkpoint written after the step, or the batch of an evaluation, under way; SIGTERM has
    one written and ends the run. The folder of the log (or that of the checkpoints) belongs to this job while it runs:
    another one that wants it gets a FolderInUseError. `run`, `resume` and `owning` are collective.

        >>> import h5py, tempfile; from mpi4py import MPI
        >>> from pmm3d import Grid, nn; from pmm3d.io import DataSet; from pmm3d.nn import optim
        >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
        ...     with h5py.File(folder + "/data.h5", "w") as file:
        ...         file["x"], file["y"] = np.ones((8, 3)), np.ones((8, 1))
        ...     net = nn.MLP(grid, [3, 1])
        ...     with DataSet(grid, folder + "/data.h5") as data:
        ...         Trainer(net, optim.SGD(net.parameters(), lr=0.1), data.loader(4), "mse", epochs=2).run()
        True
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loss = loss_named(self.loss)
        self._lock: RunLock | None = None
        self._record = RunRecord(self, self.log.folder) if self.log is not None else None
        self._logged = time.perf_counter(), 0.0
        self._rows = 0
        self._pace = Pace(self.grid)

    def run(self) -> bool:
        """Train to the end of the last epoch; False if SIGTERM ended it before. A checkpoint is written in both cases.
        Raises NonFiniteLossError and what the loader raises, on every rank."""
        with self.owning(), np.errstate(over="ignore", invalid="ignore"):
            self.passes, self._pace = Passes(), Pace(self.grid)
            if self._record is None or self.log is None:
                return self._epochs()
            log = self.log
            self._on_first(lambda: log.open(self.step, self.step + self.steps_left()))
            with closing(log), self._record.of_run():
                return self._epochs()

    @contextmanager
    def owning(self) -> Iterator[None]:
        """As a context: no other job may write into the folder, and signals are noted. `run` enters it by itself; what
        goes before that in the same folder, such as `resume`, may be put into it too.

        Raises FolderInUseError, on every rank, if another job has the folder; nothing was changed there.
        """
        folder, lock = self._folder, None
        if self._lock is None and folder is not None:
            lock = self._lock = RunLock(folder)
        try:
            if lock is not None:
                self._on_first(lock.acquire)
            with self.signals:
                yield
        finally:
            if lock is not None:
                lock.release()
                self._lock = None

    def _on_first(self, body: Callable[[], None]) -> None:
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
    def _folder(self) -> Path | None:
        owner = self.log if self.log is not None else self.checkpoints
        return owner.folder if owner is not None else None

    def _epochs(self) -> bool:
        if self._requested() >= END:
            return False
        while self.loader.epoch < self.epochs:
            for size, batches in self._groups():
                value, norm = self._step(size, batches)
                at_end = self.loader.state()["batch"] == len(self.loader)
                if at_end or self.step == 1 or self.step % self.log_every == 0:
                    self._log_step(value, norm)
                request = self._requested()
                if self.validation is not None and self._due(self.evaluate_every, at_end):
                    request = max(request, self._evaluate(self.validation))
                if self._due(self.checkpoint_every, at_end):
                    self.save()
                if request >= END:
                    return False
        self.save()
        return True

    def _due(self, every: int, at_end: bool) -> bool:
        return self.step % every == 0 if every else at_end

    def _groups(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """(number of batches, iterator over them) of each step of the rest of the epoch."""
        batches, left = iter(self.loader), len(self.loader) - self.loader.state()["batch"]
        while left > 0:
            size = min(self.accumulate, left)
            yield size, (next(batches) for _ in range(size))
            left -= size
        for _ in batches:
            raise Pmm3dError("the loader gave more batches than its length")

    def _step(self, size: int, batches: Iterator[Batch]) -> tuple[float, float | None]:
        """The loss, and the norm of the gradient if it is clipped."""
        taken = []

        def noted() -> Iterator[Batch]:
            for x, y in batches:
                taken.append(facts_of(x, y))
                yield x, y

        value, norm = train_step(self.network, self.optimizer, self._loss, size, noted(), self.clip, self._check)
        self._rows += sum(x.shape[0] for x, _ in taken)
        self.passes.note("step", *taken)
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1
        return value, norm

    def _log_step(self, value: float, norm: float | None) -> None:
        (begun, before), rows = self._logged, self._rows
        self._logged, self._rows = (time.perf_counter(), self.grid.ledger.total().waited), 0
        elapsed, waited = max(1e-9, self._logged[0] - begun), max(0.0, self._logged[1] - before)
        if self._lock is not None:
            self._lock.beat()
        if self.log is not None:
            self.log.step({"step": self.step, "epoch": self.loader.epoch, "loss": value, "lr": self.optimizer.lr,
                           "samples_per_second": rows / elapsed, "waiting": waited / elapsed}
                          | ({} if norm is None else {"gradient_norm": norm}))

    def _evaluate(self, validation: Iterable[Batch]) -> int:
        """Returns the most urgent request that came meanwhile."""
        requests = [0]

        def batches() -> Iterator[Batch]:
            for x, y in validation:
                yield x, y
                self.passes.note("batch", facts_of(x, y))
                if self._lock is not None:
                    self._lock.beat()
                requests.append(self._requested())

        self.figures = evaluate(self.network, batches(), self._loss)
        self.passes.note("evaluated")
        if self.log is not None:
            self.log.validation(self.step, self.loader.epoch, self.figures)
        return max(requests)

    def _requested(self) -> int:
        """The most urgent signal that any rank has had since the last time; a checkpoint for it is on the disk.
        Collective."""
        self.passes.note("asked")
        request, look = self.signals.agreed(self.grid, self._pace.due())
        if look:
            self._pace.look()
        if request:
            self.save()
        return request

    def save(self) -> None:
        """Write a checkpoint of everything, once a step."""
        if self.checkpoints is None or self._saved == self.step:
            return
        begun = time.perf_counter()
        path = self.checkpoints.save(self.step, self._matrices(), self._state())
        self._saved = self.step
        if self.log is not None:
            self.log.saved(self.step, path)
        if self._record is not None:
            self._record.saved(path, time.perf_counter() - begun)

    def resume(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Go on from a checkpoint, or from the newest good one; False if there is none. On any grid."""
        store = self.checkpoints
        if store is None:
            raise Pmm3dError("resume: the trainer has no checkpoints to resume from")
        if path is None and store.latest() is None:
            return False
        matrices = self._matrices()
        loaded = store.load_latest(matrices) if path is None else (path, store.load(path, matrices))
        if loaded is None:
            return False
        path, state = loaded
        with self.grid.together("resume", str(path)):
            self.network.loaded()
            self.network.set_random_state(state["random"])
            self.optimizer.load_state(state["optimizer"])
            if self.schedule is not None:
                self.schedule.load_state(state["schedule"])
            self.loader.load_state(state["loader"])
        self.step = self._saved = state["step"]
        if self._record is not None and self.log is not None:
            self.log.say(f"resumed {path}, step {self.step}")
            self._record.resumed_from = str(path)
        return True

    def refuse_to_overwrite(self) -> None:
        """Raise, on every rank, if there are checkpoints of an earlier run: a new run would remove them."""
        latest = self.checkpoints and self.checkpoints.latest()
        with self.grid.together("training", str(latest)):
            if latest:
                raise Pmm3dError(f"{latest} is there from an earlier run: go on with --resume auto, or choose another "
                                 "training.folder")

    def _matrices(self) -> dict[str, DistMatrix]:
        return {**self.network.matrices(), **self.optimizer.matrices()}

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "optimizer": self.optimizer.state(), "loader": self.loader.state(),
                "schedule": self.schedule.state() if self.schedule is not None else None,
                "random": self.network.random_state(), "grid": self.grid.shape._asdict(), "settings": self.settings}

    def _check(self, x: DistMatrix, what: str, value: float) -> None:
        """Raise NonFiniteLossError that names what in the network went wrong first, if the value says so."""
        if isfinite(value):
            return
        what = f"{what} {value}"
        where = first_non_finite(self.network, x)
        with self.grid.together("training"):
            kept = f", as in {self.checkpoints.latest()}" if self.checkpoints and self._saved is not None else ""
            raise NonFiniteLossError(f"step {self.step + 1}: {what}. {where} The weights are those of step {self.step}"
                                     f"{kept}. Try a smaller learning rate, a warm-up, or clipping")


def first_non_finite(network: Module, x: DistMatrix) -> str:
    """Which parameter, input or layer has infinite numbers or NaN first. Collective."""
    grid, names = network.grid, {module: name or "the network" for name, module in network.named_modules()}
    wrong: list[str] = []

    def finite(value: Tensor | DistMatrix) -> bool:
        local = value.library.to_numpy(value.local)
        count = np.array([np.count_nonzero(~np.isfinite(local))], np.int64)
        return int(grid.everyone.all_reduce(count, agreed=True).wait()[0]) == 0

    for name, parameter in network.named_parameters().items():
        if not finite(parameter):
            return f"The parameter {name} is not finite."
    if not finite(x):
        return "The input is not finite."

    def look(module: Module, output: Tensor) -> None:
        if not wrong and not finite(output):
            wrong.append(f"The output of layer {names.get(module, '?')} ({type(module).__name__}) is not finite.")

    with Tape.of(grid).set(inspect=look), network.evaluating():
        network(x)
    return wrong[0] if wrong else "All layers' outputs are finite: it is the loss or the gradient itself."


def evaluate(network: Module, loader: Iterable[Batch], loss: Loss) -> dict[str, float]:
    """Means over the batches of a loader: "loss", and "accuracy" for classes or "r2" for vectors. Collective.

    loader   batches (x, y): it must start a pass of its own and not shuffle

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     net, x = nn.MLP(grid, [3, 2]), DistMatrix.random(grid, (4, 3), dtype="float32")
        ...     evaluate(net, [(x, net(x).value)], nn.mse)
        {'loss': 0.0, 'r2': 1.0}
    """
    evaluation = Evaluation(network, loss)
    with network.evaluating(), unchanged(network.grid):
        for x, y in loader:
            evaluation.add(x, y)
    return evaluation.figures()
