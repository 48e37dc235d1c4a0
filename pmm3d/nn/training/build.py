"""From a Config to a Trainer: what `pmm3d train` does before the first step."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from ...arrays import library_named, take_device
from ...comm import Grid
from ...comm.words import in_bytes
from ...errors import Pmm3dError
from ...io import Checkpoints, DataSet, Loader
from ...layout import Layout, batch_layout
from ...model.machine import available_memory
from .. import functional, optim
from ..dry import Facts, dry_grid, memory
from ..layers import MLP, Module
from ..overlap import Overlap
from ..precision import Precision
from ..tape import Tape
from .config import Config
from .fitting import check_grid, check_steps, rows_to_train
from .own_network import OwnNetwork
from .passes import Event
from .recalled import SAMPLES, Samples, samples_of
from .rehearsal import Rehearsal
from .run import Recipe
from .run_log import RunLog, logger
from .signals import Signals
from .state import TrainState
from .trainer import Trainer

Rows = tuple[DataSet, tuple[int, int] | None]
"""A data set, and the range of its rows to take; None for all."""


@contextmanager
def trainer(config: Config, comm: MPI.Intracomm, signals: Signals | None = None, **options: Any) -> Iterator[Trainer]:
    """As a context: the trainer, on a grid over comm, that acts on the signals noted there; options go to Grid.

    Raises Pmm3dError, on every rank, if data and configuration do not fit together.
    """
    with Grid(comm, config.grid.shape, config.grid.data, **options) as grid:
        check_grid(config, grid)
        with grid.together("training", config.network.library, always=True):
            take_device(config.network.library, grid.local_rank)
        Tape.of(grid).parallel.overlap = Overlap(**config.overlap.model_dump())
        own = OwnNetwork(grid, config.network, config.precision) if config.network.build else None
        with _data(config, grid) as ((data, rows), held_out):
            loss = _loss(config, data)
            classes = data.classes if loss == "cross_entropy" else None
            batches: dict[str, Any] = {"batch_size": config.data.batch_size, "prefetch": config.data.prefetch,
                                       "split_inputs": "y"}
            loaded: dict[str, Any] = {"shuffle": config.data.shuffle, "seed": config.training.seed, "rows": (0, rows)}
            if config.precision.compute == "float16" and config.network.library == "numpy" and grid.rank == 0:
                logger.warning('float16 arrays of numpy are slow: they are widened to float32 for each product. '
                               'network.library = "torch" is faster, and has bfloat16')
            _predict_memory(config, grid, sizes := _sizes(config, data, classes), rows, loss, own)
            network, output = _network(config, grid, sizes, own)
            batches["split_targets"] = output.cols[0] if classes is None and len(output.cols) == 1 else None
            loader = data.loader(**loaded, **batches)
            validation = None
            if held_out is not None:
                validation = held_out[0].loader(shuffle=False, rows=held_out[1], **batches)
            yield _trainer(config, network, loader, validation, loss, signals or Signals(), samples_of(data, loss))


def _sizes(config: Config, data: DataSet, classes: int | None) -> list[int]:
    """The columns of the input, of the hidden layers of a network that is not one's own, of the output."""
    hidden = [] if config.network.build else config.network.hidden
    return [data.features, *hidden, data.outputs if classes is None else classes]


@contextmanager
def _data(config: Config, grid: Grid) -> Iterator[tuple[tuple[DataSet, int], Rows | None]]:
    """What to train on, with the number of its first rows that are, and what to validate on."""
    section, network = config.data, config.network
    options: dict[str, Any] = {"inputs": section.inputs, "targets": section.targets, "dtype": network.dtype,
                               "library": network.library, "links": section.links}
    with DataSet(grid, section.file, classes=section.classes, **options) as data:
        rows = rows_to_train(config, data)
        if section.validation_file is not None:
            with DataSet(grid, section.validation_file, classes=data.classes, **options) as other:
                with grid.together("training"):
                    if (other.features, other.outputs) != (data.features, data.outputs):
                        raise Pmm3dError(f"{section.validation_file} has {other.features} features and {other.outputs} "
                                         f"targets a row, {section.file} {data.features} and {data.outputs}")
                yield (data, rows), (other, None)
            return
        yield (data, rows), (data, (rows, data.samples)) if rows < data.samples else None


def _loss(config: Config, data: DataSet) -> str:
    """The loss asked for, or the one that fits the targets."""
    loss = config.training.loss
    if loss == "auto":
        return "mse" if data.classes is None else "cross_entropy"
    if (loss == "cross_entropy") != (data.classes is not None):
        raise Pmm3dError(f"training.loss is {loss}, but the targets {config.data.targets!r} of {config.data.file} are "
                         f"{'classes (integers)' if data.classes is not None else 'vectors (floating point)'}")
    return loss


def _network(config: Config, grid: Grid, sizes: list[int], own: OwnNetwork | None,
             precision: Precision | None = None) -> tuple[Module, Layout]:
    """(the network, the layout of its output), in the configuration's precision or in another one."""
    if own is not None:
        return own.made(grid, sizes[0], sizes[-1])
    section = config.network.model_dump(exclude={"build", "hidden", "activation"})
    activation = getattr(functional, config.network.activation)
    network = MLP(grid, sizes, activation, seed=config.training.seed, precision=precision or config.precision,
                  **section)
    return network, network.output_layout


def network_of(config: Config, grid: Grid, samples: Samples) -> Module:
    """The network that a configuration says, for such samples, of the type of its master weights. Collective."""
    sizes = [samples.features, *config.network.hidden, samples.outputs]
    if config.network.build:
        own = OwnNetwork(grid, config.network, config.precision)
        return own.widened(own.made(grid, samples.features, samples.outputs)[0], samples.features)
    return _network(config, grid, sizes, None, config.precision.whole)[0]


def _optimizer(config: Config, network: Module) -> optim.Optimizer:
    section = config.optimizer
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay,
                               "shard_over_data": section.shard_over_data, "decay_vectors": section.decay_vectors}
    if section.kind == "sgd":
        return optim.SGD(network.parameters(), momentum=section.momentum, **options)
    kind = optim.AdamW if section.kind == "adamw" else optim.Adam
    first, second = section.betas
    return kind(network.parameters(), betas=(first, second), eps=section.eps, **options)


def predicted_memory(config: Config, grid: Grid, sizes: list[int], rows: int, loss: str,
                     own: OwnNetwork | None = None) -> int:
    """Bytes that training on so many rows is to take on the first rank, which has the most, with the loader's: by two
    steps of the same network without data. Gathered weights are left out that are kept only while there is room."""
    with dry_grid(grid, rank=0) as dry:
        Tape.of(dry).parallel.overlap, Tape.of(dry).parallel.weights.budget = Overlap(**config.overlap.model_dump()), 0
        network, output = _network(config, dry, sizes, own)
        section, kind = config.data, dry.library(config.network.library).kind
        size = min(section.batch_size, rows)
        x = Facts((size, sizes[0]), batch_layout("y"), config.network.dtype, kind)
        y = Facts((size, sizes[-1]), output, config.network.dtype, kind)
        if loss == "cross_entropy":
            y = Facts((size, 1), batch_layout(None), "int64", kind)
        rehearsal = Rehearsal(network, _optimizer(config, network), loss, bool(config.optimizer.clip))
        for _ in range(2):
            rehearsal.run(Event("step", ((x, y),) * min(2, config.training.accumulate)))
        batch = x.on(dry).local.nbytes + y.on(dry).local.nbytes
        return sum(memory(dry).values()) + (section.prefetch + 2) * batch


def _predict_memory(config: Config, grid: Grid, sizes: list[int], rows: int, loss: str,
                    own: OwnNetwork | None) -> None:
    """Keep what training is to take on a rank, for when it cannot be had, and say so before if it looks like that."""
    try:
        total = predicted_memory(config, grid, sizes, rows, loss, own)
    except Exception as error:  # whatever a network of one's own asks of values that are not there
        if own is None:
            raise
        total = 0
        if grid.rank == 0:
            logger.warning(f"memory is not predicted, since the network does not run without data: {error}")
    layers = "-".join(map(str, sizes)) if own is None else own.name
    grid.ledger.predict(f"training of {layers} with batches of {min(config.data.batch_size, rows)}", total)
    if not library_named(config.network.library).on_host:
        return
    free = available_memory() * grid.hosts // grid.size
    share, host = min(grid.comm.allgather((free or total, platform.node())))
    if share < total and grid.rank == 0:
        logger.warning(f"training is predicted to take {in_bytes(total)} on a rank; host {host} has "
                       f"{in_bytes(share)} left for each of its ranks. Use more nodes, another grid, smaller batches "
                       "or network.recompute")


def _trainer(config: Config, network: Module, loader: Loader, validation: Loader | None, loss: str,
             signals: Signals, samples: Samples) -> Trainer:
    section, grid = config.training, network.grid
    optimizer = _optimizer(config, network)
    epochs, steps = check_steps(config, grid, len(loader))
    recipe = Recipe(loss, epochs, steps=section.steps, accumulate=section.accumulate, clip=config.optimizer.clip,
                    evaluate_every=section.evaluate_every, checkpoint_every=section.checkpoint_every,
                    log_every=section.log_every)
    return Trainer(
        TrainState(network, optimizer, _schedule(config, optimizer, steps), loader), recipe, validation,
        Checkpoints(grid, section.folder / "checkpoints", keep=section.keep),
        RunLog(section.folder, grid.rank, prometheus=section.prometheus),
        settings={**config.settings(), SAMPLES: samples.model_dump()}, signals=signals)


def _schedule(config: Config, optimizer: optim.Optimizer, steps: int) -> optim.Schedule:
    section = config.schedule
    if section.kind == "cosine":
        return optim.Cosine(optimizer, steps, section.warm_up, section.floor)
    if section.kind == "step":
        return optim.Step(optimizer, section.every, section.factor, section.warm_up)
    return optim.Schedule(optimizer, section.warm_up)
