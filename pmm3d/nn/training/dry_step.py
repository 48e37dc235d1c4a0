"""A step of a configuration without data: what a rank of any grid does in it, in order, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import NamedTuple

from ...arrays.action import Action
from ...comm import Grid
from ...errors import DataError, Pmm3dError
from ...io import DataSet
from ...layout import GridShape, batch_layout, itemsize
from ..dry import Facts, memory
from ..layers import Module
from ..overlap import Overlap
from ..tape import Tape
from .config import Config
from .fitting import check_targets, labels_of, parts_of
from .own_network import OwnNetwork
from .parts import layer_sizes, loss_of, make_network, make_optimizer
from .passes import Event
from .rehearsal import Rehearsal, settle

STEPS = 2
"""From the second step on it is known which weight is needed next, and there is an optimizer's state."""
REMEDY = ("Where the data is not here yet, say what it will be: --features and --outputs of pmm3d plan (samples= in a "
          "program), and --classes for labels")


class SampleSizes(NamedTuple):
    """features   columns of the input
    outputs    columns of the network's output: of the targets, or the number of classes
    classes    whether the targets are labels
    rows       that are trained on; 0 if that is not known: at least a batch
    """

    features: int
    outputs: int
    classes: bool = False
    rows: int = 0


class Step(NamedTuple):
    """actions    of a rank in one step, in their order; nothing is under way before the first and after the last
    memory     bytes by kind that it holds at most: "weights", "gradients", "state" of the optimizer, "work" (buffers of
               the workspace), "batches" that the loader reads ahead
    flop       of its GEMMs
    received   bytes, in all collectives
    """

    actions: list[Action]
    memory: dict[str, int]
    flop: float
    received: int


def sizes_in_file(config: Config) -> SampleSizes:
    """What the data file of a configuration says of its samples. Rows are read only where nothing but the labels tells
    the number of classes, and for what tells one file from another.

    Raises Pmm3dError if the file is not there, with what to do instead, or does not fit the configuration.
    """
    section = config.data
    if not Path(section.file).exists():
        raise DataError(f"cannot open {section.file}: there is no such file. {REMEDY}")
    with Grid.dry((1, 1, 1)) as alone, DataSet(
            alone, section.file, section.inputs, section.targets, dtype=config.network.dtype, classes=section.classes,
            labels=labels_of(config)) as data:
        check_targets(config, data)
        rows = len(parts_of(config, data)[0])
        classes = loss_of(config, data.classes is not None) == "cross_entropy"
        return SampleSizes(data.features, data.classes or data.outputs if classes else data.outputs, classes, rows)


class DrySteps:
    """Steps of a configuration on any grid.

    samples   of the data; left out: what its file says
    keep      bytes of gathered weights that a rank keeps after the forward pass, where overlap.reshard_after_forward
              leaves that open; a run keeps a quarter of the memory that is free

    Raises Pmm3dError for a data file that is not there and a network of one's own that does not run.
    """

    def __init__(self, config: Config, samples: tuple[int, ...] | SampleSizes | None = None, keep: int = 0):
        self.config, self.keep = config, keep
        given = None if samples is None else SampleSizes(*samples)  # type: ignore[arg-type]
        self.samples = sizes_in_file(config) if given is None else _checked(given)
        self.loss = loss_of(config, self.samples.classes)
        self._own: OwnNetwork | None = None
        if config.network.build:
            with Grid.dry((1, 1, 1)) as alone:
                self._own = OwnNetwork(alone, config.network, config.precision, config.training.seed)

    def accumulating(self, batches: int) -> DrySteps:
        """The same, but for steps of so many batches."""
        made = copy(self)
        training = self.config.training.model_copy(update={"accumulate": batches})
        made.config = self.config.model_copy(update={"training": training})
        return made

    @property
    def rows(self) -> int:
        """Of a batch."""
        return min(self.config.data.batch_size, self.samples.rows or self.config.data.batch_size)

    def network(self, dry: Grid) -> Module:
        """The network, on a grid without data."""
        sizes = layer_sizes(self.config, self.samples.features, self.samples.outputs)
        return make_network(self.config, dry, sizes, self._own)[0]

    def of(self, shape: GridShape, ranks_per_node: int, rank: int = 0) -> Step:
        """The step of a rank. Raises Pmm3dError for what the grid, the network or the loss refuses."""
        others = {name: getattr(shape, name) for name in shape.names[4:]}
        hosts = -(-shape.size // max(1, ranks_per_node))
        with Grid.dry(shape[:3], shape.data, rank, others, hosts) as dry, self._explained():
            rehearsal, event, batch = rehearsed(self.config, dry, self.samples, self.loss, self._own, self.keep)
            actions = dry.dry_run.actions  # type: ignore[union-attr]
            for _ in range(STEPS):
                actions.clear()
                rehearsal.run(event)
                settle(dry)
            flop = sum(2.0 * action.m * action.n * action.k for action in actions if action.what == "gemm")
            received = sum(action.received for action in actions if action.what == "begin")
            ahead = (self.config.data.prefetch + 2) * batch
            return Step(actions, {**memory(dry), "batches": ahead}, flop, received)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """As a context: what a network of one's own raises since there are no values, as what it is."""
        try:
            yield
        except Pmm3dError:
            raise
        except Exception as error:
            if self._own is None:
                raise
            raise Pmm3dError(f"network.build = {self._own.name} does not run without data, as planning does: "
                             f"{type(error).__name__}: {error}. Name the grid") from error


def step_of(config: Config, shape: GridShape, ranks_per_node: int, rank: int = 0,
            samples: tuple[int, ...] | SampleSizes | None = None, keep: int = 0) -> Step:
    """The step of a rank of a grid of that shape, by a dry run of the code that trains. Arguments and errors as of
    `DrySteps`; ranks fill node after node.

        >>> from .config import checked
        >>> config = checked({"data": {"file": "x.h5", "batch_size": 8}, "network": {"hidden": [16], "bias": False}})
        >>> step = step_of(config, GridShape(1, 1, 2), 2, samples=(4, 4))
        >>> [str(action) for action in step.actions if action.what == "gemm"][:2], step.memory["weights"]
        (['gemm 4 x 16 x 4 float32', 'gemm 4 x 4 x 16 float32'], 256)
    """
    return DrySteps(config, samples, keep).of(shape, ranks_per_node, rank)


def rehearsed(config: Config, dry: Grid, samples: SampleSizes, loss: str, own: OwnNetwork | None,
              keep: int = 0) -> tuple[Rehearsal, Event, int]:
    """On a grid without data: (what trains there, a step of full batches, bytes of one of them on its rank)."""
    parallel, section = Tape.of(dry).parallel, config.data
    parallel.overlap, parallel.weights.budget = Overlap(**config.overlap.model_dump()), keep
    network, output = make_network(config, dry, layer_sizes(config, samples.features, samples.outputs), own)
    size, kind = min(section.batch_size, samples.rows or section.batch_size), dry.library(config.network.library).kind
    x = Facts((size, samples.features), batch_layout("y"), config.network.dtype, kind)
    split = output.cols[0] if len(output.cols) == 1 else None
    y = Facts((size, samples.outputs), batch_layout(split), config.network.dtype, kind)
    if samples.classes:
        y = Facts((size, 1), batch_layout(None), "int64", kind)
    scaled = any(parameter.dtype == "float16" for parameter in network.parameters())
    rehearsal = Rehearsal(network, make_optimizer(config, network), loss, bool(config.optimizer.clip), scaled=scaled)
    batch = sum(each.layout.box(each.shape, dry.shape, dry.coords).size * itemsize(each.dtype) for each in (x, y))
    return rehearsal, Event("step", ((x, y),) * config.training.accumulate), batch


def _checked(samples: SampleSizes) -> SampleSizes:
    if min(samples.features, samples.outputs) < 1 or samples.classes and samples.outputs < 2:
        raise Pmm3dError(f"samples: {samples.features} features and {samples.outputs} outputs make no network: at "
                         "least 1 each, and 2 classes")
    return samples
