"""The files of one checkpoint: each rank's shards, the master that shows them whole, the manifest. No messages.

rank-00003.h5      the shards that rank 3 wrote, under the names of their matrices
blocks.h5          instead of those, with parallel HDF5: each matrix whole
checkpoint.h5      each matrix whole, under its name: a virtual data set over the shards (NaN where a file is missing);
                   pmm3d/manifest and pmm3d/meta, JSON
checkpoint.crc     the checksums of checkpoint.h5, JSON

`pmm3d.io.manifest` has the manifest. Checksums are of the files, not of the elements, as HDF5 may loop or crash on a
damaged file and so must not open one. What links, external storage or virtual data sets lead to is not read.
bfloat16 is stored as its bits, uint16, with the attribute dtype "bfloat16".
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import CheckpointError, needs
from ..layout import EMPTY, Box
from ..product import DistMatrix
from .disk import Checksums, checksums, file_errors, sync, verify, written
from .manifest import Manifest, checked_manifest, checked_sums, parsed
from .matrices import Matrices, from_stored, row_slices, stored_dtype, stored_rows, to_stored

with needs("io", "checkpoints"):
    import h5py

CHECKPOINT_FILE = "checkpoint.h5"
CHECKSUMS = "checkpoint.crc"
TOGETHER = "blocks.h5"
OWN = "pmm3d"
BFLOAT16_NAN = 0x7FC0


class Shard(NamedTuple):
    """A shard of a matrix in a file of a checkpoint."""

    file: str
    name: str
    box: Box


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file to read, without locks, which some parallel file systems lack."""
    with file_errors(path, "read"), h5py.File(path, "r", locking=False) as file:
        yield file


def check_names(names: Collection[str]) -> None:
    """Raises CheckpointError unless HDF5 can hold data sets of all these names, beside the checkpoint's own."""
    for name in names:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or "\0" in name or parts[0] == OWN:
            raise CheckpointError(f"{name!r} cannot name a matrix: parts between / are not empty, not . or .., and the "
                                  f"first is not {OWN!r}")
        for outer in accumulate(parts[:-1], "{}/{}".format):
            if outer in names:
                raise CheckpointError(f"{outer!r} and {name!r} cannot both name a matrix: HDF5 has no data set within "
                                      "another")


def write_shards(folder: Path, comm: MPI.Intracomm, matrices: Matrices) -> list[Shard]:
    """Write this rank's shards, of replicas the first one: into a file of its own, or, collectively, all ranks into
    one where HDF5 is parallel. Returns them."""
    mine = {name: matrix for name, matrix in matrices.items()
            if matrix.box.size and (coords := matrix.grid.coords) and matrix.layout.is_first(coords)}
    together = h5py.get_config().mpi
    path = folder / (TOGETHER if together else f"rank-{comm.rank:05d}.h5")
    if together:
        with file_errors(path, "written"):
            with h5py.File(path, "w", driver="mpio", comm=comm) as file:
                datasets = {name: _create(file, name, matrices[name].shape, matrices[name].dtype)
                            for name in sorted(matrices)}
                for name, matrix in mine.items():
                    _write_rows(datasets[name], matrix, matrix.box)
            sync(path)
    elif mine:
        with written(path) as file:
            for name, matrix in mine.items():
                _write_rows(_create(file, name, matrix.box.shape, matrix.dtype), matrix, EMPTY)
    return [Shard(path.name, name, matrix.box) for name, matrix in mine.items()]


def _create(file: h5py.File, name: str, shape: tuple[int, int], dtype: str) -> h5py.Dataset:
    dataset = file.create_dataset(name, shape, stored_dtype(dtype))
    if dtype == "bfloat16":
        dataset.attrs["dtype"] = dtype
    return dataset


def _write_rows(dataset: h5py.Dataset, matrix: DistMatrix, box: Box) -> None:
    """Write this rank's shard to where the box begins."""
    for start, rows in stored_rows(matrix):
        dataset[box.r0 + start : box.r0 + start + len(rows), box.c0 : box.c0 + rows.shape[1]] = rows


def manifest_of(step: int, matrices: Matrices, shards: Iterable[Shard], files: dict[str, Checksums]) -> Manifest:
    """The manifest from all ranks' shards. Raises CheckpointError if they are not all of each matrix."""
    entries: dict[str, Any] = {name: {"shape": list(matrix.shape), "dtype": matrix.dtype,
                                      "vector": matrix.shape[0] == 1 and not matrix.layout.rows, "shards": []}
                               for name, matrix in matrices.items()}
    for shard in shards:
        entries[shard.name]["shards"].append([shard.file, *shard.box])
    for name, matrix in matrices.items():
        held = sum(Box(*box).size for _, *box in entries[name]["shards"])
        if held != matrix.shape[0] * matrix.shape[1]:
            raise CheckpointError(f"{name!r} is {matrix.shape}; its shards have {held} elements")
    return {"step": step, "files": files, "matrices": entries}


def write_master(folder: Path, manifest: Manifest, meta: str) -> None:
    """Write the master and its checksums."""
    with written(folder / CHECKPOINT_FILE) as file:
        for name, entry in manifest["matrices"].items():
            _show_whole(file, name, entry["shape"], entry["dtype"], entry["shards"])
        file[f"{OWN}/manifest"], file[f"{OWN}/meta"] = json.dumps(manifest), meta
    with file_errors(folder / CHECKSUMS, "written"):
        (folder / CHECKSUMS).write_text(json.dumps(checksums(folder / CHECKPOINT_FILE)))
        sync(folder / CHECKSUMS)


def _show_whole(file: h5py.File, name: str, shape: list[int], dtype: str, shards: list[list[Any]]) -> None:
    stored = stored_dtype(dtype)
    virtual = h5py.VirtualLayout(tuple(shape), stored)
    for source, *edges in shards:
        box = Box(*edges)
        whole = h5py.VirtualSource(source, name, tuple(shape) if source == TOGETHER else box.shape, stored)
        virtual[box.within(EMPTY)] = whole[box.within(EMPTY)] if source == TOGETHER else whole
    missing = BFLOAT16_NAN if dtype == "bfloat16" else np.nan
    dataset = file.create_virtual_dataset(name, virtual, fillvalue=stored.type(missing))
    if dtype == "bfloat16":
        dataset.attrs["dtype"] = dtype


def read_master(folder: Path) -> tuple[Manifest, Any]:
    """The manifest and the meta, once the master's checksums are found right. Raises CheckpointError."""
    path = folder / CHECKPOINT_FILE
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {CHECKPOINT_FILE}")
    with file_errors(folder / CHECKSUMS, "read"):
        sums = parsed((folder / CHECKSUMS).read_bytes(), folder / CHECKSUMS)
        verify(folder, checked_sums({CHECKPOINT_FILE: sums}, folder / CHECKSUMS))
    with _opened(path) as file:
        manifest, meta = (parsed(_own(file, f"{OWN}/{name}")[()], path) for name in ("manifest", "meta"))
    return checked_manifest(manifest, path), meta


def _own(file: h5py.File, name: str) -> h5py.Dataset:
    """The data set of that name, which lies in this file itself. Raises CheckpointError."""
    place: Any = file
    for part in name.split("/"):
        linked = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
        place = place[part] if isinstance(linked, h5py.HardLink) else None
    if not isinstance(place, h5py.Dataset) or place.external or place.is_virtual:
        raise CheckpointError(f"{file.filename} is damaged, or not written by pmm3d: {name!r} does not lie in it, or "
                              "is a link, external or virtual, which is not followed. Take another checkpoint")
    return place


def fill(folder: Path, manifest: Manifest, matrices: Matrices) -> None:
    """Fill this rank's shards of the matrices from all stored ones that meet them, each file opened once. Of partial
    sums the first is filled, the others become zero."""
    stored = sorted(Shard(file, name, Box(*edges)) for name in matrices
                    for file, *edges in manifest["matrices"][name]["shards"])
    wanted = [shard for shard in stored if (shard.box & matrices[shard.name].box).size]
    for file_name, group in groupby(wanted, key=lambda shard: shard.file):
        with _opened(folder / file_name) as file:
            for shard in group:
                matrix = matrices[shard.name]
                origin = Box(0, matrix.shape[0], 0, matrix.shape[1]) if file_name == TOGETHER else shard.box
                _fill_piece(_stored(file, shard.name, origin.shape, matrix.dtype), origin, shard.box & matrix.box,
                            matrix)
    for matrix in matrices.values():
        matrix.keep_one()


def _stored(file: h5py.File, name: str, shape: tuple[int, int], dtype: str) -> h5py.Dataset:
    """The data set of a shard, if it is what the manifest says of it."""
    dataset = _own(file, name)
    if (dataset.shape, dataset.dtype) != (shape, stored_dtype(dtype)):
        raise CheckpointError(f"{file.filename} is damaged, or not written by pmm3d: {name!r} is {dataset.shape} "
                              f"{dataset.dtype}, not {shape} {stored_dtype(dtype)}. Take another checkpoint")
    return dataset


def _fill_piece(dataset: h5py.Dataset, origin: Box, piece: Box, matrix: DistMatrix) -> None:
    """Read a piece of this rank's shard from a data set that begins where `origin` does: straight into its memory if
    that is in order, else in slices of rows through one buffer."""
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
