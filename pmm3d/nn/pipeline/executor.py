"""Carries out a step of training by the table of its pipeline: this rank's passes and messages, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from ...comm import TAGS, Axis, Pending
from ...layout import PIPE
from ...product import DistMatrix
from ..dry import Facts
from ..module import Module
from ..tape import Edge, Tape, WeightProducts, defer_weights
from ..tensor import Tensor, as_tensor, backward_from, whole
from .schedules import one_f_one_b
from .simulation import Timed
from .table import COMPUTING, Action, PipelineError, PipelineSchedule

AHEAD = 8
"""Receives among the next so many actions are posted: the message of a pass arrives during the pass before it."""
LossOf = Callable[[int, Any], Tensor]
"""loss(micro-batch, output): what the micro-batch adds to the loss of the step."""


class Executor:
    """One step on this rank.

    Receives are posted early, each with a tag of its own, so that no message waits behind another one. A rank waits for
    a message when it needs it, and for its sends at the end of the step: no order of messages can deadlock. Stages on
    one rank hand over without a message. The sums of a stage's gradients over data begin with its last W. Contributions
    to a gradient are added in ascending order of micro-batches, so that all schedules give the same bits.

    network   a Pipeline; any other Module is a pipeline of one stage
    inputs    of the micro-batches
    scale     factor of the losses in backward passes
    ends      whether micro-batches end on this rank: it has a last stage
    timed     the passes that were carried out, in seconds of `time.perf_counter`

    Raises, on every rank, PipelineError for a number of micro-batches that the schedule refuses.
    """

    def __init__(self, network: Module, inputs: Sequence[DistMatrix], scale: float = 1.0):
        self._grid, self._inputs, self._scale = network.grid, inputs, scale
        self._network: Any = network
        self._stages, self._table, index = _parts_of(network, len(inputs))
        self._line = self._table.actions[index]
        if self._table.ranks > 1:
            self._pipe: Axis = network.grid.whole.axis(PIPE)
            self._pipe.choose_transport(inputs[0].library)
        if max((each.number for each in self._table.messages.values()), default=0) >= TAGS:
            raise PipelineError(f"{self._table.name}: a rank sends another one more than {TAGS:,} messages in a step. "
                                "Use fewer micro-batches, or fewer chunks")
        self._receives = deque((place, each) for place, each in enumerate(self._line) if each.kind.startswith("RECV"))
        self._posted, self._sends = dict[Action, list[Pending]](), list[Pending]()
        self._values = dict[tuple[str, int, int], Sequence[DistMatrix]]()
        """("F", stage, micro-batch): input of the stage; ("B", stage, micro-batch): gradient of its output."""
        self._passes = dict[tuple[int, int], tuple[list[Tensor], list[Edge | None]]]()
        """(stage, micro-batch) -> input, and what made the output; from the forward to the backward pass."""
        self._queues = dict[tuple[int, int], WeightProducts]()
        self._losses, self.timed = dict[int, Tensor](), list[Timed]()
        self.ends = any(chain.stop - 1 in self._stages for chain in self._table.chains)

    def run(self, loss: LossOf | None) -> list[Tensor]:
        """Carry out this rank's line. Return the losses of the micro-batches that end on this rank. loss: None if there
        are none."""
        tape = Tape.of(self._grid)
        last = {each.stage: each for action in self._line for each in action.each if each.kind in ("B", "W")}
        marked = {stage: [parameter.accumulated.queues for parameter in module.parameters()]
                  for stage, module in self._stages.items()}
        for stage, queues in marked.items():  # sums of a marked gradient do not begin
            for queue in queues:
                queue.add(stage)
        try:
            for place, action in enumerate(self._line):
                self._post(place)
                begun = perf_counter()
                for each in action.each:
                    ends = each == last[each.stage]
                    for queue in marked[each.stage] if ends else ():
                        queue.discard(each.stage)
                    with tape.set(syncing=ends):
                        self._carry_out(each, loss)
                if action.kind in COMPUTING:
                    self.timed.append(Timed(begun, perf_counter(), action))
            for send in self._sends:
                send.wait()
        finally:
            for stage, queues in marked.items():
                for queue in queues:
                    queue.discard(stage)
        return [self._losses[micro] for micro in sorted(self._losses)]

    def _carry_out(self, action: Action, loss: LossOf | None) -> None:
        kind, stage, micro, _ = action
        if kind == "F":
            self._forward(stage, micro, loss)
        elif kind == "W":
            self._queues.pop((stage, micro)).drain()
        elif kind in ("I", "B"):
            self._backward(kind, stage, micro)
        elif kind.startswith("RECV"):
            for pending in self._posted.pop(action):
                pending.wait()
        else:
            self._send(action)

    def _forward(self, stage: int, micro: int, loss: LossOf | None) -> None:
        chain = self._table.chain_of[micro]
        inputs = [as_tensor(self._inputs[micro])] if stage == chain.start else [
            Tensor(value, requires_grad=True) for value in self._values.pop(("F", stage, micro))]
        made = self._stages[stage](*inputs)
        if stage == chain.stop - 1:
            assert loss is not None
            outputs = [loss(micro, made)]
            self._losses[micro] = outputs[0]
        else:
            outputs = [whole(each) for each in (made if isinstance(made, tuple) else (made,))]
            self._values["F", stage + 1, micro] = [output.value for output in outputs]
        self._passes[stage, micro] = inputs, [output.edge for output in outputs]

    def _backward(self, kind: str, stage: int, micro: int) -> None:
        inputs, edges = self._passes.pop((stage, micro))
        with defer_weights(self._grid) if kind == "I" else nullcontext() as queue:
            if stage == self._table.chain_of[micro].stop - 1:
                self._losses[micro].backward(scale=self._scale)
            else:
                gradients = self._values.pop(("B", stage, micro))
                starts = [(edge, gradient.local) for edge, gradient in zip(edges, gradients) if edge is not None]
                if starts:  # else nothing up to this stage learns
                    backward_from(starts, self._scale)
        if queue is not None:
            self._queues[stage, micro] = queue
        if stage > self._table.chain_of[micro].start:
            self._values["B", stage - 1, micro] = [x.grad if x.grad is not None else _zeros(x) for x in inputs]

    def _post(self, place: int) -> None:
        """Post the receives among the next actions."""
        while self._receives and self._receives[0][0] < place + AHEAD:
            action = self._receives.popleft()[1]
            kind, stage, micro, _ = action
            message, incoming = self._table.messages[action], self._network.incoming(stage + (kind == "RECV_B"),
                                                                                     self._inputs[micro])
            self._values[kind[-1], stage, micro] = values = [self._buffer(facts) for facts in incoming]
            self._posted[action] = [self._pipe.receive(value.local, message.source, tag=message.number, agreed=True,
                                                       message=str(message)) for value in values]

    def _buffer(self, facts: Facts) -> DistMatrix:
        """A matrix to be received, in work memory."""
        box = facts.layout.box(facts.shape, self._grid.shape, self._grid.coords)
        local = self._grid.workspace.array(box.shape, facts.dtype, self._grid.library(facts.library))
        return DistMatrix(self._grid, local, facts.shape, facts.layout)

    def _send(self, action: Action) -> None:
        message = self._table.messages[action]
        kind, stage, micro, _ = message.receive
        for value in self._values.pop((kind[-1], stage, micro)):
            self._sends.append(self._pipe.send(value.local, message.target, tag=message.number, agreed=True,
                                               message=str(message)))


def _parts_of(network: Any, micro_batches: int) -> tuple[Mapping[int, Module], PipelineSchedule, int]:
    """The stages of a network on this rank, its table, and this rank's index in it."""
    if hasattr(network, "stages"):
        return network.stages, network.table(micro_batches), network.index
    return {0: network}, one_f_one_b(1, micro_batches), 0


def _zeros(x: Tensor) -> DistMatrix:
    """The gradient of an input that the output does not depend on."""
    local = x.form.new()
    local[...] = 0
    return x.form.matrix(local)
