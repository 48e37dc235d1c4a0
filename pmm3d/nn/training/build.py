"""The Trainer of a Config, for `pmm3d train`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from mpi4py import MPI

from ...arrays import library_named, take_device
from ...comm import Grid, free_memory
from ...errors import Pmm3dError
from ...io import Checkpoints, Loader, TokenDataSet
from ...layout import EXPERT, SEQ, ULYSSES
from ...model.machine import lack_of_memory
from ..dry import dry_grid
from ..memory_trace import MemoryTrace
from ..module import Module
from ..pipeline import PipelineError, schedule_of, simulate
from ..pipeline.named import is_file
from ..pipeline.network import Pipeline
from ..tape import Tape
from ..transformer import token_layout
from .auto_grid import Choice, chosen_grid
from .callbacks import callbacks_of
from .config import Config
from .dry_step import DrySteps
from .evaluation import loss_named
from .log import RunLog, logger
from .loop import Trainer
from .network import (
    Own,
    described,
    layer_sizes,
    make_ema,
    make_network,
    make_optimizer,
    make_schedule,
    set_messages,
    set_offload,
)
from .recipe import Recipe
from .samples import SAMPLES, Samples, SampleSizes, class_weights_of, loss_of, opened, samples_of, scaling_of
from .sections import AUTO, GridSection
from .signals import Signals
from .state import TrainState


@contextmanager
def trainer(
    config: Config, comm: MPI.Intracomm, signals: Signals | None = None, accept: Collection[str] = (), **options: Any
) -> Iterator[Trainer]:
    """Context of the trainer, on a grid over comm. signals: received so far; accept: facts of the validation file that
    may differ; options: further arguments of Grid. Raises Pmm3dError, on every rank, if data and configuration do not
    fit together."""
    auto = chosen_grid(config, comm) if config.grid.shape == AUTO else None
    shape: tuple[Any, int] = config.grid.shape, config.grid.data
    if auto is not None:
        shape = auto.chosen.grid[:3], auto.chosen.grid.data
        update = {name: getattr(auto.chosen.grid, name, 1) for name in (SEQ, ULYSSES, EXPERT)}
        update["schedule"] = config.grid.schedule or auto.chosen.schedule or None
        config = config.model_copy(update={"grid": config.grid.model_copy(update=update)})
    with Grid(comm, *shape, axes=config.grid.axes, expert=config.grid.expert or 1, **options) as grid:
        with grid.collective_call("training", config.network.library, always=True):
            take_device(config.network.library, grid.local_rank)
        set_messages(config, grid.stage)
        own = Own.of(config, grid)
        with opened(config, grid, accept) as ((data, rows), held_out):
            loss = loss_of(config, data.classes is not None)
            classes = data.classes
            batches: dict[str, Any] = {
                "batch_size": config.data.batch_size,
                "prefetch": config.data.prefetch,
                "micro_batches": config.grid.micro_batches,
            }
            if config.precision.compute == "float16" and config.network.library == "numpy" and grid.rank == 0:
                logger.warning(
                    "float16 arrays of numpy are slow: they are widened to float32 for each product. "
                    'network.library = "torch" is faster, and has bfloat16'
                )
            samples = samples_of(data, loss, class_weights_of(config, data, rows))
            sample_sizes = SampleSizes(samples.features, samples.outputs, classes is not None, len(rows))
            with grid.collective_call("training"):
                sizes = layer_sizes(config, sample_sizes.features, sample_sizes.outputs)
            _predict_memory(config, grid, sample_sizes, own)
            network, output = make_network(config, grid, sizes, own.network)
            if isinstance(data, TokenDataSet):
                batches["layout"] = token_layout(grid.stage, data.sequence, order=config.network.order or "plain")
            else:
                batches["split_targets"] = output.cols[0] if classes is None and len(output.cols) == 1 else None
            loader = data.loader(shuffle=config.data.shuffle, seed=config.training.seed, rows=rows, **batches)
            validation = None
            if held_out is not None:
                validation = held_out[0].loader(shuffle=False, rows=held_out[1], **batches)
            scaling = scaling_of(config, data, rows)
            for each in (loader, *([] if validation is None else [validation])):
                each.standardize(scaling)
            if isinstance(network, Pipeline):
                _check_tables(network, loader)
            made = _trainer(config, own, network, loader, validation, loss, signals or Signals(), samples, auto)
            made.predicted_trace = partial(predicted_trace, config, grid, sample_sizes, own)
            yield made


def predicted_memory(config: Config, grid: Grid, samples: SampleSizes, own: Own | None = None) -> int:
    """Return the predicted bytes on the first rank of this stage, which holds most. They include the loader's batches,
    but not gathered weights that are kept only if memory allows."""
    steps = DrySteps(config, samples, own=own)
    with dry_grid(grid, rank=grid.stage.everyone.ranks[0]) as dry:
        count = steps.micro_batches
        tried = min(count, 4 * _fullest(config.grid) if config.grid.staged else 2)
        held = steps.of_micro_batches(tried).on(dry).memory
        held["batches"] = held["batches"] * count // tried
        return sum(held.values())


def predicted_trace(config: Config, grid: Grid, samples: SampleSizes, own: Own | None = None) -> MemoryTrace | None:
    """Return the predicted memory of a step of this rank. None if a network of the user does not run without data."""
    try:
        with dry_grid(grid.parent) as dry:
            cached = Tape.of(grid.stage).parallel.weights.budget or 0
            return DrySteps(config, samples, cached, own).traced.on(dry).trace
    except Exception as error:  # see _predict_memory
        logger.warning(f"the memory of a step is not predicted: {error}")
        return None


def _fullest(grid: GridSection) -> int:
    """Return the smallest power of 2, or else `grid.micro_batches`, with which each rank holds as many micro-batches at
    once as with all of them."""
    if grid.schedule is not None and is_file(grid.schedule):
        return grid.micro_batches

    def held(micro_batches: int) -> tuple[int, ...]:
        table = schedule_of(grid.schedule or "1f1b", grid.pipe, micro_batches)
        return simulate(table).peak_bytes(10, 4)

    of_all, number = held(grid.micro_batches), 1
    while number < grid.micro_batches:
        with suppress(PipelineError):  # dualpipe needs at least 2 a rank
            if held(number) == of_all:
                return number
        number *= 2
    return grid.micro_batches


def _predict_memory(config: Config, grid: Grid, samples: SampleSizes, own: Own) -> None:
    """Store the predicted memory for the message of an OutOfMemoryError, and warn if it exceeds the free memory."""
    try:
        total = predicted_memory(config, grid, samples, own)
    except Exception as error:  # a user's network or optimizer may raise anything if there are no values
        if not own.names:
            raise
        total = 0
        if grid.rank == 0:
            logger.warning(f"memory is not predicted, because {own.names} does not run without data: {error}")
    name, batch = described(config, *samples[:2]), min(config.data.batch_size, samples.rows)
    grid.ledger.predict(f"training of {name} with batches of {batch}", lambda: total)
    if not library_named(config.network.library).on_host:
        return
    lack = lack_of_memory("training", max(grid.comm.allgather(total)), *free_memory(grid))
    if lack and grid.rank == 0:
        logger.warning(f"{lack}. Use more nodes, another grid, smaller batches or network.recompute")


def _check_tables(network: Pipeline, loader: Loader) -> None:
    """Raises PipelineError, on every rank, if the schedule refuses the number of micro-batches of a batch, or of the
    last batch of an epoch. Collective."""
    with network.parent_grid.collective_call("training"):
        first, last = (loader.rows(batch) for batch in (0, len(loader) - 1))
        network.table(len(first))
        try:
            network.table(len(last))
        except PipelineError as error:
            raise PipelineError(
                f"{error}. The last batch of an epoch has {sum(last)} rows, one for each micro-batch: "
                "choose a data.batch_size that leaves more rows, or none"
            ) from None


def _trainer(
    config: Config,
    own: Own,
    network: Module,
    loader: Loader,
    validation: Loader | None,
    loss: str,
    signals: Signals,
    samples: Samples,
    auto: Choice | None,
) -> Trainer:
    section, grid, of_user, weights = config.training, network.parent_grid, own.functions.loss, samples.class_weights
    optimizer = make_optimizer(config, network, own)
    set_offload(config, network, optimizer)
    epochs = section.epochs or -(-(section.steps or 1) // len(loader))
    steps = min(epochs * len(loader), section.steps or epochs * len(loader))
    recipe = Recipe(
        of_user if ":" in loss else loss if weights is None else loss_named(loss, weights),
        epochs,
        steps=section.steps,
        clip=config.optimizer.clip or None,
        log_every=section.log_every,
        trace_memory=section.trace_memory,
        evaluate_every=section.evaluate_every,
        checkpoint_every=section.checkpoint_every,
        patience=section.patience,
        metrics=own.functions.metrics,
        label_smoothing=section.label_smoothing,
    )
    with grid.collective_call("training", always=True):
        if validation is None and (section.best or section.patience):
            raise Pmm3dError(
                f"training.{'patience' if section.patience else 'best'} needs validations, and data.validation is 0.0: "
                "raise it, or name a data.validation_file"
            )
    return Trainer(
        TrainState(network, optimizer, make_schedule(config, optimizer, steps), loader, ema=make_ema(config, network)),
        recipe,
        validation,
        Checkpoints(
            grid, section.folder / "checkpoints", keep=section.keep, background=section.checkpoint_in_background
        ),
        RunLog(section.folder, grid.rank),
        settings={**config.settings(), SAMPLES: samples.model_dump()},
        signals=signals,
        auto=auto,
        best=Checkpoints(grid, section.folder / "best", keep=1) if section.best else None,
        callbacks=callbacks_of(grid, section.callbacks),
    )
