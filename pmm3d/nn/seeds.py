"""Seeds of layers that are made without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import random
from ..comm import Grid
from ..errors import GridError, Pmm3dError

STREAM = 2**32
"""The stream of a seed from which the seeds of layers derive. No network has this many layers."""


class Seeds:
    """The seeds of one grid's layers. `Seeds.of(grid)`. A stage has those of the whole grid.

    seed    the seed from which the others derive (`manual_seed`); 0 by default
    taken   number of seeds that layers took from it
    """

    def __init__(self, seed: int = 0):
        self.seed, self.taken = seed, 0

    def __str__(self) -> str:
        return f"manual_seed {self.seed}, {self.taken} layers made"

    @classmethod
    def of(cls, grid: Grid) -> Seeds:
        return grid.whole.attached.setdefault(cls, cls())

    def next(self) -> int:
        """Return the next seed. All ranks make the same layers in the same order, so all get the same seed."""
        self.taken += 1
        return derived(derived(self.seed, STREAM), self.taken)


def manual_seed(grid: Grid, seed: int) -> None:
    """Set the seed of all layers that are made later on this grid without `seed=`. Collective.

    seed   a whole number from 0 to 2^64 - 1, the same on all ranks; 0 without this call

    The first layer takes the first number of the seed's stream, the second layer the second number, until the next
    call. A program that makes the same layers in the same order has the same weights and the same dropout masks, on
    every grid. Raises Pmm3dError, on every rank, for other seeds.

        >>> from pmm3d import nn
        >>> with Grid(shape="ddp") as grid:
        ...     manual_seed(grid, 7)
        ...     one, other = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
        ...     bool((one.weight.gather() == other.weight.gather()).any())
        False
    """
    check_grid("manual_seed", grid)
    with grid.collective_call("manual_seed", seed, always=True):
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 2**64:
            raise Pmm3dError(f"manual_seed: the seed is a whole number from 0 to 2^64 - 1; got {seed!r}: convert it "
                             "with int(...)")
    grid.whole.attached[Seeds] = Seeds(int(seed))


def derived(seed: int, stream: int) -> int:
    """Return the seed of one stream of a seed."""
    return int(random.bits(np.zeros(1, np.uint64), seed, stream)[0] >> np.uint64(1))


def check_grid(what: str, grid: Any) -> None:
    """Raise GridError if the first argument of a layer or function is not a Grid, or is one that leaves ranks idle."""
    if not isinstance(grid, Grid):
        raise GridError(f"{what}: the first argument is the Grid; got a {type(grid).__name__}: pass {what}(grid, ...)")
    if grid.size != grid.shape.size:
        raise GridError(f"{what}: grid {grid.shape} leaves ranks of {grid.size} idle; a network needs a grid of all "
                        f"ranks: choose a shape of {grid.size} ranks, or make the Grid on a communicator of "
                        f"{grid.shape.size} (comm.Split)")
