"""Schedules of an optimizer's learning rate."""

from __future__ import annotations

from math import cos, pi, sqrt
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


class ToFloor(Schedule):
    """Base class of schedules that end at a share of the rate."""

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0):
        natural(steps, f"{type(self).__name__}: steps is a number of steps, at least 1", 1, Pmm3dError)
        if not 0 <= floor <= 1:
            raise Pmm3dError(f"{type(self).__name__}: floor is a share of the rate, from 0 to 1; got {floor!r}")
        self.steps, self.floor = steps, floor
        super().__init__(optimizer, warm_up)

    def end_at(self, steps: int) -> None:
        self.steps = steps
        self._set()

    def factor(self, steps: int) -> float:
        return self.floor + (1 - self.floor) * self._shape(steps)

    def _shape(self, steps: int) -> float:
        """Factor without a floor, from 1 to 0: a straight line."""
        return 1 - self._done(steps)

    def _done(self, steps: int, start: int = 0) -> float:
        """Share of the steps between `start` and the end that are done, if counted from the end of the warm-up."""
        return min(1.0, max(0, steps - start) / max(1, self.steps - self.warm_up - start))


class Cosine(ToFloor):
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

    def _shape(self, steps: int) -> float:
        return 0.5 * (1 + cos(pi * self._done(steps)))


class LinearDecay(ToFloor):
    """Straight line from the whole rate to a share of it.

    Parameters
    ----------
    optimizer, steps, warm_up, floor
        As in `Cosine`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     optim.LinearDecay(optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0), steps=10, floor=0.5).factor(5)
    0.75
    """


class WarmUpStableDecay(ToFloor):
    """Constant rate that falls at the end only: warm-up, stable, decay (S. Hu and others, arXiv 2404.06395).

    Parameters
    ----------
    optimizer, steps, warm_up, floor
        As in `Cosine`.
    decay : float
        Share of `steps` in which the rate falls. Default: 0.2.

    Raises
    ------
    Pmm3dError
        For values out of range.

    Notes
    -----
    With p from 0 to 1 during the decay, the factor is 1 - sqrt(p), the best of the shapes that A. Hägele and others
    (arXiv 2405.18392) compare. A checkpoint from before the decay can continue with a later end.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     opt = optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0)
    ...     [optim.WarmUpStableDecay(opt, steps=20).factor(steps) for steps in (16, 17, 20)]
    [1.0, 0.5, 0.0]
    """

    def __init__(self, optimizer: Optimizer, steps: int, warm_up: int = 0, floor: float = 0.0, decay: float = 0.2):
        if not 0 < decay <= 1:
            raise Pmm3dError(f"WarmUpStableDecay: decay is a share of the steps, above 0 and at most 1; got {decay!r}")
        self.decay = decay
        super().__init__(optimizer, steps, warm_up, floor)

    def _shape(self, steps: int) -> float:
        start = self.steps - max(1, round(self.decay * self.steps)) - self.warm_up
        return 1 - sqrt(self._done(steps, max(0, start)))


class InverseSquareRoot(Schedule):
    """Rate that falls as 1 / sqrt(step) (A. Vaswani and others, 2017).

    Parameters
    ----------
    optimizer, warm_up
        As in `Schedule`.
    timescale : int or None
        The factor is sqrt(timescale / (timescale + s)), s steps after the warm-up. Default: warm_up, so that the rate
        is proportional to 1 / sqrt(step); 10,000 without a warm-up.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> from pmm3d.nn import optim
    >>> with Grid(shape="ddp") as grid:
    ...     opt = optim.SGD(nn.Linear(grid, 3, 2).parameters(), lr=1.0)
    ...     optim.InverseSquareRoot(opt, warm_up=100).factor(300)
    0.5
    """

    def __init__(self, optimizer: Optimizer, warm_up: int = 0, timescale: int | None = None):
        if timescale is not None:
            natural(timescale, "InverseSquareRoot: timescale is a number of steps, at least 1", 1, Pmm3dError)
        self.timescale = timescale or warm_up or 10_000
        super().__init__(optimizer, warm_up)

    def factor(self, steps: int) -> float:
        return sqrt(self.timescale / (self.timescale + steps))


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


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Schedule,
    "cosine": Cosine,
    "linear": LinearDecay,
    "inverse_sqrt": InverseSquareRoot,
    "wsd": WarmUpStableDecay,
    "step": Step,
}
"""Schedules by their names in a configuration (`schedule.kind`)."""
