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
from ...layout import batch_layout
from ...model.machine import available_memory
from .. import functional, optim
from ..dry import Facts, dry_grid, memory
from ..layers import MLP, Module
from ..overlap import Overlap
from ..tape import Tape
from .config import Config
from .passes import Event
from .recalled import SAMPLES, Samples, samples_of
from .rehearsal import Rehearsal
from .run_log import RunLog, logger
from .signals import Signals
from .trainer import Trainer

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}
Rows = tuple[DataSet, tuple[int, int] | None]
"""A data set, and the range of its rows to take; None for all."""


@contextmanager
def trainer(config: Config, comm: MPI.Intracomm, signals: Signals | None = None, **options: Any) -> Iterator[Trainer]:
    """As a context: the trainer, on a grid over comm, that acts on the signals noted there; options go to Grid.

    Raises Pmm3dError, on every rank, if data and configuration do not fit together.
    """
    with Grid(comm, config.grid.shape, config.grid.data, **options) as grid:
        take_device(config.network.library, grid.local_rank)
        Tape.of(grid).parallel.overlap = Overlap(**config.overlap.model_dump())
        with _data(config, grid) as ((data, rows), held_out):
            loss = _loss(config, data)
            classes = data.classes if loss == "cross_entropy" else None
            sizes = [data.features, *config.network.hidden, data.outputs if classes is None else classes]
            _predict_memory(config, grid, sizes, loss)
            network = _network(config, grid, sizes)
            split = network.output_layout.cols[0] if classes is None else None
            batches: dict[str, Any] = {"batch_size": config.data.batch_size, "prefetch": config.data.prefetch,
                                       "split_inputs": "y", "split_targets": split}
            loader = data.loader(shuffle=config.data.shuffle, seed=config.training.seed, rows=rows, **batches)
            validation = None
            if held_out is not None:
                validation = held_out[0].loader(shuffle=False, rows=held_out[1], **batches)
            yield _trainer(config, network, loader, validation, loss, signals or Signals(), samples_of(data, loss))


@contextmanager
def _data(config: Config, grid: Grid) -> Iterator[tuple[Rows, Rows | None]]:
    """What to train on, and what to validate on."""
    section, network = config.data, config.network
    options: dict[str, Any] = {"inputs": section.inputs, "targets": section.targets, "dtype": network.dtype,
                               "library": network.library}
    with DataSet(grid, section.file, classes=section.classes, **options) as data:
        if section.validation_file is not None:
            with DataSet(grid, section.validation_file, classes=data.classes, **options) as other:
                with grid.together("training"):
                    if (other.features, other.outputs) != (data.features, data.outputs):
                        raise Pmm3dError(f"{section.validation_file} has {other.features} features and {other.outputs} "
                                         f"targets a row, {section.file} {data.features} and {data.outputs}")
                yield (data, None), (other, None)
            return
        cut = data.samples - round(section.validation * data.samples)
        with grid.together("training"):
            if cut == 0:
                raise Pmm3dError(f"data.validation = {section.validation} leaves no row of {data.samples} to train on")
        yield (data, (0, cut)), (data, (cut, data.samples)) if cut < data.samples else None


def _loss(config: Config, data: DataSet) -> str:
    """The loss asked for, or the one that fits the targets."""
    loss = config.training.loss
    if loss == "auto":
        return "mse" if data.classes is None else "cross_entropy"
    if (loss == "cross_entropy") != (data.classes is not None):
        raise Pmm3dError(f"training.loss is {loss}, but the targets {config.data.targets!r} of {config.data.file} are "
                         f"{'classes (integers)' if data.classes is not None else 'vectors (floating point)'}")
    return loss


def _network(config: Config, grid: Grid, sizes: list[int]) -> MLP:
    section = config.network.model_dump(exclude={"hidden", "activation"})
    activation = getattr(functional, config.network.activation)
    return MLP(grid, sizes, activation, seed=config.training.seed, **section)


def network(config: Config, grid: Grid, samples: Samples) -> Module:
    """The network that a configuration says, for such samples. Collective."""
    return _network(config, grid, [samples.features, *config.network.hidden, samples.outputs])


def _optimizer(config: Config, network: MLP) -> optim.Optimizer:
    unused = {"kind", "clip"} if config.optimizer.kind == "sgd" else {"kind", "clip", "momentum"}
    return OPTIMIZERS[config.optimizer.kind](network.parameters(), **config.optimizer.model_dump(exclude=unused))


def predicted_memory(config: Config, grid: Grid, sizes: list[int], loss: str) -> int:
    """Bytes that training is to take on the first rank, which has the most, with the loader's: by two steps of the same
    network without data. Gathered weights are left out that are kept only while there is room."""
    with dry_grid(grid, rank=0) as dry:
        Tape.of(dry).parallel.overlap, Tape.of(dry).parallel.weights.budget = Overlap(**config.overlap.model_dump()), 0
        network = _network(config, dry, sizes)
        section, kind = config.data, dry.library(config.network.library).kind
        x = Facts((section.batch_size, sizes[0]), batch_layout("y"), config.network.dtype, kind)
        y = Facts((section.batch_size, sizes[-1]), network.output_layout, config.network.dtype, kind)
        if loss == "cross_entropy":
            y = Facts((section.batch_size, 1), batch_layout(None), "int64", kind)
        rehearsal = Rehearsal(network, _optimizer(config, network), loss, bool(config.optimizer.clip))
        for _ in range(2):
            rehearsal.run(Event("step", ((x, y),) * min(2, config.training.accumulate)))
        batch = x.on(dry).local.nbytes + y.on(dry).local.nbytes
        return sum(memory(dry).values()) + (section.prefetch + 2) * batch


def _predict_memory(config: Config, grid: Grid, sizes: list[int], loss: str) -> None:
    """Keep what training is to take on a rank, for when it cannot be had, and say so before if it looks like that."""
    total = predicted_memory(config, grid, sizes, loss)
    layers = "-".join(map(str, sizes))
    grid.ledger.predict(f"training of {layers} with batches of {config.data.batch_size}", total)
    if not library_named(config.network.library).on_host:
        return
    free = available_memory() * grid.hosts // grid.size
    share, host = min(grid.comm.allgather((free or total, platform.node())))
    if share < total and grid.rank == 0:
        logger.warning(f"training is predicted to take {in_bytes(total)} on a rank; host {host} has "
                       f"{in_bytes(share)} left for each of its ranks. Use more nodes, another grid, smaller batches "
                       "or network.recompute")


def _trainer(config: Config, network: MLP, loader: Loader, validation: Loader | None, loss: str,
             signals: Signals, samples: Samples) -> Trainer:
    section, grid = config.training, network.grid
    optimizer = _optimizer(config, network)
    steps = section.epochs * -(-len(loader) // section.accumulate)
    return Trainer(
        network, optimizer, loader, loss, section.epochs, schedule=_schedule(config, optimizer, steps),
        validation=validation, evaluate_every=section.evaluate_every,
        checkpoints=Checkpoints(grid, section.folder / "checkpoints", keep=section.keep),
        checkpoint_every=section.checkpoint_every, accumulate=section.accumulate, clip=config.optimizer.clip,
        log=RunLog(section.folder, grid.rank, prometheus=section.prometheus), log_every=section.log_every,
        settings={**config.model_dump(mode="json"), SAMPLES: samples.model_dump()}, signals=signals)


def _schedule(config: Config, optimizer: optim.Optimizer, steps: int) -> optim.Schedule:
    section = config.schedule
    if section.kind == "cosine":
        return optim.Cosine(optimizer, steps, section.warm_up, section.floor)
    if section.kind == "step":
        return optim.Step(optimizer, section.every, section.factor, section.warm_up)
    return optim.Schedule(optimizer, section.warm_up)
