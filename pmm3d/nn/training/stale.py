"""Pipelines without a flush: a stage changes its weights while other micro-batches are in the pipeline.

Synchronous schedules empty the pipeline before each change of the weights, which causes their bubble. Here each stage
changes its weights independently, and the pipeline stays full. Gradients are then those of older weights. So the result
differs from that of `train_step`, and a learning rate at which `train_step` converges may be too large.

In these docstrings p is the number of stages, and s a stage, from 0. W_s(v) are its weights after v changes. G_s is the
gradient, with respect to the weights of stage s, of the loss of micro-batch t at the given weights. The recurrences are
written for SGD.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...arrays import Array
from ...comm import Grid, Pending
from ...product import DistMatrix
from ..compute import override
from ..experts import Router
from ..optim import Optimizer
from ..parameter import Parameter
from ..pipeline import PipelineError, PipelineSchedule
from ..pipeline.executor import Executor, LossOf, share_of
from ..pipeline.network import Pipeline
from ..pipeline.table import PipelineAction
from ..recorded_steps import hooks_of
from ..tape import Tape
from .evaluation import Batch, Loss, local_loss
from .step import step_agreement, weighted


class Rule:
    """Versions of the weights in the forward and the backward pass of a micro-batch.

    A batch has `every` micro-batches. A stage changes its weights by the mean of their gradients.
    """

    every: int

    def version(self, micro: int, stage: int, stages: int) -> int:
        """Return the number of changes in the weights that the micro-batch uses."""
        raise NotImplementedError(f"{type(self).__name__} does not define version(micro, stage, stages)")


class PipeDream(Rule):
    """PipeDream with weight stashing (Harlap et al., arXiv 1806.03377). A forward pass uses the newest weights of each
    stage. The backward pass of the micro-batch uses the same weights. Stage s holds p - s versions of its weights.

        W_s(t+1) = W_s(t) - lr G_s(t; W_0(v_0), ..., W_{p-1}(v_{p-1})),   v_s = max(0, t - (p-1-s))
    """

    every = 1

    def version(self, micro: int, stage: int, stages: int) -> int:
        return max(0, micro - (stages - 1 - stage))


@dataclass(frozen=True)
class DoubleBuffered(Rule):
    """PipeDream-2BW (Narayanan et al., arXiv 2006.09503). All stages use weights of the same version, which is one
    change old. A stage holds two versions. With b the number of a batch, of `every` micro-batches:

        W(b+1) = W(b) - lr (mean over the micro-batches t of batch b of G(t; W(v))),   v = max(0, b - 1)

    `every` must be at least p - 1.
    """

    every: int

    def version(self, micro: int, stage: int, stages: int) -> int:
        return max(0, micro // self.every - 1)


@dataclass(frozen=True)
class HetPipe(Rule):
    """HetPipe's wave synchronous parallelism (Park et al., ATC 2020). A worker is a pipeline with its own copy of the
    network. Workers may differ in speed. All stages of a worker use weights of the same version. A wave is p
    micro-batches. The clock of a worker is the number of its finished waves. U_i(c) is the sum of the changes of worker
    i in wave c, from 0.

        W_i(t+1) = W_i(t) - lr G_i(t; W_i(v)),   v = max(0, t - p + 1)
        and, if t + 1 = c p and c > D:   + the sum of U_j(c-1-D) over all workers j other than i

    A worker at clock c waits until all workers have finished wave c-1-D. So two clocks differ by at most D + 1. At the
    end, all workers have the changes of all waves.

    Parameters
    ----------
    workers
        Grid of shape "ddp" with the ranks at the same place in all workers. The network of a worker is on another grid,
        with the ranks of the worker.
    distance
        Distance D. Default: 0.
    """

    workers: Grid
    distance: int = 0
    every = 1

    def version(self, micro: int, stage: int, stages: int) -> int:
        return max(0, micro - stages + 1)


def train_stale(
    network: Pipeline, optimizer: Optimizer, loss: Loss, batches: Sequence[Batch], rule: Rule
) -> list[float]:
    """Train by stale gradients. Collective.

    Parameters
    ----------
    network : Pipeline
        Its schedule is "1f1b", or another table in which the weights of the rule are ready in time.
    optimizer : Optimizer
        Optimizer of the network.
    loss : callable
        loss(output, y) -> Tensor, 1 x 1.
    batches : sequence of (x, y)
        Micro-batches. The pipeline is filled at the start and emptied at the end, so pass many of them.
    rule : PipeDream, DoubleBuffered or HetPipe
        Versions are counted from the start of the call. HetPipe refuses routers with a `bias_rate`, because workers do
        not exchange changes of `after_step`.

    Returns
    -------
    list of float
        The loss of each change of the weights.

    Raises
    ------
    PipelineError
        On every rank, for a rule out of range, for a number of micro-batches that is no multiple of a batch (HetPipe:
        of a wave), for several stages on a rank, for weights that stages share, for a table in which the weights of the
        rule are not ready in time, for a grid of workers of another shape, and for HetPipe with a `bias_rate`.

    Notes
    -----
    Losses of routers are weighted by the micro-batch's share of the rows of its batch. `after_step` of each module is
    called after each change of its stage. A router's biases then change by the tokens of the forward passes since the
    change before.
    """
    if rule.every < 1 or (isinstance(rule, HetPipe) and rule.distance < 0):
        raise PipelineError(
            f"stale weights: a batch has at least 1 micro-batch, and a distance is at least 0; got {rule}"
        )
    grid, table, depth = network.grid, network.table(len(batches)), network.depth
    unit = depth if isinstance(rule, HetPipe) else rule.every
    if len(batches) % unit or len(table.stages) != table.ranks or network.tied:
        raise PipelineError(
            f"stale weights: {len(batches)} micro-batches, {len(table.stages)} stages on {table.ranks} "
            f"ranks, shared weights: {', '.join(network.tied) or 'none'}. The number of micro-batches "
            f"must be a multiple of {unit}, each rank must have one stage, and stages must share no "
            "weight"
        )
    _check_versions(table, rule, depth)
    if isinstance(rule, HetPipe):
        with network.parent_grid.collective_call("HetPipe", always=True):
            for module in network.stages.values():
                if any(isinstance(each, Router) and each.bias is not None for _, each in module.named_modules()):
                    raise PipelineError(
                        "HetPipe: workers do not exchange the biases of routers. Use balance in place of bias_rate"
                    )
        workers = rule.workers
        with workers.collective_call("HetPipe", len(batches), rule.distance):
            if workers.shape.data != workers.size:  # the changes of the others would not arrive
                raise PipelineError(
                    f"HetPipe: the grid of the workers has {workers.shape.data} of {workers.size} "
                    'ranks along data: make it with shape="ddp", of one rank of each worker'
                )
    executor = _StaleExecutor(network, optimizer, [x for x, _ in batches], rule)
    groups = (
        [weighted(grid, loss, batches[first : first + rule.every]) for first in range(0, len(batches), rule.every)]
        if executor.has_last_stage
        else []
    )
    with Tape.of(grid).set(summing=False), override(Tape.of(grid).parallel, defers_agreement=True):
        losses = executor.run(lambda micro, output: groups[micro // rule.every](micro % rule.every, output))
    own = np.zeros(len(batches))
    own[: len(losses)] = list(map(local_loss, losses))
    step_agreement(grid, parent=network.parent_grid)
    total = network.parent_grid.everyone.all_reduce(own, agreed=True).wait()
    return total.reshape(-1, rule.every).sum(1).tolist()


def _check_versions(table: PipelineSchedule, rule: Rule, stages: int) -> None:
    done, begun = Counter[int](), Counter[int]()
    for rank, place, action in table.each():
        stage, needed = action.stage, rule.version(action.micro, action.stage, stages)
        if action.kind == "F" and needed > done[stage] // rule.every:
            raise table._complain(
                rank,
                place,
                f"{type(rule).__name__} needs weights after {needed} changes, and "
                f"{done[stage] // rule.every} are done. With the schedule 1f1b, and with batches of "
                f"at least {stages - 1} micro-batches, the weights are ready in time",
            )
        done[stage] += action.kind in ("B", "W")
        begun[stage] += action.kind in ("B", "I")
        if action.kind == "W" and done[stage] % rule.every == 0 and begun[stage] > done[stage]:
            raise table._complain(
                rank,
                place,
                f"stage {stage} changes its weights here, while weight gradients of the "
                "next batch are pending. Use the schedule 1f1b",
            )


class _StaleExecutor(Executor):
    """Executor that uses the weights of a rule in each pass, and changes the weights after the last W of a batch."""

    def __init__(self, network: Pipeline, optimizer: Optimizer, inputs: Sequence[DistMatrix], rule: Rule):
        super().__init__(network, inputs)
        self._optimizer, self._rule, self._depth, self._done = optimizer, rule, network.depth, 0
        ((self._stage, module),) = network.stages.items()
        self._hooks = hooks_of(module)
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._versions = {0: [(each._stored, each.version) for each in self._parameters]}
        self._waves = _Waves(rule, self._parameters) if isinstance(rule, HetPipe) else None

    def _share(self, micro: int) -> float:
        number, first = micro % self._rule.every, micro - micro % self._rule.every
        return share_of(self._inputs[first : first + self._rule.every], number)

    def _starts_all_reduce(self, action: PipelineAction) -> bool:
        return action.kind in ("B", "W") and (action.micro + 1) % self._rule.every == 0

    def _carry_out(self, action: PipelineAction, loss: LossOf | None) -> None:
        if action.kind in ("F", "I", "B"):
            self._use(self._rule.version(action.micro, self._stage, self._depth))
        super()._carry_out(action, loss)
        if self._starts_all_reduce(action):
            self._change(action.micro + 1)

    def _use(self, version: int) -> None:
        for parameter, held in zip(self._parameters, self._versions[version]):
            parameter._hold(*held)

    def _change(self, micros: int) -> None:
        """Make the next version of the weights. micros: number of finished micro-batches."""
        self._use(self._done)
        for parameter in self._parameters:
            parameter._hold(parameter.spec.matrix(parameter.library.copy(parameter.shard)), parameter.version)
            if parameter.master is not None:
                parameter._note_rounded()
        self._optimizer.step()
        if self._waves is not None and micros % self._depth == 0:
            self._waves.end(micros == len(self._inputs))
        for after_step in self._hooks:
            after_step(True)
        self._done += 1
        self._versions[self._done] = [(each._stored, each.version) for each in self._parameters]
        oldest = min(self._done, self._rule.version(micros, self._stage, self._depth))
        self._versions = {number: held for number, held in self._versions.items() if number >= oldest}


class _Waves:
    """Changes of waves, of this worker and of all workers.

    total       weights with the waves of all workers, up to the last wave that has arrived
    own, sums   changes of later waves: of this worker, and of all workers
    """

    def __init__(self, rule: HetPipe, parameters: Sequence[Parameter]):
        self._rule, self._parameters = rule, parameters
        self._total, self._begin = self._copies(), self._copies()
        self._own, self._sums = deque[list[Array]](), deque[list[Pending]]()

    def _copies(self) -> list[Array]:
        return [each.library.copy(each._in_checkpoint.local) for each in self._parameters]

    def end(self, last: bool) -> None:
        """Send the changes of a wave, and add the changes of waves older than the distance; of all waves if it is the
        last one."""
        arrays = [each._in_checkpoint.local for each in self._parameters]
        self._own.append([after - before for after, before in zip(arrays, self._begin)])
        self._sums.append([self._rule.workers.data.all_reduce(each) for each in self._own[-1]])
        while len(self._sums) > (0 if last else self._rule.distance):
            self._own.popleft()
            for total, pending in zip(self._total, self._sums.popleft()):
                total += pending.wait()
        for number, (parameter, array) in enumerate(zip(self._parameters, arrays)):
            array[...] = self._total[number]
            for own in self._own:
                array += own[number]
            parameter._loaded()
        self._begin = self._copies()
