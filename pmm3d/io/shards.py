"""The files of one checkpoint: each rank's shards, the master that shows them whole, the manifest. No messages.

rank-00003.h5      the blocks that rank 3 wrote, under the names of their matrices
blocks.h5          instead of those, with parallel HDF5: each matrix whole
checkpoint.h5      each matrix whole, under its name: a virtual data set over the blocks (NaN where a file is missing);
                   pmm3d/manifest and pmm3d/meta, JSON
checkpoint.crc     the checksums of checkpoint.h5, JSON

The manifest: {"step": n, "files": {name: checksums}, "matrices": {name: {"shape": [m, n], "dtype": name, "shards":
[[file, r0, r1, c0, c1], ...]}}}. Checksums: {"bytes": n, "crc32": [of each CHUNK bytes]}; they are of the files, not of
the elements, as HDF5 may loop or crash on a damaged file and so must not open one.
bfloat16 is stored as its bits, uint16, with the attribute dtype "bfloat16".
"""

from __future__ import annotations

import io
import json
import os
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from ..errors import CheckpointError
from ..layout import EMPTY, Box
from .files import (
    SLICE,
    Chunk,
    checksums,
    from_stored,
    naming,
    row_slices,
    rows_of,
    stored_dtype,
    sync,
    to_stored,
    verify,
)

MASTER = "checkpoint.h5"
CHECKSUMS = "checkpoint.crc"
TOGETHER = "blocks.h5"
OWN = "pmm3d"
BFLOAT16_NAN = 0x7FC0


class Shard(NamedTuple):
    """A block of a matrix in a file of a checkpoint."""

    file: str
    name: str
    box: Box

    @property
    def origin(self) -> Box:
        """The block of which the file's data set is the whole."""
        return EMPTY if self.file == TOGETHER else self.box


class _Output(io.FileIO):
    """A file for HDF5 to write to. After a failed write HDF5 crashes the process at exit (2.0), so it is told that all
    went well and `check` raises the error."""

    error = None

    def _unless_failed(self, act):
        try:
            return None if self.error else act()
        except OSError as error:
            self.error = error

    def write(self, data):
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest and not self.error:
            rest = rest[self._unless_failed(lambda: super(_Output, self).write(rest)) or 0 :]
        return size

    def truncate(self, size=None):
        self._unless_failed(lambda: super(_Output, self).truncate(size))
        return size

    def check(self) -> None:
        if self.error:
            raise self.error


@contextmanager
def _written(path: Path, mode: str = "w"):
    """(HDF5 file, check): a file that is on the disk when the body is done. check() raises what failed so far."""
    with naming(path, "written"), _Output(path, "w+" if mode == "w" else "r+") as output:
        with h5py.File(output, mode) as file:
            yield file, output.check
        output.check()
        os.fsync(output.fileno())


def check_names(names) -> None:
    """Raise CheckpointError unless HDF5 can hold data sets of all these names, beside the checkpoint's own."""
    for name in names:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or "\0" in name or parts[0] == OWN:
            raise CheckpointError(f"{name!r} cannot name a matrix: parts between / are not empty, not . or .., and the "
                                  f"first is not {OWN!r}")
        for outer in accumulate(parts[:-1], "{}/{}".format):
            if outer in names:
                raise CheckpointError(f"{outer!r} and {name!r} cannot both name a matrix: HDF5 has no data set within "
                                      "another")


def owned(matrices) -> dict:
    """The matrices of which this rank writes its block: not empty, and the first of the replicas."""
    return {name: matrix for name, matrix in matrices.items()
            if matrix.box.size and matrix.layout.is_first(matrix.grid.coords)}


def write_shards(folder: Path, rank: int, matrices) -> list[Shard]:
    """Write this rank's file, if it owns anything."""
    mine, file_name = owned(matrices), f"rank-{rank:05d}.h5"
    if mine:
        with _written(folder / file_name) as (file, check):
            for name, matrix in mine.items():
                _write_rows(_create(file, name, matrix.box.shape, matrix.dtype), matrix, EMPTY, check)
    return [Shard(file_name, name, matrix.box) for name, matrix in mine.items()]


def write_together(folder: Path, comm, matrices) -> list[Shard]:
    """As `write_shards`, all ranks into one file by parallel HDF5; collective."""
    path, mine = folder / TOGETHER, owned(matrices)
    with naming(path, "written"):
        with h5py.File(path, "w", driver="mpio", comm=comm) as file:
            datasets = {name: _create(file, name, matrices[name].shape, matrices[name].dtype)
                        for name in sorted(matrices)}
            for name, matrix in mine.items():
                _write_rows(datasets[name], matrix, matrix.box, lambda: None)
        sync(path)
    return [Shard(TOGETHER, name, matrix.box) for name, matrix in mine.items()]


def _create(file, name: str, shape, dtype: str):
    dataset = file.create_dataset(name, shape, stored_dtype(dtype))
    if dtype == "bfloat16":
        dataset.attrs["dtype"] = dtype
    return dataset


def _write_rows(dataset, matrix, place: Box, check) -> None:
    for start, rows in rows_of(matrix):
        dataset[place.r0 + start : place.r0 + start + len(rows), place.c0 : place.c0 + rows.shape[1]] = rows
        check()


def manifest_of(step: int, matrices, shards, files) -> dict:
    """The manifest from all ranks' shards. Raises CheckpointError if they are not all of each matrix."""
    entries = {name: {"shape": list(matrix.shape), "dtype": matrix.dtype, "shards": []}
               for name, matrix in matrices.items()}
    for shard in shards:
        entries[shard.name]["shards"].append([shard.file, *shard.box])
    for name, matrix in matrices.items():
        held = sum(Box(*place).size for _, *place in entries[name]["shards"])
        if held != matrix.shape[0] * matrix.shape[1]:
            raise CheckpointError(f"{name!r} is {matrix.shape}; its blocks have {held} elements")
    return {"step": step, "files": files, "matrices": entries}


def shards_of(manifest: dict) -> list[Shard]:
    """All shards, file by file."""
    found = [Shard(file, name, Box(*place))
             for name, entry in manifest["matrices"].items() for file, *place in entry["shards"]]
    return sorted(found, key=lambda shard: shard.file)


def write_master(folder: Path, manifest: dict, meta: str) -> None:
    """Write the master and its checksums."""
    with _written(folder / MASTER) as (file, check):
        for name, entry in manifest["matrices"].items():
            _show_whole(file, name, entry)
            check()
        file[f"{OWN}/manifest"], file[f"{OWN}/meta"] = json.dumps(manifest), meta
    with naming(folder / CHECKSUMS, "written"):
        (folder / CHECKSUMS).write_text(json.dumps(checksums(folder / MASTER)))
        sync(folder / CHECKSUMS)


def _show_whole(file, name: str, entry: dict) -> None:
    shape, dtype = tuple(entry["shape"]), stored_dtype(entry["dtype"])
    if not entry["shards"]:
        _create(file, name, shape, entry["dtype"])
        return
    virtual = h5py.VirtualLayout(shape, dtype)
    for source, *place in entry["shards"]:
        box = Box(*place)
        there = h5py.VirtualSource(source, name, shape if source == TOGETHER else box.shape, dtype)
        virtual[box.within(EMPTY)] = there[box.within(EMPTY)] if source == TOGETHER else there
    missing = BFLOAT16_NAN if entry["dtype"] == "bfloat16" else np.nan
    dataset = file.create_virtual_dataset(name, virtual, fillvalue=dtype.type(missing))
    if entry["dtype"] == "bfloat16":
        dataset.attrs["dtype"] = "bfloat16"


def read_master(folder: Path) -> tuple[str, str]:
    """The texts of the manifest and the meta, once the master's checksums are found right. Raises CheckpointError."""
    path = folder / MASTER
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MASTER}")
    with naming(folder / CHECKSUMS, "read"):
        stored = json.loads((folder / CHECKSUMS).read_bytes())
        chunks = chunks_of({MASTER: stored})
    verify(folder, chunks)
    with _opened(path) as file:
        return file[f"{OWN}/manifest"][()].decode(), file[f"{OWN}/meta"][()].decode()


def chunks_of(files: dict) -> list[Chunk]:
    """The parts of the files whose checksums are known, file by file."""
    return [Chunk(name, told["bytes"], index, crc)
            for name, told in sorted(files.items()) for index, crc in enumerate(told["crc32"])]


def fill(folder: Path, shards, matrices) -> None:
    """Fill this rank's blocks of the matrices from all shards that meet them, each file opened once."""
    wanted = [shard for shard in shards if (shard.box & matrices[shard.name].box).size]
    for name, group in groupby(wanted, key=lambda shard: shard.file):
        with _opened(folder / name) as file:
            for shard in group:
                _fill_piece(file[shard.name], shard, matrices[shard.name])


def _fill_piece(dataset, shard: Shard, matrix) -> None:
    piece, box, library = shard.box & matrix.box, matrix.box, matrix.library
    host = to_stored(library, matrix.local) if library.on_host else None
    if host is not None and host.flags.c_contiguous:
        dataset.read_direct(host, piece.within(shard.origin), piece.within(box))
        return
    buffer = np.empty(max(SLICE, piece.shape[1] * dataset.dtype.itemsize), np.uint8)
    for part, rows in _rows_in(dataset, shard, piece, buffer):
        if host is not None:
            host[part.within(box)] = rows
        else:
            matrix.local[part.within(box)] = from_stored(library, rows, matrix.dtype)
            library.synchronize()


def _rows_in(dataset, shard: Shard, piece: Box, buffer: np.ndarray):
    """(block, its elements) of slices of rows of a piece of a shard, each read into the same buffer."""
    for start, stop in row_slices(piece.shape, dataset.dtype.itemsize):
        part = piece._replace(r0=piece.r0 + start, r1=piece.r0 + stop)
        rows = buffer[: part.size * dataset.dtype.itemsize].view(dataset.dtype).reshape(part.shape)
        dataset.read_direct(rows, part.within(shard.origin))
        yield part, rows


@contextmanager
def _opened(path: Path):
    """An HDF5 file to read, without locks, which some parallel file systems lack."""
    with naming(path, "read"), h5py.File(path, "r", locking=False) as file:
        yield file
