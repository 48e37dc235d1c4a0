"""Network, optimizer and schedule of a configuration, on any grid, also a dry one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from ...arrays import library_named
from ...comm import Grid
from ...errors import Pmm3dError
from ...layout import Layout, batch_layout
from .. import optim
from ..containers import MLP
from ..dry import Facts
from ..exchange import whole_of
from ..layers import Linear
from ..module import Module
from ..pipeline.network import Pipeline
from ..precision import Precision
from ..seeds import manual_seed
from ..transformer import GPT, Embedding, Llama, token_layout
from .config import Config
from .samples import Samples
from .sections import NetworkSection

MODULE = "network_build"
"""Name of the user's file in `sys.modules`."""


class OwnNetwork:
    """The user's function of `network.build`. Collective.

    Rank 0 reads the file, and all ranks run it. The file can import modules in its folder. Raises Pmm3dError, on every
    rank, if the section has keys for layers, if the file or the function is missing, or if the file does not run.
    """

    def __init__(self, grid: Grid, section: NetworkSection, precision: Precision, seed: int):
        if others := section.own_keys:
            raise Pmm3dError(
                f"network.build = {section.build} makes its own layers: leave network.{others[0]} out, "
                "and set it in the function"
            )
        self._section, self._precision, self._seed, self.name = section, precision, seed, str(section.build)
        path, _, function = self.name.rpartition(":")
        self._path, source = Path(path), _read(grid, Path(path))
        with grid.collective_call("network.build", self.name, always=True):
            with self._explained("does not run"), _importing_beside(self._path):
                module = ModuleType(MODULE)
                module.__file__ = str(self._path)
                sys.modules[MODULE] = module
                exec(compile(source, str(self._path), "exec"), vars(module))
            self._function: Callable[[Grid, int, int], Any] = getattr(module, function, None)  # type: ignore
            if not callable(self._function):
                known = [
                    name
                    for name, value in vars(module).items()
                    if callable(value) and getattr(value, "__module__", "") == MODULE
                ]
                raise Pmm3dError(
                    f"network.build = {self.name}: {self._path} has no function {function}; it has "
                    f"{', '.join(known) or 'none'}"
                )

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
            with self._explained("raised an error"), _importing_beside(self._path):
                network = pipelined(config, grid, make, features)
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
            found = parameter.dtype, parameter.library.kind
            has, wanted = (
                "tf32" if each.tf32 and not parameter.is_vector else each.compute
                for each in (parameter.precision, self._precision)
            )
            if found[1] == kind and has != wanted and (compute != section.dtype or "tf32" in (has, wanted)):
                raise Pmm3dError(
                    f"network.build = {self.name}: {name} has precision {has}, and training.precision is "
                    f'{wanted}: make the layers with precision="{wanted}"'
                )
            if found != (compute, kind):
                raise Pmm3dError(
                    f"network.build = {self.name}: {name} is {found[0]} in {found[1]}, and batches are "
                    f"{section.dtype} in {kind}: set network.dtype and network.library, or make the "
                    "layers with the dtype and the library of the batches"
                )

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Context in which an error of the user's file becomes a Pmm3dError with the line of the file."""
        try:
            yield
        except Pmm3dError:
            raise
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(self._path)]
            where = f" ({self._path}, line {lines[-1]})" if lines else ""
            raise Pmm3dError(f"network.build = {self.name} {what}: {type(error).__name__}: {error}{where}") from error


def _read(grid: Grid, path: Path) -> str:
    """Return the text of a file, read by rank 0. Collective."""
    text, problem = "", ""
    if grid.rank == 0:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
    text, problem = grid.comm.bcast((text, problem))
    with grid.collective_call("network.build", str(path), always=True):
        if problem:
            raise Pmm3dError(
                f"network.build: cannot read {path.absolute()}: {problem}. The path is relative to the current folder"
            )
    return text


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Context in which modules in the folder of the file can be imported, as by `python FILE`."""
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


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
    section, layouts, build = config.network, list[Layout](), {"build", "kind"}
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
        if section.kind == "gpt":
            return GPT(stage, **{"positions": config.data.sequence, **given, **options, "vocabulary": sizes[-1]})
        return Llama(stage, **{**given, **options, "vocabulary": sizes[-1]})

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
    weights (except a network of `build`), and even stages, because the file of a schedule may be missing."""
    config, own, precision = config.unscheduled, None, Precision(config.precision.master)
    if config.network.build:
        own = OwnNetwork(grid, config.network, config.precision, config.training.seed)
    sizes = layer_sizes(config, samples.features, samples.outputs)
    return make_network(config, grid, sizes, own, precision)[0].requires_grad_(False)


def make_optimizer(config: Config, network: Module) -> optim.Optimizer:
    kind = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "muon": optim.Muon}[config.optimizer.kind]
    options: dict[str, Any] = config.optimizer.model_dump(exclude={"kind", "clip"}, exclude_none=True)
    return kind(_muon_groups(network) if kind is optim.Muon else network.parameters(), **options)


def _muon_groups(network: Module) -> list[dict[str, Any]]:
    """Return two groups for Muon: other parameters, and those that AdamW changes: tables of embeddings and positions,
    and the last layer."""
    whole = whole_of(network)
    modules = [module for _, module in whole.named_modules()]
    layers = [
        *(each for each in modules if isinstance(each, Embedding)),
        *[each for each in modules if isinstance(each, Linear)][-1:],
    ]
    spared = {parameter for layer in layers for parameter in layer.parameters()}
    names = {name for name, parameter in whole.named_parameters().items() if parameter in spared}
    own = network.named_parameters()
    return [
        {"params": [each for name, each in own.items() if (name in names) == outer], "use_muon": not outer}
        for outer in (False, True)
    ]


def make_schedule(config: Config, optimizer: optim.Optimizer, steps: int) -> optim.Schedule:
    """Return the schedule of a run with this number of steps."""
    name, options = config.schedule.kind, config.schedule.model_dump(exclude={"kind"}, exclude_none=True)
    if name == "cosine":
        return optim.Cosine(optimizer, steps, **options)
    return optim.Step(optimizer, **options) if name == "step" else optim.Schedule(optimizer, **options)
