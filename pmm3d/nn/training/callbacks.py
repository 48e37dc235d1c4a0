"""Callbacks: code of the user at the events of a training run. All ranks call it, and agree on what it requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...comm import Grid
from ...errors import Pmm3dError
from ...io.checkpoint import plain
from ..compute import override
from ..parallel import BackwardSync
from .user_file import UserFile

if TYPE_CHECKING:
    from .loop import Trainer

STATE = "callbacks"
"""Key of the states of callbacks in the facts of a checkpoint."""
STOP, SAVE = "stop", "save"


class Callback:
    """Base class of callbacks of a `Trainer`. A subclass defines the methods that it needs.

    Notes
    -----
    All ranks call each method, in the order of the callbacks, so a method may call collective functions. Write files on
    rank 0 only (`trainer.grid.rank`). If a method raises an error on some ranks, all ranks raise it. If other ranks are
    in a collective call of the method at that time, the job ends: with the error if the call compares its arguments, as
    `gather` does. `Trainer.stop` ends the run, and `Trainer.request_checkpoint` requests a checkpoint. A call on one
    rank is enough.

    Each event costs two all-reduces, of three and of two numbers. Events for which no callback has a method cost
    nothing.

    A schedule sets the learning rate after each step, so `before_step` may change it for one step. `bases` of the
    schedule contains the rates that it scales. Without a schedule a change stays.

    Examples
    --------
    >>> import h5py, numpy, tempfile
    >>> from mpi4py import MPI
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.io import DataSet
    >>> from pmm3d.nn import optim
    >>> from pmm3d.nn.training import Callback, Recipe, Trainer, TrainState
    >>> class Target(Callback):
    ...     def after_step(self, trainer, loss, norm):
    ...         if loss < 0.1:
    ...             trainer.stop()
    >>> with tempfile.TemporaryDirectory() as folder, Grid(MPI.COMM_SELF) as grid:
    ...     with h5py.File(folder + "/data.h5", "w") as file:
    ...         file["x"], file["y"] = numpy.ones((8, 3)), numpy.ones((8, 1))
    ...     net = nn.MLP(grid, [3, 1])
    ...     with DataSet(grid, folder + "/data.h5") as data:
    ...         state = TrainState(net, optim.SGD(net.parameters(), lr=0.05), loader=data.loader(4))
    ...         trainer = Trainer(state, Recipe("mse", epochs=99), callbacks=[Target()])
    ...         trainer.run(), trainer.step < 99
    (True, True)
    """

    _file: UserFile | None = None

    def before_run(self, trainer: Trainer) -> None:
        """Called before the first step of a run, after `Trainer.resume`."""

    def before_step(self, trainer: Trainer) -> None:
        """Called before each step. After `Trainer.stop` the step is not made."""

    def after_step(self, trainer: Trainer, loss: float, norm: float) -> None:
        """Called after each step, also after a skipped one (float16).

        Parameters
        ----------
        loss, norm : float
            Mean loss of the step, and 2-norm of the gradient before it was clipped. They are equal on all ranks.
        """

    def after_validation(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """Called after each validation.

        Parameters
        ----------
        figures : dict
            "loss", "accuracy" or "r2", and the metrics, as `evaluate` returns them; for text "perplexity". A copy.
        """

    def after_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called when a checkpoint is on the disk, also one of the least validation loss; not during a validation.

        Parameters
        ----------
        path : Path
            Folder of the checkpoint.
        """

    def after_run(self, trainer: Trainer) -> None:
        """Called after the last checkpoint of a run, also if a signal ended the run; not after an error."""

    def state(self) -> Any:
        """State for a checkpoint, for JSON, the same on all ranks. Default: none."""

    def load_state(self, state: Any) -> None:
        """Set the state from a checkpoint, before `before_run`.

        Parameters
        ----------
        state : object
            Result of `state`. Tuples are lists, and keys are strings.
        """


METHODS = [name for name in vars(Callback) if not name.startswith("_")]


class Callbacks:
    """The callbacks of a Trainer.

    stops, saves   whether a callback on any rank requested the end of the run, or a checkpoint; equal on all ranks
    """

    def __init__(self, trainer: Trainer, given: Sequence[Callback]):
        if others := [type(each).__name__ for each in given if not isinstance(each, Callback)]:
            raise Pmm3dError(f"Trainer: callbacks are objects of pmm3d.nn.training.Callback; got {', '.join(others)}")
        self._trainer, self._asked = trainer, set[str]()
        self.stops = self.saves = self._is_open = False
        self._defined = {
            name: [each for each in given if getattr(getattr(each, name), "__func__", None) is not vars(Callback)[name]]
            for name in METHODS
        }

    def begin(self) -> None:
        """Begin a run. Collective. Raises DisagreementError, on every rank, if ranks have other callbacks."""
        self.stops = self.saves = False
        named = [f"{type(each).__name__}.{name}" for name, defined in self._defined.items() for each in defined]
        with self._trainer.grid.collective_call("Trainer: callbacks", *named, always=True):
            pass
        self.call("before_run")

    def ask(self, what: str) -> None:
        """Note a request of this rank."""
        if not self._is_open:
            raise Pmm3dError("stop and request_checkpoint are for the methods of a callback that get the trainer")
        self._asked.add(what)

    def call(self, name: str, *values: Any) -> None:
        """Call a method of the callbacks that define it, and agree on their requests. Collective. Raises the error of a
        callback on every rank."""
        if not (defined := self._defined[name]):
            return
        trainer = self._trainer
        parallel = BackwardSync.of(trainer.state.network.grid)
        with trainer.grid.ledger.part("callbacks"), override(self, _is_open=True, _asked=set()):
            with trainer.grid.collective_call(f"callbacks: {name}", always=True):
                for each in defined:
                    with _running(each):
                        getattr(each, name)(trainer, *values)
            stops, saves = parallel.summed(trainer.grid.everyone, [STOP in self._asked, SAVE in self._asked])
        self.stops, self.saves = self.stops or stops > 0, self.saves or saves > 0

    def facts(self) -> dict[str, Any]:
        """States of the callbacks by the names of their classes, for a checkpoint. Collective."""
        if not (defined := self._defined["state"]):
            return {}
        states = dict[str, list[Any]]()
        with self._trainer.grid.collective_call("callbacks: state", states, always=True):
            for each in defined:
                with _running(each):
                    state, name = each.state(), type(each).__name__
                    try:
                        json.dumps(state, default=plain)
                    except (TypeError, ValueError) as error:
                        raise Pmm3dError(f"{name}.state returned values that JSON has not: {error}") from None
                    states.setdefault(name, []).append(state)
        return {STATE: states}

    def load(self, facts: dict[str, Any]) -> list[str]:
        """Load the states in a checkpoint. Callbacks without a state in it begin anew. Return sentences about states
        whose callbacks are missing. Collective."""
        known = {name: iter(states) for name, states in facts.get(STATE, {}).items()}
        with self._trainer.grid.collective_call("callbacks: load_state", always=True):
            for each in self._defined["state"]:
                for state in known.get(type(each).__name__, ()):
                    with _running(each):
                        each.load_state(state)
                    break
        left = [name for name, states in known.items() if any(True for _ in states)]
        return [f"the checkpoint has a state of the callback {name}, which this run has not" for name in left]


def _running(callback: Callback) -> AbstractContextManager[None]:
    """Context that runs a method. An error in a file of the user becomes a Pmm3dError with the line."""
    return nullcontext() if callback._file is None else callback._file.running("raised an error")


def callbacks_of(grid: Grid, names: Sequence[str]) -> list[Callback]:
    """Return the callbacks that `training.callbacks` names. Collective. Raises Pmm3dError, on every rank, as
    `UserFile`, and for an object that is no Callback."""
    made = list[Callback]()
    for name in names:
        file = UserFile(grid, "training.callbacks", name)
        make = file.named("class or function", callable)
        with grid.collective_call("training.callbacks", name, always=True), file.running("raised an error"):
            callback = make()
            if not isinstance(callback, Callback):
                raise Pmm3dError(
                    f"training.callbacks = {name} returned {type(callback).__name__}; it must be a class of "
                    "pmm3d.nn.training.Callback, or a function that returns such an object"
                )
        callback._file = file
        made.append(callback)
    return made
