"""Whether a configuration fits the data and the grid. If not it is refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...comm import Grid
from ...errors import Pmm3dError
from ...io import DataSet
from ...io.split import Part
from ...text import names_in_words
from .config import Config, DataSection
from .log import logger


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


def parts_of(config: Config, data: DataSet) -> tuple[Part, Part]:
    """(the rows to train on, the held-out rows). Collective.

    Raises Pmm3dError if one of the two has no row, or if there is nothing to learn.
    """
    section, grid = config.data, data.grid
    share = 0.0 if section.validation_file is not None else section.validation
    kept, held = data.split(share, seed=config.training.seed, groups=section.groups if share else None,
                            last=section.hold_out == "last" or not share)
    with grid.collective_call("training"):
        if not len(kept):
            raise Pmm3dError(f"data.validation = {share} leaves no row of {data.samples} to train on")
        if share and not len(held):
            raise Pmm3dError(f"data.validation = {share} holds out no row of {data.samples}: raise it, name a "
                             "data.validation_file, or set it to 0.0 for no validation")
        if data.classes == 1:
            raise Pmm3dError(f"the targets {section.targets!r} of {section.file} are of one class only: "
                             "there is nothing to tell apart. Name other targets, or convert with all classes")
    if section.batch_size > len(kept) and grid.rank == 0 and grid.dry_run is None:
        logger.warning(f"data.batch_size = {section.batch_size}: there are {len(kept)} rows to train on, so that each "
                       "batch has them all. Lower it to have several steps in an epoch")
    return kept, held


def labels_of(config: Config) -> bool | None:
    """Whether integer targets are labels: the loss says it, or None for the rule of `DataSet`."""
    return False if config.training.loss in ("mse", "mae") else None


def check_targets(config: Config, data: DataSet) -> None:
    """Raises Pmm3dError for targets of which only the user knows whether they are classes or values. Collective."""
    targets, loss, where = data.targets, config.training.loss, f"the targets {config.data.targets!r} of {data.path}"
    with data.grid.collective_call("training"):
        if loss == "auto" and targets.dtype.kind in "iu" and not data.labelled:
            raise Pmm3dError(f"{where} are integers in {data.outputs} columns, which may be labels or values. Set "
                             "training.loss = \"mse\" (or \"mae\") if they are values; labels are one column")
        if not data.labelled and "class_names" in targets.attrs:
            raise Pmm3dError(f"training.loss is {loss}, but {where} are labels of classes with names: leave "
                             "training.loss out, or name other targets")


def names_of(data: DataSet) -> list[str]:
    """A name for each class; its number if the file has none. Without labels the list is empty."""
    return data.class_names or [str(number) for number in range(data.classes or 0)]


def check_classes(config: Config, data: DataSet, kept: Part, held: tuple[DataSet, Part] | None) -> None:
    """Have rank 0 warn of classes that have no sample, or none on one side. Collective; reads all labels once."""
    if data.classes is None:
        return
    counts = data.class_counts(kept, *([] if held is None or held[0] is not data else [held[1]]))
    if held is not None and held[0] is not data:
        counts = np.concatenate([counts, held[0].class_counts(held[1])])
    if data.grid.rank:
        return
    names, missing, section = names_of(data), counts == 0, config.data
    nowhere, counted = missing.all(axis=0), data.class_names is None and section.classes is None
    for where, remedy in [
        (nowhere, "The network gets an output for each class up to the largest label. Labels from 1 to K make K + 1 "
                  "classes: pmm3d convert --classes numbers them from 0" if counted else
                  "Their outputs are never trained"),
        (missing[0] & ~nowhere, f"They are validated on, and not trained on: {_other_rows(section, 'fewer')}"),
        (missing[-1] & ~nowhere, f"They are trained on, and not validated on: {_other_rows(section, 'more')}"),
    ]:
        if where.any():
            found = names_in_words(name for name, here in zip(names, where) if here)
            logger.warning(f"{where.sum()} of {data.classes} classes without a sample"
                           f"{'' if where is nowhere else ' on one side'}: {found}. {remedy}")


def _other_rows(section: DataSection, how_many: str) -> str:
    if section.validation_file is not None:
        return "look at data.validation_file"
    if section.hold_out == "last":
        return "hold out random rows (data.hold_out)"
    return f"hold out {how_many} rows (data.validation)"


def check_steps(config: Config, grid: Grid, batches: int) -> tuple[int, int]:
    """(epochs, steps) of the whole run, of so many batches an epoch. Collective.

    Raises Pmm3dError for what is never reached.
    """
    training, schedule = config.training, config.schedule
    with grid.collective_call("training"):
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

