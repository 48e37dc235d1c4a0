"""One step of training: forward and backward passes, one agreement of the ranks, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from ...comm import Grid
from ...layout import PIPE
from ...product import DistMatrix
from ..compute import override
from ..contexts import unchanged
from ..ema import EMA
from ..gradient_norm import check_clip, clipping
from ..loss import WholeStep
from ..loss_scale import LossScale
from ..module import Module
from ..operations import sum as sum_of
from ..optim import NonFiniteGradientError, Optimizer
from ..parallel import BackwardSync
from ..pipeline.executor import Executor, LossOf
from ..pipeline.network import Pipeline
from ..recorded_steps import Replays, facts_of
from ..tape import Tape
from ..tensor import Tensor
from .evaluation import Batch, Loss, first_non_finite, local_loss
from .signals import END, INTERRUPT, SAVE

Square = float | np.ndarray
"""Square of the 2-norm of a gradient, or an array of the squares for each parameter."""


class Agreed(NamedTuple):
    """Result of an agreement, the same on every rank.

    loss      of the whole step;   norm   of the whole gradient
    request   the most urgent signal that any rank received, 0 for none
    failed    whether a rank could not read its part of the next batch
    """

    loss: float
    norm: float
    request: int
    failed: bool


def step_agreement(
    grid: Grid,
    loss: float = 0.0,
    square: Square = 0.0,
    *,
    parent: Grid | None = None,
    request: int = 0,
    failed: bool = False,
) -> Agreed:
    """Combine loss, square of the gradient's norm, and requests of all ranks. Collective: one all-reduce of a few
    numbers. In a dry run the result is arbitrary.

    square: a number, or squares to be added in their order; parent: grid of the ranks that agree, default `grid`.

    The agreement also compares, among the ranks of `grid`, the backward passes since the last one, and which program
    was replayed (`BackwardSync.programs_differ`).

    Raises DisagreementError, on every rank, if backward passes since the last agreement used different parameters.

        >>> with Grid() as grid:
        ...     step_agreement(grid, 1 / grid.size, request=SAVE if grid.rank == 0 else 0)
        Agreed(loss=1.0, norm=0.0, request=1, failed=False)
    """
    parallel, everyone = BackwardSync.of(grid), (parent or grid).everyone
    stages = everyone.size // grid.size
    stage = parent.axis(PIPE).index if parent is not None and stages > 1 else 0
    digests = [0.0] * (4 * stages)
    digests[stage::stages] = parallel.digest, parallel.digest**2, parallel.program, parallel.program**2
    asks = 0 if request < END else 1 if request == END else everyone.size + 1
    squares = np.atleast_1d(square).tolist() if isinstance(square, np.ndarray) else [square]
    loss, saves, ends, failures, parallel.proposals, *rest = parallel.summed(
        everyone, [loss, request == SAVE, asks, failed, parallel.proposal, *digests, *squares]
    )
    differ = [int(one) ** 2 != grid.size * int(two) for one, two in zip(rest[:stages], rest[stages:])]
    if any(differ) and grid.dry_run is None:
        with grid.parent.collective_call("backward", always=True) if stages > 1 else nullcontext():
            if differ[stage]:
                parallel.explain()
    programs, squared = rest[2 * stages + stage : 4 * stages : stages]
    parallel.programs_differ = programs**2 != grid.size * squared and grid.dry_run is None
    asked = INTERRUPT if ends > everyone.size else END if ends else SAVE if saves else 0
    return Agreed(loss, sqrt(abs(sum(rest[4 * stages :]))), asked, failures > 0)


def weighted(grid: Grid, loss: Loss, batches: Sequence[Batch]) -> LossOf:
    """Return the function (micro-batch, output) -> part of the loss of the step. The parts add up to the loss of one
    batch. With several micro-batches, the first call counts the labels of all ranks if some are ignored."""
    step, several = WholeStep(grid, [y for _, y in batches]), len(batches) > 1

    def part(micro: int, output: Any) -> Tensor:
        result = step.loss(loss, micro, output, several)
        if not step.weight:
            return sum_of(result[:0])  # 0 for a batch without rows, whose mean is NaN
        return result * step.weight if step.weight != 1 else result

    return part


def local_norm_squared(network: Module, optimizer: Optimizer) -> Square:
    """Return this rank's part of the square of the norm. For a Pipeline, and for a network with experts, return an
    array with the square for each parameter of the whole network. Then the order of the sum does not depend on the cut.
    With one rank along z, it does not depend on the number of ranks that share the experts either."""
    if not isinstance(network, Pipeline) and not optimizer._has_experts:
        return optimizer._local_norm_squared()
    named, squares = network.named_parameters(), optimizer._own_squares()
    names = network.all_names if isinstance(network, Pipeline) else [*named]
    return np.array([float(squares.get(named[name], 0.0)) if name in named else 0.0 for name in names])


def train_step(
    network: Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Sequence[Batch],
    clip: float | None = None,
    *,
    agree: Callable[[float, Square], Agreed] | None = None,
    check: Callable[[Sequence[DistMatrix], str, float], None] | None = None,
    scale: LossScale | None = None,
    ema: EMA | None = None,
    keep_gradients: bool = False,
) -> tuple[float, float]:
    """Change the weights by the gradient of the mean loss of all micro-batches. Collective, with one agreement.

    Parameters
    ----------
    network : Module
        The network, also a `Pipeline`.
    optimizer : Optimizer
        Optimizer of the network. Gradients from before are dropped.
    loss : callable
        loss(output, y) -> Tensor, 1 x 1, a mean over the rows. It may contain the losses of `pmm3d.nn`, such as
        `nn.mse` and `nn.cross_entropy`, also with ignore_index, times numbers and added to other terms. It may also be
        one of these losses with reduction="sum".
    batches : sequence of (x, y)
        Micro-batches.
    clip : float or None
        Largest 2-norm of the gradient. Default: no limit.
    agree : callable
        agree(part of the loss, part of the square of the norm). Default: `step_agreement`.
    check : callable
        check(inputs, what, value) may raise before the weights are changed. Default: none.
    scale : LossScale
        Scale of the loss. A step that is not finite is then skipped, and not checked. Default: none.
    ema : EMA
        Averages of the weights, which are updated if the step is not skipped. Default: none.
    keep_gradients : bool
        Whether `Parameter.grad` is readable until the next step: the gradient of the mean loss after clipping. A
        skipped step has none. Default: False.

    Returns
    -------
    loss, norm : float
        Mean loss, and 2-norm of the gradient before it was clipped.

    Raises
    ------
    PipelineError
        On every rank, for a number of micro-batches that the schedule of a Pipeline refuses.
    NonFiniteGradientError
        On every rank, if the norm is infinite or NaN and there is a `clip`, before a weight is changed. With `scale`,
        such a step is skipped instead; the error is raised after too many skipped steps in a row.
    """
    check_clip(clip)
    if isinstance(network, Pipeline):
        network._check_ended()
    grid, inputs = network.grid, [x for x, _ in batches]
    replays, factor = Replays.of(network), 1.0 if scale is None else scale.value
    replays.scale.value, facts = factor, facts_of(network, loss, batches, factor)

    def passes(batches: Sequence[Batch]) -> list[Tensor]:
        tape, executor = Tape.of(grid), Executor(network, [x for x, _ in batches], replays.scale)
        with unchanged(grid), tape.set(summing=False), override(tape.parallel, defers_agreement=True):
            return executor.run(weighted(grid, loss, batches) if executor.has_last_stage else None)

    losses = replays.run(facts, network, batches, passes)
    if isinstance(network, Pipeline):
        network._sum_tied()
    own, square = sum(map(local_loss, losses)), local_norm_squared(network, optimizer)
    agreed = step_agreement(grid, own, square, parent=network.parent_grid) if agree is None else agree(own, square)
    replays.agreed()
    value, norm = agreed.loss, agreed.norm / factor
    if scale is None:
        if check is not None:
            check(inputs, "the loss is", value)
            check(inputs, "the gradient's norm is", norm)
        with grid.ledger.part("optimizer"):
            optimizer.step(factor=clipping(norm, clip), keep_gradients=keep_gradients)
            if ema is not None:
                ema.update()
        for after_step in replays.hooks:
            after_step(True)
        return value, norm
    try:
        with grid.ledger.part("optimizer"):
            taken = scale._conclude([optimizer], norm if isfinite(value) else value, clip, keep_gradients)
            if taken and ema is not None:
                ema.update()
        for after_step in replays.hooks:
            after_step(taken)
    except NonFiniteGradientError as error:
        where = first_non_finite(network, inputs)
        raise NonFiniteGradientError(f"{error}. In the forward pass: {where}") from None
    return value, norm
