"""Networks in stages along the axis "pipe": the layers of each rank, and the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any, NamedTuple
from weakref import WeakMethod

from ...arrays import Array, add_up
from ...comm import TAGS, Axis, Grid, call
from ...errors import Pmm3dError
from ...layout import PIPE, part_sizes
from ...product import DistMatrix
from ...product.constructors import Library
from ..compute import override
from ..containers import Sequential
from ..contexts import no_grad
from ..dry import Facts, dry_grid
from ..exchange import StrPath, export_torch
from ..gradient_buffer import GradientBuffer
from ..module import Module
from ..parameter import Parameter
from ..recompute_budget import Budget, Chosen
from ..seeds import Seeds, check_grid
from ..tape import Tape
from ..tensor import Tensor, as_tensor, summed
from ..tiled import TiledHead
from .budget import choices_of
from .cut import Cost, cut_by_cost
from .named import Schedule, is_file, schedule_of, table_of
from .parts import Make, adamw_bytes, as_tuple, description, made_by, parameters_of
from .simulation import simulate
from .table import PipelineError, PipelineSchedule, with_messages

Cut = Sequence[int] | str | None
REMEMBERED = 64
"""Number of input shapes whose dry passes are cached."""


class Arrived(NamedTuple):
    """Inputs of a layer in a dry forward pass, and costs of all earlier layers: calls of layers with random numbers,
    operations of GEMMs, and bytes saved for the backward pass."""

    tensors: tuple[Facts, ...]
    calls: dict[Module, int]
    flop: float
    saved: int


class Pipeline(Module):
    """Network that is cut into stages for the ranks along the axis "pipe".

    Parameters
    ----------
    grid : Grid
        The whole grid. Without an axis "pipe", one rank holds all stages.
    make : callable
        make(grid) returns the whole network as a `Sequential`, such as an MLP. The function is called twice, first on a
        grid without data, then on this rank's stage. Parameters of other stages get no memory. All calls on all ranks
        must make the same network.
    schedule : str, path, PipelineSchedule or callable
        A name of `pipeline.schedule_names()`, the path of a CSV file, a table, or a function (ranks, micro-batches) ->
        table. Default: "1f1b".
    cut : sequence of int, str, or None
        Number of layers of each stage. "cost" minimizes the operations of the largest stage. Only layers with
        parameters count. Each other layer belongs to the layer before it. Default: as evenly as possible.
    like : DistMatrix or None
        For cut="cost": inputs of a micro-batch, or a matrix of the same shape, type and layout.
    memory : float or None
        For cut="cost": limit, in bytes, of a rank's weights, gradients, AdamW state and activations. Default: no limit.

    Attributes
    ----------
    parent_grid, grid : Grid
        The whole grid, and the grid of this rank's stage.
    index, depth : int
        Index of this rank along "pipe", and number of stages that a micro-batch passes through.
    stages, rank_of : dict
        Stage -> layers, for the stages of this rank. Stage -> index along "pipe". With DualPipe, two copies of the
        network are stages 0 to n-1 and n to 2n-1.
    tied : dict
        Name -> stages, for weights that several stages hold.
    all_names : tuple of str
        Names of the parameters of the whole network.
    dry : Module
        The whole network without data.
    budget : Budget or None
        With a number of bytes as `recompute`: `budget.chosen` is the choice for this rank in words.

    Raises
    ------
    PipelineError
        On every rank, if a schedule or a cut does not fit the grid and the network.
    Pmm3dError
        On every rank, if `make` does not return a Sequential, or returns a different network in its second call.

    Notes
    -----
    For every cut, parameters have the names and the initial values of the whole network. `parameters()` returns the
    parameters of this rank. net(x) runs the forward pass and returns the same result on all ranks. Several calls can
    overlap. With several ranks along "pipe", a call is not recorded: train with `training.step.train_step`. For each
    micro-batch, a stage sends its outputs to the next stage and the gradients of its inputs to the stage before.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     net = nn.Pipeline(grid, lambda stage: nn.MLP(stage, [8, 16, 3]), schedule="zb-h1")
    ...     x = DistMatrix.random(grid, (4, 8), dtype="float32")
    ...     list(net.stages), list(net.named_parameters()), net(x).shape
    ([0], ['0.weight', '0.bias', '2.weight', '2.bias'], (4, 3))
    """

    under_way, replays = False, True

    def __init__(
        self,
        grid: Grid,
        make: Make,
        *,
        schedule: Schedule = "1f1b",
        cut: Cut = None,
        like: DistMatrix | None = None,
        memory: float | None = None,
    ):
        check_grid("Pipeline", grid)
        self._parent_grid, self.grid, self._schedule = grid, grid.stage, schedule
        self._tables, self._passes = dict[int, PipelineSchedule](), dict[tuple[Facts, ...], list[Arrived]]()
        self.index = self.pipe.index if self.ranks > 1 else 0
        inputs = None if like is None else Facts.of(like)
        with grid.collective_call("Pipeline", cut, memory, str(inputs), always=True):
            table = self._table(None)
            self.rank_of, self.depth = table.stages, len(table.chains[0])
            self.dry, made = made_by(make, dry_grid(self.grid), None)
            if (cut == "cost") != (like is not None) or (memory is not None and cut != "cost"):
                raise PipelineError(
                    'Pipeline: cut="cost" needs like=, the inputs of a micro-batch. Other cuts take '
                    f"neither like nor memory; got cut={cut!r}"
                )
            self._bounds = self._cut(cut, table, inputs, memory)
        self._bounds = grid.comm.bcast(self._bounds) if cut == "cost" else self._bounds  # rank 0 has the largest shards
        own = [stage for stage, rank in self.rank_of.items() if rank == self.index]
        places = sorted({place for stage in own for place in self._places(stage)})
        held = {*parameters_of(self.dry.layers[place] for place in places)}
        names = {parameter: name for name, parameter in self.dry.named_parameters().items()}
        described = [(name, parameter.shape, parameter.dtype) for parameter, name in names.items()]
        with grid.collective_call("Pipeline: make", str(Seeds.of(grid)), str(table), self._bounds, str(described)):
            pass
        network, again = made_by(make, self.grid, [parameter in held for parameter in made])
        if [each.shape for each in again] != [each.shape for each in made]:
            raise Pmm3dError(
                "Pipeline: the second call of make returned a network with other parameters. Each call "
                "must make the same network"
            )
        numbered = [*network._numbered()]
        self._layers = [numbered[place] for place in places]
        self.stages = {
            stage: Sequential(self.grid, *(numbered[place][1] for place in self._places(stage))) for stage in own
        }
        self.budget: Budget | Chosen | None = network.budget
        same: list[Any] = [
            (self.dry.layers[place], network.layers[place])
            for place in places
            if isinstance(network.layers[place], Module)
        ]
        self._names = {parameter: names[dry] for dry, parameter in zip(*map(parameters_of, zip(*same)))}
        self.all_names = tuple(names.values())
        self.tied = self._tied()
        self._again: dict[int, set[Parameter]] = {stage: set() for stage in own}
        """Stage -> tied weights that an earlier stage of this rank also holds."""
        for name, parameter in self.named_parameters().items():
            stages, parameter.parent_grid = self.tied.get(name, ()), grid
            parameter.in_norm = not stages or self.rank_of[stages[0]] == self.index
            for stage in [each for each in stages if each in self.stages][1:]:
                self._again[stage].add(parameter)
        self._random = {
            module: dry
            for one, other in same
            for (_, dry), (_, module) in zip(one.named_modules(), other.named_modules())
            if hasattr(module, "calls")
        }

    @property
    def parent_grid(self) -> Grid:
        return self._parent_grid

    @property
    def ranks(self) -> int:
        """Number of ranks along the axis "pipe"."""
        return self.parent_grid.shape.stages

    @property
    def pipe(self) -> Axis:
        """The axis "pipe"."""
        return self.parent_grid.axis(PIPE)

    @property
    def size(self) -> int:
        """Number of parameters of the whole network."""
        return self.dry.size

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """(name in the whole network, layer) of each layer of this rank."""
        return iter(self._layers)

    def named_parameters(self) -> dict[str, Parameter]:
        named = {self._names.get(parameter, name): parameter for name, parameter in super().named_parameters().items()}
        for name, parameter in named.items():
            parameter.name = name
        return named

    def _facts(self) -> list[Any]:
        apart = [fact for _, buffer in self._apart() for fact in (buffer, buffer.array)]
        return [self.training, *self.stages, *self.stages.values(), *apart]

    def _gradient_buffers(self) -> list[tuple[str, GradientBuffer]]:
        return [*super()._gradient_buffers(), *self._apart()]

    def _apart(self) -> list[tuple[str, GradientBuffer]]:
        """As `_gradient_buffers`, of the tied weights' later stages of this rank."""
        return [
            (parameter.name, parameter.grad_buffer.apart[stage])
            for stage, parameters in self._again.items()
            for parameter in parameters
            if stage in parameter.grad_buffer.apart
        ]

    def random_state(self) -> dict[str, int]:
        return self.dry.random_state()

    def set_random_state(self, state: dict[str, int]) -> None:
        self.dry.set_random_state(state)

    def settle(self, features: int, dtype: str | None = None, library: Library | None = None) -> Any:
        settled = self.dry.settle(features, dtype, library)
        self._passes.clear()
        self._move_as(self.dry)
        return settled

    def table(self, micro_batches: int) -> PipelineSchedule:
        """Return the table of a step of this many micro-batches, with messages.

        Raises PipelineError if the schedule does not support this number, needs stages on other ranks, or has more
        messages than tags.
        """
        if micro_batches not in self._tables:
            table = self._table(micro_batches)
            if table.stages != self.rank_of or len(table.chains[0]) != self.depth:
                raise PipelineError(
                    f"{table.name}: with {micro_batches} micro-batches, stages are on the ranks "
                    f"{table.stages}, but in this network on {self.rank_of}. Make another Pipeline for "
                    "this number of micro-batches"
                )
            table = with_messages(table)
            if max((each.number for each in table._messages.values()), default=0) >= TAGS:
                raise PipelineError(
                    f"{table.name}: a rank sends another rank more than {TAGS:,} messages in a step. "
                    "Use fewer micro-batches, or fewer stages on a rank"
                )
            self._tables[micro_batches] = table
        return self._tables[micro_batches]

    def _table(self, micro_batches: int | None) -> PipelineSchedule:
        """Checked table without messages. None accepts any number of micro-batches."""
        source = self._schedule
        if isinstance(source, (str, PathLike)) and is_file(str(source)):  # read once: the file may change during a run
            self._schedule = schedule_of(source, None, None)
        return table_of(self._schedule, self.ranks, micro_batches)

    def _places(self, stage: int) -> range:
        """Numbers of a stage's layers in the whole network."""
        return range(self._bounds[stage % self.depth], self._bounds[stage % self.depth + 1])

    def _kinds_of_ranks(self) -> list[Any]:
        """For each rank along pipe, a description that is equal for ranks with the same computation."""
        layers = [description(layer, {}) for layer in self.dry.layers]
        return [
            [
                (
                    stage % self.depth == 0,
                    stage % self.depth == self.depth - 1,
                    [layers[place] for place in self._places(stage)],
                )
                for stage, holder in sorted(self.rank_of.items())
                if holder == rank
            ]
            for rank in range(self.ranks)
        ]

    def _cut(self, cut: Cut, table: PipelineSchedule, inputs: Facts | None, memory: float | None) -> list[int]:
        """Number of the first layer of each stage, and the end of the last stage."""
        layers, stages = self.dry.layers, self.depth
        begins = [place for place, layer in enumerate(layers) if parameters_of([layer])]
        if len(begins) < stages:
            raise PipelineError(
                f"Pipeline: the network has {len(begins)} layers with parameters, too few for {stages} "
                "stages. Use a deeper network, fewer ranks along pipe, or fewer stages on a rank"
            )
        even = part_sizes(len(begins), stages)
        counts: Any = even if cut is None else cut
        if inputs is not None:
            arrived, ends = self._arriving((inputs,)), [0, *begins[1:], len(layers)]
            costs = [
                Cost(
                    arrived[end].flop - arrived[begin].flop,
                    adamw_bytes(layers[begin:end]),
                    arrived[end].saved - arrived[begin].saved,
                )
                for begin, end in pairwise(ends)
            ]
            ranks = [[rank for each, rank in self.rank_of.items() if each % stages == stage] for stage in range(stages)]
            counts = cut_by_cost(costs, ranks, simulate(table).peak_live, memory)
        if isinstance(counts, str) or (len(counts), sum(counts)) != (stages, len(begins)) or min(counts) < 1:
            raise PipelineError(
                f'Pipeline: the cut {counts!r} is neither "cost" nor {stages} numbers of at least 1 '
                f"with the sum {len(begins)}, the number of layers with parameters, such as {even}"
            )
        return [0, *(begins[first] for first in accumulate(counts[:-1])), len(layers)]

    def _tied(self) -> dict[str, tuple[int, ...]]:
        held = {
            stage: {*parameters_of(self.dry.layers[place] for place in self._places(stage))} for stage in self.rank_of
        }
        stages_of = {
            name: tuple(stage for stage in self.rank_of if parameter in held[stage])
            for name, parameter in self.dry.named_parameters().items()
        }
        return {name: stages for name, stages in stages_of.items() if len(stages) > 1}

    @contextmanager
    def _separate_tied_gradients(self, stage: int) -> Iterator[None]:
        """Context of a stage's backward passes. A weight that an earlier stage of this rank also holds gets a separate
        gradient buffer until `_sum_tied`. So the order of sums does not depend on how stages are placed on ranks."""
        with ExitStack() as stack:
            for parameter in self._again[stage]:
                stack.enter_context(override(parameter, grad_buffer=self._buffer(stage, parameter)))
            yield

    def _buffer(self, stage: int, parameter: Parameter) -> GradientBuffer:
        """Gradient buffer of a tied weight for a stage of this rank."""
        main = parameter.grad_buffer
        if parameter not in self._again[stage]:
            return main
        buffer = main.apart.get(stage)
        if buffer is None or buffer.of is not main.of:
            buffer = main.apart[stage] = GradientBuffer(main.of, main.precision)
        elif buffer.times_forgotten != main.times_forgotten:
            parameter.tape.parallel.gradients.forget(buffer)
        buffer.split_over, buffer.scattered = main.split_over, main.scattered
        buffer.times_forgotten = main.times_forgotten
        return buffer

    def _sum_tied(self, part_of: Callable[[GradientBuffer], Array | None] | None = None) -> None:
        """Sum an array of each tied weight over its stages, in ascending order. Each rank gets the sum in the array of
        its first stage. Collective. part_of: the array, or None if there is none on any rank. Default: the gradient,
        after all passes of a step."""
        own = self.named_parameters() if self.tied else {}
        if own and part_of is not None and self.ranks > 1:  # maybe before the first step
            self.pipe.choose_transport(next(iter(own.values())).library)
        for name, stages in self.tied.items():
            if name not in own or not own[name].requires_grad:
                continue
            parameter, ranks = own[name], [self.rank_of[stage] for stage in stages]
            of, spec = part_of or _finished, parameter.grad_buffer.spec
            parts = {stage: of(self._buffer(stage, parameter)) for stage in stages if stage in self.stages}
            main = parts[min(parts)]
            if main is None:
                continue
            if part_of is not None:
                spec = spec.typed(parameter.library.dtype(main))
            waiting = [
                self.pipe.send(part, rank, agreed=True)
                for part in parts.values()
                for rank in dict.fromkeys(ranks)
                if rank != self.index
            ]
            for stage, rank in zip(stages, ranks):
                if rank != self.index:
                    parts[stage] = spec.new(tuple(main.shape))
                    waiting.append(self.pipe.receive(parts[stage], rank, agreed=True))
            for pending in waiting:
                pending.wait()
            total = spec.new(tuple(main.shape))
            add_up(parameter.library, [parts[stage] for stage in stages], total)
            main[...] = total

    def _incoming(self, stage: int, x: DistMatrix | Tensor) -> tuple[Facts, ...]:
        """Facts of a stage's inputs, for a micro-batch like x."""
        return self._arriving((Facts.of(x),))[self._places(stage).start].tensors

    def _arriving(self, inputs: tuple[Facts, ...]) -> list[Arrived]:
        """Inputs of each layer, and outputs of the network, from a cached forward pass without data."""
        if inputs not in self._passes:
            grid, arrived = self.dry.grid, list[Arrived]()
            values = tuple(as_tensor(facts.on(grid)) for facts in inputs)
            before, run = self.random_state(), grid.dry_run
            random = {module: module.calls for _, module in self.dry.named_modules() if hasattr(module, "calls")}
            assert run is not None
            for layer in (*self.dry.layers, None):
                calls = {module: module.calls - first for module, first in random.items()}
                flop = sum(2.0 * each.m * each.n * each.k for each in run.actions if each.what == "gemm")
                facts = tuple(Facts.of(summed(value)) for value in values)
                arrived.append(Arrived(facts, calls, flop, run.held.get("activations", 0)))
                layer = layer.module if isinstance(layer, TiledHead) else layer  # of which the loss computes tiles
                values = values if layer is None else as_tuple(layer(*values))
            self.set_random_state(before)
            run.actions.clear()
            if len(self._passes) == REMEMBERED:
                self._passes.clear()
            self._passes[inputs] = arrived
        return self._passes[inputs]

    def _choose(self, inputs: Sequence[DistMatrix | Tensor]) -> None:
        """Set what the stages of this rank recompute in a step of these micro-batches, if the network has a budget.

        The budget holds for all micro-batches in flight. Every rank computes the choices of all ranks from a dry run of
        the largest micro-batch, in which all parameters are trained. Raises PipelineError or Pmm3dError, on every rank,
        if a rank has no choice.
        """
        budget = self.budget
        if not isinstance(budget, Budget):
            return
        largest = max(inputs, key=lambda x: x.shape[0])
        key, make = (Facts.of(largest), len(inputs)), lambda: choices_of(self, budget, largest, len(inputs))
        chosen = budget.stored(Tape.of(self.grid), key, make)
        for module, layers in zip(self.stages.values(), chosen):
            module.budget = layers

    def export(self, path: StrPath, names: str | None = None) -> None:
        """Write the weights of all stages; arguments as in `nn.exchange.export_torch`. Collective."""
        export_torch(self, path, names=names)

    def _run(self, stage: int, micro: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of a micro-batch's forward pass through a stage of this rank. Only outputs of the last stage can have
        partial sums. Random numbers depend on the micro-batch and on the passes counted by `_count_passes`."""
        if self._random:
            arrived = next(iter(self._passes.values()), None) or self._arriving(tuple(map(Facts.of, inputs)))
            call(self.grid.engine, self._set_calls, stage, micro, arrived)
        made = as_tuple(self.stages[stage](*inputs))
        return made if stage % self.depth == self.depth - 1 else tuple(map(summed, made))

    def _set_calls(self, stage: int, micro: int, arrived: list[Arrived]) -> None:
        """Set the call counters of a stage's layers with random numbers for a micro-batch of the next step."""
        begin, end = arrived[self._places(stage).start].calls, arrived[-1].calls
        for _, module in self.stages[stage].named_modules():
            if dry := self._random.get(module):
                module.calls = dry.calls + micro * end[dry] + begin[dry]

    def _check_ended(self) -> None:
        """Raise PipelineError if an earlier step did not end."""
        if self.under_way:
            raise PipelineError(
                "an earlier step of this pipeline ended with an error on this rank, so messages "
                "between stages are still in flight. Make a new grid and a new Pipeline"
            )

    def _starts_and_ends(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """`_begin_step` and `_end_step`. A recorded step that calls them does not keep the network alive."""
        begin, end = WeakMethod(self._begin_step), WeakMethod(self._end_step)
        return lambda buffers: begin()(buffers), lambda micro_batches: end()(micro_batches)  # type: ignore[misc]

    def _begin_step(self, buffers: Sequence[GradientBuffer]) -> None:
        """Begin a step that sums gradients in these buffers."""
        self._check_ended()
        self.under_way = self.ranks > 1
        begin_step(self.grid, buffers)
        for stage, parameters in self._again.items():
            for parameter in parameters:
                self._buffer(stage, parameter)

    def _end_step(self, micro_batches: int) -> None:
        self.under_way = False
        self._count_passes(micro_batches)

    def _count_passes(self, micro_batches: int) -> None:
        """Advance the call counters of layers with random numbers by this number of micro-batches."""
        if self.training and self._passes:
            for module, times in next(iter(self._passes.values()))[-1].calls.items():
                module.calls += times * micro_batches

    def forward(self, *inputs: Tensor, end: tuple[Callable[..., Tensor], Facts] | None = None) -> Any:
        """Outputs of the network, on all ranks. end: a function of the outputs, which the last stage calls, and the
        facts of its result. All ranks then get this result instead."""
        if self.ranks > 1 and inputs[0].tape.recording and not inputs[0].tape.summing:  # in a step of `train_step`
            raise PipelineError(
                "a Pipeline inside another network is not trained, because its layers would get no "
                "gradient. Make all layers in its make, and pass the Pipeline itself to train_step"
            )
        arrived, values = self._arriving(tuple(map(Facts.of, inputs))), inputs
        if self.ranks == 1 and inputs[0].tape.recording:
            self._choose(inputs[:1])
        with nullcontext() if self.ranks == 1 else no_grad(self.grid):
            for stage in range(self.depth):
                before, here = self.rank_of.get(stage - 1, self.rank_of[stage]), self.rank_of[stage]
                values = self._handed_over(values, arrived[self._places(stage).start].tensors, before, [here])
                if here == self.index:
                    values = self._run(stage, 0, *values)
        self._count_passes(1)
        last, facts = self.rank_of[self.depth - 1], arrived[-1].tensors
        if end is not None:
            values, facts = (end[0](*values),) if last == self.index else values, (end[1],)
        values = self._handed_over(tuple(map(summed, values)), facts, last, range(self.ranks))
        return values if len(values) > 1 else values[0]

    def _handed_over(
        self, values: tuple[Tensor, ...], facts: tuple[Facts, ...], source: int, targets: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Send the tensors of one rank along the axis to other ranks. Returned tensors may still be in flight."""
        others = [target for target in targets if target != source]
        for kind in dict.fromkeys(each.library for each in facts if self.ranks > 1):
            self.pipe.choose_transport(self.grid.library(kind))
        if self.index in others:
            matrices = [each.on(self.grid) for each in facts]
            return tuple(
                Tensor(matrix, pending=self.pipe.receive(matrix.local, source, agreed=True)) for matrix in matrices
            )
        for value in values if self.index == source else ():
            for target in others:
                self.pipe.send(value.local, target, agreed=True)
        return values


def begin_step(grid: Grid, buffers: Sequence[GradientBuffer]) -> None:
    """Discard the gradients and the recorded actions of the step before."""
    grid.ledger.actions.clear()
    Tape.of(grid).parallel.gradients.forget(*buffers)  # an earlier step may have ended with an error


def _finished(buffer: GradientBuffer) -> Array:
    """This rank's part of the summed gradient in the optimizer's layout, or zeros if there is no gradient."""
    buffer.wait()
    if buffer.layout is None:
        buffer.scattered_array()[0][...] = 0
    elif buffer.layout != buffer.target:
        buffer.array = buffer.spec.library.copy(buffer.in_layout(buffer.target))
        buffer.layout = buffer.target
    return buffer.local
