"""From a Config to a Trainer: what `pmm3d train` does before the first step."""

from __future__ import annotations

import platform
import sys
from contextlib import contextmanager
from pathlib import Path

from ...arrays import library_named
from ...arrays.devices import take_device
from ...comm import Grid
from ...comm.words import in_bytes
from ...errors import Pmm3dError
from ...io import Checkpoints, DataSet
from ...model.machine import available_memory
from .. import functional, optim
from ..layers import MLP
from ..memory import MLPMemory
from ..parallel import Overlap
from ..tensor import Tape
from .config import Config
from .run_log import RunLog
from .signals import Signals
from .trainer import Trainer

OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}


@contextmanager
def trainer(config: Config, comm, signals: Signals | None = None, **options):
    """As a context: the trainer, on a grid over comm, that heeds the signals noted there; options go to Grid.

    Raises Pmm3dError, on every rank, if data and configuration do not fit together.
    """
    with Grid(comm, config.grid.shape, config.grid.data, **options) as grid:
        take_device(config.network.library, grid.local_rank)
        Tape.of(grid).parallel.overlap = Overlap(**config.overlap.model_dump())
        with _data(config, grid) as (data, rows, held_out):
            loss = _loss(config, data)
            sizes = [data.features, *config.network.hidden, data.classes if loss == "cross_entropy" else data.outputs]
            _predict_memory(config, grid, sizes)
            network = _network(config, grid, sizes)
            options = {"split_inputs": "y", "split_targets": None if loss == "cross_entropy" else _cols(network)}
            batches = {"batch_size": config.data.batch_size, "prefetch": config.data.prefetch, **options}
            loader = data.loader(shuffle=config.data.shuffle, seed=config.training.seed, rows=rows, **batches)
            validation = None
            if held_out is not None:
                source, rows = held_out
                validation = source.loader(shuffle=False, rows=rows, **batches)
            yield _trainer(config, network, loader, validation, loss, signals or Signals())


@contextmanager
def _data(config: Config, grid):
    """(data set, rows to train on, (data set, rows) to validate on or None)."""
    section, network = config.data, config.network
    options = {"inputs": section.inputs, "targets": section.targets, "dtype": network.dtype,
               "library": network.library}
    with DataSet(grid, section.file, classes=section.classes, **options) as data:
        if section.validation_file is not None:
            with DataSet(grid, section.validation_file, classes=data.classes, **options) as other:
                with grid.together("training"):
                    if (other.features, other.outputs) != (data.features, data.outputs):
                        raise Pmm3dError(
                            f"{section.validation_file} has {other.features} features and {other.outputs} targets a "
                            f"row, {section.file} {data.features} and {data.outputs}"
                        )
                yield data, None, (other, None)
            return
        cut = data.samples - round(section.validation * data.samples)
        with grid.together("training"):
            if cut == 0:
                raise Pmm3dError(f"data.validation = {section.validation} leaves no row of {data.samples} to train on")
        yield data, (0, cut), (data, (cut, data.samples)) if cut < data.samples else None


def _loss(config: Config, data) -> str:
    """The loss asked for, or the one that fits the targets."""
    wanted = config.training.loss
    fitting = "cross_entropy" if data.classes is not None else "mse"
    if wanted == "auto":
        return fitting
    if (wanted == "cross_entropy") != (data.classes is not None):
        raise Pmm3dError(
            f"training.loss is {wanted}, but the targets {config.data.targets!r} of {config.data.file} are "
            f"{'classes (integers)' if data.classes is not None else 'vectors (floating point)'}"
        )
    return wanted


def _predict_memory(config: Config, grid, sizes) -> None:
    """Keep what training is to take on a rank, for when it cannot be had, and say so before if it looks like that."""
    states = len(OPTIMIZERS[config.optimizer.kind].state_names) or bool(config.optimizer.momentum)
    memory = MLPMemory(tuple(sizes), config.data.batch_size, grid.shape, config.network.activation,
                       config.network.dtype, states, config.optimizer.shard_over_data, input_sets=4,
                       bucket_bytes=config.overlap.bucket_bytes)
    layers = "-".join(map(str, sizes))
    grid.ledger.predict(f"training of {layers} with batches of {config.data.batch_size}", memory.total)
    if not library_named(config.network.library).on_host:
        return
    share = available_memory() * grid.hosts // grid.size
    share, host = min(grid.comm.allgather((share or memory.total, platform.node())))
    if share < memory.total and grid.rank == 0:
        print(f"pmm3d: warning: training is predicted to take {in_bytes(memory.total)} on a rank; host {host} has "
              f"{in_bytes(share)} left for each of its ranks. Use more nodes, another grid, smaller batches or "
              "network.recompute", file=sys.stderr, flush=True)


def _network(config: Config, grid, sizes) -> MLP:
    section = config.network
    return MLP(grid, sizes, getattr(functional, section.activation), bias=section.bias, norm=section.norm,
               dropout=section.dropout, recompute=section.recompute, seed=config.training.seed, dtype=section.dtype,
               library=section.library)


def _cols(network: MLP) -> str | None:
    cols = network.output_layout.cols
    return cols[0] if cols else None


def _trainer(config: Config, network: MLP, loader, validation, loss: str, signals: Signals) -> Trainer:
    section, grid = config.training, network.grid
    settings = {"lr": config.optimizer.lr, "weight_decay": config.optimizer.weight_decay,
                "shard_over_data": config.optimizer.shard_over_data}
    if config.optimizer.kind == "sgd":
        settings["momentum"] = config.optimizer.momentum
    optimizer = OPTIMIZERS[config.optimizer.kind](network.parameters(), **settings)
    steps = section.epochs * -(-len(loader) // section.accumulate)
    folder = Path(section.folder)
    return Trainer(
        network, optimizer, loader, loss, section.epochs, schedule=_schedule(config, optimizer, steps),
        validation=validation, evaluate_every=section.evaluate_every,
        checkpoints=Checkpoints(grid, folder / "checkpoints", keep=section.keep),
        checkpoint_every=section.checkpoint_every, accumulate=section.accumulate, clip=config.optimizer.clip,
        log=RunLog(folder, grid.rank, prometheus=section.prometheus), log_every=section.log_every,
        settings=config.model_dump(mode="json"), signals=signals,
    )


def _schedule(config: Config, optimizer, steps: int):
    section = config.schedule
    if section.kind == "cosine":
        return optim.Cosine(optimizer, steps, section.warm_up, section.floor)
    if section.kind == "step":
        return optim.Step(optimizer, section.every, section.factor, section.warm_up)
    return optim.Schedule(optimizer, section.warm_up)
