"""State of a training of several networks, each with its optimizer, in one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import Pmm3dError
from ...product import DistMatrix
from ...text import names_in_words
from ..facts import STATES, Facts
from .state import TrainState, resumed

if TYPE_CHECKING:
    from ...io import Checkpoints


class TrainStates:
    """States of several networks and optimizers by name, such as those of a GAN. All methods are collective.

    Parameters
    ----------
    **states : TrainState
        Each with a network, its optimizer, and a schedule, loader or scale of its own.

    Attributes
    ----------
    states : dict
        Name -> TrainState.
    step : int
        Number of steps of all optimizers together.

    Raises
    ------
    Pmm3dError
        Without a state, for other objects, and for names that are no identifiers.

    Notes
    -----
    A checkpoint contains the matrices of each state with the name of the state before the names of its parameters, as
    "generator.0.weight". It can be loaded on any grid, as those of `TrainState`.

    Examples
    --------
    >>> import tempfile
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.io import Checkpoints
    >>> from pmm3d.nn import optim
    >>> from pmm3d.nn.training import TrainState, TrainStates
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     nets = [nn.Linear(grid, 3, 2), nn.Linear(grid, 2, 1, bias=False)]
    ...     one, other = (TrainState(net, optim.SGD(net.parameters(), lr=0.1)) for net in nets)
    ...     states, checkpoints = TrainStates(generator=one, critic=other), Checkpoints(grid, grid.comm.bcast(folder))
    ...     list(states.matrices()), states.save(checkpoints).name, states.resume(checkpoints)["step"]
    (['generator.weight', 'generator.bias', 'critic.weight'], 'step-00000000', 0)
    """

    def __init__(self, **states: TrainState):
        if not states or not all(isinstance(each, TrainState) for each in states.values()):
            raise Pmm3dError("TrainStates takes a TrainState for each name, as TrainStates(generator=TrainState(...))")
        if others := [name for name in states if not name.isidentifier()]:
            raise Pmm3dError(f"TrainStates: names of states are identifiers, such as generator; got {others[0]!r}")
        self.states = states

    @property
    def step(self) -> int:
        """Number of steps of all optimizers together."""
        return sum(each.step for each in self.states.values())

    def matrices(self, stored: Collection[str] = ()) -> dict[str, DistMatrix]:
        """Weights, the optimizers' states and averages, by name. `stored` as in `Optimizer.matrices`."""
        return {
            _above(name, path): matrix
            for name, each in self.states.items()
            for path, matrix in each.matrices(_below(name, stored)).items()
        }

    def facts(self) -> Facts:
        """Further facts for a checkpoint, for JSON: "step", and "states", the facts of each state by name."""
        return {"step": self.step, STATES: {name: each.facts() for name, each in self.states.items()}}

    def save(self, checkpoints: Checkpoints, **extra: Any) -> Path:
        """Write a checkpoint of this step, and return its folder. `extra` as in `TrainState.save`."""
        self._check_grid(checkpoints)
        return checkpoints.save(self.step, self.matrices(), {**self.facts(), **extra})

    def resume(
        self, checkpoints: Checkpoints, path: str | os.PathLike[str] | None = None, *, accept: Collection[str] = ()
    ) -> Facts | None:
        """Continue from a checkpoint, as `TrainState.resume`.

        Parameters
        ----------
        checkpoints : Checkpoints
            On the grid of all ranks of the networks.
        path, accept
            As in `TrainState.resume`.

        Returns
        -------
        dict or None
            As in `TrainState.resume`.

        Raises
        ------
        CheckpointError, Pmm3dError
            On every rank and before anything is changed, if the checkpoint does not fit one of the states.
        """
        return resumed(self, checkpoints, path, partial(self._check, accept=accept), self._differences)

    def _load(self, facts: Facts, stored: Collection[str], matrices: Mapping[str, DistMatrix]) -> None:
        for name, each in self.states.items():
            own = {path: matrices[_above(name, path)] for path in _below(name, matrices)}
            each._load(facts[STATES][name], _below(name, stored), own)

    def _differences(self, facts: Facts, stored: Collection[str]) -> list[str]:
        return [
            f"{name}: {change}"
            for name, each in self.states.items()
            for change in each._differences(facts[STATES][name], _below(name, stored))
        ]

    def _check_grid(self, checkpoints: Checkpoints) -> None:
        for each in self.states.values():
            each._check_grid(checkpoints)

    def _check(self, facts: Any, accept: Collection[str]) -> None:
        """Raises Pmm3dError, on every rank, if the facts of a checkpoint do not fit the states."""
        known = facts.get(STATES, {}) if isinstance(facts, dict) else {}
        if known.keys() != self.states.keys():
            raise Pmm3dError(
                f"the checkpoint contains the states {names_in_words(known) or 'of no training'}, and this training "
                f"has {names_in_words(self.states)}; nothing was changed. Give the states the names that they had, "
                "and save with TrainStates.save"
            )
        for name, each in self.states.items():
            try:
                each._check(known[name], accept)
            except Pmm3dError as error:
                error.args = (f"{name}: {error}",)
                raise


def _above(name: str, path: str) -> str:
    """Put the name of a state before the path of a parameter, in the name of a matrix.

    >>> _above("critic", "0.weight"), _above("critic", "optimizer/0.weight/mean")
    ('critic.0.weight', 'optimizer/critic.0.weight/mean')
    """
    *kind, rest = path.split("/", 1)
    return "/".join([*kind, f"{name}.{rest}"])


def _below(name: str, stored: Collection[str]) -> list[str]:
    """Return the names of the matrices of a state, without its name.

    >>> _below("critic", ["critic.0.weight", "optimizer/critic.0.weight/mean", "generator.0.weight"])
    ['0.weight', 'optimizer/0.weight/mean']
    """
    parts = [each.split("/", 1) for each in stored]
    return ["/".join([*kind, rest.removeprefix(f"{name}.")]) for *kind, rest in parts if rest.startswith(f"{name}.")]
