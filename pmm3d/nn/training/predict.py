"""Predictions of a run's network: from a file of samples to a file of outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from scipy.special import expit, softmax

from ...arrays import take_device
from ...comm import Grid, chosen_shape
from ...errors import DataError, GridError
from ...io import Checkpoints, DataSet
from ...io.checkpoint import Checkpoint
from ...io.conversion import INPUTS, TARGETS, convert, convert_like
from ...io.dataset import columns_of
from ...io.disk import check_replaceable, file_errors, sync
from ...io.scaling import ColumnScale
from ...io.source import SourceFile
from ...layout import GridShape, batch_layout
from ...product import DistMatrix
from ...product.new_hdf5 import NewHdf5
from ...text import shell_command
from ..contexts import unchanged
from ..facts import Facts, compare
from ..from_checkpoint import fill_weights, find_checkpoint
from ..module import Module
from ..recorded_passes import Passes
from .config import Config
from .evaluation import Evaluation, loss_named
from .network import OwnFunctions, network_of
from .samples import Recalled, Samples, labels_of, recalled
from .sections import AUTO

LARGEST_BATCH = 2**31
"""Largest number of elements of a batch, which rank 0 gathers."""
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """Arguments of a prediction: folder of a run or checkpoint, HDF5 file of the samples, HDF5 file to write, data set
    (default: as in the run), rows of a batch (default: of a micro-batch), the table or .npz file that is converted to
    source, facts that may differ, and whether averages of the weights are used if there are any."""

    run: Path
    source: Path
    target: Path
    inputs: str | None = None
    batch_size: int | None = None
    overwrite: bool = False
    origin: Path | None = None
    accept: Collection[str] = ()
    ema: bool = True

    @property
    def named(self) -> Path:
        """File of the samples, as the user named it."""
        return self.origin or self.source


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation: the checkpoint, the grid, the number of rows, the figures by name, for targets that are
    values (name, r2, root of the mean squared error in the units of the target), and whether weights were averaged."""

    checkpoint: Path
    grid: str
    rows: int
    loss: str
    scaled: bool
    figures: dict[str, float]
    targets: list[tuple[str, float, float]]
    averaged: bool


class Predicted(NamedTuple):
    """Result of a prediction: the checkpoint, the grid, the shapes of the data sets by name, and whether weights were
    averaged."""

    checkpoint: Path
    grid: str
    shapes: dict[str, tuple[int, ...]]
    averaged: bool


def check_files(asked: Asked) -> None:
    """Raises DataError if the target is the source, and CheckpointError if it must not be replaced."""
    if os.path.exists(asked.target) and os.path.exists(asked.source) and os.path.samefile(asked.source, asked.target):
        raise DataError(
            f"{asked.target} is the file of the samples, and would be overwritten: name another file for "
            "the predictions"
        )
    check_replaceable(asked.target, asked.overwrite)


def predict(comm: MPI.Intracomm, asked: Asked, tell: Tell = lambda done, total: None) -> Predicted:
    """Write the outputs of a run's network for all samples of a file. Collective over comm.

    The target contains "outputs" (samples, columns), in the units of the targets; for classes and independent labels
    also "probabilities"; for classes also "classes" (samples,), the most probable ones. It appears when it is complete.
    Rank 0 calls tell(done, total). The grid is that of the run if it fits the ranks, else "ddp". Raises Pmm3dError, on
    every rank and before anything is computed, if checkpoint, samples and batch size do not fit together.
    """
    with recalled_run(comm, asked.run) as (grid, known, checkpoint, keeper), _inputs(grid, asked, known) as inputs:
        made = network_of(known.config, grid, known.samples)
        weights = Checkpoints(grid, keeper.folder)
        averaged = fill_weights(made, checkpoint, weights, accept=asked.accept, ema=asked.ema)
        facts = {"checkpoint": str(checkpoint.path), "source": str(asked.named)}
        shape = inputs.samples, known.samples.outputs
        shapes: dict[str, tuple[int, ...]] = {"outputs": shape}
        if known.samples.binary:
            shapes["probabilities"] = shape
        if known.samples.loss == "cross_entropy":
            shapes |= {"probabilities": shape, "classes": shape[:1]}
        with _target(grid, asked.target, shapes, known, facts) as new:
            _run(grid, made, inputs, new, asked.target, tell, known.scaling and known.scaling.targets)
        return Predicted(checkpoint.path, str(grid.shape), shapes, averaged)


def evaluate_run(comm: MPI.Intracomm, asked: Asked, targets: str | None = None) -> Evaluated:
    """Return the figures of a run's network for samples with targets. Collective over comm.

    asked: as in `predict`, without target; targets: data set of targets (default: as in the run). Raises Pmm3dError, on
    every rank, if checkpoint and samples do not fit together.
    """
    with recalled_run(comm, asked.run) as (grid, known, checkpoint, keeper):
        section, network, samples = known.config.data, known.config.network, known.samples
        with grid.collective_call("evaluate", str(asked.named), always=True):
            if section.sequence is not None:
                raise DataError(
                    f"the network of {asked.run} is for tokens: its validation figures are in metrics.jsonl; for other "
                    "tokens, resume a run with data.validation_file"
                )
            if targets is not None and asked.origin is not None and not _is_npz(asked.origin):
                raise DataError(
                    f"--targets is {targets}, but {asked.origin} is a table, whose targets are those of the training "
                    "data: leave it out"
                )
            take_device(network.library, grid.local_rank)
        names = _converted(grid, asked, known, targets or str(section.targets))
        classes = (samples.class_names or samples.outputs) if samples.loss == "cross_entropy" else samples.class_names
        options: dict[str, Any] = {"dtype": network.dtype, "library": network.library, "classes": classes}
        functions = OwnFunctions.of(known.config, grid, samples.loss)
        with DataSet(grid, asked.source, *names, labels=labels_of(known.config), **options) as data:
            labels, data.of_probabilities = data.labelled, samples.binary
            with grid.collective_call("evaluate", str(asked.named), sorted(asked.accept), always=True):
                wanted = samples.features, 1 if labels else samples.outputs
                if (data.features, data.outputs) != wanted:
                    raise DataError(
                        f"{asked.named} has {data.features} features and {data.outputs} targets a row, the network of "
                        f"{asked.run} {wanted[0]} and {wanted[1]}"
                    )
                compare(known.facts, data.facts, asked.accept, str(asked.named), rank=grid.rank, error=DataError)
            made = network_of(known.config, grid, samples)
            weights = Checkpoints(grid, keeper.folder)
            averaged = fill_weights(made, checkpoint, weights, accept=asked.accept, ema=asked.ema)
            part = -(-section.batch_size // known.config.grid.micro_batches)
            loader = data.loader(asked.batch_size or part, shuffle=False)
            loader.standardize(known.scaling)
            evaluation = Evaluation(made, loss_named(functions.loss, samples.class_weights), functions.metrics)
            with made.evaluating(), unchanged(made.grid):
                evaluation.add(loader.whole_epoch())
            figures, columns = evaluation.figures(), list[tuple[str, float, float]]()
            if not labels and not samples.binary:
                scores, squares = evaluation.score.of_columns()
                scale = 1.0 if known.scaling is None or known.scaling.targets is None else known.scaling.targets.scale
                of_columns = zip(output_names(samples), scores.tolist(), (np.sqrt(squares) * scale).tolist())
                columns = [(str(name), score, root) for name, score, root in of_columns]
            scaled = known.scaling is not None and known.scaling.targets is not None
            return Evaluated(
                checkpoint.path, str(grid.shape), data.samples, samples.loss, scaled, figures, columns, averaged
            )


def output_names(samples: Samples) -> list[str]:
    """Return the names of the network's outputs: those of the targets' columns, or numbers."""
    return samples.target_names or [f"output {column}" for column in range(samples.outputs)]


def _converted(grid: Grid, asked: Asked, known: Recalled, targets: str | None = None) -> tuple[str, str]:
    """Convert a table or arrays to the HDF5 file `asked.source`, on rank 0, and return the names of the data sets.
    Collective. targets: data set of targets, or array of a .npz file; None: targets are not read."""
    names = asked.inputs or known.config.data.inputs, targets or ""
    if asked.origin is None:
        return names
    with grid.collective_call("predict: converting", str(asked.origin), always=True):
        if grid.rank == 0:
            _convert(asked.origin, asked.source, asked.inputs, targets, known.samples)
    return (asked.inputs or INPUTS, names[1]) if _is_npz(asked.origin) else (INPUTS, TARGETS)


def _is_npz(file: Path) -> bool:
    return file.suffix.lower() == ".npz"


def _convert(file: Path, target: Path, inputs: str | None, targets: str | None, samples: Samples) -> None:
    """Write the samples of a table or .npz file to HDF5. Raises DataError."""
    if not file.exists():
        raise DataError(f"there is no file {file}")
    if inputs is not None and not _is_npz(file):
        raise DataError(f"--inputs is {inputs}, but {file} is a table, whose columns are all inputs: leave it out")
    classes = samples.class_names or samples.loss == "cross_entropy" if targets else False
    try:
        if _is_npz(file):
            convert(
                file,
                target,
                inputs=inputs,
                targets=targets or False,
                classes=(targets and samples.class_names) or False,
            )
        elif samples.table is not None:
            convert_like(file, target, samples.table, targets=targets is not None, classes=samples.class_names)
        else:
            convert(file, target, targets=None if targets else False, classes=classes, dtype="float64")
    except DataError as error:
        if samples.table is not None and not _is_npz(file):
            raise
        remedy = (
            "--inputs names the array of the samples"
            if _is_npz(file)
            else f"{shell_command('pmm3d', 'convert', file, 'FILE.h5')} has options for that: --no-targets if all "
            "columns are inputs, --classes if the last one is a label; use FILE.h5 then"
        )
        raise DataError(f"{error}. {remedy}") from None


@contextmanager
def recalled_run(comm: MPI.Intracomm, run: Path) -> Iterator[tuple[Grid, Recalled, Checkpoint, Checkpoints]]:
    """Context of the grid for a run's network, its configuration, and its checkpoint. Collective."""
    with Grid(comm, "ddp") as reading:
        checkpoint, keeper = find_checkpoint(reading, run)
        with reading.collective_call("predict", str(run), always=True):
            known = recalled(checkpoint)
        shape, data, options = _shape(known.config, checkpoint.meta.get("grid"), comm.size)
        with Grid(comm, shape, data, **options) as grid:
            yield grid, known, checkpoint, keeper


def _shape(config: Config, saved: Any, ranks: int) -> tuple[str, int, dict[str, Any]]:
    """Return (shape, data, further arguments) of the run's grid if it fits the ranks, else of "ddp". saved: sizes of
    the checkpoint's grid, if known."""
    asked, axes, expert = (config.grid.shape, config.grid.data), config.grid.axes, config.grid.expert or 1
    try:
        if config.grid.shape == AUTO:
            asked = "{x}x{y}x{z}".format(**saved), int(saved["data"])
            expert = int(saved.get("expert", 1))
        shape = chosen_shape(*asked, axes, ranks, None, "float32", None)
        fits = isinstance(shape, GridShape) and shape.folded(expert).size == ranks
    except (GridError, KeyError, TypeError, ValueError):
        fits = False
    return (*asked, {"axes": axes, "expert": expert}) if fits else ("ddp", 1, {})


class Inputs:
    """The samples in an HDF5 file, in batches of `size` rows."""

    def __init__(self, grid: Grid, asked: Asked, known: Recalled, name: str):
        data, network = known.config.data, known.config.network
        self.grid, self.dtype, self.library = grid, network.dtype, grid.library(network.library)
        self.file = SourceFile(str(asked.source))
        self.dataset = self.file.dataset(name)
        self.scale = known.scaling and known.scaling.inputs
        self.samples, self.features = len(self.dataset), prod(self.dataset.shape[1:])
        part = -(-data.batch_size // known.config.grid.micro_batches)
        self.size = part if asked.batch_size is None else asked.batch_size

    def batch(self, start: int, rows: int) -> DistMatrix:
        """Return a batch. Collective. Raises DataError, on every rank, for numbers that are not finite."""
        layout = batch_layout("y")
        box = layout.box((rows, self.features), self.grid.shape, self.grid.coords)
        part = np.zeros(box.shape, self.dtype)
        with self.grid.collective_call("predict: reading", self.file.path, start, rows, always=True):
            if box.size:
                self._read(start + box.r0, box.c0, part)
        return DistMatrix(self.grid.stage, self.library.from_numpy(part, self.dtype), (rows, self.features), layout)

    def _read(self, first: int, column: int, part: np.ndarray) -> None:
        rows, columns = part.shape
        with self.file.unchanged(), np.errstate(over="ignore"):
            part[...] = self.dataset[first : first + rows].reshape(rows, -1)[:, column : column + columns]
        if not np.isfinite(part).all():
            row, off = np.argwhere(~np.isfinite(part))[0]
            raise DataError(
                f"{self.file.path}: row {first + row} of data set {self.dataset.name[1:]!r} holds "
                f"{part[row, off]} in column {column + off}, as {self.dtype}"
            )
        if self.scale is not None:
            self.scale.apply(part, column)


@contextmanager
def _inputs(grid: Grid, asked: Asked, known: Recalled) -> Iterator[Inputs]:
    """Context of the samples, after checks against the network. Collective."""
    with grid.collective_call("predict", str(asked.source), asked.inputs, asked.batch_size, always=True):
        if known.config.data.sequence is not None:
            raise DataError(
                f"the network of {asked.run} takes tokens and continues a text: "
                + shell_command("pmm3d", "generate", asked.run, "--prompt", "TEXT")
            )
        take_device(known.config.network.library, grid.local_rank)
    name, _ = _converted(grid, asked, known)
    with grid.collective_call("predict: samples", str(asked.source), always=True):
        inputs = Inputs(grid, asked, known, name)
        if asked.origin is not None and inputs.features == known.samples.features + 1:
            command = shell_command("pmm3d", "convert", asked.named, "FILE.h5")
            raise DataError(
                f"{asked.named} has one column more than the {known.samples.features} inputs. If it is the "
                f"target, run {command} (--classes for labels), and predict from FILE.h5"
            )
        if inputs.features != known.samples.features:
            raise DataError(
                f"{asked.named}: data set {inputs.dataset.name[1:]!r} has {inputs.features} features a "
                f"row, the network of {asked.run} takes {known.samples.features}. Give the columns of the "
                "training data in their order, or name another data set (--inputs)"
            )
        columns = columns_of(inputs.dataset)
        here: Facts = {"columns": columns} if columns else {}
        compare(known.facts, here, asked.accept, str(asked.named), rank=grid.rank, error=DataError)
        _check_batch(inputs, known.samples.outputs)
    try:
        yield inputs
    finally:
        inputs.file.close()


def _check_batch(inputs: Inputs, outputs: int) -> None:
    widest = max(inputs.features, outputs)
    if inputs.size < 1:
        raise DataError(f"a batch has at least 1 row; got {inputs.size}. Name another --batch-size")
    if min(inputs.size, inputs.samples) * widest > LARGEST_BATCH:
        raise DataError(
            f"batches of {inputs.size:,} rows of {widest:,} columns are too large: name a --batch-size of "
            f"at most {max(1, LARGEST_BATCH // widest):,}"
        )


def _run(
    grid: Grid, made: Module, inputs: Inputs, new: NewHdf5 | None, target: Path, tell: Tell, scale: ColumnScale | None
) -> None:
    passes = Passes.of(made)
    with made.evaluating(), unchanged(made.grid):
        for start in range(0, inputs.samples, inputs.size):
            rows = min(inputs.size, inputs.samples - start)
            values = passes.output(made, inputs.batch(start, rows)).gather(0)
            agreed = grid.collective_call("predict: writing", start, always=True)
            with agreed, file_errors(target, "written"):
                if values is not None and new is not None:
                    values = inputs.library.to_numpy(inputs.library.astype(values, inputs.dtype))
                    _write(new, start, values if scale is None else scale.undo(values))
                    tell(start + rows, inputs.samples)


def _create(new: NewHdf5, shapes: dict[str, tuple[int, ...]], known: Recalled, facts: dict[str, str]) -> None:
    for name, shape in shapes.items():
        new.file.create_dataset(name, shape, "int64" if name == "classes" else known.config.network.dtype)
    new.file.attrs.update(facts)
    for name in [] if "classes" in shapes or known.samples.target_names is None else shapes:
        new.file[name].attrs["columns"] = known.samples.target_names
    if "classes" in shapes and known.samples.class_names is not None:
        new.file["classes"].attrs["class_names"] = known.samples.class_names


def _write(new: NewHdf5, start: int, values: np.ndarray) -> None:
    """Write outputs from sample `start` on. Raises OSError."""
    file, rows = new.file, slice(start, start + len(values))
    file["outputs"][rows] = values
    if "probabilities" in file:
        file["probabilities"][rows] = softmax(values, axis=1) if "classes" in file else expit(values)
    if "classes" in file:
        file["classes"][rows] = values.argmax(axis=1)
    new.check()


@contextmanager
def _target(
    grid: Grid, target: Path, shapes: dict[str, tuple[int, ...]], known: Recalled, facts: dict[str, str]
) -> Iterator[NewHdf5 | None]:
    """Context of the file, on rank 0 only. The file has another name until it is complete. Collective."""
    temporary, new = target.with_name(target.name + ".writing"), None
    try:
        with grid.collective_call("predict: writing", str(target), always=True), file_errors(target, "written"):
            if grid.rank == 0:
                new = NewHdf5(temporary)
                _create(new, shapes, known, facts)
        yield new
        with grid.collective_call("predict: completing", always=True), file_errors(target, "written"):
            if new is not None:
                new.complete()
                os.replace(temporary, target)
                sync(target.absolute().parent)
    finally:
        if new is not None:
            new.abandon()
            temporary.unlink(missing_ok=True)  # if the rename failed
