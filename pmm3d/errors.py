"""The errors of pmm3d. Each is raised on every rank of the grid, with the same text, unless it says otherwise."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


def printable(text: str) -> str:
    r"""The text with what a terminal would obey, or could not show, escaped as in Python; line ends stay.

        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
                   for sign in text)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or all of them.

        >>> hint("nestrov", ["momentum", "nesterov"]), hint("learning_rate", ["lr", "eps"])
        (' (did you mean nesterov?)', ' (known there: lr, eps)')
    """
    known = list(known)
    near = get_close_matches(name, known, 1, 0.5)
    return f" (did you mean {near[0]}?)" if near else f" (known there: {', '.join(known)})"


class Pmm3dError(Exception):
    """Base of all errors of the library. Names of files and the like are printed escaped.

    everywhere   True once the ranks of a grid have agreed to raise this error together; `Grid.__exit__` then lets it
                 through instead of ending the job.
    """

    everywhere = False

    def __str__(self) -> str:
        return printable(super().__str__())


class GridError(Pmm3dError):
    """The process grid does not fit the communicator, or grids do not belong together."""


class NoGridError(GridError, AttributeError):
    """A part of a network that does not say on which grid it is."""


class LauncherError(GridError):
    """There is no usable mpiexec, or it belongs to another MPI: it started N separate worlds of one rank."""


class LayoutError(Pmm3dError, ValueError):
    """A layout, a shape or a memory order that the operation cannot take."""


class DTypeError(Pmm3dError, TypeError):
    """An element type that the operation or the array library cannot take, or operands of different types."""


class MemoryLimitError(Pmm3dError, MemoryError):
    """The product cannot be done within `max_workspace` bytes."""


class OutOfMemoryError(Pmm3dError, MemoryError):
    """Memory could not be had. The text says what was asked for, what is held, and what the plans had predicted.

    held   bytes that the process held; 0 if that is not known
    """

    held = 0


class DataError(Pmm3dError):
    """A file of samples, or what it holds, that cannot be used."""


class CheckpointError(Pmm3dError):
    """A checkpoint, or a file of tensors, that cannot be written, cannot be read, or is of another network."""


class DisagreementError(Pmm3dError):
    """The ranks passed different arguments to a collective call, or made different calls. The text lists who did."""


class MissingPackageError(Pmm3dError, ImportError):
    """A package that an extra of pmm3d installs is not there. On the rank that needs it."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError for what is there and is no regular file: to open a named pipe waits for ever, silently."""
    if os.path.exists(path) and not (stat.S_ISREG(mode := os.stat(path).st_mode) or stat.S_ISDIR(mode)):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def check_dataset_name(name: object) -> None:
    """Raises DataError for what HDF5 cannot create a data set by."""
    parts = name.removeprefix("/").split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise DataError(f"{name!r} cannot name a data set: name it with letters, as in x or fields/velocity")


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """As a context around imports: a package that is missing is a MissingPackageError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "pmm3d":
            raise
        remedy = f'pip install ".[{extra}]" in the clone of pmm3d'
        raise MissingPackageError(f"{what}: the package {package} is missing. {remedy}") from None
