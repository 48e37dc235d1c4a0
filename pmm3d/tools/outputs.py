"""The files that a command writes: tried before its work begins; text also goes to standard output, as "-"."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import Pmm3dError
from .terminal import say

STANDARD_OUTPUT = Path("-")


def check_writable(*paths: Path | None, text: Path | None = None) -> None:
    """Raises Pmm3dError unless files can be written there, each to a place of its own. Changes no file.

    text   a file of text, or "-" for standard output, which then gets nothing else: see `reserve_stdout`
    """
    reserve_stdout(text)
    named = [path for path in (*paths, text) if path is not None and not (path is text and path == STANDARD_OUTPUT)]
    for path in named:
        if reason := _why_not(path):
            raise Pmm3dError(f"cannot write {path}: {reason}. Name a file in a folder that exists and can be written")
    files = [path.resolve() for path in named if path.is_file() or not path.exists()]
    if len(set(files)) < len(files):
        raise Pmm3dError(f"each output needs a file of its own; got {', '.join(map(str, named))}")


def _why_not(path: Path) -> str:
    """In words, or nothing. A pipe without a reader is refused: to open it would wait for ever."""
    if path == STANDARD_OUTPUT:
        return "only --json of a command goes to standard output"
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


def reserve_stdout(path: Path | None) -> None:
    """If the path is "-", send to standard error what the command prints from now on. Its end restores sys.stdout."""
    if path == STANDARD_OUTPUT:
        sys.stdout = sys.stderr


def write_text(path: Path, text: str) -> None:
    """Write a file, or to standard output if the path is "-". Raises Pmm3dError."""
    try:
        if path == STANDARD_OUTPUT:
            print(text, end="" if text.endswith("\n") else "\n", file=sys.__stdout__, flush=True)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Pmm3dError(f"cannot write {path}: {error.strerror}") from None


def say_written(*paths: Path | None) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None and path != STANDARD_OUTPUT:
            say(f"wrote {path}")
