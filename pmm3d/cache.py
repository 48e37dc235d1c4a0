"""Files of results in the user's cache folder, one for each key."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from .errors import check_regular

Key = Mapping[str, str | int]


def folder(name: str) -> Path:
    """Return $XDG_CACHE_HOME/pmm3d/NAME, or ~/.cache/pmm3d/NAME. Raises RuntimeError for users without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "pmm3d" / name


def file_of(name: str, key: Key, suffix: str) -> Path:
    """Return the file of a key in a folder. Raises RuntimeError for users without a home."""
    digest = blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16).hexdigest()
    return folder(name) / f"{digest}{suffix}"


def read(path: Path) -> str:
    """Return the text of a file of this user. The caller compares the key that the text contains, because two keys may
    have one digest.

    Raises OSError if the file cannot be read, or if another user owns it or may write to it: it may name a library to
    load. Raises ValueError if it is not text.
    """
    check_regular(path)
    status = os.stat(path)
    _check_own(path, status)
    return _text(path, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


@lru_cache(maxsize=32)
def _text(path: Path, *identity: int) -> str:
    """Return the text of a file. It is read once for each `identity`: device, inode, size and time of the last
    change."""
    with open(path, encoding="utf-8") as file:
        _check_own(path, os.fstat(file.fileno()))
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _check_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "another user owns the file, or may write to it. Remove it", str(path))


def write(path: Path, text: str) -> Path:
    """Write a file. Readers find the old text or the new text. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path
