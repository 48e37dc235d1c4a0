"""What all ranks find out together at the end of a step, or of a batch of a validation, by one all-reduce."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

from ...comm import Grid
from ..parallel import Parallel
from .signals import END, INTERRUPT, SAVE


class Agreed(NamedTuple):
    """The same on every rank.

    loss, norm   of the whole batch; the 2-norm of the whole gradient
    request      the most urgent signal that any rank has had, 0 for none
    look         whether a rank wants all to look at their pace
    failed       whether some rank could not read its part of the next batch
    """

    loss: float
    norm: float
    request: int
    look: bool
    failed: bool


def step_agreement(grid: Grid, loss: float = 0.0, square: float = 0.0, *, request: int = 0, look: bool = False,
                   failed: bool = False) -> Agreed:
    """From what each rank has to say: its parts of the loss and of the square of the gradient's norm, and the rest as
    it is here. Collective: one all-reduce of eight numbers, which are arbitrary in a dry run.

    Raises DisagreementError, on every rank, if the last backward pass did not use the same parameters on all, and their
    messages fitted all the same; where they do not fit, the ranks wait for each other and the watchdog says where.

        >>> with Grid() as grid:
        ...     step_agreement(grid, 1 / grid.size, request=SAVE if grid.rank == 0 else 0)
        Agreed(loss=1.0, norm=0.0, request=1, look=False, failed=False)
    """
    parallel = Parallel.of(grid)
    ends = 0 if request < END else 1 if request == END else grid.size + 1
    own = [loss, square, request == SAVE, ends, look, failed, parallel.digest, parallel.digest**2]
    with grid.ledger.phase("agreement"):
        total = grid.everyone.all_reduce(np.array(own, np.float64), agreed=True).wait()
    loss, square, saves, ends, looks, failures, digests, squares = total.tolist()
    if int(digests) ** 2 != grid.size * int(squares) and grid.dry_run is None:  # whose digests are all the same
        parallel.explain()
    asked = INTERRUPT if ends > grid.size else END if ends else SAVE if saves else 0
    return Agreed(loss, sqrt(abs(square)), asked, looks > 0, failures > 0)
