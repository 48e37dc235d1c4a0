"""Writing of an HDF5 file with an error, not a crash, if the disk is full."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import needs


class _Output(io.FileIO):
    """File object that HDF5 writes to. `error` holds the first error, and HDF5 sees every write as successful.

    The reason is that HDF5 2.0 crashes the process at exit after a failed write.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and not self.error:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return 0 if self.error else super().truncate(size)
        except OSError as error:
            self.error = error
            return 0


class NewHdf5:
    """A new HDF5 file. It replaces a file of this name that remains from a crash. Raises OSError.

    file   the h5py.File
    """

    def __init__(self, path: Path):
        with needs("io", "HDF5 files"):
            import h5py
        path.unlink(missing_ok=True)
        self._path, self._output = path, _Output(path, "x+")
        self.file = h5py.File(self._output, "w")

    def check(self) -> None:
        """Raise the OSError of a write that failed."""
        if self._output.error:
            raise self._output.error

    def complete(self) -> None:
        """Close the file, and flush it to disk. Raises the OSError of a write that failed."""
        self.file.close()
        with self._output:
            self.check()
            os.fsync(self._output.fileno())

    def abandon(self) -> None:
        """Close and remove the file. Has no effect after `complete`."""
        if not self._output.closed:
            with suppress(Exception):
                self.file.close()
            self._output.close()
            self._path.unlink(missing_ok=True)


@contextmanager
def new_hdf5(path: Path) -> Iterator[NewHdf5]:
    """Context with a new file, which is flushed to disk at the end, and removed after an error. Raises OSError."""
    new = NewHdf5(path)
    try:
        yield new
        new.complete()
    finally:
        new.abandon()
