"""A step of training: its passes in the order of a table, and its one agreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np

from ...comm import Grid
from ...product import DistMatrix
from ..compute import changed
from ..gradient_norm import clipping
from ..layers import Module
from ..loss import terms
from ..loss_scale import LossScale
from ..optim import NonFiniteGradientError, Optimizer
from ..parallel import Parallel
from ..tape import Tape, unchanged
from ..tensor import Tensor, as_tensor
from .evaluation import Batch, Loss, first_non_finite, own_part
from .signals import END, INTERRUPT, SAVE

Action = tuple[str, int]
"""("forward", i) or ("backward", i) of micro-batch i."""


class Agreed(NamedTuple):
    """The same on every rank.

    loss, norm   of the whole step; the 2-norm of the whole gradient
    request      the most urgent signal that any rank received, 0 for none
    look         whether to look for stragglers
    failed       whether some rank could not read its part of the next batches
    """

    loss: float
    norm: float
    request: int
    look: bool
    failed: bool


def step_agreement(grid: Grid, loss: float = 0.0, square: float = 0.0, *, request: int = 0, look: bool = False,
                   failed: bool = False) -> Agreed:
    """Combine the ranks' parts of the loss and of the square of the gradient's norm, and their requests. Collective:
    one all-reduce of eight numbers, which are arbitrary in a dry run.

    Raises DisagreementError, on every rank, if backward passes since the last agreement used different parameters on
    different ranks, and the messages matched nevertheless. If messages do not match, the watchdog reports the ranks.

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
    if int(digests) ** 2 != grid.size * int(squares) and grid.dry_run is None:  # not all digests are equal
        parallel.explain()
    asked = INTERRUPT if ends > grid.size else END if ends else SAVE if saves else 0
    return Agreed(loss, sqrt(abs(square)), asked, looks > 0, failures > 0)


def one_by_one(micro_batches: int) -> list[Action]:
    """Return the table of a step that accumulates gradients: forward and backward pass of each micro-batch in turn."""
    return [(what, index) for index in range(micro_batches) for what in ("forward", "backward")]


def run_actions(table: Sequence[Action], network: Module, loss: Loss, batches: Sequence[Batch],
                weights: Sequence[float], scale: float) -> list[Tensor]:
    """Run the passes of a step in the order of its table; return the weighted losses of the micro-batches. Gradients
    are summed over the axis data in the last backward pass. A pipeline has another table and its own function."""
    tape, losses = Tape.of(network.grid), dict[int, Tensor]()
    for number, (what, index) in enumerate(table, 1):
        if what == "forward":
            x, y = batches[index]
            result = loss(network(x), y)
            losses[index] = result if len(batches) == 1 else result * weights[index]
        else:
            with tape.set(syncing=number == len(table)):
                losses[index].backward(scale=scale)
    return [losses[index] for index in range(len(batches))]


def weighted(grid: Grid, loss: Loss, batches: Sequence[Batch]) -> tuple[Loss, list[float]]:
    """Return the loss of a micro-batch, and the weight of each in that of the step: its terms over those of the whole
    step. Sends nothing unless labels are ignored: then ranks add up how many are not."""
    if len(batches) == 1:
        return loss, [1.0]
    numbers = [terms(loss, as_tensor(y), y) for _, y in batches]
    total = sum(number for number, _ in numbers)
    if not numbers[0].own:
        return loss, [number / max(1, total) for number, _ in numbers]
    with grid.ledger.phase("loss"):
        of_all = grid.everyone.all_reduce(np.array([float(total)]), agreed=True).wait()
    return partial(loss, reduction="sum"), [1 / max(1.0, float(of_all[0]))] * len(batches)


def train_step(network: Module, optimizer: Optimizer, loss: Loss, batches: Sequence[Batch], clip: float | None = None,
               *, agree: Callable[[float, float], Agreed] | None = None,
               check: Callable[[Sequence[DistMatrix], str, float], None] | None = None,
               scale: LossScale | None = None, table: Sequence[Action] | None = None) -> tuple[float, float]:
    """Change the weights by the gradient of the mean of the loss over all micro-batches; return that mean, and the
    2-norm of the gradient before it was clipped. Collective, with one agreement.

    agree   agree(this rank's part of the loss, that of the square of the norm); default `step_agreement`
    check   check(inputs, what, value) may raise before the weights are changed
    scale   of the loss. A step whose loss or gradient is not finite is then skipped, and not checked
    table   order of the passes; default `one_by_one`

    Raises NonFiniteGradientError, on every rank, after too many skipped steps in a row.
    """
    grid, inputs = network.grid, [x for x, _ in batches]
    tape, factor = Tape.of(grid), 1.0 if scale is None else scale.value
    loss, weights = weighted(grid, loss, batches)
    with unchanged(grid), tape.set(summing=False), changed(tape.parallel, trusting=True):
        losses = run_actions(one_by_one(len(batches)) if table is None else table, network, loss, batches,
                             weights, factor)
        agreed = (agree or partial(step_agreement, grid))(sum(map(own_part, losses)), optimizer.own_square())
    value, norm = agreed.loss, agreed.norm / factor
    if scale is None:
        if check is not None:
            check(inputs, "the loss is", value)
            check(inputs, "the gradient's norm is", norm)
        optimizer.step(factor=clipping(norm, clip))
        return value, norm
    try:
        scale.conclude([optimizer], norm if isfinite(value) else value, clip)
    except NonFiniteGradientError as error:
        where = first_non_finite(network, inputs)
        raise NonFiniteGradientError(f"{error}. In the forward pass: {where}") from None
    return value, norm
