"""Files of checkpoints: written with fsync, verified by checksums, with errors that name the file."""

from __future__ import annotations

import errno
import json
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
"""Bytes of a file per checksum, so that several ranks can verify parts of one file."""
READ_BYTES = 2**23
"""Bytes that are read and hashed at a time."""

REMEDIES = {
    errno.ENOSPC: "make room there, or choose another folder",
    errno.EDQUOT: "your quota there is used up: remove files, or choose another folder",
    errno.EFBIG: "files there may not be that large (ulimit -f, or the file system): use more ranks, or another folder",
    errno.EROFS: "nothing can be written there: choose another folder",
    errno.EACCES: "ask for the right to, or choose another folder",
    errno.EEXIST: "something of that name is in the way (a file, or a link that leads nowhere): move it away",
}
"""What to do about an error of the operating system."""

Checksums = dict[str, Any]
"""Checksums of a file: {"bytes": size, "crc32": [one per chunk]}. The last chunk may be shorter."""


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

    Raises CheckpointError with the name of the file if a file is missing, has another size, or is damaged.
    """
    buffer = bytearray(READ_BYTES)
    for name, pieces in groupby(_share(files, rank, ranks), key=itemgetter(0)):
        path, known = folder / name, files[name]
        with file_errors(path, "read"), open(path, "rb", buffering=0) as file:
            if (size := os.fstat(file.fileno()).st_size) != known["bytes"]:
                raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, not {known['bytes']:,}")
            for _, number in pieces:
                if _crc(file, number, buffer) != known["crc32"][number]:
                    raise CheckpointError(
                        f"{path} is damaged: its checksum is wrong in the {CHUNK:,} bytes from byte "
                        f"{number * CHUNK:,} on"
                    )


def _share(files: Mapping[str, Checksums], rank: int, ranks: int) -> list[tuple[str, int]]:
    """Return (file, number of a chunk) of the chunks for a rank: consecutive chunks, about as many bytes on each
    rank."""
    pieces = [(name, number) for name, known in sorted(files.items()) for number in range(len(known["crc32"]))]
    starts = offsets(min(CHUNK, files[name]["bytes"] - number * CHUNK) for name, number in pieces)
    return [
        piece
        for piece, start, end in zip(pieces, starts, starts[1:])
        if (start + end) * ranks // (2 * starts[-1]) == rank
    ]


def sync(path: Path) -> None:
    """Call fsync for a file, or for the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_file(path: Path) -> BufferedWriter:
    """Create an empty file for writing. A leftover of a crash is removed first; a link is not followed."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError unless the path is free, or is a file or link that may be replaced."""
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists; --overwrite replaces it")
    with file_errors(path, "replaced"):
        check_regular(path)


def replace_file(path: Path, contents: bytes) -> None:
    """Write a file atomically, under a temporary name first. A link at the path is replaced, not followed. Raises
    OSError, and then leaves the old file unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with new_file(temporary) as file:
            file.write(contents)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def json_object(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the object in a JSON file of another program. text: the contents of the file, if they are known. Raises
    CheckpointError for another content."""
    with file_errors(path, "read"):
        contents = json.loads(path.read_text(encoding="utf-8") if text is None else text)
    if not isinstance(contents, dict):
        raise CheckpointError(
            f"{path} contains a {type(contents).__name__}, not keys and values. Copy the file again "
            "from where the network was published"
        )
    return contents


def not_following(path: str, flags: int) -> int:
    """`opener` for open() that raises OSError for a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def written(path: Path) -> Iterator[Any]:
    """As a context: a new h5py.File, which is synced to the disk at the end."""
    from ..product.new_hdf5 import new_hdf5  # imports the matrices, which small files do not need

    with file_errors(path, "written"), new_hdf5(path) as new:
        yield new.file


@contextmanager
def file_errors(path: Path, doing: str) -> Iterator[None]:
    """As a context: convert errors of a file to CheckpointError with the name of the file and a remedy."""
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
