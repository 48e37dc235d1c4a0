"""Prefetch: a thread reads this rank's part of the batches of a data set ahead of the computation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from threading import Semaphore, Thread, current_thread
from typing import Any, Protocol

import numpy as np

from ..arrays import NumpyLibrary, Workspace
from ..comm import Grid
from ..errors import DataError, needs
from ..layout import Box, Layout, offsets, part_sizes
from .permutation import Permutation
from .source import SourceFile
from .split import Part

with needs("io", "data sets"):
    import h5py

SMALL_BYTES = 2**24
"""Limit in bytes for columns of a contiguous data set that are cached: HDF5 takes longer to find a row than to read
it."""
COPIED_AT_ONCE = 2**17
"""Elements that are gathered from a cached data set at a time, before their conversion."""

Rows = slice | np.ndarray
"""Rows of a data set in ascending order: a slice if they are consecutive, else an array."""
Arrays = tuple[np.ndarray, np.ndarray]
"""This rank's shards of the inputs and of the targets of a batch."""


@dataclass(frozen=True)
class Plan:
    """Assignment of rows to batches: the same on all ranks, and part of a loader's state.

    samples     number of rows of the data set
    rows        [start, stop] of positions in the order of the `Part`;   split   description of this order
    shuffling   name of the algorithm that shuffles epochs; algorithms of earlier versions give other batches

        >>> Plan(10, [0, 10], 8, False, 0, False).pieces(0, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
    """

    samples: int
    rows: list[int]
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    split: str = "none"
    shuffling: str = "none"

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        whole, rest = divmod(self.rows[1] - self.rows[0], self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def size(self, batch: int) -> int:
        """Return the number of rows of a batch over all ranks; 0 or less if there is no such batch."""
        return min(self.batch_size, self.rows[1] - self.rows[0] - batch * self.batch_size)

    def pieces(self, batch: int, micro_batches: int) -> list[range]:
        """Return the positions of the micro-batches of a batch. Their numbers of rows differ by 1 at most. A batch of
        fewer rows than micro-batches has one for each row."""
        first, size = batch * self.batch_size, self.size(batch)
        edges = offsets(part_sizes(size, min(micro_batches, max(1, size))))
        return [range(first + start, first + stop) for start, stop in itertools.pairwise(edges)]


class Samples(Protocol):
    """The attributes of a data set that its loaders use.

    classes       number of classes of integers; None for other numbers
    fingerprint   digest of the contents of the data sets, the same on every rank and grid
    facts         what no shape shows, and weights depend on: names of columns and classes, the tokenizer
    """

    grid: Grid
    path: str
    file: SourceFile
    classes: int | None
    library: NumpyLibrary
    cache_bytes: int
    fingerprint: str
    facts: dict[str, Any]

    def renumbered(self, values: np.ndarray, rows: Rows) -> np.ndarray:
        """Return the classes for the integers of these rows. Raises DataError for an integer that is no class."""
        ...

    def of_loss(self, loss: float) -> dict[str, float]: ...


@dataclass(frozen=True)
class Side:
    """The inputs or the targets of a loader: matrices (samples, width).

    dataset   (samples, ...); the dims after the first are flattened
    width     number of columns
    layout    layout of a batch;   dtype   element type of a batch
    """

    dataset: h5py.Dataset
    width: int
    layout: Layout
    dtype: str

    @property
    def read_dtype(self) -> str:
        """numpy type in which the values are read."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def shape(self, samples: int) -> tuple[int, int]:
        """Return the shape of a batch of this many samples."""
        return samples, self.width

    def columns(self, grid: Grid, rows: Sequence[int], most: int, cache_bytes: int) -> SideReader:
        """Return the reader of this rank's part of micro-batches, each with at most `most` samples of
        rows[0]:rows[1]."""
        return Columns(self, grid, rows, most, cache_bytes)


class SideReader(Protocol):
    """Reads one side of a micro-batch; see `Columns`."""

    name: str
    low: int
    cache: np.ndarray | None

    def rows_here(self, samples: int) -> int: ...
    def buffer(self, work: Workspace) -> np.ndarray: ...
    def read(self, samples: Rows, out: np.ndarray) -> Rows: ...


class Reader:
    """Reads this rank's part of micro-batches ahead, in a thread without MPI, and checks their values.

    pieces   (epoch, positions) of the micro-batches, in the order of consumption
    ahead    largest number of micro-batches that are read and not yet taken
    work     lends the arrays

    The thread is a daemon. `stop` waits for the micro-batch that is being read.
    """

    def __init__(
        self,
        data: Samples,
        plan: Plan,
        part: Part,
        inputs: SideReader,
        targets: SideReader,
        pieces: Iterator[tuple[int, range]],
        ahead: int,
        work: Workspace,
    ):
        self._data, self._plan, self._inputs, self._targets = data, plan, inputs, targets
        self._part = part
        self._ready: SimpleQueue[Arrays | Exception] = SimpleQueue()
        self._slots, self._work, self._stopped = Semaphore(ahead), work, False
        self._thread = Thread(target=self._run, args=(pieces,), name="pmm3d loader", daemon=True)
        self._thread.start()

    def _run(self, pieces: Iterator[tuple[int, range]]) -> None:
        try:
            while self._slots.acquire() and not self._stopped:
                self._ready.put(self._read(*next(pieces)))
        except Exception as error:
            self._ready.put(error)

    def next(self) -> Arrays:
        """Wait for the next micro-batch, and return it. Raises the error of the thread."""
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found

    def taken(self) -> None:
        """Tell the thread that the caller took a micro-batch from `next`, so one more may be read."""
        self._slots.release()

    def stop(self) -> None:
        """End the thread after its current read."""
        self._stopped = True
        self._slots.release()
        if self._thread is not current_thread():  # the thread itself may garbage-collect the loader
            self._thread.join()

    def _read(self, epoch: int, positions: range) -> Arrays:
        samples, data, both = self._samples(epoch, positions), self._data, (self._inputs, self._targets)
        x, y = (columns.buffer(self._work)[: columns.rows_here(len(positions))] for columns in both)
        if x.size or y.size:
            with data.file.unchanged():
                read = [columns.read(samples, out) for columns, out in zip(both, (x, y))]
            for columns, values, rows in zip(both, (x, y), read):
                if values.dtype.kind == "i":
                    values[...] = data.renumbered(values, rows)
                else:
                    self._check_finite(values, columns, rows)
        return x, y

    def _check_finite(self, values: np.ndarray, columns: SideReader, rows: Rows) -> None:
        if values.size == 0 or (np.isfinite(values.min()) and np.isfinite(values.max())):
            return
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DataError(
            f"{self._data.path}: row {np.r_[rows][row]} of data set {columns.name!r} holds "
            f"{values[row, column]} in column {columns.low + column}, as {values.dtype}"
        )

    def _samples(self, epoch: int, positions: range) -> Rows:
        """Return the samples at these positions, over all ranks. The memory is proportional to the positions, because
        no permutation of all rows is stored."""
        plan, part = self._plan, self._part
        if not plan.shuffle and part.order is None:
            return slice(part.start + positions.start, part.start + positions.stop)
        chosen = np.asarray(positions)
        if plan.shuffle:
            chosen = Permutation(len(part), plan.seed, epoch)(chosen)
        return np.sort(part.rows(part.start + chosen))


class Columns:
    """Reads this rank's rows and columns, low:high, of micro-batches of at most `most` samples among rows[0]:rows[1].

    The dims of the data set after the first are flattened. Values are converted to the type of the side.

    The columns of all these samples are read once and cached if they have at most `cache_bytes`. Columns of a
    contiguous data set must also have at most `SMALL_BYTES`. HDF5 reads a whole chunk for each row: 30 us uncompressed,
    200 us compressed. A row of a contiguous data set takes 3 us.
    """

    def __init__(self, side: Side, grid: Grid, rows: Sequence[int], most: int, cache_bytes: int):
        self._side, self._grid = side, grid
        self.dataset, self.name = side.dataset, side.dataset.name.removeprefix("/")
        dataset, (self.first, self.last) = side.dataset, rows
        r0, r1, self.low, self.high = self._box(most)
        self._most, self._dtype = r1 - r0, side.read_dtype
        # Read the range of the first feature dim longer than 1 that covers the columns, and the dims after it whole.
        dims = dataset.shape[1:]
        ones = next((at for at, extent in enumerate(dims) if extent > 1), max(0, len(dims) - 1))
        inner = prod(dims[ones + 1 :])
        start, stop = self.low // inner, -(-self.high // inner)
        self._selection = (slice(0, 1),) * ones + (slice(start, stop),) if dims else ()
        self._dims = (1,) * ones + (stop - start, *dims[ones + 1 :]) if dims else ()
        self._width = (stop - start) * inner
        self._within = slice(self.low - start * inner, self.high - start * inner)
        whole = self._width == self.high - self.low
        self._scratch = None if whole else np.empty((self._most, self._width), self._dtype)
        nbytes = (self.last - self.first) * self._width * dataset.dtype.itemsize
        self._caching = nbytes <= (cache_bytes if dataset.chunks else min(cache_bytes, SMALL_BYTES))
        self.cache: np.ndarray | None = None

    def _box(self, samples: int) -> Box:
        """Return this rank's rows and columns of a micro-batch of this many samples."""
        return self._side.layout.box(self._side.shape(samples), self._grid.shape, self._grid.coords)

    def rows_here(self, samples: int) -> int:
        """Return the number of rows of this rank's array for this many samples."""
        return self._box(samples).shape[0]

    def buffer(self, work: Workspace) -> np.ndarray:
        """Return an array from `work` for the largest number of rows that are read at a time."""
        array: np.ndarray = work.array((self._most, self.high - self.low), self._dtype, NumpyLibrary())
        return array

    def read(self, samples: Rows, out: np.ndarray) -> Rows:
        """Fill `out` (rows_here, high - low) from this rank's part of these samples. Return the rows that were read.

        samples   samples of all ranks
        """
        rows = self._own(samples)
        if out.size == 0:
            return rows
        if self._caching:
            self._read_cached(rows, out)
        elif self._scratch is None:
            self._read_file(rows, out)
        else:
            covering = self._scratch[: len(out)]
            self._read_file(rows, covering)
            out[...] = covering[:, self._within]
        return rows

    def _own(self, samples: Rows) -> Rows:
        if isinstance(samples, slice):
            box = self._box(samples.stop - samples.start)
            return slice(samples.start + box.r0, samples.start + box.r1)
        box = self._box(len(samples))
        rows = samples[box.r0 : box.r1]
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
        return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows

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
