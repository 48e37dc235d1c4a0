"""Which rank plays which role in a product, so that the least moves: an assignment problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..comm import Grid
from ..layout import Placement, Tiled
from ..layout.pieces import elements, send_blocks

MOST_RANKS = 1024
"""Up to which roles are assigned: the volumes are a table of their square, and the assignment takes their cube."""


def least_moved(grid: Grid, moves: Sequence[tuple[Tiled, Placement]]) -> tuple[int, ...]:
    """Of each rank of the grid to be, the rank here: such that together the most elements stay where they are, in these
    moves from a layout to the grid to be. Roles are exchanged within nodes only, which leaves every axis on the nodes
    where it was. Ranks keep their own where exchanging saves nothing. Collective over `grid`."""
    own = np.arange(grid.size)
    if not 1 < grid.size <= MOST_RANKS:
        return tuple(own.tolist())
    from scipy.optimize import linear_sum_assignment

    mine = np.zeros(grid.size, np.int64)
    for source, target in moves:
        for roles, pieces in send_blocks(source, target, grid.rank).items():
            mine[list(roles)] += elements(pieces)
    stays = np.empty((grid.size, grid.size), np.int64)
    grid.everyone.all_gather(mine.reshape(1, -1), out=stays).wait()
    places = grid.places()
    allowed = np.where(places[:, None] == places[None, :], stays, -1 - stays.sum())
    ranks, roles = linear_sum_assignment(allowed, maximize=True)
    if allowed[ranks, roles].sum() <= np.trace(stays):
        return tuple(own.tolist())
    chosen = np.empty_like(own)
    chosen[roles] = ranks
    return tuple(chosen.tolist())
