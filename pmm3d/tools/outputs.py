"""The files that a command is to write, looked at before its work begins."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Pmm3dError


def check_writable(*paths: Path | None) -> None:
    """Raises Pmm3dError unless files can be written there, each to a place of its own. Changes nothing."""
    named = [path for path in paths if path is not None]
    for path in named:
        if reason := _why_not(path):
            raise Pmm3dError(f"cannot write {path}: {reason}. Name a file in a folder that exists and can be written")
    files = [path.resolve() for path in named if path.is_file() or not path.exists()]
    if len(set(files)) < len(files):
        raise Pmm3dError(f"each output needs a file of its own; got {', '.join(map(str, named))}")


def _why_not(path: Path) -> str:
    """In words, or nothing. A pipe without a reader is refused: to open it would wait for ever."""
    there = os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
        if not there:
            path.unlink()
    except FileNotFoundError:
        return f"there is no folder {path.parent.absolute()}"
    except IsADirectoryError:
        return "it is a folder"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""
