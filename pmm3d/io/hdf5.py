"""Reading rows of data sets of an HDF5 file, of any number of dims, as rows of numbers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from math import prod

import numpy as np

from ..errors import DataError

COPIED_AT_ONCE = 2**18
"""Elements gathered from a cached data set before they are converted."""


class SourceFile:
    """An HDF5 file, open for reading, that must stay as it is: HDF5 reads zeros where a file has become shorter."""

    def __init__(self, path: str):
        import h5py

        self.path = path
        try:
            self._identity = self._identify()
            self.h5 = h5py.File(path, "r", locking="best-effort")
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror or error}") from None

    def _identify(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_ino, found.st_size

    def dataset(self, name: str):
        """The data set of that name, if it holds rows of numbers."""
        import h5py

        found = self.h5.get(name) if isinstance(name, str) else None
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"{self.path} has no data set {name!r}; it has {', '.join(map(repr, self._names()))}")
        if not found.shape:
            raise DataError(f"{self.path}: data set {name!r} has no dims; its first dim must be that of the samples")
        if 0 in found.shape:
            raise DataError(f"{self.path}: data set {name!r} is empty: its shape is {found.shape}")
        if found.dtype.kind not in "fiu":
            kind = "strings" if h5py.check_string_dtype(found.dtype) else found.dtype
            raise DataError(f"{self.path}: data set {name!r} holds {kind}; needed are real numbers")
        return found

    def _names(self) -> list[str]:
        import h5py

        names = []
        self.h5.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        return names

    @contextmanager
    def unchanged(self):
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

    most         rows that are read at a time
    dtype        to which they are converted
    cache_bytes  if the data set is stored in chunks and these columns take no more, all are read at once and kept: a
                 row from a chunk costs the reading of the chunk (30 us a row uncompressed, 200 us compressed, against
                 3 us contiguous)
    """

    def __init__(self, dataset, rows, columns, most: int, dtype: str, cache_bytes: int):
        self.dataset, self.name = dataset, dataset.name.removeprefix("/")
        self.low, self.high = columns
        self._rows = rows
        self._choose()
        self._scratch = None if self._width == self.high - self.low else np.empty((most, self._width), dtype)
        nbytes = (rows[1] - rows[0]) * self._width * dataset.dtype.itemsize
        self._caching = dataset.chunks is not None and nbytes <= cache_bytes
        self._cache = None

    def _choose(self) -> None:
        """Of the first feature dim longer than 1, the range that covers the columns; the dims after it are whole."""
        dims = self.dataset.shape[1:]
        ones = next((at for at, extent in enumerate(dims) if extent > 1), max(0, len(dims) - 1))
        inner = prod(dims[ones + 1 :])
        start, stop = self.low // inner, -(-self.high // inner)
        self._selection = (slice(0, 1),) * ones + (slice(start, stop),) if dims else ()
        self._dims = (1,) * ones + (stop - start, *dims[ones + 1 :]) if dims else ()
        self._width = (stop - start) * inner
        self._within = slice(self.low - start * inner, self.high - start * inner)

    def read(self, rows, out) -> None:
        """Fill out (rows, high - low) from rows given as a slice or in ascending order."""
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

    def _read_file(self, rows, out) -> None:
        self.dataset.read_direct(out.reshape(len(out), *self._dims), (rows, *self._selection))

    def _read_cached(self, rows, out) -> None:
        first, last = self._rows
        if self._cache is None:
            whole = np.empty((last - first, self._width), self.dataset.dtype)
            self._read_file(slice(first, last), whole)
            self._cache = whole[:, self._within]
        if isinstance(rows, slice):
            out[...] = self._cache[rows.start - first : rows.stop - first]
            return
        step = max(1, COPIED_AT_ONCE // out.shape[1])
        for start in range(0, len(out), step):
            out[start : start + step] = self._cache[rows[start : start + step] - first]

    def forget(self) -> None:
        self._cache = None


def width(dataset) -> int:
    """Columns of a data set whose dims after the first are flattened."""
    return prod(dataset.shape[1:])


def row_number(rows, index) -> int:
    """Which row of the data set is at `index` of rows given as a slice or an array."""
    return int((rows.start if isinstance(rows, slice) else rows[index]) + (index if isinstance(rows, slice) else 0))
