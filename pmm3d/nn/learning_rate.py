"""Schedules of an optimizer's learning rate."""

from __future__ import annotations

from math import cos, pi
from typing import Any

from ..errors import Pmm3dError
from ..layout import natural
from .optimizer import Optimizer


class Schedule:
    """Constant learning rate after a warm-up; base class of schedules. Call `step` after each step of the optimizer.

    Parameters
    ----------
    optimizer : Optimizer
        The schedule scales the rate of each of its groups.
    warm_up : int
        Steps in which the rate rises linearly from 1/warm_up of the rate to the rate. Default: 0.

    Raises
    ------
    Pmm3dError
        For values out of range.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     optim.Schedule(optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), warm_up=4).optimizer.lr
    0.25
    """

    def __init__(self, optimizer: Optimizer, warm_up: int = 0):
        natural(warm_up, f"{type(self).__name__}: warm_up is a number of steps, at least 0", 0, Pmm3dError)
        self.optimizer, self.warm_up, self.count = optimizer, warm_up, 0
        self.bases = [group["lr"] for group in optimizer.groups]
        self._set()

    def factor(self, steps: int) -> float:
        """Factor of the optimizer's rate.

        Parameters
        ----------
        steps : int
            Steps since the end of the warm-up.

        Returns
        -------
        float
        """
        return 1.0

    def step(self) -> None:
        """Set the rate of the next step."""
        self.count += 1
        self._set()

    def end_at(self, steps: int) -> None:
        """Change the length of a schedule that has an end.

        Parameters
        ----------
        steps : int
            Steps from the start to the end, including the warm-up.
        """

    def _set(self) -> None:
        self.bases += [group["lr"] for group in self.optimizer.groups[len(self.bases) :]]  # groups that were added
        for group, base in zip(self.optimizer.groups, self.bases):
            if self.count < self.warm_up:
                group["lr"] = base * (self.count + 1) / self.warm_up
            else:
                group["lr"] = base * self.factor(self.count - self.warm_up)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, for JSON."""
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the number of steps. The rates that the optimizer was given do not change."""
        self.count = state["count"]
        self._set()


class Cosine(Schedule):
    """Half a cosine from the whole rate to a share of it.

    Parameters
    ----------
    optimizer
        As in `Schedule`.
    steps : int
        Steps from the start to the end, including the warm-up.
    warm_up
        As in `Schedule`.
    floor : float
        Share of the rate at the end. Default: 0.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     round(optim.Cosine(optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), steps=10).factor(5), 12)
    0.5
    """

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0):
        natural(steps, "Cosine: steps is a number of steps, at least 1", 1, Pmm3dError)
        self.steps, self.floor = steps, floor
        super().__init__(optimizer, warm_up)

    def end_at(self, steps: int) -> None:
        self.steps = steps
        self._set()

    def factor(self, steps: int) -> float:
        done = min(1.0, steps / max(1, self.steps - self.warm_up))
        return self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * done))


class Step(Schedule):
    """Rate that is multiplied by a factor at regular intervals.

    Parameters
    ----------
    optimizer
        As in `Schedule`.
    every : int
        Number of steps between changes.
    factor : float
        Factor of each change. Default: 0.1.
    warm_up
        As in `Schedule`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     optim.Step(optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), every=10, factor=0.5).factor(25)
    0.25
    """

    def __init__(self, optimizer: Optimizer, every: int, factor: float = 0.1, warm_up: int = 0):
        natural(every, "Step: every is a number of steps, at least 1", 1, Pmm3dError)
        self.every, self.ratio = every, factor
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        return self.ratio ** (steps // self.every)
