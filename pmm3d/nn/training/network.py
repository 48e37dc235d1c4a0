"""Network, optimizer and schedule of a configuration, on any grid, also a dry one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...arrays import library_named
from ...comm import Grid
from ...errors import Pmm3dError
from ...layout import Layout, batch_layout
from .. import optim
from ..containers import MLP
from ..dry import Facts
from ..keep import keep_as
from ..learning_rate import SCHEDULES, ToFloor
from ..module import Module
from ..offloaded_arrays import offload
from ..overlap import Overlap
from ..pipeline.network import Pipeline
from ..precision import Precision
from ..recorded_steps import replay
from ..seeds import manual_seed
from ..store import Store
from ..tape import Tape
from ..transformer import GPT, Llama, token_layout
from .config import Config
from .evaluation import number_of
from .samples import Samples
from .sections import AUTO, NetworkSection, configured
from .user_file import UserFile

LONGEST_WARM_UP = 100
"""Largest number of steps of schedule.warm_up = "auto"."""


def set_messages(config: Config, stage: Grid) -> None:
    """Set when the networks of a grid send messages ([overlap]), and the codecs of messages and of kept arrays
    ([memory])."""
    parallel = Tape.of(stage).parallel
    parallel.overlap = Overlap(**config.overlap.model_dump())
    parallel.compression = config.memory.compression
    keep_as(stage, config.memory.keep)


class OwnNetwork:
    """The user's function of `network.build`. Collective.

    Raises Pmm3dError, on every rank, as `UserFile`, and if the section has keys for layers.
    """

    def __init__(self, grid: Grid, section: NetworkSection, precision: Precision, seed: int):
        if others := section.own_keys:
            raise Pmm3dError(
                f"network.build = {section.build} makes its own layers: leave network.{others[0]} out, "
                "and set it in the function"
            )
        self._section, self._precision, self._seed, self.name = section, precision, seed, str(section.build)
        self._file = UserFile(grid, "network.build", self.name)
        self._function: Callable[[Grid, int, int], Any] = self._file.named("function", callable)

    @classmethod
    def of(cls, config: Config, grid: Grid) -> OwnNetwork | None:
        """The function of a configuration, or None. Collective."""
        section = config.network
        return cls(grid, section, config.precision, config.training.seed) if section.build else None

    def made(self, grid: Grid, features: int, outputs: int, config: Config | None = None) -> tuple[Module, Layout]:
        """Return (the network, the layout of its output) on this grid. Collective. config: for `pipelined`. Raises
        Pmm3dError, on every rank, if the function raises or returns no network for these sizes."""
        network, problem, layout = None, None, Layout()

        def make(stage: Grid) -> Any:
            manual_seed(stage, self._seed)
            stage.default_library = self._section.library
            made = self._function(stage, features, outputs)
            self._check(made, stage)
            return made

        try:
            with self._file.running("raised an error"):
                network = pipelined(config, grid, make, features)
                if self._section.replay:
                    replay(network)
                if config is None or config.data.sequence is None:  # layers of tokens have fixed layouts
                    output = network.settle(features, self._section.dtype, self._section.library)
                    layout = output.layout
                    if output.shape[1] != outputs:
                        raise Pmm3dError(
                            f"network.build = {self.name}: the network has {output.shape[1]} outputs; the "
                            f"data needs {outputs}: the function is called with (grid, features, outputs)"
                        )
        except Exception as raised:
            if getattr(raised, "everywhere", False):
                raise
            problem = raised
        with grid.collective_call("network.build", self.name, features, outputs, always=True):
            if problem is not None:
                raise problem
        return network, layout  # type: ignore[return-value]

    def _check(self, network: Any, grid: Grid) -> None:
        if not isinstance(network, Module):
            raise Pmm3dError(
                f"network.build = {self.name} returned {type(network).__name__}; it must return a pmm3d.nn.Module"
            )
        if network.grid is not grid:
            raise Pmm3dError(
                f"network.build = {self.name}: the network is on another Grid; make its layers on the "
                "grid that the function receives"
            )
        section, kind, compute = self._section, library_named(self._section.library).kind, self._precision.compute
        for name, parameter in network.named_parameters().items():
            of_parameter = parameter.dtype, parameter.library.kind
            has, wanted = (
                "tf32" if each.tf32 and not parameter.is_vector else each.compute
                for each in (parameter.precision, self._precision)
            )
            if of_parameter[1] == kind and has != wanted and (compute != section.dtype or "tf32" in (has, wanted)):
                raise Pmm3dError(
                    f"network.build = {self.name}: {name} has precision {has}, and training.precision is "
                    f'{wanted}: make the layers with precision="{wanted}"'
                )
            if of_parameter != (compute, kind):
                raise Pmm3dError(
                    f"network.build = {self.name}: {name} is {of_parameter[0]} in {of_parameter[1]}, and batches are "
                    f"{section.dtype} in {kind}: set network.dtype and network.library, or make the "
                    "layers with the dtype and the library of the batches"
                )


class OwnFunctions(NamedTuple):
    """Functions of the user's files for losses. Loading them is collective.

    loss      function of training.loss, or its name
    metrics   name of a function of training.metrics -> function
    """

    loss: str | Callable[..., Any]
    metrics: dict[str, Callable[..., Any]]

    @classmethod
    def of(cls, config: Config, grid: Grid, loss: str) -> OwnFunctions:
        """loss: the name of a loss that is used if training.loss is no function."""
        section = config.training
        metrics = {
            name.rpartition(":")[2]: _function(grid, "training.metrics", name, number_of) for name in section.metrics
        }
        return cls(_function(grid, "training.loss", section.loss) if ":" in section.loss else loss, metrics)


def _function(
    grid: Grid, key: str, name: str, fits: Callable[[Any], Any] = lambda result: result
) -> Callable[..., Any]:
    """Return a function of the user's file, whose results pass through `fits`. Its errors are Pmm3dErrors with the line
    of the file. Collective."""
    file = UserFile(grid, key, name)
    function = file.named("function", callable)

    def run(output: Any, y: Any) -> Any:
        with file.running("raised an error"):
            return fits(function(output, y))

    return run


class Own(NamedTuple):
    """The objects of the user's files that a configuration names. Loading them is collective.

    network     of network.build, or None
    optimizer   class of the optimizer: that of optimizer.build, or of optimizer.kind
    functions   of training.loss and training.metrics
    loss        value of training.loss
    file        of optimizer.build, or None
    """

    network: OwnNetwork | None
    optimizer: type[optim.Optimizer]
    functions: OwnFunctions
    loss: str
    file: UserFile | None = None

    @classmethod
    def of(cls, config: Config, grid: Grid) -> Own:
        network, section, loss = OwnNetwork.of(config, grid), config.optimizer, config.training.loss
        functions = OwnFunctions.of(config, grid, loss)
        if section.build is None:
            return cls(network, optim.KINDS[str(section.kind)], functions, loss)
        file = UserFile(grid, "optimizer.build", section.build)
        optimizer = file.named("class of pmm3d.nn.optim.Optimizer", _is_optimizer)
        return cls(network, optimizer, functions, loss, file)

    @property
    def names(self) -> str:
        """The user's functions and classes, for messages."""
        files = [
            ("network.build", self.network and self.network.name),
            ("optimizer.build", self.file and self.file.name),
            ("training.loss", ":" in self.loss and self.loss),
        ]
        return " and ".join(f"{key} = {name}" for key, name in files if name)

    @property
    def is_named(self) -> bool:
        """Whether there is any object of a user's file. Such objects cannot be sent to another process."""
        return bool(self.names or self.functions.metrics)


def _is_optimizer(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, optim.Optimizer)


def layer_sizes(config: Config, features: int, outputs: int) -> list[int]:
    """Return the columns of the input, of the hidden layers of an MLP, and of the output. Raises Pmm3dError if
    network.vocabulary is smaller than that of the data."""
    hidden, vocabulary = config.network.hidden, config.network.vocabulary or outputs
    if vocabulary < outputs:
        raise Pmm3dError(
            f"network.vocabulary = {vocabulary}, but the data have a vocabulary of {outputs}: leave "
            "network.vocabulary out, or set at least this number"
        )
    return [features, *(hidden if isinstance(hidden, list) and not config.network.build else []), vocabulary]


def described(config: Config, features: int, outputs: int) -> str:
    """Return a few words about the network.

    >>> from .config import checked
    >>> described(checked({"data": {"file": "x.h5"}}), 8, 2)
    '8-512-512-2'
    >>> described(checked({"data": {"file": "x.h5", "sequence": 8}, "network": {"kind": "gpt"}}), 1, 99)
    'gpt of 4 blocks of 256, vocabulary 99'
    """
    section = config.network
    if section.build:
        return str(section.build)
    if section.of_tokens:
        outputs = section.vocabulary or outputs
        return f"{section.kind} of {section.layers} blocks of {section.hidden}, vocabulary {outputs}"
    return "-".join(map(str, layer_sizes(config, features, outputs)))


def inputs_of(config: Config, grid: Grid, rows: int, features: int) -> Facts:
    """Return the inputs of a micro-batch of this number of rows. A row of tokens is a sequence."""
    section, kind = config.network, grid.library(config.network.library).kind
    if (sequence := config.data.sequence) is not None:
        columns = 1 if config.data.documents is None else 2
        layout = token_layout(grid.stage, sequence, order=section.order or "plain")
        return Facts((rows * sequence, columns), layout, "int64", kind)
    return Facts((rows, features), batch_layout("y"), section.dtype, kind)


def make_network(
    config: Config, grid: Grid, sizes: list[int], own: OwnNetwork | None, precision: Precision | None = None
) -> tuple[Module, Layout]:
    """Return (the network, the layout of its output). Collective. precision: default as configured."""
    if own is not None:
        return own.made(grid, sizes[0], sizes[-1], config)
    section, layouts, build = config.network, list[Layout](), {"build", "kind", "replay"}
    options: dict[str, Any] = {"seed": config.training.seed, "precision": precision or config.precision}

    def make(stage: Grid) -> Module:
        if not section.of_tokens:
            layers = MLP(
                stage,
                sizes,
                str(section.activation),
                **options,
                **section.model_dump(exclude={"hidden", "activation", *build}, exclude_none=True),
            )
            layouts.append(layers.output_layout)
            return layers
        given = section.model_dump(exclude=build, exclude_none=True)
        given |= {"loss_tiles": config.memory.loss_tiles, "mlp_tiles": config.memory.mlp_tiles}
        kind = GPT if section.kind == "gpt" else Llama
        return kind(stage, **{"positions": config.data.sequence, **given, **options, "vocabulary": sizes[-1]})

    return pipelined(config, grid, make, sizes[0]), layouts[-1] if layouts else Layout()


def pipelined(config: Config | None, grid: Grid, make: Callable[[Grid], Any], features: int) -> Module:
    """Return the network of make(grid), cut into stages if configuration and grid have the same number of stages."""
    if config is None or not config.grid.staged or config.grid.pipe != grid.shape.stages:
        network: Module = make(grid)
        return network
    section, like = config.grid, None
    if section.cut == "cost":
        rows = -(-config.data.batch_size // section.micro_batches)
        like = inputs_of(config, grid, rows, features).on(grid.stage)
    return Pipeline(grid, make, schedule=section.schedule or "1f1b", cut=section.cut, like=like)


def network_of(config: Config, grid: Grid, samples: Samples) -> Module:
    """Return the network of a configuration, frozen, for inference. Collective. It has the precision of the master
    weights (except a network of `build`), and even stages, because the file of a schedule may be missing. All logits of
    a batch exist, because predictions use them."""
    config, precision = config.unscheduled, Precision(config.precision.master)
    config = config.model_copy(update={"memory": config.memory.model_copy(update={"loss_tiles": 0})})
    sizes = layer_sizes(config, samples.features, samples.outputs)
    return make_network(config, grid, sizes, OwnNetwork.of(config, grid), precision)[0].requires_grad_(False)


def make_optimizer(config: Config, network: Module, own: Own) -> optim.Optimizer:
    """Return the optimizer of a configuration. Collective. Raises Pmm3dError, on every rank, for unknown options of a
    user's class, and values that it refuses."""
    section, kind = config.optimizer, own.optimizer
    excluded = {"kind", "build", "options", "clip", "groups", *([] if section.states else ["states"])}
    options: dict[str, Any] = section.model_dump(exclude=excluded, exclude_none=True) | section.options

    patterns = [{"decay_vectors": True, **each} if "weight_decay" in each else each for each in section.groups]

    def make(**defaults: Any) -> optim.Optimizer:
        groups = optim.groups_by_name(network, patterns, kind.groups_of(network))
        return kind(groups, **{**defaults, **options})

    if own.file is None:
        return make()
    name = own.file.name
    with network.parent_grid.collective_call("optimizer.build", name, always=True), own.file.running("raised an error"):
        try:
            return make(**configured(kind))
        except Pmm3dError as error:
            raise Pmm3dError(f"optimizer.build = {name}: {error}") from error


def set_offload(config: Config, network: Module, optimizer: optim.Optimizer) -> None:
    """Open the store of a configuration, and use it ([memory] offload, store). Collective. Raises Pmm3dError, on every
    rank, without a folder for arrays of the host, or if the folder cannot be used."""
    section, grid = config.memory, network.grid
    if section.offload:
        store = Store(grid, section.store, library=config.network.library)
        if "activations" in section.offload:
            offload(grid, store)
        if "states" in section.offload:
            optimizer.offload(store)


def make_ema(config: Config, network: Module) -> optim.EMA | None:
    """Return the averages of the weights of a configuration, or None."""
    decay = config.training.ema
    return None if decay is None else optim.EMA(network, decay)


def make_schedule(config: Config, optimizer: optim.Optimizer, steps: int) -> optim.Schedule:
    """Return the schedule of a run with this number of steps."""
    name, options = config.schedule.kind, config.schedule.model_dump(exclude={"kind"}, exclude_none=True)
    if options["warm_up"] == AUTO:
        options["warm_up"] = min(LONGEST_WARM_UP, steps // 10)
    kind = SCHEDULES[name]
    return kind(optimizer, steps, **options) if issubclass(kind, ToFloor) else kind(optimizer, **options)
