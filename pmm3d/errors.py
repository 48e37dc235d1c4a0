"""The errors of pmm3d. Each is raised on every rank of the grid, with the same text, unless documented otherwise."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


def printable(text: str) -> str:
    r"""The text, in which characters that are not printable are escaped as in Python, except line ends.

    >>> print(printable("red: \x1b[31m"))
    red: \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in text
    )


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or all of them.

    >>> hint("nestrov", ["momentum", "nesterov"]), hint("learning_rate", ["lr", "eps"])
    (' (did you mean nesterov?)', ' (known there: lr, eps)')
    """
    known = list(known)
    near = get_close_matches(name, known, 1, 0.5)
    return f" (did you mean {near[0]}?)" if near else f" (known there: {', '.join(known)})"


def reason(error: OSError) -> str:
    """Return the end of a message about a file: what the operating system says, and the name of the file.

    >>> reason(FileNotFoundError(errno.ENOENT, "No such file or directory", "x.csv"))
    'no such file or directory (x.csv)'
    """
    if not error.strerror:
        return str(error)
    return error.strerror[:1].lower() + error.strerror[1:] + (f" ({error.filename})" if error.filename else "")


class Pmm3dError(Exception):
    """Base of all errors of the library. Control characters in the text, as in names of files, are printed escaped.

    Attributes
    ----------
    everywhere : bool
        Whether all ranks of a grid raise this error together. `Grid.__exit__` then raises it, and does not end the job.
    """

    everywhere = False

    def __str__(self) -> str:
        return printable(super().__str__())


class GridError(Pmm3dError):
    """The process grid does not fit the communicator, or grids do not belong together."""


class NoGridError(GridError, AttributeError):
    """A part of a network has no grid."""


class LauncherError(GridError):
    """There is no usable mpiexec, or it belongs to another MPI, so it started N separate worlds of one rank."""


class LayoutError(Pmm3dError, ValueError):
    """A layout, a shape or a memory order that the operation cannot take."""


class DTypeError(Pmm3dError, TypeError):
    """An element type that the operation or the array library cannot take, or operands of different types."""


class MemoryLimitError(Pmm3dError, MemoryError):
    """The product cannot be done within `max_workspace` bytes."""


class NotPositiveDefiniteError(Pmm3dError, ArithmeticError):
    """A matrix has no Cholesky factor, because it is not positive definite.

    Attributes
    ----------
    info : int
        Order of the first leading minor that is not positive definite.
    """

    info = 0


class OutOfMemoryError(Pmm3dError, MemoryError):
    """Memory could not be allocated. The text lists the bytes asked for, held, and predicted by the plans.

    Attributes
    ----------
    held : int
        Bytes that the process held; 0 if they are not known.
    """

    held = 0


class DataError(Pmm3dError):
    """A file of samples, or its contents, cannot be used."""


class CheckpointError(Pmm3dError):
    """A checkpoint, or a file of tensors, that cannot be written, cannot be read, or is of another network."""


class DisagreementError(Pmm3dError):
    """The ranks passed different arguments to a collective call, or made different calls. The text lists the ranks."""


class MissingPackageError(Pmm3dError, ImportError):
    """A package that an extra of pmm3d installs is missing on the rank that needs it."""


def check_regular(path: str | os.PathLike[str], open_pipe: bool = False) -> None:
    """Raise OSError if the path exists and is not a regular file: to open a named pipe would block without a message.

    open_pipe   accept a pipe that is already open, such as /dev/stdin, or the shell's <(command)
    """
    if open_pipe and os.path.basename(os.path.realpath(path)).startswith("pipe:["):
        return
    if os.path.exists(path) and not (stat.S_ISREG(mode := os.stat(path).st_mode) or stat.S_ISDIR(mode)):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def check_dataset_name(name: object) -> None:
    """Raise DataError for an invalid name of an HDF5 data set."""
    parts = name.removeprefix("/").split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise DataError(f"{name!r} cannot name a data set: name it with letters, as in x or fields/velocity")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, for pmm3d from a clone and from a wheel.

    >>> install_command("io")
    'pip install "pmm3d[io]"'
    """
    return f'pip install "pmm3d[{extra}]"'


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """As a context around imports: raise MissingPackageError, with the name of the extra, for a missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "pmm3d":
            raise
        raise MissingPackageError(f"{what}: the package {package} is missing. {install_command(extra)}") from None
