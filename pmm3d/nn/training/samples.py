"""Samples of a run: checks against the configuration, and facts for checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...comm import Grid
from ...errors import CheckpointError, DataError, Pmm3dError, needs
from ...io import DataSet, Mixture, TokenDataSet
from ...io.checkpoint import Checkpoint
from ...io.mapped import is_mapped, is_raw
from ...io.mixture import AnySource
from ...io.pairs import NAMES as PAIRS
from ...io.pairs import PairSource
from ...io.scaling import Scaling, magnitudes
from ...io.split import RowSet, by_source
from ...text import counted, names_in_words
from ..facts import Facts, compare, facts_in
from .config import Config, checked
from .fields import Count, Section
from .log import logger
from .sections import DataSection
from .user_file import UserFile

with needs("train", "the settings of a run"):
    from pydantic import ValidationError

SAMPLES = "samples"
"""Key of `Samples` in a run's settings."""
BINARY = "binary_cross_entropy_with_logits"
UNLIKE = 1000.0
"""Ratio of columns that "differ by orders of magnitude"."""
Data = DataSet | TokenDataSet
Rows = tuple[Data, RowSet]
"""A data set, and part of its rows; a row of tokens is a sequence."""


class SampleSizes(NamedTuple):
    """Columns of the input (1 for tokens, 2 with documents) and of the output; whether targets are labels; number of
    rows for training (0: unknown)."""

    features: int
    outputs: int
    classes: bool = False
    rows: int = 0


class Samples(Section):
    """Properties of the samples in a checkpoint: columns of input and output, the loss, names of classes or of the
    targets' columns, the table from which they were converted, and the weights of the classes in the loss."""

    features: Count
    outputs: Count
    loss: str
    class_names: list[str] | None = None
    target_names: list[str] | None = None
    table: dict[str, Any] | None = None
    class_weights: list[float] | None = None

    @property
    def binary(self) -> bool:
        """Whether outputs are logits of independent labels."""
        return self.loss == BINARY


class Recalled(NamedTuple):
    """Contents of a checkpoint. scaling: by which the samples were standardised."""

    config: Config
    samples: Samples
    facts: Facts
    scaling: Scaling | None = None


def samples_of(data: Data, loss: str, class_weights: list[float] | None = None) -> Samples:
    if isinstance(data, TokenDataSet):
        return Samples(features=data.features, outputs=data.vocabulary, loss=loss)
    return Samples(
        features=data.features,
        outputs=data.classes or data.outputs,
        loss=loss,
        class_names=data.class_names,
        target_names=data.target_names,
        table=data.table,
        class_weights=class_weights,
    )


def check_class_weights(config: Config, classes: int, where: str = "there are", names: str = "") -> None:
    """Raise Pmm3dError for weights that do not fit the number of classes."""
    wanted = config.training.class_weights
    if wanted is not None and wanted != "balanced" and (len(wanted) != classes or not any(wanted)):
        raise Pmm3dError(
            f"training.class_weights has {counted(len(wanted), 'number')}, and {where} {counted(classes, 'class')}"
            f'{names}: give one number for each class, not all 0, or "balanced"'
        )


def class_weights_of(config: Config, data: Data, rows: RowSet) -> list[float] | None:
    """Return the weight of each class in the loss, or None. Collective. The mean weight of the rows of an epoch is 1 if
    weights are balanced; a class without such a row then has the weight 1. Raises Pmm3dError for weights that do not
    fit the data."""
    wanted = config.training.class_weights
    if wanted is None or isinstance(data, TokenDataSet):
        return None
    with data.grid.collective_call("training", always=True):
        check_class_weights(config, data.classes or 0, f"{data.path} has", f" ({names_in_words(names_of(data))})")
    if wanted != "balanced":
        return list(wanted)
    counts, draws = data.class_counts(*by_source(rows, data.of_parts)), rows.draws
    if draws is not None:  # a row of a mixture comes counts / rows times in an epoch
        counts = counts * (draws.counts / draws.rows)[:, None]
    total = counts.sum(axis=0)
    present = total > 0
    return np.where(present, total.sum() / (present.sum() * np.where(present, total, 1)), 1.0).tolist()


def scaling_of(config: Config, data: Data, rows: RowSet) -> Scaling | None:
    """Return the scales of the rows to train on, or None if samples are not standardised. Collective. Rank 0 warns if
    the columns then differ by orders of magnitude."""
    if isinstance(data, TokenDataSet):
        return None
    wanted = config.data.standardize
    if data.table is not None if wanted is None else wanted:
        scaling = data.scaling(rows)
        return scaling._replace(targets=None) if config.training.loss == BINARY else scaling
    with data.grid.collective_call("training", always=True):
        if data.grid.rank == 0 and (problem := unlike(data)):
            logger.warning(f"{data.path}: {problem}. Such a network rarely learns: set data.standardize = true")
    return None


def unlike(data: DataSet) -> str:
    """Return a text about columns that differ by orders of magnitude from each other or from 1; "" if none do."""
    for dataset, names in ((data.inputs, data.columns), (data.targets, data.target_names)):
        if dataset is data.targets and data.labelled:
            continue
        largest = magnitudes(data.file, dataset)
        present = np.flatnonzero(largest)
        if not len(present):
            continue
        least, most = present[largest[present].argmin()], present[largest[present].argmax()]
        one, two = (repr(names[at]) if names else str(at) for at in (least, most))
        if largest[most] / largest[least] >= UNLIKE:
            return (
                f"the columns of data set {dataset.name[1:]!r} differ by orders of magnitude (up to "
                f"{largest[least]:.3g} in column {one}, {largest[most]:.3g} in {two})"
            )
        if largest[most] >= UNLIKE or largest[most] <= 1 / UNLIKE:
            return (
                f"the numbers of data set {dataset.name[1:]!r} differ from 1 by orders of magnitude (up to "
                f"{largest[most]:.3g} in column {two})"
            )
    return ""


def sizes_in_file(config: Config) -> SampleSizes:
    """Return the sizes of the samples in the data file. Raises Pmm3dError if the file cannot be read or does not
    fit."""
    with Grid.dry((1, 1, 1)) as alone, _data_set(config, alone) as data:
        rows = len(parts_of(config, data)[0])
        if isinstance(data, TokenDataSet):
            return SampleSizes(data.features, data.vocabulary, True, rows)
        check_targets(config, data)
        loss_of(config, data.classes is not None)
        return SampleSizes(data.features, data.classes or data.outputs, data.classes is not None, rows)


def _data_set(config: Config, grid: Grid, other: Data | None = None) -> Data:
    """Return the data set for training. other: the data set for training, to get that for validation. Collective."""
    section, network = config.data, config.network
    source = _source(section, grid) if other is None else _validation_source(section, grid)
    if section.sequence is not None:
        return TokenDataSet(
            grid,
            source,
            section.sequence,
            tokens=section.inputs,
            documents=section.documents,
            vocabulary=section.vocabulary,
            token_dtype=_raw_type(section, other is None),
            library=network.library,
        )
    names = PAIRS if isinstance(source, PairSource) else (section.inputs, str(section.targets))
    classes = section.classes if not isinstance(other, DataSet) else names_of(other) or None
    made = DataSet(
        grid, source, *names, dtype=network.dtype, library=network.library, classes=classes, labels=labels_of(config)
    )
    made.of_probabilities = config.training.loss == BINARY
    return made


def _source(section: DataSection, grid: Grid) -> AnySource:
    """Return the source of the data for training. Collective."""
    if section.mixture is not None:
        return Mixture([*section.mixture.items()])
    return section.file if section.build is None else _built(grid, "data.build", section.build)  # type: ignore


def tokenizer_file(section: DataSection) -> Path | None:
    """Return the first HDF5 file of the data for training, which may contain a tokenizer; None if there is none."""
    return next((file for file in section.files if not is_mapped(file)), None)


def _validation_source(section: DataSection, grid: Grid) -> AnySource:
    name = section.validation_build
    return section.validation_file if name is None else _built(grid, "data.validation_build", name)  # type: ignore


def _raw_type(section: DataSection, training: bool) -> Any:
    """Return the type of tokens for the data for training or for validation, which may be of different formats. It is
    None for data without a raw file, unless both are: then `TokenDataSet` refuses the type."""
    trained, held = any(map(is_raw, section.files)), bool(section.validation_file and is_raw(section.validation_file))
    needed = trained if training else held
    return section.token_dtype if needed or not (trained or held) else None


def _built(grid: Grid, key: str, name: str) -> PairSource:
    """Return the pairs of the object that a function of the user's file returns. Collective."""
    file = UserFile(grid, key, name)
    function = file.named("function", callable)
    with grid.collective_call(key, name, always=True):
        with file.running("raised an error"):
            items = function()
        return PairSource(items, f"{key} = {name}")


@contextmanager
def opened(config: Config, grid: Grid, accept: Collection[str] = ()) -> Iterator[tuple[Rows, Rows | None]]:
    """Context of the rows for training and for validation. Collective. Raises Pmm3dError, on every rank, for data that
    does not fit the configuration. accept: facts of the validation file that may differ."""
    section = config.data
    with _data_set(config, grid) as data, ExitStack() as stack:
        if isinstance(data, DataSet):
            check_targets(config, data)
        trained, held = parts_of(config, data)
        validation: Rows | None = (data, held) if len(held) else None
        if section.validation_source is not None:
            other = _data_set(config, grid, data)
            stack.enter_context(closing(other))
            validation = other, RowSet(0, other.samples, other.samples)
            _compare(config, data, other, accept)
        if isinstance(data, DataSet):
            check_classes(data, trained, validation)
        yield (data, trained), validation


def _compare(config: Config, data: Data, other: Data, accept: Collection[str]) -> None:
    """Raises Pmm3dError if the data set for validation does not fit that for training. Collective."""
    grid = data.grid
    with grid.collective_call("training", sorted(accept)):
        compare(data.facts, other.facts, accept, other.path, rank=grid.rank, error=DataError)
        if isinstance(data, TokenDataSet) or isinstance(other, TokenDataSet):
            if other.classes != data.classes:
                raise Pmm3dError(
                    f"{other.path} has a vocabulary of {other.classes} tokens, "
                    f"{data.path} one of {data.classes}: convert both with the same tokenizer"
                )
            return
        if (other.features, other.outputs) != (data.features, data.outputs):
            raise Pmm3dError(
                f"{other.path} has {other.features} features and {other.outputs} "
                f"targets a row, {data.path} {data.features} and {data.outputs}"
            )
    if data.class_names and not other.class_names and grid.rank == 0:
        logger.warning(
            f"{other.path} does not name its classes, so its labels are taken as the "
            f"numbers of {names_in_words(data.class_names)}. pmm3d convert --class-names adds the names"
        )


def parts_of(config: Config, data: Data) -> tuple[RowSet, RowSet]:
    """Return (the rows for training, the held-out rows). Collective. Raises Pmm3dError if no row is left for training
    or for validation, and for targets of one class."""
    section, grid = config.data, data.grid
    share = 0.0 if section.validation_source is not None else section.validation
    trained, held = data.split(
        share,
        seed=config.training.seed,
        groups=section.groups if share else None,
        last=section.hold_out == "last" or not share,
    )
    with grid.collective_call("training"):
        if not len(trained):
            raise Pmm3dError(f"data.validation = {share} leaves no row of {data.samples} to train on")
        if share and not len(held):
            raise Pmm3dError(
                f"data.validation = {share} holds out no row of {data.samples}: raise it, name a "
                "data.validation_file (or validation_build), or set it to 0.0 for no validation"
            )
        if data.classes == 1:
            raise Pmm3dError(
                f"the targets {section.targets!r} of {section.source} have only one class. Name other "
                "targets, or convert with all classes"
            )
    if section.batch_size > len(trained) and grid.rank == 0 and grid.dry_run is None:
        logger.warning(
            f"data.batch_size = {section.batch_size}: there are only {len(trained)} rows to train on, so an "
            "epoch has one step. Lower data.batch_size for more steps"
        )
    return trained, held


def loss_of(config: Config, classes: bool) -> str:
    """Return the name of the loss; by default it depends on the targets. Raises Pmm3dError if it does not fit them (a
    function of the user fits all), and for keys of cross_entropy with another loss."""
    loss = config.training.loss
    if loss == "auto":
        loss = "cross_entropy" if classes else "mse"
    elif ":" not in loss and (loss == "cross_entropy") != classes:
        raise Pmm3dError(
            f"training.loss is {loss}, but the targets {config.data.targets!r} of {config.data.source} are "
            f"{'classes (integers)' if classes else 'vectors (floating point)'}: leave training.loss "
            "out, or name other targets (data.targets)"
        )
    for key in ("class_weights", "label_smoothing"):
        if getattr(config.training, key) not in (None, 0.0) and loss != "cross_entropy":
            raise Pmm3dError(
                f"training.{key} is for labels and the loss cross_entropy; the loss is {loss}: leave it out"
            )
    return loss


def labels_of(config: Config) -> bool | None:
    """Return whether integer targets are labels: False for a loss of values, otherwise None (`DataSet` decides)."""
    return False if config.training.of_values else None


def check_targets(config: Config, data: DataSet) -> None:
    """Raises Pmm3dError for ambiguous targets, and for a loss that does not fit them. Collective."""
    targets, loss, where = data.targets, config.training.loss, f"the targets {config.data.targets!r} of {data.path}"
    with data.grid.collective_call("training", always=True):
        if loss == "auto" and targets.dtype.kind in "iu" and not data.labelled:
            raise Pmm3dError(
                f"{where} are integers in {data.outputs} columns, which may be labels or values. Set "
                'training.loss = "mse" (or "mae") for values; labels must have one column'
            )
        if not data.labelled and "class_names" in targets.attrs:
            raise Pmm3dError(
                f"training.loss is {loss}, but {where} are labels with class names: leave training.loss "
                "out, or name other targets"
            )


def names_of(data: DataSet) -> list[str]:
    """Return the names of the classes; their numbers if the file has no names."""
    return data.class_names or [str(number) for number in range(data.classes or 0)]


def check_classes(data: DataSet, trained: RowSet, held: Rows | None) -> None:
    """Warn, on rank 0, about classes without a sample for training or validation. Reads all labels once. Collective."""
    if data.classes is None:
        return
    counts = data.class_counts(trained, *([] if held is None or held[0] is not data else [held[1]]))
    if held is not None and held[0] is not data and isinstance(held[0], DataSet):
        counts = np.concatenate([counts, held[0].class_counts(held[1])])
    names, nowhere = names_of(data), (counts == 0).all(axis=0)
    for what, missing in zip(("train", "validate"), counts == 0 if data.grid.rank == 0 else ()):
        if missing.any():
            remedy = "Hold out other rows (data.hold_out, data.validation, data.validation_file)"
            if nowhere.any():
                remedy = "Labels from 1 to K make K + 1 classes: pmm3d convert --classes numbers them from 0"
            lacking = names_in_words(name for name, here in zip(names, missing) if here)
            logger.warning(
                f"{missing.sum()} of {data.classes} classes have no sample to {what} on: {lacking}. {remedy}"
            )


def recalled(checkpoint: Checkpoint) -> Recalled:
    """Return the configuration and the samples of a checkpoint. Raises CheckpointError if `pmm3d train` did not write
    it."""
    settings = checkpoint.meta.get("settings") if isinstance(checkpoint.meta, dict) else None
    if not isinstance(settings, dict) or SAMPLES not in settings:
        raise CheckpointError(
            f"{checkpoint.path} does not contain a configuration of its network, because pmm3d train did "
            "not write it: make the network in a program and load it with nn.exchange.load_weights"
        )
    try:
        sections = {
            # an unset key may be unknown to this version
            name: {key: value for key, value in values.items() if value is not None}
            for name, values in settings.items()
            if name != SAMPLES
        }
        samples = {name: value for name, value in settings[SAMPLES].items() if name in Samples.model_fields}
        scaling = Scaling.of((checkpoint.meta.get("loader") or {}).get("scaling"))
        return Recalled(checked(sections, str(checkpoint.path)), Samples(**samples), facts_in(checkpoint.meta), scaling)
    except (ValidationError, TypeError, AttributeError, KeyError, Pmm3dError) as error:
        raise CheckpointError(
            f"{checkpoint.path} contains settings of another version of pmm3d, which this version cannot "
            f"read: {error}. Make the network in a program and load it with "
            "nn.exchange.load_weights"
        ) from None
