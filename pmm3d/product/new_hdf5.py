"""An HDF5 file to write, which survives a full disk."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import needs


class _Output(io.FileIO):
    """A file for HDF5 to write to. After a failed write HDF5 crashes the process at exit (2.0), so it is told that all
    went well; `error` has what failed."""

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
    """A new file. A file that a crash left under that name is replaced. Raises OSError.

    file   the h5py.File
    """

    def __init__(self, path: Path):
        with needs("io", "HDF5 files"):
            import h5py
        path.unlink(missing_ok=True)
        self._path, self._output = path, _Output(path, "x+")
        self.file = h5py.File(self._output, "w")

    def check(self) -> None:
        """Raises OSError if something could not be written."""
        if self._output.error:
            raise self._output.error

    def complete(self) -> None:
        """Bring it to the disk and close it. Raises OSError if something could not be written."""
        self.file.close()
        with self._output:
            self.check()
            os.fsync(self._output.fileno())

    def abandon(self) -> None:
        """Close and remove it; nothing after `complete`."""
        if not self._output.closed:
            with suppress(Exception):
                self.file.close()
            self._output.close()
            self._path.unlink(missing_ok=True)


@contextmanager
def new_hdf5(path: Path) -> Iterator[NewHdf5]:
    """As a context: a new file, which is on the disk at the end; after an error it is removed. Raises OSError."""
    new = NewHdf5(path)
    try:
        yield new
        new.complete()
    finally:
        new.abandon()
