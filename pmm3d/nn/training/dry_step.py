"""Dry run of a training step: the actions and the memory of a rank of any grid, without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple

from ...action import Action
from ...arrays.dry_run import Passed
from ...comm import Grid
from ...errors import DataError, Pmm3dError
from ...io.shards import own_shards
from ...layout import GridShape, Layout, batch_layout, is_folded, itemsize
from ..dry import Facts, finish_all, memory
from ..feedback import feedback_bytes
from ..loss_scale import LossScale
from ..memory_trace import MemoryTrace, trace_memory
from ..pipeline import PipelineSchedule
from ..pipeline.network import Pipeline
from ..tape import Tape
from .config import Config
from .evaluation import loss_named
from .network import Own, inputs_of, layer_sizes, make_ema, make_network, make_optimizer, set_messages, set_offload
from .samples import SampleSizes, check_class_weights, loss_of, sizes_in_file
from .step import train_step

REMEDY = (
    "If the data file does not exist yet, give the sizes of its samples: --features and --outputs of pmm3d plan "
    "(samples= in a program), and --classes for labels"
)


class Step(NamedTuple):
    """One step of a rank.

    actions    in their order; no collective is under way before the first one or after the last one
    memory     largest number of bytes by kind: "weights", "experts" (their weights, if there are any), "gradients",
               "state" of the optimizer, "work" (buffers of the workspace), "batches" that the loader reads ahead,
               "copies" of this rank's shards for a checkpoint in the background (only of arrays in host memory)
    flop       of the GEMMs
    received   bytes, in all collectives
    passes     of a pipeline's table;   kinds: its `Pipeline._kinds_of_ranks`
    trace      of the memory, of `DrySteps.traced`
    """

    actions: list[Action]
    memory: dict[str, int]
    flop: float
    received: int
    passes: Sequence[Passed] = ()
    kinds: Sequence[Any] = ()
    trace: MemoryTrace | None = None


class DrySteps:
    """Dry steps of a configuration on any grid, by the code that trains.

    samples        sizes of the data. Default: read from the data file
    cached_bytes   bytes of gathered weights that a rank caches after the forward pass if
                   overlap.reshard_after_forward is left out; a run keeps a quarter of its free memory
    own            what network.build and optimizer.build give, if the files were run already

    micro_batches   number of micro-batches of a step;   rows   of the largest micro-batch;   own   as given, or loaded

    Raises Pmm3dError for a data file that does not exist, and for a user's file that does not run.
    """

    def __init__(
        self,
        config: Config,
        samples: tuple[int, ...] | SampleSizes | None = None,
        cached_bytes: int = 0,
        own: Own | None = None,
    ):
        self.config, self.cached_bytes = config, cached_bytes
        for file in config.data.files if samples is None else ():
            if not file.exists():
                raise DataError(f"cannot open {file}: there is no such file. {REMEDY}")
        self.samples = sizes_in_file(config) if samples is None else _checked(SampleSizes(*samples))  # type: ignore
        self.loss, batch = loss_of(config, self.samples.classes), config.data.batch_size
        check_class_weights(config, self.samples.outputs)
        self.micro_batches = config.grid.micro_batches
        self.rows = -(-min(batch, self.samples.rows or batch) // self.micro_batches)
        if own is None:
            with Grid.dry((1, 1, 1)) as alone:
                own = Own.of(config, alone)
        self.own, self._traces = own, False

    def _with(self, **changes: Any) -> DrySteps:
        made = copy(self)
        vars(made).update(changes)
        return made

    def of_micro_batches(self, number: int) -> DrySteps:
        """Return steps of this number of micro-batches, with unchanged rows of each."""
        return self._with(micro_batches=number)

    def of_rows(self, number: int) -> DrySteps:
        """Return steps of micro-batches of this number of rows."""
        return self._with(rows=number)

    def of_settings(self, settings: Mapping[str, Any]) -> DrySteps:
        """Return steps with these values for keys such as "network.recompute". A network of network.build does not
        change."""
        sections = dict[str, dict[str, Any]]()
        for key, value in settings.items():
            section, _, name = key.partition(".")
            if section != "network" or not self.config.network.build:
                sections.setdefault(section, {})[name] = value
        changed = {name: getattr(self.config, name).model_copy(update=keys) for name, keys in sections.items()}
        return self._with(config=self.config.model_copy(update=changed)) if changed else self

    @property
    def blocks(self) -> int:
        """Number of blocks of a transformer; 0 for another network."""
        return self.config.network.layers or 0

    def of_blocks(self, number: int) -> DrySteps:
        """Return steps of a transformer of this number of blocks."""
        return self.of_settings({"network.layers": number} if self.blocks else {})

    @property
    def traced(self) -> DrySteps:
        """These steps, whose memory is traced."""
        return self._with(_traces=True)

    @property
    def unscheduled(self) -> DrySteps:
        """These steps without grid.schedule and grid.cut."""
        return self._with(config=self.config.unscheduled)

    def staged(self, table: PipelineSchedule) -> DrySteps:
        """Return steps with the stages and the micro-batches of a table. They use grid.cut if grid.pipe is the number
        of ranks of the table, otherwise an even cut."""
        section = self.config.grid
        grid = section.model_copy(
            update={"pipe": table.ranks, "schedule": table, "cut": section.cut if section.pipe == table.ranks else None}
        )
        return self._with(micro_batches=table.micro_batches, config=self.config.model_copy(update={"grid": grid}))

    def of(self, shape: GridShape, ranks_per_node: int, rank: int = 0) -> Step:
        """Return the step of a rank. Raises Pmm3dError if the grid, the network or the loss refuses it."""
        return self.each_of(shape, ranks_per_node, rank, [self.micro_batches])[0]

    def each_of(self, shape: GridShape, ranks_per_node: int, rank: int, micro_batches: Sequence[int]) -> list[Step]:
        """Return a step of each of these numbers of micro-batches, the largest first, by one dry run. The memory of
        later steps is that of the whole run. Errors as of `of`."""
        others = {name: getattr(shape, name) for name in shape.names[4:]}
        hosts = -(-shape.size // max(1, ranks_per_node))
        with Grid.dry(shape[:3], shape.data, rank, others, hosts, expert=shape.expert) as dry, self._explained():
            return [*self.each_on(dry, micro_batches)]

    def on(self, dry: Grid) -> Step:
        """Return the step of the rank of a dry grid."""
        return next(self.each_on(dry, [self.micro_batches]))

    def each_on(self, dry: Grid, micro_batches: Sequence[int]) -> Iterator[Step]:
        """Yield the steps of `each_of`, of the rank of a dry grid. The first step prefetches no weights and has no
        optimizer state, so it is run twice. Later steps are alike."""
        config, samples, stage = self.config, self.samples, dry.stage
        set_messages(config, stage)
        Tape.of(stage).parallel.weights.budget = self.cached_bytes
        sizes = layer_sizes(config, samples.features, samples.outputs)
        network, output = make_network(config, dry, sizes, self.own.network)
        optimizer, batch = make_optimizer(config, network, self.own), self._batch(dry, output)
        set_offload(config, network, optimizer)
        experts = [each for each in network.parameters() if any(map(is_folded, each.layout.rows))]
        ema = make_ema(config, network)
        scale = _Taken() if any(parameter.dtype == "float16" for parameter in network.parameters()) else None
        run = dry.dry_run
        assert run is not None
        nbytes = sum(
            each.layout.box(each.shape, stage.shape, stage.coords).size * itemsize(each.dtype) for each in batch
        )
        weights = None if config.training.class_weights is None else [1.0] * samples.outputs
        named = self.own.functions.loss if ":" in self.loss else self.loss
        loss = loss_named(named, weights, config.training.label_smoothing)
        clip = config.optimizer.clip or None
        for place, count in enumerate([micro_batches[0], *micro_batches]):
            run.actions, run.passes = [], []
            x, y = (facts.on(stage) for facts in batch)
            if config.data.sequence is not None:
                x.labels_below = y.labels_below = samples.outputs
            with trace_memory(network) if self._traces else nullcontext() as trace:
                train_step(network, optimizer, loss, [(x, y)] * count, clip, scale=scale, ema=ema)
            finish_all(dry)
            if not place:
                continue
            flop = sum(2.0 * action.m * action.n * action.k for action in run.actions if action.what == "gemm")
            received = sum(action.received for action in run.actions if action.what == "begin")
            held = {**memory(dry), "batches": (config.data.prefetch + 2) * count * nbytes}
            if experts:
                held["experts"] = sum(each.box.size * itemsize(each.dtype) for each in experts)
                held["weights"] -= held["experts"]
            if config.training.checkpoint_in_background and config.network.on_host:
                averages = {} if ema is None else ema.matrices()
                matrices = {**network.matrices(), **optimizer.matrices(network.named_parameters()), **averages}
                own = sum(shard.box.size * itemsize(shard.dtype) for shard in own_shards(matrices))
                held["copies"] = own + feedback_bytes(network)
            kinds = network._kinds_of_ranks() if isinstance(network, Pipeline) else ()
            yield Step(run.actions, held, flop, received, run.passes, kinds, trace)

    def _batch(self, dry: Grid, output: Layout) -> tuple[Facts, Facts]:
        """Return the inputs and the targets of a micro-batch."""
        samples, x = self.samples, inputs_of(self.config, dry, self.rows, self.samples.features)
        if self.config.data.sequence is not None:
            return x, x._replace(shape=(x.shape[0], 1))
        if samples.classes:
            return x, Facts((self.rows, 1), batch_layout(None), "int64", x.library)
        split = output.cols[0] if len(output.cols) == 1 else None
        return x, Facts((self.rows, samples.outputs), batch_layout(split), x.dtype, x.library)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context in which an error of the user's files becomes a Pmm3dError that names them."""
        try:
            yield
        except Pmm3dError:
            raise
        except Exception as error:
            if not self.own.names:
                raise
            raise Pmm3dError(
                f"{self.own.names} does not run without data, as planning does: "
                f"{type(error).__name__}: {error}. Name the grid"
            ) from error


class _Taken(LossScale):
    """Loss scale that skips no step, because the norm of a gradient without data is arbitrary."""

    def _update(self, norm: float) -> bool:
        return True


def step_of(
    config: Config,
    shape: GridShape,
    ranks_per_node: int,
    rank: int = 0,
    samples: tuple[int, ...] | SampleSizes | None = None,
    cached_bytes: int = 0,
) -> Step:
    """Return the step of a rank of a grid of that shape; ranks fill node after node. Arguments and errors as of
    `DrySteps`.

        >>> from .config import checked
        >>> config = checked({"data": {"file": "x.h5", "batch_size": 8}, "network": {"hidden": [16], "bias": False}})
        >>> step = step_of(config, GridShape(1, 1, 2), 2, samples=(4, 4))
        >>> [str(action) for action in step.actions if action.what == "gemm"][:2], step.memory["weights"]
        (['gemm 4 x 16 x 4 float32', 'gemm 4 x 4 x 16 float32'], 256)
    """
    return DrySteps(config, samples, cached_bytes).of(shape, ranks_per_node, rank)


def _checked(samples: SampleSizes) -> SampleSizes:
    if min(samples.features, samples.outputs) < 1 or (samples.classes and samples.outputs < 2):
        raise Pmm3dError(
            f"samples: a network needs at least 1 feature and 1 output (2 for classes); got "
            f"{samples.features} and {samples.outputs}"
        )
    return samples
