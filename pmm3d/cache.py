"""Files of results in the user's cache folder, one for each key."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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
    """Return the text of a file. Raises OSError, or ValueError if it is not text. The caller compares the key that the
    text contains, because two keys may have one digest."""
    check_regular(path)
    return path.read_text(encoding="utf-8")


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
