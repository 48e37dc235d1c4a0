"""Batches of a data set, which a thread reads ahead."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from math import prod
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Protocol

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..errors import DataError, check_regular, needs
from ..layout import Layout
from ..product import DistMatrix

with needs("io", "data sets"):
    import h5py

COPIED_AT_ONCE = 2**18
"""Elements gathered from a cached data set before they are converted."""

Rows = slice | np.ndarray
"""Of a data set, ascending: a slice where they are consecutive."""
Arrays = list[np.ndarray]
"""This rank's shards of the inputs and of the targets of a batch."""


@dataclass(frozen=True)
class Plan:
    """Which rows of `samples` make which batch: the same on all ranks, and a part of a loader's state."""

    samples: int
    rows: list[int]
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    def size(self, batch: int) -> int:
        """Rows of a batch, over all ranks; 0 or less if there is none."""
        return min(self.batch_size, self.rows[1] - self.rows[0] - batch * self.batch_size)


class Samples(Protocol):
    """What a loader needs of its `DataSet`: the two data sets, what their batches are to be, and where."""

    grid: Grid
    path: str
    file: SourceFile
    inputs: h5py.Dataset
    targets: h5py.Dataset
    features: int
    outputs: int
    labelled: bool
    dtype: str
    library: NumpyLibrary
    cache_bytes: int

    def check_labels(self, labels: np.ndarray, rows: Rows) -> None: ...


class Loader(AbstractContextManager["Loader"]):
    """Batches of a DataSet, made by `DataSet.loader`: `for x, y in loader` goes through the rest of the current epoch.

    x    (batch, features)   in batch_layout(split_inputs)
    y    (batch, 1) int64    labels, whole on each rank that holds the row; or (batch, outputs) in
                             batch_layout(split_targets)

    epoch, batch   position: batches 0 to batch - 1 of the epoch, which has len(loader), have been handed out

    A batch may be used until the next but one is asked for: its arrays are then filled anew (prefetch + 2 sets of them
    go round). Each batch costs one all-reduce of 24 bytes. What goes wrong while a batch is read, samples that are not
    finite and labels without a class are raised as DataError, by all ranks, when that batch is asked for; asked again,
    it is read again. On the grid of a dry run nothing is read.

        >>> import tempfile, h5py
        >>> from pmm3d.io import DataSet
        >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
        ...     with h5py.File(path := f"{folder}/data.h5", "w") as file:
        ...         file["x"], file["y"] = np.ones((10, 8)), np.arange(10) % 3
        ...     with DataSet(grid, grid.comm.bcast(path)) as data:
        ...         [x.shape for x, y in data.loader(4)]
        [(4, 8), (4, 8), (2, 8)]
    """

    def __init__(self, data: Samples, plan: Plan, layouts: tuple[Layout, Layout], prefetch: int):
        self.data, self.epoch, self.batch = data, 0, 0
        self._plan, self._layouts, self._sets = plan, layouts, prefetch + 2
        numbers = "float32" if data.dtype == "bfloat16" else data.dtype
        self._inputs = self._columns(data.inputs, data.features, layouts[0], numbers)
        self._targets = self._columns(data.targets, data.outputs, layouts[1], "int64" if data.labelled else numbers)
        self._reader: _Reader | None = None
        self._buffers: list[list[Array]] = []

    def _columns(self, dataset: Any, width: int, layout: Layout, dtype: str) -> Columns:
        box = layout.box((self._plan.size(0), width), self.data.grid.shape, self.data.grid.coords)
        return Columns(dataset, self._plan.rows, (box.c0, box.c1), box.r1 - box.r0, dtype, self.data.cache_bytes)

    def __len__(self) -> int:
        whole, rest = divmod(self._plan.rows[1] - self._plan.rows[0], self._plan.batch_size)
        return whole + (rest > 0 and not self._plan.drop_last)

    def __iter__(self) -> Iterator[tuple[DistMatrix, DistMatrix]]:
        while self.batch < len(self):
            yield self._next()
        self.epoch, self.batch = self.epoch + 1, 0

    def _next(self) -> tuple[DistMatrix, DistMatrix]:
        data, size, length = self.data, self._plan.size(self.batch), len(self)
        try:
            with data.grid.together("Loader", data.path, self.epoch, self.batch):
                if self._reader is None and data.library.has_data:
                    batches = (divmod(number, length) for number in count(self.epoch * length + self.batch))
                    self._reader = _Reader(data, self._plan, self._layouts[0], self._inputs, self._targets, batches,
                                           self._sets)
                    self._end = weakref.finalize(self, self._reader.stop)
                x, y = self._dry(size) if self._reader is None else self._read(self._reader)
        except Exception:
            self._stop()
            raise
        self.batch += 1
        return (DistMatrix(data.grid, x, (size, data.features), self._layouts[0]),
                DistMatrix(data.grid, y, (size, data.outputs), self._layouts[1]))

    def _read(self, reader: _Reader) -> tuple[Array, Array]:
        """This rank's shards of the next batch."""
        library, data = self.data.library, self.data
        with data.grid.ledger.waiting("loader"):
            x, y = reader.take()
        return library.from_numpy(x, data.dtype), library.from_numpy(y, "int64" if data.labelled else data.dtype)

    def _dry(self, size: int) -> tuple[Array, Array]:
        """The same without data, in buffers that go round."""
        data, widths = self.data, (self.data.features, self.data.outputs)
        dtypes = data.dtype, "int64" if data.labelled else data.dtype
        most, here = ([layout.box((rows, width), data.grid.shape, data.grid.coords).shape
                       for layout, width in zip(self._layouts, widths)] for rows in (self._plan.size(0), size))
        if not self._buffers:
            self._buffers = [[data.library.empty(shape, dtype) for shape, dtype in zip(most, dtypes)]
                             for _ in range(self._sets)]
        x, y = self._buffers[self.batch % self._sets]
        return x[: here[0][0]], y[: here[1][0]]

    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out, for JSON. Fits any grid."""
        return {"epoch": self.epoch, "batch": self.batch, **asdict(self._plan)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; collective. Raises DataError if it belongs to other batches than these."""
        with self.data.grid.together("Loader.load_state", state):
            if missing := [key for key in self.state() if key not in state]:
                raise DataError(f"this is no state of a Loader: it lacks {', '.join(missing)}")
            plan = asdict(self._plan).items()
            if differ := [f"{key} was {state[key]}, is {value}" for key, value in plan if state[key] != value]:
                raise DataError(f"the state belongs to other batches: {'; '.join(differ)}")
            check_at_least(0, epoch=state["epoch"], batch=state["batch"])
            if state["batch"] > len(self):
                raise DataError(f"the state is at batch {state['batch']}; an epoch has {len(self)}")
            self._stop()
            self.epoch, self.batch = state["epoch"], state["batch"]

    def close(self) -> None:
        """End the thread and forget what it read. The position stays."""
        self._stop()
        self._inputs.cache = self._targets.cache = None

    def _stop(self) -> None:
        if self._reader is not None:
            self._end()
        self._reader = None

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reader:
    """Reads this rank's part of batches ahead, in a thread without MPI, and checks it: of `batches`, the (epoch, batch)
    in the order in which they will be taken, into as many `sets` of arrays, which go round. The thread is a daemon, and
    waits for one batch at most when it is to stop: a program that ends does not wait for what nobody will take."""

    def __init__(self, data: Samples, plan: Plan, layout: Layout, inputs: Columns, targets: Columns,
                 batches: Iterator[tuple[int, int]], sets: int):
        self._data, self._plan, self._layout, self._inputs, self._targets = data, plan, layout, inputs, targets
        self._order, self._shuffled = np.empty((plan.rows[1] - plan.rows[0]) * plan.shuffle, np.int64), -1
        self._free: SimpleQueue[Arrays] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Arrays, int] | Exception] = SimpleQueue()
        self._in_use: deque[Arrays] = deque()
        self._stopped = False
        for _ in range(sets):
            self._free.put([inputs.buffer(), targets.buffer()])
        self._thread = Thread(target=self._run, args=(batches,), name="pmm3d loader", daemon=True)
        self._thread.start()

    def _run(self, batches: Iterator[tuple[int, int]]) -> None:
        try:
            while (arrays := self._free.get()) and not self._stopped:
                self._ready.put((arrays, self._read(*next(batches), arrays)))
        except Exception as error:
            self._ready.put(error)

    def take(self) -> Arrays:
        """The next batch, once it is read; the one before the last is let go. Raises what went wrong."""
        if len(self._in_use) == 2:
            self._free.put(self._in_use.popleft())
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        arrays, rows = found
        self._in_use.append(arrays)
        return [array[:rows] for array in arrays]

    def stop(self) -> None:
        """End the thread, once what it reads is read."""
        self._stopped = True
        self._free.put([])
        if self._thread is not current_thread():  # which may collect the loader as garbage
            self._thread.join()

    def _read(self, epoch: int, batch: int, arrays: Arrays) -> int:
        """Fill the first rows of the arrays; returns how many these are."""
        rows, data = self._rows(epoch, batch), self._data
        rows_here = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        x, y = (array[:rows_here] for array in arrays)
        if rows_here:
            with data.file.unchanged():
                self._inputs.read(rows, x)
                self._targets.read(rows, y)
            self._check_finite(x, self._inputs, rows)
            if data.labelled:
                data.check_labels(y, rows)
            else:
                self._check_finite(y, self._targets, rows)
        return rows_here

    def _check_finite(self, values: np.ndarray, columns: Columns, rows: Rows) -> None:
        if values.size == 0 or (np.isfinite(values.min()) and np.isfinite(values.max())):
            return
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DataError(f"{self._data.path}: row {np.r_[rows][row]} of data set {columns.name!r} holds "
                        f"{values[row, column]} in column {columns.low + column}, as {values.dtype}")

    def _rows(self, epoch: int, batch: int) -> Rows:
        """This rank's rows of a batch."""
        first, size = batch * self._plan.batch_size, self._plan.size(batch)
        box = self._layout.box((size, self._data.features), self._data.grid.shape, self._data.grid.coords)
        start, stop = self._plan.rows
        if not self._plan.shuffle:
            return slice(start + first + box.r0, start + first + box.r1)
        if self._shuffled != epoch:
            self._order.fill(1)
            self._order[0] = start
            self._order.cumsum(out=self._order)  # start:stop, in the memory that is there
            np.random.default_rng([self._plan.seed, epoch]).shuffle(self._order)
            self._shuffled = epoch
        rows = np.sort(self._order[first : first + size])[box.r0 : box.r1]
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
        return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows


class SourceFile:
    """An HDF5 file, open for reading, that must stay as it is: HDF5 reads zeros where a file has become shorter."""

    def __init__(self, path: str):
        self.path = path
        try:
            check_regular(path)
            self._identity = self._identify()
            self.h5 = h5py.File(path, "r", locking="best-effort")
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror or error}") from None

    def _identify(self) -> tuple[int, int]:
        status = os.stat(self.path)
        return status.st_ino, status.st_size

    def dataset(self, name: str) -> h5py.Dataset:
        """The data set of that name, if it holds rows of numbers."""
        dataset = self.h5.get(name) if isinstance(name, str) else None
        if not isinstance(dataset, h5py.Dataset):
            there: list[str] = []
            self.h5.visititems(lambda name, item: there.append(name) if isinstance(item, h5py.Dataset) else None)
            raise DataError(f"{self.path} has no data set {name!r}; it has {', '.join(map(repr, there))}")
        if not dataset.shape:
            raise DataError(f"{self.path}: data set {name!r} has no dims; its first dim must be that of the samples")
        if 0 in dataset.shape:
            raise DataError(f"{self.path}: data set {name!r} is empty: its shape is {dataset.shape}")
        if dataset.dtype.kind not in "fiu":
            kind = "strings" if h5py.check_string_dtype(dataset.dtype) else dataset.dtype
            raise DataError(f"{self.path}: data set {name!r} holds {kind}; needed are real numbers")
        return dataset

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """The body reads. Raises DataError if it cannot, or if the file is no longer the one that was opened."""
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        try:
            changed = self._identify() != self._identity
        except OSError as error:
            raise DataError(f"lost {self.path} while reading: {error.strerror}") from None
        if changed:
            raise DataError(f"{self.path} has been replaced or has changed its size since it was opened")
        if problem is not None:
            raise DataError(f"cannot read {self.path}: {problem}") from problem


class Columns:
    """Columns low:high of rows first:last of a data set whose dims after the first are flattened.

    At most `most` rows are read at a time, and converted to `dtype`. If the data set is stored in chunks and these
    columns take no more than `cache_bytes`, all are read at once and kept: a row from a chunk costs the reading of the
    chunk (30 us a row uncompressed, 200 us compressed, against 3 us contiguous).
    """

    def __init__(self, dataset: h5py.Dataset, rows: Sequence[int], columns: Sequence[int], most: int, dtype: str,
                 cache_bytes: int):
        self.dataset, self.name = dataset, dataset.name.removeprefix("/")
        (self.first, self.last), (self.low, self.high) = rows, columns
        self._most, self._dtype = most, dtype
        # Of the first feature dim longer than 1, the range that covers the columns; the dims after it are whole.
        dims = dataset.shape[1:]
        ones = next((at for at, extent in enumerate(dims) if extent > 1), max(0, len(dims) - 1))
        inner = prod(dims[ones + 1 :])
        start, stop = self.low // inner, -(-self.high // inner)
        self._selection = (slice(0, 1),) * ones + (slice(start, stop),) if dims else ()
        self._dims = (1,) * ones + (stop - start, *dims[ones + 1 :]) if dims else ()
        self._width = (stop - start) * inner
        self._within = slice(self.low - start * inner, self.high - start * inner)
        self._scratch = None if self._width == self.high - self.low else np.empty((most, self._width), dtype)
        nbytes = (self.last - self.first) * self._width * dataset.dtype.itemsize
        self._caching = dataset.chunks is not None and nbytes <= cache_bytes
        self.cache: np.ndarray | None = None

    def buffer(self) -> np.ndarray:
        """For as many rows as are read at a time."""
        return NumpyLibrary().empty((self._most, self.high - self.low), self._dtype)

    def read(self, rows: Rows, out: np.ndarray) -> None:
        """Fill out (rows, high - low)."""
        if out.size == 0:
            return
        if self._caching:
            self._read_cached(rows, out)
        elif self._scratch is None:
            self._read_file(rows, out)
        else:
            covering = self._scratch[: len(out)]
            self._read_file(rows, covering)
            out[...] = covering[:, self._within]

    def _read_file(self, rows: Rows, out: np.ndarray) -> None:
        self.dataset.read_direct(out.reshape(len(out), *self._dims), (rows, *self._selection))

    def _read_cached(self, rows: Rows, out: np.ndarray) -> None:
        if self.cache is None:
            whole = np.empty((self.last - self.first, self._width), self.dataset.dtype)
            self._read_file(slice(self.first, self.last), whole)
            self.cache = whole[:, self._within]
        if isinstance(rows, slice):
            out[...] = self.cache[rows.start - self.first : rows.stop - self.first]
            return
        step = max(1, COPIED_AT_ONCE // out.shape[1])
        for start in range(0, len(out), step):
            out[start : start + step] = self.cache[rows[start : start + step] - self.first]


def check_at_least(least: int, **numbers: Any) -> None:
    """Raises DataError for what is no whole number of at least that."""
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
            raise DataError(f"{name} is a whole number of at least {least}; got {number!r}")
