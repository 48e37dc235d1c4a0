"""Products of matrices in files that are larger than memory."""

from __future__ import annotations

import errno
import glob
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ..arrays import Array
from ..comm import Grid
from ..errors import DataError, DTypeError, GridError, LayoutError, MemoryLimitError, check_dataset_name
from ..layout import Box, Layout, itemsize, natural
from ..model.file_product import FileProduct, Step
from ..product import DistMatrix, matmul
from .lock import RunLock
from .matrix_file import MatrixSource, RawMatrix, make, path_and_dataset

PathLike = str | os.PathLike[str]
Stored = PathLike | tuple[PathLike, str]
"""A .npy file, or an HDF5 file and the name of a data set."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
VERSION = 1
"""Version of the file of progress."""


class FileProductReport(NamedTuple):
    """The result of `matmul_files`.

    Attributes
    ----------
    product : FileProduct
        Tiles and panels: `rows`, `cols`, `depth`, `held` (bytes of a rank) and `read` (bytes of the panels of a whole
        run, on all ranks).
    bound : float
        Least number of bytes that any algorithm reads with this memory, without lower terms: max(2 m n k / sqrt(M), m k
        + k n) elements, with a memory of M elements on all ranks.
    first : int
        Number of products of panels that an earlier run had done.
    read : int
        Bytes of the panels that all ranks read in this run.
    seconds : float
        Time of this run.
    waited : float
        Time in which rank 0 waited for panels.
    unsaved : int
        Number of saves of an incomplete tile that had no room.
    """

    product: FileProduct
    bound: float
    first: int
    read: int
    seconds: float
    waited: float
    unsaved: int


def matmul_files(
    grid: Grid,
    a: Any,
    b: Any,
    c: Stored,
    *,
    memory: int,
    transa: str = "N",
    transb: str = "N",
    save_seconds: float = 600,
    overwrite: bool = False,
    progress: Callable[[int, int, str], object] | None = None,
) -> FileProductReport:
    """C = op(A) op(B) of matrices in files, which need not fit in memory.

    Parameters
    ----------
    a, b : str, Path or (str or Path, str)
        A .npy file, or an HDF5 file and the name of a data set, of 4 or more bytes for an element. All ranks read them.
        On a dry grid: (shape, dtype).
    c : str, Path or (str or Path, str)
        The new file, another one than those of A and B. It has this name when it is complete, and contains nothing but
        C. On a dry grid no file is read or written: `c`, `save_seconds` and `overwrite` have no effect.
    memory : int
        Bytes that a rank may hold for A, B, C and the work memory of a product. HDF5 needs memory of its own: a cache
        of 8 MiB for a data set with chunks, and a chunk if that is larger.
    transa, transb : str
        "N", "T" or "C": op(X) is X, its transpose, or its conjugate transpose.
    save_seconds : float
        Time between two saves of an incomplete tile of C, which need room for two tiles. Without room, the run goes on.
        A complete tile is always saved.
    overwrite : bool
        Replace the whole file of C, also other data sets in it, and forget an earlier run that was not finished.
    progress : callable or None
        progress(done, total, text), called on every rank after each product of panels: `done` of `total` are done.

    Returns
    -------
    FileProductReport
        Tiles, bytes and times.

    Raises
    ------
    DataError
        If a file cannot be read or written, or an unfinished run was of another product.
    MemoryLimitError
        If the smallest tiles need more than `memory`.
    LayoutError, DTypeError, GridError
        For wrong sizes, types or grids.

    Notes
    -----
    A tile of C stays in memory. A thread reads the next panels of A and B during a product: each rank reads its own
    part. A is read once for each column of tiles, B once for each row. The tiles are those that read least. Grids with
    y = 1 have the largest tiles, because no rank then holds partial sums.

    The room of C is reserved first, so that a full disk is noticed at once. A run that ended early is continued by the
    same call without `overwrite`, on any grid whose ranks have the memory for its tiles. What is done is in the files
    ".NAME.progress.json", ".NAME.matmul" and ".NAME.partial-*" beside C; ".NAME.lock" keeps other runs away. All ranks
    must see one file system. Arrays are on the host.

    Source of the bound: T. Smith et al., arXiv:1702.02017 (2017).

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from pmm3d import Grid
    >>> from pmm3d.io import matmul_files
    >>> with Grid() as grid, tempfile.TemporaryDirectory() as folder:
    ...     folder = grid.comm.bcast(folder)
    ...     if grid.rank == 0:
    ...         np.save(f"{folder}/a.npy", np.arange(12.0).reshape(4, 3))
    ...     grid.comm.barrier()
    ...     a, c = f"{folder}/a.npy", f"{folder}/c.npy"
    ...     report = matmul_files(grid, a, a, c, transb="T", memory=2**20)
    ...     row = np.load(c)[0].tolist()
    ...     grid.comm.barrier()
    >>> row, report.product.panels
    ([5.0, 14.0, 23.0, 32.0], 1)
    """
    begun = perf_counter()
    with ExitStack() as held:
        with grid.collective_call(
            "matmul_files", _named(a), _named(b), _named(c), memory, transa, transb, save_seconds, overwrite
        ):
            if not isinstance(overwrite, bool):
                raise DataError(f"matmul_files: overwrite is True or False; got {overwrite!r}")
            run = _Run(grid, held, (a, b), c, memory, (transa, transb), save_seconds, overwrite)
        return run.finished(progress, begun)


def _named(stored: Any) -> str:
    return repr(tuple(map(str, stored)) if isinstance(stored, tuple) else str(stored))


class _Panels(NamedTuple):
    """Memory of a panel of A and of one of B."""

    a: Array
    b: Array


class _Run:
    """A run of `matmul_files`. The constructor checks the arguments, and may raise on this rank only."""

    def __init__(
        self,
        grid: Grid,
        held: ExitStack,
        operands: tuple[Any, Any],
        c: Stored,
        memory: int,
        ops: tuple[str, str],
        save_seconds: Any,
        overwrite: bool,
    ):
        self._grid, self._held = grid, held
        if grid.shape.size != grid.shape.x * grid.shape.y * grid.shape.z:
            raise GridError(f"matmul_files needs a grid of x, y and z only; this one is {grid.shape}")
        self._sources = [
            MatrixSource(grid, held, name, stored, op) for name, stored, op in zip(("a", "b"), operands, ops)
        ]
        (m, k), (k_of_b, n) = (source.shape for source in self._sources)
        if k != k_of_b:
            raise LayoutError(f"matmul_files: op(A) is {m} x {k} and op(B) is {k_of_b} x {n}")
        self._dtype = self._sources[0].dtype
        if self._sources[1].dtype != self._dtype:
            raise DTypeError(f"matmul_files: A is {self._dtype} and B is {self._sources[1].dtype}: convert one of them")
        if not isinstance(save_seconds, (int, float)) or isinstance(save_seconds, bool) or not save_seconds >= 0:
            raise DataError(f"matmul_files: save_seconds is a number of seconds of at least 0; got {save_seconds!r}")
        self._save_seconds = float(save_seconds)
        self._limit = natural(memory, "matmul_files: memory is a number of bytes", 1, MemoryLimitError)
        self._writes = grid.dry_run is None
        self.first, self._partial, self._start, self._unsaved = 0, 0, -1, 0
        found = self._prepared(c, overwrite) if self._writes else None
        sizes = m, n, k, self._dtype, grid.shape
        if found is None:
            self.product = FileProduct.within(*sizes, self._limit, ops)
        else:
            (rows, cols, depth), self.first, self._partial, self._start = found
            self.product = FileProduct(*sizes, rows, cols, depth, ops)
            if self.product.held > self._limit:
                raise MemoryLimitError(
                    f"matmul_files: the run that is not finished has tiles of {self.product.held:,} bytes on a rank of "
                    f"{grid.shape}; the limit is {self._limit:,}. Raise it, use more ranks, or begin again with "
                    "overwrite=True"
                )
        self._allocate()

    def _prepared(self, c: Any, overwrite: bool) -> tuple[Any, int, int, int] | None:
        """Check the file of C, and take its lock on rank 0. Return the tile, the steps that are done, the step of the
        last save of an incomplete tile, and the first byte of C's elements, of an earlier run; None if there is none.
        """
        self._path, self._dataset = _target(c)
        self._identity = [*(source.identity for source in self._sources), self._dataset]
        for source in self._sources:
            if self._path.exists() and source.path is not None and self._path.samefile(source.path):
                raise DataError(f"matmul_files: {self._path} contains an operand, and C needs a file of its own")
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise DataError(f"matmul_files: C is a file in a folder that exists; got {self._path}")
        if self._grid.rank == 0:
            lock = RunLock(self._path.parent, f".{self._path.name}.lock", "choose another name of C")
            with _errors("written"):
                lock.acquire()
            self._held.callback(lock.release)
        if overwrite:
            return None
        if self._progress_file.exists():
            return self._noted()
        if self._path.exists():
            raise DataError(f"{self._path} exists: overwrite=True replaces the whole file")
        return None

    def _noted(self) -> tuple[Any, int, int, int]:
        try:
            noted = json.loads(self._progress_file.read_text())
            found = [int(each) for each in noted["tile"]], noted["done"], noted["partial"], noted["start"]
            same = noted["version"] == VERSION and noted["of"] == self._identity and len(found[0]) == 3
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise DataError(
                f"{self._progress_file} is of a product of other files, or these have changed since: finish that "
                "product, or begin again with overwrite=True"
            )
        if not self._temporary.exists() and not self._path.exists():
            raise DataError(
                f"{self._temporary}, with what an earlier run did, is gone: begin again with overwrite=True"
            )
        return found

    def _hidden(self, suffix: str) -> Path:
        return self._path.with_name(f".{self._path.name}{suffix}")

    @property
    def _progress_file(self) -> Path:
        return self._hidden(".progress.json")

    @property
    def _temporary(self) -> Path:
        return self._hidden(".matmul")

    def _allocate(self) -> None:
        """Allocate two panels of A and of B, and a tile of C, for the largest tile."""
        grid, product = self._grid, self.product
        shapes = (product.rows, product.depth), (product.depth, product.cols), (product.rows, product.cols)
        sizes = [
            layout.box(shape, grid.shape, grid.coords).size
            for shape, layout in zip(shapes, (Layout.A, Layout.B, Layout.C))
        ]
        library = grid.library("numpy")
        of_a, of_b, self._memory = (
            [library.empty((size,), self._dtype) for _ in range(count)] for size, count in zip(sizes, (2, 2, 1))
        )
        self._buffers = [*map(_Panels, of_a, of_b)]

    def finished(self, progress: Callable[[int, int, str], object] | None, begun: float) -> FileProductReport:
        """Run to the end. Collective."""
        grid, product = self._grid, self.product
        total = product.tiles * product.panels
        target = None if self.first == total else self._opened()
        saved, waited, read = perf_counter(), 0.0, 0
        pool = self._held.enter_context(ThreadPoolExecutor(1))
        steps = product.steps(self.first)
        step = next(steps, None)
        coming = None if step is None else pool.submit(self._read, step, self._buffers[self.first % 2])
        for number in range(self.first, total):
            assert step is not None and coming is not None
            since = perf_counter()
            with grid.collective_call("matmul_files: reading", always=True), _errors("read"):
                a, b = coming.result()
            waited += perf_counter() - since
            after = next(steps, None)
            if after is not None:
                coming = pool.submit(self._read, after, self._buffers[(number + 1) % 2])
            starts, ends = number % product.panels == 0, (number + 1) % product.panels == 0
            if starts or number == self.first:
                tile, box = self._tile(step)
            if not starts and number == self.first:
                self._restore(tile, box)
            matmul(a, b, out=tile, beta=0 if starts else 1)
            read += sum((matrix.shape[0] * matrix.shape[1]) for matrix in (a, b)) * itemsize(self._dtype)
            due = ends or bool(grid.comm.largest(grid.rank == 0 and perf_counter() - saved >= self._save_seconds))
            if due and target is not None:
                self._save(target, tile, box, step, number + 1, ends)
                saved = perf_counter()
            step = after
            if progress is not None:
                progress(number + 1, total, "products of panels")
        self._complete()
        bound = product.bound(self._limit)
        return FileProductReport(product, bound, self.first, read, perf_counter() - begun, waited, self._unsaved)

    def _read(self, step: Step, panels: _Panels) -> tuple[DistMatrix, DistMatrix]:
        """Fill a panel of A and one of B with this rank's parts."""
        a, b = self._sources
        return (
            a.panel(self._grid, panels.a, step.rows, step.depth, Layout.A),
            b.panel(self._grid, panels.b, step.depth, step.cols, Layout.B),
        )

    def _tile(self, step: Step) -> tuple[DistMatrix, Box]:
        """The tile of C of a step, and this rank's part of it."""
        shape = step.rows.stop - step.rows.start, step.cols.stop - step.cols.start
        box = Layout.C.box(shape, self._grid.shape, self._grid.coords)
        rows, cols = box.shape
        return DistMatrix(self._grid, self._memory[0][: rows * cols].reshape(rows, cols), shape, Layout.C), box

    def _opened(self) -> RawMatrix | None:
        """The file of C, with a temporary name; None on a dry grid. Collective."""
        if not self._writes:
            return None
        grid, new = self._grid, self._start < 0
        if new:
            with grid.collective_call("matmul_files: making C", always=True), _errors("written"):
                if grid.rank == 0:
                    self._forget()
                    self._start = make(self._temporary, self._shape, self._dtype, self._dataset)
            self._start = grid.comm.bcast(self._start)
        with grid.collective_call("matmul_files: opening C", always=True), _errors("written"):
            target = RawMatrix(self._temporary, self._shape, self._dtype, self._start, "r+b")
            self._held.callback(target.close)
            if new:
                self._note(0, 0)
        return target

    def _forget(self) -> None:
        """Remove what is noted of an earlier run, the note first."""
        for left in (self._progress_file, *self._path.parent.glob(f".{glob.escape(self._path.name)}.partial-*")):
            left.unlink(missing_ok=True)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.product.m, self.product.n

    def _note(self, done: int, partial: int) -> None:
        """Write what is done, on rank 0. partial: the step after which an incomplete tile was saved, or 0."""
        if self._grid.rank:
            return
        product, temporary = self.product, self._hidden(".progress.tmp")
        noted = {
            "version": VERSION, "of": self._identity, "tile": [product.rows, product.cols, product.depth],
            "start": self._start, "done": done, "partial": partial,
        }  # fmt: skip
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(noted, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._progress_file)

    def _partial_path(self, step: int) -> Path:
        return self._hidden(f".partial-{step}")

    def _save(self, target: RawMatrix, tile: DistMatrix, box: Box, step: Step, done: int, ends: bool) -> None:
        """Save the tile of C after `done` steps, then note it, then remove what was saved before. Collective."""
        grid, before = self._grid, self._partial
        if ends:
            with grid.collective_call("matmul_files: saving", always=True), _errors("written"):
                target.write(tile.memory, step.rows.start + box.r0, step.cols.start + box.c0)
        elif not self._saved_apart(tile, box, done):
            self._unsaved += 1
            return
        self._partial = 0 if ends else done
        with grid.collective_call("matmul_files: noting progress", always=True), _errors("written"):
            self._note(done, self._partial)
            if before and grid.rank == 0:
                self._partial_path(before).unlink(missing_ok=True)

    def _saved_apart(self, tile: DistMatrix, box: Box, done: int) -> bool:
        """Write an incomplete tile to a file of its own. Return whether there was room for it. Collective."""
        grid, path, full = self._grid, self._partial_path(done), False
        with grid.collective_call("matmul_files: saving", always=True), _errors("written"):
            try:
                if grid.rank == 0:
                    make(path, tile.shape, self._dtype, "")
            except OSError as error:
                full = _no_room(error)
        if grid.comm.largest(full):
            return False
        with grid.collective_call("matmul_files: saving", always=True), _errors("written"):
            apart = RawMatrix(path, tile.shape, self._dtype, 0, "r+b")
            try:
                apart.write(tile.memory, box.r0, box.c0)
            except OSError as error:
                full = _no_room(error)
            finally:
                apart.close()
        if not grid.comm.largest(full):
            return True
        if grid.rank == 0:
            path.unlink(missing_ok=True)
        return False

    def _restore(self, tile: DistMatrix, box: Box) -> None:
        """Read the incomplete tile that was saved last. Collective."""
        with self._grid.collective_call("matmul_files: continuing", always=True), _errors("read"):
            apart = RawMatrix(self._partial_path(self._partial), tile.shape, self._dtype, 0)
            try:
                apart.read(tile.memory, box.r0, box.c0)
            finally:
                apart.close()

    def _complete(self) -> None:
        """Give the file of C its name."""
        if not self._writes:
            return
        self._grid.comm.barrier()
        with self._grid.collective_call("matmul_files: completing", always=True), _errors("written"):
            if self._grid.rank == 0:
                for source in self._sources:
                    source.check_unchanged()
                if self._temporary.exists():  # else an earlier run was ended between the next two lines
                    os.replace(self._temporary, self._path)
                self._forget()


def _no_room(error: OSError) -> bool:
    """Return True if a disk is full. Raises other errors."""
    if error.errno not in NO_ROOM:
        raise error
    return True


def _target(c: Any) -> tuple[Path, str | None]:
    path, dataset = path_and_dataset("C", c)
    if (path.suffix == ".npy") == (dataset is not None):
        raise DataError(f"matmul_files: C is a .npy file, or (path, name of a data set) of a new HDF5 file; got {c!r}")
    if dataset is not None:
        check_dataset_name(dataset)
    return path, dataset


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """As a context: an OSError becomes a DataError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"matmul_files: a file cannot be {what}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. If a run had begun, what it saved is kept, and the "
            "same call without overwrite=True continues it"
        ) from error
