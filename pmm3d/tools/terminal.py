"""Standard streams that accept any text and may be closed, a console as wide as the terminal, errors in one line."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import Pmm3dError, printable
from ..model.environment import JOB_FOLDER, misspelt, task_rank

if TYPE_CHECKING:
    from rich.console import Console


FIRST_RANK_SECONDS = 1.0
"""Seconds that rank 0 has to print an error before MPI is started. mpiexec ends all ranks when one has failed."""


JOINT = "\ue000"
"""A character of private use: a blank at which no line is broken."""
IN_BOTH_WORDS = re.compile(r"""\w+=(?:'[^']*'|"[^"]*"|\[[^]]*\]|\w*) \((--[a-z-]+(?:\ (?:'[^']*'|[^\s()]+))?)\)""")
"""A keyword argument and, in parentheses, the same option of a command: `header=True (--header)`."""
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i)?B\b|[mµu]?s\b|min\b|h\b|[GTP]FLOP/s|GB/s)")


class Stream(io.TextIOWrapper):
    """A standard stream. Characters that its encoding lacks are escaped. After an error, further output is lost.

    If standard output cannot be written, for example to a full disk, the first error is a Pmm3dError. No error is
    raised if its reader has ended, or if standard error cannot be written.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self.fileno() == 1 and not isinstance(error, BrokenPipeError):
            raise Pmm3dError(
                f"standard output cannot be written: {error.strerror}. Redirect it to a file on a disk that has room"
            ) from None


def make_streams_safe() -> None:
    """Replace the standard streams by objects of class `Stream`, and open closed ones.

    Otherwise a file that is opened later would get the descriptor of a closed stream, and MPI would write output to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if old is None:
            made = Stream(open(number, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        else:
            encoding, by_line = old.encoding, old.line_buffering
            made = Stream(old.detach(), encoding, "backslashreplace", line_buffering=by_line)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def check_surroundings(program: str) -> None:
    """Raise Pmm3dError if the working folder was removed. Print a note about misspelt variables of the environment.

    The launcher prints the note for its ranks.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise Pmm3dError(
            f"the working folder cannot be used: {error.strerror}. It may have been removed: change to a "
            "folder that exists"
        ) from None
    if (note := misspelt(os.environ)) and not os.environ.get(JOB_FOLDER):
        print(f"{program}: {note}", file=sys.stderr, flush=True)


def console(stream: TextIO, width: int | None = None) -> Console:
    """Return a console of this width. Default: COLUMNS, which the launcher sets, because ranks may have another
    terminal."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "") if width is None else str(width)
    size: dict[str, Any] = {"width": int(columns), "height": 50} if columns.isdecimal() else {}
    return Console(file=stream, highlight=False, **size)


def headline(error: BaseException) -> str:
    """Return the class of an error and its text, with options of the command in place of keyword arguments."""
    return IN_BOTH_WORDS.sub(r"\1", printable(f"{type(error).__name__}: {error}"))


def complain(error: Pmm3dError) -> None:
    """Print an error in one line on stderr."""
    print(f"pmm3d: {headline(error)}", file=sys.stderr, flush=True)


def let_first_rank_print() -> None:
    """Give rank 0 the time to print an error before this rank ends. Rank 0 itself does not wait."""
    if task_rank(os.environ):
        time.sleep(FIRST_RANK_SECONDS)


def joined(text: str) -> str:
    """Return the text with a `JOINT` between each number and its unit, so that a line does not end between them."""
    return BEFORE_UNIT.sub(JOINT, text)


def say(text: str) -> None:
    """Print a line, with unprintable characters (as in names of files) escaped."""
    print(printable(text), flush=True)
