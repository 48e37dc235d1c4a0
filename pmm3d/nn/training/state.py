"""What a training has learned and how far it is, as checkpoints hold it: for the Trainer and for loops of one's own."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, Pmm3dError
from ...model import machine
from ...product import DistMatrix
from ...text import blas_in_words, names_in_words
from ..exchange import fill
from ..loss_scale import LossScale
from ..module import Module
from ..optim import Optimizer, Schedule
from ..parameter import of_stages
from ..pipeline.network import Pipeline
from .compare import Difference, batch_differences, differences, refuse

if TYPE_CHECKING:
    from ...io import Checkpoints, Loader

logger = logging.getLogger("pmm3d.nn")
Facts = dict[str, Any]


@dataclass
class TrainState:
    """The weights, what the optimizer keeps, where schedule and loader are. Its methods are collective.

    schedule, loader   None where there is none
    scale              of the loss; left out, a new LossScale for a network of float16, for others None

    A checkpoint fits on any grid, and another precision, because it holds the master weights of low precision. What a
    run has learned comes from it: weights, the optimizer's state, steps done, the position in the data, random numbers.
    What is configured, learning rate, schedule, weight decay, stays as it was made here.

        >>> import tempfile
        >>> from pmm3d import Grid, nn
        >>> from pmm3d.io import Checkpoints; from pmm3d.nn import optim
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

    def __post_init__(self) -> None:
        held = set(self.network.parameters())
        if others := [each.name or "a parameter" for each in self.optimizer.parameters if each not in held]:
            raise Pmm3dError(f"TrainState: the optimizer changes parameters that the network does not hold, so no "
                             f"checkpoint would have their values: {names_in_words(others)}. Make all networks "
                             "attributes of one Module, and give that")
        whole = self.network.dry if isinstance(self.network, Pipeline) else self.network  # stages scale alike
        if self.scale is None and any(each.precision.compute == "float16" for each in whole.parameters()):
            self.scale = LossScale()

    @property
    def step(self) -> int:
        """Steps of the optimizer done."""
        return self.optimizer.steps

    def matrices(self) -> dict[str, DistMatrix]:
        """Name -> matrix of all that a checkpoint holds: weights, and the optimizer's "optimizer/..."."""
        return self._matrices()

    def _matrices(self, stored: Collection[str] = ()) -> dict[str, DistMatrix]:
        return {**self.network.matrices(), **self.optimizer.matrices(self.network.named_parameters(), stored)}

    def facts(self) -> Facts:
        """What it holds besides; JSON-able: "step", "lr" (of the next step), "optimizer", "schedule", "loader",
        "scale", "random", "grid", "blas". Gradients that the optimizer missed are those of parameters of all stages."""
        optimizer = self.optimizer.state(self.network.named_parameters())
        missed = dict(ChainMap(*of_stages(self.network, optimizer["missed"])))
        return {"step": self.step, "lr": self.optimizer.lr, "optimizer": {**optimizer, "missed": missed},
                "schedule": _state(self.schedule), "loader": _state(self.loader), "scale": _state(self.scale),
                "random": self.network.random_state(), "grid": self.network.whole.shape._asdict(),
                "blas": self._blas()}

    def save(self, checkpoints: Checkpoints, **extra: Any) -> Path:
        """Write a checkpoint of this step, with what else it is to remember; as `Checkpoints.save`, return its folder.
        """
        self._check_grid(checkpoints)
        return checkpoints.save(self.step, self.matrices(), {**self.facts(), **extra})

    def _check_grid(self, checkpoints: Checkpoints) -> None:
        """Raises CheckpointError unless the checkpoints are on the ranks of the network, with all of its stages."""
        whole, grid = self.network.whole, checkpoints.grid
        with whole.collective_call("TrainState", always=True):
            if not grid.same_processes(whole):
                raise CheckpointError(f"TrainState: the network is on {whole.size} ranks, the checkpoints are on "
                                      f"{grid.size}, or on others. Make Checkpoints(network.whole, folder), on all "
                                      "ranks that hold a part of the network")

    def check(self, facts: Any, accept: Collection[str] = (), settings: Facts | None = None) -> None:
        """Raises Pmm3dError, on every rank, if these are not the facts of such a training; nothing is changed.

        accept     "network", "data": what may be another one all the same; with other data the epoch begins anew
        settings   of this run, as `save` was given them: compared with the checkpoint's, see `compare.differences`
        """
        with self.network.whole.collective_call("resume", sorted(accept), always=True):
            known = facts if isinstance(facts, dict) else {}
            if lacking := [key for key in ("step", "optimizer", "random") if key not in known]:
                raise Pmm3dError(f"the checkpoint is not of a training: it lacks {', '.join(lacking)}. Save it with "
                                 "TrainState.save")
            before, now = known["optimizer"].get("kind"), type(self.optimizer).__name__
            if before != now:
                raise Pmm3dError(f"the checkpoint's optimizer is {before}, this one {now}, which cannot go on from its "
                                 "state; nothing was changed. Take the kind that it was, or begin a new run from its "
                                 "weights alone (training.weights, nn.exchange.load_weights)")
            kept, wanted = known["optimizer"].get("states"), list(self.optimizer.state_names)
            if kept not in (None, wanted):
                raise Pmm3dError(f"the checkpoint's optimizer keeps {names_in_words(kept) or 'nothing'} of each "
                                 f"weight, this one {names_in_words(wanted) or 'nothing'}; nothing was changed. Set "
                                 "the optimizer's options (momentum) back, or begin a new run from its weights alone "
                                 "(training.weights, nn.exchange.load_weights)")
            refuse([*differences(known.get("settings") or {}, settings or {}), *self._batches(known)], accept)

    def load(self, facts: Facts, stored: Collection[str] | None = None) -> None:
        """Take the facts, after `check` accepted them and the matrices were filled from the checkpoint. stored: names
        of the checkpoint's matrices; a parameter without a state there begins as in its first step."""
        self.network.loaded()
        with self.network.whole.collective_call("resume"):
            self.network.set_random_state(facts["random"])
            self.optimizer.load_state(facts["optimizer"], self.network.named_parameters(), stored)
            if self.schedule is not None:
                self.schedule.load_state(facts.get("schedule") or {**self.schedule.state(), "count": self.step})
            if self.loader is not None and facts.get("loader"):
                others: dict[str, Any] = {"other_data": True} if self._batches(facts) else {}
                self.loader.load_state(facts["loader"], **others)
            if self.scale is not None and facts.get("scale"):
                self.scale.load_state(facts["scale"])

    def resume(self, checkpoints: Checkpoints, path: str | os.PathLike[str] | None = None, *,
               accept: Collection[str] = (), settings: Facts | None = None) -> Facts | None:
        """Go on from a checkpoint, or from the newest good one; its facts, or None if there is none.

        accept, settings   as in `check`

        Everything is compared before anything is changed. What differs and may is said in a line each. Checkpoints of
        later steps are retired: the branch that they belong to ends here. The facts also have "path" and "retired".
        """
        self._check_grid(checkpoints)
        check = partial(self.check, accept=accept, settings=settings)
        found = checkpoints.newest_undamaged() if path is None else checkpoints.undamaged(path)
        if found is None:
            return None
        folder, facts = found.path, fill(checkpoints, found, self._matrices(found.contents), check=check)
        self.load(facts, found.contents)
        retired = checkpoints.retire(self.step, spared=folder)
        changes = [*differences(facts.get("settings") or {}, settings or {}), *self._batches(facts)]
        self._tell([*map(str, changes), *self._rate(facts), *self._rounding(facts)], retired)
        return {**facts, "path": str(folder), "retired": list(map(str, retired))}

    def _batches(self, facts: Facts) -> list[Difference]:
        before, now = facts.get("loader"), _state(self.loader)
        return batch_differences(before, now) if before and now else []

    def _rate(self, facts: Facts) -> list[str]:
        """What has become of the schedule and of the learning rate, where it is not what it would have been."""
        before, now = facts.get("lr", facts["optimizer"].get("lr")), self.optimizer.lr
        said = []
        if "schedule" in facts and bool(facts["schedule"]) != bool(self.schedule):
            said.append("there was no schedule, and is one, which goes on as if it had been there" if self.schedule
                        else "there was a schedule, and is none")
        if before is not None and not isclose(before, now, rel_tol=1e-9):
            said.append(f"the learning rate of step {self.step + 1} is {now:.6g}; it would have been {before:.6g}")
        return said

    def _blas(self) -> Facts:
        return dict(vars(machine.blas_of(self.network.parameters()[0].library)))

    def _rounding(self, facts: Facts) -> list[str]:
        """Another BLAS, release or kernel: the run goes on, but does not repeat its bits."""
        before, after = (blas_in_words(f"{blas['name']} {blas['version']}".strip(), blas["kernel"], 0)
                         for blas in (self._blas() | facts.get("blas", {}), self._blas()))
        return [f"the BLAS was {before} and is {after}, which rounds otherwise"] if before != after else []

    def _tell(self, changes: list[str], retired: list[Path]) -> None:
        if self.network.whole.rank:
            return
        for change in changes:
            logger.warning(f"resumed with a change: {change}. What is configured now counts")
        if retired:
            logger.warning(f"later checkpoints are retired, as the run goes on from step {self.step}: "
                           f"{', '.join(path.name for path in retired)}")


def _state(part: Schedule | Loader | LossScale | None) -> Facts | None:
    return None if part is None else part.state()
