"""What checkpoints and tensor files share: elements as files hold them, writes that last, errors on all ranks."""

from __future__ import annotations

import os
import zlib
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import CheckpointError, Pmm3dError
from ..product import DistMatrix

SLICE = 2**23
"""Bytes that are copied, hashed and written at a time."""
CHUNK = 2**26
"""Bytes of a file that have a checksum of their own, so that many ranks can verify one file."""


def stored_dtype(dtype: str) -> np.dtype:
    """The type in a file: that of the matrix, and uint16 for the bits of bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def to_stored(library, array) -> np.ndarray:
    """An array as numpy's, in the stored type: a view of host memory, a copy of a device's."""
    if library.dtype(array) == "bfloat16":
        return array.detach().cpu().view(library.xp.int16).numpy().view(np.uint16)
    return library.to_numpy(array)


def from_stored(library, host: np.ndarray, dtype: str):
    """An array of that library from numpy's in the stored type; a view where the library can."""
    if dtype == "bfloat16":
        bits = library.xp.from_numpy(host.view(np.int16))
        return bits.view(library.xp.bfloat16).to(library.device)
    return library.from_numpy(host, dtype)


def row_slices(shape, itemsize: int):
    """(start, stop) of consecutive rows, of about SLICE bytes and at least one row each."""
    rows, cols = shape
    step = max(1, SLICE // max(1, cols * itemsize))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def rows_of(matrix: DistMatrix):
    """(first row within the local block, C-contiguous rows in the stored type), slice after slice."""
    itemsize = stored_dtype(matrix.dtype).itemsize
    for start, stop in row_slices(matrix.box.shape, itemsize):
        yield start, np.ascontiguousarray(to_stored(matrix.library, matrix.local[start:stop]))


class Chunk(NamedTuple):
    """CHUNK bytes of a file of `size` bytes, from index * CHUNK on, or what there is to its end."""

    file: str
    size: int
    index: int
    crc: int

    @property
    def nbytes(self) -> int:
        return min(CHUNK, self.size - self.index * CHUNK)


def checksums(path: Path) -> dict:
    """{"bytes": size, "crc32": [of each CHUNK of a file]}."""
    size, buffer = path.stat().st_size, bytearray(SLICE)
    with open(path, "rb", buffering=0) as file:
        return {"bytes": size, "crc32": [_crc(file, index, buffer) for index in range(-(-size // CHUNK))]}


def _crc(file, index: int, buffer: bytearray) -> int:
    crc, rest, view = 0, CHUNK, memoryview(buffer)
    file.seek(index * CHUNK)
    while rest and (count := file.readinto(view[:rest])):
        crc, rest = zlib.crc32(view[:count], crc), rest - count
    return crc


def verify(folder: Path, chunks) -> None:
    """Read chunks of files, sorted by file, and compare. Raises CheckpointError, naming the file, where one differs."""
    buffer = bytearray(SLICE)
    for name, group in groupby(chunks, key=lambda chunk: chunk.file):
        path = folder / name
        with naming(path, "read"), open(path, "rb", buffering=0) as file:
            for chunk in group:
                size = os.fstat(file.fileno()).st_size
                if size != chunk.size:
                    raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, not {chunk.size:,}")
                if _crc(file, chunk.index, buffer) != chunk.crc:
                    raise CheckpointError(f"{path} is damaged: its checksum is wrong in the {CHUNK:,} bytes from byte "
                                          f"{chunk.index * CHUNK:,} on")


def share(chunks, rank: int, size: int) -> list:
    """A rank's share of the chunks: consecutive ones, each rank about as many bytes."""
    ends = list(accumulate(chunk.nbytes for chunk in chunks))
    return [chunk for chunk, end in zip(chunks, ends) if (2 * end - chunk.nbytes) * size // (2 * ends[-1]) == rank]


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def agreed(grid, what: str, *arguments):
    """`Grid.together`, on grids that do not check too: ranks must not differ over whether a file is whole."""
    return grid.together(what, *arguments, always=True)


@contextmanager
def naming(path: Path, doing: str):
    """What goes wrong with a file becomes a CheckpointError that names it."""
    try:
        yield
    except Pmm3dError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing") from error
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path} cannot be {doing}: {text}") from error


def check_matrices(grid, matrices) -> None:
    """Raise CheckpointError unless these are named DistMatrix over the processes of the grid."""
    for name, matrix in matrices.items():
        if not isinstance(name, str) or not isinstance(matrix, DistMatrix):
            raise CheckpointError(f"{name!r}: matrices are DistMatrix by name; got a {type(matrix).__name__}")
        if MPI.Comm.Compare(matrix.grid.comm, grid.comm) not in (MPI.IDENT, MPI.CONGRUENT):
            raise CheckpointError(f"{name!r} lives on a grid over other processes, or in another order")


def check_writable(matrices) -> None:
    for name, matrix in matrices.items():
        if not matrix.library.writable(matrix.local):
            raise CheckpointError(f"{name!r} cannot be filled: its block is read-only, or a tensor with a gradient")


def described(matrix: DistMatrix) -> str:
    return f"{matrix.shape[0]} x {matrix.shape[1]} {matrix.dtype}"


def some(items, limit: int = 4) -> str:
    """The first few, and how many more."""
    items = list(items)
    more = f" (and {len(items) - limit} more)" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
