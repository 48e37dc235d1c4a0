"""Seeds of layers that are made without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import random
from ..comm import Grid
from ..errors import GridError

STREAM = 2**32
"""The stream of a seed from which the seeds of layers derive. No network has this many layers."""


class Seeds:
    """The seeds of one grid's layers. `Seeds.of(grid)`.

    seed    the seed from which the others derive (`manual_seed`); 0 by default
    taken   number of seeds that layers took since
    """

    def __init__(self, seed: int = 0):
        self.seed, self.taken = seed, 0

    @classmethod
    def of(cls, grid: Grid) -> Seeds:
        return grid.attached.setdefault(cls, cls())

    def next(self) -> int:
        """Return the next seed. All ranks make the same layers in the same order, so all get the same seed."""
        self.taken += 1
        return derived(derived(self.seed, STREAM), self.taken)


def manual_seed(grid: Grid, seed: int) -> None:
    """Set the seed from which later layers on this grid derive theirs, those that are made without `seed=`.

    Without this call the seed is 0. The first layer takes the first number of the stream, the second layer the second
    number. So two layers never begin alike. A program that makes the same layers in the same order has the same weights
    and the same dropout masks, on every grid.

        >>> from pmm3d import nn
        >>> with Grid(shape="ddp") as grid:
        ...     manual_seed(grid, 7)
        ...     one, other = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
        ...     bool((one.weight.gather() == other.weight.gather()).any())
        False
    """
    check_grid("manual_seed", grid)
    grid.attached[Seeds] = Seeds(seed)


def derived(seed: int, stream: int) -> int:
    """Return the seed of one stream of a seed."""
    return int(random.bits(np.zeros(1, np.uint64), seed, stream)[0] >> np.uint64(1))


def check_grid(what: str, grid: Any) -> None:
    """Raise GridError if the first argument of a layer or function is not a Grid."""
    if not isinstance(grid, Grid):
        raise GridError(f"{what}: the first argument is the Grid; got a {type(grid).__name__}: pass {what}(grid, ...)")
