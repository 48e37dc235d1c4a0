"""Matrices in files that are larger than memory: parts are read, and written to a new file."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array, check_matrix_dtype
from ..comm import Grid
from ..errors import DataError, DTypeError, LayoutError, needs
from ..layout import LOW_PRECISION, Layout
from ..product import DistMatrix
from ..product.files import opened, write_npy_header
from ..product.redistribution import checked_operation

CANNOT_RESERVE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems that cannot reserve room."""


class RawMatrix:
    """The elements of a matrix in a file, row by row without gaps. They are read and written by calls of the operating
    system: a memory map would count as memory of the process, and end it if the file became shorter.

    start   first byte of the elements
    """

    def __init__(self, path: Path, shape: tuple[int, int], dtype: Any, start: int, mode: str = "rb"):
        self.path, self.shape, self.dtype, self._start = path, shape, np.dtype(dtype), start
        self._file = open(path, mode, buffering=0)
        needed = start + shape[0] * shape[1] * self.dtype.itemsize
        if (size := os.fstat(self._file.fileno()).st_size) < needed:
            self._file.close()
            raise DataError(f"{path} has {size:,} bytes; a matrix of {shape[0]} x {shape[1]} needs {needed:,}")

    def write(self, values: np.ndarray, row: int, col: int) -> None:
        """Write elements, from this row and column on, and wait until they are on disk."""
        for number, line in enumerate(values):
            data, at = np.ascontiguousarray(line).data.cast("B"), self._place(row + number, col)
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
        os.fsync(self._file.fileno())

    def read(self, out: np.ndarray, row: int, col: int) -> None:
        """Fill an array, whose rows have no gaps, with the elements from this row and column on."""
        for number, line in enumerate(out):
            data, at = line.data.cast("B"), self._place(row + number, col)
            while data:
                got = os.preadv(self._file.fileno(), [data], at)
                if got == 0:
                    raise DataError(f"{self.path} has become shorter")
                data, at = data[got:], at + got
        if not self.dtype.isnative:
            out.byteswap(inplace=True)

    def _place(self, row: int, col: int) -> int:
        return self._start + (row * self.shape[1] + col) * self.dtype.itemsize

    def close(self) -> None:
        self._file.close()


class MatrixSource:
    """An operand in a file, or on a dry grid none.

    path       the file, or None
    identity   the properties of the file and its use that a continued run compares
    """

    def __init__(self, grid: Grid, held: ExitStack, name: str, stored: Any, op: str):
        self.op, self.path, self._raw = checked_operation("matmul_files", f"trans{name}", op), None, None
        self._file: Any = None
        self._by_columns = False
        if grid.dry_run is not None:
            shape, dtype = stored
        else:
            self.path, self._dataset = path_and_dataset(name, stored)
            try:
                self._file = held.enter_context(opened(self.path, self._dataset))
                shape, dtype = tuple(self._file.shape), self._file.dtype.newbyteorder("=").name
                self.status = self._status()
                if self._dataset is None and len(shape) == 2:
                    self._by_columns = not self._file.flags.c_contiguous
                    raw = shape[::-1] if self._by_columns else shape
                    self._raw = RawMatrix(self.path, raw, self._file.dtype, self._file.offset)
                    held.callback(self._raw.close)
                    self._file = None
            except OSError as error:
                raise DataError(f"matmul_files: {self.path} cannot be read: {error.strerror or error}") from None
        if len(shape) != 2 or 0 in shape:
            raise LayoutError(f"matmul_files: {name} has the shape {shape}; it must have rows and columns")
        self.dtype = check_matrix_dtype(str(dtype), grid.library("numpy"))
        if self.dtype in LOW_PRECISION:
            raise DTypeError(
                f"matmul_files: {name} is {self.dtype}, and C would be rounded after each panel: convert it"
            )
        self.shape = (int(shape[0]), int(shape[1])) if op == "N" else (int(shape[1]), int(shape[0]))

    @property
    def identity(self) -> list[Any]:
        """Return the properties that a continued run compares with those of the run before."""
        return [os.path.abspath(self.path or ""), self._dataset, *self.status, *self.shape, self.dtype, self.op]

    def _status(self) -> tuple[int, int]:
        assert self.path is not None
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise DataError if the file has changed since it was opened."""
        if self.path is not None and self._status() != self.status:
            raise DataError(
                f"{self.path} has changed during the run: C is not the product. Begin again with overwrite=True"
            )

    def panel(self, grid: Grid, memory: Array, rows: slice, cols: slice, layout: Layout) -> DistMatrix:
        """Read this rank's part of op(X)[rows, cols] to the start of `memory`, and return the panel. No messages."""
        shape = rows.stop - rows.start, cols.stop - cols.start
        box = layout.box(shape, grid.shape, grid.coords)
        own = slice(rows.start + box.r0, rows.start + box.r1), slice(cols.start + box.c0, cols.start + box.c1)
        turned = self.op != "N"
        where, stored = (own[::-1], box.shape[::-1]) if turned else (own, box.shape)
        array = memory[: stored[0] * stored[1]].reshape(stored)
        if self.path is not None and 0 not in stored:
            self._read(array, where)
        if not turned:
            return DistMatrix(grid, array, shape, layout)
        whole = DistMatrix(grid, array, shape[::-1], layout.T)
        return whole.H if self.op == "C" else whole.T

    def _read(self, out: Array, where: tuple[slice, ...]) -> None:
        """Fill an array with the elements X[where] of the file."""
        if self._raw is None:
            self._file.read_direct(out, where)
        elif self._by_columns:
            column = np.empty((1, len(out)), self.dtype)
            for number in range(out.shape[1]):
                self._raw.read(column, where[1].start + number, where[0].start)
                out[:, number] = column[0]
        else:
            self._raw.read(out, where[0].start, where[1].start)


def path_and_dataset(name: str, stored: Any) -> tuple[Path, str | None]:
    """The parts of an argument that names a matrix in a file. Raises DataError."""
    path, dataset = stored if isinstance(stored, tuple) and len(stored) == 2 else (stored, None)
    if not isinstance(path, (str, os.PathLike)) or not (dataset is None or isinstance(dataset, str)):
        raise DataError(
            f"matmul_files: {name} is a .npy file, or an HDF5 file and the name of a data set, (path, name); got "
            f"{stored!r}"
        )
    return Path(path), dataset


def make(path: Path, shape: tuple[int, int], dtype: str, dataset: str | None) -> int:
    """Make a file of a matrix with arbitrary elements, and reserve its room. Return the first byte of the elements.

    dataset   name of a data set of an HDF5 file; None for a .npy file; "" for elements alone

    Raises OSError if there is no room, and then leaves no file.
    """
    path.unlink(missing_ok=True)
    try:
        if dataset:
            start = _make_hdf5(path, dataset, shape, np.dtype(dtype))
        else:
            with open(path, "xb") as file:
                if dataset is None:
                    write_npy_header(file, shape, dtype)
                start = file.tell()
        nbytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
        with open(path, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), start, nbytes)
            except OSError as error:
                if error.errno not in CANNOT_RESERVE:
                    raise
                file.truncate(max(start + nbytes, os.fstat(file.fileno()).st_size))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return start


def _make_hdf5(path: Path, dataset: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> int:
    """Make an HDF5 file with a contiguous data set of arbitrary elements. Return the first byte of the elements."""
    with needs("io", "HDF5 files"):
        import h5py
    made, links = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5p.create(h5py.h5p.LINK_CREATE)
    made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    made.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links.set_create_intermediate_group(True)
    with h5py.File(path, "x") as file:
        kind, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
        name = dataset.removeprefix("/").encode()
        return int(h5py.h5d.create(file.id, name, kind, space, made, lcpl=links).get_offset())
