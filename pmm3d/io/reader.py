"""Prefetch: a thread reads this rank's part of the batches of a data set ahead of the computation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from threading import Semaphore, Thread, current_thread
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary, Workspace
from ..comm import Grid
from ..errors import DataError, needs
from ..layout import Box, Layout, offsets, part_sizes
from .mixture import pieces_of, place_of
from .permutation import Permutation
from .scaling import ColumnScale
from .source import SampleSource
from .split import RowSet

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
    """Assignment of rows to batches, the same on all ranks.

    >>> Plan(RowSet(0, 10, 10), 8, False, 0, False).pieces(0, 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """

    rows: RowSet
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        return batches_of(len(self.rows), self.batch_size, self.drop_last)

    def pieces(self, batch: int, micro_batches: int) -> list[range]:
        """Return the positions of the micro-batches of a batch. Their numbers of rows differ by 1 at most. A batch of
        fewer rows than micro-batches has one for each row."""
        first = batch * self.batch_size
        size = min(self.batch_size, len(self.rows) - first)
        edges = offsets(part_sizes(size, min(micro_batches, max(1, size))))
        return [range(first + start, first + stop) for start, stop in itertools.pairwise(edges)]

    def samples(self, epoch: int, positions: range) -> Rows:
        """Return the samples at these positions of an epoch, over all ranks. The memory is proportional to the
        positions, because no permutation of all rows is stored."""
        rows = self.rows
        if not self.shuffle and rows.order is None:
            return slice(rows.start + positions.start, rows.start + positions.stop)
        chosen = np.asarray(positions)
        if self.shuffle:
            order = Permutation(len(rows), self.seed, epoch)
            chosen = order(chosen) if rows.draws is None else rows.draws.positions(self.seed, epoch, chosen)
        return np.sort(rows.in_file(rows.start + chosen))

    @property
    def _drawn(self) -> str:
        draws = self.rows.draws
        return "" if draws is None else f", {draws.counts.tolist()} draws from {list(draws.rows)} rows"

    def state(self) -> dict[str, Any]:
        """Return the facts that determine the batches, for JSON. "shuffling" is the algorithm that shuffles epochs;
        algorithms of earlier versions give other batches."""
        return {
            "samples": self.rows.samples,
            "rows": [self.rows.start, self.rows.stop],
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "split": self.rows.split,
            "shuffling": ("feistel" + self._drawn) if self.shuffle else "none",
        }


def batches_of(rows: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches of this many rows."""
    full, rest = divmod(rows, batch_size)
    return full + (rest > 0 and not drop_last)


class Source:
    """Inputs or targets of a loader: this rank's rows and columns of micro-batches from one data set.

    dataset   (samples, ...), of a `SampleSource`; the dims after the first are flattened to `width` columns
    layout    layout of a batch;   dtype   element type of a batch
    name      of the data set;   low   this rank's first column, after `open`
    scale     by which values are standardised when they are read; None: they are not
    of_probabilities   whether values below 0 or above 1 are refused

    The columns of all samples of HDF5 files are read once and cached if they have at most `cache_bytes`. Columns of a
    contiguous data set must also have at most `SMALL_BYTES`. HDF5 reads a whole chunk for each row: 30 us uncompressed,
    200 us compressed. A row of a contiguous data set takes 3 us.
    """

    def __init__(self, dataset: Any, width: int, layout: Layout, dtype: str):
        self.dataset, self.width, self.layout, self.dtype = dataset, width, layout, dtype
        self.name = dataset.name.removeprefix("/")
        self.cache: np.ndarray | None = None
        self.scale: ColumnScale | None = None
        self.of_probabilities = False

    def shape(self, samples: int) -> tuple[int, int]:
        """Return the shape of a batch of this many samples."""
        return samples, self.width

    def box(self, samples: int) -> Box:
        """Return this rank's rows and columns of a micro-batch of this many samples."""
        return self.layout.box(self.shape(samples), self._grid.shape, self._grid.coords)

    def open(self, grid: Grid, rows: Sequence[int], most: int, cache_bytes: int) -> None:
        """Prepare to read micro-batches of at most `most` samples of rows[0]:rows[1] on this rank of a grid."""
        self._grid, (self._first, self._last) = grid, rows
        r0, r1, self.low, self._high = self.box(most)
        self._most = r1 - r0
        # Read the range of the first feature dim longer than 1 that covers the columns, and the dims after it whole.
        dims = self.dataset.shape[1:]
        ones = next((at for at, extent in enumerate(dims) if extent > 1), max(0, len(dims) - 1))
        inner = prod(dims[ones + 1 :])
        start, stop = self.low // inner, -(-self._high // inner)
        self._selection = (slice(0, 1),) * ones + (slice(start, stop),) if dims else ()
        self._dims = (1,) * ones + (stop - start, *dims[ones + 1 :]) if dims else ()
        self._covering = (stop - start) * inner
        self._within = slice(self.low - start * inner, self._high - start * inner)
        exact = self._covering == self._high - self.low
        self._scratch = None if exact else np.empty((self._most, self._covering), self._read_dtype)
        self._caching = self._is_cached(self._covering, cache_bytes)

    def _is_cached(self, elements: int, cache_bytes: int) -> bool:
        """Return whether all rows, each of this many elements, are of HDF5 files and fit into the cache."""
        nbytes, stored = (self._last - self._first) * elements * self.dataset.dtype.itemsize, pieces_of(self.dataset)
        if not all(isinstance(each, h5py.Dataset) for each in stored):
            return False
        return bool(nbytes <= (cache_bytes if any(each.chunks for each in stored) else min(cache_bytes, SMALL_BYTES)))

    @property
    def _read_dtype(self) -> str:
        """numpy type in which the values are read."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def buffer(self, work: Workspace) -> np.ndarray:
        """Return an array from `work` for the largest number of rows that are read at a time."""
        array: np.ndarray = work.array((self._most, self._high - self.low), self._read_dtype, NumpyLibrary())
        return array

    def read(self, samples: Rows, out: np.ndarray) -> Rows:
        """Fill `out` with this rank's part of these samples of all ranks. Return the rows that were read."""
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
            box = self.box(samples.stop - samples.start)
            return slice(samples.start + box.r0, samples.start + box.r1)
        box = self.box(len(samples))
        rows = samples[box.r0 : box.r1]
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all()
        return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows

    def _read_file(self, rows: Rows, out: np.ndarray) -> None:
        self.dataset.read_direct(out.reshape(len(out), *self._dims), (rows, *self._selection))

    def _read_cached(self, rows: Rows, out: np.ndarray) -> None:
        if self.cache is None:
            every = np.empty((self._last - self._first, self._covering), self.dataset.dtype)
            self._read_file(slice(self._first, self._last), every)
            self.cache = every[:, self._within]
        if isinstance(rows, slice):
            out[...] = self.cache[rows.start - self._first : rows.stop - self._first]
            return
        step = max(1, COPIED_AT_ONCE // out.shape[1])
        for start in range(0, len(out), step):
            out[start : start + step] = self.cache[rows[start : start + step] - self._first]


class Reader:
    """Reads this rank's part of micro-batches ahead, in a thread without MPI, and checks their values.

    renumbered   returns the classes for the integers of these rows of a data set
    pieces   (epoch, positions) of the micro-batches, in the order of consumption
    ahead    largest number of micro-batches that are read and not yet taken
    work     lends the arrays

    The thread is a daemon. `stop` waits for the micro-batch that is being read.
    """

    def __init__(
        self,
        file: SampleSource,
        renumbered: Callable[[np.ndarray, Rows, Any], np.ndarray],
        plan: Plan,
        sources: tuple[Source, Source],
        pieces: Iterator[tuple[int, range]],
        ahead: int,
        work: Workspace,
    ):
        self._file, self._renumbered, self._plan, self._sources = file, renumbered, plan, sources
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
        except BaseException as error:  # without an item in the queue, `next` would wait forever
            stopped = DataError(f"cannot read {self._file.path}: {type(error).__name__}: {error}")
            stopped.__cause__ = error
            self._ready.put(stopped)

    def next(self) -> Arrays:
        """Wait for the next micro-batch, and return it. Raises the error of the thread."""
        arrays = self._ready.get()
        if isinstance(arrays, Exception):
            raise arrays
        return arrays

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
        samples, both = self._plan.samples(epoch, positions), self._sources
        x, y = (source.buffer(self._work)[: source.box(len(positions)).shape[0]] for source in both)
        if x.size or y.size:
            with self._file.unchanged(), self._file.both():
                read = [source.read(samples, out) for source, out in zip(both, (x, y))]
            for source, values, rows in zip(both, (x, y), read):
                if values.dtype.kind == "i":
                    values[...] = self._renumbered(values, rows, source.dataset)
                else:
                    self._check(values, source, rows)
                    if source.scale is not None:
                        source.scale.apply(values, source.low)
        return x, y

    def _check(self, values: np.ndarray, source: Source, rows: Rows) -> None:
        """Raise DataError for a value that is not finite, or no probability where these are needed."""
        least, most = (0, 1) if source.of_probabilities else (np.finfo(values.dtype).min, np.finfo(values.dtype).max)
        if values.size == 0 or (least <= values.min() and values.max() <= most):
            return
        row, column = np.argwhere(~((values >= least) & (values <= most)))[0]
        path, number = place_of(source.dataset, self._file.path, np.r_[rows][row])
        raise DataError(
            f"{path}: row {number} of data set {source.name!r} holds "
            f"{values[row, column]} in column {source.low + column}, as {values.dtype}"
            + "; needed is a number from 0 to 1: convert it, or choose another loss"
            * source.of_probabilities
        )
