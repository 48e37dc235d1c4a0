"""Files of checkpoints on the disk: brought there for sure, verified by checksums, with errors that name them."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, Pmm3dError, check_regular
from ..layout import offsets

CHUNK = 2**26
"""Bytes of a file that have a checksum of their own, so that many ranks can verify one file."""
READ_BYTES = 2**23
"""Bytes that are read and hashed at a time."""

REMEDIES = {
    errno.ENOSPC: "make room there, or choose another folder",
    errno.EDQUOT: "your quota there is used up: remove files, or choose another folder",
    errno.EFBIG: "files there may not be that large (ulimit -f, or the file system): use more ranks, or another folder",
    errno.EROFS: "nothing can be written there: choose another folder",
    errno.EACCES: "ask for the right to, or choose another folder",
    errno.EEXIST: "something of that name is in the way (a file, or a link that leads nowhere): move it away"}
"""What to do about an error of the operating system."""

Checksums = dict[str, Any]
"""Of a file: {"bytes": its size, "crc32": [of each chunk]}; the last chunk has what is left."""


def checksums(path: Path) -> Checksums:
    check_regular(path)
    with open(path, "rb", buffering=0) as file:
        size, buffer = os.fstat(file.fileno()).st_size, bytearray(READ_BYTES)
        return {"bytes": size, "crc32": [_crc(file, number, buffer) for number in range(-(-size // CHUNK))]}


def _crc(file: FileIO, number: int, buffer: bytearray) -> int:
    crc, rest, view = 0, CHUNK, memoryview(buffer)
    file.seek(number * CHUNK)
    while rest and (count := file.readinto(view[:rest])):
        crc, rest = zlib.crc32(view[:count], crc), rest - count
    return crc


def verify(folder: Path, files: Mapping[str, Checksums], rank: int = 0, ranks: int = 1) -> None:
    """Read a rank's share of the files and compare it with their checksums.

    Raises CheckpointError, naming the file, where one is missing, of another size, or damaged.
    """
    buffer = bytearray(READ_BYTES)
    for name, pieces in groupby(_share(files, rank, ranks), key=itemgetter(0)):
        path, known = folder / name, files[name]
        with file_errors(path, "read"), open(path, "rb", buffering=0) as file:
            if (size := os.fstat(file.fileno()).st_size) != known["bytes"]:
                raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, not {known['bytes']:,}")
            for _, number in pieces:
                if _crc(file, number, buffer) != known["crc32"][number]:
                    raise CheckpointError(f"{path} is damaged: its checksum is wrong in the {CHUNK:,} bytes from byte "
                                          f"{number * CHUNK:,} on")


def _share(files: Mapping[str, Checksums], rank: int, ranks: int) -> list[tuple[str, int]]:
    """(file, number of a chunk) for a rank to read: consecutive ones, each rank about as many bytes."""
    pieces = [(name, number) for name, known in sorted(files.items()) for number in range(len(known["crc32"]))]
    starts = offsets(min(CHUNK, files[name]["bytes"] - number * CHUNK) for name, number in pieces)
    return [piece for piece, start, end in zip(pieces, starts, starts[1:])
            if (start + end) * ranks // (2 * starts[-1]) == rank]


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_file(path: Path) -> BufferedWriter:
    """An empty file to write, in place of what a crash left under that name; a link there is not followed."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raises CheckpointError unless nothing is there, or a file or link that may be replaced."""
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists; --overwrite replaces it")
    with file_errors(path, "replaced"):
        check_regular(path)


def replace_file(path: Path, contents: bytes) -> None:
    """Write a file as a whole: under another name first. A link in its place is replaced, not followed. Raises
    OSError; what was there is there then."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with new_file(temporary) as file:
            file.write(contents)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def not_following(path: str, flags: int) -> int:
    """An `opener` for open() that refuses a symbolic link (OSError)."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def written(path: Path) -> Iterator[Any]:
    """A new HDF5 file, an h5py.File, that is on the disk when the body is done."""
    from ..product.new_hdf5 import new_hdf5  # loads matrices, which small files do not need

    with file_errors(path, "written"), new_hdf5(path) as new:
        yield new.file


@contextmanager
def file_errors(path: Path, doing: str) -> Iterator[None]:
    """What goes wrong with a file in this context becomes a CheckpointError that names it."""
    try:
        if doing == "read":
            check_regular(path)
        yield
    except Pmm3dError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing") from error
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        remedy = f"; {REMEDIES[number]}" if number in REMEDIES else ""
        raise CheckpointError(f"{path} cannot be {doing}: {text}{remedy}") from error
