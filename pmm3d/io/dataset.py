"""Samples and targets, returned as batches that are distributed over a grid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary, check_matrix_dtype, library_kind
from ..comm import Grid
from ..errors import DataError, DTypeError
from ..layout import batch_layout, part_range
from ..text import names_in_words
from .conversion import TABLE
from .loader import Batched, Loader, Some
from .mixture import AnySource, fingerprint_of, name_of, opened_source, pieces_of, place_of
from .reader import Rows, Source
from .scaling import Scaling, column_scale
from .split import OfSource, RowSet

ROWS_AT_ONCE = 2**16
"""Number of labels that are read at a time when they are counted."""
MOST_CLASSES = 1000
"""Number of classes up to which labels may have more classes than samples."""


class DataSet(Batched):
    """Samples and their targets: two data sets of an HDF5 file, or pairs of a Python object, or a mixture of both.

    Parameters
    ----------
    grid : Grid
        The grid. Opening and all methods are collective over it.
    source : str, Path, object of pairs, or Mixture
        An HDF5 file with data sets of equal numbers of rows; or an object with `__len__` and `__getitem__`, such as a
        Dataset of torch or a list, whose item is a pair (x, y) of numbers, arrays or tensors. All items have equal
        shapes, and an item is the same whenever it is read. Each rank makes the object and reads only the items of its
        rows, in a thread. A `Mixture` draws rows of several of them.
    inputs : str
        Name of the samples: numbers, (n,) or (n, ...). Dims after the first are flattened to features. Those of pairs
        have the name "x".
    targets : str
        Name of the targets. Integers, (n,) or (n, 1), are labels of the classes 0, 1, ...; other numbers are vectors,
        flattened likewise. Those of pairs have the name "y", and False and True are 0 and 1 there.
    dtype : str or dtype
        Element type of inputs and vectors. Default: "float32". Labels are int64.
    library : str or None
        Array library of the batches, as in `DistMatrix.empty`. Default: the library of the grid.
    classes : int or sequence of str or None
        Number of classes. Default: that of the attribute `class_names` of the targets, or 1 + the largest label; each
        rank reads its share of the labels for that, and so of the pairs. With a list of names, as of another file,
        labels are renumbered by the names in the attribute.
    labels : bool or None
        Whether the targets are labels. Default: integers are labels.
    cache_bytes : int
        Limit of the cache of each loader, in bytes. Default: 256 MiB. A data set in chunks is read once into memory, if
        its single rows are slow to read and it is not larger. So is a contiguous data set of at most 16 MiB.

    Attributes
    ----------
    samples, features, outputs : int
        Number of rows, of columns of the inputs, and of columns of the targets (1 for labels).
    classes : int or None
        Number of classes; None for vectors.
    class_names : list of str or None
        Names of the classes, in the order of their numbers.
    columns : list of str or None
        Names of the inputs' columns, as `pmm3d convert` writes them.
    target_names : list of str or None
        Names of the columns of targets that are values, likewise.
    table : dict or None
        Description of the table from which `pmm3d convert` made the samples, by which other tables are converted.
    of_probabilities : bool
        Whether loaders refuse targets below 0 or above 1. Default: False.
    facts : dict of str to list of str
        Names that are compared with those of stored weights: "columns", "targets" that are values, and "classes" in the
        order of the numbers in batches. Names that the file lacks are left out.
    fingerprint : str
        Digest of names, shapes, types, class names, and of all values, or of some rows if there are many. It is the
        same on every rank and grid.

    Raises
    ------
    DataError
        On every rank: for a file or data set that is missing, empty, of another type or number of rows, never written,
        or different on other ranks; for labels below 0 or too large; if a file that is read is changed later; for an
        item that raises an error, or that is no pair of the shapes of item 0, with its index.

    Notes
    -----
    Data sets may be virtual, external, or behind links. Use the data set as a context manager, or call `close`, which
    closes its loaders too.

    Examples
    --------
    >>> import tempfile, h5py, numpy as np
    >>> from pmm3d import Grid
    >>> from pmm3d.io import DataSet
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     with h5py.File(path := f"{folder}/data.h5", "w") as file:
    ...         file["x"], file["y"] = np.ones((10, 2, 4)), np.arange(10) % 3
    ...     with DataSet(grid, grid.comm.bcast(path)) as data:
    ...         data.samples, data.features, data.classes
    (10, 8, 3)

    Pairs of a Python object:

    >>> pairs = [(np.full(4, number), number % 2) for number in range(6)]
    >>> with Grid() as grid, DataSet(grid, pairs) as data:
    ...     [y.gather().ravel().tolist() for x, y in data.loader(4, shuffle=False)]
    [[0, 1, 0, 1], [0, 1]]
    """

    def __init__(
        self,
        grid: Grid,
        source: AnySource,
        inputs: str = "x",
        targets: str = "y",
        *,
        dtype: Any = "float32",
        library: str | NumpyLibrary | None = None,
        classes: int | Sequence[str] | None = None,
        labels: bool | None = None,
        cache_bytes: int = 2**28,
    ):
        super().__init__()
        self.grid, self.path, self.cache_bytes, self.of_probabilities = grid, name_of(source), cache_bytes, False
        largest, fingerprint = -1, ""
        with grid.collective_call(
            "DataSet", self.path, inputs, targets, dtype, library_kind(library), classes, labels, cache_bytes
        ):
            self.library = grid.library(library)
            self.dtype = _float_dtype(dtype, self.library)
            self.file = opened_source(source)
            self.inputs, self.targets = self.file.dataset(inputs), self.file.dataset(targets)
            self.samples = len(self.inputs)
            if len(self.targets) != self.samples:
                raise DataError(f"{self.path}: {inputs!r} has {self.samples} rows, {targets!r} has {len(self.targets)}")
            self.of_parts = [len(stored) for stored in pieces_of(self.inputs)]
            if [len(stored) for stored in pieces_of(self.targets)] != self.of_parts:
                raise DataError(f"{self.path}: {inputs!r} and {targets!r} have different numbers of rows in a source")
            self.features, self.outputs = prod(self.inputs.shape[1:]), prod(self.targets.shape[1:])
            self.labelled = labels is not False and self.targets.dtype.kind in "iu" and self.outputs == 1
            self.class_names, self.columns = self._names(), columns_of(self.inputs)
            self.target_names = None if self.labelled else columns_of(self.targets)
            self.table: dict[str, Any] | None = json.loads(self.inputs.attrs.get(TABLE, "null"))
            named = list(map(str, classes)) if isinstance(classes, (list, tuple)) else self.class_names
            known = ("columns", self.columns), ("targets", self.target_names), ("classes", named)
            self.facts = {name: texts for name, texts in known if texts}
            self.numbering: np.ndarray | None = None
            self.classes = self._known_classes(classes)
            if self.labelled and self.classes is None:
                largest = self._largest_label()
            if grid.rank == 0 or grid.dry_run is not None:
                self.file.verify()
                fingerprint = fingerprint_of(self.file, [*zip(pieces_of(self.inputs), pieces_of(self.targets))])
        shapes, agreed = (self.inputs.shape, self.targets.shape), self.file.agreed
        with grid.collective_call("DataSet", self.path, *shapes, agreed, self.labelled, self.classes):
            pass
        if self.labelled and self.classes is None:
            self.classes = max(grid.comm.allgather(largest)) + 1
        self.fingerprint = grid.comm.bcast(fingerprint)

    def _names(self) -> list[str] | None:
        names = self.targets.attrs.get("class_names") if self.labelled else None
        if names is not None and (np.ndim(names) != 1 or len(names) == 0):
            raise DataError(
                f"{self.path}: the attribute class_names of data set {self.targets.name[1:]!r} is no "
                f"list of names: {names!r}. Write one name for each class, or remove it"
            )
        return None if names is None else list(map(text_of, names))

    def _known_classes(self, classes: int | Sequence[str] | None) -> int | None:
        """Return the number of classes, as given or from the names in the file. None: only the labels show it, or the
        targets are vectors."""
        if classes is None:
            return None if self.class_names is None else len(self.class_names)
        if not self.labelled:
            raise DataError(
                f"{self.path}: classes is {classes!r}, but the targets are no labels: data set "
                f"{self.targets.name[1:]!r} holds {self.targets.dtype}, {self.targets.shape}"
            )
        if isinstance(classes, (list, tuple)):
            self._number_by(list(map(str, classes)))
            return len(classes)
        if not isinstance(classes, (int, np.integer)) or classes < 1:
            raise DataError(f"classes is a number of at least 1; got {classes!r}")
        if self.class_names is not None and classes != len(self.class_names):
            raise DataError(
                f"{self.path}: classes is {classes}, but class_names lists {len(self.class_names)}: leave "
                "classes (data.classes) out"
            )
        return int(classes)

    def _number_by(self, names: list[str]) -> None:
        """Renumber the labels in the order of these class names. Raises DataError for a class that is not among
        them."""
        numbers = {name: number for number, name in enumerate(names)}
        own = self.class_names or []
        if unknown := [name for name in own if name not in numbers]:
            raise DataError(
                f"{self.path}: the class {unknown[0]!r} is none of {names_in_words(names)}, the classes of "
                f"the other file. Remove its samples, or convert both with the same --class-names"
            )
        if own and own != names:
            self.numbering = np.array([numbers[name] for name in own], np.int64)

    def renumbered(self, labels: np.ndarray, rows: Rows, dataset: Any) -> np.ndarray:
        """Return the classes of the labels of these rows. Raises DataError for a label that is no class."""
        self.check_labels(labels, rows)
        return labels if self.numbering is None else self.numbering[labels]

    def class_counts(self, *parts: RowSet | OfSource) -> np.ndarray:
        """Return the number of samples of each class, (parts, classes), in parts of `split`. Collective."""
        counts = np.zeros((len(parts), self.classes or 0), np.int64)
        low, high = part_range(self.samples, self.grid.size, self.grid.rank)
        with self.grid.collective_call("DataSet.class_counts", *map(str, parts), always=True):
            for start in range(low, high, ROWS_AT_ONCE):
                rows = np.arange(start, min(start + ROWS_AT_ONCE, high))
                with self.file.unchanged():
                    labels = self.targets[start : start + len(rows)].reshape(-1)
                labels = self.renumbered(labels, slice(start, start + len(rows)), self.targets)
                for index, part in enumerate(parts):
                    counts[index] += np.bincount(labels[part.has(rows)], minlength=counts.shape[1])
        total: np.ndarray = self.grid.comm.allreduce(counts)
        return total

    def _largest_label(self) -> int:
        """Return the largest label of this rank's share, or of all labels in a dry run, which has no other ranks."""
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
                raise DataError(
                    f"{self.path}: data set {self.targets.name[1:]!r} has the label {largest}, which "
                    f"makes {largest + 1} classes of {self.samples} samples: number the classes 0, 1, ..., "
                    "pass their number as classes= (data.classes) if it is right, or use the targets as "
                    'values: labels=False (training.loss = "mse")'
                )
        return largest

    def check_labels(self, labels: np.ndarray, rows: Rows) -> None:
        """Raise DataError for a label in these rows that is no class."""
        labels = labels.reshape(-1)
        most = self.classes if self.numbering is None else len(self.numbering)
        wrong = (labels < 0) | (most is not None and labels >= most)
        if wrong.any():
            at, known = wrong.argmax(), "at least 0" if most is None else f"0 to {most - 1}"
            path, row = place_of(self.targets, self.path, np.r_[rows][at])
            raise DataError(
                f"{path}: row {row} of data set {self.targets.name[1:]!r} is the label {labels[at]}; labels are {known}"
            )

    def scaling(self, rows: RowSet) -> Scaling:
        """Return mean and standard deviation of the columns of these rows, for `Loader.standardize`. Collective.

        The targets have scales if they are values. The numbers are the same on every rank and grid.

        Parameters
        ----------
        rows : RowSet
            The rows to train on, a part of `split`.
        """
        scales = [
            column_scale(self.grid, self.file, dataset, rows, self.dtype, names)
            for dataset, names in ((self.inputs, self.columns), (self.targets, self.target_names))
            if dataset is self.inputs or not self.labelled
        ]
        return Scaling(*scales)

    def loader(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        split_inputs: str | None = "y",
        split_targets: str | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        rows: Some = None,
        micro_batches: int = 1,
    ) -> Loader:
        """A Loader of batches of the samples. Collective.

        Parameters
        ----------
        batch_size : int
            Rows of a batch, over all ranks. The last batch of an epoch has fewer.
        shuffle : bool
            Permute the rows in each epoch. The permutation depends only on seed and epoch, and is computed, not stored.
            Inside a batch, samples keep the order of the file.
        seed : int
            Seed of the permutation.
        split_inputs, split_targets : str or None
            Axis that splits the columns; None: no axis. See `Loader`.
        drop_last : bool
            Leave out the last batch of an epoch if it has fewer rows.
        prefetch : int
            Number of batches that a thread reads ahead.
        rows : (int, int), slice, RowSet or None
            The samples to use: (start, stop), a slice, or a part of `split`. Default: all. A range of a mixture has no
            weights, and needs shuffle=False.
        micro_batches : int
            Number of parts of a batch, which the loader returns one after the other. A batch of fewer rows has one part
            for each row.

        Raises
        ------
        DataError
            On every rank, for numbers that make no batches.
        LayoutError
            On every rank, for an axis that does not exist.
        """
        of_targets = "int64" if self.labelled else self.dtype
        sources = (
            Source(self.inputs, self.features, batch_layout(split_inputs), self.dtype),
            Source(self.targets, self.outputs, batch_layout(split_targets), of_targets),
        )
        sources[1].of_probabilities = self.of_probabilities
        return self._loader(sources, batch_size, shuffle, seed, drop_last, prefetch, rows, micro_batches)


def columns_of(inputs: Any) -> list[str] | None:
    """Return the names of the columns of samples; None unless an attribute names every column."""
    names = inputs.attrs.get("columns")
    return None if np.shape(names) != (prod(inputs.shape[1:]),) else list(map(text_of, names))


def text_of(name: Any) -> str:
    """Return the text of an attribute, which may be bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _float_dtype(dtype: Any, library: NumpyLibrary) -> str:
    """Return the name, such as "float32", of a name, a numpy type or a torch dtype. Raises DTypeError for other
    types."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    if check_matrix_dtype(name, library).startswith("complex"):
        raise DTypeError(f"samples are real; got {name}")
    return name
