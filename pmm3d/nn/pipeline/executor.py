"""Execution of a training step: the passes and messages of this rank, in the order of the pipeline's table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, SupportsFloat

from ...comm import Axis, Grid, Ledger, Pending, assign, call
from ...errors import Pmm3dError
from ...layout import PIPE
from ...product import DistMatrix
from ..compression import Compression
from ..contexts import WeightProducts, defer_weights
from ..dry import Facts
from ..gradient_buffer import GradientBuffer
from ..module import Module
from ..parameter import Parameter
from ..tape import Edge, Tape, backward_from
from ..tensor import Tensor, as_tensor
from .network import Pipeline, begin_step
from .schedules import one_f_one_b
from .table import PipelineAction, PipelineError, PipelineSchedule

AHEAD = 8
"""Number of next actions whose receives are already posted, so that messages arrive during computation."""
LossOf = Callable[[int, Any], Tensor]
"""loss(micro-batch, output) returns the micro-batch's part of the loss of the step."""


class OneStage:
    """Adapter that gives a Module without stages the interface of a Pipeline of one stage."""

    index = 0

    def __init__(self, network: Module):
        self.grid, self._network, self.stages = network.grid, network, {0: network}

    def table(self, micro_batches: int) -> PipelineSchedule:
        return _of_one_stage(micro_batches)

    def _run(self, stage: int, micro: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = self._network(*inputs)
        return made if isinstance(made, tuple) else (made,)

    def _separate_tied_gradients(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext()

    def _starts_and_ends(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Functions that begin and end a step. The network itself counts its passes."""
        return partial(begin_step, self.grid), lambda micro_batches: None


@lru_cache(maxsize=16)
def _of_one_stage(micro_batches: int) -> PipelineSchedule:
    return one_f_one_b(1, micro_batches)


class Executor:
    """A training step on this rank.

    Receives are posted early, each with its own tag. A rank waits for a receive before the pass that needs the message,
    and for its sends at the end of the step. So no order of messages can deadlock. Stages on the same rank exchange no
    messages. `Compression.stages` encodes the messages. The all-reduce of a stage's gradients over data begins during
    the last W of the stage. Contributions to a gradient are added in ascending order of micro-batches, so all schedules
    give the same bits. `has_last_stage` is True if this rank holds a last stage.

    Raises PipelineError, on every rank, if the schedule does not support this number of micro-batches. Also raises it
    if an earlier step ended with an error on this rank.
    """

    def __init__(self, network: Module, inputs: Sequence[DistMatrix], scale: SupportsFloat = 1.0):
        self._network: Any = network if isinstance(network, Pipeline) else OneStage(network)
        self._grid, self._inputs, self._scale = network.grid, inputs, scale
        self._table: PipelineSchedule = self._network.table(len(inputs))
        if isinstance(network, Pipeline):
            network._choose(inputs)
        if self._table.ranks > 1:
            _check_compression(self._grid)
            self._pipe: Axis = self._grid.parent.axis(PIPE)
            self._pipe.choose_transport(inputs[0].library)
        self._codec_of = partial(Tape.of(self._grid).parallel.compression.codec_of, "stages")
        self._line = self._table.actions[self._network.index]
        self._receives = deque((place, each) for place, each in enumerate(self._line) if each.kind.startswith("RECV"))
        self._posted, self._sends = dict[PipelineAction, list[Pending]](), list[Pending]()
        self._values = dict[tuple[str, int, int], Sequence[DistMatrix]]()
        """("F", stage, micro-batch) -> inputs of the stage. ("B", stage, micro-batch) -> gradients of its outputs."""
        self._passes = dict[tuple[int, int], tuple[list[Tensor], list[Edge | None]]]()
        """(stage, micro-batch) -> inputs, and edges of the outputs on the tape, kept for the backward pass."""
        self._queues, self._losses = dict[tuple[int, int], WeightProducts](), dict[int, Tensor]()
        self._last = {each.stage: each for action in self._line for each in action.each if each.kind in ("B", "W")}
        self.has_last_stage = any(chain.stop - 1 in self._network.stages for chain in self._table.chains)

    def run(self, loss: LossOf | None) -> list[Tensor]:
        """Execute the actions of this rank. Return the losses of micro-batches whose last stage is on this rank. If
        there are none, loss can be None."""
        tape, engine, open_sums = Tape.of(self._grid), self._grid.engine, dict[int, list[GradientBuffer]]()
        for stage, module in self._network.stages.items():
            with self._network._separate_tied_gradients(stage):
                open_sums[stage] = [*_buffers(module)]
        begin, end = self._network._starts_and_ends()
        call(engine, begin, [each for buffers in open_sums.values() for each in buffers])
        for stage, buffers in open_sums.items():
            for buffer in buffers:
                buffer.queues.add(stage)  # delays the all-reduce over data
        try:
            for place, action in enumerate(self._line):
                self._post(place)
                for each in action.each:
                    starts = self._starts_all_reduce(each)
                    for buffer in open_sums[each.stage] if each.kind in ("B", "W") else ():
                        (buffer.queues.discard if starts else buffer.queues.add)(each.stage)
                    with tape.set(syncing=starts):
                        self._carry_out(each, loss)
            for send in self._sends:
                send.wait()
        finally:
            for stage, buffers in open_sums.items():
                for buffer in buffers:
                    buffer.queues.discard(stage)
        call(engine, end, len(self._inputs))
        if tape.forms is not None and self._table.ranks > 1 and self._grid.dry_run is None:
            tape.forms.check(self._grid.parent.everyone)
        return [self._losses[micro] for micro in sorted(self._losses)]

    def _starts_all_reduce(self, action: PipelineAction) -> bool:
        """Whether the all-reduce of a stage's gradients over data begins during this action."""
        return action == self._last[action.stage]

    def _carry_out(self, action: PipelineAction, loss: LossOf | None) -> None:
        kind, stage, micro, _ = action
        recorder = self._grid.engine.recorder
        if kind.startswith("RECV"):
            receiving = _Receiving(action, [x.shape[0] for x in self._inputs])
            with receiving, nullcontext() if recorder is None else recorder.section(receiving):
                for pending in self._posted.pop(action):
                    pending.wait()
        elif kind.startswith("SEND"):
            self._send(action)
        else:
            acting = _Acting(self._grid.ledger, action)
            with acting, nullcontext() if recorder is None else recorder.section(acting):
                if kind == "F":
                    self._forward(stage, micro, loss)
                else:
                    with self._network._separate_tied_gradients(stage):
                        self._queues.pop((stage, micro)).drain() if kind == "W" else self._backward(kind, stage, micro)

    def _forward(self, stage: int, micro: int, loss: LossOf | None) -> None:
        chain, x = self._table._chain_of[micro], self._inputs[micro]
        inputs = (
            [as_tensor(x)]
            if stage == chain.start
            else [Tensor(value, requires_grad=True) for value in self._values.pop(("F", stage, micro))]
        )
        outputs = self._network._run(stage, micro, *inputs)
        if stage == chain.stop - 1:
            assert loss is not None
            self._losses[micro] = result = loss(micro, outputs if len(outputs) > 1 else outputs[0])
            outputs = (result,)
        else:
            values, expected = [output.value for output in outputs], self._network._incoming(stage + 1, x)
            if (facts := tuple(map(Facts.of, values))) != expected:
                raise PipelineError(
                    f"stage {stage} returned {_in_words(facts)} for micro-batch {micro}, but stage "
                    f"{stage + 1} expects {_in_words(expected)}, the result of a dry run. The shape of "
                    "a layer's result must not depend on values or on the number of the call"
                )
            self._values["F", stage + 1, micro] = values
        self._passes[stage, micro] = inputs, [output._edge for output in outputs]

    def _share(self, micro: int) -> float:
        """Share of a micro-batch in the rows of the step."""
        return share_of(self._inputs, micro)

    def _backward(self, kind: str, stage: int, micro: int) -> None:
        inputs, edges = self._passes.pop((stage, micro))
        sharing = Tape.of(self._grid).set(share=self._share(micro))
        with sharing, defer_weights(self._grid) if kind == "I" else nullcontext() as queue:
            if stage == self._table._chain_of[micro].stop - 1:
                self._losses[micro].backward(scale=self._scale)
            else:
                gradients = self._values.pop(("B", stage, micro))
                starts = [(edge, gradient.local) for edge, gradient in zip(edges, gradients) if edge is not None]
                if starts:  # empty if no parameter up to this stage is trained
                    backward_from(starts, float(self._scale))
        if queue is not None:
            self._queues[stage, micro] = queue
        if stage > self._table._chain_of[micro].start:
            self._values["B", stage - 1, micro] = [x.grad if x.grad is not None else _zeros(x) for x in inputs]

    def _post(self, place: int) -> None:
        """Post the receives among the next actions."""
        while self._receives and self._receives[0][0] < place + AHEAD:
            action = self._receives.popleft()[1]
            kind, stage, micro, _ = action
            message = self._table._messages[action]
            incoming = self._network._incoming(stage + (kind == "RECV_B"), self._inputs[micro])
            self._values[kind[-1], stage, micro] = values = [self._buffer(facts) for facts in incoming]
            self._posted[action] = [
                self._pipe.receive(
                    value.local,
                    message.source,
                    tag=message.number,
                    agreed=True,
                    message=str(message),
                    _codec=self._codec_of(value.dtype),
                )
                for value in values
            ]

    def _buffer(self, facts: Facts) -> DistMatrix:
        """Matrix in work memory into which a message is received."""
        box = facts.layout.box(facts.shape, self._grid.shape, self._grid.coords)
        local = self._grid.workspace.array(box.shape, facts.dtype, self._grid.library(facts.library))
        return DistMatrix(self._grid, local, facts.shape, facts.layout)

    def _send(self, action: PipelineAction) -> None:
        message = self._table._messages[action]
        kind, stage, micro, _ = message.receive
        for value in self._values.pop((kind[-1], stage, micro)):
            self._sends.append(
                self._pipe.send(
                    value.local,
                    message.target,
                    tag=message.number,
                    agreed=True,
                    message=str(message),
                    _codec=self._codec_of(value.dtype),
                )
            )


def _check_compression(stage: Grid) -> None:
    of_parent, own = (Tape.of(grid).parallel.compression for grid in (stage.parent, stage))
    if of_parent not in (Compression(), own):
        raise PipelineError(
            "the compression of the whole grid is not used, because a pipeline is a network of grid.stage: set "
            f"nn.Tape.of(grid.stage).parallel.compression = nn.{of_parent}"
        )


def share_of(inputs: Sequence[DistMatrix], number: int) -> float:
    """Share of an input in the rows of all of them; 1 for one input, also without rows."""
    return inputs[number].shape[0] / max(1, sum(x.shape[0] for x in inputs)) if len(inputs) > 1 else 1.0


class _Acting:
    """Context in which a rank carries out an action. Each step enters it again."""

    __slots__ = ("_inside", "_part")

    def __init__(self, ledger: Ledger, action: PipelineAction):
        self._inside = ledger.acting(str(action), action.in_words)
        self._part = ledger.part("forward" if action.kind == "F" else "backward")

    def __enter__(self) -> None:
        self._inside.__enter__()
        self._part.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._part.__exit__()
        self._inside.__exit__(kind, error, trace)


class _Receiving(NamedTuple):
    """Context in which a rank waits for the messages of an action. rows: of its micro-batches."""

    action: PipelineAction
    rows: list[int]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Pmm3dError):
            raise PipelineError(
                f"{self.action.in_words}: {error}. All ranks along pipe must pass micro-batches of the "
                f"same shapes. The micro-batches of this rank have {self.rows} rows"
            ) from error


def _buffers(module: Module) -> Iterator[GradientBuffer]:
    """Gradient buffers of a stage's parameters. `named_parameters` is not used because it sets the names anew."""
    return (
        child.grad_buffer
        for _, part in module.named_modules()
        for _, child in part.children()
        if isinstance(child, Parameter)
    )


def _in_words(facts: Sequence[Facts]) -> str:
    return ", ".join(f"{each.shape[0]} x {each.shape[1]} {each.dtype}, {each.layout}" for each in facts)


def _zeros(x: Tensor) -> DistMatrix:
    """Zeros, the gradient of an input on which the output does not depend."""
    local = x.spec.new()
    assign(x.grid.engine, local, 0)
    return x.spec.matrix(local)
