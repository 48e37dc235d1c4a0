"""Whether a configuration fits the data and the grid. If not it is refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from ...comm import Grid
from ...errors import Pmm3dError
from ...io import DataSet
from .config import Config
from .run_log import logger


def check_grid(config: Config, grid: Grid) -> None:
    """Rank 0 warns of options that have no effect on the grid."""
    if grid.rank == 0:
        for text in _idle(config, grid):
            logger.warning(f"{text}: it has no effect on grid {grid.shape}")


def _idle(config: Config, grid: Grid) -> Iterator[str]:
    """What was asked for and needs another grid."""
    if config.optimizer.shard_over_data and grid.data.size == 1:
        yield "optimizer.shard_over_data is for several ranks along data"
    if config.network.activations == "sharded" and grid.x.size == grid.y.size == 1:
        yield "network.activations = sharded is for several ranks along x or y"
    if config.overlap.reshard_after_forward is not None and grid.z.size == 1:
        yield "overlap.reshard_after_forward is for several ranks along z"
    if config.overlap.shared_weights and grid.z.size == 1:
        yield "overlap.shared_weights is for several ranks along z"


def rows_to_train(config: Config, data: DataSet) -> int:
    """How many rows, the first ones, are trained on; the others are held out. Collective.

    Raises Pmm3dError if one of the two parts has no row, or there is nothing to learn.
    """
    share = 0.0 if config.data.validation_file is not None else config.data.validation
    held_out = round(share * data.samples)
    rows = data.samples - held_out
    with data.grid.together("training"):
        if rows == 0:
            raise Pmm3dError(f"data.validation = {share} leaves no row of {data.samples} to train on")
        if share and not held_out:
            raise Pmm3dError(f"data.validation = {share} holds out no row of {data.samples}: raise it, name a "
                             "data.validation_file, or set it to 0.0 for no validation")
        if data.classes == 1:
            raise Pmm3dError(f"the targets {config.data.targets!r} of {config.data.file} are of one class only: "
                             "there is nothing to tell apart. Name other targets, or convert with all classes")
    if config.data.batch_size > rows and data.grid.rank == 0 and data.grid.dry_run is None:
        logger.warning(f"data.batch_size = {config.data.batch_size}: there are {rows} rows to train on, so that each "
                       "batch has them all. Lower it to have several steps in an epoch")
    return rows


def check_steps(config: Config, grid: Grid, batches: int) -> tuple[int, int]:
    """(epochs, steps) of the whole run, of so many batches an epoch. Collective.

    Raises Pmm3dError for what is never reached.
    """
    training, schedule = config.training, config.schedule
    with grid.together("training"):
        if training.accumulate > batches:
            raise Pmm3dError(f"training.accumulate = {training.accumulate}, but an epoch has {batches} batches of "
                             f"{config.data.batch_size} rows: at most {batches}, or lower data.batch_size")
        each = -(-batches // training.accumulate)
        epochs = training.epochs or -(-(training.steps or 1) // each)
        steps = min(epochs * each, training.steps or epochs * each)
        changes = schedule.warm_up + schedule.every + 1 if schedule.kind == "step" else 0
        for key, value, step in (("schedule.warm_up", schedule.warm_up, schedule.warm_up),
                                 ("schedule.every", schedule.every, changes),
                                 ("training.evaluate_every", training.evaluate_every, training.evaluate_every)):
            if step > steps:
                raise Pmm3dError(f"{key} = {value}, but the run has {steps} steps: it would never come. "
                                 "Lower it, or train longer (training.epochs, training.steps)")
    return epochs, steps

