"""Samples in an HDF5 file, handed out as batches that are spread over a grid."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from queue import SimpleQueue

import numpy as np

from ..arrays import NumpyLibrary, check_matrix_dtype, library_named
from ..errors import DataError, DTypeError
from ..layout import batch_layout, part_range
from ..product import DistMatrix
from .hdf5 import Columns, SourceFile, row_number, width

ROWS_AT_ONCE = 2**16
"""Of labels, when they are counted."""


class DataSet:
    """Samples and their targets: two data sets of an HDF5 file, of as many rows. Collective over the grid.

    inputs       name of the samples: numbers, (n,) or (n, ...); dims after the first are flattened to features
    targets      integers (n,) or (n, 1): labels of classes 0, 1, ...; other numbers: vectors, flattened likewise
    dtype        of the inputs and of targets that are vectors; labels are int64
    library      whose arrays the batches are, as in DistMatrix
    classes      number of classes; left out, it is that of the attribute `class_names` of the targets or 1 + the
                 largest label, for which each rank reads its share of the labels
    cache_bytes  a data set in chunks, of which single rows are slow to read, is read into memory once (by each loader,
                 only this rank's columns) if that takes no more bytes. Contiguous data sets are never held in memory

    samples, features, outputs (columns of the targets; 1 for labels), classes (None for vectors)

    The file must stay as it is while it is in use. Use as a context manager, or close(), which closes the loaders too.
    Raises DataError, on every rank: a file or data set that is missing (with the names of those there are), empty, of
    another type or number of rows, or differs between the ranks; labels below 0.
    """

    def __init__(self, grid, path, inputs="x", targets="y", *, dtype="float32", library="numpy", classes=None,
                 cache_bytes=2**28):
        self.grid, self.path, self.cache_bytes = grid, str(path), cache_bytes
        self._loaders = weakref.WeakSet()
        largest = -1
        with grid.together("DataSet", self.path, inputs, targets, str(dtype), library, classes, cache_bytes):
            self.library = library_named(library)
            self.dtype = _float_dtype(dtype, self.library)
            self.file = SourceFile(self.path)
            self.inputs, self.targets = self.file.dataset(inputs), self.file.dataset(targets)
            self.samples = len(self.inputs)
            if len(self.targets) != self.samples:
                raise DataError(f"{self.path}: {inputs!r} has {self.samples} rows, {targets!r} has {len(self.targets)}")
            self.features, self.outputs = width(self.inputs), width(self.targets)
            self.labelled = self.targets.dtype.kind in "iu" and self.outputs == 1
            self.classes = self._classes(classes)
            if self.labelled and self.classes is None:
                largest = self._largest_label()
        with grid.together("DataSet", self.path, self.inputs.shape, self.targets.shape, self.labelled, self.classes):
            pass
        if self.labelled and self.classes is None:
            self.classes = max(grid.comm.allgather(largest)) + 1

    def _classes(self, classes) -> int | None:
        if classes is None:
            names = self.targets.attrs.get("class_names") if self.labelled else None
            return None if names is None else len(names)
        if not self.labelled:
            raise DataError(f"{self.path}: classes is {classes!r}, but the targets are no labels: data set "
                            f"{self.targets.name[1:]!r} holds {self.targets.dtype}, {self.targets.shape}")
        if not isinstance(classes, (int, np.integer)) or classes < 1:
            raise DataError(f"classes is a number of at least 1; got {classes!r}")
        return int(classes)

    def _largest_label(self) -> int:
        """Of this rank's share of the labels."""
        low, high = part_range(self.samples, self.grid.size, self.grid.rank)
        largest = -1
        for start in range(low, high, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, high))
            with self.file.unchanged():
                labels = self.targets[rows].reshape(-1)
            self.check_labels(labels, rows)
            largest = max(largest, int(labels.max()))
        return largest

    def check_labels(self, labels, rows) -> None:
        for at, bad in ((labels.argmin(), labels.min() < 0),
                        (labels.argmax(), self.classes is not None and labels.max() >= self.classes)):
            if bad:
                known = "at least 0" if self.classes is None else f"0 to {self.classes - 1}"
                raise DataError(f"{self.path}: row {row_number(rows, at)} of data set {self.targets.name[1:]!r} is the "
                                f"label {labels.reshape(-1)[at]}; labels are {known}")

    def check_finite(self, values, columns: Columns, rows) -> None:
        if values.size == 0 or (np.isfinite(values.min()) and np.isfinite(values.max())):
            return
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DataError(f"{self.path}: row {row_number(rows, row)} of data set {columns.name!r} holds "
                        f"{values[row, column]} in column {columns.low + column}, as {values.dtype}")

    def loader(self, batch_size, *, shuffle=True, seed=0, split_inputs="y", split_targets=None, drop_last=False,
               prefetch=2, rows=None) -> Loader:
        """Batches of the samples; collective.

        batch_size     rows of a batch, over all ranks; the last one of an epoch may have fewer, or is left out
                       (drop_last)
        shuffle        by a permutation of all rows that depends on the seed and the epoch alone. A batch holds its
                       samples in the order of the file
        split_inputs, split_targets   the axis over which the columns are split, or None; see `batch_layout`
        prefetch       batches that a thread reads ahead
        rows           (start, stop) or a slice: the part of the samples to use, for instance to hold some out

        Raises DataError on every rank for numbers that make no batches, LayoutError for an axis that does not exist.
        """
        with self.grid.together("DataSet.loader", batch_size, shuffle, seed, split_inputs, split_targets, drop_last,
                                prefetch, rows):
            _check_at_least(1, batch_size=batch_size, prefetch=prefetch)
            _check_at_least(0, seed=seed)
            start, stop = _row_range(rows, self.samples)
            if drop_last and stop - start < batch_size:
                raise DataError(f"drop_last leaves no batch: {stop - start} rows, batch_size {batch_size}")
            plan = {"samples": self.samples, "rows": [start, stop], "batch_size": int(batch_size),
                    "shuffle": bool(shuffle), "seed": int(seed), "drop_last": bool(drop_last)}
            loader = Loader(self, plan, batch_layout(split_inputs), batch_layout(split_targets), prefetch)
        self._loaders.add(loader)
        return loader

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()
        self.file.h5.close()

    def __enter__(self) -> DataSet:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Loader:
    """Batches of a DataSet, epoch after epoch; made by `DataSet.loader`.

        for x, y in loader:     the rest of the current epoch

    x    (batch, features)   in batch_layout(split_inputs)
    y    (batch, 1) int64    labels, whole on each rank that holds the row; or (batch, outputs) in
                             batch_layout(split_targets)

    epoch, batch   position: batches 0 to batch - 1 of the epoch have been handed out
    len()          batches per epoch

    A batch may be used until the next but one is asked for: its arrays are then filled anew (prefetch + 2 sets of them
    go round). Each batch costs one all-reduce of 24 bytes. What goes wrong while a batch is read, samples that are not
    finite and labels without a class are raised as DataError, by all ranks, when that batch is asked for; asked again,
    it is read again.
    """

    def __init__(self, data: DataSet, plan: dict, x_layout, y_layout, prefetch: int):
        self.data, self.epoch, self.batch = data, 0, 0
        self._plan, self._layouts = plan, (x_layout, y_layout)
        self._part = _Part(data, plan, x_layout, y_layout)
        self._sets, self._held = prefetch + 2, deque()
        self._reader = self._end = None

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self):
        while self.batch < len(self):
            yield self._next()
        self.epoch, self.batch = self.epoch + 1, 0

    def _next(self) -> tuple[DistMatrix, DistMatrix]:
        data, size = self.data, self._part.size(self.batch)
        try:
            with data.grid.together("Loader", data.path, self.epoch, self.batch):
                x, y = self._take()
                x = data.library.from_numpy(x, data.dtype)
                y = data.library.from_numpy(y, "int64" if data.labelled else data.dtype)
        except Exception:
            self._stop()
            raise
        self.batch += 1
        return (DistMatrix(data.grid, x, (size, data.features), self._layouts[0]),
                DistMatrix(data.grid, y, (size, data.outputs), self._layouts[1]))

    def _take(self):
        """This rank's blocks of the next batch, in one of the sets of buffers."""
        if self._reader is None:
            buffers = [self._part.buffers() for _ in range(self._sets)]
            self._reader = _Reader(self._part.read, buffers, self._part.from_here(self.epoch, self.batch))
            self._end = weakref.finalize(self, self._reader.stop)
        if len(self._held) == 2:
            self._reader.give_back(self._held.popleft())
        with self.data.grid.ledger.waiting("loader"):
            buffers, rows = self._reader.take()
        self._held.append(buffers)
        return [buffer[:rows] for buffer in buffers]

    def state(self) -> dict:
        """The position after the last batch handed out, for JSON. Fits any grid."""
        return {"epoch": self.epoch, "batch": self.batch, **self._plan}

    def load_state(self, state: dict) -> None:
        """Go on where `state` was taken; collective. Raises DataError if it belongs to other batches than these."""
        with self.data.grid.together("Loader.load_state", state):
            missing = [key for key in self.state() if key not in state]
            if missing:
                raise DataError(f"this is no state of a Loader: it lacks {', '.join(missing)}")
            differ = [f"{key} was {state[key]}, is {value}" for key, value in self._plan.items() if state[key] != value]
            if differ:
                raise DataError(f"the state belongs to other batches: {'; '.join(differ)}")
            _check_at_least(0, epoch=state["epoch"], batch=state["batch"])
            if state["batch"] > len(self):
                raise DataError(f"the state is at batch {state['batch']}; an epoch has {len(self)}")
            self._stop()
            self.epoch, self.batch = state["epoch"], state["batch"]

    def _stop(self) -> None:
        if self._reader is not None:
            self._end()
        self._reader = None
        self._held.clear()

    def close(self) -> None:
        """End the thread and forget what it read. The position stays."""
        self._stop()
        self._part.forget()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Reader:
    """A thread that fills sets of buffers, batch after batch, as they become free. No MPI in it."""

    def __init__(self, read, buffers, positions):
        self._free, self._ready, self._ending = SimpleQueue(), SimpleQueue(), False
        for buffer in buffers:
            self._free.put(buffer)
        self._thread = threading.Thread(target=self._run, args=(read, positions), daemon=True, name="pmm3d loader")
        self._thread.start()

    def _run(self, read, positions) -> None:
        for position in positions:
            buffers = self._free.get()
            if self._ending:
                return
            try:
                self._ready.put((buffers, read(position, buffers)))
            except Exception as error:
                self._ready.put(error)
                return

    def take(self):
        """(buffers, rows in them) of the next batch, once it is read. Raises what went wrong."""
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found

    def give_back(self, buffers) -> None:
        self._free.put(buffers)

    def stop(self) -> None:
        self._ending = True
        self._free.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Part:
    """What this rank reads: which rows and columns of which batch, from where, and whether they can be used."""

    def __init__(self, data: DataSet, plan: dict, x_layout, y_layout):
        self._data, self._plan, self._grid = data, plan, data.grid
        self._layout = x_layout
        self._start, self._stop = plan["rows"]
        self._largest = min(plan["batch_size"], self._stop - self._start)
        self._order, self._shuffled = None, None
        x = x_layout.box((self._largest, data.features), self._grid.shape, self._grid.coords)
        y = y_layout.box((self._largest, data.outputs), self._grid.shape, self._grid.coords)
        self._shapes = x.shape, y.shape
        numbers = "float32" if data.dtype == "bfloat16" else data.dtype
        self._dtypes = numbers, "int64" if data.labelled else numbers
        self._sources = [
            Columns(dataset, (self._start, self._stop), (box.c0, box.c1), box.r1 - box.r0, dtype,
                     data.cache_bytes)
            for dataset, box, dtype in zip((data.inputs, data.targets), (x, y), self._dtypes)
        ]

    def __len__(self) -> int:
        whole, rest = divmod(self._stop - self._start, self._plan["batch_size"])
        return whole + (rest > 0 and not self._plan["drop_last"])

    def size(self, batch: int) -> int:
        """Rows of a batch, over all ranks."""
        return min(self._plan["batch_size"], self._stop - self._start - batch * self._plan["batch_size"])

    def from_here(self, epoch: int, batch: int):
        """(epoch, batch) from there on, without end."""
        while True:
            for later in range(batch, len(self)):
                yield epoch, later
            epoch, batch = epoch + 1, 0

    def buffers(self):
        """For this rank's blocks of the largest batch."""
        return [NumpyLibrary().empty(shape, dtype) for shape, dtype in zip(self._shapes, self._dtypes)]

    def read(self, position, buffers) -> int:
        """Fill the first rows of the buffers with this rank's blocks of a batch; how many these are."""
        rows, data = self._rows(*position), self._data
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if count == 0:
            return 0
        with data.file.unchanged():
            for source, buffer in zip(self._sources, buffers):
                source.read(rows, buffer[:count])
        x, y = (buffer[:count] for buffer in buffers)
        data.check_finite(x, self._sources[0], rows)
        if data.labelled:
            data.check_labels(y, rows)
        else:
            data.check_finite(y, self._sources[1], rows)
        return count

    def forget(self) -> None:
        for source in self._sources:
            source.forget()
        self._order = self._shuffled = None

    def _rows(self, epoch: int, batch: int):
        """This rank's rows of a batch, ascending: an array, or a slice where they are consecutive."""
        first, size = batch * self._plan["batch_size"], self.size(batch)
        box = self._layout.box((size, self._data.features), self._grid.shape, self._grid.coords)
        if not self._plan["shuffle"]:
            return slice(self._start + first + box.r0, self._start + first + box.r1)
        self._shuffle(epoch)
        rows = self._order[first : first + size]
        rows.sort()
        rows = rows[box.r0 : box.r1]
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
        return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows

    def _shuffle(self, epoch: int) -> None:
        if self._shuffled == epoch:
            return
        if self._order is None:
            self._order = np.empty(self._stop - self._start, np.int64)
        self._order[:1], self._order[1:] = self._start, 1
        np.cumsum(self._order, out=self._order)
        np.random.default_rng([self._plan["seed"], epoch]).shuffle(self._order)
        self._shuffled = epoch


def _float_dtype(dtype, library) -> str:
    """ "float32" from that name, a numpy type or a torch dtype."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    if check_matrix_dtype(name, library).startswith("complex"):
        raise DTypeError(f"samples are real; got {name}")
    return name


def _check_at_least(least: int, **numbers) -> None:
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
            raise DataError(f"{name} is a whole number of at least {least}; got {number!r}")


def _row_range(rows, samples: int) -> tuple[int, int]:
    """Start and stop of None, (start, stop) or a slice."""
    try:
        asked = slice(None) if rows is None else rows if isinstance(rows, slice) else slice(*rows, 1)
        start, stop, step = asked.indices(samples)
        inside = all(bound is None or -samples <= bound <= samples for bound in (asked.start, asked.stop))
    except (TypeError, ValueError):
        inside = False
    if not inside or start >= stop or step != 1:
        raise DataError(f"rows is (start, stop) or a slice, of at least one of the {samples} samples; got {rows!r}")
    return start, stop
