"""Samples in an HDF5 file, handed out as batches that are spread over a grid."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, suppress
from math import prod
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary, check_matrix_dtype, library_kind
from ..comm import Grid
from ..errors import DataError, DTypeError
from ..layout import batch_layout, part_range
from .loader import Loader, check_at_least
from .reader import Plan, Rows
from .source import SourceFile

ROWS_AT_ONCE = 2**16
"""Of labels, when they are counted."""
MOST_CLASSES = 2**20
"""That labels may make by themselves where there are fewer samples than that."""


class DataSet(AbstractContextManager["DataSet"]):
    """Samples and their targets: two data sets of an HDF5 file, of as many rows. Collective over the grid.

    inputs       name of the samples: numbers, (n,) or (n, ...); dims after the first are flattened to features
    targets      integers (n,) or (n, 1): labels of classes 0, 1, ...; other numbers: vectors, flattened likewise
    dtype        of the inputs and of targets that are vectors; labels are int64
    library      of the batches' arrays, as in DistMatrix; the grid's if left out
    classes      number of classes; left out, it is that of the attribute `class_names` of the targets or 1 + the
                 largest label, for which each rank reads its share of the labels
    cache_bytes  a data set in chunks, of which single rows are slow to read, is read into memory once (by each loader,
                 only this rank's columns) if that takes no more bytes. So is a contiguous one, if that takes no more
                 than 16 MiB either

    links        whether data sets may lie elsewhere: other files that this one names (external storage, external links,
                 virtual data sets), and soft links. Left out, they are refused, with what they lead to

    samples, features, outputs (columns of the targets; 1 for labels), classes (None for vectors)
    fingerprint   of what is in the data sets, by their names, shapes, types, names of classes and values (all if they
                  are few, else those of some rows); the same on every rank and grid

    The file must stay as it is while it is in use: DataError, on every rank, if it is written to or replaced. Use as a
    context manager, or close(), which closes the loaders too.
    Raises DataError, on every rank: a file or data set that is missing (with the names of those there are), empty, of
    another type or number of rows, never written, or differs between the ranks; labels below 0, or so large that
    they are no numbers of classes.

        >>> import tempfile, h5py
        >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
        ...     with h5py.File(path := f"{folder}/data.h5", "w") as file:
        ...         file["x"], file["y"] = np.ones((10, 2, 4)), np.arange(10) % 3
        ...     with DataSet(grid, grid.comm.bcast(path)) as data:
        ...         data.samples, data.features, data.classes
        (10, 8, 3)
    """

    def __init__(self, grid: Grid, path: str | os.PathLike[str], inputs: str = "x", targets: str = "y", *,
                 dtype: Any = "float32", library: str | NumpyLibrary | None = None, classes: int | None = None,
                 cache_bytes: int = 2**28, links: bool = False):
        self.grid, self.path, self.cache_bytes = grid, str(path), cache_bytes
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        largest, fingerprint = -1, ""
        with grid.together("DataSet", self.path, inputs, targets, dtype, library_kind(library), classes, cache_bytes,
                           links):
            self.library = grid.library(library)
            self.dtype = _float_dtype(dtype, self.library)
            self.file = SourceFile(self.path, bool(links))
            self.inputs, self.targets = self.file.dataset(inputs), self.file.dataset(targets)
            self.samples = len(self.inputs)
            if len(self.targets) != self.samples:
                raise DataError(f"{self.path}: {inputs!r} has {self.samples} rows, {targets!r} has {len(self.targets)}")
            self.features, self.outputs = prod(self.inputs.shape[1:]), prod(self.targets.shape[1:])
            self.labelled = self.targets.dtype.kind in "iu" and self.outputs == 1
            self.classes = self._known_classes(classes)
            if self.labelled and self.classes is None:
                largest = self._largest_label()
            if grid.rank == 0 or grid.dry_run is not None:
                fingerprint = self.file.fingerprint(self.inputs, self.targets)
        with grid.together("DataSet", self.path, self.inputs.shape, self.targets.shape, self.labelled, self.classes):
            pass
        if self.labelled and self.classes is None:
            self.classes = max(grid.comm.allgather(largest)) + 1
        self.fingerprint: str = grid.comm.bcast(fingerprint)

    def _known_classes(self, classes: int | None) -> int | None:
        """As given or by the names in the file; None where only the labels say it, or for vectors."""
        if classes is None:
            names = self.targets.attrs.get("class_names") if self.labelled else None
            if names is not None and (np.ndim(names) != 1 or len(names) == 0):
                raise DataError(f"{self.path}: the attribute class_names of data set {self.targets.name[1:]!r} is no "
                                f"list of names: {names!r}. Write one name for each class, or remove it")
            return None if names is None else len(names)
        if not self.labelled:
            raise DataError(f"{self.path}: classes is {classes!r}, but the targets are no labels: data set "
                            f"{self.targets.name[1:]!r} holds {self.targets.dtype}, {self.targets.shape}")
        if not isinstance(classes, (int, np.integer)) or classes < 1:
            raise DataError(f"classes is a number of at least 1; got {classes!r}")
        return int(classes)

    def _largest_label(self) -> int:
        """Of this rank's share of the labels; in a dry run, whose other ranks read none, of all."""
        low, high = part_range(self.samples, self.grid.size, self.grid.rank)
        if self.grid.dry_run is not None:
            low, high = 0, self.samples
        largest = -1
        for start in range(low, high, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, high))
            with self.file.unchanged():
                labels = self.targets[rows].reshape(-1)
            self.check_labels(labels, rows)
            if (largest := max(largest, int(labels.max()))) >= max(self.samples, MOST_CLASSES):
                raise DataError(f"{self.path}: data set {self.targets.name[1:]!r} has the label {largest}, which "
                                f"makes {largest + 1} classes of {self.samples} samples: number the classes 0, 1, ..., "
                                "give classes= if there are so many, or store floating point targets")
        return largest

    def check_labels(self, labels: np.ndarray, rows: Rows) -> None:
        """Raises DataError for a label in these rows that is below 0 or no class."""
        labels = labels.reshape(-1)
        wrong = (labels < 0) | (self.classes is not None and labels >= self.classes)
        if wrong.any():
            row, known = wrong.argmax(), "at least 0" if self.classes is None else f"0 to {self.classes - 1}"
            raise DataError(f"{self.path}: row {np.r_[rows][row]} of data set {self.targets.name[1:]!r} is the "
                            f"label {labels[row]}; labels are {known}")

    def loader(self, batch_size: int, *, shuffle: bool = True, seed: int = 0, split_inputs: str | None = "y",
               split_targets: str | None = None, drop_last: bool = False, prefetch: int = 2,
               rows: tuple[int, int] | slice | None = None) -> Loader:
        """A Loader of batches of the samples; collective.

        batch_size     rows of a batch, over all ranks; the last of an epoch has fewer, or is left out (drop_last)
        shuffle        by a permutation of all rows that depends on the seed and the epoch alone. A batch holds its
                       samples in the order of the file
        split_inputs, split_targets   the axis over which the columns are split, or None; see `batch_layout`
        prefetch       batches that a thread reads ahead
        rows           (start, stop) or a slice: the part of the samples to use, for instance to hold some out

        Raises DataError on every rank for numbers that make no batches, LayoutError for an axis that does not exist.
        """
        with self.grid.together("DataSet.loader", batch_size, shuffle, seed, split_inputs, split_targets, drop_last,
                                prefetch, rows):
            check_at_least(1, batch_size=batch_size, prefetch=prefetch)
            check_at_least(0, seed=seed)
            start, stop = _row_range(rows, self.samples)
            if drop_last and stop - start < batch_size:
                raise DataError(f"drop_last leaves no batch: {stop - start} rows, batch_size {batch_size}")
            plan = Plan(self.samples, [start, stop], int(batch_size), bool(shuffle), int(seed), bool(drop_last))
            loader = Loader(self, plan, (batch_layout(split_inputs), batch_layout(split_targets)), prefetch)
        self._loaders.add(loader)
        return loader

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()
        self.file.h5.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _float_dtype(dtype: Any, library: NumpyLibrary) -> str:
    """ "float32" from that name, a numpy type or a torch dtype."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    if check_matrix_dtype(name, library).startswith("complex"):
        raise DTypeError(f"samples are real; got {name}")
    return name


def _row_range(rows: tuple[int, int] | slice | None, samples: int) -> tuple[int, int]:
    """Start and stop of None, (start, stop) or a slice."""
    with suppress(TypeError, ValueError):
        asked = slice(None) if rows is None else rows if isinstance(rows, slice) else slice(*rows, 1)
        start, stop, step = asked.indices(samples)
        inside = all(bound is None or -samples <= bound <= samples for bound in (asked.start, asked.stop))
        if inside and step == 1 and start < stop:
            return start, stop
    raise DataError(f"rows is (start, stop) or a slice, of at least one of the {samples} samples; got {rows!r}")
