"""The files of one checkpoint: the shards of each rank, and the master file that combines them. No messages.

rank-00003.h5      the shards that rank 3 wrote, under the names of their matrices
checkpoint.h5      each whole matrix under its name, as a virtual data set over the shards (NaN if a file is missing);
                   pmm3d/manifest and pmm3d/meta, in JSON
checkpoint.crc     the checksums of checkpoint.h5, in JSON

The manifest: {"step": n, "files": {name: checksums}, "matrices": {name: {"shape": [m, n], "dtype": name, "vector":
whether the matrix is one row for all rows of a batch, such as a bias, "shards": [[file, r0, r1, c0, c1], ...]}}}.
Checksums are those of the files, not of the elements, because HDF5 may loop or crash when it opens a damaged file.
bfloat16 is stored as its bits, uint16, with the attribute dtype "bfloat16".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, needs
from ..layout import EMPTY, Box
from ..product import DistMatrix
from .disk import Checksums, checksums, file_errors, sync, verify, written
from .matrices import Described, Matrices, from_stored, row_slices, stored_dtype, stored_rows, to_stored

with needs("io", "checkpoints"):
    import h5py

CHECKPOINT_FILE = "checkpoint.h5"
CHECKSUMS = "checkpoint.crc"
OWN = "pmm3d"
BFLOAT16_NAN = 0x7FC0

Manifest = dict[str, Any]


class Shard(NamedTuple):
    """A shard that this rank writes. rows: returns (first row within the shard, rows in the stored type) of each
    slice."""

    name: str
    dtype: str
    box: Box
    rows: Callable[[], Iterable[tuple[int, np.ndarray]]]


class Written(NamedTuple):
    """The file of a rank: name, checksums, and (name, box) of each shard."""

    file: str
    checksums: Checksums
    shards: list[tuple[str, Box]]


class HostCopies:
    """Copies of shards in host memory. The next copies reuse this memory."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str, tuple[int, int]], np.ndarray] = {}

    def of(self, shards: Iterable[Shard]) -> list[Shard]:
        before, self._arrays, copies = self._arrays, {}, []
        for shard in shards:
            key = shard.name, shard.dtype, shard.box.shape
            array = before.pop(key, None)
            if array is None:
                array = np.empty(shard.box.shape, stored_dtype(shard.dtype))
            self._arrays[key] = array
            for start, rows in shard.rows():
                array[start : start + len(rows)] = rows
            slices = row_slices(array.shape, array.itemsize)  # h5py holds its lock during one slice only
            copies.append(shard._replace(rows=partial(iter, [(start, array[start:stop]) for start, stop in slices])))
        return copies


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """As a context: an HDF5 file for reading, without locks, because some parallel file systems lack them."""
    with file_errors(path, "read"), h5py.File(path, "r", locking=False) as file:
        yield file


def check_names(names: Collection[str]) -> None:
    """Raise CheckpointError unless these names are valid HDF5 data sets and differ from the checkpoint's own."""
    for name in names:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or "\0" in name or parts[0] == OWN:
            raise CheckpointError(
                f"{name!r} cannot name a matrix: parts between / are not empty, not . or .., and the "
                f"first is not {OWN!r}"
            )
        for outer in accumulate(parts[:-1], "{}/{}".format):
            if outer in names:
                raise CheckpointError(
                    f"{outer!r} and {name!r} cannot both name a matrix: HDF5 has no data set within another"
                )


def own_shards(matrices: Matrices) -> list[Shard]:
    """Return the shards that this rank writes. The first rank of the replicas writes a shard."""
    return [
        Shard(name, matrix.dtype, matrix.box, partial(stored_rows, matrix))
        for name, matrix in matrices.items()
        if matrix.box.size and (coords := matrix.grid.coords) and matrix.layout.is_first(coords)
    ]


def write_shards(path: Path, shards: list[Shard]) -> Written | None:
    """Write the shards to a new file, and fsync it. Return None if there are no shards."""
    if not shards:
        return None
    with written(path) as file:
        for name, dtype, box, rows in shards:
            dataset = file.create_dataset(name, box.shape, stored_dtype(dtype))
            if dtype == "bfloat16":
                dataset.attrs["dtype"] = dtype
            for start, values in rows():
                dataset[start : start + len(values)] = values
    with file_errors(path, "read"):
        return Written(path.name, checksums(path), [(shard.name, shard.box) for shard in shards])


def write_master(
    folder: Path, step: int, described: Mapping[str, Described], files: Iterable[Written | None], meta: str
) -> None:
    """Write the master file and its checksums. Raises CheckpointError if shards of a matrix are missing."""
    there = [file for file in files if file is not None]
    entries: dict[str, Any] = {
        name: {"shape": [*one.shape], "dtype": one.dtype, "vector": one.vector, "shards": []}
        for name, one in described.items()
    }
    for file in there:
        for name, box in file.shards:
            entries[name]["shards"].append([file.file, *box])
    for name, entry in entries.items():
        held = sum(Box(*edges).size for _, *edges in entry["shards"])
        if held != entry["shape"][0] * entry["shape"][1]:
            raise CheckpointError(f"{name!r} is {entry['shape']}; its shards have {held} elements")
    manifest = {"step": step, "files": {file.file: file.checksums for file in there}, "matrices": entries}
    with written(folder / CHECKPOINT_FILE) as master:
        for name, entry in entries.items():
            _add_virtual_dataset(master, name, entry)
        master[f"{OWN}/manifest"], master[f"{OWN}/meta"] = json.dumps(manifest), meta
    with file_errors(folder / CHECKSUMS, "written"):
        (folder / CHECKSUMS).write_text(json.dumps(checksums(folder / CHECKPOINT_FILE)))
        sync(folder / CHECKSUMS)


def _add_virtual_dataset(file: h5py.File, name: str, entry: dict[str, Any]) -> None:
    dtype, stored = entry["dtype"], stored_dtype(entry["dtype"])
    virtual = h5py.VirtualLayout(tuple(entry["shape"]), stored)
    for source, *edges in entry["shards"]:
        box = Box(*edges)
        virtual[box.within(EMPTY)] = h5py.VirtualSource(source, name, box.shape, stored)
    missing = BFLOAT16_NAN if dtype == "bfloat16" else 0 if stored.kind in "iu" else np.nan
    dataset = file.create_virtual_dataset(name, virtual, fillvalue=stored.type(missing))
    if dtype == "bfloat16":
        dataset.attrs["dtype"] = dtype


def read_master(folder: Path) -> tuple[Manifest, Any]:
    """Verify the checksums of the master file, and return manifest and meta. Raises CheckpointError."""
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {CHECKPOINT_FILE}")
    with file_errors(folder / CHECKSUMS, "read"):
        verify(folder, {CHECKPOINT_FILE: json.loads((folder / CHECKSUMS).read_bytes())})
    with _opened(path) as file:
        return json.loads(file[f"{OWN}/manifest"][()]), json.loads(file[f"{OWN}/meta"][()])


def fill(folder: Path, manifest: Manifest, matrices: Matrices) -> None:
    """Fill this rank's shards of the matrices from all stored shards that overlap them. Each file is opened once. For
    matrices of partial sums, the first rank keeps the values, and the others become zero."""
    stored = sorted(
        (file, name, Box(*edges)) for name in matrices for file, *edges in manifest["matrices"][name]["shards"]
    )
    wanted = [(file, name, box) for file, name, box in stored if (box & matrices[name].box).size]
    for file_name, group in groupby(wanted, key=lambda each: each[0]):
        with _opened(folder / file_name) as file:
            for _, name, box in group:
                _fill_piece(file[name], box, box & matrices[name].box, matrices[name])
                matrices[name]._filled()
    for matrix in matrices.values():
        matrix._zero_unless_first()


def _fill_piece(dataset: h5py.Dataset, origin: Box, piece: Box, matrix: DistMatrix) -> None:
    """Read a piece of this rank's shard from a data set with the box `origin`. It is read directly into the shard if
    that is C-contiguous host memory, else in slices of rows through a buffer."""
    box, library = matrix.box, matrix.library
    if library.on_host and (host := to_stored(library, matrix.local)).flags.c_contiguous:
        dataset.read_direct(host, piece.within(origin), piece.within(box))
        return
    slices = row_slices(piece.shape, dataset.dtype.itemsize)
    buffer = np.empty((slices[0][1], piece.shape[1]), dataset.dtype)
    for start, stop in slices:
        part, rows = piece._replace(r0=piece.r0 + start, r1=piece.r0 + stop), buffer[: stop - start]
        dataset.read_direct(rows, part.within(origin))
        matrix.local[part.within(box)] = from_stored(library, rows, matrix.dtype)
        library.synchronize()
