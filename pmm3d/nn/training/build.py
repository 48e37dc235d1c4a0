"""From a Config to a Trainer: what `pmm3d train` does before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mpi4py import MPI

from ...arrays import library_named, take_device
from ...comm import Grid
from ...errors import Pmm3dError
from ...io import Checkpoints, DataSet, Loader
from ...io.split import Part
from ...text import in_bytes, names_in_words
from .. import optim
from ..dry import dry_grid, memory
from ..layers import Module
from ..overlap import Overlap
from ..tape import Tape
from .auto_grid import AUTO, Choice, grid_of, room
from .config import Config
from .dry_step import STEPS, SampleSizes, rehearsed
from .fitting import check_classes, check_grid, check_steps, check_targets, labels_of, names_of, parts_of
from .own_network import OwnNetwork
from .parts import layer_sizes, loss_of, make_network, make_optimizer
from .recalled import SAMPLES, Samples, samples_of
from .run import Recipe
from .run_log import RunLog, logger
from .signals import Signals
from .state import TrainState
from .trainer import Trainer

Rows = tuple[DataSet, Part]
"""A data set, and the part of its rows to take."""


@contextmanager
def trainer(config: Config, comm: MPI.Intracomm, signals: Signals | None = None, **options: Any) -> Iterator[Trainer]:
    """As a context: the trainer, on a grid over comm, that acts on the signals noted there; options go to Grid.

    Raises Pmm3dError, on every rank, if data and configuration do not fit together.
    """
    shape, auto = grid_of(config, comm)
    with Grid(comm, *shape, **options) as grid:
        check_grid(config, grid)
        with grid.collective_call("training", config.network.library, always=True):
            take_device(config.network.library, grid.local_rank)
        Tape.of(grid).parallel.overlap = Overlap(**config.overlap.model_dump())
        own = None
        if config.network.build:
            own = OwnNetwork(grid, config.network, config.precision, config.training.seed)
        with _data(config, grid) as ((data, rows), held_out):
            with grid.collective_call("grid.shape"):
                if auto is None and config.grid.shape == AUTO:
                    raise Pmm3dError("grid.shape = auto: the data could not be read when the grid was to be chosen, "
                                     "and can be now: start again")
            loss = loss_of(config, data.classes is not None)
            classes = data.classes if loss == "cross_entropy" else None
            batches: dict[str, Any] = {"batch_size": config.data.batch_size, "prefetch": config.data.prefetch,
                                       "split_inputs": "y"}
            loaded: dict[str, Any] = {"shuffle": config.data.shuffle, "seed": config.training.seed, "rows": rows}
            if config.precision.compute == "float16" and config.network.library == "numpy" and grid.rank == 0:
                logger.warning('float16 arrays of numpy are slow: they are widened to float32 for each product. '
                               'network.library = "torch" is faster, and has bfloat16')
            found = SampleSizes(data.features, classes or data.outputs, classes is not None, len(rows))
            _predict_memory(config, grid, found, loss, own)
            sizes = layer_sizes(config, found.features, found.outputs)
            network, output = make_network(config, grid, sizes, own)
            batches["split_targets"] = output.cols[0] if classes is None and len(output.cols) == 1 else None
            loader = data.loader(**loaded, **batches)
            validation = None
            if held_out is not None:
                validation = held_out[0].loader(shuffle=False, rows=held_out[1], **batches)
            yield _trainer(config, network, loader, validation, loss, signals or Signals(), samples_of(data, loss),
                           auto)


@contextmanager
def _data(config: Config, grid: Grid) -> Iterator[tuple[Rows, Rows | None]]:
    """What to train on and what to validate on."""
    section, network = config.data, config.network
    options: dict[str, Any] = {"inputs": section.inputs, "targets": section.targets, "dtype": network.dtype,
                               "library": network.library, "labels": labels_of(config)}
    with DataSet(grid, section.file, classes=section.classes, **options) as data, ExitStack() as opened:
        check_targets(config, data)
        kept, held = parts_of(config, data)
        validation: Rows | None = (data, held) if len(held) else None
        if section.validation_file is not None:
            other = DataSet(grid, section.validation_file, classes=names_of(data) or None, **options)
            validation = opened.enter_context(other), Part(0, other.samples, other.samples)
            with grid.collective_call("training"):
                if (other.features, other.outputs) != (data.features, data.outputs):
                    raise Pmm3dError(f"{section.validation_file} has {other.features} features and {other.outputs} "
                                     f"targets a row, {section.file} {data.features} and {data.outputs}")
            if data.class_names and not other.class_names and grid.rank == 0:
                logger.warning(f"{section.validation_file} does not name its classes, so its labels are taken as the "
                               f"numbers of {names_in_words(data.class_names)}. pmm3d convert --class-names names them")
        check_classes(config, data, kept, validation)
        yield (data, kept), validation


def predicted_memory(config: Config, grid: Grid, samples: SampleSizes, loss: str, own: OwnNetwork | None = None) -> int:
    """Bytes that training is to take on the first rank, which has the most, with the loader's. Gathered weights are
    left out that are kept only while there is room."""
    with dry_grid(grid, rank=0) as dry:
        rehearsal, event, batch = rehearsed(config, dry, samples, loss, own)
        for _ in range(STEPS):
            rehearsal.run(event._replace(batches=event.batches[:2]))
        return sum(memory(dry).values()) + (config.data.prefetch + 2) * batch


def _predict_memory(config: Config, grid: Grid, samples: SampleSizes, loss: str, own: OwnNetwork | None) -> None:
    """Keep what training is to take on a rank, for when it cannot be had, and say so before if it looks like that."""
    try:
        total = predicted_memory(config, grid, samples, loss, own)
    except Exception as error:  # whatever a network of one's own asks of values that are not there
        if own is None:
            raise
        total = 0
        if grid.rank == 0:
            logger.warning(f"memory is not predicted, since the network does not run without data: {error}")
    layers = "-".join(map(str, layer_sizes(config, *samples[:2]))) if own is None else own.name
    grid.ledger.predict(f"training of {layers} with batches of {min(config.data.batch_size, samples.rows)}", total)
    if not library_named(config.network.library).on_host:
        return
    share, host = room(grid)
    if 0 < share < total and grid.rank == 0:
        logger.warning(f"training is predicted to take {in_bytes(total)} on a rank; host {host} has "
                       f"{in_bytes(share)} left for each of its ranks. Use more nodes, another grid, smaller batches "
                       "or network.recompute")


def _trainer(config: Config, network: Module, loader: Loader, validation: Loader | None, loss: str,
             signals: Signals, samples: Samples, auto: Choice | None) -> Trainer:
    section, grid = config.training, network.grid
    optimizer = make_optimizer(config, network)
    epochs, steps = check_steps(config, grid, len(loader))
    recipe = Recipe(loss, epochs, steps=section.steps, accumulate=section.accumulate, clip=config.optimizer.clip,
                    evaluate_every=section.evaluate_every, checkpoint_every=section.checkpoint_every,
                    log_every=section.log_every)
    return Trainer(
        TrainState(network, optimizer, _schedule(config, optimizer, steps), loader), recipe, validation,
        Checkpoints(grid, section.folder / "checkpoints", keep=section.keep,
                    background=section.checkpoint_in_background),
        RunLog(section.folder, grid.rank, prometheus=section.prometheus),
        settings={**config.settings(), SAMPLES: samples.model_dump()}, signals=signals, auto=auto)


def _schedule(config: Config, optimizer: optim.Optimizer, steps: int) -> optim.Schedule:
    section = config.schedule
    if section.kind == "cosine":
        return optim.Cosine(optimizer, steps, section.warm_up, section.floor)
    if section.kind == "step":
        return optim.Step(optimizer, section.every, section.factor, section.warm_up)
    return optim.Schedule(optimizer, section.warm_up)
