"""Seeds of layers that are made without `seed=`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import random
from ..comm import Grid
from ..errors import GridError, Pmm3dError

STREAM = 2**32
"""Stream from which the seeds of layers are derived. No network has this number of layers."""


class Seeds:
    """Seeds of the layers of a grid; `Seeds.of(grid)` returns them. A stage uses the seeds of the whole grid."""

    def __init__(self, seed: int = 0):
        self.seed, self.taken = seed, 0

    def __str__(self) -> str:
        return f"manual_seed {self.seed}, {self.taken} layers made"

    @classmethod
    def of(cls, grid: Grid) -> Seeds:
        return grid.parent.attached.setdefault(cls, cls())

    def next(self) -> int:
        """Return the next seed. All ranks make the same layers in the same order, so they get the same seeds."""
        self.taken += 1
        return derived(derived(self.seed, STREAM), self.taken)


def manual_seed(grid: Grid, seed: int) -> None:
    """Set the seed of the layers that are made on this grid without `seed=` after this call. Collective.

    Parameters
    ----------
    seed : int
        From 0 to 2^64 - 1, the same on all ranks. Without this call, the seed is 0.

    Raises
    ------
    Pmm3dError
        On every rank, for any other value.

    Notes
    -----
    Each layer takes the next number of the seed's stream. A program that makes the same layers in the same order has
    the same weights and the same dropout masks, on every grid.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.manual_seed(grid, 7)
    ...     one, other = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
    ...     bool((one.weight.gather() == other.weight.gather()).any())
    False
    """
    check_grid("manual_seed", grid)
    with grid.collective_call("manual_seed", seed, always=True):
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 2**64:
            raise Pmm3dError(
                f"manual_seed: the seed is a whole number from 0 to 2^64 - 1; got {seed!r}: convert it with int(...)"
            )
    grid.parent.attached[Seeds] = Seeds(int(seed))


def derived(seed: int, stream: int) -> int:
    """Seed that is derived from a seed and a stream."""
    return int(random.bits(np.zeros(1, np.uint64), seed, stream)[0] >> np.uint64(1))


def seed_of(grid: Grid, seed: int | None) -> int:
    """Return the given seed of a layer, or if it is None, the next seed of the grid."""
    return Seeds.of(grid).next() if seed is None else seed


def check_grid(what: str, grid: Any) -> None:
    """Raise GridError if the first argument of a layer is no Grid, or a Grid that leaves ranks idle."""
    if not isinstance(grid, Grid):
        raise GridError(f"{what}: the first argument is the Grid; got a {type(grid).__name__}: pass {what}(grid, ...)")
    if grid.size != grid.shape.size:
        raise GridError(
            f"{what}: grid {grid.shape} leaves ranks of {grid.size} idle; a network needs a grid of all "
            f"ranks: choose a shape of {grid.size} ranks, or make the Grid on a communicator of "
            f"{grid.shape.size} (comm.Split)"
        )
