"""State of a training in checkpoints, for the Trainer and for your own loops."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, Pmm3dError
from ...model import machine
from ...product import DistMatrix
from ...text import blas_in_words, names_in_words
from ..ema import EMA
from ..facts import FACTS, Difference, Facts, batch_differences, differences, facts_in, facts_of, refuse
from ..feedback import compresses, feedback_matrices, is_feedback, load_feedback
from ..from_checkpoint import fill
from ..loss_scale import LossScale
from ..module import Module
from ..optim import Optimizer, Schedule
from ..optimizer_state import is_average
from ..parameter import of_stages
from ..pipeline.network import Pipeline

if TYPE_CHECKING:
    from ...io import Checkpoints, Loader
    from .states import TrainStates

logger = logging.getLogger("pmm3d.nn")


@dataclass
class TrainState:
    """State of a training that checkpoints hold. All methods are collective.

    Parameters
    ----------
    network : Module
        The network.
    optimizer : Optimizer
        It changes parameters of the network.
    schedule : Schedule or None
        Schedule of the learning rate. Default: none.
    loader : Loader or None
        Batches of the training. Default: none.
    scale : LossScale or None
        Scale of the loss. Default: a new one for a network of float16, none for others.
    ema : EMA or None
        Averages of the weights. `Trainer` updates and evaluates them. Default: none.

    Raises
    ------
    Pmm3dError
        If the optimizer changes, or `ema` averages, parameters that the network does not contain.

    Notes
    -----
    A checkpoint can be loaded on any grid, and in another precision, because it holds master weights. It contains
    weights, the optimizer's state, averages, the number of steps, the position in the data, and the state of random
    numbers.
    Options such as learning rate, schedule and weight decay are not loaded.

    Examples
    --------
    >>> import tempfile
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.io import Checkpoints
    >>> from pmm3d.nn import optim
    >>> from pmm3d.nn.training import TrainState
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     net = nn.Linear(grid, 3, 2)
    ...     state = TrainState(net, optim.SGD(net.parameters(), lr=0.1))
    ...     checkpoints = Checkpoints(grid, grid.comm.bcast(folder))
    ...     found = state.resume(checkpoints), state.save(checkpoints, note="first").name
    ...     found, state.resume(checkpoints)["note"]
    ((None, 'step-00000000'), 'first')
    """

    network: Module
    optimizer: Optimizer
    schedule: Schedule | None = None
    loader: Loader | None = None
    scale: LossScale | None = None
    ema: EMA | None = None

    def __post_init__(self) -> None:
        held = set(self.network.parameters())
        if others := [each.name or "a parameter" for each in self.optimizer.parameters if each not in held]:
            raise Pmm3dError(
                "TrainState: the optimizer changes parameters that are not in the network, so checkpoints "
                f"would not contain them: {names_in_words(others)}. Give each network with its optimizer a "
                "TrainState, in TrainStates; or make all networks attributes of one Module, and pass that Module"
            )
        if self.ema is not None and not held.issuperset(self.ema._parameters):
            raise Pmm3dError(
                "TrainState: the averages (EMA) are those of another network, so checkpoints would not contain them. "
                "Give each TrainState an EMA of its own network: TrainState(network, optimizer, ema=EMA(network))"
            )
        uncut = self.network.dry if isinstance(self.network, Pipeline) else self.network  # all stages scale the loss
        if self.scale is None and any(each.precision.compute == "float16" for each in uncut.parameters()):
            self.scale = LossScale()

    @property
    def step(self) -> int:
        """Number of steps of the optimizer."""
        return self.optimizer.steps

    def matrices(self, stored: Collection[str] = ()) -> dict[str, DistMatrix]:
        """Weights, the optimizer's state and averages, by name. `stored` as in `Optimizer.matrices`."""
        named = self.network.named_parameters()
        averages = {} if self.ema is None else self.ema.matrices(named, stored or None)
        states = self.optimizer.matrices(named, stored)
        return {**self.network.matrices(), **states, **averages, **feedback_matrices(self.network, stored)}

    def facts(self) -> Facts:
        """Further facts for a checkpoint, for JSON.

        "step", "lr" (of the next step), "optimizer", "schedule", "loader", "scale", "random", "grid", "blas", and
        "facts" of network and data.
        """
        optimizer = self.optimizer.state(self.network.named_parameters())
        missed = dict(ChainMap(*of_stages(self.network, optimizer["missed"])))
        return {
            "step": self.step,
            "lr": self.optimizer.lr,
            "optimizer": {**optimizer, "missed": missed},
            "schedule": _state(self.schedule),
            "loader": _state(self.loader),
            "scale": _state(self.scale),
            "random": self.network.random_state(),
            "grid": self.network.parent_grid.shape._asdict(),
            "blas": self._blas(),
            FACTS: self._compared(),
        }

    def save(self, checkpoints: Checkpoints, **extra: Any) -> Path:
        """Write a checkpoint of this step, and return its folder.

        The `checkpoints` are on the grid of all ranks of the network. `extra` are further facts, for JSON.
        """
        self._check_grid(checkpoints)
        return checkpoints.save(self.step, self.matrices(), {**self.facts(), **extra})

    def _check_grid(self, checkpoints: Checkpoints) -> None:
        """Raises CheckpointError unless the checkpoints are on the ranks of all stages of the network."""
        parent, grid = self.network.parent_grid, checkpoints.grid
        with parent.collective_call("TrainState", always=True):
            if not grid.same_processes(parent):
                raise CheckpointError(
                    f"TrainState: the checkpoints are not on the {parent.size} ranks of the network; "
                    f"their grid has size {grid.size}. Make Checkpoints(network.parent_grid, folder), on "
                    "all ranks of the network"
                )

    def _check(self, facts: Any, accept: Collection[str] = (), settings: Facts | None = None) -> None:
        """Raises Pmm3dError, on every rank, if the facts of a checkpoint do not fit this training. accept, settings: as
        in `resume`."""
        with self.network.parent_grid.collective_call("resume", sorted(accept), always=True):
            known = facts if isinstance(facts, dict) else {}
            if lacking := [key for key in ("step", "optimizer", "random") if key not in known]:
                raise Pmm3dError(
                    f"the checkpoint does not contain the state of a training: {', '.join(lacking)} "
                    "missing. Save it with TrainState.save"
                )
            before, now = known["optimizer"].get("kind"), type(self.optimizer).__name__
            if before != now:
                raise Pmm3dError(
                    f"the checkpoint's optimizer is {before}, and the optimizer of this run is {now}, "
                    f"which cannot use the state of {before}; nothing was changed. Use {before}, or start "
                    "a new run from the weights alone (training.weights, nn.exchange.load_weights)"
                )
            states, wanted = known["optimizer"].get("states"), list(self.optimizer.state_names)
            if states not in (None, wanted):
                raise Pmm3dError(
                    f"the checkpoint's optimizer keeps {names_in_words(states) or 'nothing'} of each "
                    f"weight, the optimizer of this run keeps {names_in_words(wanted) or 'nothing'}; "
                    "nothing was changed. Restore the optimizer's options (momentum), or start a new run "
                    "from the weights alone (training.weights, nn.exchange.load_weights)"
                )
            refuse(self._changes(known, settings), accept, "the checkpoint", "start a new run in another folder; or ")
            if self.loader is None:
                return
            scaled = "scaling" in (known.get("loader") or {})
            if scaled != (self.loader.scaling is not None):
                raise Pmm3dError(
                    f"the checkpoint is of a run {'with' if scaled else 'without'} standardised samples, and nothing "
                    f"was changed: set data.standardize = {str(scaled).lower()}, or start a new run in another folder"
                )

    def _load(self, facts: Facts, stored: Collection[str], matrices: Mapping[str, DistMatrix]) -> None:
        """Load the facts of a checkpoint, after `check`. stored: names of its matrices; a parameter without a state
        begins as in its first step. matrices: those that were filled."""
        self.network.loaded()
        load_feedback(self.network, matrices)
        with self.network.parent_grid.collective_call("resume"):
            self.network.set_random_state(facts["random"])
            self.optimizer.load_state(facts["optimizer"], self.network.named_parameters(), stored)
            if self.ema is not None:
                self.ema.load_state(matrices, self.network.named_parameters())
            if self.schedule is not None:
                self.schedule.load_state(facts.get("schedule") or {**self.schedule.state(), "count": self.step})
            if self.loader is not None and facts.get("loader"):
                others: dict[str, Any] = {"other_data": True} if self._batches(facts) else {}
                self.loader.load_state(facts["loader"], **others)
            if self.scale is not None and facts.get("scale"):
                self.scale.load_state(facts["scale"])

    def resume(
        self,
        checkpoints: Checkpoints,
        path: str | os.PathLike[str] | None = None,
        *,
        accept: Collection[str] = (),
        settings: Facts | None = None,
    ) -> Facts | None:
        """Continue from a checkpoint.

        Parameters
        ----------
        checkpoints : Checkpoints
            On the grid of all ranks of the network.
        path : path or None
            A checkpoint. Default: the newest undamaged one.
        accept : collection of str
            "network", "data", "columns", "targets", "classes" or "tokenizer", if it may differ from that of the
            checkpoint. With other data the epoch begins anew.
        settings : dict or None
            Settings of this run, which are compared with the settings that `save` was given.

        Returns
        -------
        dict or None
            Facts of the checkpoint, with "path" and "retired". None if there is no checkpoint.

        Raises
        ------
        CheckpointError, Pmm3dError
            On every rank and before anything is changed, if the checkpoint does not fit.

        Notes
        -----
        Rank 0 logs the differences that are accepted. Checkpoints of later steps are retired.
        """
        check = partial(self._check, accept=accept, settings=settings)
        return resumed(self, checkpoints, path, check, partial(self._differences, settings=settings))

    def _differences(self, facts: Facts, stored: Collection[str], settings: Facts | None = None) -> list[str]:
        """Return the differences from a checkpoint that are accepted, in words. stored: names of its matrices."""
        changes = [*map(str, self._changes(facts, settings)), *self._rate(facts)]
        return [*changes, *self._averages(stored), *self._feedback(stored), *self._rounding(facts)]

    def _compared(self) -> Facts:
        """Return the facts of the network and of its data."""
        return {**facts_of(self.network), **(self.loader.data.facts if self.loader is not None else {})}

    def _changes(self, known: Facts, settings: Facts | None) -> list[Difference]:
        """Return the differences from the meta of a checkpoint, each once: facts repeat some settings."""
        changes = [
            *differences(known.get("settings") or {}, settings or {}),
            *differences(facts_in(known), self._compared()),
            *self._batches(known),
        ]
        by_key = {each.key: each for each in changes}
        if "training.class_weights" in by_key:
            by_key.pop("samples.class_weights", None)
        return [*by_key.values()]

    def _batches(self, facts: Facts) -> list[Difference]:
        before, now = facts.get("loader"), _state(self.loader)
        return batch_differences(before, now) if before and now else []

    def _rate(self, facts: Facts) -> list[str]:
        """Return sentences about changes of the schedule and of the learning rate."""
        before, now = facts.get("lr"), self.optimizer.lr
        changes = []
        if "schedule" in facts and bool(facts["schedule"]) != bool(self.schedule):
            changes.append(
                f"the checkpoint has no schedule; the schedule of this run continues from its step {self.step}"
                if self.schedule
                else "the checkpoint has a schedule, and this run has none"
            )
        if before is not None and not isclose(before, now, rel_tol=1e-9):
            changes.append(f"the learning rate of step {self.step + 1} is {now:.6g} instead of {before:.6g}")
        return changes

    def _averages(self, stored: Collection[str]) -> list[str]:
        """Return a sentence if averages of the weights begin, or end."""
        if any(map(is_average, stored)) == (self.ema is not None) or not self.step:
            return []
        if self.ema is None:
            return ["the checkpoint has averages of the weights (EMA), and this run has none"]
        return [f"the checkpoint has no averages of the weights (EMA); they begin after step {self.step + 1}"]

    def _feedback(self, stored: Collection[str]) -> list[str]:
        """Return a sentence if error feedback of compressed gradients begins, or is dropped."""
        before, now = any(map(is_feedback, stored)), compresses(self.network)
        if before == now or not self.step:
            return []
        if before:
            return ["the checkpoint has error feedback of gradients, which is dropped: this run compresses none"]
        return ["the checkpoint has no error feedback of gradients, which begins with zeros"]

    def _blas(self) -> Facts:
        return dict(vars(machine.blas_of(self.network.parameters()[0].library)))

    def _rounding(self, facts: Facts) -> list[str]:
        """Return a sentence about a change of the BLAS, its release or its kernel, which changes the last bits."""
        before, after = (
            blas_in_words(f"{blas['name']} {blas['version']}".strip(), blas["kernel"], 0)
            for blas in (self._blas() | facts.get("blas", {}), self._blas())
        )
        return [f"the BLAS was {before}, is {after}, which rounds differently"] if before != after else []


def resumed(
    state: TrainState | TrainStates,
    checkpoints: Checkpoints,
    path: str | os.PathLike[str] | None,
    check: Callable[[Any], None],
    differences: Callable[[Facts, Collection[str]], list[str]],
) -> Facts | None:
    """Continue from a checkpoint as `resume`. check(facts) may raise. differences(facts, names of the matrices): those
    that are accepted."""
    state._check_grid(checkpoints)
    checkpoint = checkpoints.newest_undamaged() if path is None else checkpoints.undamaged(path)
    if checkpoint is None:
        return None
    folder, stored = checkpoint.path, checkpoint.contents
    matrices = state.matrices(stored)
    facts = fill(checkpoints, checkpoint, matrices, check=check, partial=_may_be_left)
    state._load(facts, stored, matrices)
    retired = checkpoints.retire(state.step, spared=folder)
    tell_resumed(checkpoints, state.step, differences(facts, stored), retired)
    return {**facts, "path": str(folder), "retired": list(map(str, retired))}


def _may_be_left(name: str) -> bool:
    """Whether a training may leave out a matrix of a checkpoint."""
    return is_average(name) or is_feedback(name)


def tell_resumed(checkpoints: Checkpoints, step: int, changes: Iterable[str], retired: Sequence[Path]) -> None:
    """Log on rank 0 what differs from the checkpoint from which a run is resumed."""
    if checkpoints.grid.rank:
        return
    for change in changes:
        logger.warning(f"resumed with a change: {change}. The new configuration applies")
    if retired:
        logger.warning(
            f"the run continues from step {step}, so later checkpoints are retired: "
            f"{', '.join(path.name for path in retired)}"
        )


def _state(part: Schedule | Loader | LossScale | None) -> Facts | None:
    return None if part is None else part.state()
